"""Time of this version of cpt over that of another one, in pairs: the default run, the start until the end of
the first step, steps of five methods with three kinds of models, the preparation of text, and scoring. Writes
tables of docs/studies/performance.md.

    git worktree add --detach OTHER c957cdae
    python benchmarks/costs/versions.py --other OTHER

Both do the same work in turns (A B, B A, ...), each in processes of its own with one thread. Steps are timed
in chunks, between which one of two open runs waits; the losses of both are compared. All other rows are of
whole processes or of phases of these."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import RESULTS, ROOT, compare_times, rotate, save
from texts import prepare

PAGE = ROOT / "docs" / "studies" / "performance.md"
FILE = RESULTS / "versions.json"
BEGIN = "<!-- generated: versions -->\n"
END = "<!-- end: versions -->"
SIDES = ("ours", "theirs")
TOLERANCE = 1.03
# Options by their names here, and how c957cdae names them.
NAMES_OF_OTHER = ("eval.when=eval.rows",)

FRESH_MODEL = ("model.vocab_size=8192", "model.pretraining.steps=1", "model.pretraining.batch_size=8")
SHAPES: Mapping[str, Sequence[str]] = {
    "roberta": (
        "model=tiny_roberta",
        "model.config.hidden_size=256",
        "model.config.intermediate_size=1024",
        "model.config.hidden_dropout_prob=0.1",
        "model.config.attention_probs_dropout_prob=0.1",
    ),
    "gpt2": (
        "model=tiny_gpt2",
        "model.config.n_embd=256",
        "model.config.embd_pdrop=0.1",
        "model.config.attn_pdrop=0.1",
        "model.config.resid_pdrop=0.1",
    ),
    "t5": (
        "model=tiny_t5",
        "model.config.d_model=256",
        "model.config.d_kv=32",
        "model.config.d_ff=1024",
        "model.config.num_layers=2",
        "model.config.num_decoder_layers=2",
        "model.config.num_heads=8",
        "model.config.dropout_rate=0.1",
    ),
}
LABELS = {"roberta": "RoBERTa", "gpt2": "GPT-2", "t5": "T5"}
METHODS = ("ncl", "das", "ewc", "migu", "lora")
VOCABULARY = 8000  # of the tokenizer of text preparation
STAGE = 2  # in the second domain, das has importances of the first and ewc has a Fisher
WARMUP = 4
CHUNK = 2  # steps: das has its contrastive loss in every second one
COMMON = (
    "order=[sympy,networkx]",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.batch_size=8",
    "trainer.importance_samples=32",
    "eval.when=last",
    "eval.max_tokens=4000",
)
PARTS = ("steps", "text", "default")

Times = dict[str, float]
Pairs = dict[str, list[Times]]  # of both sides, pair by pair


class VersionRun:
    """A run of one version in a process of its own, with a clock that sends its times."""

    def __init__(self, tree: Path, overrides: Iterable[str], *, cache: Path, folder: Path) -> None:
        self.messages: dict[str, list[Any]] = {}
        self.log = folder / "log.txt"
        self.pipe, child_end = Pipe()
        clock = [
            "+callbacks.clock._target_=step_clock.StepClock",
            f"+callbacks.clock.pipe={child_end.fileno()}",
        ]
        self.start_time = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(tree / "run.py"), f"hydra.run.dir={folder / 'run'}", *clock, *overrides],
            cwd=folder,
            env=make_environment(tree) | {"CPT_CACHE": str(cache)},
            pass_fds=[child_end.fileno()],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        # The run must be the last that holds this end: only then does reading raise EOFError.
        child_end.close()

    def wait_for(self, kind: str) -> Any:
        """The next message of a kind. Raises RuntimeError if the run has ended before."""
        while True:
            try:
                received_kind, content = self.pipe.recv()
            except EOFError:
                raise RuntimeError(f"the run has ended early:\n{self.log.read_text()[-3000:]}") from None
            self.messages.setdefault(received_kind, []).append(content)
            if received_kind == kind:
                return content

    def finish(self) -> Times:
        """Waits for the end of the run. Returns its times. Raises RuntimeError if it has failed."""
        while True:
            try:
                kind, content = self.pipe.recv()
            except EOFError:
                break
            self.messages.setdefault(kind, []).append(content)
        times = wait_for_process(self.process, self.start_time)
        if self.process.returncode:
            raise RuntimeError(f"exit code {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
        return times

    def time_to_first_step(self) -> Times:
        """From the start of the process to the end of its first step."""
        start = self.messages["start"][0]
        return {"wall": start["wall"] - self.start_time, "cpu": start["cpu"]}

    def time_of_scoring(self) -> Times:
        """All evaluations together."""
        return add_times(self.messages["score"])


def make_environment(tree: Path) -> dict[str, str]:
    """The environment variables of a process that runs the version in a folder."""
    paths = [str(tree), str(ROOT / "benchmarks" / "common")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }


def wait_for_process(process: subprocess.Popen, start_time: float) -> Times:
    """Waits until a process ends; its wall and CPU time, with that of processes that it waited for."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {"wall": time.monotonic() - start_time, "cpu": usage.ru_utime + usage.ru_stime}


def add_times(times: Sequence[Times]) -> Times:
    """The sum of wall times, and that of CPU times."""
    walls = [entry["wall"] for entry in times]
    cpus = [entry["cpu"] for entry in times]
    return {"wall": sum(walls), "cpu": sum(cpus)}


def rename(overrides: Iterable[str], new_to_old: Mapping[str, str]) -> list[str]:
    """Overrides with the names that the options have in the other version."""
    renamed = []
    for override in overrides:
        name, _, value = override.partition("=")
        renamed.append(f"{new_to_old.get(name, name)}={value}")
    return renamed


class Comparison:
    """Measures both versions and keeps the times of all pairs."""

    def __init__(
        self, options: argparse.Namespace, pairs: dict[str, Pairs], distances: dict[str, float]
    ) -> None:
        self.options = options
        self.pairs = pairs
        self.distances = distances  # of the losses of both, the largest of all steps
        self.trees = {"ours": ROOT, "theirs": Path(options.other).resolve()}
        self.new_to_old = dict(pair.split("=", 1) for pair in options.names)

    def start(self, side: str, overrides: Iterable[str], folder: str) -> VersionRun:
        chosen = list(overrides) if side == "ours" else rename(overrides, self.new_to_old)
        run_folder = Path(folder) / side
        run_folder.mkdir()
        return VersionRun(
            self.trees[side], chosen, cache=Path(self.options.cache).resolve() / side, folder=run_folder
        )

    def add(self, name: str, side: str, times: Times) -> None:
        self.pairs.setdefault(name, {side: [] for side in SIDES})[side].append(times)

    def fill_caches(self, name: str, overrides: Sequence[str]) -> None:
        """Has both versions make what timed runs find in their caches, once."""
        for side in SIDES:
            mark = Path(self.options.cache, side, f"filled-{name}")
            if not mark.exists():
                with tempfile.TemporaryDirectory() as folder:
                    self.start(side, [*overrides, "trainer.steps=1"], folder).finish()
                mark.touch()

    def measure_steps(self, shape: str, method: str, *, turn: int) -> None:
        """Steps of a method, in chunks in turns, the start of the runs, and their scoring."""
        overrides = [
            *COMMON,
            *FRESH_MODEL,
            *SHAPES[shape],
            f"method={method}",
            f"trainer.steps={WARMUP + CHUNK * self.options.chunks}",
            f"+callbacks.clock.stage={STAGE}",
            f"+callbacks.clock.warmup={WARMUP}",
            f"+callbacks.clock.chunk={CHUNK}",
            f"+callbacks.clock.chunks={self.options.chunks}",
        ]
        order = rotate(SIDES, turn)
        runs = {}
        with tempfile.TemporaryDirectory() as folder:
            for side in order:
                runs[side] = self.start(side, overrides, folder)
                runs[side].wait_for("chunk")  # the end of the warm-up
            for number in range(self.options.chunks):
                for side in rotate(SIDES, number):
                    runs[side].pipe.send("go")
                    self.add(f"step, {method}, {shape}", side, runs[side].wait_for("chunk"))
            for side in order:
                runs[side].pipe.send("go")
                runs[side].finish()

        for side in SIDES:
            self.add("first step", side, runs[side].time_to_first_step())
            self.add(f"scoring, {shape}", side, runs[side].time_of_scoring())
        losses = {side: runs[side].messages["losses"][0] for side in SIDES}
        differences = [abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True)]
        self.distances[f"{method}, {shape}"] = max(differences)

    def measure_default_run(self, *, turn: int) -> None:
        """`python run.py` with text and base model in the cache, from its start to its end."""
        for side in rotate(SIDES, turn):
            with tempfile.TemporaryDirectory() as folder:
                run = self.start(side, [], folder)
                self.add("default run", side, run.finish())
                self.add("default run, first step", side, run.time_to_first_step())
                self.add("default run, scoring", side, run.time_of_scoring())

    def measure_text(self, text_folder: Path, *, turn: int) -> None:
        """Reading and packing a text: the script that each version has for it, with an empty cache."""
        for side in rotate(SIDES, turn):
            with tempfile.TemporaryDirectory() as cache:
                command = [
                    sys.executable,
                    str(find_text_script(self.trees[side])),
                    "--subject=cpt",
                    f"--megabytes={self.options.megabytes}",
                    "--length=128",
                    f"--place={text_folder}",
                    f"--cache={cache}",
                ]
                start_time = time.monotonic()
                process = subprocess.Popen(
                    command,
                    cwd=self.trees[side],
                    env=make_environment(self.trees[side]),
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert process.stdout is not None
                output = process.stdout.read()
                times = wait_for_process(process, start_time)
                if process.returncode:
                    raise RuntimeError(f"exit code {process.returncode} of {command}")

            result = json.loads(output.splitlines()[-1])
            self.add("text", side, times)
            self.add("text, packing", side, {kind: result[kind] for kind in ("wall", "cpu")})


def find_text_script(tree: Path) -> Path:
    """The benchmark of text preparation, which c957cdae has in another folder."""
    path = tree / "benchmarks" / "costs" / "texts.py"
    return path if path.exists() else tree / "benchmarks" / "texts.py"


def summarize(pairs: Mapping[str, Pairs]) -> dict[str, Any]:
    """Of every row the median seconds here, and the ratios to the other version with their intervals: above
    1, this version is slower. A row of steps has the seconds of one."""
    summary = {}
    for name, sides in pairs.items():
        ratios = {}
        for kind in ("cpu", "wall"):
            ours = [times[kind] for times in sides["ours"]]
            theirs = [times[kind] for times in sides["theirs"]]
            ratios[kind] = compare_times(theirs, ours)
        steps = CHUNK if name.startswith("step,") else 1
        cpu_times = [times["cpu"] for times in sides["ours"]]
        summary[name] = {**ratios, "cpu_seconds": statistics.median(cpu_times) / steps}
    return summary


def list_slower(summary: Mapping[str, Any]) -> list[str]:
    """The rows whose CPU time is above the tolerance, and whose interval excludes 1."""
    return [
        name
        for name, figures in summary.items()
        if figures["cpu"]["median"] > TOLERANCE and figures["cpu"]["low"] > 1
    ]


ROWS = {
    "default run": "`python run.py`, cached text and base",
    "default run, first step": "its start to the end of the first step",
    "default run, scoring": "its scoring",
    "first step": "start to the end of the first step, small models",
    "text": "text: reading, tokenization and packing",
    "text, packing": "of it tokenization and packing",
    "scoring, roberta": "scoring, RoBERTa",
    "scoring, gpt2": "scoring, GPT-2",
    "scoring, t5": "scoring, T5",
}


def format_ratio(ratio: Mapping[str, float]) -> str:
    """A median with its interval."""
    return "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio)


def format_tables(summary: Mapping[str, Any]) -> str:
    """The rows of phases, then the steps by method and model."""
    lines = ["| phase | CPU s | CPU time | wall time | pairs |", "| :-- | --: | --: | --: | --: |"]
    for name, label in ROWS.items():
        if name in summary:
            figures = summary[name]
            ratios = f"{format_ratio(figures['cpu'])} | {format_ratio(figures['wall'])}"
            lines.append(f"| {label} | {figures['cpu_seconds']:.2f} | {ratios} | {figures['cpu']['pairs']} |")

    shapes = [shape for shape in SHAPES if f"step, {METHODS[0]}, {shape}" in summary]
    if shapes:
        heads = " | ".join(LABELS[shape] for shape in shapes)
        lines += ["", f"| CPU time of a step (ms) | {heads} |", f"| :-- |{' --: |' * len(shapes)}"]
    measured_methods = METHODS if shapes else ()
    for method in measured_methods:
        cells = []
        for shape in shapes:
            figures = summary.get(f"step, {method}, {shape}")
            cell = "–"
            if figures:
                cell = f"{format_ratio(figures['cpu'])} ({1000 * figures['cpu_seconds']:.0f})"
            cells.append(cell)
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(summary: Mapping[str, Any]) -> None:
    before, _, remainder = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page_text = f"{before}{BEGIN}\n{format_tables(summary)}\n\n{END}{remainder.partition(END)[2]}"
    PAGE.write_text(page_text, encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks" / "versions"
    parser.add_argument("--other", help="folder with a checkout of the other version")
    parser.add_argument("--names", nargs="*", default=NAMES_OF_OTHER, help="options: name here=name there")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sessions", type=int, default=1, help="times that the runs of steps are started")
    parser.add_argument("--chunks", type=int, default=12, help="pairs of chunks of a session")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of default runs and of texts")
    parser.add_argument("--megabytes", type=int, default=10, help="of text")
    parser.add_argument("--add", action="store_true", help="keep the published pairs and add to them")
    parser.add_argument("--published", action="store_true", help="measure nothing: write the tables")
    parser.add_argument("--cache", default=str(cache), help="folder of texts and models")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()
    if not options.published and not options.other:
        parser.error("--other is missing: a folder with a checkout of another version")
    return options


def read_commit(tree: str) -> str:
    command = ["git", "-C", tree, "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(options: argparse.Namespace, path: Path) -> None:
    """Measures the chosen parts; writes what there is after each."""
    pairs: dict[str, Pairs] = {}
    distances: dict[str, float] = {}
    if options.add:
        published = json.loads(path.read_text())
        pairs = published["pairs"]
        distances = published["losses_apart"]
    comparison = Comparison(options, pairs, distances)

    def save_all() -> None:
        summary = summarize(pairs)
        results = {
            "other": read_commit(options.other),
            "options": {name: getattr(options, name) for name in ("chunks", "megabytes")},
            "slower": list_slower(summary),
            "ratios": summary,
            "losses_apart": distances,
            "pairs": pairs,
        }
        save("versions", results, out=str(path))

    turn = 0
    if "steps" in options.parts:
        for shape in options.shapes:
            comparison.fill_caches(shape, [*COMMON, *FRESH_MODEL, *SHAPES[shape]])
        for _ in range(options.sessions):
            for method in options.methods:
                for shape in options.shapes:
                    comparison.measure_steps(shape, method, turn=turn)
                    turn += 1
                    save_all()
                    figures = summarize(pairs)[f"step, {method}, {shape}"]
                    print(method, shape, format_ratio(figures["cpu"]), flush=True)
    if "text" in options.parts:
        options.vocabulary = VOCABULARY
        options.text = []  # the documentation of installed packages
        text_folder = prepare(options)
        for turn in range(options.repeats):
            comparison.measure_text(text_folder, turn=turn)
            save_all()
    if "default" in options.parts:
        comparison.fill_caches("default", [])
        for turn in range(options.repeats):
            comparison.measure_default_run(turn=turn)
            save_all()
            print(f"default run {turn + 1}/{options.repeats}", flush=True)


def main() -> None:
    options = parse_options()
    path = Path(options.out) if options.out else FILE
    if not options.published:
        measure(options, path)
    summary = json.loads(path.read_text())["ratios"]
    print(format_tables(summary))
    if path == FILE:
        write_page(summary)


if __name__ == "__main__":
    main()
