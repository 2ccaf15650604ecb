"""Exported folders: what is written is a plain model and its parts, and loading gives them back."""

import copy
import json

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import RobertaForMaskedLM

import cpt.adapters.export
from cpt.adapters.domain_store import Scope
from cpt.adapters.export import export_parts, load
from tests.models.test_units import build

pytestmark = pytest.mark.slow

IDS = torch.tensor([[1, 7, 8, 9, 2], [1, 5, 6, 2, 0]])
BIAS = "lm_head.scale.bias"
TABLE = "roberta.embeddings.word_embeddings.weight"
ONE, OTHER = torch.arange(120.0).split(60)  # views of one storage, as a bank gives them
PARTS = {"law": {BIAS: ONE}, "food": {BIAS: OTHER}}


class Scale(nn.Module):
    """Adds a vector to a module's output, times a factor."""

    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.bias, self.factor, self.dropout = nn.Parameter(torch.zeros(size)), factor, nn.Dropout(0.5)

    def hook(self, module, args, output):
        return output + self.dropout(self.factor * self.bias.to(output))


def attach(model, *, factor: float) -> Scope:
    part = Scale(model.config.vocab_size, factor)
    model.lm_head.add_module("scale", part)
    model.lm_head.register_forward_hook(part.hook)
    return Scope((BIAS,), ())


@pytest.fixture
def untouched():
    return build("roberta", tie_word_embeddings=True).float()


@pytest.fixture
def export(untouched, tmp_path, monkeypatch):
    """Writes parts into a folder, and gives the expression that loads it with the `attach` of this file."""
    monkeypatch.setattr(cpt.adapters.export, "TRUSTED", (*cpt.adapters.export.TRUSTED, f"{__name__}."))
    plain = copy.deepcopy(untouched)
    attach(plain, factor=2.0)
    plain.get_parameter(BIAS).data.fill_(99)  # the part that learns is none of those that are exported
    return lambda parts=PARTS, *, folder=tmp_path, factor=2.0: export_parts(
        folder, plain.eval(), parts, attach=attach, options={"factor": factor}
    )


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=(IDS != 0).long()).logits


def bias_of(folder, **how) -> torch.Tensor:
    return load(folder, **how).get_parameter(BIAS)


def test_the_folder_is_the_plain_model_and_each_domain_has_its_part(export, untouched, tmp_path):
    export()
    model, info = RobertaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert torch.equal(logits(model), logits(untouched))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["RobertaForMaskedLM"]
    for name, part in PARTS.items():
        found = load(tmp_path, domain=name)
        assert torch.equal(found.get_parameter(BIAS), part[BIAS])
        assert torch.equal(logits(found), logits(untouched) + 2 * part[BIAS])
    assert torch.equal(bias_of(tmp_path), OTHER)  # the last is the default
    export({"food": {BIAS: ONE}}, factor=3.0)
    assert torch.equal(bias_of(tmp_path), ONE) and load(tmp_path).get_submodule("lm_head.scale").factor == 3
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["food.safetensors"]
    with pytest.raises(ValueError, match="^domain=law is invalid"):
        load(tmp_path, domain="law")
    found = export({})
    assert not (tmp_path / "parts.json").exists() and not (tmp_path / "parts").exists()
    assert torch.equal(logits(eval(found, {"transformers": transformers})), logits(untouched))
    with pytest.raises(ValueError, match="has no parts.json"):
        load(tmp_path)


def test_a_name_of_any_characters(export, tmp_path):
    for number, name in enumerate(["../up", 'quo"te\\', "a%2Fb", "new\nline", "語" * 60]):
        folder = tmp_path / f"it's a folder {number}"
        expression = export({"a?b": {BIAS: ONE}, name: {BIAS: OTHER}}, folder=folder)
        assert torch.equal(bias_of(folder, domain=name), OTHER)
        assert torch.equal(bias_of(folder, domain="a?b"), ONE)
        assert torch.equal(eval(expression).get_parameter(BIAS), OTHER)
        assert len([*tmp_path.iterdir()]) == number + 1 and len([*folder.glob("parts/*.safetensors")]) == 2


def test_a_tied_part_stays_tied_and_peft_leaves_no_names(untouched, tmp_path):
    changed = untouched.get_parameter(TABLE).detach() + 1
    export_parts(tmp_path, copy.deepcopy(untouched), {"law": {TABLE: changed}}, attach=None, options={})
    for found in (RobertaForMaskedLM.from_pretrained(tmp_path), load(tmp_path)):
        assert found.lm_head.decoder.weight is found.get_parameter(TABLE)
        assert torch.equal(found.get_parameter(TABLE), changed)
    plain = copy.deepcopy(untouched)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["query", "dense"]), plain)
    assert any("base_layer" in name for name in plain.state_dict())
    export_parts(tmp_path, plain, {}, attach=None, options={})
    assert torch.equal(logits(RobertaForMaskedLM.from_pretrained(tmp_path)), logits(untouched))


def test_a_folder_from_others_calls_nothing_of_theirs(export, tmp_path):
    export()
    index = json.loads((tmp_path / "parts.json").read_text())
    options = {"entry": {"_target_": "os.mkdir", "path": str(tmp_path / "theirs")}, "kind": "x"}
    for path in ("os.system", "test_other.attach", "cpt.export.remove", "cpt.methods.hat.attach_gates"):
        for changed in ({"attach": path}, {"attach": path, "options": options}):
            (tmp_path / "parts.json").write_text(json.dumps(index | changed))
            with pytest.raises(ValueError, match=rf"attach={path} of parts.json is invalid"):
                load(tmp_path)
    assert not (tmp_path / "theirs").exists()
