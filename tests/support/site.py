"""The programs that write pages of docs/, which are no package."""

import importlib.util
from functools import cache
from types import ModuleType

from tests.conftest import ROOT


@cache
def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
