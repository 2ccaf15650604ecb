"""Documents that share a row: no logit of one hears of another, bit for bit, and gradients are those of
rows of their own."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from cpt.data.collate import Batch
from cpt.models.block_attention import block_masks
from cpt.models.objectives import Causal, Masked

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    **{"vocab_size": 300, "max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0},
    **{"eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2},
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "roberta": SIZES | STILL,
    "bert": SIZES | STILL,
    "modernbert": SIZES | {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2},
}
DECODERS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": SIZES | {"num_key_value_heads": 2},
}
ALL = [(kind, kernel) for kind in (*ENCODERS, *DECODERS) for kernel in ("sdpa", "eager")]
LENGTHS = (9, 30, 1, 18, 2)  # of the documents of a row; the second row has them in another order


class Unmasked(Masked):
    """Without a tokenizer: what is masked is given."""

    def __init__(self):
        pass


def model_of(kind: str, kernel: str = "sdpa"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(ENCODERS | DECODERS)[kind])
    made = (AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM).from_config(
        config, attn_implementation=kernel
    )
    with torch.no_grad():  # weights so large that what a document sees matters
        for weight in made.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return made


def objective_of(kind: str):
    return Unmasked() if kind in ENCODERS else Causal()


def rows(*, changed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and segments [2, 64] of documents, four places of padding behind them; the ids of one document may
    be changed in both rows."""
    draw, ids, segments = np.random.default_rng(0), [], []
    texts = [draw.integers(5, 300, length) for length in LENGTHS]
    if changed is not None:
        texts[changed] = 5 + (texts[changed] + 7) % 290
    for order in ((0, 1, 2, 3, 4), (3, 2, 4, 1, 0)):
        ids.append(np.concatenate([*(texts[each] for each in order), np.full(4, 1)]))
        segments.append(np.concatenate([*(np.full(LENGTHS[each], each) for each in order), np.full(4, -1)]))
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(segments))


def packed_batch(**how) -> Batch:
    ids, segments = rows(**how)
    places = (segments.flatten() >= 0).nonzero().flatten()
    rest = {"attention_mask": (segments >= 0).long(), "segments": segments}
    return {"input_ids": ids, "positions": places, "targets": ids.flatten()[places], **rest}


def padded_batch() -> tuple[Batch, torch.Tensor]:
    """The documents of `packed_batch` in a row each, and the order of its places among theirs."""
    ids, segments = rows()
    width, own, order, seen = max(LENGTHS), [], [], 0
    for row, owners in zip(ids, segments, strict=True):
        for each in dict.fromkeys(owners[owners >= 0].tolist()):
            text = row[owners == each]
            own.append(torch.nn.functional.pad(text, (0, width - len(text)), value=1))
            order += range(seen, seen + len(text))
            seen += width
    table, places = torch.stack(own), torch.tensor(order)
    mask = torch.zeros(table.numel(), dtype=torch.long)
    mask[places] = 1
    batch = {"input_ids": table, "attention_mask": mask.view_as(table), "positions": places}
    return batch | {"targets": table.flatten()[places]}, places


@pytest.mark.parametrize(("kind", "kernel"), ALL)
@pytest.mark.parametrize("changed", [0, 1])
def test_another_document_changes_no_bit_of_a_logit(kind, kernel, changed):
    model, objective = model_of(kind, kernel).eval(), objective_of(kind)
    with torch.no_grad():
        one, other = (objective.outputs(model, packed_batch(**how))[0] for how in ({}, {"changed": changed}))
    mine = rows()[1].flatten()
    mine = mine[mine >= 0] == changed
    assert torch.equal(one[~mine], other[~mine])
    assert not torch.equal(one[mine], other[mine])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_losses_and_gradients_are_those_of_documents_in_rows_of_their_own(kind, dtype):
    found = []
    for batch in (packed_batch(), padded_batch()[0]):
        model, objective = model_of(kind).to(dtype).train(), objective_of(kind)
        logits, hidden = objective.outputs(model, batch)
        nll = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")
        nll.mean().backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        read = objective.encode(model, batch).flatten(0, 1)[batch["positions"]]
        torch.testing.assert_close(read, hidden.flatten(0, 1)[batch["positions"]])
        found.append((nll.detach(), gradient))
    (one, own), (other, again) = found
    assert float((one - other).abs().max() / other.abs().max()) < 1e-5
    assert float((own - again).norm() / again.norm()) < (1e-6 if dtype is torch.float32 else 1e-12)


def test_a_window_stays_within_its_document():
    masks = block_masks(model_of("modernbert"), torch.tensor([[0] * 12 + [1] * 4]))
    assert set(masks) == {"full_attention", "sliding_attention"}
    full, near = masks["full_attention"][0, 0], masks["sliding_attention"][0, 0]
    assert full[0].tolist() == [True] * 12 + [False] * 4
    assert near[0].tolist() == [True] * 5 + [False] * 11  # 4 to each side
    assert near[13].tolist() == [False] * 12 + [True] * 4
