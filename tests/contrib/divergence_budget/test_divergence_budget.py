"""A budget of the divergence from the base: stages that end within it, without old text."""

import pytest

from tests.runs.reading import read_scores, same_state, state_of
from tests.support.kill_callback import KilledError, Killer

DOMAINS = ["order=[law,food]", "trainer.steps=16", "monitor.every=2", "monitor.max_tokens=400"]
STEEP = ["optim.lr=0.004", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]
BUDGET = ["budget=divergence", "budget.kl=0.1", "monitor.general=false", "monitor.past=0"]


def test_a_stage_ends_with_the_last_weights_within_its_budget_and_resumes_to_the_bit(
    small, start, tmp_path, killing
):
    start(small(*DOMAINS, *STEEP, *BUDGET, "divergence=base"), tmp_path / "run")
    scores = read_scores(tmp_path / "run")
    law = scores["monitor"]["law"]
    budget = law["budget"]
    assert budget["uppers"] == [high for _, _, high in law["divergence"]["law"]]
    assert list(law["nll"]) == ["law"]  # no other text is read
    assert law["divergence"]["law"][0][0] == 0 and budget["uppers"][0] == 0
    assert "budget.kl=0.1" in law["ended"] and law["steps"][-1] < 16
    assert budget["uppers"][-1] > 0.1 and law["kept"] == law["steps"][-2] > 0
    # The model after the stage is that of the kept step.
    assert scores["divergence"]["kl"][1]["law"][0] < 0.13
    assert scores["monitor"]["food"]["budget"]["uppers"][0] > 0  # counted from the base, not from the stage

    killing(Killer(step=5))
    with pytest.raises(KilledError):
        start(small(*DOMAINS, *STEEP, *BUDGET, "divergence=base"), tmp_path / "killed")
    killing(None)
    start(small(*DOMAINS, *STEEP, *BUDGET, "divergence=base"), tmp_path / "killed")
    assert same_state(state_of(tmp_path / "run"), state_of(tmp_path / "killed"))
    assert read_scores(tmp_path / "killed")["monitor"] == scores["monitor"]


def test_a_budget_that_is_never_reached_changes_no_bit(small, start, tmp_path):
    start(small(*DOMAINS, *BUDGET, "budget.kl=50"), tmp_path / "run")
    start(small(*DOMAINS), tmp_path / "plain")
    assert same_state(state_of(tmp_path / "run"), state_of(tmp_path / "plain"))
    assert read_scores(tmp_path / "run")["monitor"]["law"]["ended"] == ""
    assert read_scores(tmp_path / "run")["divergence"] == {}  # only the monitor measures it


def test_what_does_not_go_with_it_is_refused(small, start, tmp_path):
    with pytest.raises(ValueError, match="budget.kl=0 is invalid"):
        start(small(*DOMAINS, *BUDGET, "budget.kl=0"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"budget.kl=0.1 is invalid: incompatible with monitor.keep=best"):
        start(small(*DOMAINS, *BUDGET, "monitor.keep=best"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"budget.kl=0.1 is invalid: incompatible with strategy=fsdp"):
        start(small(*DOMAINS, *BUDGET, "strategy=fsdp"), tmp_path / "run")
    with pytest.raises(ValueError, match="budget=divergence is invalid with method=elle"):
        start(small(*DOMAINS, *BUDGET, "method=elle"), tmp_path / "run")
