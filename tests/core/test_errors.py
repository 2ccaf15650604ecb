"""Messages for arguments that Hydra cannot parse, and for options of other choices."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from cpt.core.errors import choices_with, explain

HINT = ". Allowed: key=value, with the value in quotes: "


def explain_override(override):
    with pytest.raises(OverrideParseException) as error:
        OverridesParser.create().parse_overrides([override])
    return explain(error.value)


@pytest.mark.parametrize(
    "value", ["<|x|>", "</s>", "a&b", "#1", "a=b", "it's", 'say "so"', "über<", r"C:\\<x>"]
)
def test_a_value_that_needs_quotes_is_shown_in_them(value):
    message = explain_override(f"domains.separator={value}")
    problem, hint, argument = message.partition(HINT)
    assert hint and problem.startswith(f"domains.separator={value} is invalid: ")
    assert "Exception" not in message
    (typed,) = shlex.split(argument)
    (override,) = OverridesParser.create().parse_overrides([typed])
    assert override.value() == value


def test_the_hint_is_only_for_values_that_quotes_mend():
    assert explain_override("name=[a").endswith(". Allowed: key=value")
    assert explain_override("a b=c").endswith(". Allowed: key=value")
    assert explain_override("domains.only=[<a>,b]").endswith("in quotes within the list or the keys")
    (typed,) = shlex.split(explain_override("domains.separator='<x>").partition(HINT)[2])
    assert typed == 'domains.separator="<x>"'


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("method.buffer_size", ["agem", "derpp"]),
        ("method.reduction_factor", ["adapter", "demix", "hat"]),  # of a file in their defaults
        ("method.stored", ["inclora", "nlora", "olora"]),
        ("method.embeddings", ["inclora", "lora", "merge_lora", "nlora", "olora"]),  # of its own defaults
        ("method.nothing", []),
    ],
)
def test_an_option_of_other_choices_is_found_in_all_of_their_files(key, choices):
    assert choices_with(key, "method") == choices
