"""A method's module and its data, by a line."""

import pytest

from tests.support.method_fixtures import ORDER, build_method_fixture


@pytest.fixture
def build(small, small_gpt2, small_t5):
    """A method over two domains with overrides, on a masked or causal model or one of both stacks."""
    families = {"masked": small, "causal": small_gpt2, "both": small_t5}
    return lambda method, *overrides, on="masked": build_method_fixture(
        families[on](f"method={method}", ORDER, *overrides)
    )
