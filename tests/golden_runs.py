"""Golden runs: hashes of small runs of every method, to show that a refactoring changes no bit.

    python tests/golden_runs.py write [RUN ...]     runs them and writes tests/golden_runs.json
    python tests/golden_runs.py check [RUN ...]     runs them and prints those that differ

`check` exits with 1 if a run differs. A run trains two domains on made-up text with a tiny masked, causal or
T5 model. Hashed are the tensors of the exported model and of the stage file, and the losses and metrics of
`scores.json`. Bits depend on the CPU and on the versions of torch and transformers, which the file records:
on another machine, write the file at the older commit first. `tests/methods/test_contract.py` checks that a
killed run ends with the same bits.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).with_suffix(".json")
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from tests.conftest import SMALL, SMALL_GPT2, SMALL_T5, VOCABULARIES, sentences  # noqa: E402

TEXTS = ("general", "law", "food")
DROPOUT = ["+model.config.embedding_dropout=0.1", "+model.config.mlp_dropout=0.1"]
BASE = ["model.config.initializer_range=0.02", "model.pretraining.batch_size=32"]  # of the version written
BASE += ["model.pretraining.warmup_ratio=0.1", "model.pretraining.optim.lr=4e-3"]
FAMILIES = {
    "masked": ["model=tiny_modernbert", *BASE, *SMALL, *DROPOUT],
    "causal": SMALL_GPT2,
    "t5": SMALL_T5,
}
# Not a method: masks, replay and other choices under one.
COMPOSITIONS = {
    "mask-migu": "method=ncl mask=migu",
    "mask-migu-frozen": "method=ewc mask=migu mask.migu.apply_to=frozen",
    "mask-mofo": "method=ncl mask=mofo",
    "replay-past": "method=lora replay=past mask=migu",
    "replay-general": "method=derpp replay=general freeze.layers=1",
    "isolated": "method=ncl domains.packing=document_mask",
    "per-document": "method=ncl domains.packing=none",
    "demix-posterior": "method=demix method.routing=posterior",
    "carry-wsd": "method=ncl optim.state_across_domains=moments lr_scheduler=wsd lr_scheduler.decay=0.5",
    "rewarm": "method=kd lr_scheduler=rewarm",
    "monitor": "method=ncl monitor.every=2 monitor.max_tokens=200",
    "accumulate": "method=das trainer.accumulate_grad_batches=2",
    "bf16": "method=das mask=migu trainer.precision=bf16-mixed",
    "quick-dropout": "method=derpp trainer.quick_dropout=true",
}


def all_runs() -> dict[str, list[str]]:
    methods = sorted(path.stem for path in (ROOT / "conf/method").glob("*.yaml"))
    choices = {name: f"method={name}" for name in methods} | COMPOSITIONS
    paper = " method.contrast_every=1 method.contrast_samples=1"  # the default when the hashes were made
    choices = {name: each.replace("method=das", "method=das" + paper) for name, each in choices.items()}
    choices["hat"] += " method.initial=normal"
    return {
        f"{family}/{name}": ["order=[law,food]", "trainer.quick_dropout=false", *given, *choice.split()]
        for family, given in FAMILIES.items()
        for name, choice in choices.items()
    }


def start(overrides: list[str], folder: Path) -> int:
    if (child := os.fork()) == 0:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        code = 1
        try:
            from cpt.__main__ import main
            from cpt.evaluation import metrics

            # intervals as they were when the hashes were made
            metrics.LEAST_ITEMS = metrics.FEW_ITEMS = 0
            metrics.FEW_IN_EACH = 1e-9
            sys.argv = ["run.py", *overrides, f"hydra.run.dir={folder}"]
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException as error:
            print(repr(error))
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Names may change, contents may not: the hash is over the sorted hashes of the tensors."""
    each = []
    for value in tensors.values():
        flat = value.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        each.append(hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + raw).hexdigest())
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()[:16]


def read_hashes(folder: Path) -> dict[str, str]:
    model: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "model").rglob("*.safetensors")):
        model |= {f"{path}:{name}": value for name, value in load_file(path).items()}
    stages = sorted((folder / "stages").glob("*.pt"))
    stage = torch.load(stages[-1], weights_only=True) if stages else {}
    found = {"model": hash_tensors(model), "stage": hash_tensors(stage)}
    scores = json.loads((folder / "scores.json").read_text())
    scores["metrics"].pop("learned", None)  # newer than the hashes
    for key in ("nll", "metrics"):
        found[key] = hashlib.sha256(json.dumps(scores[key]).encode()).hexdigest()[:16]
    return found


def measure(name: str, overrides: list[str], root: Path) -> dict[str, str]:
    folder = root / name.replace("/", "-")
    given = [*overrides, "domains=texts", f"domains.root={root}/texts", f"cache_dir={root}/cache"]
    if code := start(given, folder):
        print(name, Path(f"{folder}.log").read_text().strip().splitlines()[-1:], flush=True)
        return {"refused": f"exit code {code}"}
    found = read_hashes(folder)
    shutil.rmtree(folder)
    return found


def main() -> None:
    import cpt.cli  # noqa: F401  (imported once, before the forks)
    import cpt.train  # noqa: F401

    runs = all_runs()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("mode", choices=("write", "check"))
    parser.add_argument("names", nargs="*", metavar="RUN", help="of them alone; default: all")
    given = parser.parse_args()
    if unknown := set(given.names) - set(runs):
        parser.error(f"no run {', '.join(sorted(unknown))}. Allowed: {', '.join(runs)}")
    known = json.loads(GOLDEN.read_text())["runs"] if GOLDEN.exists() else {}
    found, differing = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for seed, text in enumerate(TEXTS):
            path = Path(folder) / "texts" / text / "all.txt"
            path.parent.mkdir(parents=True)
            path.write_text("\n".join(sentences(VOCABULARIES[text], count=120, seed=seed)) + "\n")
        for name in given.names or runs:
            found[name] = measure(name, runs[name], Path(folder))
            differs = given.mode == "check" and found[name] != known.get(name)
            differing += [name] * differs
            print(f"{name}: {'DIFFERS ' if differs else ''}{found[name]}", flush=True)
    if given.mode == "check":
        print(f"{len(found)} runs, {len(differing)} differ: {', '.join(differing) or 'none'}")
        raise SystemExit(bool(differing))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    made = {"command": "python tests/golden_runs.py write", "commit": commit.stdout.strip()}
    made |= {"torch": torch.__version__, "transformers": transformers.__version__}
    made["python"] = platform.python_version()
    made["cpu"] = cpu[0].partition(": ")[2] if cpu else platform.processor()
    GOLDEN.write_text(json.dumps(made | {"runs": (known if given.names else {}) | found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
