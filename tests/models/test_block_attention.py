"""Samples and documents that share rows: each is as if it had a row of its own."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from cpt.core.randomness import sample_keys
from cpt.data.collate import Rows, Sharing
from cpt.models.block_attention import try_isolation
from cpt.models.objectives import Causal, CausalAnswers, Masked

PADDED = CausalAnswers(Causal(), pad=1)
SHARED = CausalAnswers(Causal(), pad=1, sharing=Sharing(even=1))
WIDE = CausalAnswers(Causal(), pad=1, sharing=Sharing(even=10_000))  # in few rows, of several samples' length
LENGTHS = np.array([9, 30, 12, 21, 1, 5, 18, 25, 7, 3])
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
GPT2_SIZES = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 300,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "roberta": SIZES | NO_DROPOUT,
    "modernbert": SIZES | {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2},
}
DECODERS = {
    "gpt2": GPT2_SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": SIZES | {"num_key_value_heads": 2},
    "mistral": SIZES | {"num_key_value_heads": 2, "sliding_window": 6},  # shorter than samples
    "gpt_neox": SIZES | {"hidden_dropout": 0.0},
    "gpt_oss": SIZES
    | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
KERNELS = [
    *product([kind for kind in DECODERS if kind != "gpt_oss"], ("sdpa", "eager")),
    ("gpt_oss", "eager"),
]
TOLERANCES = {"sdpa": (torch.double, 1e-12), "eager": (torch.float, 1e-6)}  # of gradients, relatively


def model_of(kind, kernel=None, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes or (ENCODERS | DECODERS)[kind]))
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=kernel)
    with torch.no_grad():  # weights so large that what a sample sees matters
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return model


def batch_of(objective, *, changed=None):
    """Samples whose last third is their answer, every fourth of raw text; all ids of one may be changed."""
    ids = np.random.default_rng(0).integers(5, 300, (len(LENGTHS), LENGTHS.max()))
    if changed is not None:
        ids[changed] = 5 + (ids[changed] + 7) % 290
    columns = np.arange(ids.shape[1])
    ends = LENGTHS[:, None]
    ids[columns >= ends] = 1
    answers = (columns < ends) & (columns >= ends - np.maximum(1, ends // 3))
    answers[3::4] = False
    batch, _ = objective.batch(Rows(ids, LENGTHS, sample_keys(7, np.arange(len(LENGTHS))), answers))
    batch["weight"] = torch.tensor(1 / len(batch["positions"]))
    return objective.lay_out(batch)


def loss_and_gradient(model, objective):
    batch = batch_of(objective)
    nll = objective.nll(model, batch)
    gradients = torch.autograd.grad(nll.sum() * batch["weight"], list(model.parameters()))
    return nll, torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("sharing", [SHARED, WIDE])
@pytest.mark.parametrize(("kind", "kernel"), KERNELS)
def test_no_bit_of_a_sample_depends_on_another_and_its_gradients_are_the_padded_ones(kind, kernel, sharing):
    model = model_of(kind, kernel).eval()
    batch = batch_of(sharing)
    with torch.no_grad():
        logits, hidden = sharing.outputs(model, batch)
        for changed in range(0, len(LENGTHS), 3):
            changed_logits, changed_hidden = sharing.outputs(model, batch_of(sharing, changed=changed))
            of_changed = batch["rows"] == changed
            assert torch.equal(logits[~of_changed], changed_logits[~of_changed])
            if of_changed.any():
                assert not torch.equal(logits[of_changed], changed_logits[of_changed])
            of_others = batch["attention_mask"].bool()
            of_others[changed] = False
            assert torch.equal(hidden[of_others], changed_hidden[of_others])

    nll, gradient = loss_and_gradient(model, PADDED)
    shared_nll, shared_gradient = loss_and_gradient(model, sharing)
    assert len(nll) == len(shared_nll) and float(gradient.norm()) > 0.1
    torch.testing.assert_close(shared_nll, nll, rtol=1e-5, atol=1e-6)
    assert float((gradient - shared_gradient).norm() / gradient.norm()) < 1e-6


def batch_of_documents(rows):
    """The batch of rows of documents, with padding behind them."""
    row_owners = []
    for row in rows:
        owners = [torch.full_like(document, number) for number, document in enumerate(row)]
        row_owners.append(torch.cat(owners))
    segments = pad_sequence(row_owners, batch_first=True, padding_value=-1)
    ids = pad_sequence([torch.cat(row) for row in rows], batch_first=True, padding_value=1)
    positions = (segments.flatten() >= 0).nonzero().flatten()
    return {
        "input_ids": ids,
        "positions": positions,
        "targets": ids.flatten()[positions],
        "attention_mask": (segments >= 0).long(),
        "segments": segments,
    }


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [*product((*ENCODERS, "gpt2", "llama"), TOLERANCES), ("gpt_oss", "eager")],
)
def test_losses_and_gradients_are_those_of_documents_in_rows_of_their_own(kind, kernel):
    dtype, tolerance = TOLERANCES[kernel]
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 300, (length,), generator=generator) for length in (9, 30, 1, 18, 2)]
    rows = [texts, [texts[number] for number in (3, 2, 4, 1)]]
    packed = batch_of_documents(rows)
    padded = batch_of_documents([[document] for document in rows[0] + rows[1]])
    del padded["segments"]
    losses = []
    gradients = []
    for batch in (packed, padded):
        model = model_of(kind, kernel).to(dtype).train()
        objective = Masked.__new__(Masked) if kind in ENCODERS else Causal()  # what is masked is given
        logits, _ = objective.outputs(model, batch)
        nll = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")
        nll.mean().backward()
        losses.append(nll.detach())
        with_gradient = [parameter for parameter in model.parameters() if parameter.grad is not None]
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in with_gradient]))
    assert float((losses[0] - losses[1]).abs().max() / losses[1].abs().max()) < 1e-5
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < tolerance


WRONG = {
    "bloom": (GPT2_SIZES, "takes no positions"),
    "mamba": (SIZES, "carries a state from token to token"),
    "opt": (SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32}, "mixes the samples of a row"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_cannot_keep_them_apart_is_refused(kind):
    sizes, reason = WRONG[kind]
    with pytest.raises(ValueError, match=f"packing=document_mask is invalid: a {kind} {reason}"):
        try_isolation(model_of(kind, **sizes), documents=False)
    try_isolation(model_of("gpt2"), documents=False)
