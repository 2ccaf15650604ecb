"""Lists and counts in messages."""

import doctest

from cpt.core import messages


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(messages).failed == 0
