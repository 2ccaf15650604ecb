"""Lists and counts in messages."""

import doctest

from cpt.core import messages


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(messages).failed == 0


def test_a_missing_folder_has_its_most_similar_neighbour(tmp_path):
    for name in ("my_corpora", "outputs"):
        (tmp_path / name).mkdir()
    assert messages.find_similar_path(tmp_path / "my_corpra") == str(tmp_path / "my_corpora")
    assert messages.find_similar_path(tmp_path / "models") == ""
    assert messages.find_similar_path(tmp_path / "no" / "my_corpora") == ""
