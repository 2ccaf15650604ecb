"""Options: what a type allows is what is said of it."""

import math
from functools import partial
from typing import Literal

import pytest

from cpt.core import schema
from cpt.core.exceptions import format_value
from cpt.core.schema import Options, check_value, config, describe_allowed, fits, option, wrong_value_error
from cpt.core.sections import find_class_options, load_target
from cpt.trainer.options import Precision

KINDS = [
    (schema.NonNegative, [0, 1.5, 3], [-1, True, math.inf, math.nan, "1", None], "0 or more"),
    (schema.PositiveShare | None, [1, 0.1, None], [0, 1.1], "null or above 0, at most 1"),
    (schema.Count, [1, 2**63 - 1], [0, 1.0, True, 2**63], "a whole number, 1 or more"),
    (Literal["auto"] | schema.Count, ["auto", 2], ["all", 0, True], "auto or a whole number, 1 or more"),
    (schema.Pattern, ["a.*"], ["(", 5], "a regular expression"),
    (schema.OneOrMore[Literal["a"]], [["a"], ("a",)], [[], ["a", "a"], "a", ["c"]], "one or more of a"),
    (schema.Subset[Literal["a"]], [[], ["a"]], [None, ["b"]], "some of a, or []"),
    (schema.PerDomain[schema.Natural], [0, [1, 2]], [-1, [], [1.5]], "a whole number, 0 or more; or a list"),
]


@pytest.mark.parametrize(("kind", "good", "bad", "words"), KINDS)
def test_a_type_says_what_it_allows(kind, good, bad, words):
    assert describe_allowed(kind).startswith(words)
    assert all(fits(value, kind) for value in good)
    for value in bad:
        with pytest.raises(ValueError) as raised:
            check_value("k", value, kind)
        assert str(raised.value).startswith(f"k={format_value(value)} is invalid. Allowed: {words}")


@pytest.mark.parametrize(
    ("key", "value", "kind", "meant"),
    [
        ("trainer.precision", "fp16", Precision, "16-mixed"),
        ("trainer.precision", "BF16-mixd", Precision, "bf16-mixed"),
        ("trainer.precision", "int8", Precision, ""),
        ("k", "Fats", Literal["fast", "full"] | None, "fast"),
        ("k", 16, Literal["16"], ""),
    ],
)
def test_values_with_a_similar_spelling_or_a_foreign_name_are_suggested(key, value, kind, meant):
    message = str(wrong_value_error(key, value, kind))
    if meant:
        assert message.startswith(f"{key}={value} is invalid. Did you mean {meant}? Allowed: ")
    else:
        assert message.startswith(f"{key}={value} is invalid. Allowed: ")


@config
class Inner(Options):
    decay: schema.Probability = option("of the prior")


@config
class Outer(Options):
    strength: schema.NonNegative = option("lambda")
    inner: Inner | None = option("of its own", default=None)

    def __post_init__(self) -> None:
        if self.strength == 7:
            raise ValueError("strength=7 does not go with itself")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": 7}, "m.strength=7 does not go with itself"),
        ({"strenght": 1}, "m.strenght is invalid: unknown option. Did you mean m.strength? Allowed: m.s"),
        ({}, "m.strength is missing"),
        ({"strength": 1, "inner": {"decay": 2}}, "m.inner.decay=2 is invalid. Allowed: 0 to 1"),
        ({"strength": 1, "inner": 2}, "m.inner=2 is invalid. Allowed: null or keys with values"),
    ],
)
def test_options_are_read_and_frozen_or_refused_in_one_line(options, message):
    with pytest.raises(ValueError) as raised:
        schema.read_options(Outer, options, section="m")
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)

    outer = schema.read_options(Outer, {"strength": 1, "inner": {"decay": 0.5}}, section="")
    assert outer == Outer(strength=1, inner=Inner(decay=0.5)) and type(outer.strength) is int
    with pytest.raises(AttributeError):
        outer.strength = 3


MODULES = {  # by name, with its source and what is said of its import
    "lacking": ("import absent", "No module named 'absent'"),
    "refusing": ("raise ValueError('no such table')", "no such table"),
    "failing": ("{}['rate']", "KeyError while it is imported: 'rate'"),
    "unfinished": ("def f(:", "SyntaxError while it is imported: invalid syntax"),
    "exiting": ("import sys; sys.exit(0)", "SystemExit while it is imported: 0"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("load", [load_target, partial(find_class_options, section="method")])
def test_a_module_that_cannot_be_imported_is_reported_with_the_cause(load, name, tmp_path, monkeypatch):
    source, reason = MODULES[name]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"_target_={name}\.Mine is invalid: {reason}"):
        load(f"{name}.Mine")


def test_a_module_that_raises_is_imported_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "noisy.py").write_text("print('importing')\nassert False")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="AssertionError while it is imported"):
        load_target("noisy.Mine")
    assert capsys.readouterr().out == "importing\n"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("json.Mine", "module 'json' has no"),
        ("nowhere", "No module named 'nowhere'"),
        ("json.tool", "a module"),
    ],
)
def test_a_target_that_is_no_class_is_reported_with_the_cause(target, reason):
    with pytest.raises(ValueError, match=f"_target_={target} is invalid: {reason}"):
        load_target(target)
