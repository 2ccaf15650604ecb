"""The two errors with a form: their message, and that class and attributes outlive pickling and prefixes."""

import doctest
import pickle

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
