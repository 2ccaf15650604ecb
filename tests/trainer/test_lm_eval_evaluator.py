"""When a probe is measured, on whose weights, and what a second start repeats. The harness itself:
tests/evaluation/test_lm_eval.py."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cpt.core.preemption import Preempted
from cpt.evaluation.options import LMEvalOptions
from cpt.trainer import preflight
from cpt.verify import damage_in_run
from tests.runs.reading import assert_same_bits, told_by
from tests.support.probing import FakeHarness, weigh, write_probe

DROPOUT = "model.config.attn_pdrop=0.1"


@pytest.fixture
def run(small_gpt2, start, tmp_path, monkeypatch):
    def harness(plan):
        return FakeHarness(plan.probe) if plan.probe is not None else None

    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    monkeypatch.setattr(preflight, "make_harness", harness)

    def go(*overrides, when="last", folder=tmp_path):
        asked = [f"probe.when={when}", "probe=lm_eval", "probe.tasks=[say,ask]"] if when else []
        start(small_gpt2("order=[law,food]", "trainer.steps=4", *asked, *overrides), folder)
        return told_by(folder)

    return go


def files(folder):
    """When each file of a probe was written."""
    found = sorted((folder / "probes").rglob("*.json"))
    return {str(path.relative_to(folder / "probes")): path.stat().st_mtime_ns for path in found}


BASE, LAW, FOOD = (
    [f"{stage}/{task}.json" for task in ("ask", "say")] for stage in ("000-base", "001-law", "002-food")
)


def test_a_probe_is_measured_after_the_stages_asked_for_and_changes_nothing(run, tmp_path):
    plain, asked = (run(DROPOUT, when=when, folder=tmp_path / str(when)) for when in (None, "each"))
    assert_same_bits(tmp_path / "None", tmp_path / "each")
    for key in ("metrics", "trained", "seen", "flops", "objective", "config_digest"):
        assert asked[key] == plain[key], key
    assert plain["probes"] == {} and [*files(tmp_path / "each")] == BASE + LAW + FOOD
    task = asked["probes"]["tasks"]["say"]
    assert None not in task["values"] and task["values"][0] != task["values"][2]
    assert len(asked["probes"]["digest"]) == 16 and asked["phases"]["probes"]["base"] > 0
    for report in ("report.md", "report.html"):
        assert "say (acc, 0 shots, version 1.0)" in (tmp_path / "each" / report).read_text()
    few = run(DROPOUT, when="every:2", folder=tmp_path / "few")["probes"]["tasks"]["say"]
    assert few["values"] == [task["values"][0], None, task["values"][2]]
    assert [*files(tmp_path / "few")] == BASE + FOOD


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one", "none", "demix"])
def test_the_model_is_the_one_that_is_exported(run, tmp_path, method):
    scores = run(f"method={method}")
    values = scores["probes"]["tasks"]["say"]["values"]
    assert None not in (values[0], values[-1]) and len(values) == len(scores["rows"])
    assert method == "none" or values[0] != values[-1]
    if method != "demix":
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert values[-1] == pytest.approx(weigh(exported), rel=1e-9)


def test_a_second_start_measures_what_is_missing_damaged_or_of_other_settings(run, tmp_path):
    run()
    before = files(tmp_path)
    assert list(damage_in_run(tmp_path)) == []
    (tmp_path / "probes" / FOOD[0]).unlink()
    (tmp_path / "probes" / FOOD[1]).write_text("{")
    (line,) = damage_in_run(tmp_path)
    assert FOOD[1] in line and "is damaged" in line
    run("probe.batch_size=2")
    again = files(tmp_path)
    assert {name for name in before if again[name] != before[name]} == {*FOOD}
    run("probe.limit=3")
    assert all(when != again[name] for name, when in files(tmp_path).items())


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError, pytest.param(Preempted, marks=pytest.mark.campaign)])
def test_a_run_that_is_stopped_within_its_probe_goes_on_with_it(run, tmp_path, monkeypatch, error):
    measure = FakeHarness.measure

    def stop(self, name, model, *rest, **others):
        if (tmp_path / "probes" / "000-base" / "say.json").exists():
            monkeypatch.setattr("cpt.core.preemption.notice.number", 15 * (error is Preempted))
            raise error(15)
        return measure(self, name, model, *rest, **others)

    monkeypatch.setattr(FakeHarness, "measure", stop)
    with pytest.raises(error, match="15|in the probe after base"):
        run()
    monkeypatch.setattr("cpt.core.preemption.notice.number", 0)
    monkeypatch.setattr(FakeHarness, "measure", measure)
    before = files(tmp_path)
    assert [*before] == [BASE[1]]
    assert run()["run"]["finished"] and [*files(tmp_path)] == BASE + FOOD
    assert files(tmp_path)[BASE[1]] == before[BASE[1]]


def test_a_model_that_fills_masks_is_refused_at_once(small, start, tmp_path, monkeypatch):
    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    with pytest.raises(ValueError, match=r"^probe=lm_eval continues a text, and model=tiny_"):
        start(small("probe=lm_eval", "probe.tasks=[say]"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def real(small_gpt2, start, tmp_path):
    pytest.importorskip("lm_eval", reason="the extra: pip install -e '.[lm-eval]'")
    write_probe(tmp_path / "tasks")
    asked = ["probe=lm_eval", "probe.tasks=[next_word]", f"probe.include={tmp_path / 'tasks'}"]

    def go(name, *overrides, probe=True):
        start(small_gpt2("order=[law,food]", *(asked if probe else []), *overrides), tmp_path / name)
        return told_by(tmp_path / name)

    return go


@pytest.mark.slow
def test_with_the_harness_itself_the_bits_of_a_run_stay(real, tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    asked = real("asked", DROPOUT, "probe.when=each", "probe.shots=2")["probes"]
    real("plain", DROPOUT, probe=False)
    assert_same_bits(tmp_path / "asked", tmp_path / "plain")
    task = asked["tasks"]["next_word"]
    assert all(0 <= value <= 1 for value in task["values"]) and len(task["values"]) == 3
    assert (task["chance"], task["shots"], asked["harness"]) == (0.25, 2, "0.4.13")
    write_probe(tmp_path / "tasks", count=9)  # other data are measured again
    again = real("asked", DROPOUT, "probe.when=last", "probe.shots=2")["probes"]["tasks"]["next_word"]
    assert (task["examples"], again["examples"]) == (12, 9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["demix", "lora", "das", "hat"])
def test_what_methods_hand_on_is_measured(real, method):
    values = real("run", f"method={method}", "probe.when=each")["probes"]["tasks"]["next_word"]["values"]
    assert None not in values
