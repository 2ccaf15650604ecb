"""Whether what was read from a file has the types that are declared for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

LARGEST = 10**300  # of whole numbers: a larger one is no float
SCALARS = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    NoneType: (NoneType,),
    Any: (object,),
}


def check(values: Mapping[str, Any], declared: Mapping[str, Any], *, of: str = "") -> None:
    """Raises ValueError, which names the place, for a value that is missing or not of its declared type: a
    scalar, Any, a union, or list and dict (with strings for keys) of such. A whole number may stand for a
    float."""
    for name, kind in declared.items():
        place = f"{of}.{name}" if of else name
        if name not in values:
            raise ValueError(f"{place} is missing, needed is {_called(kind)}")
        if found := misfit(values[name], kind, at=place):
            raise ValueError(found)


def misfit(value: Any, declared: Any, *, at: str) -> str | None:
    """The first place within a value that is not as declared, in words; None if there is none."""
    kind, inner = get_origin(declared), get_args(declared)
    if kind in (Union, UnionType):
        fits = any(misfit(value, each, at=at) is None for each in inner)
    elif kind is list and isinstance(value, list):
        return _first_misfit(enumerate(value), inner[0], around=(f"{at}[", "]"))
    elif kind is dict and isinstance(value, dict):
        return _first_misfit(value.items(), inner[1], around=(f"{at}.", ""))
    else:
        fits = kind is None and _is(value, declared)
    return None if fits else f"{at} is {_short(value)}, needed is {_called(declared)}"


def _first_misfit(values: Iterable[tuple], declared: Any, *, around: tuple[str, str]) -> str | None:
    """Of values by place; where all are floats, say, without a look at each: a matrix has many."""
    values = list(values)
    scalars = get_args(declared) if get_origin(declared) in (Union, UnionType) else [declared]
    if {type(each) for _, each in values} <= {float, str, NoneType}.intersection(scalars):
        return None
    begin, end = around
    found = (misfit(each, declared, at=f"{begin}{place}{end}") for place, each in values)
    return next(filter(None, found), None)


def _is(value: Any, declared: type) -> bool:
    if isinstance(value, bool) and declared in (int, float):
        return False
    fits = isinstance(value, SCALARS[declared])
    return fits and not (isinstance(value, int) and abs(value) >= LARGEST)


def _called(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) and not get_args(declared) else str(declared)


def _short(value: Any) -> str:
    shown = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
