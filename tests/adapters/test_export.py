"""Exported folders: what is written is a plain model and its parts, and loading gives them back."""

import copy
import json

import pytest
import torch
import transformers
from transformers import RobertaForMaskedLM

import cpt.adapters.export
from cpt.adapters.bottleneck import attach_bottlenecks
from cpt.adapters.export import export_parts, load
from tests.models.test_units import build
from tests.support.method_fixtures import equal_tensors

pytestmark = pytest.mark.slow

IDS = torch.tensor([[1, 7, 8, 9, 2], [1, 5, 6, 2, 0]])
OPTIONS = {"placement": "pfeiffer", "reduction": 4, "activation": "gelu"}


@pytest.fixture
def untouched():
    return build("roberta", tie_word_embeddings=True).float()


@pytest.fixture
def export(untouched, tmp_path):
    adapted = copy.deepcopy(untouched)
    names = attach_bottlenecks(adapted, **OPTIONS).names

    def write(*domains, folder=tmp_path):
        parts = {}
        for domain in domains:
            parts[domain] = {name: torch.randn_like(adapted.get_parameter(name)) for name in names}
        return parts, export_parts(folder, adapted, parts, attach=attach_bottlenecks, options=OPTIONS)

    return write


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=(IDS != 0).long()).logits


def is_of(model, part) -> bool:
    return equal_tensors(part, {name: model.get_parameter(name) for name in part})


def test_the_folder_is_the_plain_model_and_each_domain_has_its_part(export, untouched, tmp_path):
    parts, _ = export("law", "food")
    model, info = RobertaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert torch.equal(logits(model), logits(untouched))
    assert all(is_of(load(tmp_path, domain=name), part) for name, part in parts.items())
    assert is_of(load(tmp_path), parts["food"]) and not torch.equal(logits(load(tmp_path)), logits(untouched))
    export("food")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["food.safetensors"]
    with pytest.raises(ValueError, match="^domain=law is invalid"):
        load(tmp_path, domain="law")
    _, expression = export()
    assert not (tmp_path / "parts.json").exists() and not (tmp_path / "parts").exists()
    assert torch.equal(logits(eval(expression, {"transformers": transformers})), logits(untouched))
    with pytest.raises(ValueError, match="has no parts.json"):
        load(tmp_path)


def test_a_name_of_any_characters(export, tmp_path):
    for number, name in enumerate(["../up", 'quo"te\\', "new\nline", "語" * 60]):
        folder = tmp_path / f"it's a folder {number}"
        parts, expression = export("a?b", name, folder=folder)
        assert is_of(load(folder, domain=name), parts[name])
        assert is_of(eval(expression, {"cpt": cpt}), parts[name])
        assert len([*tmp_path.iterdir()]) == number + 1 and len([*folder.glob("parts/*.safetensors")]) == 2


def test_a_folder_from_others_calls_nothing_of_theirs(export, tmp_path):
    export("law")
    index = json.loads((tmp_path / "parts.json").read_text())
    options = {"entry": {"_target_": "os.mkdir", "path": str(tmp_path / "theirs")}, "kind": "x"}
    for path in ("os.system", "test_other.attach", "cpt.export.remove", "cpt.methods.hat.attach_gates"):
        for changed in ({"attach": path}, {"attach": path, "options": options}):
            (tmp_path / "parts.json").write_text(json.dumps(index | changed))
            with pytest.raises(ValueError, match=rf"attach={path} of parts.json is invalid"):
                load(tmp_path)
    assert not (tmp_path / "theirs").exists()
