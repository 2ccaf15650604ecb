"""Runs are found, filtered, measured and grouped as what was chosen says, and compared in pairs."""

import json
import math

import numpy as np
import pytest
from pandas import DataFrame

from cpt.evaluation.pairs import least_p
from cpt.evaluation.statistics import Difference
from cpt.reporting.comparison.differences import contrasts, correct_holm, on_examples, rank_groups
from cpt.reporting.comparison.groups import differing, order_names, sections
from cpt.reporting.comparison.measures import COMPARED, MEASURES, format_spread, spread_values
from cpt.reporting.comparison.notes import notes
from cpt.reporting.comparison.restricted import metrics_on
from cpt.reporting.comparison.runs import (
    check_domains,
    filter_runs,
    find_begun,
    find_runs,
    measure_runs,
    parse_filters,
)
from cpt.reporting.marks import own_place
from tests.support.comparing import CONDITIONS, DOMAINS, NLL, endtasks, made, run, saved, section

LC, FG = MEASURES[0], next(measure for measure in MEASURES if measure.key == "FG/nats")


def names(runs, **options):
    return [group.name for group in section(runs, **options).groups]


def seeds(shifts, **given):
    return [run(f"{given.get('method', 'ncl')}-{i}", seed=i, shift=x, **given) for i, x in enumerate(shifts)]


# --- finding


def test_runs_are_found_at_any_depth_once(tmp_path):
    saved(tmp_path / "a" / "deep" / "1")
    saved(tmp_path / "b")
    runs, damaged = find_runs([tmp_path, tmp_path / "a", tmp_path / "b" / ".." / "a"])
    assert sorted(path.name for path in runs) == ["1", "b"]
    assert damaged == []


def test_what_cannot_be_read_is_named(tmp_path):
    saved(tmp_path / "good")
    saved(tmp_path / "odd", endtasks=endtasks([[0.5] * 3] * 4))
    odd = tmp_path / "odd" / "scores.json"
    odd.write_text(odd.read_text().replace('"seeds": [7, 8]', '"seeds": [7]'))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.json").write_text('{"version": 3, "dom')
    runs, damaged = find_runs([tmp_path, tmp_path / "nowhere"])
    assert [path.name for path in runs] == ["good"]
    assert len(damaged) == 3
    assert all(any(each in line for line in damaged) for each in ("nowhere: no such", "bad", "odd"))


def test_a_folder_that_was_only_begun(tmp_path):
    saved(tmp_path / "good", config={"seed": 0})
    for name in ("begun", "good/wandb/run", "good/rebuilt/x", ".hydra"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("seed: 0\n")
    assert [path.name for path in find_begun([tmp_path])] == ["begun"]


# --- filters


def test_filters():
    runs = [
        run(method=m, seed=s, variant=v) for m in ("ncl", "das") for s in (0, 1) for v in ("", "a=1; b=[x,y]")
    ]
    assert len(filter_runs(runs, where={})) == 8
    assert {each.told("method") for each in filter_runs(runs, where=parse_filters(["method=das"]))} == {"das"}
    assert len(filter_runs(runs, where=parse_filters(["method=das,ncl", "seed=1"]))) == 4
    assert len(filter_runs(runs, where=parse_filters(["variant=a=1; b=[x,y]"]))) == 4
    assert len(filter_runs(runs, where=parse_filters(["variant=b=[x,y]"]))) == 4


def test_an_order_is_filtered_by_its_name_or_its_domains(tmp_path):
    saved(tmp_path / "0", config={"order": 0})
    saved(tmp_path / "1", config={"order": "reverse"}, order=DOMAINS[::-1])
    runs = [run(folder) for folder in (tmp_path / "0",)] + [run(tmp_path / "1", order=DOMAINS[::-1])]
    assert [each.folder.name for each in filter_runs(runs, where={"order": "reverse"})] == ["1"]
    assert [each.folder.name for each in filter_runs(runs, where={"order": "law,food,space"})] == ["0"]
    assert order_names(runs) == {tuple(DOMAINS): "0", tuple(DOMAINS[::-1]): "reverse"}


def test_one_name_for_several_orders_is_numbered(tmp_path):
    orders = [DOMAINS, DOMAINS[::-1]]
    for place, order in enumerate(orders):
        saved(tmp_path / str(place), config={"order": "random"}, order=order)
    runs = [run(tmp_path / str(place), order=order) for place, order in enumerate(orders)]
    assert sorted(order_names(runs).values()) == ["random #1", "random #2"]


@pytest.mark.parametrize("words", [["speed=1"], ["method"], ["method="]])
def test_an_unknown_filter_says_what_is_allowed(words):
    with pytest.raises(ValueError, match="allowed: KEY=VALUE.*method, mask, replay"):
        parse_filters(words)


def test_a_filter_of_which_there_is_no_run():
    runs = [run(method="ncl", seed=0), run(method="das", seed=1)]
    with pytest.raises(ValueError, match="method=ewc; there is: das, ncl"):
        filter_runs(runs, where={"method": "das,ewc"})
    with pytest.raises(ValueError, match="no run has all"):
        filter_runs(runs, where={"method": "das", "seed": "0"})
    with pytest.raises(ValueError, match="--domains sea; there is: food, law, space"):
        check_domains(["law", "sea"], runs=runs)


# --- measurements


def test_metrics_on_some_domains():
    nll = np.array(NLL)
    told = {name: units["nats"] for name, units in metrics_on(made(), {"law", "food"}).items()}
    assert told["LC"] == pytest.approx((nll[3, 0] + nll[3, 1]) / 2)
    assert told["CPT"] == pytest.approx((nll[1, 0] + nll[2, 1]) / 2)
    assert told["FG"] == pytest.approx((nll[3, 0] - nll[1, 0] + nll[3, 1] - nll[2, 1]) / 2)
    assert told["BWT_zs"] == pytest.approx((nll[0, 0] - nll[3, 0] + nll[0, 1] - nll[3, 1]) / 2)
    assert told["FWT_zs"] == pytest.approx(nll[0, 1] - nll[1, 1])
    assert told["general_drift"] == pytest.approx(nll[3, 3] - nll[0, 3])
    assert not {"FG_max", "FWT_gem"} & set(told)
    last = {name: units["nats"] for name, units in metrics_on(made(), {"law", "space"}).items()}
    assert last["FG"] == pytest.approx(nll[3, 0] - nll[1, 0])  # the last domain is not forgotten
    assert last["LC"] == pytest.approx((nll[3, 0] + nll[3, 2]) / 2)


def test_metrics_on_all_domains_are_the_metrics():
    scores = made()
    for name, units in metrics_on(scores, set(DOMAINS)).items():
        for unit, value in units.items():
            assert value == pytest.approx(scores.metrics[name][unit]), (name, unit)


def test_a_run_on_a_mixture_has_the_metrics_of_its_last_row():
    joint = made(nll=[NLL[0], NLL[3]], rows=["base", "joint"], method="joint")
    assert set(metrics_on(joint, {"law"})) == {"ZS", "LC", "general_drift"}


def test_measurements_on_domains_leave_out_other_runs_and_tasks():
    given = endtasks([[0.1, 0.2, 0.3]] * 4)
    runs = [run(endtasks=given), run(order=["sea", "sky"], nll=[row[:3] for row in NLL[:3]])]
    (only,) = measure_runs(runs, domains=["law", "space"])
    assert {key for key in only.values if key.startswith("task/")} == {"task/law", "task/space"}
    assert only.values["endtask/MF1"] == pytest.approx(0.2)
    assert only.values["LC/nats"] == pytest.approx((4.9 + 4.0) / 2)
    assert len(measure_runs(runs, domains=[])) == 2


def test_end_tasks_count_in_their_last_row():
    none = [None] * 3
    given = endtasks([none, [0.9, None, None], [None, 0.8, None], [0.5, 0.6, 0.7]], when="each")
    (only,) = measure_runs([run(endtasks=given)], domains=[])
    assert only.values["endtask/MF1"] == pytest.approx(0.6)
    assert only.values["task/food"] == pytest.approx(0.6)
    assert only.values["endtask/forget_rate"] == pytest.approx((0.4 + 0.2) / 2)


def test_what_is_not_finite_is_no_measurement():
    diverged = np.array(NLL)
    diverged[3, 0] = math.nan
    (only,) = measure_runs([run(nll=diverged)], domains=[])
    assert not {"LC/nats", "LC/perplexity", "FG/nats"} & set(only.values)
    assert "CPT/nats" in only.values


def test_costs():
    (only,) = measure_runs(
        [run(phases={"learn": {"law": 4.0, "food": 5.0}, "score": {"law": 90.0}})], domains=[]
    )
    told = {key: value for key, value in only.values.items() if key.startswith("cost/")}
    assert (
        told
        == {
            "cost/tokens": 3000,
            "cost/flops": 6e9,
            "cost/seconds_learn": 9,
            "cost/seconds": 20,
            "cost/memory": 1e6,
            "cost/stored": 3e6,
            "cost/stored_per_domain": 1e6,
            "cost/trained": 5120,
        }
        or told["cost/stored"] == 3e6
    )
    (uncounted,) = measure_runs([run(costs=False)], domains=[])
    assert not {"cost/tokens", "cost/flops", "cost/memory", "cost/stored"} & set(uncounted.values)


def test_intransigence_against_one_of_the_same_seed_model_and_order():
    alone = np.array(NLL)
    ones = [run(method="one", nll=alone - less, seed=seed) for seed, less in ((0, 0.1), (1, 0.4))]
    mine = [run(nll=alone + seed / 20, seed=seed) for seed in (0, 1, 2)]
    others = [run(model="other"), run(order=DOMAINS[::-1])]
    others += [
        run(method="one", replay="general", nll=alone - 0.9),
        run(method="one", mask="migu", nll=alone - 0.9),
    ]
    told = [
        each.values.get("intransigence/nats") for each in measure_runs([*others, *ones, *mine], domains=[])
    ]
    assert told[:2] == [None, None]
    assert told[2:4] == pytest.approx([-0.8, -0.8])  # these are not learned alone: compared like others
    assert told[4:6] == [None, None]
    assert told[6:] == pytest.approx([0.1, 0.45, 0.2])  # seed 2 has no `one` of its own
    mine[0].scores.nll[2][1] += 0.6  # on food alone
    (some,) = [x for x in measure_runs([*ones, mine[0]], domains=["food"]) if x.told("method") == "ncl"]
    assert some.values["intransigence/nats"] == pytest.approx(0.7)


# --- spreads


def test_a_spread_is_mean_deviation_and_interval():
    given = spread_values(DataFrame({"x": [1.0, 2.0, 6.0, None], "y": [3.0, None, None, 4.0]}))["x"]
    assert (given.n, given.runs, given.mean) == (3, 4, 3.0)
    assert given.sd == pytest.approx(np.std([1, 2, 6], ddof=1))
    assert [given.low, given.high] == pytest.approx([3 - 6.572411, 3 + 6.572411])  # t(2) * sd / sqrt(3)
    assert spread_values(DataFrame({"x": [1.0, 2.0]}))["x"].low is None
    shown = format_spread(given, show="{:.1f}".format, bounds=True)
    assert shown.startswith("3.0 ± 2.6 [")
    assert shown.endswith("] (3)")
    assert format_spread(given, show="{:.1f}".format, bounds=False) == "3.0 ± 2.6 (3)"
    assert format_spread(spread_values(DataFrame({"x": [2.0]}))["x"], show=str, bounds=True) == "2.0"
    assert format_spread(spread_values(DataFrame({"x": [None]}))["x"], show=str, bounds=True) == "–"


# --- groups


def test_groups_are_over_seeds_and_orders_the_best_first():
    orders = [DOMAINS, DOMAINS[::-1]]
    runs = [
        run(order=o, seed=s, method=m, shift=x)
        for o in orders
        for s in (0, 1)
        for m, x in (("ncl", 0), ("das", -1))
    ]
    found = section(runs)
    assert [(group.name, group.size) for group in found.groups] == [
        ("das", "4 (2 seeds x 2 orders)"),
        ("ncl", "4 (2 seeds x 2 orders)"),
    ]
    assert section(runs[:-1]).groups[1].size == "4 (2 seeds x 2 orders)"
    assert section([*runs[:4], *runs[6:]]).groups[0].size == "3 (2 seeds, 2 orders)"
    by_order = section(runs, by_order=True)
    reverse = ",".join(DOMAINS[::-1])
    assert {f"das, order {reverse}", "ncl, order law,food,space"} <= {group.name for group in by_order.groups}
    assert all(len(group.runs) == 2 for group in by_order.groups)
    assert by_order.baselines[f"das, order {reverse}"].name == f"ncl, order {reverse}"


def test_labels_models_and_values_make_groups():
    runs = [run(), run(mask="migu"), run(replay="past"), run(variant="optim.lr=1"), run(model="large")]
    assert set(names(runs)) == {
        "ncl, tiny",
        "ncl + migu, tiny",
        "ncl + replay past, tiny",
        "ncl (optim.lr=1), tiny",
        "ncl, large",
    }
    assert names([run(variant="x=1"), run(variant="x=1", seed=1)]) == ["ncl"]


def configured(tmp_path, configs, **given):
    runs = []
    for place, config in enumerate(configs):
        saved(tmp_path / str(place), config=config, seed=config.get("seed", 0), **given)
        runs.append(run(tmp_path / str(place), seed=config.get("seed", 0), **given))
    return runs


def test_configs_that_differ_set_runs_of_one_label_apart(tmp_path):
    configs = [{"seed": s, "trainer": {"steps": n, "workers": s}} for s in (0, 1) for n in (5, 9)]
    runs = configured(tmp_path, configs)
    assert sorted(names(runs)) == ["ncl, trainer.steps=5", "ncl, trainer.steps=9"]
    assert differing(runs) == ["trainer.steps"]
    assert any("trainer.steps" in line for line in notes(section(runs)))


def test_what_follows_the_seed_or_says_where_text_lies_does_not(tmp_path):
    configs = [{"seed": s, "order": s, "mask": {"seed": s}, "domains": {"root": f"/{s}"}} for s in (0, 1, 2)]
    assert names(configured(tmp_path, configs)) == ["ncl"]


def test_many_differences_still_make_names_that_differ(tmp_path):
    configs = [{f"key{n}": 0 for n in range(5)} | {"key4": value} for value in (0, 1)]
    configs.append({f"key{n}": 1 for n in range(5)})
    configs.append({f"key{n}": 1 for n in range(4)} | {"key4": 7})
    found = names(configured(tmp_path, configs))
    assert len(set(found)) == len(found) == 4


def test_several_runs_with_one_order_and_seed_are_named():
    lines = notes(section([run("a"), run("b"), run("c", method="das")]))
    assert [line for line in lines if line.startswith("ncl: runs with one order and seed")]
    assert not [line for line in lines if line.startswith("das:")]


# --- differences


def test_differences_are_paired_by_order_and_seed():
    runs = seeds([0.0, 0.3, 0.6]) + seeds([-0.1, 0.1, 0.3, 9.0], method="das")
    found = contrasts(section(runs), FG)["das"]
    both = [
        np.array([made(shift=x).metrics["FG"]["nats"] for x in xs])
        for xs in ([-0.1, 0.1, 0.3], [0, 0.3, 0.6])
    ]
    assert found.difference.n == 3
    assert found.difference.mean == pytest.approx(np.mean(both[0] - both[1]))
    assert found.difference.p == pytest.approx(0.25)
    assert "ncl" not in contrasts(section(runs), FG)


def test_runs_of_one_pair_count_as_their_mean():
    runs = [run(shift=0.0), run("copy", shift=0.2), run(method="das", shift=0.5)]
    assert contrasts(section(runs), FG)["das"].difference.mean == pytest.approx(0.4)


def test_the_baseline_is_the_group_that_shares_most_values():
    values = ("lr=1", "lr=2")
    runs = [run(method=m, variant=v, shift=i / 9) for m in ("ncl", "das") for i, v in enumerate(values)]
    found = section([*runs, run(method="ewc")])
    assert {name: group.name for name, group in found.baselines.items()} == {
        "das (lr=1)": "ncl (lr=1)",
        "das (lr=2)": "ncl (lr=2)",
    }
    chosen = section(runs, baseline="ncl (lr=1)").baselines
    assert {group.name for group in chosen.values()} == {"ncl (lr=1)"}
    assert len(chosen) == 3


def test_a_baseline_has_the_same_model_and_orders():
    runs = [run(), run(method="das", model="large"), run(method="ewc", order=DOMAINS[::-1])]
    found = section(runs)
    assert found.baselines == {}
    assert any("No differences" in line for line in notes(found))


def test_holm():
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9}
    found = correct_holm({name: Difference(mean=0, low=0, high=0, p=each, n=9) for name, each in p.items()})
    assert {name: each.holm for name, each in found.items()} == pytest.approx(
        {"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.9}
    )


def test_the_smallest_p():
    assert least_p(3) == 0.25
    assert least_p(40) == pytest.approx(1 / 10001)


def test_ranks_within_a_model():
    runs = seeds([0.2, 0.0]) + seeds([0.1, 0.1], method="das") + seeds([0.9, 0.9], method="ewc")
    runs += (
        seeds([5.0, 5.0], method="one")
        + seeds([0, 0], model="large")
        + seeds([1, 1], model="large", method="das")
    )
    found = rank_groups(section(runs))
    assert found["LC/perplexity"] == {
        "ncl, tiny": 1.5,
        "das, tiny": 1.5,
        "ewc, tiny": 3.0,
        "ncl, large": 1.0,
        "das, large": 2.0,
    }
    assert "one, tiny" in found["CPT/nats"]


def test_more_is_better_for_end_tasks():
    good, bad = (endtasks([[x] * 3] * 4) for x in (0.9, 0.1))
    runs = [run(endtasks=bad), run(method="das", endtasks=good)]
    assert rank_groups(section(runs))["endtask/MF1"] == {"ncl": 2.0, "das": 1.0}
    assert {measure.key for measure in COMPARED} >= {"endtask/MF1", "LC/perplexity", "FG/nats"}


# --- predictions


def predicted(folder, right, *, tasks=DOMAINS, row="003-space"):
    import pyarrow
    from pyarrow import parquet

    (folder / "endtasks" / row).mkdir(parents=True)
    for task in tasks:
        for seed in (7, 8):
            columns = {"id": [str(i) for i in range(len(right))], "label": ["y"] * len(right)}
            columns["prediction"] = ["y" if each else "n" for each in right]
            parquet.write_table(pyarrow.table(columns), folder / "endtasks" / row / f"{task}-{seed}.parquet")


def test_differences_over_test_examples(tmp_path):
    given = endtasks([[0.5] * 3] * 4)
    runs = []
    for method, right in (("ncl", [1, 0, 0, 0]), ("das", [1, 1, 1, 0]), ("ewc", None)):
        saved(tmp_path / method, method=method, endtasks=given)
        if right:
            predicted(tmp_path / method, right)
        runs.append(run(tmp_path / method, method=method, endtasks=given))
    found, failed = on_examples(section(runs))
    assert set(found) == {"das"}
    assert found["das"].difference.mean == pytest.approx(0.5)
    assert found["das"].difference.n == 12
    assert failed == []
    only, _ = on_examples(section(runs, domains=["law"]))
    assert only["das"].difference.n == 4
    (tmp_path / "das" / "endtasks" / "003-space" / "law-7.parquet").write_text("damaged")
    found, failed = on_examples(section(runs))
    assert found == {}
    assert len(failed) == 1
    assert failed[0].startswith("das: ")


def test_the_helpers_write_what_is_read(tmp_path):
    saved(tmp_path / "x", config={"seed": 0})
    assert json.loads((tmp_path / "x" / "config.yaml").read_text()) == {"seed": 0}
    assert run(tmp_path / "x").settings == {"seed": 0}


def test_a_method_of_ones_own_says_that_it_learns_from_the_base():
    runs = [run(method=method, seed=seed) for method in ("ncl", "mine", "das") for seed in (0, 1)]
    for each in runs[2:4]:
        each.scores.alone = True
    found = section(runs)
    assert set(rank_groups(found)["LC/perplexity"]) == {"ncl", "das"}
    assert set(rank_groups(found)["CPT/nats"]) == {"ncl", "das", "mine"}
    assert any("(`mine`)" in line for line in notes(found))
    assert not any("from the base" in line for line in notes(section(runs[4:])))


def test_marks_are_those_of_the_whole_comparison():
    runs = [run(method=method, shift=shift) for shift, method in enumerate(("ncl", "das", "kd"))]
    longer = [run(method=method, conditions=CONDITIONS | {"length": 128}) for method in ("kd", "ewc")]
    first, second = sections(measure_runs([*runs, *longer], domains=[]), by_order=False, baseline="ncl")
    assert first.places is second.places
    assert first.places == {name: own_place(name) for name in ("ncl", "das", "kd", "ewc")}
