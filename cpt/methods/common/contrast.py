"""The contrast of DAS and DGA: what the model knows now against what it knew (Ke et al., ICLR 2023, eq. 6)

    L_con = -1/N sum_n log  exp(sim(o_n, o_n+) / tau)
                            -----------------------------------------------------------
                            sum_j  exp(sim(o_n, o_j+) / tau) + exp(sim(o_n, o_j-) / tau)

with mean-pooled last hidden states: o and o+ of two dropout passes of the full model, o- of a pass in which
each unit is multiplied by its importance, so that only earlier knowledge speaks. Without dropout o+ would be
o, whose similarity has no gradient: nothing would pull, and all samples would only be pushed apart.

Its three passes take most of a step's time. With fewer `samples` N is smaller, and so is the number of
candidates; `every` k-th step with k times the weight is right in the mean; `fixed` negatives push the anchors
away and are not themselves moved."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.core.collectives import gather_rows
from cpt.data.collate import Batch, inputs_of
from cpt.gradient_masks.soft import SoftMask
from cpt.methods.options import ContrastOptions
from cpt.models.forward import check_dropout, dropout, mean_over, nll_of
from cpt.models.memory import keep_activations
from cpt.models.objectives import Objective
from cpt.models.units import gate_units


def contrastive(anchors: Tensor, positives: Tensor, negatives: Tensor, *, temperature: float) -> Tensor:
    """L_con of vectors, each [N, D], a scalar; sim is the cosine. The positives and negatives of all
    processes count."""
    others, before = gather_rows(torch.stack([positives, negatives], dim=1))
    candidates = functional.normalize(torch.cat([others[:, 0], others[:, 1]]), dim=-1)
    similarity = functional.normalize(anchors, dim=-1) @ candidates.T
    own = before + torch.arange(len(anchors), device=anchors.device)
    return functional.cross_entropy(similarity / temperature, own)


@dataclass(frozen=True)
class Contrast:
    """The contrastive term, `strength` times L_con at a `temperature`, of a batch's `uncorrupted` text (as
    released) or of the `corrupted` text that the language-model loss sees: of a share of its `samples`, in
    each step whose number `every` divides, with negatives that are `fixed` or not.

    Its passes have dropout at `rate` (None: the model's own); raises ValueError where a sample's two passes
    could not differ."""

    model: PreTrainedModel
    objective: Objective
    strength: float
    temperature: float
    text: str
    rate: float | None
    samples: float
    every: int
    fixed: bool

    def __post_init__(self) -> None:
        if self.strength > 0:
            check_dropout(self.model, self.rate, option="contrast_dropout", without="contrast=0")

    @classmethod
    def from_options(cls, model: PreTrainedModel, objective: Objective, options: ContrastOptions) -> Contrast:
        return cls(
            model,
            objective,
            strength=options.contrast,
            temperature=options.temperature,
            text=options.contrast_text,
            rate=options.contrast_dropout,
            samples=options.contrast_samples,
            every=options.contrast_every,
            fixed=options.contrast_negatives == "fixed",
        )

    def losses(self, batch: Batch, *, soft: SoftMask, step: int) -> dict[str, Tensor]:
        """The language-model loss, and in a step with the contrast that against the importances of the soft
        mask."""
        logits, hidden = self.objective.outputs(self.model, batch)
        terms = {"lm": nll_of(logits, batch).sum() * batch["weight"]}
        return terms | (self.term(batch, hidden=hidden, soft=soft) if step % self.every == 0 else {})

    def term(self, batch: Batch, *, hidden: Tensor, soft: SoftMask) -> dict[str, Tensor]:
        """The contrastive term, a scalar, of a batch and the hidden states [B, T, D] of the pass over its own
        ids, which is the anchor where that text is contrasted; else, and where they are a decoder's, the
        anchor is a pass more. None at strength 0."""
        if self.strength == 0:
            return {}
        text = self.of_text(batch)
        count = ceil(self.samples * len(text["input_ids"]))
        same = text["input_ids"] is batch["input_ids"] and "decoder_input_ids" not in batch
        text = self.first(text, count)
        with dropout(self.model, self.rate), keep_activations(self.model):
            anchor = mean_over(hidden[:count], text.get("attention_mask")) if same else self.represented(text)
            positive = self.represented(text)
            with gate_units(soft.groups, soft.gates()), torch.set_grad_enabled(not self.fixed):
                negative = self.represented(text)
        found = contrastive(anchor, positive, negative, temperature=self.temperature)
        return {"contrast": self.strength * self.every * found}

    def first(self, batch: Batch, count: int) -> Batch:
        """The first samples of a batch, of which nothing is scored; all of them as they are."""
        if count == len(batch["input_ids"]):
            return batch
        some = {name: value[:count] for name, value in inputs_of(batch).items()}
        return self.objective.lay_out(cast(Batch, some))

    def of_text(self, batch: Batch) -> Batch:
        """The batch with the ids [B, T] that are contrasted."""
        if self.text == "corrupted":
            return batch
        return self.objective.restored(batch)

    def represented(self, batch: Batch) -> Tensor:
        """The samples of a batch as vectors [B, D]; the head is not computed."""
        return mean_over(self.objective.encode(self.model, batch), batch.get("attention_mask"))
