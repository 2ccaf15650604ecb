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
    plain, even = (build(kind, vocab_size=entries, tie_word_embeddings=True) for _ in range(2))
    pad_head(even)
    assert isinstance(even.get_output_embeddings(), PaddedHead)
    ids = torch.arange(12).view(2, 6) + 5
    for model in (plain, even):
        model.eval()(input_ids=ids).logits.log_softmax(-1)[..., 7].sum().backward()
    torch.testing.assert_close(even(input_ids=ids).logits, plain(input_ids=ids).logits)
    wanted = dict(plain.named_parameters())
    assert wanted.keys() == dict(even.named_parameters()).keys()
    for name, each in even.named_parameters():
        torch.testing.assert_close(each.grad, wanted[name].grad)


MANY = 400_003  # entries, no multiple of 4


def dropped(given, p):
    torch.manual_seed(0)
    with use_quick_dropout(True):
        return functional.dropout(given, p, True)


def test_as_many_are_dropped_as_said_the_others_scaled_and_a_seed_gives_a_mask_while_it_lasts():
    for p, dtype in product((0.01, 0.5, 0.93), (torch.float32, torch.bfloat16)):
        found = dropped(torch.ones(MANY, dtype=dtype), p)
        kept = torch.tensor(1 / (1 - round(p * LEVELS_16) / LEVELS_16), dtype=dtype)
        assert set(found.unique().tolist()) == {0.0, kept.item()}
        for lane in (found[first::4] for first in range(4)):
            share, spread = (lane == 0).double().mean(), (p * (1 - p) / len(lane)) ** 0.5
            assert abs(share.item() - p) < 5 * spread
    ones, plain = torch.ones(1000), functional.dropout
    first = dropped(ones, 0.5)
    with pytest.raises(KeyError), use_quick_dropout(True):
        assert not torch.equal(functional.dropout(ones, 0.5), first)  # the generator goes on
        torch.manual_seed(0)
        assert torch.equal(nn.Dropout(0.5)(ones), first)
        raise KeyError
    torch.manual_seed(0)
    assert functional.dropout is plain and not torch.equal(plain(ones, 0.5), first)
