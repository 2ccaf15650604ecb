"""Private APIs of libraries: cpt lists each that it uses, and the installed versions have it."""

import ast

import pytest

from cpt.core.config import PACKAGE
from cpt.core.private_apis import PRIVATE_APIS, PrivateAPI

# Names with an underscore that are public: of named tuples, of `os`, of Hydra's configs.
PUBLIC = {"_asdict", "_fields", "_replace", "_exit", "_target_"}


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: f"{api.owner}.{api.name}")
def test_the_installed_version_has_it_and_cpt_uses_it(api):
    assert api.is_available()
    for module in api.used_in:
        source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert api.name in source, f"{module} does not use it any more"


def test_what_a_library_lacks_is_found():
    for owner in ("torch.nn:Module", "torch.nn:NoSuchClass", "torch", "no_such_module"):
        assert not PrivateAPI(owner, "_no_such_name", (), "").is_available()


def test_each_private_name_that_cpt_uses_is_listed():
    modules_by_name: dict[str, set[str]] = {}
    for api in PRIVATE_APIS:
        modules_by_name.setdefault(api.name, set()).update(api.used_in)

    unlisted = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for name in find_private_names(tree):
            if name not in defined | PUBLIC and module not in modules_by_name.get(name, ()):
                unlisted.add((module, name))
    assert unlisted == set()


def find_private_names(tree):
    """Attributes with an underscore, and names that are imported from modules with one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            from_private = any(is_private(part) for part in node.module.split("."))
            for alias in node.names:
                # The names of a module within a private package are attributes elsewhere in the file.
                if is_private(alias.name) or (
                    from_private and alias.name not in ("utils", "signal_handling")
                ):
                    yield alias.name


def is_private(name):
    return name.startswith("_") and not name.startswith("__")
