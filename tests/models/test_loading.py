"""Checkpoints, fresh models and models that grow: their objective, logits, sentinels, rows and functions."""

import copy
import itertools
import logging
import re

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from cpt.data.separator import find_terminator
from cpt.models import growth, loading, vocabulary
from cpt.models.loading import build_model, is_tied, load_model, make_skeleton, train_tokenizer
from tests.conftest import sentences
from tests.models.test_units import FAMILIES, build, inputs_of, logits, loss
from tests.support.forward_passes import logits_at

pytestmark = pytest.mark.slow

NAMES = ["roberta", "mpnet", "modernbert", "electra", "distilbert", "gpt2", "llama", "gpt_neox", "opt"]
TEXTS = sentences("alpha beta gamma delta epsilon zeta eta theta", count=40, seed=0)


def test_the_hub_client_has_no_log_handler_in_addition_to_that_of_the_run():
    assert logging.getLogger("huggingface_hub").handlers == []


@pytest.mark.parametrize("name", NAMES)
def test_logits_at_positions_are_those_of_the_whole_model_and_it_says_its_objective(name):
    model = build(name).float()
    ids = torch.randint(3, 60, (3, 12))
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "positions": torch.tensor([0, 5, 13, 30])}
    all_logits = model(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)
    expected = all_logits[batch["positions"]]
    torch.testing.assert_close(logits_at(model, batch), expected, rtol=1e-5, atol=1e-5)

    objective = "masked" if FAMILIES[name].auto.__name__.endswith("MaskedLM") else "causal"
    for config in (model.config, AutoConfig.for_model(name)):
        assert loading.resolve_objective("auto", config) == objective


def test_a_model_of_images_is_refused_with_the_text_decoder_that_it_has():
    message = (
        r"^model.objective=auto is invalid for a llava model: it reads more than text, around a text decoder "
        r"\(llama\). Allowed: this decoder alone, as docs/examples/text_decoder.py saves it$"
    )
    with pytest.raises(ValueError, match=message):
        loading.resolve_objective("auto", AutoConfig.for_model("llava"))
    for name in ("clip", "vit", "qwen2_vl", "florence2"):  # without one, or with one that has no causal class
        with pytest.raises(
            ValueError, match=f"for a {name} model. Allowed: models with a language-model head$"
        ):
            loading.resolve_objective("causal", AutoConfig.for_model(name))


@pytest.fixture(scope="module")
def span_tokenizer(tmp_path_factory):
    """A tokenizer of 400 tokens that was trained for span corruption, stored and loaded again."""
    folder = tmp_path_factory.mktemp("span_tokenizer")
    train_tokenizer(iter(TEXTS), vocabulary=400, objective="span").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_learned_tokenizer_has_the_special_tokens_and_sentinels_of_t5(span_tokenizer):
    special_ids = (span_tokenizer.pad_token_id, span_tokenizer.eos_token_id, span_tokenizer.unk_token_id)
    assert special_ids == (0, 1, 2)
    assert len(span_tokenizer) == 400
    assert loading.find_sentinel_ids(span_tokenizer) == list(range(399, 299, -1))


def test_a_learned_tokenizer_reads_a_sentinel_in_a_text_as_text(span_tokenizer):
    text = "Alpha, beta; ünïcode <extra_id_3>"
    *text_ids, end_id = span_tokenizer(text, split_special_tokens=True).input_ids
    assert end_id == span_tokenizer.eos_token_id
    assert max(text_ids) < 300  # no sentinel
    assert span_tokenizer.decode(text_ids) == text


def test_a_learned_tokenizer_ends_each_text_itself(span_tokenizer):
    assert span_tokenizer.decode(span_tokenizer("a", "b").input_ids) == "a</s>b</s>"
    assert find_terminator(span_tokenizer) == []


def test_sentinels_of_mt5_are_found():
    # mT5 has sentinels with a space before them, the first of which is the last token.
    like_mt5 = train_tokenizer(iter(TEXTS), vocabulary=300, objective="masked")
    assert loading.find_sentinel_ids(like_mt5) == []
    like_mt5.add_tokens([f"\u2581<extra_id_{number}>" for number in (2, 1, 0)])
    size = len(like_mt5)
    assert loading.find_sentinel_ids(like_mt5) == [size - 1, size - 2, size - 3]


NOISE = 0.5
MODES = {
    "neurons": lambda model: growth.grow_neurons(model, 120, noise=NOISE),
    "heads": lambda model: growth.grow_heads(model, 4 // shared_by(model), noise=NOISE),
    "layers": lambda model: growth.grow_layers(model, 2),
    "hidden": lambda model: growth.grow_hidden(model, 2, noise=NOISE),
    "all": lambda model: [MODES[mode](model) for mode in ("hidden", "neurons", "layers")],
}
POST_NORM = ("bert", "roberta")
OWN_SIZE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "t5", "t5-gated")  # of heads


def grows_exactly(name: str, mode: str) -> bool:
    if mode == "heads":
        return name in OWN_SIZE
    if mode in ("layers", "all"):
        return name not in POST_NORM
    return True


GROWN = [*POST_NORM, "modernbert", "gpt2", "gpt_neox", *OWN_SIZE]
EXACT = [(name, mode) for name, mode in itertools.product(GROWN, MODES) if grows_exactly(name, mode)]


def shared_by(model: nn.Module) -> int:
    """Query heads of a key/value head."""
    heads = model.config.num_attention_heads
    return heads // (getattr(model.config, "num_key_value_heads", None) or heads)


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    return logits(model, inputs_of(model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "mode"), EXACT)
def test_the_function_stays(name, mode, tied, tmp_path):
    model = build(name, tie_word_embeddings=tied)
    before = outputs(model)
    size = model.num_parameters()
    torch.manual_seed(0)
    MODES[mode](model)
    assert model.num_parameters() > size
    assert before.std() > 0.1 and (outputs(model) - before).abs().max() < 1e-10
    if mode in ("heads", "all") and not tied:
        if mode == "all":
            MODES[mode](model)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
        assert parameter_shapes(loaded) == parameter_shapes(model)
        assert (outputs(loaded) - outputs(model)).abs().max() < 1e-6


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_copies_get_gradients_of_their_own():
    model = build("llama")
    torch.manual_seed(0)
    growth.grow_neurons(model, 48, noise=NOISE)
    torch.manual_seed(0)
    origins = growth.draw_units(48, 48)  # what each of the new ones is a copy of, in the first block
    loss(model, inputs_of(model)).backward()
    up = model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(up[48:], up[origins])
    assert not torch.allclose(up.grad[48:], up.grad[origins])


@pytest.mark.parametrize("name", ["distilbert", "electra", "opt", "gemma2", "bart", "bloom"])
def test_every_other_family_grows_or_is_refused(name):
    for mode in MODES:
        model = build(name)
        before = outputs(model)
        try:
            MODES[mode](model)
        except ValueError as error:
            assert re.search("can not be grown exactly, only that of|can not be grown: ", str(error))
            assert mode not in ("neurons", "layers") or name == "bloom"  # the one that grows in neither
            continue
        if mode not in ("layers", "all"):  # these are exact in some families only
            assert (outputs(model) - before).abs().max() < 1e-5


ADDED = ["contract", "pasta", "section"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
CONFIGS = {
    "deberta-v2": ("masked", SIZES),
    "gpt2": ("causal", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "gpt_neox": ("causal", SIZES),  # its head is not tied
    "t5": ("span", T5),
    "t5 v1.1": ("span", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_stays_tied_or_untied(kind, tmp_path):
    objective, sizes = CONFIGS[kind]
    size = 400 if objective == "span" else 300
    tokenizer = train_tokenizer(iter(TEXTS), vocabulary=size, objective=objective)
    config = {"model_type": kind.split()[0], **sizes}
    start = build_model(config, tokenizer, objective, seed=0).eval()
    rows = len(tokenizer)
    tied = is_tied(start)
    assert tied == (kind not in ("gpt_neox", "t5 v1.1"))

    larger_tokenizer = copy.deepcopy(tokenizer)
    assert larger_tokenizer.add_tokens(ADDED) == 3
    model = enlarge_model(start, larger_tokenizer, seed=0)
    second_model = enlarge_model(start, larger_tokenizer, seed=1)
    pairs = zip(model.state_dict().values(), second_model.state_dict().values(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)  # whatever was drawn
    assert is_tied(model) == tied
    for table in ("get_input_embeddings", "get_output_embeddings"):
        old = getattr(start, table)().weight
        new = getattr(model, table)().weight
        assert torch.equal(new[:rows], old[:rows])
        assert len(new) == rows + 3 == vocabulary.count_entries(larger_tokenizer) == model.config.vocab_size

    inputs = {"input_ids": torch.tensor([larger_tokenizer.convert_tokens_to_ids(ADDED)])}
    if objective == "span":
        inputs["decoder_input_ids"] = inputs["input_ids"]
        assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, objective).eval()
    model_logits = model(**inputs).logits
    assert is_tied(loaded) == tied
    assert torch.equal(loaded(**inputs).logits, model_logits)
    assert model_logits.shape[-1] == rows + 3 and torch.isfinite(model_logits).all()
    assert {*make_skeleton(loaded).state_dict()} == {*loaded.state_dict()}


def enlarge_model(model, tokenizer, *, seed: int):
    """A copy of a model with rows for a tokenizer's new tokens, after other numbers were drawn."""
    copied = copy.deepcopy(model)
    torch.manual_seed(seed)
    vocabulary.fit_rows(copied, tokenizer, checkpoint="x")
    return copied
