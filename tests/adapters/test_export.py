"""Exported folders: what is written is a plain model and its parts, and loading gives them back."""

import copy
import json

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

import cpt.adapters.export
from cpt.adapters.domain_store import Scope
from cpt.adapters.export import export_parts, load

pytestmark = pytest.mark.slow

IDS = torch.tensor([[1, 7, 8, 9, 2], [1, 5, 6, 2, 0]])
BIAS = "lm_head.scale.bias"
TABLE = "roberta.embeddings.word_embeddings.weight"


class Scale(nn.Module):
    """Adds a vector to a module's output, times a factor."""

    def __init__(self, size: int, factor: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))
        self.factor, self.dropout = factor, nn.Dropout(0.5)

    def hook(self, module, args, output):
        return output + self.dropout(self.factor * self.bias.to(output))


def attach(model, *, factor: float) -> Scope:
    part = Scale(model.config.vocab_size, factor)
    model.lm_head.add_module("scale", part)
    model.lm_head.register_forward_hook(part.hook)
    return Scope((BIAS,), ())


@pytest.fixture(autouse=True)
def trusting(monkeypatch):
    """The function above is this file's."""
    monkeypatch.setattr(cpt.adapters.export, "TRUSTED", (*cpt.adapters.export.TRUSTED, f"{__name__}."))


@pytest.fixture(scope="module")
def untouched():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    limits = {"vocab_size": 30, "max_position_embeddings": 20, "type_vocab_size": 1}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return RobertaForMaskedLM(RobertaConfig(**sizes, **limits, **ids)).eval()


@pytest.fixture
def plain(untouched):
    return copy.deepcopy(untouched)


@pytest.fixture
def attached(plain):
    attach(plain, factor=2.0)
    plain.get_parameter(BIAS).data.fill_(99)  # the part that learns is none of those that are exported
    return plain.eval()


@pytest.fixture
def parts():
    """Two parts that are views of one storage, as a bank gives them."""
    one, other = torch.arange(60.0).split(30)
    return {"law": {BIAS: one}, "food": {BIAS: other}}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=(IDS != 0).long()).logits


def test_the_folder_is_the_plain_model(attached, untouched, parts, tmp_path):
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    model, info = RobertaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert torch.equal(logits(model), logits(untouched))
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config.architectures == ["RobertaForMaskedLM"]


def test_each_domain_has_its_part(attached, untouched, parts, tmp_path):
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    for name in parts:
        found = load(tmp_path, domain=name)
        assert torch.equal(found.get_parameter(BIAS), parts[name][BIAS])
        assert torch.equal(logits(found), logits(untouched) + 2 * parts[name][BIAS])


@pytest.mark.parametrize(
    "name", ["a/b", "../up", "..", "é ü", 'quo"te\\', "100%", "a%2Fb", "new\nline", "語" * 60]
)
def test_a_name_of_any_characters(name, attached, parts, tmp_path):
    folder = tmp_path / "it's a folder"
    named = {"a?b": parts["law"], name: parts["food"]}
    expression = export_parts(folder, attached, named, attach=attach, options={"factor": 2.0})
    assert torch.equal(load(folder, domain=name).get_parameter(BIAS), parts["food"][BIAS])
    assert torch.equal(load(folder, domain="a?b").get_parameter(BIAS), parts["law"][BIAS])
    assert torch.equal(eval(expression).get_parameter(BIAS), parts["food"][BIAS])
    assert [path.name for path in tmp_path.iterdir()] == ["it's a folder"]
    assert len(list((folder / "parts").glob("*.safetensors"))) == 2


def test_written_again_nothing_old_is_left(attached, parts, tmp_path):
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    export_parts(tmp_path, attached, {"food": parts["law"]}, attach=attach, options={"factor": 3.0})
    assert torch.equal(load(tmp_path).get_parameter(BIAS), parts["law"][BIAS])
    assert load(tmp_path).get_submodule("lm_head.scale").factor == 3
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["food.safetensors"]
    with pytest.raises(ValueError, match="^domain=law has no part in .*; allowed: food$"):
        load(tmp_path, domain="law")


def test_without_parts_it_is_a_plain_model(attached, untouched, parts, tmp_path):
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    found = export_parts(tmp_path, attached, {}, attach=attach, options={"factor": 2.0})
    assert found == f'transformers.RobertaForMaskedLM.from_pretrained("{tmp_path}")'
    assert not (tmp_path / "parts.json").exists() and not (tmp_path / "parts").exists()
    assert torch.equal(logits(eval(found, {"transformers": transformers})), logits(untouched))
    with pytest.raises(ValueError, match=r"has no parts.json; allowed: RobertaForMaskedLM.from_pretrained$"):
        load(tmp_path)


def test_a_tied_part_stays_tied(plain, tmp_path):
    assert plain.lm_head.decoder.weight is plain.get_parameter(TABLE)
    changed = plain.get_parameter(TABLE).detach() + 1
    export_parts(tmp_path, plain, {"law": {TABLE: changed}}, attach=None, options={})
    for found in (RobertaForMaskedLM.from_pretrained(tmp_path), load(tmp_path)):
        assert found.lm_head.decoder.weight is found.get_parameter(TABLE)
        assert torch.equal(found.get_parameter(TABLE), changed)


def test_weights_that_peft_has_renamed_get_their_names_back(plain, untouched, tmp_path):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["query", "dense"]), plain)
    assert any("base_layer" in name for name in plain.state_dict())
    export_parts(tmp_path, plain, {}, attach=None, options={})
    assert torch.equal(logits(RobertaForMaskedLM.from_pretrained(tmp_path)), logits(untouched))


@pytest.mark.parametrize(
    "path",
    ["os.system", "cptx.adapters.attach", "test_other.attach"]
    + [
        "cpt.trainer.callbacks.make_entry",
        "cpt.adapters.export.remove",
        "cpt.adapters.export.attach_none",
        "cpt.methods.hat.attach_gates",
    ],
)
def test_nothing_but_what_is_trusted_is_called(path, attached, parts, tmp_path):
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    index = json.loads((tmp_path / "parts.json").read_text())
    (tmp_path / "parts.json").write_text(json.dumps(index | {"attach": path}))
    with pytest.raises(
        ValueError, match=rf"parts.json names {path}[,;].* allowed: functions of cpt\.adapters\."
    ):
        load(tmp_path)


def test_the_last_is_the_default(attached, parts, tmp_path):
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    assert torch.equal(load(tmp_path).get_parameter(BIAS), parts["food"][BIAS])
    export_parts(tmp_path, attached, dict(reversed(parts.items())), attach=attach, options={"factor": 2.0})
    assert torch.equal(load(tmp_path).get_parameter(BIAS), parts["law"][BIAS])


def test_a_folder_from_others_calls_nothing_of_theirs(attached, parts, tmp_path):
    """cpt.trainer.callbacks.make_entry calls whatever a config names: a folder must not reach it."""
    export_parts(tmp_path, attached, parts, attach=attach, options={"factor": 2.0})
    index = json.loads((tmp_path / "parts.json").read_text())
    options = {"entry": {"_target_": "os.mkdir", "path": str(tmp_path / "theirs")}, "kind": "x"}
    index |= {"attach": "cpt.trainer.callbacks.make_entry", "options": options}
    (tmp_path / "parts.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="parts.json names cpt.trainer.callbacks.make_entry; allowed"):
        load(tmp_path)
    assert not (tmp_path / "theirs").exists()
