"""Applies small faults to a copy of the checkout, one at a time, and runs the tests that could see each.

    python tests/mutants.py                 # all of tests/mutants.toml
    python tests/mutants.py NAME …          # some, by names or areas
    python tests/mutants.py --list          # what there is; checks that each text and each test is there

A mutant is killed where a test fails, survives where all pass, and is invalid where its tests fail
without it.
`--write` records the results in tests/mutants.json. Not part of CI."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST, RESULTS = ROOT / "tests" / "mutants.toml", ROOT / "tests" / "mutants.json"
LIMIT_S = 240  # of one mutant's tests
OUTPUT = 2000  # characters that are shown of tests that fail without a mutant
# Imported once; the process of each mutant is a fork, which then imports cpt from its copy.
PRELOADED = (
    "torch, torch.distributed.fsdp, torch.utils.flop_counter, lightning.pytorch, torchmetrics, transformers, "
    "transformers.models.auto.modeling_auto, datasets, peft, scipy.stats, hydra, optuna, pytest"
)
LEFT_OUT = (".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "outputs", "*.egg-info")
NO_TESTS = 5  # exit code of pytest
STATES = ("killed", "survived", "timed out", "invalid")


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` occurs once in the files of cpt/ that end with `file`; `tests` could see `new`."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    file: str = ""

    @property
    def area(self) -> str:
        return self.name.partition(".")[0]

    def place(self, root: Path) -> Path:
        """The file that has the text. Raises ValueError where it does not occur once."""
        paths = [path for path in sorted((root / "cpt").rglob("*.py")) if str(path).endswith(self.file)]
        counts = {path: path.read_text(encoding="utf-8").count(self.old) for path in paths}
        counts = {str(path.relative_to(root)): count for path, count in counts.items() if count}
        if sum(counts.values()) != 1:
            raise ValueError(
                f"mutant {self.name}: its text occurs {sum(counts.values())} times ({counts or 'nowhere'}), "
                f"needed is once; change it in tests/mutants.toml: {self.old.strip()!r}"
            )
        return root / next(iter(counts))

    def check(self) -> None:
        """Raises ValueError where it cannot be applied, gives no Python, or names tests that are gone."""
        path = self.place(ROOT)
        compile(path.read_text(encoding="utf-8").replace(self.old, self.new), str(path), "exec")
        for test in self.tests:
            file, _, name = test.partition("::")
            there = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
            if not there or (name and f"def {name.partition('[')[0]}(" not in there):
                raise ValueError(f"mutant {self.name}: there is no {test}; change it in tests/mutants.toml")


@dataclass
class Worker:
    """A copy of the checkout, and the process that works in it."""

    folder: Path
    process: BaseProcess | None = None
    job: Job | None = None
    began: float = 0.0

    @property
    def copy(self) -> Path:
        return self.folder / "checkout"


@dataclass
class Job:
    """Tests to run with a mutant, or without one: the baseline."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None
    state: str = ""
    seconds: float = 0.0
    by: str = ""  # the test that has failed
    output: str = field(default="", repr=False)
    undo: tuple[Path, str] | None = field(default=None, repr=False)


def read_mutants() -> list[Mutant]:
    found = []
    for area, members in tomllib.loads(LIST.read_text(encoding="utf-8")).items():
        for name, given in members.items():
            tests = tuple(each for line in given.pop("tests") for each in expand(line))
            found.append(Mutant(f"{area}.{name}", tests=tests, **given))
    return found


def expand(line: str) -> Iterable[str]:
    """`methods/test_l2: one two` names two tests of a file, `methods/test_l2` all of it."""
    path, _, names = line.partition(":")
    yield from (f"tests/{path}.py::test_{name}" for name in names.split())
    if not names:
        yield f"tests/{path}.py"


def make_worker(folder: Path) -> Worker:
    worker = Worker(folder)
    shutil.copytree(ROOT, worker.copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    if (shared := ROOT.parent / "shared").exists():  # numbers of the authors' code, where tests look for them
        (folder / "shared").symlink_to(shared.resolve())
    return worker


def rewrite(path: Path, text: str) -> None:
    """Writes a source; what was compiled of it goes, since its size and second may be the same."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def begin(worker: Worker, job: Job) -> None:
    if job.mutant is not None:
        path = job.mutant.place(worker.copy)
        source = path.read_text(encoding="utf-8")
        mutated = source.replace(job.mutant.old, job.mutant.new)
        compile(mutated, str(path), "exec")
        rewrite(path, mutated)
        job.undo = path, source
    worker.job, worker.began = job, time.monotonic()
    worker.process = multiprocessing.get_context("fork").Process(target=run_tests, args=(worker, job.tests))
    worker.process.start()


def run_tests(worker: Worker, tests: Sequence[str]) -> None:
    """The process of one job: pytest in the copy; its exit code is pytest's."""
    import pytest

    os.setsid()
    with (worker.folder / "output.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(worker.copy)
    os.environ["PYTHONPATH"] = str(worker.copy)
    ours = ("", str(ROOT), str(ROOT / "tests"))
    sys.path[:] = [str(worker.copy), *(each for each in sys.path if each not in ours)]
    failed = worker.folder / "failed.txt"
    failed.write_text("")

    class Chosen:
        """All of a file but its campaign, and the tests that are named; the first one that fails is noted."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if is_chosen(item)]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.write_text(report.nodeid)

    def is_chosen(item: pytest.Item) -> bool:
        named = item.nodeid in tests or item.nodeid.partition("[")[0] in tests
        return named or not item.get_closest_marker("campaign")

    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-m", ""]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by now
    sys.exit(int(pytest.main([*options, f"--basetemp={worker.folder / 'tmp'}", *tests], plugins=[Chosen()])))


def is_over(worker: Worker) -> bool:
    """Whether the process of a worker has ended; then its job has a result, and the copy is as it was."""
    process, job = worker.process, worker.job
    assert process is not None and process.pid is not None and job is not None
    process.join(timeout=0.1)
    late = time.monotonic() - worker.began > LIMIT_S
    if process.is_alive() and not late:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what the tests have left
    process.join()
    job.seconds = round(time.monotonic() - worker.began, 1)
    ends = {0: "survived", NO_TESTS: "invalid"}
    job.state = "timed out" if late else ends.get(process.exitcode or 0, "killed")
    job.by = (worker.folder / "failed.txt").read_text()
    job.output = (worker.folder / "output.txt").read_text(errors="replace")
    if job.undo is not None:
        rewrite(*job.undo)
    worker.process = worker.job = None
    return True


def run_jobs(workers: Sequence[Worker], jobs: Iterable[Job]) -> Iterable[Job]:
    """Runs jobs, as many at once as there are workers; gives each when it is done."""
    waiting, more = iter(jobs), True
    while more or any(worker.process for worker in workers):
        for worker in workers:
            done = worker.job
            if worker.process is None and more:
                job = next(waiting, None)
                more = job is not None
                if job is not None:
                    begin(worker, job)
            elif worker.process is not None and done is not None and is_over(worker):
                yield done


def check_baseline(workers: Sequence[Worker], jobs: Sequence[Job]) -> None:
    """Runs the tests that have killed mutants without any; where one fails, the jobs are invalid."""
    killed = [job for job in jobs if job.state == "killed"]
    tests = dict.fromkeys(test for job in killed for test in ([job.by] if job.by else job.tests))
    for baseline in run_jobs(workers, [Job(tuple(tests))] if tests else []):
        if baseline.state != "survived":
            print(f"invalid, as tests fail without a mutant: {baseline.by or baseline.state}", flush=True)
            print(baseline.output[-OUTPUT:], file=sys.stderr)
            for job in killed:
                job.state = "invalid"


def run_mutants(mutants: Sequence[Mutant], *, jobs: int) -> Iterator[Job]:
    """Runs the tests of mutants, those together that share files of tests; those of quick tests first."""
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in mutants:
        files = dict.fromkeys(test.partition("::")[0] for test in mutant.tests)
        groups.setdefault(tuple(files), []).append(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = [make_worker(Path(folder) / str(number)) for number in range(jobs)]
        for members in sorted(groups.values(), key=lambda group: ("::" in str(group), -len(group))):
            done = []
            for job in run_jobs(workers, [Job(mutant.tests, mutant) for mutant in members]):
                assert job.mutant is not None
                print(f"{job.state:9}  {job.seconds:5.1f} s  {job.mutant.name}  {job.by}", flush=True)
                done.append(job)
            check_baseline(workers, done)
            yield from done


def summarise(states: dict[str, str]) -> str:
    areas = dict.fromkeys(name.partition(".")[0] for name in states)
    lines = [f"{'area':12}" + "".join(f"{state:>11}" for state in STATES)]
    for area in (*areas, "all"):
        own = [state for name, state in states.items() if area in ("all", name.partition(".")[0])]
        lines.append(f"{area:12}" + "".join(f"{own.count(state):11}" for state in STATES))
    return "\n".join(lines)


def write_results(results: dict[str, Job], known: Sequence[str]) -> None:
    """Notes results beside those of earlier runs, of mutants that there still are."""
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"] if RESULTS.exists() else {}
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    noted = {
        name: {"state": job.state, "seconds": job.seconds, "by": job.by} for name, job in results.items()
    }
    both = {name: (before | noted)[name] for name in known if name in before or name in noted}
    states = [each["state"] for each in both.values()]
    about: dict[str, Any] = {"commit": commit.strip(), "date": time.strftime("%Y-%m-%d"), "run": len(both)}
    about |= {state: states.count(state) for state in STATES}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in both.items())
    text = f'{{\n "about": {json.dumps(about)},\n "mutants": {{\n{lines}\n }}\n}}\n'
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Applies small faults to a copy and runs the tests of each.")
    parser.add_argument("names", nargs="*", help="names or areas of mutants (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once, each in a copy of its own")
    parser.add_argument("--list", action="store_true", help="list them, and check that each can be applied")
    parser.add_argument("--write", action="store_true", help="note the results in tests/mutants.json")
    given = parser.parse_args()
    every = read_mutants()
    mutants = [each for each in every if not given.names or {each.name, each.area} & {*given.names}]
    wrong = []
    for mutant in mutants:
        try:
            mutant.check()
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
    if given.list:
        print("\n".join(f"{each.name}: {' '.join(each.tests)}" for each in mutants))
    if wrong or not mutants:
        print("\n".join(wrong) or f"no mutant is called {' or '.join(given.names)}", file=sys.stderr)
        return 1
    if given.list:
        return 0
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for name in PRELOADED.split(", "):
        importlib.import_module(name)
    results: dict[str, Job] = {}
    for job in run_mutants(mutants, jobs=given.jobs):
        assert job.mutant is not None
        results[job.mutant.name] = job
        if given.write:
            write_results(results, [each.name for each in every])
    print(summarise({name: job.state for name, job in results.items()}))
    return int(any(job.state == "survived" for job in results.values()))


if __name__ == "__main__":
    sys.exit(main())
