"""Losses, gradients and weights that are no numbers, at any step of any process: is a step made, is
anything kept?

    python tests/campaigns/nonfinite.py --trials 100 --seed 0

A trial puts NaN or an infinity into the loss, a gradient or a weight of one process, at one step of one
domain, by all methods and with each `on_nonfinite`. No process may make that step, all have to end with
equal weights, and nothing that is not finite may be kept. A run that ends has to say so in one line, and
the same command without the number has to end with the bits of a run that never met it."""

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402

from tests.campaigns import runs  # noqa: E402
from tests.campaigns.frame import ROOT, conduct  # noqa: E402

LEARNING = [name for name in runs.METHODS if name != "none"]
POLICIES, PLACES, NUMBERS = (
    ("stop", "skip", "rollback"),
    ("loss", "gradient", "weight"),
    ("nan", "inf", "-inf"),
)
STEPS = 6  # of a domain, with a checkpoint every two
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.campaigns.spoiling import spoil
spoil()
sys.argv[0] = __file__
from cpt.__main__ import main
main()
"""


def draw_spoiling(number: int, draw: random.Random) -> dict[str, Any]:
    """What is spoilt: of the first or the last stage a step, in one process."""
    place, policy = PLACES[number % 3], POLICIES[number // 3 % 3]
    told = {"place": place, "policy": policy, "value": draw.choice(NUMBERS), "processes": 1 + number % 2}
    told |= {"rank": draw.randrange(told["processes"]), "step": draw.randrange(STEPS)}
    return told | {"stage": draw.randrange(2), "method": runs.shuffled(LEARNING, number)}


def spoilt(arguments: list[str], run: Path, plan: dict[str, Any]) -> int:
    """A start with the number; its exit code."""
    script = run.with_name("spoilt.py")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    os.environ["CPT_SPOILT"] = json.dumps(plan | {"notes": str(run.parent / "notes")})
    try:
        return runs.complete(arguments, run, twin=plan["processes"] > 1, script=script)
    finally:
        del os.environ["CPT_SPOILT"]


def finite(run: Path) -> bool:
    """Whether all that the run keeps of weights is."""
    states = [torch.load(path, weights_only=True) for path in run.glob("stages/*.pt")]
    states += [torch.load(path, weights_only=True)["state_dict"] for path in run.glob("checkpoints/*.ckpt")]
    floats = [each for state in states for each in state.values() if each.is_floating_point()]
    return all(bool(each.isfinite().all()) for each in floats)


def judge(run: Path, plan: dict[str, Any], code: int) -> dict[str, Any]:
    """What a spoilt start has left: by the notes of its processes, the scores and the weights."""
    notes = [json.loads(path.read_text()) for path in sorted(run.parent.glob("notes-*.json"))]
    told = {"code": code, "met": any(each["met"] for each in notes)}
    told |= {"moved": sum(each["moved"] for each in notes), "finite": finite(run)}
    told["alike"] = len({each["weights"] for each in notes}) <= 1
    log = runs.said(run)
    ends = plan["policy"] == "stop" or (plan["place"] == "weight" and plan["policy"] == "skip")
    if code:
        told["line"] = runs.LINE.findall(log)[:1]
        fine = code == 1 and "Traceback" not in log and bool(told["line"]) and told["met"]
    else:
        told["skipped"] = sum(json.loads((run / "scores.json").read_text())["skipped"])
        fine = bool(told["skipped"]) and not ends if told["met"] else told["skipped"] == 0
    kept = told["finite"] and not told["moved"] and (told["alike"] or bool(code))
    return told | {"fine": fine and kept, "last": "" if fine and kept else log[-1500:]}


def trial(place: Path, number: int, draw: random.Random) -> dict[str, Any]:
    plan, home = draw_spoiling(number, draw), place / f"run-{number}"
    two, run = plan["processes"] > 1, home / "run"
    given = [f"method={plan['method']}", f"trainer.steps={STEPS}", f"on_nonfinite={plan['policy']}"]
    given += runs.DDP if two else ()
    expected = runs.whole(place, given, twin=two)
    arguments = runs.command(place, run, *given)
    told = plan | judge(run, plan, spoilt(arguments, run, plan))
    if told["code"]:
        told["then"] = runs.complete(arguments, run, twin=two)
        told["same"] = told["then"] == 0 and runs.bits(run) == expected["bits"]
        told["fine"] = told["fine"] and told["same"]
        told["last"] = "" if told["fine"] else runs.said(run)[-1500:]
    shutil.rmtree(home)
    return told


if __name__ == "__main__":
    sys.exit(conduct(trial, name="nonfinite", about=__doc__, trials=100))
