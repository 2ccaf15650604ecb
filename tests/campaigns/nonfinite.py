"""Losses, gradients and weights that are not finite, at any step of any process: is a step made, is
anything kept?

A trial puts NaN or an infinity into the loss, a gradient or a weight of one process, at one step of one
domain, by all methods and features and with each `on_nonfinite`. No process may make that step, all have to end with
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

LEARNING = [case for case in runs.CASES if case != "none"]
POLICIES = ("stop", "skip", "rollback")
PLACES = ("loss", "gradient", "weight")
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

    It writes to its notes, at the end of each step: whether the number was put in (`met`), how often a weight
    changed in that step (`moved`), and a digest of the weights (`weights`)."""
    from cpt.methods.base import ContinualMethod

    plan = json.loads(os.environ["CPT_SPOILT"])
    notes = {"met": False, "moved": 0, "weights": ""}
    original_training_step = ContinualMethod.training_step
    original_optimizer_step = ContinualMethod.optimizer_step
    value = float(plan["value"])
    is_in_weight = plan["place"] == "weight"

    def hash_weights(module: Any) -> str:
        parameters_on_cpu = (parameter.detach().reshape(-1).contiguous() for parameter in module.parameters())
        weights = b"".join(parameter.view(torch.uint8).numpy().tobytes() for parameter in parameters_on_cpu)
        return hashlib.sha256(weights).hexdigest()

    def write_notes(module: Any) -> None:
        Path(f"{plan['notes']}-{module.global_rank}.json").write_text(json.dumps(notes))

    def is_chosen_step(module: Any) -> bool:
        stage = min(plan["stage"], len(module.trainer.datamodule.domains) - 1)
        return module.trainer.global_step == plan["step"] and module.domain.index == stage

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = original_training_step(self, batch, batch_idx)
        if is_in_weight or not is_chosen_step(self) or self.global_rank != plan["rank"]:
            return loss

        notes["met"] = True
        write_notes(self)
        if plan["place"] == "gradient":
            loss.register_hook(lambda grad: grad * value)
            return loss
        self.guard.add_losses({"lm": loss.new_tensor(value)})
        return loss + value

    def optimizer_step(self: Any, *arguments: Any, **options: Any) -> None:
        is_chosen = is_chosen_step(self)
        hash_before = hash_weights(self)
        original_optimizer_step(self, *arguments, **options)

        if is_chosen and not is_in_weight:
            notes["moved"] += hash_weights(self) != hash_before
        if is_chosen and is_in_weight and self.global_rank == plan["rank"] and not notes["met"]:
            notes["met"] = True
            trained = next(
                parameter for parameter in self.parameters() if parameter.requires_grad and parameter.numel()
            )
            trained.data.view(-1)[0] = value
        notes["weights"] = hash_weights(self)
        write_notes(self)

    ContinualMethod.training_step = training_step
    ContinualMethod.optimizer_step = optimizer_step


def run_spoiled(arguments: list[str], run: Path, plan: dict[str, Any]) -> int:
    script = run.with_name("spoilt.py")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    with mock.patch.dict(os.environ, CPT_SPOILT=json.dumps(plan | {"notes": str(run.parent / "notes")})):
        return runs.complete(arguments, run, twin=plan["processes"] > 1, script=script)


def has_finite_files(run: Path) -> bool:
    states = [load_stage(path) for path in run.glob("stages/*.pt")]
    states += [torch.load(path, weights_only=True)["state_dict"] for path in run.glob("checkpoints/*.ckpt")]
    for state in states:
        floats = [value for value in state.values() if value.is_floating_point()]
        if not all(bool(value.isfinite().all()) for value in floats):
            return False
    return True


def judge(run: Path, plan: dict[str, Any], code: int) -> dict[str, Any]:
    """What a spoilt start has left: by the notes of its processes, the scores and the weights."""
    notes = [json.loads(path.read_text()) for path in sorted(run.parent.glob("notes-*.json"))]
    outcome = {"code": code, "met": any(note["met"] for note in notes), "finite": has_finite_files(run)}
    outcome["moved"] = sum(note["moved"] for note in notes)
    outcome["alike"] = len({note["weights"] for note in notes}) <= 1
    log = runs.read_log(run)
    if code:
        outcome["line"] = runs.LINE.findall(log)[:1]
        fine = code == 1 and "Traceback" not in log and bool(outcome["line"]) and outcome["met"]
    else:
        ends = plan["policy"] == "stop" or (plan["place"] == "weight" and plan["policy"] == "skip")
        outcome["skipped"] = sum(json.loads((run / "scores.json").read_text())["skipped"])
        fine = bool(outcome["skipped"]) and not ends if outcome["met"] else outcome["skipped"] == 0
    fine = fine and outcome["finite"] and not outcome["moved"] and (outcome["alike"] or bool(code))
    return outcome | {"fine": fine, "last": "" if fine else log[-1500:]}


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    processes = 1 + number % 2
    plan = {
        "place": PLACES[number % 3],
        "policy": POLICIES[number // 3 % 3],
        "processes": processes,
        "value": draw.choice(("nan", "inf", "-inf")),
        "rank": draw.randrange(processes),
        "step": draw.randrange(STEPS),
        "stage": draw.randrange(2),
        "case": runs.shuffled(LEARNING, number),
    }
    two = plan["processes"] > 1
    home = folder / f"nonfinite-{number}"
    options = [
        *runs.options_of(folder, plan["case"]),
        f"trainer.steps={STEPS}",
        f"on_nonfinite={plan['policy']}",
    ]
    options += runs.DDP if two else ()
    expected = runs.run_undisturbed(folder, options, twin=two)
    run = home / "run"
    arguments = runs.command(folder, run, *options)
    outcome = plan | judge(run, plan, run_spoiled(arguments, run, plan))
    if outcome["code"]:
        outcome |= runs.run_again(arguments, run, expected, twin=two)
        outcome["fine"] = outcome["fine"] and outcome["same"]
        outcome["last"] = "" if outcome["fine"] else runs.read_log(run)[-1500:]
    shutil.rmtree(home)
    return outcome
