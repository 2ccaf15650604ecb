"""DAS, continual DAP-training of language models with soft-masking (Ke et al., ICLR 2023).

The importance of each unit for what the model knows protects it (eq. 5), and a contrast keeps what is new
apart from what was known (eq. 6):

    I_lu     = 1/N sum_n |dL(x_n)/dg_lu|           L: KL of two dropout passes before the first domain, then
    I^(<=t)  = max(I^(t), I^(<=t-1))               after each domain its language-model loss (eq. 2-4)
    step_l  <- (1 - I_l^(<=t-1)) * step_l
    L        = L_lm + lambda L_con

The soft mask scales the step itself (formulas: cpt.gradient_masks.soft).

    L_con = -1/N sum_n log  exp(sim(o_n, o_n+) / tau)
                            -----------------------------------------------------------
                            sum_j  exp(sim(o_n, o_j+) / tau) + exp(sim(o_n, o_j-) / tau)

with mean-pooled last hidden states: o and o+ of two dropout passes of the full model, o- of a pass in which
each unit is multiplied by its importance. Three passes take most of a step's time: a share of `samples`
lowers N, every k-th step with k times the weight has the same mean."""

from collections.abc import Iterable
from functools import partial
from math import ceil
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from cpt.core.distributed import gather_rows
from cpt.data.collate import Batch, select_inputs
from cpt.gradient_masks.soft import Proxy, SoftMask, domain_losses
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import DASOptions, DGAOptions
from cpt.models.activation_checkpointing import keep_activations
from cpt.models.forward import check_dropout, mean_over_tokens, set_dropout
from cpt.models.units import gate_units
from cpt.models.weights import Snapshot


def contrastive(anchors: Tensor, positives: Tensor, negatives: Tensor, *, temperature: float) -> Tensor:
    """L_con of vectors, each [N, D], a scalar; candidates are those of all processes."""
    # In one collective: [M, 2, D], M the samples of all processes.
    pairs, rows_before = gather_rows(torch.stack([positives, negatives], dim=1))
    candidates = functional.normalize(torch.cat([pairs[:, 0], pairs[:, 1]]), dim=-1)
    similarity = functional.normalize(anchors, dim=-1) @ candidates.T  # [N, 2 M]
    own_positives = rows_before + torch.arange(len(anchors), device=anchors.device)
    return functional.cross_entropy(similarity / temperature, own_positives)


class ContrastMethod(ContinualMethod):
    """A soft mask on the units that matter to earlier knowledge, and the contrast to that knowledge, of a
    batch's `uncorrupted` text (as released) or the `corrupted` text of the language-model loss."""

    options: DASOptions | DGAOptions

    def __init__(self, options: DASOptions | DGAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        mask = SoftMask(
            self.model,
            kinds=options.units,
            columns=options.columns,
            apply_to=options.apply_to,
            normalize=options.normalize,
        )
        self.masks.append(mask)
        self.proxy = Proxy(self.model, self.objective, options.general_importance, options.proxy_dropout)
        self.period = options.contrast_every if options.contrast else 1
        if options.contrast:
            check_dropout(
                self.model, options.contrast_dropout, option="contrast_dropout", alternative="contrast=0"
            )

    @property
    def soft(self) -> SoftMask:
        """The method's mask; masks of the config come before it."""
        return cast(SoftMask, self.masks[-1])

    def describe_accumulation(self) -> str:
        if not self.options.contrast:
            return ""
        return "the contrastive loss compares the samples of each micro-batch among themselves"

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        sums, hidden = self.objective.sum_losses(self.model, batch, {"lm": self.lm_loss(batch)})
        terms = {"lm": sums["lm"] * batch["weight"]}
        if self.options.contrast and self.trainer.global_step % self.options.contrast_every == 0:
            terms["contrast"] = self.contrast(batch, hidden)
        return terms

    def contrast(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The contrastive term, a scalar. `hidden` [B, T, D], of a pass over the batch's own ids, is the
        anchor where this text is contrasted, unless a decoder made it."""
        options = self.options
        model = self.model
        text = batch if options.contrast_text == "corrupted" else self.objective.restore(batch)
        # Then the pass of the language-model loss is one of the three already.
        is_same_text = text["input_ids"] is batch["input_ids"] and "decoder_input_ids" not in batch

        num_rows = len(text["input_ids"])
        num_samples = ceil(options.contrast_samples * num_rows)
        if num_samples < num_rows:
            samples = {name: value[:num_samples] for name, value in select_inputs(text).items()}
            text = self.objective.lay_out(cast(Batch, samples))

        def represent() -> Tensor:  # the samples as vectors [N, D], without the head
            return mean_over_tokens(self.objective.encode(model, text), text.get("attention_mask"))

        # In this order, which decides which dropout each pass draws.
        with set_dropout(model, options.contrast_dropout), keep_activations(model):
            if is_same_text:
                anchor = mean_over_tokens(hidden[:num_samples], text.get("attention_mask"))
            else:
                anchor = represent()
            positive = represent()
            with gate_units(self.soft.groups, self.soft.gates()):
                negative = represent()
        loss = contrastive(anchor, positive, negative, temperature=options.temperature)
        # Every k-th step has the term, so k times its weight has the mean of one at each step.
        return options.contrast * options.contrast_every * loss


class DAS(ContrastMethod):
    """Protects the units that matter to general knowledge and to the domains so far."""

    options: DASOptions
    reads_importance_batches = True

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # The knowledge of the base is measured once, that of a domain after its stage.
        if self.domain.index == 0:
            self.soft.update_max(self.proxy.measure(self.soft, importance_batches))

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.domain_importance:
            losses = partial(domain_losses, objective=self.objective)
            self.soft.update_max(self.soft.measure(self.model, importance_batches, losses))


class DGA(ContrastMethod):
    """DGA, adapting a language model while preserving its general knowledge (Ke et al., EMNLP 2022).

    Each domain starts from the base. The heads that matter to the base's general knowledge, measured on the
    domain's text, are protected, and a contrast separates the domain from it:

        I_h    = 1/N sum_n |dKL(f1(x_n) || f2(x_n))/dg_h|       f1, f2: two dropout passes of the base
        step_h <- (1 - I_h) * step_h,    L = L_lm + lambda L_con

    The formulas are those of DAS (cpt.gradient_masks.soft, cpt.methods.das)."""

    trains_from_base = True
    options: DGAOptions
    reads_importance_batches = True

    def __init__(self, options: DGAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.base = Snapshot(self.model, persistent=False)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # First the base's weights, whose knowledge is measured. Not the maximum with earlier domains: the
        # model has none of them.
        self.base.restore(self.model)
        self.soft.set_importance(self.proxy.measure(self.soft, importance_batches))
