"""Modules without their heavy imports."""

import subprocess
import sys
from pathlib import Path

import pytest

import cpt
from cpt.core.light import is_heavy, load_light
from cpt.core.options import Options
from tests.conftest import ROOT


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that modules are imported from, with what writes them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def write(**modules: str) -> Path:
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('__of__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    yield write
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_relative_imports_are_of_their_package(place):
    place(
        own1__of____init__="", own1__of__base="import torch\n", own1__of__method="from .base import torch\n"
    )
    place(own1__of__options="from . import __doc__\nfrom .names import NAME\n", own1__of__names="NAME = 1\n")
    assert is_heavy("own1.method") and not is_heavy("own1.options")


def test_what_needs_no_heavy_import_is_there_with_its_relative_imports(place):
    place(own2__of____init__="", own2__of__names="NAME = 'x'\n")
    place(
        own2__of__method="import torch\nfrom .names import NAME\nclass M(torch.Tensor): pass\nTOLD = NAME\n"
    )
    found = load_light("own2.method")
    assert found.TOLD == "x" and "M" in found.defined and not hasattr(found, "M")


def test_a_package_and_its_modules_may_import_one_another(place):
    place(own3__of____init__="from .two import B\n", own3__of__one="from . import two\nA = 1\n")
    place(own3__of__two="from . import three\nB = 2\n", own3__of__three="from . import two\n")
    assert not is_heavy("own3.one")


@pytest.mark.parametrize("package, installed", [("own4", True), ("own5", False)])
def test_installed_packages_are_not_looked_into_wherever_they_lie(place, package, installed):
    folder = place(**{f"{package}__of____init__": "import torch\n"})
    if installed:
        (folder / f"{package}-1.0.dist-info").mkdir()
    assert is_heavy(package) == (not installed)


def test_a_module_that_is_missing_is_named(place):
    place(own6="from nowhere_at_all import x\n")
    with pytest.raises(ModuleNotFoundError, match="there is no module nowhere_at_all"):
        is_heavy("own6")


def test_public_names_of_cpt_are_read_from_the_modules_that_have_them(place):
    place(
        own7="from cpt import Batch, ContinualModule, Options, number, option\n"
        "class O(Options): pass\nclass M(ContinualModule): pass\n"
    )
    assert is_heavy("own7")
    found = load_light("own7")
    assert issubclass(found.O, Options) and not hasattr(found, "M") and "M" in found.defined


def test_cpt_is_imported_without_torch_and_has_its_public_names():
    program = "import sys, cpt; from cpt import Options, number; print('torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"
    assert {name for name in cpt.PUBLIC if not hasattr(cpt, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cpt.nothing
