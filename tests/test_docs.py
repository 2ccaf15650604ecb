"""What the documents name is there."""

import re

import pytest
from conftest import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tests_and_files_that_are_named_exist(path):
    named = re.findall(r"`([^`\n]+)`", path.read_text())
    tests = {name for name in named if re.fullmatch(r"test_\w+", name)}
    assert {name for name in tests if f"def {name}(" not in TESTS} == set()
    files = {name for name in named if re.fullmatch(r"(cpt|conf|tests|benchmarks|docs)/[\w/.]+", name)}
    written_by_the_reader = {"cpt/methods/l1.py", "conf/method/l1.yaml"}
    assert {name for name in files - written_by_the_reader if not (ROOT / name).exists()} == set()


def test_every_method_stands_in_the_readme_and_in_the_fidelity_page():
    readme, fidelity = (path.read_text() for path in (ROOT / "README.md", ROOT / "docs" / "fidelity.md"))
    methods = {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")}
    assert {name for name in methods if f"| `{name}` |" not in readme} == set()
    told = fidelity.lower().replace("-", "_").replace("++", "pp")
    assert {name for name in methods - {"ncl", "one", "joint", "none"} if name not in told} == set()
