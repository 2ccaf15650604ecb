"""When a probe is measured, on whose weights, and what a second start repeats."""

import pytest
from transformers import AutoModelForCausalLM

from cpt.core.preemption import Preempted
from cpt.evaluation.options import LMEvalOptions
from cpt.trainer import preflight
from tests.runs.reading import assert_same_bits, told_by
from tests.support.probing import FakeHarness, weigh

DROPOUT = "model.config.attn_pdrop=0.1"


@pytest.fixture
def run(small_gpt2, start, tmp_path, monkeypatch):
    def harness(plan):
        return FakeHarness(plan.benchmark) if plan.benchmark is not None else None

    monkeypatch.setattr(LMEvalOptions, "check_installed", lambda self: None)
    monkeypatch.setattr(preflight, "make_harness", harness)

    def go(*overrides, when="last", folder=tmp_path):
        asked = [f"benchmark.when={when}", "benchmark=lm_eval", "benchmark.tasks=[say,ask]"] if when else []
        start(small_gpt2("order=[law,food]", "trainer.steps=4", *asked, *overrides), folder)
        return told_by(folder)

    return go


def files(folder):
    """When each file of a probe was written."""
    found = sorted((folder / "benchmarks").rglob("*.json"))
    return {str(path.relative_to(folder / "benchmarks")): path.stat().st_mtime_ns for path in found}


BASE, LAW, FOOD = (
    [f"{stage}/{task}.json" for task in ("ask", "say")] for stage in ("000-base", "001-law", "002-food")
)


def test_a_probe_is_measured_after_the_stages_asked_for_and_changes_nothing(run, tmp_path):
    plain, asked = (run(DROPOUT, when=when, folder=tmp_path / str(when)) for when in (None, "each"))
    assert_same_bits(tmp_path / "None", tmp_path / "each")
    assert plain["benchmarks"] == {} and [*files(tmp_path / "each")] == BASE + LAW + FOOD
    task = asked["benchmarks"]["tasks"]["say"]
    assert None not in task["values"] and task["values"][0] != task["values"][2]


def test_the_model_is_the_one_that_is_exported(run, tmp_path):
    first, _, last = run("method=one")["benchmarks"]["tasks"]["say"]["values"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert first != last == pytest.approx(weigh(exported), rel=1e-9)


@pytest.mark.parametrize("error", [KeyError, Preempted])
def test_a_second_start_measures_what_is_missing_damaged_or_of_other_settings(
    run, tmp_path, monkeypatch, error
):
    """Also where the first was stopped between two tasks of the base."""

    def stop(self, name, *given, **how):
        if (tmp_path / "benchmarks" / "000-base" / "say.json").exists():
            monkeypatch.setattr("cpt.core.preemption.notice.number", 15 * (error is Preempted))
            raise error(15)
        return measure(self, name, *given, **how)

    measure = FakeHarness.measure
    with monkeypatch.context() as patched, pytest.raises(error, match="15|in the benchmark after base"):
        patched.setattr(FakeHarness, "measure", stop)
        run(when="every:2")
    monkeypatch.setattr("cpt.core.preemption.notice.number", 0)
    left = files(tmp_path)
    assert [*left] == [BASE[1]]
    run(when="every:2")
    before = files(tmp_path)
    assert [*before] == BASE + FOOD and left.items() <= before.items()
    (tmp_path / "benchmarks" / FOOD[0]).unlink()
    (tmp_path / "benchmarks" / FOOD[1]).write_text("{")
    run("benchmark.batch_size=2", when="every:2")
    again = files(tmp_path)
    assert {name for name in before if again[name] != before[name]} == {*FOOD}
    run("benchmark.max_documents=3", when="every:2")
    assert all(when != again[name] for name, when in files(tmp_path).items())
