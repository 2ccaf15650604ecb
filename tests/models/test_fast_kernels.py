"""A padded head gives the logits of the plain one, and quick dropout drops as many as it says."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from cpt.models.fast_kernels import LEVELS_16, PaddedHead, pad_head, use_quick_dropout
from tests.models.test_units import build


@pytest.mark.parametrize("entries", [257, 260])
@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_logits_and_gradients_are_those_of_the_plain_head(kind, entries, monkeypatch):
    monkeypatch.setattr(PaddedHead, "forward", PaddedHead.padded)
    plain = build(kind, vocab_size=entries, tie_word_embeddings=True)
    padded = build(kind, vocab_size=entries, tie_word_embeddings=True)
    pad_head(padded)
    assert isinstance(padded.get_output_embeddings(), PaddedHead)
    ids = torch.arange(12).view(2, 6) + 5
    for model in (plain, padded):
        model.eval()(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    torch.testing.assert_close(padded(input_ids=ids).logits, plain(input_ids=ids).logits)
    expected = dict(plain.named_parameters())
    assert expected.keys() == dict(padded.named_parameters()).keys()
    for name, parameter in padded.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


NUM_ENTRIES = 400_003  # no multiple of 4


def drop(values, p):
    torch.manual_seed(0)
    with use_quick_dropout(True):
        return functional.dropout(values, p, True)


def test_as_many_are_dropped_as_said_the_others_scaled_and_a_seed_gives_a_mask_while_it_lasts():
    for p, dtype in product((0.01, 0.5, 0.93), (torch.float32, torch.bfloat16)):
        values = drop(torch.ones(NUM_ENTRIES, dtype=dtype), p)
        scale = torch.tensor(1 / (1 - round(p * LEVELS_16) / LEVELS_16), dtype=dtype)
        assert set(values.unique().tolist()) == {0.0, scale.item()}
        for offset in range(4):  # of the four entries that share a drawn number
            is_dropped = values[offset::4] == 0
            deviation = (p * (1 - p) / len(is_dropped)) ** 0.5
            assert abs(is_dropped.double().mean().item() - p) < 5 * deviation

    values = torch.ones(1000)
    plain_dropout = functional.dropout
    dropped = drop(values, 0.5)
    with pytest.raises(KeyError), use_quick_dropout(True):
        assert not torch.equal(functional.dropout(values, 0.5), dropped)  # the generator goes on
        torch.manual_seed(0)
        assert torch.equal(nn.Dropout(0.5)(values), dropped)
        raise KeyError
    torch.manual_seed(0)
    assert functional.dropout is plain_dropout
    assert not torch.equal(plain_dropout(values, 0.5), dropped)
