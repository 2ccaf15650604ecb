"""A choice has one label, in a single run and in a job of a sweep."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cpt.core.naming import describe_variant, name_run, quote, quote_list

VALUES = (
    "replay.sources={chat: {path: ${domains.root}-chats.jsonl, ratio: 0.1}}",
    "domains.only=[cs.AI, 'math.CO']",
    "trainable='layers\\.(0|1)\\.'",
    "optim.lr_multipliers={embeddings: 0.1, head: 0.1}",
)


def rewrite_as_sweeps_do(override):
    """Hydra's sweepers write a value anew from what they have read."""
    parsed = OverridesParser.create().parse_override(override)
    return f"{parsed.get_key_element()}={parsed.get_value_element_as_str()}"


@pytest.mark.parametrize("override", VALUES, ids=["mapping", "list", "text", "multipliers"])
def test_a_choice_has_one_label_and_one_folder_however_it_is_written(override):
    rewritten = rewrite_as_sweeps_do(override)
    assert describe_variant([override]) == describe_variant([rewritten])
    assert name_run([override], "ncl", 0, 0) == name_run([rewritten], "ncl", 0, 0)


def test_an_interpolation_is_shown_as_it_is_typed():
    assert describe_variant([VALUES[0]]) == (
        "replay.sources={chat:{path:${domains.root}-chats.jsonl,ratio:0.1}}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "law",
        "3.10",
        "1_000",
        "true",
        "null",
        "nan",
        "a,b",
        "a[b]",
        "a b",
        "it's",
        "é",
        "~/x",
        "x=y",
        "a(b)",
        "",
    ]
    + ["a\\", "a\\\\", "a\\'b", "a\\\n", "'", "{a: b}", "a#b", "日本"],
)
def test_a_quoted_text_is_read_as_it_is(text):
    parser = OverridesParser.create()
    assert parser.parse_override(f"key={quote(text)}").value() == text
    assert parser.parse_override(f"key={quote_list([text, 'b'])}").value() == [text, "b"]


def test_a_quoted_text_is_no_interpolation():
    value = OverridesParser.create().parse_override(f"key={quote('run ${x}')}").value()
    assert OmegaConf.create({"key": value}).key == "run ${x}"
