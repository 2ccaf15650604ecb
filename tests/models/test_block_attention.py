"""Samples and documents that share rows: each is as if it had a row of its own."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    modeling_flash_attention_utils,
)

from cpt.core.randomness import sample_keys
from cpt.data.collate import Rows, Sharing
from cpt.models.block_attention import make_inputs, try_isolation, try_lengths
from cpt.models.objectives import Causal, CausalAnswers, Masked
from cpt.models.varlen_attention import REFERENCE, attend_within

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
    *product([kind for kind in DECODERS if kind != "gpt_oss"], ("sdpa", "eager", REFERENCE)),
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
    [
        *product((*ENCODERS, "gpt2", "llama"), TOLERANCES),
        ("gpt_oss", "eager"),
        ("gpt2", REFERENCE),
        ("mistral", REFERENCE),
    ],
)
def test_losses_and_gradients_are_those_of_documents_in_rows_of_their_own(kind, kernel):
    dtype, tolerance = TOLERANCES.get(kernel, (torch.double, 1e-12))
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
        try_isolation(model_of(kind, **sizes), are_documents=False)
    try_isolation(model_of("gpt2"), are_documents=False)


@pytest.fixture
def flash_calls(monkeypatch):
    """What transformers asks of flash attention, whose functions are plain ones on a CPU: the boundaries of each
    call, None for one of whole rows."""
    calls = []

    def attend_in_documents(query, key, value, *, cu_seqlens_q, cu_seqlens_k, **options):
        calls.append((cu_seqlens_q.tolist(), options["max_seqlen_q"]))
        rows = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and options["causal"]
        outputs, _ = attend_within(
            None, *rows, None, scaling=options["softmax_scale"], cu_seq_lens_q=cu_seqlens_q
        )
        return outputs[0]

    def attend_in_rows(query, key, value, **options):
        calls.append(None)
        return attend_within(None, *(tensor.transpose(1, 2) for tensor in (query, key, value)), None)[0]

    def name_options(**options):
        names = {"is_causal": "causal", "softmax_scale": "softmax_scale"}
        lengths = {name: options[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in options}
        return lengths | {names[name]: value for name, value in options.items() if name in names}

    functions = (attend_in_rows, attend_in_documents, None, None, None)
    monkeypatch.setattr(
        modeling_flash_attention_utils,
        "lazy_import_flash_attention",
        lambda implementation: (functions, (name_options, None)),
    )
    return calls


@pytest.mark.parametrize("documents", [True, False])
def test_flash_attention_gets_the_documents_of_all_rows(documents, flash_calls):
    model = model_of("llama", "sdpa").eval()
    if documents:
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(5, 300, (length,), generator=generator) for length in (9, 30, 1, 18, 2)]
        batch = batch_of_documents([texts, [texts[number] for number in (3, 2, 4, 1)]])
        objective = Causal()
        is_text = batch["attention_mask"].bool()
    else:
        objective = SHARED
        batch = batch_of(objective)
        is_text = batch["attention_mask"].bool()
    with torch.no_grad():
        logits, hidden = objective.outputs(model, batch)
        model.config._attn_implementation = "flash_attention_2"  # without its check for a GPU
        flash_logits, flash_hidden = objective.outputs(model, batch)

    assert hidden.shape == flash_hidden.shape
    torch.testing.assert_close(flash_logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flash_hidden[is_text], hidden[is_text], rtol=1e-4, atol=1e-5)
    assert len(flash_calls) == 2  # layers
    if documents:
        ends = np.cumsum([9, 30, 1, 18, 2, 18, 1, 2, 30, 9])  # the last one is padding
        assert flash_calls[0] == ([0, *ends], 60)
    else:
        inputs, _ = make_inputs(model, batch, causal=True)
        assert flash_calls[0][0][-1] == inputs["input_ids"].numel()


def test_a_class_that_does_not_pass_the_lengths_on_is_refused():
    for documents in (True, False):
        model = model_of("stablelm", **SIZES, num_key_value_heads=2)
        try_isolation(model, are_documents=documents)
        with pytest.raises(
            ValueError, match=r"implementation=sdpa is invalid .*: a stablelm does not tell it where"
        ):
            try_lengths(model, are_documents=documents)
        assert model.config._attn_implementation == "sdpa"
        try_lengths(model_of("llama"), are_documents=documents)
