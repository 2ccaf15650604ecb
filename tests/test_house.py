"""The house: the map is whole, the hooks that are drawn are there. `lint-imports` checks the imports."""

import ast
import re

from cpt.gradient_masks.base import Constraint, GradientMask
from cpt.methods.base import ContinualMethod
from tests.conftest import ROOT
from tests.support.campaign import RESTING

CPT, MAP = ROOT / "cpt", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(after: str) -> str:
    return MAP.split(f"\n## {after}\n", 1)[1].split("\n```\n")[1]


def test_what_rests_until_the_campaign_and_every_wing_of_the_map_is_there():
    there = {
        (path.name, name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(RESTING) - there == set()
    wings = {f"{path.name}/" for path in CPT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert wings == set(re.findall(r"^  (\w+/) +\w", block("The map"), re.MULTILINE))


def test_the_hooks_that_are_drawn_are_there_and_none_is_missing():
    drawn = set(re.findall(r"(?<![\w.])([a-z_]+)\(", block("The loop")))
    table = set(re.findall(r"`([a-z_]+)\([\w, ]*\)`", MAP.split("\n## Adding a method\n")[0]))
    overridden = {
        each.name
        for path in (CPT / "methods").glob("*.py")
        if path.name != "base.py"
        for kind in ast.parse(path.read_text()).body
        if isinstance(kind, ast.ClassDef)
        for each in kind.body
        if isinstance(each, ast.FunctionDef)
        and each.name in vars(ContinualMethod)
        and each.name not in vars(Constraint)
    }
    assert {name for name in (drawn | table) - {"method"} if not hasattr(ContinualMethod, name)} == set()
    assert {name for name in overridden - table if not name.startswith("_")} == set()
    of_masks = set(re.findall(r"mask\.(\w+)\(", block("The loop")))
    assert of_masks and {name for name in of_masks if not hasattr(GradientMask, name)} == set()
