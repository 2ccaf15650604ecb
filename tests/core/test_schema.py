"""Options: what a type allows is what is said of it, at every option of every choice of conf/."""

import math
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen

from cpt.core import schema
from cpt.core.schema import Options, allowed, check_value, config, fits, option, option_types, show
from cpt.core.sections import GIVEN, load_target, read_section
from cpt.trainer.help import list_sections, options_at
from tests.conftest import ROOT

CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml") if path.stem != "none")
NEEDED = {
    ("benchmark", "lm_eval"): ["benchmark.tasks=[a]"],
    ("domains", "hub"): ["+domains.catalogue.news={path: ag_news}"],
    ("model", "hf"): ["model.name_or_path=a"],
    **{("domains", name): ["domains.root=."] for name in ("texts", "das6", "m2d2", "instructions")},
}


def wrong_values(kind: Any) -> Iterator[Any]:
    """Values that a type does not allow: null, next to each bound, of other types; none for a predicate."""
    base, *limits = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    inner = get_args(base)
    if NoneType in inner and len(inner) == 2:
        yield from (value for value in wrong_values(inner[0]) if value is not None)
        return
    union = get_origin(base) in (Union, UnionType) and base != schema.Number
    if union or base in (bool, int, schema.Number, str) or get_origin(base) in (Literal, tuple):
        yield from ([[1.5]], {"no": "such"}, *[None] * (NoneType not in inner))
    if base in (int, schema.Number):
        yield from (True, "abc", math.nan, *[1.5] * (base is int))
        for limit in limits:
            match limit:
                case Ge(ge=least):
                    yield least - 1
                case Gt(gt=value) | Lt(lt=value):
                    yield value
                case Le(le=most):
                    yield most + 1
    elif base is bool:
        yield from (1, "maybe")
    elif get_origin(base) is Literal:
        yield "no such choice"
    elif base is str:
        yield 5
    elif get_origin(base) is tuple:
        yield from (5, "abc", *[[]] * any(isinstance(limit, MinLen) for limit in limits))
    elif isinstance(get_origin(base), type) and issubclass(get_origin(base), Mapping):
        yield from (5, [1])


LARGE = {"method", "model", "domains", "endtask", "replay"}  # whose choices take a second
GROUPS = [
    pytest.param(group, marks=[pytest.mark.slow] * (group in LARGE))
    for group in sorted({of for of, _ in CHOICES} - {"experiment", "strategy", "hydra"})
]


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_type_does_not_allow_is_told_at_every_option(group, composed):
    seen = set()
    for name in (name for of, name in CHOICES if of == group):
        place = ["method=adapter", f"routing@method.routing={name}"]
        chosen = place if group == "routing" else [f"{group}={name}"]
        cfg = composed(*chosen, *NEEDED.get((group, name), []))
        for place in list_sections(cfg):
            section = read_section(cfg, place, "")
            for kind in options_at(cfg, place):
                for key, declared in option_types(kind).items():
                    if (place, kind, key) in seen or key not in section.values or key in GIVEN:
                        continue
                    seen.add((place, kind, key))
                    for value in wrong_values(declared):
                        at = schema.join(place, key)
                        with pytest.raises(ValueError) as raised:
                            check_value(at, value, declared)
                        told = f"{at}={show(value)} is invalid. Allowed: {allowed(declared)}"
                        assert str(raised.value).startswith(told)


KINDS = [
    (schema.NonNegative, [0, 1.5, 3], [-1, True, math.inf, math.nan, "1", None], "0 or more"),
    (schema.PositiveShare | None, [1, 0.1, None], [0, 1.1], "null or above 0, at most 1"),
    (schema.Count, [1, 2**63 - 1], [0, 1.0, True, 2**63], "a whole number, 1 or more"),
    (schema.Steps, [1, 1e3], [0, 1.5, True, 1e30], "a whole number, 1 or more"),
    (Literal["auto"] | schema.Count, ["auto", 2], ["all", 0, True], "auto or a whole number, 1 or more"),
    (schema.Text, ["a"], ["", " ", 5], "a text"),
    (schema.Pattern, ["a.*"], ["(", 5], "a regular expression"),
    (schema.OneOrMore[Literal["a"]], [["a"], ("a",)], [[], ["a", "a"], "a", ["c"]], "one or more of a"),
    (schema.Subset[Literal["a"]], [[], ["a"]], [None, ["b"]], "some of a, or []"),
    (schema.PerDomain[schema.Natural], [0, [1, 2]], [-1, [], [1.5]], "a whole number, 0 or more; or a list"),
]


@pytest.mark.parametrize(("kind", "good", "bad", "words"), KINDS)
def test_a_type_says_what_it_allows(kind, good, bad, words):
    assert allowed(kind).startswith(words)
    assert all(fits(value, kind) for value in good)
    for value in bad:
        with pytest.raises(ValueError) as raised:
            check_value("k", value, kind)
        assert str(raised.value).startswith(f"k={show(value)} is invalid. Allowed: {words}")


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
    ("given", "told"),
    [
        ({"strength": 7}, "m.strength=7 does not go with itself"),
        ({"strenght": 1}, "m.strenght is invalid: unknown option. Allowed: m.strength, m.inner. Did you"),
        ({}, "m.strength is missing"),
        ({"strength": 1, "inner": {"decay": 2}}, "m.inner.decay=2 is invalid. Allowed: 0 to 1"),
        ({"strength": 1, "inner": {"deca": 2}}, "m.inner.deca is invalid: unknown option. Allowed: inner.d"),
        ({"strength": 1, "inner": 2}, "m.inner=2 is invalid. Allowed: null or keys with values"),
    ],
)
def test_options_are_read_and_frozen_or_refused_in_one_line(given, told):
    with pytest.raises(ValueError) as raised:
        schema.read_options(Outer, given, place="m")
    assert str(raised.value).startswith(told) and "\n" not in str(raised.value)
    made = schema.read_options(Outer, {"strength": 1, "inner": {"decay": 0.5}}, place="")
    assert made == Outer(strength=1, inner=Inner(decay=0.5)) and type(made.strength) is int
    with pytest.raises(AttributeError):
        made.strength = 3


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("mine.Mine", "No module named 'absent'"),
        ("nowhere.Mine", "No module named 'nowhere'"),
        ("json.Mine", "module 'json' has no attribute 'Mine'"),
    ],
)
def test_a_target_that_cannot_be_imported_is_told_with_the_cause(target, why, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"_target_={target} is invalid: {why}"):
        load_target(target)
