"""English prose from the docstrings of installed packages, read from their sources: nothing is imported."""

import ast
import gc
import importlib.util
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from cpt.core.processes import cores
from cpt.data.processes import in_order, may_start
from cpt.data.sources.prose import MIN_DOCUMENT_WORDS, prose

LEFT_OUT_FOLDERS = frozenset(
    ["tests", "test", "_tests", "idlelib", "lib2to3"]
    + ["site-packages", "dist-packages", "__pycache__", "_vendor"]
)
WORTH = 2 << 20  # bytes of sources for which a process is started
TOGETHER = 8  # files that a process is given at once
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_INNER = ("body", "handlers", "orelse", "finalbody", "cases")  # fields that a definition can stand below
# Of each statement those that it has, in the order of a file.
_HOLDERS: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(name for name in kind._fields if name in _INNER)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.mod | ast.stmt | ast.excepthandler | ast.match_case)
}


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions, in file order; none if it does not parse."""
    tree = _parsed(source)
    stack: list[ast.AST] = [tree] if tree else []
    while stack:
        node = stack.pop()
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield text
        for name in reversed(_HOLDERS[type(node)]):
            stack += reversed(getattr(node, name))


def _parsed(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        for category in (DeprecationWarning, SyntaxWarning):  # before and since Python 3.12
            warnings.filterwarnings("ignore", r".*invalid (?:octal )?escape sequence", category)
        collects = gc.isenabled()
        gc.disable()  # a tree has no cycles, and looking for them takes a fifth of the time
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):  # packages ship templates, null bytes, other Pythons' syntax
            return None
        finally:
            if collects:
                gc.enable()


def _topics(source: str) -> Iterator[str]:
    """The texts of the language reference: the values of `topics` in pydoc_data/topics.py."""
    tree = _parsed(source)
    for node in tree.body if tree else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "topics":
            yield from ast.literal_eval(node.value).values()


def modules(package: str) -> list[Path]:
    """The sorted source files of an installed package ("stdlib": Python's), no tests; ValueError if none."""
    found = [path for root in roots_of(package) for path in _sources(root)]
    if not found:
        raise ValueError(
            f"no Python sources for package {package!r}: it must be 'stdlib' or the top-level import name of "
            "an installed package"
        )
    return found


def roots_of(package: str) -> list[Path]:
    if package == "stdlib":
        return [Path(sysconfig.get_paths()["stdlib"])]
    # Only a top-level name is found without importing: find_spec("a.b") imports a.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None:
        return []
    file = [spec.origin] if spec.origin and spec.has_location else []
    return [Path(root) for root in spec.submodule_search_locations or file]


def _sources(root: Path) -> list[Path]:
    found = [root] if root.is_file() and root.suffix == ".py" else []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - LEFT_OUT_FOLDERS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def texts_of_file(path: Path) -> list[list[str]]:
    """The docstrings of each document in a file: one document, in the language reference one per topic."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except (SyntaxError, ValueError):  # an encoding that is unknown or does not hold
        return []
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        return [[topic] for topic in _topics(source)]
    return [list(docstrings(source))]


def documents(packages: Sequence[str]) -> Iterator[str]:
    """The prose of each source file, a blank line between paragraphs; a paragraph is given once in all."""
    return ("\n\n".join(paragraphs) for _, paragraphs in documents_by_module(packages))


def documents_by_module(packages: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The paragraphs of each of `documents`, with its module (pandas.core.frame); ValueError as `modules`."""
    found = {package: modules(package) for package in packages}
    return _by_module(found)


def _by_module(found: dict[str, list[Path]]) -> Iterator[tuple[str, list[str]]]:
    seen: set[str] = set()
    for package, paths in found.items():
        roots = roots_of(package)
        with closing(read_files(paths)) as files:
            for path, texts in tqdm(
                files, desc=f"reading {package}", total=len(paths), disable=None, leave=False
            ):
                for paragraphs in texts:
                    new = [paragraph for paragraph in paragraphs if paragraph not in seen]
                    seen.update(paragraphs)
                    if sum(len(paragraph.split()) for paragraph in new) >= MIN_DOCUMENT_WORDS:
                        yield module_name(package, path, roots), new


def read_files(paths: Sequence[Path]) -> Generator[tuple[Path, list[list[str]]]]:
    """The paragraphs of each document in each file, in the order of the files, read by as many processes as
    there are cores where there is much to read."""
    number = min(cores(), sum(path.stat().st_size for path in paths) // WORTH)
    if number <= 1 or not may_start():
        yield from ((path, paragraphs_of_file(path)) for path in paths)
        return
    parts = (paths[begin : begin + TOGETHER] for begin in range(0, len(paths), TOGETHER))
    told = "a process that reads docstrings was ended, perhaps for want of memory; start again"
    with closing(in_order(paragraphs_of_files, parts, number, told=told)) as made:
        for part, found in made:
            yield from zip(part, found, strict=True)


def paragraphs_of_files(paths: Sequence[Path]) -> list[list[list[str]]]:
    return [paragraphs_of_file(path) for path in paths]


def paragraphs_of_file(path: Path) -> list[list[str]]:
    """The different paragraphs of each document in a file."""
    return [
        list(dict.fromkeys(paragraph for text in texts for paragraph in prose(text)))
        for texts in texts_of_file(path)
    ]


def module_name(package: str, path: Path, roots: Sequence[Path]) -> str:
    """The name to import a file by; below `stdlib` for Python's own."""
    root = next(root for root in roots if path.is_relative_to(root))
    parts = path.relative_to(root).with_suffix("").parts if path != root else ()
    return ".".join([package, *(part for part in parts if part != "__init__")])
