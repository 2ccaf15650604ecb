"""KL(base || model) at scored positions: against its formula on a plain model, whole and in chunks."""

import pytest
import torch
from torch.nn import functional

from cpt.data.collate import label_batch
from cpt.models import divergence
from cpt.models.divergence import BaseWeights, compare_with_base, divergence_by_position
from cpt.models.objectives import Causal
from tests.models.test_chunked_head import VOCABULARY, build_model

NUM_ROWS, LENGTH = 3, 12


def make_batch(is_seq2seq):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (NUM_ROWS, LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, -100)
    return label_batch(
        ids, labels, torch.ones_like(ids, dtype=torch.bool), decoder_input_ids=ids if is_seq2seq else None
    ), labels


@pytest.mark.parametrize("family", ["bert transforms", "gemma2 with a softcap", "t5 scales states"])
@torch.no_grad()
def test_it_is_the_divergence_of_two_plain_models_at_the_scored_positions_whole_or_in_chunks(
    family, monkeypatch
):
    model = build_model(family).eval()
    base_weights = BaseWeights(model, constant_names=())
    base = build_model(family).eval()
    base.load_state_dict(model.state_dict())
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    batch, labels = make_batch(model.config.is_encoder_decoder)

    inputs = {"input_ids": batch["input_ids"]}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = batch["decoder_input_ids"]
    is_scored = labels != -100
    log_p = base(**inputs).logits[is_scored].log_softmax(-1)
    log_q = model(**inputs).logits[is_scored].log_softmax(-1)
    expected = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    targets = labels[is_scored]

    objective = Causal()  # which only says how inputs are laid out
    for max_logits, max_entries in ((None, 2**24), (VOCABULARY * 4, VOCABULARY * 3)):
        objective.max_logits = max_logits
        monkeypatch.setattr(divergence, "MAX_ENTRIES", max_entries)
        compared = compare_with_base(
            model, batch, objective=objective, base_weights=base_weights.complete(model), weights={}
        )
        torch.testing.assert_close(compared.kl, expected, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(compared.base_nll, functional.nll_loss(log_p, targets, reduction="none"))
        torch.testing.assert_close(compared.nll, functional.nll_loss(log_q, targets, reduction="none"))
    assert expected.min() > 0


def test_equal_predictions_have_the_divergence_0_and_none_is_negative():
    generator = torch.Generator().manual_seed(0)
    base = 5 * torch.randn(50, 400, generator=generator)
    assert torch.equal(divergence_by_position(base, base.clone()), torch.zeros(50))
    for scale in (1e-7, 1e-6, 1e-5):  # at which rounding is larger than the divergence
        nearby = base + scale * torch.randn(base.shape, generator=generator)
        assert divergence_by_position(base, nearby).min() >= 0
    assert divergence_by_position(base[:0], base[:0]).shape == (0,)
    shifted = divergence_by_position(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
    assert shifted.item() == pytest.approx(0.4338, abs=1e-4)  # of base and model exchanged 0.3272
