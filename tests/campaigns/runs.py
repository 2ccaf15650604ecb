"""Small runs of every method in processes of their own, and what tells one finished run from another."""

import hashlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from cpt.trainer.checkpoint import load_stage
from tests.campaigns.frame import ROOT
from tests.conftest import SMALL, VOCABULARIES, sentences
from tests.support.chat_decoder import write_checkpoint
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.forked_scripts import is_alive, read_proc, start_script, wait_for, wait_for_exit
from tests.support.method_fixtures import NEED_EXAMPLES

METHODS = sorted({path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} - NEED_EXAMPLES)
FEATURES = ("bf16 weights", "8-bit optimizer", "quantized base", "chats", "streamed replay")
OF_A_CHECKPOINT = ("quantized base", "chats", *NEED_EXAMPLES)  # without a base that the run pre-trains
CASES = (*METHODS, *sorted(NEED_EXAMPLES), *FEATURES)  # of trials, in turn
OF_NEW_MODELS = ("model.vocab_size", "model.config", "model.pretraining")  # which a checkpoint does not take
DDP = ("strategy=ddp", "trainer.accelerator=cpu")
GIVEN = ("trainer.steps=12",)
HANGS_S = 900  # after which a run is taken to hang, also on a machine that others use
LEAVES_S = 60.0  # within which a process has to leave whose companion was killed
LINE = re.compile(r"^cpt: .*$", re.MULTILINE)


def command(folder: Path, run: Path, *options: str, cache: Path | None = None) -> list[str]:
    """The arguments of a run of two domains in a folder, on the small texts of the tests."""
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        path = folder / "texts" / name / "all.txt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(sentences(words, count=120, seed=seed)) + "\n")
    keys = {option.partition("=")[0] for option in options}
    domains = [] if "domains" in keys else ["domains=texts", f"domains.root={folder / 'texts'}"]
    sizes = SMALL
    if "model" in keys:
        sizes = [option for option in SMALL if not option.startswith(OF_NEW_MODELS)]
    common = [*domains, f"cache_dir={cache or folder / 'cache'}", f"hydra.run.dir={run}", *sizes]
    unreplaced = [option for option in common if option.partition("=")[0] not in keys]
    return [*unreplaced, "order=[law,food]", *options]


def endtasks_of(folder: Path) -> list[str]:
    for domain in ("law", "food"):
        if not (folder / "tasks" / "endtasks" / domain).exists():
            write_task(folder / "tasks", domain)
    quick = QUICK | {"root": folder / "tasks", "when": "each", "seeds": "[1,2]", "epochs": 2}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in quick.items())]


def options_of(folder: Path, case: str) -> list[str]:
    """The options of a case: of a method, or of a feature that goes with methods."""
    if case in NEED_EXAMPLES:
        options = [
            "method.max_new_tokens=8",
            "method.prompt='{demonstration} '",
        ]  # the decoder reads 64 tokens
        return [f"method={case}", *options, *decoder_options(folder), *chat_domains(folder)]
    if case == "bf16 weights":  # rounded stochastically
        return ["method=ewc", "trainer.precision=bf16-true"]
    if case == "8-bit optimizer":
        return ["method=ncl", "optim=adamw_8bit", "optim.min_8bit_size=256"]
    if case == "quantized base":
        return ["method=lora", *decoder_options(folder), "model.quantization=nf4"]
    if case == "chats":
        chats = f"{{path: {write_chats(folder)}, format: messages, ratio: 0.25}}"
        return ["method=ncl", *decoder_options(folder), "replay=past", f"replay.sources={{chats: {chats}}}"]
    if case == "streamed replay":
        web = f"{{path: {folder / 'texts' / 'space' / 'all.txt'}, ratio: 0.125, max_documents: 40}}"
        return ["method=ncl", *streamed_domains(folder), "replay=past", f"replay.sources={{web: {web}}}"]
    return [f"method={case}"]


def decoder_options(folder: Path) -> list[str]:
    """Those of a tiny decoder with a chat template, which is written once, in place of those of SMALL."""
    checkpoint = folder / "decoder"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    return ["model=hf", f"model.name_or_path={checkpoint}", "model.max_seq_length=64", "chats=none"]


def write_chats(folder: Path, *, name: str = "chats", vocabulary: str = "space") -> Path:
    path = folder / f"{name}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for number, answer in enumerate(sentences(VOCABULARIES[vocabulary], count=60, seed=9, size=(3, 8))):
            question = {"role": "user", "content": f"What is seen on night {number}?"}
            rows.append(json.dumps({"messages": [question, {"role": "assistant", "content": answer}]}))
        path.write_text("\n".join(rows) + "\n")
    return path


def chat_domains(folder: Path) -> list[str]:
    """Domains of chats instead of text."""
    for name in ("law", "food"):
        write_chats(folder / "instructions", name=name, vocabulary=name)
    return ["domains=instructions", f"domains.root={folder / 'instructions'}"]


def streamed_domains(folder: Path) -> list[str]:
    """Domains that the Hub's library streams, up to a number of documents."""
    entries = []
    for name in ("law", "food", "general"):
        file = folder / "texts" / name / "all.txt"
        entries.append(f"{name}: {{path: text, data_files: {file}, max_documents: 100}}")
    return ["domains=hub", f"domains.catalogue={{{', '.join(entries)}}}", "domains.general=general"]


def sweep_of(folder: Path, home: Path, methods: Sequence[str], *, cache: Path | None = None) -> list[str]:
    run_options = command(folder, home / "unused", *GIVEN, f"method={','.join(methods)}", cache=cache)
    sweep_options = [option for option in run_options if not option.startswith("hydra.run.dir=")]
    return ["-m", *sweep_options, "name=sweep", "hydra.launcher.jobs=2"]


def begin(
    arguments: Sequence[str], run: Path, *, twin: bool = False, script: Path | None = None
) -> BaseProcess:
    """Starts it; what it says is appended to a log beside the run's folder."""
    run.mkdir(parents=True, exist_ok=True)
    return start_script(script or ROOT / "run.py", *arguments, cwd=run.parent, log=log_of(run), twin=twin)


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def read_log(run: Path, offset: int = 0) -> str:
    """What a run's starts have said, from an offset in the log on."""
    path = log_of(run)
    text = path.read_bytes()[offset:].decode(errors="replace") if path.exists() else ""
    return text.replace("\r", "\n")


def complete(arguments: Sequence[str], run: Path, *, twin: bool = False, script: Path | None = None) -> int:
    return wait_for_exit(begin(arguments, run, twin=twin, script=script), seconds=HANGS_S)


def run_again(arguments: Sequence[str], run: Path, expected: dict[str, Any], *, twin: bool = False) -> dict:
    code = complete(arguments, run, twin=twin)
    return {"then": code, "same": code == 0 and bits(run) == expected["bits"]}


def bits(run: Path) -> str:
    """A hash of what a finished run knows: matrix, metrics, end tasks, the last stage, the exported model."""
    scores = json.loads((run / "scores.json").read_text())
    assert scores["run"]["finished"], f"{run} is not finished"
    results = [scores["nll"], scores["metrics"], scores["endtasks"].get("scores")]
    digest = hashlib.sha256(json.dumps(results).encode())
    stages = sorted((run / "stages").glob("*.pt"))
    if stages:
        for name, value in sorted(load_stage(stages[-1]).items()):
            digest.update(name.encode() + value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    for path in sorted(run.glob("model/*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


UNDISTURBED: dict[tuple, dict[str, Any]] = {}


def run_undisturbed(folder: Path, options: Sequence[str], *, twin: bool = False) -> dict[str, Any]:
    """The bits of a run that nobody disturbed, and its seconds; made once."""
    key = (str(folder), *options, twin)
    if key not in UNDISTURBED:
        run = folder / "wholes" / str(len(UNDISTURBED))
        start = time.monotonic()
        if complete(command(folder, run, *options), run, twin=twin) != 0:
            raise RuntimeError(f"a whole run of {options} failed: {read_log(run)[-600:]}")
        UNDISTURBED[key] = {"bits": bits(run), "seconds": time.monotonic() - start}
    return UNDISTURBED[key]


def find_unlike(folder: Path, home: Path, methods: Sequence[str]) -> list[str]:
    """The methods of a sweep whose jobs have not ended with the bits of a run that nobody disturbed."""
    wrong = []
    for name in methods:  # a folder of a sweep has a method's name with dots
        path = next(home.glob(f"outputs/sweep/{name.replace('_', '.')}_*/scores.json"), None)
        if not path or bits(path.parent) != run_undisturbed(folder, [f"method={name}", *GIVEN])["bits"]:
            wrong.append(name)
    return wrong


def one_line(text: str) -> str | None:
    """The only line of an error that a user is to see; None where there is a traceback, none or several."""
    lines = LINE.findall(text.replace("\r", "\n"))
    return lines[0] if len(lines) == 1 and "Traceback" not in text else None


def family(pid: int) -> list[int]:
    children = read_proc(f"{pid}/task/{pid}/children").split()
    pids = [pid]
    for child in children:
        pids += family(int(child))
    return pids


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: Sequence[int]) -> bool:
    return wait_for(lambda: not any(map(is_alive, pids)), seconds=LEAVES_S)


def shuffled(names: Sequence[str], number: int) -> str:
    """The name for a trial: all of them, in another order in each round."""
    turn, at = divmod(number, len(names))
    return random.Random(turn).sample(list(names), len(names))[at]
