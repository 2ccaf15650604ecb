"""Checkpoints and fresh models: their objective, their logits, their sentinels."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from cpt.data.packing import terminator
from cpt.models import loading
from cpt.models.objectives import Causal
from tests.conftest import sentences
from tests.models.test_units import FAMILIES, build
from tests.support.running import logits_at

NAMES = ["roberta", "bert", "modernbert", "electra", "distilbert", "gpt2", "llama", "gpt_neox", "opt", "phi3"]


@pytest.fixture(scope="module")
def texts():
    return sentences("alpha beta gamma delta epsilon zeta eta theta", count=40, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_logits_at_positions_are_those_of_the_whole_model_and_it_says_its_objective(name):
    model = build(name).float()
    ids = torch.randint(3, 60, (3, 12))
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    positions = torch.tensor([0, 5, 13, 30])
    batch = {"input_ids": ids, "attention_mask": mask, "positions": positions}
    whole = model(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)[positions]
    torch.testing.assert_close(logits_at(model, batch), whole, rtol=1e-5, atol=1e-5)
    assert not any(module._forward_hooks for module in model.modules())
    for config in (model.config, AutoConfig.for_model(name)):
        told = loading.objective_name("auto", config)
        assert told == ("masked" if FAMILIES[name].auto.__name__.endswith("MaskedLM") else "causal")


@pytest.mark.parametrize(("name", "longest"), [("roberta", 39), ("bert", 40), ("gpt2", 40)])
def test_samples_longer_than_the_positions_are_refused(name, longest):
    model = build(name).float()
    loading.check_length(longest, model, Causal())
    with pytest.raises(ValueError, match=rf"model.length={longest + 1}; allowed: 2 to {longest}"):
        loading.check_length(longest + 1, model, Causal())
    model(input_ids=torch.full((1, longest), 5))


@pytest.fixture(scope="module")
def with_sentinels(texts):
    return loading.train_tokenizer(iter(texts), vocabulary=400, objective="span")


def test_a_learned_tokenizer_has_sentinels_as_t5_has(with_sentinels, tmp_path):
    with_sentinels.save_pretrained(tmp_path)
    for each in (with_sentinels, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(each) == 400
        assert (each.pad_token_id, each.eos_token_id, each.unk_token_id) == (0, 1, 2)
        assert each.bos_token is None
        assert loading.sentinel_ids(each) == list(range(399, 299, -1))
        assert each.convert_ids_to_tokens(399) == "<extra_id_0>"
        text = "Alpha, beta; ünïcode <extra_id_3>"
        ids = each(text, split_special_tokens=True).input_ids
        assert ids[-1] == 1 and max(ids) < 300 and each.decode(ids[:-1]) == text
        assert terminator(each) == []
        assert each.decode(each("a", "b").input_ids) == "a</s>b</s>"


def test_sentinels_are_found_as_t5_and_as_mt5_have_them(texts):
    tokenizer = loading.train_tokenizer(iter(texts), vocabulary=300, objective="masked")
    assert loading.sentinel_ids(tokenizer) == []
    rows = len(tokenizer)
    more = copy.deepcopy(tokenizer)
    loading.add_sentinels(more)
    assert loading.sentinel_ids(more) == list(range(rows + 99, rows - 1, -1))
    mt5 = copy.deepcopy(tokenizer)
    mt5.add_tokens([f"\u2581<extra_id_{number}>" for number in (2, 1, 0)])
    assert loading.sentinel_ids(mt5) == [rows + 2, rows + 1, rows]


FORMS = {
    "t5": {"feed_forward_proj": "relu"},
    "t5 v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"feed_forward_proj": "gated-gelu"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_t5_gives_its_own_logits(form, with_sentinels, tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = {"model_type": form.split()[0], **sizes, **FORMS[form]}
    model = loading.build_model(config, with_sentinels, "span", seed=0).eval()
    assert model.config.decoder_start_token_id == model.config.pad_token_id == 0
    model.save_pretrained(tmp_path)
    with_sentinels.save_pretrained(tmp_path)
    again = loading.load_model(tmp_path, "span").eval()
    found = loading.configuration(str(tmp_path))
    assert loading.objective_name("auto", found) == "span"
    ids = torch.randint(3, 300, (2, 9))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    head = again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert head == (form != "t5 v1.1")
    options = SimpleNamespace(objective="auto", checkpoint=str(tmp_path), mask_rate=0.15, mean_span=3)
    objective = loading.make_objective(options, with_sentinels, found, answers=False, isolated=False)
    assert (objective.pad, objective.end, objective.start, len(objective.sentinels)) == (0, 1, 0, 100)
