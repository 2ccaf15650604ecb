"""A head of an odd number of entries is computed with more of them, and gives its own."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from cpt.models.memory import EvenHead, even_head

SIZES = {
    "gpt2": (AutoModelForCausalLM, {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    "roberta": (
        AutoModelForMaskedLM,
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
}


def model_of(kind: str, entries: int) -> nn.Module:
    auto, sizes = SIZES[kind]
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(kind, vocab_size=entries, **sizes)).double()


@pytest.fixture
def filled(monkeypatch):
    """Heads are computed as on a GPU in 16 bits."""
    monkeypatch.setattr(EvenHead, "forward", EvenHead.padded)


@pytest.mark.parametrize("entries", [257, 260, 319])
@pytest.mark.parametrize("kind", SIZES)
def test_logits_and_gradients_are_those_of_the_plain_head(kind, entries, filled):
    plain, even = (model_of(kind, entries) for _ in range(2))
    even_head(even)
    assert isinstance(even.get_output_embeddings(), EvenHead)
    ids = torch.arange(12).view(2, 6) + 5
    for model in (plain, even):
        model.eval()(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    assert even(input_ids=ids).logits.shape == (2, 6, entries)
    torch.testing.assert_close(even(input_ids=ids).logits, plain(input_ids=ids).logits)
    wanted = dict(plain.named_parameters())
    assert wanted.keys() == dict(even.named_parameters()).keys()
    for name, each in even.named_parameters():
        torch.testing.assert_close(each.grad, wanted[name].grad)
