"""The two errors with a form: their message, and that class and attributes outlive pickling and prefixes."""

import ast
import doctest
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from cpt.core import exceptions
from cpt.core.exceptions import DamagedFileError, InvalidOptionError
from cpt.core.schema import prefix_errors
from cpt.trainer.lightning import naming_cause


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(exceptions).failed == 0


def test_a_pickled_error_keeps_class_message_and_key():
    error = InvalidOptionError(
        "model.num_hidden_layers", 4, reason="new", allowed="null", context="with cuda"
    )
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is InvalidOptionError
    assert str(copied) == str(error)
    assert copied.key == "model.num_hidden_layers" and copied.allowed == "null"


def test_an_error_with_a_value_that_cannot_be_pickled_is_sent_with_its_text():
    error = InvalidOptionError("optim", lambda: None, allowed="a class")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_prefix_names_the_section_in_message_and_key():
    with pytest.raises(InvalidOptionError) as raised, prefix_errors("trainer"):
        raise InvalidOptionError("steps", 0, allowed="1 or more")
    assert str(raised.value) == "trainer.steps=0 is invalid. Allowed: 1 or more"
    assert raised.value.key == "trainer.steps"


def test_a_damaged_file_stays_one_within_a_prefix_and_a_named_cause():
    with pytest.raises(DamagedFileError) as raised, prefix_errors("model"):
        raise DamagedFileError("base.pt", reason="no zip file", remedy="delete it")
    assert str(raised.value) == "model.base.pt is damaged (no zip file); delete it"
    line = "^model is invalid: base.pt is damaged; delete it$"
    with pytest.raises(DamagedFileError, match=line) as raised, naming_cause("model"):
        raise DamagedFileError("base.pt", remedy="delete it")
    assert raised.value.path == "base.pt"


def read_syntax_trees() -> list[ast.Module]:
    paths = Path(exceptions.__file__).parents[1].rglob("*.py")
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


def list_declared_values(trees: Sequence[ast.Module]) -> dict[str, set[str]]:
    """The texts that options may be, by the name of the option: those of each `Literal` in its type."""
    values: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                values[node.target.id].update(re.findall(r"'(\w+)'", ast.unparse(node.annotation)))
    return values


def test_a_message_allows_values_that_the_option_has():
    trees = read_syntax_trees()
    declared = list_declared_values(trees)
    num_checked = 0
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "InvalidOptionError":
                continue
            allowed = {keyword.arg: keyword.value for keyword in node.keywords}["allowed"]
            if not isinstance(node.args[0], ast.Constant) or not isinstance(allowed, ast.Constant):
                continue
            option = node.args[0].value.rpartition(".")[2]
            if option in declared and re.fullmatch("[a-z_]+", str(allowed.value)):
                num_checked += 1
                assert allowed.value in {"null", "true", "false", "fewer", *declared[option]}, ast.unparse(
                    node
                )
    assert num_checked > 10
