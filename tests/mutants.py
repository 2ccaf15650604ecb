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
LIST, RESULTS = ROOT / "tests" / "mutants.toml", ROOT / "tests" / "mutants.json"
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
        if (times := sum(text.count(self.old) for text in texts.values())) != 1:
            raise ValueError(f"mutant {self.name}: its text occurs {times} times, not once: {self.old!r}")
        (path,) = [path for path, text in texts.items() if self.old in text]
        return path, texts[path].replace(self.old, self.new)

    def check(self) -> None:
        """Raises ValueError where it cannot be applied, gives no Python, or names tests that are gone."""
        path, text = self.mutated(ROOT)
        compile(text, str(path), "exec")
        for test in self.tests:
            file, _, name = test.partition("::")
            there = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
            if not there or (name and f"def {name.partition('[')[0]}(" not in there):
                raise ValueError(f"mutant {self.name}: there is no {test}; change it in tests/mutants.toml")


@dataclass
class Result:
    """What tests said of a mutant, or of the code as it is; `by`: the test that has failed."""

    state: str
    seconds: float
    by: str
    output: str


def read_mutants() -> list[Mutant]:
    """`methods/test_l2: one two` names two tests of a file, `methods/test_l2` all of it."""
    found = []
    for area, members in tomllib.loads(LIST.read_text(encoding="utf-8")).items():
        for name, given in members.items():
            tests: list[str] = []
            for line in given.pop("tests"):
                path, _, names = line.partition(":")
                tests += [f"tests/{path}.py::test_{each}" for each in names.split()] or [f"tests/{path}.py"]
            found.append(Mutant(f"{area}.{name}", tests=tuple(tests), **given))
    return found


def make_copy(folder: Path) -> Path:
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    if (shared := ROOT.parent / "shared").exists():  # numbers of the authors' code, where tests look for them
        (folder / "shared").symlink_to(shared.resolve())
    return folder / "checkout"


def run_tests(copy: Path, tests: Sequence[str], failed: Path, output: Path) -> None:
    """The process of one mutant: pytest in the copy; its exit code is pytest's."""
    import pytest

    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    ours = ("", str(ROOT), str(ROOT / "tests"))
    sys.path[:] = [str(copy), *(each for each in sys.path if each not in ours)]

    class Chosen:
        """All of a file but its campaign, and the tests that are named; the first one that fails is noted."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            named = {item for item in items if {item.nodeid, item.nodeid.partition("[")[0]} & {*tests}}
            items[:] = [each for each in items if each in named or not each.get_closest_marker("campaign")]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.write_text(report.nodeid)

        pytest_collectreport = pytest_runtest_logreport  # a file that cannot be imported

    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-m", ""]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported by now
    code = pytest.main([*options, f"--basetemp={copy.parent / 'tmp'}", *tests], plugins=[Chosen()])
    sys.stdout.flush()
    os._exit(int(code))


def try_tests(copy: Path, tests: Sequence[str], mutant: Mutant | None = None) -> Result:
    began, failed, output = time.monotonic(), copy.parent / "failed.txt", copy.parent / "output.txt"
    failed.write_text("")
    path, text = mutant.mutated(copy) if mutant else (copy / "setup.py", "")
    before = path.read_text(encoding="utf-8")
    # What was compiled of it goes, since its size and second may be the same.
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(text or before, encoding="utf-8")
        compiled.unlink(missing_ok=True)
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=run_tests, args=(copy, tests, failed, output))
        process.start()
        process.join(LIMIT_S)
        late = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # also what the tests have left
        process.join()
        by = failed.read_text()
        # A process that ends otherwise than by a failed test says nothing about the mutant.
        state = "killed" if by else "survived" if process.exitcode == 0 else "invalid"
        took = round(time.monotonic() - began, 1)
        return Result("timed out" if late else state, took, by, output.read_text(errors="replace"))
    finally:
        path.write_text(before, encoding="utf-8")
        compiled.unlink(missing_ok=True)


def run_mutants(mutants: Sequence[Mutant]) -> Iterator[tuple[str, Result]]:
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in mutants:
        files = dict.fromkeys(each.partition("::")[0] for each in mutant.tests)
        groups.setdefault(tuple(files), []).append(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = make_copy(Path(folder))
        for members in groups.values():
            done = {each: try_tests(copy, each.tests, each) for each in members}
            killed = {mutant: found for mutant, found in done.items() if found.state == "killed"}
            tests = {found.by for found in killed.values()}
            plain = try_tests(copy, sorted(tests)) if tests else None
            if plain and plain.state != "survived":
                print(f"invalid, as tests fail without a mutant: {plain.by or plain.state}", flush=True)
                print(plain.output[-OUTPUT:], file=sys.stderr)
                for found in killed.values():
                    found.state = "invalid"
            for mutant, found in done.items():
                if found.state == "invalid" and not found.by:
                    print(found.output[-OUTPUT:], file=sys.stderr)
                print(f"{found.state:9}  {found.seconds:5.1f} s  {mutant.name}  {found.by}", flush=True)
                yield mutant.name, found


def write_results(results: dict[str, Result], known: Sequence[str]) -> None:
    both = json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"] if RESULTS.exists() else {}
    both |= {name: {"state": r.state, "seconds": r.seconds, "by": r.by} for name, r in results.items()}
    both = {name: both[name] for name in known if name in both}
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    states = [each["state"] for each in both.values()]
    about: dict[str, Any] = {"commit": commit.strip(), "date": time.strftime("%Y-%m-%d"), "run": len(both)}
    about |= {state: states.count(state) for state in STATES}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in both.items())
    text = f'{{\n "about": {json.dumps(about)},\n "mutants": {{\n{lines}\n }}\n}}\n'
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Applies small faults to a copy and runs the tests of each.")
    parser.add_argument("names", nargs="*", help="names or areas of mutants (default: all)")
    parser.add_argument("--list", action="store_true", help="list them, and check that each can be applied")
    parser.add_argument("--write", action="store_true", help="note the results in tests/mutants.json")
    given = parser.parse_args()
    every, wrong = read_mutants(), []
    mutants = [m for m in every if not given.names or {m.name, m.name.partition(".")[0]} & {*given.names}]
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
    results = {}
    for name, found in run_mutants(mutants):
        results[name] = found
        if given.write:
            write_results(results, [each.name for each in every])
    states = [found.state for found in results.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in STATES))
    return int("survived" in states)


if __name__ == "__main__":
    sys.exit(main())
