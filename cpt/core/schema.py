"""Whether what was read from a file has the types that are declared for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

LARGEST = 10**300  # of whole numbers: a larger one is no float
# The first place within a value that is not as declared, in words, from the value and what it is called.
Misfit = Callable[[Any, str], str | None]


def check_types(values: Mapping[str, Any], declared: Mapping[str, Any], *, of: str = "") -> None:
    """Raises ValueError, which names the place, for a value that is missing or not of its declared type: a
    scalar, Any, a union, or list and dict (with strings for keys) of such. A whole number may stand for a
    float."""
    for name, kind in declared.items():
        place = f"{of}.{name}" if of else name
        if name not in values:
            raise ValueError(f"{place} is missing, needed is {_called(kind)}")
        if found := misfit(kind)(values[name], place):
            raise ValueError(found)


@cache
def misfit(declared: Any) -> Misfit:
    """What finds the first misfit to a declared type."""
    kind, inner = get_origin(declared), get_args(declared)
    if kind is list:
        return _in_list(declared, misfit(inner[0]), plain=_fitting_types(inner[0]))
    if kind is dict:
        return _in_dict(declared, misfit(inner[1]), plain=_fitting_types(inner[1]))
    if kind in (Union, UnionType):
        ones = [misfit(each) for each in inner]
        return lambda value, at: _said(all(one(value, at) for one in ones), value, declared, at)
    return lambda value, at: _said(not _is(value, declared), value, declared, at)


def _in_list(declared: Any, inner: Misfit, *, plain: Set[type]) -> Misfit:
    def look(value: Any, at: str) -> str | None:
        if not isinstance(value, list):
            return _said(True, value, declared, at)
        if set(map(type, value)) <= plain:
            return None
        return _first(inner(each, f"{at}[{place}]") for place, each in enumerate(value))

    return look


def _in_dict(declared: Any, inner: Misfit, *, plain: Set[type]) -> Misfit:
    def look(value: Any, at: str) -> str | None:
        if not isinstance(value, dict):
            return _said(True, value, declared, at)
        if set(map(type, value.values())) <= plain:
            return None
        return _first(inner(each, f"{at}.{name}") for name, each in value.items())

    return look


def _fitting_types(declared: Any) -> Set[type]:
    """The types by which alone values are known to fit, without a look at each: a matrix has many."""
    kinds = get_args(declared) if get_origin(declared) in (Union, UnionType) else [declared]
    return {float, str, NoneType}.intersection(kinds)


def _first(found: Iterator[str | None]) -> str | None:
    return next(filter(None, found), None)


def _is(value: Any, declared: type) -> bool:
    if declared is Any:
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return declared in (int, float) and abs(value) < LARGEST
    return isinstance(value, declared)


def _said(wrong: bool, value: Any, declared: Any, at: str) -> str | None:
    return f"{at} is {_short(value)}, needed is {_called(declared)}" if wrong else None


def _called(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) and not get_args(declared) else str(declared)


def _short(value: Any) -> str:
    shown = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
