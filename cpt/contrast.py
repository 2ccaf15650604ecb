"""The contrast of DAS and DGA: what the model knows now against what it knew (Ke et al., ICLR 2023, eq. 6)

    L_con = -1/N sum_n log  exp(sim(o_n, o_n+) / tau)
                            -----------------------------------------------------------
                            sum_j  exp(sim(o_n, o_j+) / tau) + exp(sim(o_n, o_j-) / tau)

with mean-pooled last hidden states: o of the full model, o+ of a second dropout pass, o- of a pass in which
each unit is multiplied by its importance, so that only earlier knowledge speaks."""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.blocks import gated
from cpt.importance import SoftMask
from cpt.model import encoded, nll_of, outputs_at
from cpt.objectives import Batch
from cpt.options import number


def contrastive(anchors: Tensor, positives: Tensor, negatives: Tensor, *, temperature: float) -> Tensor:
    """L_con of vectors, each [N, D], a scalar; sim is the cosine. The positives and negatives of all
    processes count."""
    others, before = everyones(torch.stack([positives, negatives], dim=1))
    candidates = functional.normalize(torch.cat([others[:, 0], others[:, 1]]), dim=-1)
    similarity = functional.normalize(anchors, dim=-1) @ candidates.T
    own = before + torch.arange(len(anchors), device=anchors.device)
    return functional.cross_entropy(similarity / temperature, own)


def everyones(vectors: Tensor) -> tuple[Tensor, int]:
    """The rows [N, ...] of all processes, one process after another, and how many stand before the own
    ones; gradients go back to whose row it is."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return vectors, 0
    sizes = [
        torch.zeros((), dtype=torch.long, device=vectors.device) for _ in range(distributed.get_world_size())
    ]
    distributed.all_gather(sizes, torch.tensor(len(vectors), device=vectors.device))
    missing = max(sizes) - len(vectors)  # processes may differ by a row, gathered tensors may not
    padded = functional.pad(vectors, [0, 0] * (vectors.ndim - 1) + [0, int(missing)])
    parts = [part[:size] for part, size in zip(all_gather(padded), sizes, strict=True)]
    return torch.cat(parts), int(sum(sizes[: distributed.get_rank()]))


def pooled(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mean [B, D] of hidden states [B, T, D] over the positions that are no padding."""
    if attention_mask is None:
        return hidden.mean(1)
    weights = attention_mask.to(hidden)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)


@dataclass(frozen=True)
class Contrast:
    """The contrastive term, `strength` times L_con at a `temperature`."""

    strength: float
    temperature: float

    def __post_init__(self) -> None:
        number("contrast", self.strength, allowed="0 or more")
        number("temperature", self.temperature, allowed="above 0")

    def losses(self, model: PreTrainedModel, batch: Batch, *, soft: SoftMask) -> dict[str, Tensor]:
        """The language-model loss, and the contrast against the importances of the soft mask: the pass of the
        former is its anchor, so that the head is not computed again."""
        logits, hidden = outputs_at(model, batch)
        terms = {"lm": nll_of(logits, batch).sum() * batch["weight"]}
        return terms | self.term(model, batch, hidden=hidden, soft=soft)

    def term(
        self, model: PreTrainedModel, batch: Batch, *, hidden: Tensor, soft: SoftMask
    ) -> dict[str, Tensor]:
        """The contrastive term, a scalar, of hidden states [B, T, D] and two more passes of the encoder; none
        at strength 0."""
        if self.strength == 0:
            return {}
        mask = batch.get("attention_mask")
        positive = pooled(encoded(model, batch), mask)
        with gated(soft.groups, soft.gates()):
            negative = pooled(encoded(model, batch), mask)
        loss = contrastive(pooled(hidden, mask), positive, negative, temperature=self.temperature)
        return {"contrast": self.strength * loss}
