"""When a probe is measured, on whose weights, and what a second start repeats. The harness itself:
tests/evaluation/test_lm_eval.py."""

import json
import random

import numpy as np
import pytest
import torch

from cpt.core.preemption import Preempted
from cpt.evaluation.options import LMEvalOptions
from cpt.trainer import preflight
from cpt.verify import damage_in_run
from tests.support.probing import FakeHarness, write_probe


@pytest.fixture
def run(small_gpt2, start, tmp_path, monkeypatch):
    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    monkeypatch.setattr(
        preflight, "make_harness", lambda plan: FakeHarness(plan.probe) if plan.probe is not None else None
    )

    def go(*overrides, when="last", folder=tmp_path):
        asked = [f"probe.when={when}", "probe=lm_eval", "probe.tasks=[say,ask]"] if when else []
        start(small_gpt2("order=[law,food]", *asked, *overrides), folder)
        return json.loads((folder / "scores.json").read_text())

    return go


def files(folder):
    return sorted(str(path.relative_to(folder / "probes")) for path in (folder / "probes").rglob("*.json"))


BASE, LAW, FOOD = (
    [f"{stage}/{task}.json" for task in ("ask", "say")] for stage in ("000-base", "001-law", "002-food")
)


@pytest.mark.parametrize(
    ("when", "there"), [("last", BASE + FOOD), ("each", BASE + LAW + FOOD), ("every:2", BASE + FOOD)]
)
def test_the_base_and_the_stages_asked_for_are_measured(run, tmp_path, when, there):
    scores = run(when=when)
    assert files(tmp_path) == there
    task = scores["probes"]["tasks"]["say"]
    assert [value is not None for value in task["values"]] == [True, when == "each", True]
    assert task["values"][0] != task["values"][2] and len(scores["probes"]["digest"]) == 16
    assert scores["phases"]["probes"]["base"] > 0
    for report in ("report.md", "report.html"):
        assert "say (acc, 0 shots, version 1.0)" in (tmp_path / report).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one", "joint", "none", "demix", "adapter"])
def test_the_model_is_the_one_that_is_exported(run, tmp_path, method):
    from transformers import AutoModelForCausalLM

    scores = run(f"method={method}")
    values = scores["probes"]["tasks"]["say"]["values"]
    assert None not in (values[0], values[-1]) and len(values) == len(scores["rows"])
    assert method == "none" or values[0] != values[-1]
    if method in ("one", "joint", "none"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        weights = sum(p.double().sum().item() for p in exported.parameters())
        assert values[-1] == pytest.approx(weights, rel=1e-9)


def test_a_probe_between_the_stages_changes_nothing_of_what_is_learned(run, tmp_path):
    dropout = "model.config.attn_pdrop=0.1"
    plain, asked = (run(dropout, when=when, folder=tmp_path / str(when)) for when in (None, "each"))
    for key in ("nll", "metrics", "trained", "seen", "flops", "objective", "config_digest"):
        assert asked[key] == plain[key], key
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("None", "each")]
    assert weights[0] == weights[1] and plain["probes"] == {}


def test_a_second_start_measures_what_is_missing_or_of_other_settings(run, tmp_path):
    run()
    times = {name: (tmp_path / "probes" / name).stat().st_mtime_ns for name in files(tmp_path)}
    (tmp_path / "probes" / FOOD[0]).unlink()
    (tmp_path / "probes" / FOOD[1]).write_text("damaged")
    run("probe.batch_size=2")
    again = {name: (tmp_path / "probes" / name).stat().st_mtime_ns for name in files(tmp_path)}
    assert {name for name in times if again[name] != times[name]} == {*FOOD}
    run("probe.limit=3")
    assert all((tmp_path / "probes" / name).stat().st_mtime_ns != again[name] for name in again)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError, Preempted])
def test_a_run_that_is_stopped_within_its_probe_goes_on_with_it(run, tmp_path, monkeypatch, error):
    measure = FakeHarness.measure

    with monkeypatch.context() as patched, pytest.raises(error, match="15|in the probe after base"):

        def stop(self, name, model, *rest, **others):
            if (tmp_path / "probes" / "000-base" / "say.json").exists():
                patched.setattr("cpt.core.preemption.notice.number", 15 * (error is Preempted))
                raise error(15)
            return measure(self, name, model, *rest, **others)

        patched.setattr(FakeHarness, "measure", stop)
        run()
    assert files(tmp_path) == [BASE[1]]
    kept = (tmp_path / "probes" / BASE[1]).stat().st_mtime_ns
    assert run()["run"]["finished"] and files(tmp_path) == BASE + FOOD
    assert (tmp_path / "probes" / BASE[1]).stat().st_mtime_ns == kept


def test_a_model_that_fills_masks_is_refused_at_once(small, start, tmp_path, monkeypatch):
    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    with pytest.raises(ValueError, match=r"^probe=lm_eval continues a text, and model=tiny_"):
        start(small("probe=lm_eval", "probe.tasks=[say]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_file_of_a_probe_is_found(run, tmp_path):
    run()
    assert list(damage_in_run(tmp_path)) == []
    (tmp_path / "probes" / FOOD[0]).write_text("{")
    (line,) = damage_in_run(tmp_path)
    assert FOOD[0] in line and "is damaged" in line and line.endswith("the same command makes it again")


@pytest.fixture
def real(small_gpt2, start, tmp_path):
    pytest.importorskip("lm_eval", reason="the extra: pip install -e '.[lm-eval]'")
    write_probe(tmp_path / "tasks")
    asked = ["probe=lm_eval", "probe.tasks=[next_word]", f"probe.include={tmp_path / 'tasks'}"]

    def go(name, *overrides, probe=True):
        start(small_gpt2("order=[law,food]", *(asked if probe else []), *overrides), tmp_path / name)
        return json.loads((tmp_path / name / "scores.json").read_text())

    return go


@pytest.mark.slow
def test_with_the_harness_itself_the_bits_of_a_run_stay(real, tmp_path):
    dropout = "model.config.attn_pdrop=0.1"
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    asked = real("asked", dropout, "probe.when=each", "probe.shots=2")
    plain = real("plain", dropout, probe=False)
    assert asked["nll"] == plain["nll"]
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("asked", "plain")]
    assert weights[0] == weights[1]
    task = asked["probes"]["tasks"]["next_word"]
    assert all(0 <= value <= 1 for value in task["values"]) and len(task["values"]) == 3
    assert (task["chance"], task["shots"], asked["probes"]["harness"]) == (0.25, 2, "0.4.13")


@pytest.mark.slow
def test_other_data_of_a_task_are_measured_again(real, tmp_path):
    first = real("run")["probes"]["tasks"]["next_word"]
    write_probe(tmp_path / "tasks", count=9)
    assert (first["examples"], real("run")["probes"]["tasks"]["next_word"]["examples"]) == (12, 9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["demix", "adapter", "lora", "das", "hat", "olora", "inclora", "derpp"])
def test_what_methods_hand_on_is_measured(real, method):
    values = real("run", f"method={method}", "probe.when=each")["probes"]["tasks"]["next_word"]["values"]
    assert None not in values
