"""A run that begins where another one has ended."""

import json
import shutil

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM

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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_an_exported_adapter_is_merged_and_loads_with_peft_alone(kind, start, small, small_gpt2, tmp_path):
    made, auto = (small, AutoPeftModel) if kind == "masked" else (small_gpt2, AutoPeftModelForCausalLM)
    first, second = tmp_path / "first", tmp_path / "second"
    start(made("order=[law]", "method=lora", "method.exported=peft", "optim.lr=0.1"), first)
    start(made("order=[space]", "trainer.steps=1", f"from={first}"), second)
    assert scores_of(second).matrix[0, -1] == pytest.approx(scores_of(first).matrix[-1, -1], abs=1e-5)
    assert abs(scores_of(first).matrix[-1, -1] - scores_of(first).matrix[0, -1]) > 1e-3  # it has moved
    assert (
        "adapters/law/adapter_model.safetensors" in json.loads((second / "identity.json").read_text())["base"]
    )
    model = auto.from_pretrained(first / "model" / "adapters" / "law").eval()
    ids = torch.arange(8)[None]
    merged = model.merge_and_unload()(ids).logits
    plain = type(merged_base := model.get_base_model()).from_pretrained(first / "model").eval()
    assert type(plain) is type(merged_base) and not torch.allclose(merged, plain(ids).logits, atol=1e-3)
    shutil.copytree(first / "model" / "adapters" / "law", first / "model" / "adapters" / "food")
    with pytest.raises(ValueError, match="model has 2 adapters, and a model starts with one"):
        start(made("order=[food]", f"from={first}"), tmp_path / "third")
