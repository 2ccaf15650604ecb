"""KD, learning without forgetting (Li and Hoiem, TPAMI 2017) by distillation (Hinton et al., 2015, sec. 2.1).

    L = L_lm + lambda T^2 KL(softmax(z'/T) || softmax(z/T)),    mean over the scored positions

z are the model's logits over the vocabulary, or its last hidden states over the features; z' are those of
the teacher, the model after the previous domain (at first the base), on the same corrupted batch."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import KDOptions
from cpt.models.chunked_head import WeightedLoss
from cpt.models.forward import kl_divergence, select_positions
from cpt.models.weights import Snapshot


def distillation(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) over the last axis (nats), [K] from [K, F].

    >>> teacher = torch.tensor([[0.0, 0.0]])
    >>> distillation(torch.tensor([[1.0, 1.0]]), teacher, temperature=2.0)
    tensor([0.])
    """
    return temperature**2 * kl_divergence(teacher.float() / temperature, student.float() / temperature)


class KD(ContinualMethod):
    """Distills the model before the domain."""

    options: KDOptions

    def __init__(self, options: KDOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.teacher = Snapshot(self.model, persistent=True)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # A copy, as the student trains on in these weights.
        self.teacher.capture(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        with self.teacher.teaching(self.model), self.teacher_precision():
            teacher_logits, teacher_hidden = self.objective.keep_logits(self.model, batch)

        def distill(logits: Tensor, positions: slice) -> Tensor:
            teacher = teacher_logits.select(positions)
            return distillation(logits, teacher, temperature=self.options.temperature)

        # Both terms are sums over positions, as a batch's weight makes means of them.
        losses = {"lm": self.lm_loss(batch)}
        if self.options.distilled == "logits":
            losses["kd"] = WeightedLoss(distill, self.options.strength)
        sums, hidden = self.objective.sum_losses(self.model, batch, losses)
        if self.options.distilled == "hidden":
            divergence = distillation(
                select_positions(hidden, batch["positions"]),
                select_positions(teacher_hidden, batch["positions"]),
                temperature=self.options.temperature,
            )
            sums["kd"] = divergence.sum()
        return {
            "lm": sums["lm"] * batch["weight"],
            "kd": self.options.strength * sums["kd"] * batch["weight"],
        }

    def teacher_precision(self) -> AbstractContextManager:
        if self.options.teacher == "run":
            return nullcontext()
        # No cache of casts: the teacher's parameters are the student's, with other values.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
