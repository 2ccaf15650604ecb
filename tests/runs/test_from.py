"""A run that begins where another one has ended."""

import pytest

from cpt.evaluation.scores import Scores

ORDER = "order=[law,food]"


def scores_of(folder) -> Scores:
    return Scores.load(folder / "scores.json")


def test_the_base_is_the_other_runs_last_model(start, small, tmp_path):
    start(small(ORDER), tmp_path / "first")
    further = small("order=[space]", "method=ewc", f"from={tmp_path / 'first'}")
    start(further, tmp_path / "second")
    first, second = scores_of(tmp_path / "first"), scores_of(tmp_path / "second")
    assert second.matrix[0, -1] == pytest.approx(first.matrix[-1, -1], abs=1e-6)
    assert second.run["model"] == f"{first.run['model']} from first" and second.run["method"] == "ewc"
    start(further, tmp_path / "second")  # finished already
    start(small(ORDER, "seed=1"), tmp_path / "other")
    with pytest.raises(ValueError, match=r"begun with other contents \(model.safetensors"):
        start(small("order=[space]", "method=ewc", f"from={tmp_path / 'other'}"), tmp_path / "second")


def test_only_a_finished_run_is_gone_on_from(start, small, tmp_path):
    with pytest.raises(ValueError, match=r"^from=.*nowhere is no finished run; allowed: null, or the "):
        start(small(ORDER, f"from={tmp_path / 'nowhere'}"), tmp_path / "run")


def test_another_kind_of_model_is_refused(start, small, small_gpt2, tmp_path):
    start(small(ORDER), tmp_path / "first")
    with pytest.raises(ValueError, match="causal"):
        start(small_gpt2(ORDER, f"from={tmp_path / 'first'}"), tmp_path / "run")
