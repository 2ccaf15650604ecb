"""The examples in the docstrings of methods and their adapters."""

import doctest

import pytest

from cpt.adapters import domain_store
from cpt.methods import ewc, kd, merge, options, reservoir


@pytest.mark.parametrize("module", [domain_store, ewc, kd, merge, options, reservoir])
def test_the_examples_of_a_module_hold(module):
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0
