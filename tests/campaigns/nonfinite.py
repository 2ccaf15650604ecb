"""Losses, gradients and weights that are no numbers, at any step of any process: is a step made, is
anything kept?

A trial puts NaN or an infinity into the loss, a gradient or a weight of one process, at one step of one
domain, by all methods and with each `on_nonfinite`. No process may make that step, all have to end with
equal weights, and nothing that is not finite may be kept. A run that ends has to say so in one line, and
the same command without the number has to end with the bits of a run that never met it."""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cpt.trainer.checkpoint import load_stage
from tests.campaigns import runs
from tests.campaigns.frame import ROOT

LEARNING = [name for name in runs.METHODS if name != "none"]
POLICIES, PLACES = ("stop", "skip", "rollback"), ("loss", "gradient", "weight")
STEPS = 6  # of a domain, with a checkpoint every two
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.campaigns.nonfinite import spoil
spoil()
sys.argv[0] = __file__
from cpt.__main__ import main
main()
"""


def spoil() -> None:
    """Patches the loop of every method in a process of a trial, as the variable CPT_SPOILT says.

    It notes, at the end of each step: whether the number was put in (`met`), how often a weight changed in
    that step (`moved`), and a digest of the weights (`weights`)."""
    from cpt.methods.base import ContinualMethod

    plan, notes = json.loads(os.environ["CPT_SPOILT"]), {"met": False, "moved": 0, "weights": ""}
    training, step = ContinualMethod.training_step, ContinualMethod.optimizer_step
    value, of_a_weight = float(plan["value"]), plan["place"] == "weight"

    def digest(module: Any) -> str:
        every = (each.detach().reshape(-1).contiguous() for each in module.parameters())
        weights = b"".join(each.view(torch.uint8).numpy().tobytes() for each in every)
        return hashlib.sha256(weights).hexdigest()

    def keep(module: Any) -> None:
        Path(f"{plan['notes']}-{module.global_rank}.json").write_text(json.dumps(notes))

    def is_here(module: Any) -> bool:
        stage = min(plan["stage"], len(module.trainer.datamodule.domains) - 1)
        return module.trainer.global_step == plan["step"] and module.domain.index == stage

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = training(self, batch, batch_idx)
        if of_a_weight or not is_here(self) or self.global_rank != plan["rank"]:
            return loss
        notes["met"] = True
        keep(self)
        if plan["place"] == "gradient":
            loss.register_hook(lambda grad: grad * value)
            return loss
        self.guard.add_losses({"lm": loss.new_tensor(value)})
        return loss + value

    def optimizer_step(self: Any, *given: Any, **others: Any) -> None:
        bad, before = is_here(self), digest(self)
        step(self, *given, **others)
        if bad and not of_a_weight:
            notes["moved"] += digest(self) != before
        if bad and of_a_weight and self.global_rank == plan["rank"] and not notes["met"]:
            notes["met"] = True
            trained = next(each for each in self.parameters() if each.requires_grad and each.numel())
            trained.data.view(-1)[0] = value
        notes["weights"] = digest(self)
        keep(self)

    ContinualMethod.training_step, ContinualMethod.optimizer_step = training_step, optimizer_step


def spoilt(arguments: list[str], run: Path, plan: dict[str, Any]) -> int:
    script = run.with_name("spoilt.py")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    with mock.patch.dict(os.environ, CPT_SPOILT=json.dumps(plan | {"notes": str(run.parent / "notes")})):
        return runs.complete(arguments, run, twin=plan["processes"] > 1, script=script)


def finite(run: Path) -> bool:
    states = [load_stage(path) for path in run.glob("stages/*.pt")]
    states += [torch.load(path, weights_only=True)["state_dict"] for path in run.glob("checkpoints/*.ckpt")]
    floats = [each for state in states for each in state.values() if each.is_floating_point()]
    return all(bool(each.isfinite().all()) for each in floats)


def judge(run: Path, plan: dict[str, Any], code: int) -> dict[str, Any]:
    """What a spoilt start has left: by the notes of its processes, the scores and the weights."""
    notes = [json.loads(path.read_text()) for path in sorted(run.parent.glob("notes-*.json"))]
    told = {"code": code, "met": any(each["met"] for each in notes), "finite": finite(run)}
    told["moved"] = sum(each["moved"] for each in notes)
    told["alike"] = len({each["weights"] for each in notes}) <= 1
    log = runs.said(run)
    if code:
        told["line"] = runs.LINE.findall(log)[:1]
        fine = code == 1 and "Traceback" not in log and bool(told["line"]) and told["met"]
    else:
        ends = plan["policy"] == "stop" or (plan["place"] == "weight" and plan["policy"] == "skip")
        told["skipped"] = sum(json.loads((run / "scores.json").read_text())["skipped"])
        fine = bool(told["skipped"]) and not ends if told["met"] else told["skipped"] == 0
    fine = fine and told["finite"] and not told["moved"] and (told["alike"] or bool(code))
    return told | {"fine": fine, "last": "" if fine else log[-1500:]}


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    plan = {"place": PLACES[number % 3], "policy": POLICIES[number // 3 % 3], "processes": 1 + number % 2}
    plan |= {"value": draw.choice(("nan", "inf", "-inf")), "rank": draw.randrange(plan["processes"])}
    plan |= {"step": draw.randrange(STEPS), "stage": draw.randrange(2)}
    plan["method"] = runs.shuffled(LEARNING, number)
    two, home = plan["processes"] > 1, place / f"nonfinite-{number}"
    given = [f"method={plan['method']}", f"trainer.steps={STEPS}", f"on_nonfinite={plan['policy']}"]
    given += runs.DDP if two else ()
    expected, run = runs.whole(place, given, twin=two), home / "run"
    arguments = runs.command(place, run, *given)
    told = plan | judge(run, plan, spoilt(arguments, run, plan))
    if told["code"]:
        told |= runs.again(arguments, run, expected, twin=two)
        told["fine"] = told["fine"] and told["same"]
        told["last"] = "" if told["fine"] else runs.said(run)[-1500:]
    shutil.rmtree(home)
    return told
