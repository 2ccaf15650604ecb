"""The map and hooks in CONTRIBUTING.md are those of the code, texts have no banned phrase, names of functions
and classes are unique. `lint-imports` checks the imports."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cpt.gradient_masks.base import GradientMask
from cpt.methods.base import ContinualMethod
from tests.conftest import ROOT
from tests.support.campaign import CAMPAIGN_ROWS
from tests.support.slow_tests import read_slow_tests

CPT = ROOT / "cpt"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(heading: str) -> str:
    """The first block of code below a heading."""
    return CONTRIBUTING.split(f"\n## {heading}\n", 1)[1].split("\n```\n")[1]


def test_tests_that_rest_and_every_wing_of_the_map_are_there():
    tests = set()
    node_ids = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        tests.update((path.name, name) for name in names)
        node_ids.update(f"{path.relative_to(ROOT)}::{name}" for name in names)
    assert set(CAMPAIGN_ROWS) - tests == set()
    assert read_slow_tests() - node_ids == set()

    wings = {f"{path.name}/" for path in CPT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert wings == set(re.findall(r"^  (\w+/) +\w", block("The map"), re.MULTILINE))


def test_the_hooks_that_are_drawn_are_there():
    drawn = set(re.findall(r"(?<![\w.])([a-z_]+)\(", block("The loop")))
    table = set(re.findall(r"`([a-z_]+)\([\w, ]*\)`", CONTRIBUTING.split("\n## Adding a method\n")[0]))
    assert {name for name in (drawn | table) - {"method"} if not hasattr(ContinualMethod, name)} == set()
    of_masks = set(re.findall(r"mask\.(\w+)\(", block("The loop")))
    assert of_masks and {name for name in of_masks if not hasattr(GradientMask, name)} == set()


# Phrases of translated English; docs/glossary.md has the terms to use.
BANNED = re.compile(
    r"\b(told|sa(?:ys|id) so|stands? (?:in|beside|behind)|goes on|gone on|go on with|going on with|in a line"
    r"|as ever|all the same|so many|of one's own|of theirs|beside|behind|with which figures|what of it"
    r"|no number|begun|anew|made again|(?:what|that) there (?:is|are)|(?:what|that) are none|(?-i:is none)"
    r"|(?-i:of the hub)|processors?|makes? no trace|(?:is|are) looked at|looks? at|where that is|as far as"
    r"|what rests|where (?:they|it|these|those) rests?|rests? (?:in|on|there))\b",
    re.IGNORECASE,
)
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]


def texts_by_line(path: Path) -> Iterator[tuple[int, str]]:
    """The text of a file by line; of Python its strings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line.partition("  # ")[2] or line.lstrip().partition("# ")[2]


def without_code(text: str) -> str:
    """Text on one line, without code spans; empty for a name."""
    return "" if text.isidentifier() else re.sub(r"`[^`]*`", "", re.sub(r"\s+", " ", text))


def test_no_banned_phrase_is_written():
    files = [*PAGES, *(ROOT / "conf").rglob("*.yaml"), *CPT.rglob("*.py"), *CPT.rglob("*.j2")]
    phrases = []
    for path in files:
        for line, text in texts_by_line(path):
            for match in BANNED.finditer(without_code(text)):
                phrases.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert phrases == []


# A count with a noun that is always in the plural: `{len(names)} files`, `%d new files`. A verb may follow.
COUNT_WITH_PLURAL = re.compile(
    r"(?:\{(?:len\([^{}]*\)|num_\w+)(?::,)?\}|%d) (?!as |has |in |is |was |needs )(?:[a-z-]+ )?[a-z]+s\b"
)
IDENTITY_OF_BASE = "{len(base.tokenizer)} entries"  # is compared with that of older runs


def test_a_count_in_a_message_has_a_noun_that_can_be_in_the_singular():
    """`count_noun` gives `1 file`, where `{len(names)} files` is wrong."""
    phrases = []
    for path in CPT.rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in COUNT_WITH_PLURAL.finditer(line):
                if match[0] != IDENTITY_OF_BASE:
                    phrases.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert phrases == []


def test_no_function_or_class_of_the_package_has_the_name_of_another():
    """A search for a name finds one definition; every program has its own `main` and `build_parser`."""
    files_by_name = defaultdict(list)
    for path in sorted(CPT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_definition and node.name not in ("main", "build_parser", "__getattr__", "__dir__"):
                files_by_name[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in files_by_name.items() if len(files) > 1} == {}


@cache
def defined_names(path: Path) -> set[str]:
    """The names that a module defines or imports at its top level, in conditions and `try` too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


def find_import_folder(path, module):
    """The folder from which a file imports a module of this project; None for one of a library."""
    if module.startswith(("cpt.", "tests.")):
        return ROOT
    file = f"{module.replace('.', '/')}.py"
    folders = [path.parent]  # of a script: Python looks there first
    if path.is_relative_to(ROOT / "benchmarks"):
        folders.append(ROOT / "benchmarks")
    return next((folder for folder in folders if (folder / file).exists()), None)


def test_what_programs_outside_of_the_package_import_of_it_and_of_each_other_is_there():
    """Most benchmarks and campaigns run rarely: a renamed function would be missed late."""
    missing = []
    for folder in ("benchmarks", "docs", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or node.module is None:
                    continue
                start = find_import_folder(path, node.module)
                if start is None:
                    continue
                module = start.joinpath(*node.module.split("."))
                for alias in node.names:
                    is_module = (module / f"{alias.name}.py").exists() or (module / alias.name).is_dir()
                    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                    if not is_module and alias.name not in defined_names(file):
                        missing.append(f"{path.relative_to(ROOT)}: {node.module}.{alias.name}")
    assert missing == []
