"""The sentences that a comparison opens with: who is best, by how much, and what cannot be told."""

import pytest

from cpt.reporting.comparison import findings
from cpt.reporting.comparison.notes import notes
from tests.support.comparing import NLL, run, section


def lines(*runs, **how):
    return list(findings.build_findings(section(runs, **how)).lines)


def several(method, *, shifts, **given):
    """Runs of a method, a seed for each shift of its last row."""
    return [run(method=method, seed=seed, shift=shift, **given) for seed, shift in enumerate(shifts)]


NOISE = [0.001 * (place % 4) for place in range(9)]


def begins(told, start):
    (line,) = [line for line in told if line.startswith(start)]
    return line


def test_the_best_is_named_with_its_interval_and_its_lead():
    better = [-0.2 + 3 * noise for noise in NOISE]
    told = lines(*several("ncl", shifts=NOISE), *several("das", shifts=better))
    forgets = begins(told, "Forgets least: `das`, FG")
    assert " nats (runs: 9); -0.19" in forgets
    assert "against ncl, p 0.0039, Holm 0.0039, paired t 9.6e-17, Holm 9.6e-17 (9 pairs)" in forgets
    assert forgets.endswith("Told apart from all 1 others (Holm p < 0.05).")
    assert begins(told, "Best average at the end: `das`, LC")
    assert told[-1] == findings.HOW


def test_what_cannot_be_told_apart_is_named_and_why():
    told = lines(
        *several("ncl", shifts=[0.0, 0.01, 0.02]),
        *several("das", shifts=[-0.2, -0.19, -0.17]),
        *several("kd", shifts=[-0.19, -0.2, -0.16]),
    )
    forgets = begins(told, "Forgets least: `das`")
    assert "The paired intervals exclude 0 against all 2 others but kd; the test cannot confirm" in forgets
    assert forgets.endswith("(3 pairs: no p below 0.25; Holm over 2 needs 7 pairs).")


def test_some_are_told_apart_and_others_are_not():
    same = [-0.2 + noise * (-1) ** place for place, noise in enumerate(NOISE)]
    told = lines(
        *several("ncl", shifts=NOISE),
        *several("das", shifts=[-0.2] * 9),
        *several("kd", shifts=same),
    )
    best = begins(told, "Forgets least")
    assert "Not told apart from 1 of 2 others (Holm p ≥ 0.05): " in best
    assert "ncl" not in best.split("0.05): ")[1]


def test_one_run_has_no_interval_and_no_test():
    told = begins(lines(run(), run(method="das", shift=-0.1)), "Forgets least: `das`")
    assert "(runs: 1, no interval)" in told
    assert told.endswith("Not told apart from the 1 others by 1 pair: Holm over 1 needs 6 pairs.")


def test_two_pairs_have_no_interval_and_tell_nothing_apart():
    told = lines(*several("ncl", shifts=[0.0, 0.01]), *several("das", shifts=[-0.2, -0.21]))
    assert not any("exclude 0" in line or "[" in line for line in told[:-1])
    forgets = begins(told, "Forgets least: `das`, FG")
    assert "p 0.5, Holm 0.5 (2 pairs). Not told apart from the 1 others by 2 pairs" in forgets


def test_who_is_given_the_domain_and_who_is_best_without_it():
    runs = [
        *several("demix", shifts=[-0.5, -0.4, -0.5]),
        *several("ewc", shifts=[-0.1, -0.2, -0.2]),
        *several("ncl", shifts=[0.0, 0.1, 0.2]),
    ]
    for each in runs[:3]:
        each.scores.needs_domain = True
    told = lines(*runs)
    assert begins(told, "Forgets least: `demix`")
    assert "Given the domain of a text at test time: demix." in told
    assert begins(told, "Forgets least without it: `ewc`, FG")
    assert "Given the domain of a text at test time: demix." in notes(section(runs))
    assert not any("Given the domain" in line for line in lines(*runs[3:]))


def test_higher_is_better_where_it_is():
    def tasked(method, value):
        from tests.support.comparing import endtasks

        given = endtasks([[None] * 3, [None] * 3, [None] * 3, [value] * 3])
        return run(method=method, endtasks=given)

    assert begins(lines(tasked("ncl", 0.3), tasked("das", 0.6)), "Best end tasks: `das`, MF1 (%) 60.00")


def test_equal_compute_leaves_out_what_took_more():
    def costing(method, flops, shift):
        return run(method=method, shift=shift, flops=[0, flops, flops, flops])

    runs = [costing("ncl", 1000, 0.0), costing("das", 3000, -0.5), costing("ewc", 1050, -0.1)]
    told = begins(lines(*runs), "Best at equal compute")
    assert told.startswith("Best at equal compute (at most 1.1 times ncl's FLOPs, 2 groups): `ewc`, LC")
    uncounted = [run(costs=False), run(method="das", costs=False)]
    assert "not known, ncl has no counted FLOPs" in begins(lines(*uncounted), "Best at equal compute")


def test_references_without_a_sequence_are_never_the_best():
    joint = run(method="joint", nll=[NLL[0], [0.1] * 4], rows=["base", "joint"])
    told = lines(run(), run(method="das"), run(method="one", shift=-3), joint)
    assert not any("`joint`," in line or "`one`," in line for line in told[:-1])


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_said_of_fewer_than_two(count):
    runs = [run(method="joint", nll=[NLL[0], NLL[3]], rows=["base", "joint"]), *[run()] * count]
    assert lines(*runs) == []
