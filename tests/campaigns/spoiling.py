"""Puts a number that is none into a run, as the variable CPT_SPOILT says, and notes what became of it.

Notes, at the end of each step: whether the number was put in (`met`), how often a weight changed in that step
(`moved`), and a digest of the weights (`weights`)."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from cpt.methods.base import ContinualMethod


def digest(module: Any) -> str:
    found = hashlib.sha256()
    for value in module.parameters():
        found.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else b"")
    return found.hexdigest()


def spoil() -> None:
    """Patches the loop of every method."""
    plan = json.loads(os.environ["CPT_SPOILT"])
    notes = {"met": False, "moved": 0, "weights": ""}
    training, step, value = (
        ContinualMethod.training_step,
        ContinualMethod.optimizer_step,
        float(plan["value"]),
    )

    def keep(module: Any) -> None:
        Path(f"{plan['notes']}-{module.global_rank}.json").write_text(json.dumps(notes))

    def here(module: Any) -> bool:
        stages = len(module.trainer.datamodule.domains)
        stage = min(plan["stage"], stages - 1)
        return module.trainer.global_step == plan["step"] and module.domain.index == stage

    def put(module: Any, loss: torch.Tensor) -> torch.Tensor:
        """The loss with the number in it, or in its gradient alone."""
        if plan["place"] == "gradient":
            loss.register_hook(lambda grad: grad * value)
            return loss
        module.guard.see({"lm": loss.new_tensor(value)})
        return loss + value

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = training(self, batch, batch_idx)
        once = plan["place"] != "weight" and here(self) and self.global_rank == plan["rank"]
        if once:
            notes["met"] = True
            keep(self)
        return put(self, loss) if once else loss

    def optimizer_step(self: Any, *given: Any, **others: Any) -> None:
        bad, before = here(self), digest(self)
        step(self, *given, **others)
        if bad and plan["place"] != "weight":
            notes["moved"] += digest(self) != before
        if bad and plan["place"] == "weight" and self.global_rank == plan["rank"] and not notes["met"]:
            notes["met"] = True
            trained = next(each for each in self.parameters() if each.requires_grad and each.numel())
            trained.data.view(-1)[0] = value
        notes["weights"] = digest(self)
        keep(self)

    ContinualMethod.training_step, ContinualMethod.optimizer_step = training_step, optimizer_step
