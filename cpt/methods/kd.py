"""KD, learning without forgetting (Li and Hoiem, TPAMI 2017; ECCV 2016) by distillation (Hinton et al., 2015,
section 2.1).

    L = L_lm + lambda T^2 KL(softmax(z'/T) || softmax(z/T)),    mean over the scored positions

z are the model's logits over the vocabulary, or its last hidden states over the features; z' are those of
the teacher, the model after the previous domain (at first the base), on the same corrupted batch. The
released code (ContinualLM) takes two more passes over the uncorrupted text, the softmax of hidden states over
the positions of a sequence, and the KL of the student from the teacher, at T = 1."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import KDOptions
from cpt.models.forward import at, divergence, nll_of
from cpt.models.weights import Snapshot

DISTILLED = ("logits", "hidden")
TEACHERS = ("run", "bf16-mixed")


def distillation(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) over the last axis (nats), [K] from [K, F]."""
    return temperature**2 * divergence(teacher.float() / temperature, student.float() / temperature)


def select_distilled(outputs: tuple[Tensor, Tensor], batch: Batch, *, distilled: str) -> Tensor:
    """Of logits [K, V] and hidden states [B, T, D]: the logits, or the hidden states at the scored positions,
    [K, D]."""
    logits, hidden = outputs
    return logits if distilled == "logits" else at(hidden, batch["positions"])


class KD(ContinualMethod):
    """Distills the model before the domain."""

    options: KDOptions

    def __init__(self, options: KDOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.teacher = Snapshot(self.model, persistent=True)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.teacher.take(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.objective.outputs(self.model, batch)
        precision: AbstractContextManager[object] = nullcontext()
        if self.options.teacher != "run":  # no cache of casts: the teacher uses the student's parameters
            precision = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with self.teacher.teaching(self.model), precision:
            taught = self.objective.outputs(self.model, batch)
        what = self.options.distilled
        student, teacher = (select_distilled(each, batch, distilled=what) for each in (outputs, taught))
        apart = distillation(student, teacher, temperature=self.options.temperature)
        return {
            "lm": nll_of(outputs[0], batch).sum() * batch["weight"],
            "kd": self.options.strength * apart.sum() * batch["weight"],
        }
