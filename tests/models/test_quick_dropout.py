"""Dropout whose masks are drawn 16 bits an entry."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig

from cpt.models.memory import LEVELS_16, draw_quickly, drops_attention

MANY = 400_003  # entries, no multiple of 4


def dropped_of(given, p, **how):
    torch.manual_seed(0)
    with draw_quickly(True):
        return functional.dropout(given, p, True, **how)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.93])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_are_dropped_as_said_and_the_others_are_scaled(p, dtype):
    found = dropped_of(torch.ones(MANY, dtype=dtype), p)
    nearest = round(p * LEVELS_16) / LEVELS_16
    kept = torch.tensor(1 / (1 - nearest), dtype=dtype)
    assert set(found.unique().tolist()) == {0.0, kept.item()}
    for lane in [slice(None), *(slice(first, None, 4) for first in range(4))]:
        share = (found[lane] == 0).double().mean().item()
        spread = (p * (1 - p) / len(found[lane])) ** 0.5
        assert abs(share - p) < 5 * spread, lane


def test_a_seed_gives_a_mask_and_the_generator_goes_on():
    ones = torch.ones(1000)
    first, again = dropped_of(ones, 0.5), dropped_of(ones, 0.5)
    assert torch.equal(first, again)
    with draw_quickly(True):
        assert not torch.equal(functional.dropout(ones, 0.5), first)


def test_modules_draw_so_while_it_lasts_and_only_then():
    plain, module, ones = functional.dropout, nn.Dropout(0.5), torch.ones(64)
    torch.manual_seed(3)
    by_torch = module(ones)
    with pytest.raises(KeyError), draw_quickly(True):
        torch.manual_seed(3)
        assert not torch.equal(module(ones), by_torch)
        raise KeyError
    assert functional.dropout is plain
    with draw_quickly(False):
        assert functional.dropout is plain


@pytest.mark.parametrize(
    ("kind", "given", "attention"),
    [
        ("roberta", {}, True),
        ("roberta", {"attention_probs_dropout_prob": 0.0}, False),
        ("gpt2", {}, True),
        ("gpt2", {"attn_pdrop": 0.0}, False),
        ("t5", {}, True),
        ("modernbert", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
        ("opt", {}, False),  # dropout=0.1, attention_dropout=0
        ("distilbert", {"dropout": 0.0, "attention_dropout": 0.1}, True),
    ],
)
def test_what_a_configuration_says_of_dropout(kind, given, attention):
    config = AutoConfig.for_model(kind, **given)
    assert drops_attention(config) == attention
