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
from cpt.models.forward import kl_divergence, select_positions, token_nll
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
        outputs = self.objective.outputs(self.model, batch)
        with self.teacher.teaching(self.model), self.teacher_precision():
            teacher_outputs = self.objective.outputs(self.model, batch)
        # [K]; both terms are sums over positions, as a batch's weight makes means of them.
        divergence = distillation(
            self.distilled(outputs, batch),
            self.distilled(teacher_outputs, batch),
            temperature=self.options.temperature,
        )
        return {
            "lm": token_nll(outputs[0], batch).sum() * batch["weight"],
            "kd": self.options.strength * divergence.sum() * batch["weight"],
        }

    def teacher_precision(self) -> AbstractContextManager:
        if self.options.teacher == "run":
            return nullcontext()
        # No cache of casts: the teacher's parameters are the student's, with other values.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def distilled(self, outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """The logits, or the hidden states at the scored positions, [K, F]."""
        logits, hidden = outputs
        return logits if self.options.distilled == "logits" else select_positions(hidden, batch["positions"])
