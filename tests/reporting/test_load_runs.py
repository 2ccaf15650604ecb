"""Runs are found, filtered, measured, and grouped where their numbers are comparable."""

import numpy as np
import pytest

from cpt.reporting import load_runs
from cpt.reporting.load_runs import build_sections, filter_runs, measure_runs
from tests.support.comparing import CONDITIONS, DOMAINS, NLL, run, saved, section


def names(runs):
    return [group.name for group in section(runs).groups]


def configured(tmp_path, configs):
    runs = []
    for place, config in enumerate(configs):
        saved(tmp_path / str(place), config=config, seed=config["seed"])
        runs.append(run(tmp_path / str(place), seed=config["seed"]))
    return runs


def test_runs_are_found_at_any_depth_once_and_what_cannot_be_read_or_was_only_begun_is_named(tmp_path):
    for name in ("a/deep/1", "b"):
        saved(tmp_path / name, config={"seed": 0})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.json").write_text('{"version": 3, "dom')
    for name in ("begun", "b/wandb/run", "b/rebuilt/x", ".hydra"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("seed: 0\n")
    found = load_runs.find_runs([tmp_path, tmp_path / "nowhere", tmp_path / "b" / ".." / "a"])
    assert sorted(each.folder.name for each in found.runs) == ["1", "b"]
    assert [folder.name for folder in found.begun] == ["begun"] and len(found.damaged) == 2
    assert "nowhere: no such folder" in found.damaged[0] and "bad" in found.damaged[1]


def test_filters_choose_runs_and_a_wrong_one_says_what_is_allowed():
    values = ("", "a=1; b=[x,y]")
    runs = [run(method=m, seed=s, variant=v) for m in ("ncl", "das") for s in (0, 1) for v in values]
    for count, words in {
        4: ["method=das,ncl", "seed=1"],
        2: ["method=das", "variant=b=[x,y]"],
        8: [],
    }.items():
        assert len(filter_runs(runs, words)) == count
    with pytest.raises(ValueError, match="method=ewc is invalid. Allowed: das, ncl"):
        filter_runs(runs, ["method=das,ewc"])


def test_costs_are_measured_and_what_is_not_finite_or_was_not_counted_is_not():
    diverged = np.array(NLL)
    diverged[3, 0] = np.nan
    (only,) = measure_runs([run(nll=diverged, costs=False)])
    assert not {"LC/nats", "FG/nats", "cost/tokens", "cost/flops", "cost/memory"} & set(only.values)
    assert "CPT/nats" in only.values
    (only,) = measure_runs([run()])
    costs = [only.values[f"cost/{name}"] for name in ("tokens", "seconds_learn", "stored_per_domain")]
    assert costs == [3000, 12, 1e6]


def test_intransigence_against_one_of_the_same_seed_model_order_and_conditions():
    alone = np.array(NLL)
    ones = [run(method="one", nll=alone - less, seed=seed) for seed, less in ((0, 0.1), (1, 0.4))]
    mine = [run(nll=alone + seed / 20, seed=seed) for seed in (0, 1, 2)]
    others = [run(model="other"), run(order=DOMAINS[::-1]), run(conditions=CONDITIONS | {"length": 128})]
    found = [each.values.get("intransigence/nats") for each in measure_runs([*others, *ones, *mine])]
    assert found[:5] == [None] * 5
    assert found[5:] == pytest.approx([0.1, 0.45, 0.2])  # seed 2 has no `one` of its own


OTHERS = {
    "objective": {"objective": "causal"},
    "texts": {"content": "other"},
    "domains": {"order": DOMAINS[:2], "nll": [row[:3] for row in NLL[:3]]},
}
CHANGED = {"score_on": "valid", "tokenizer": "4567cdef", "length": 128, "packing": "document_mask"}
OTHERS |= {name: {"conditions": CONDITIONS | {name: value}} for name, value in CHANGED.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_what_perplexity_depends_on_makes_a_section(name):
    alike = [run(seed=seed, method=method) for seed in (0, 1) for method in ("ncl", "das")]
    first, second = build_sections(measure_runs([*alike, run(method="das", **OTHERS[name])]))
    assert [len(first.runs), len(second.runs)] == [4, 1]
    assert second.baselines == {} and first.title != second.title


def test_labels_models_values_and_configs_make_groups(tmp_path):
    runs = [run(), run(mask="migu"), run(replay="past"), run(variant="optim.lr=1"), run(model="large")]
    expected = ["ncl", "ncl + migu", "ncl + replay past", "ncl (optim.lr=1)"]
    assert set(names(runs)) == {*(f"{name}, tiny" for name in expected), "ncl, large"}
    assert names([run(variant="a=1; b=2"), run(variant="b=2; a=1", seed=1)]) == ["ncl"]
    configs = [{"seed": s, "trainer": {"steps": n, "workers": s}} for s in (0, 1) for n in (5, 9)]
    runs = configured(tmp_path / "steps", configs)
    assert sorted(names(runs)) == ["ncl, trainer.steps=5", "ncl, trainer.steps=9"]
    assert load_runs.differing_settings(runs) == ["trainer.steps"]
    configs = [{"seed": s, "order": s, "mask": {"seed": s}, "domains": {"root": f"/{s}"}} for s in (0, 1, 2)]
    assert names(configured(tmp_path / "seeds", configs)) == ["ncl"]  # what follows the seed does not


def test_the_baseline_shares_model_and_orders_and_most_values():
    values = ("lr=1", "lr=2")
    runs = [run(method=m, variant=v, shift=i / 9) for m in ("ncl", "das") for i, v in enumerate(values)]
    found = {name: group.name for name, group in section([*runs, run(method="ewc")]).baselines.items()}
    assert found == {"das (lr=1)": "ncl (lr=1)", "das (lr=2)": "ncl (lr=2)"}
    chosen = section(runs, baseline="ncl (lr=1)").baselines
    assert {group.name for group in chosen.values()} == {"ncl (lr=1)"} and len(chosen) == 3
    runs = [run(), run(method="das", model="large"), run(method="ewc", order=DOMAINS[::-1])]
    assert section(runs).baselines == {}
    order = f"order {','.join(DOMAINS[::-1])}"
    runs = [run(order=each, method=method) for each in (DOMAINS, DOMAINS[::-1]) for method in ("ncl", "das")]
    assert section(runs, by_order=True).baselines[f"das, {order}"].name == f"ncl, {order}"
