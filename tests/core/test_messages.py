"""Lists and counts in messages."""

import doctest
import logging

import pytest

from cpt.core import messages


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(messages).failed == 0


def test_each_run_of_a_process_logs_its_own_lines(small, start, tmp_path, caplog):
    caplog.set_level("INFO", logger="cpt")
    for _ in range(2):
        with pytest.raises(ValueError, match="order"):
            start(small("order=9"), tmp_path / "run")
        for _ in range(2):
            messages.log_once(logging.getLogger("cpt.models"), "Resizing the embedding")
    assert caplog.messages.count("Resizing the embedding") == 2


def test_a_missing_folder_has_its_most_similar_neighbour(tmp_path):
    for name in ("my_corpora", "outputs"):
        (tmp_path / name).mkdir()
    assert messages.find_similar_path(tmp_path / "my_corpra") == str(tmp_path / "my_corpora")
    assert messages.find_similar_path(tmp_path / "models") == ""
    assert messages.find_similar_path(tmp_path / "no" / "my_corpora") == ""
