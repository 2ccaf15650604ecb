"""kill -9 at random moments of `cpt.graft` and `cpt.withdraw`: does the same command give the same result?

A trial makes a model from a copy of a finished run, by one of FORMS, and is killed once or twice, each at any
moment. Then the same command has to end with the model and the losses of one that nobody disturbed. Nothing of
a killed start may be left, and `python -m cpt.verify` has to find nothing in the run."""

import hashlib
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.verify import find_damage_in_run
from tests.campaigns import runs
from tests.campaigns.frame import ROOT
from tests.support.forked_scripts import wait_for_exit

FORMS = ("graft", "left out", "subtracted", "continued")
METHODS = {
    "left out": ("method=lora", "method.per_domain=true", "routing@method.routing=domain"),
    "subtracted": ("method=inclora", "method.adapter_storage=separate"),
    "continued": ("method=ncl", "save_all_stages=true"),
}
WITHDRAWN = {"left out": "law", "subtracted": "law", "continued": "food"}
SCRIPT = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
runpy.run_module("cpt.{{program}}", run_name="__main__", alter_sys=True)
"""
UNDISTURBED: dict[tuple[Path, str], dict[str, Any]] = {}


def write_tuned(folder: Path) -> Path:
    """A model with other weights than the decoder of the runs, as if it had been trained from it."""
    tuned = folder / "tuned"
    if not tuned.exists():
        runs.decoder_options(folder)
        model = AutoModelForCausalLM.from_pretrained(folder / "decoder")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(tuned)
        AutoTokenizer.from_pretrained(folder / "decoder").save_pretrained(tuned)
    return tuned


def find_source(folder: Path, form: str) -> Path:
    """The finished run from which a form makes a model, trained once."""
    run = folder / "sources" / form.replace(" ", "-") / "run"
    if not (run / "model").exists():
        options = runs.decoder_options(folder) if form == "graft" else METHODS[form]
        if runs.complete(runs.command(folder, run, *options, *runs.GIVEN), run) != 0:
            raise RuntimeError(runs.read_log(run)[-600:])
    return run


def begin(folder: Path, home: Path, form: str) -> Any:
    """Starts the program in a folder that has a copy of the run."""
    if form == "graft":
        program = "graft"
        tuned = write_tuned(folder)
        options = ["--instruct", str(tuned), "--base", str(folder / "decoder"), "--weight", "0.5"]
    else:
        program = "withdraw"
        options = [WITHDRAWN[form], "--form", form.replace(" ", "_"), "--output", "result"]
    script = home / "program.py"
    script.write_text(SCRIPT.format(program=program))
    return runs.begin(["run", *options], home / "run", script=script)


def find_result(home: Path, form: str) -> Path:
    return home / "run" / "graft" if form == "graft" else home / "result"


def digest(result: Path) -> str:
    """A hash of what a result knows: the weights of its model, and its losses."""
    losses = []
    for name in ("row.json", "scores.json"):
        if (result / name).exists():
            losses.append(json.loads((result / name).read_text())["nll"])
    content = hashlib.sha256(json.dumps(losses).encode())
    for path in sorted(result.rglob("*.safetensors")):
        content.update(path.read_bytes())
    return content.hexdigest()


def make_undisturbed(folder: Path, form: str) -> dict[str, Any]:
    """The hash of a result that nobody disturbed, and its seconds; made once."""
    if (folder, form) not in UNDISTURBED:
        home = folder / f"undisturbed-{form.replace(' ', '-')}"
        shutil.copytree(find_source(folder, form), home / "run")
        start = time.monotonic()
        if wait_for_exit(begin(folder, home, form), seconds=runs.HANGS_S) != 0:
            raise RuntimeError(runs.read_log(home / "run")[-600:])
        result = find_result(home, form)
        UNDISTURBED[folder, form] = {"digest": digest(result), "seconds": time.monotonic() - start}
    return UNDISTURBED[folder, form]


def find_leftovers(home: Path) -> list[str]:
    """Temporary folders of killed starts."""
    paths = [*home.glob(".*-*"), *home.glob("run/.*-*"), *home.rglob("*.partial")]
    return sorted(str(path.relative_to(home)) for path in paths)


def trial(folder: Path, number: int, draw: random.Random) -> dict[str, Any]:
    form = FORMS[number % len(FORMS)]
    expected = make_undisturbed(folder, form)
    home = folder / f"derived-{number}"
    run = home / "run"
    shutil.copytree(find_source(folder, form), run)
    kills = []
    for _ in range(draw.randint(1, 2)):
        process = begin(folder, home, form)
        moment = draw.uniform(0, expected["seconds"])
        process.join(moment)
        if not process.is_alive():
            break
        kills.append(round(moment, 2))
        runs.kill(process.pid)
        wait_for_exit(process)

    log_size = len(runs.read_log(run).encode())
    code = wait_for_exit(begin(folder, home, form), seconds=runs.HANGS_S)
    words = runs.read_log(run, log_size)
    line = runs.one_line(words)
    result = find_result(home, form)
    is_same = result.exists() and digest(result) == expected["digest"]
    leftovers = find_leftovers(home)
    damage = list(find_damage_in_run(run))
    is_fine = code == 0 and is_same and not leftovers and not damage
    shutil.rmtree(home)
    return {
        "form": form,
        "kills": kills,
        "then": code,
        "line": line,
        "same": is_same,
        "leftovers": leftovers,
        "damage": damage,
        "fine": is_fine,
        "last": "" if is_fine else words[-1500:],
    }
