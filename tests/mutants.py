"""Applies small faults to a copy of the checkout, one at a time, and runs the tests that could see each.

    python tests/mutants.py                 # all of tests/mutants.toml
    python tests/mutants.py NAME …          # some, by names or areas
    python tests/mutants.py --list          # what there is; checks that each text and each test is there

A mutant is killed where a test fails, survives where all pass, and is invalid where its tests fail
without it, or end otherwise than by a failed test.
`--write` records the results in tests/mutants.json. Not part of CI."""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.toml"
RESULTS = ROOT / "tests" / "mutants.json"
LIMIT_S = 240  # of one mutant's tests
OUTPUT = 2000  # characters that are shown of tests that fail without a mutant
# Imported once; the process of each mutant is a fork, which then imports cpt from its copy.
PRELOADED = (
    "torch, torch.distributed.fsdp, torch.utils.flop_counter, lightning.pytorch, torchmetrics, transformers, "
    "transformers.models.auto.modeling_auto, datasets, peft, scipy.stats, hydra, optuna, pytest"
)
LEFT_OUT = (".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "outputs", "*.egg-info")
STATES = ("killed", "survived", "timed out", "invalid")


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` occurs once in the files of cpt/ that end with `file`; `tests` could see `new`."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    file: str = ""  # all where it is empty

    def mutated(self, root: Path) -> tuple[Path, str]:
        """The file and its text with the fault. Raises ValueError where its text does not occur once."""
        paths = [path for path in sorted((root / "cpt").rglob("*.py")) if str(path).endswith(self.file)]
        texts = {path: path.read_text(encoding="utf-8") for path in paths}
        num_occurrences = sum(text.count(self.old) for text in texts.values())
        if num_occurrences != 1:
            raise ValueError(
                f"mutant {self.name}: its text occurs {num_occurrences} times, not once: {self.old!r}"
            )
        (path,) = [path for path, text in texts.items() if self.old in text]
        return path, texts[path].replace(self.old, self.new)

    def check(self) -> None:
        """Raises ValueError where it cannot be applied, gives no Python, or names tests that are gone."""
        path, text = self.mutated(ROOT)
        compile(text, str(path), "exec")
        for test in self.tests:
            file, _, name = test.partition("::")
            source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
            if not source or (name and f"def {name.partition('[')[0]}(" not in source):
                raise ValueError(f"mutant {self.name}: there is no {test}; change it in tests/mutants.toml")


@dataclass
class Result:
    """What tests said of a mutant, or of the code as it is."""

    state: str  # one of STATES
    seconds: float
    failed_test: str  # empty where none failed
    output: str


def read_mutants() -> list[Mutant]:
    """`methods/test_l2: one two` names two tests of a file, `methods/test_l2` all of it."""
    mutants = []
    for area, members in tomllib.loads(LIST.read_text(encoding="utf-8")).items():
        for name, fields in members.items():
            tests: list[str] = []
            for line in fields.pop("tests"):
                path, _, names = line.partition(":")
                tests += [f"tests/{path}.py::test_{test}" for test in names.split()] or [f"tests/{path}.py"]
            mutants.append(Mutant(f"{area}.{name}", tests=tuple(tests), **fields))
    return mutants


def make_copy(folder: Path) -> Path:
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    shared = ROOT.parent / "shared"  # numbers of the authors' code, where tests look for them
    if shared.exists():
        (folder / "shared").symlink_to(shared.resolve())
    return folder / "checkout"


def run_tests(copy: Path, tests: Sequence[str], failed: Path, output: Path) -> None:
    """The process of one mutant: pytest in the copy; its exit code is pytest's."""
    import pytest

    # A session of its own, so that try_tests can also kill what the tests start.
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    # cpt and tests are imported from the copy, never from this checkout.
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    checkout_paths = ("", str(ROOT), str(ROOT / "tests"))
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in checkout_paths)]

    class Chosen:
        """All of a file but its campaign, and the tests that are named; writes the first that fails."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            named = {item for item in items if {item.nodeid, item.nodeid.partition("[")[0]} & {*tests}}
            items[:] = [item for item in items if item in named or not item.get_closest_marker("campaign")]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.write_text(report.nodeid)

        pytest_collectreport = pytest_runtest_logreport  # a file that cannot be imported

    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-m", ""]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by now
    code = pytest.main([*options, f"--basetemp={copy.parent / 'tmp'}", *tests], plugins=[Chosen()])

    # Threads and exit handlers that the tests have left are not waited for.
    sys.stdout.flush()
    os._exit(int(code))


def try_tests(copy: Path, tests: Sequence[str], mutant: Mutant | None = None) -> Result:
    start = time.monotonic()
    failed_file = copy.parent / "failed.txt"
    failed_file.write_text("")
    output_file = copy.parent / "output.txt"

    # Without a mutant, a file that no test imports is written as it is.
    path, text = mutant.mutated(copy) if mutant else (copy / "setup.py", "")
    original_text = path.read_text(encoding="utf-8")
    # The compiled file is removed: Python would use it where size and second of the source are the same.
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(text or original_text, encoding="utf-8")
        compiled.unlink(missing_ok=True)
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=run_tests, args=(copy, tests, failed_file, output_file))
        process.start()
        process.join(LIMIT_S)
        is_late = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # also processes that the tests have started
        process.join()
    finally:
        path.write_text(original_text, encoding="utf-8")
        compiled.unlink(missing_ok=True)

    failed_test = failed_file.read_text()
    if is_late:
        state = "timed out"
    elif failed_test:
        state = "killed"
    elif process.exitcode == 0:
        state = "survived"
    else:  # a process that ends otherwise than by a failed test says nothing about the mutant
        state = "invalid"
    seconds = round(time.monotonic() - start, 1)
    return Result(state, seconds, failed_test, output_file.read_text(errors="replace"))


def run_mutants(mutants: Sequence[Mutant]) -> Iterator[tuple[str, Result]]:
    # Mutants of the same test files are a group: its tests are run once without a mutant.
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in mutants:
        files = dict.fromkeys(test.partition("::")[0] for test in mutant.tests)
        groups.setdefault(tuple(files), []).append(mutant)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = make_copy(Path(folder))
        for members in groups.values():
            results = {mutant: try_tests(copy, mutant.tests, mutant) for mutant in members}

            # A test that fails on the code as it is has not detected anything.
            killed = [result for result in results.values() if result.state == "killed"]
            tests = {result.failed_test for result in killed}
            unchanged = try_tests(copy, sorted(tests)) if tests else None
            if unchanged and unchanged.state != "survived":
                reason = unchanged.failed_test or unchanged.state
                print(f"invalid, as tests fail without a mutant: {reason}", flush=True)
                print(unchanged.output[-OUTPUT:], file=sys.stderr)
                for result in killed:
                    result.state = "invalid"

            for mutant, result in results.items():
                if result.state == "invalid" and not result.failed_test:
                    print(result.output[-OUTPUT:], file=sys.stderr)
                line = f"{result.state:9}  {result.seconds:5.1f} s  {mutant.name}  {result.failed_test}"
                print(line, flush=True)
                yield mutant.name, result


def write_results(results: dict[str, Result], names: Sequence[str]) -> None:
    """Adds results to those of earlier calls; `names`: of all mutants, in their order. Others are removed."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"] if RESULTS.exists() else {}
    for name, result in results.items():
        stored[name] = {"state": result.state, "seconds": result.seconds, "by": result.failed_test}
    rows = {name: stored[name] for name in names if name in stored}

    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    head = {"commit": commit.strip(), "date": time.strftime("%Y-%m-%d"), "run": len(rows)}
    states = [row["state"] for row in rows.values()]
    counts = {state: states.count(state) for state in STATES}

    # One line a mutant, so that a diff shows what has changed.
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    text = f'{{\n "about": {json.dumps(head | counts)},\n "mutants": {{\n{lines}\n }}\n}}\n'
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Applies small faults to a copy and runs the tests of each.")
    parser.add_argument("names", nargs="*", help="names or areas of mutants (default: all)")
    parser.add_argument("--list", action="store_true", help="list them, and check that each can be applied")
    parser.add_argument("--write", action="store_true", help="note the results in tests/mutants.json")
    arguments = parser.parse_args()

    all_mutants = read_mutants()
    mutants = all_mutants
    if arguments.names:
        names = {*arguments.names}
        mutants = [m for m in all_mutants if {m.name, m.name.partition(".")[0]} & names]

    errors = []
    for mutant in mutants:
        try:
            mutant.check()
        except (ValueError, SyntaxError) as error:
            errors.append(str(error))
    if arguments.list:
        print("\n".join(f"{mutant.name}: {' '.join(mutant.tests)}" for mutant in mutants))
    if errors or not mutants:
        print("\n".join(errors) or f"no mutant is called {' or '.join(arguments.names)}", file=sys.stderr)
        return 1
    if arguments.list:
        return 0

    # Libraries read these when they are imported: before the imports that all forks share.
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for name in PRELOADED.split(", "):
        importlib.import_module(name)

    results = {}
    for name, result in run_mutants(mutants):
        results[name] = result
        if arguments.write:
            write_results(results, [mutant.name for mutant in all_mutants])
    states = [result.state for result in results.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in STATES))
    return int("survived" in states)


if __name__ == "__main__":
    sys.exit(main())
