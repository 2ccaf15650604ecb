"""Runs are found, filtered, measured, and grouped where their numbers are comparable."""

import itertools

import numpy as np
import pytest

from cpt.reporting import load_runs
from cpt.reporting.load_runs import filter_runs, measure_runs
from cpt.reporting.sections import build_sections, find_differing_settings
from tests.support.example_runs import CONDITIONS, DOMAINS, NLL, make_run, make_section, save_run, save_scores


def names(runs):
    return [group.name for group in make_section(runs).groups]


def test_runs_are_found_at_any_depth_once_and_what_is_missing_or_was_only_begun_is_named(tmp_path):
    for name in ("a/deep/1", "b"):
        save_scores(tmp_path / name, config={"seed": 0})
    for name in ("begun", "b/wandb/run", "b/rebuilt/x", ".hydra"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("seed: 0\n")
    found_runs = load_runs.find_runs([tmp_path, tmp_path / "nowhere", tmp_path / "b" / ".." / "a"])
    assert sorted(run.folder.name for run in found_runs.runs) == ["1", "b"]
    assert [folder.name for folder in found_runs.started] == ["begun"]
    assert [complaint.endswith("nowhere: no such folder") for complaint in found_runs.damaged] == [True]


def test_filters_choose_runs_and_an_invalid_one_names_what_is_allowed():
    choices = itertools.product(("ncl", "das"), (0, 1), ("", "a=1; b=[x,y]"))
    runs = [make_run(method=method, seed=seed, variant=variant) for method, seed, variant in choices]
    for count, words in ((4, "method=das,ncl seed=1"), (2, "method=das variant=b=[x,y]"), (8, "")):
        assert len(filter_runs(runs, words.split())) == count
    with pytest.raises(ValueError, match="method=ewc is invalid. Allowed: das, ncl"):
        filter_runs(runs, ["method=das,ewc"])


def test_what_is_not_finite_or_was_not_counted_is_not_measured():
    diverged = np.array(NLL)
    diverged[3, 0] = np.nan
    (run,) = measure_runs([make_run(nll=diverged, costs=False)])
    assert not {"LC/nats", "FG/nats", "cost/tokens", "cost/flops", "cost/memory"} & set(run.values)
    assert "CPT/nats" in run.values


def raise_trained(rise):
    """The losses of the example, those after a stage higher by a rise."""
    losses = np.array(NLL)
    losses[1:] += rise
    return losses


def test_intransigence_against_one_of_the_same_seed_base_order_and_conditions():
    references = [
        make_run(method="one", nll=raise_trained(-gain), seed=seed) for seed, gain in ((0, 0.1), (1, 0.4))
    ]
    sequences = [make_run(nll=raise_trained(seed / 20), seed=seed) for seed in (0, 1, 2)]
    unmatched = [
        make_run(model="other"),
        make_run(order=DOMAINS[::-1]),
        make_run(conditions=CONDITIONS | {"max_seq_length": 128}),
        make_run(nll=np.array(NLL) + 0.5),  # of another base
    ]
    values = [
        run.values.get("intransigence/nats") for run in measure_runs([*unmatched, *references, *sequences])
    ]
    assert values[:6] == [None] * 6
    assert values[6:] == pytest.approx([0.1, 0.45, 0.2])  # seed 2 has no `one` of its own


OTHERS = {
    "objective": {"objective": "causal"},
    "texts": {"content": "other"},
    "domains": {"order": DOMAINS[:2], "nll": [row[:3] for row in NLL[:3]]},
    "tokenizer": {"conditions": CONDITIONS | {"tokenizer": "4567cdef"}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_perplexity_depends_on_makes_a_section(name):
    comparable_runs = []
    for seed in (0, 1):
        comparable_runs += [make_run(seed=seed, method="ncl"), make_run(seed=seed, method="das")]
    first, second = build_sections(measure_runs([*comparable_runs, make_run(method="das", **OTHERS[name])]))
    assert [len(first.runs), len(second.runs)] == [4, 1]
    assert second.baselines == {} and first.title != second.title


def test_labels_models_values_and_configs_make_groups(tmp_path):
    runs = [
        make_run(),
        make_run(mask="migu"),
        make_run(replay="past"),
        make_run(variant="optim.lr=1"),
        make_run(model="large"),
    ]
    expected = ["ncl", "ncl + migu", "ncl + replay past", "ncl (optim.lr=1)"]
    assert set(names(runs)) == {*(f"{name}, tiny" for name in expected), "ncl, large"}
    assert names([make_run(variant="a=1; b=2"), make_run(variant="b=2; a=1", seed=1)]) == ["ncl"]
    runs = []
    for seed, steps in ((0, 5), (0, 9), (1, 5), (1, 9)):
        config = {"seed": seed, "trainer": {"steps": steps, "workers": seed}}
        runs.append(save_run(tmp_path / f"{seed}-{steps}", config=config, seed=seed))
    assert sorted(names(runs)) == ["ncl, trainer.steps=5", "ncl, trainer.steps=9"]
    assert find_differing_settings(runs) == ["trainer.steps"]
    configs = [{"seed": s, "order": s, "mask": {"seed": s}, "domains": {"root": f"/{s}"}} for s in (0, 1, 2)]
    runs = [save_run(tmp_path / str(tree["seed"]), config=tree, seed=tree["seed"]) for tree in configs]
    assert names(runs) == ["ncl"]  # what follows the seed does not


def test_the_baseline_shares_model_and_orders_and_most_values():
    runs = []
    for method in ("ncl", "das"):
        for variant, shift in (("lr=1", 0), ("lr=2", 1 / 9)):
            runs.append(make_run(method=method, variant=variant, shift=shift))
    baselines = {
        name: group.name for name, group in make_section([*runs, make_run(method="ewc")]).baselines.items()
    }
    assert baselines == {"das (lr=1)": "ncl (lr=1)", "das (lr=2)": "ncl (lr=2)"}
    chosen = make_section(runs, baseline="ncl (lr=1)").baselines
    assert {group.name for group in chosen.values()} == {"ncl (lr=1)"} and len(chosen) == 3
    runs = [make_run(), make_run(method="das", model="large"), make_run(method="ewc", order=DOMAINS[::-1])]
    assert make_section(runs).baselines == {}
    order = f"order {','.join(DOMAINS[::-1])}"
    runs = []
    for domains in (DOMAINS, DOMAINS[::-1]):
        runs += [make_run(order=domains, method="ncl"), make_run(order=domains, method="das")]
    assert make_section(runs, by_order=True).baselines[f"das, {order}"].name == f"ncl, {order}"
