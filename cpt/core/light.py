"""Modules without their heavy imports: torch and Lightning take five seconds, which a wrong option need not
wait for. A class that stands on a heavy import is left out; the frozen options beside it are there."""

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import SimpleNamespace

import cpt

HEAVY = ("torch", "lightning", "transformers", "peft", "torchmetrics", "datasets", "tokenizers", "matplotlib")


@cache
def load_light(module: str) -> SimpleNamespace:
    """What of a module can be had at once, all of it where it has no heavy import; and under `defined` the
    names that it has in all. Raises ModuleNotFoundError, or what the module raises."""
    path = source_of(module)
    if path is None or not is_heavy(module):
        whole = vars(importlib.import_module(module))
        return SimpleNamespace(**{**whole, "defined": set(whole)})
    space: dict = {"__name__": module, "__package__": package_of(module, path)}
    statements = parse(path)
    for statement in statements:
        if not any(map(is_heavy, imported_modules(statement, space["__package__"]))):
            # What needs a name that a heavy import would bring is left out as well.
            with suppress(NameError, AttributeError):
                exec(compile(ast.Module([statement], []), str(path), "exec"), space)
    defined = {name for statement in statements for name in bound_names(statement)}
    return SimpleNamespace(**{**space, "defined": defined})


@cache
def is_heavy(module: str) -> bool:
    """Whether a module imports one of HEAVY when it is read in; of installed packages only these do."""
    found, waiting = {module}, [module]  # a package and its modules may import one another
    while waiting:
        name = waiting.pop()
        if name.partition(".")[0] in HEAVY:
            return True
        new = set(needed_by(name)) - found
        found |= new
        waiting += new
    return False


def needed_by(module: str) -> Iterator[str]:
    """The modules that a module imports when it is read in, if it is this program's or the user's own."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return
    path = source_of(module)
    if path is None or package != __name__.partition(".")[0] and is_installed(package):
        return
    for statement in parse(path):
        yield from imported_modules(statement, package_of(module, path))


@cache
def is_installed(package: str) -> bool:
    """Whether a package lies in a folder of installed ones: site-packages, dist-packages, that of
    `pip install --target`."""
    spec = find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    return any(any(Path(place).parent.glob("*.dist-info")) for place in places)


def package_of(module: str, path: Path) -> str:
    """The package that a module's relative imports start from."""
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def source_of(module: str) -> Path | None:
    """The file of a module; None where it has none of Python."""
    spec = find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {module}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


@cache
def parse(path: Path) -> list[ast.stmt]:
    """A module's statements; a public name of cpt is imported from the module that it is in."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [each for statement in body for each in read_directly(statement)]


def read_directly(statement: ast.stmt) -> Iterator[ast.stmt]:
    """`from cpt import Options, Batch` as an import from each module that has them."""
    if not isinstance(statement, ast.ImportFrom) or statement.module != "cpt" or statement.level:
        yield statement
        return
    for alias in statement.names:
        module = cpt.PUBLIC.get(alias.name, "cpt")
        yield ast.copy_location(ast.ImportFrom(module, [alias], 0), statement)


def imported_modules(statement: ast.stmt, package: str) -> Iterator[str]:
    """The modules that a statement in a package imports; a submodule may be named like an attribute of its
    package."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        module = resolve_name("." * statement.level + (statement.module or ""), package)
        yield module
        yield from (f"{module}.{alias.name}" for alias in statement.names if is_module(module, alias.name))


@cache
def is_module(package: str, name: str) -> bool:
    """Whether a name of a package is one of its modules; the package is not imported."""
    if package.partition(".")[0] in (*HEAVY, *sys.stdlib_module_names):
        return False
    with suppress(ModuleNotFoundError, ValueError):
        spec = find_spec(package)
        places = [] if spec is None else spec.submodule_search_locations or []
        return any(
            (Path(place) / f"{name}{end}").exists() for place in places for end in (".py", "/__init__.py")
        )
    return False


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a meaning."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
