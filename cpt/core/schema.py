"""Typed options: pydantic dataclasses whose fields say what they may be, with errors of one line.
Nothing here needs torch or Hydra: cpt.core.sections reads them from a config."""

import difflib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import pydantic
from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate
from pydantic import AfterValidator, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from cpt.core.exceptions import InvalidOptionError, MessageError, format_value

T = TypeVar("T")
Read = TypeVar("Read", bound="Options")
declared_types = functools.cache(functools.partial(get_type_hints, include_extras=True))
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
MOST = 24  # names that a message lists
INTERNAL = ("name", "_target_", "_partial_", "_convert_", "_recursive_")  # of a section, and no options
KEYS = {"missing": "missing", "extra": "unknown"}  # by pydantic's word
MAPPING = "keys with values, {key: value}"


@dataclass(frozen=True)
class Allowed:
    """In `Annotated[...]`: what an error says that the type allows."""

    allowed: str


def is_pattern(value: Any) -> bool:
    try:
        return re.compile(value) is not None
    except (re.error, TypeError):
        return False


Number = int | float
NonNegative = Annotated[Number, Ge(0)]
Positive = Annotated[Number, Gt(0)]
Probability = Annotated[Number, Ge(0), Le(1)]
BelowOne = Annotated[Number, Ge(0), Lt(1)]
PositiveShare = Annotated[Number, Gt(0), Le(1)]
OpenShare = Annotated[Number, Gt(0), Lt(1)]
Int = Annotated[int, Lt(2**63)]
Natural = Annotated[Int, Ge(0)]
Count = Annotated[Int, Ge(1)]
Steps = Annotated[  # also 1e3
    Count, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
]
Text = Annotated[str, Predicate(str.strip)]
Folder = Annotated[Text, AfterValidator(os.path.expanduser), Allowed("a folder")]
TextList = Annotated[tuple[Text, ...], Allowed("a list of texts")]
Pattern = Annotated[str, Predicate(is_pattern), Allowed("a regular expression")]
Subset = Annotated[tuple[T, ...], Predicate(lambda values: len(set(values)) == len(values))]
OneOrMore = Annotated[Subset[T], MinLen(1)]
PerDomain = Annotated[T | tuple[T, ...], Predicate(lambda value: value != ())]  # the last: all further ones


def allowed(kind: Any) -> str:
    """What a type allows, in words; nothing for Any."""
    base, *limits = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    bound = {type(limit): getattr(limit, type(limit).__name__.lower(), None) for limit in limits}
    origin, inner = get_origin(base), get_args(base)
    if Allowed in bound:
        return str(bound[Allowed])
    if origin is Literal:
        return ", ".join(dict.fromkeys(map(str, inner)))
    if origin is tuple:
        each = allowed(inner[0])
        if get_origin(inner[0]) is not Literal:
            return f"a list, each {each}"
        return f"one or more of {each}" if MinLen in bound else f"some of {each}, or []"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        lists = "keys with lists of texts, {key: [text]}"
        return {str: "keys with texts, {key: text}", Sequence[str]: lists}.get(inner[1], MAPPING)
    if base is int:
        return f"a whole number, {bound[Ge]} or more"
    if base == Number and Ge in bound and Le in bound:
        return f"{bound[Ge]:g} to {bound[Le]:g}"
    if base == Number:
        low = f"{bound[Ge]:g} or more" if Ge in bound else f"above {bound[Gt]:g}"
        if Le in bound:
            return f"{low}, at most {bound[Le]:g}"
        return f"{low} and below {bound[Lt]:g}" if Lt in bound else low
    if inner:
        words = ["null"] * (NoneType in inner) + [allowed(each) for each in inner if each is not NoneType]
        return ("; or " if words[-1].startswith("a list, each") else " or ").join(words)
    return {bool: "true, false", str: "a text"}.get(base, MAPPING if is_dataclass(base) else "")


def option(help: str, *, default: Any = MISSING) -> Any:
    """A field of Options and what it means; its type says what it may be."""
    return field(default=default, metadata={"help": help})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def config(kind: type[T]) -> type[T]:
    """A frozen pydantic dataclass that raises ValueError, `name=value is invalid. Allowed: …`."""
    made: Any = pydantic.dataclasses.dataclass(kind, frozen=True, kw_only=True, config=STRICT)
    validate = made.__init__

    def init(self: Any, **given: Any) -> None:
        types = option_types(made)
        values = {name: with_python_types(each, types.get(name), place=name) for name, each in given.items()}
        try:
            validate(self, **values)
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:  # of __post_init__
                raise ValueError(str(first["ctx"]["error"])) from error
            name = str(first["loc"][0])
            if name in types and name in values:
                raise ValueError(wrong(name, given[name], types[name])) from error
            why = "is invalid: unknown option" if name in given else "is missing"
            raise ValueError(f"{name} {why}. Allowed: {', '.join(types)}") from error

    made.__init__ = init
    return made


@config
class Options:
    """The options of a choice of a config group; its defaults are in conf/."""

    def __post_init__(self) -> None:
        """Raises ValueError for options that do not go together."""


def option_types(kind: type) -> dict[str, Any]:
    """The declared type of each option."""
    types = declared_types(kind)
    return {each.name: types[each.name] for each in fields(kind)}


def with_python_types(value: Any, kind: Any, *, place: str) -> Any:
    """A list as a tuple; keys with values as the Options that are declared there."""
    for each in (kind, *get_args(kind)):
        if isinstance(value, Mapping) and isinstance(each, type) and issubclass(each, Options):
            return read_options(each, value, place=place)
    return tuple(value) if isinstance(value, list) else value


def wrong(key: str, value: Any, kind: Any) -> str:
    too_large = isinstance(value, int | float) and value >= 2**63
    return f"{key}={format_value(value)} is invalid. Allowed: {allowed(kind)}{', below 2^63' * too_large}"


@functools.cache
def validator(kind: Any, *, finite: bool = True) -> Callable[[Any], Any]:
    own = None if is_dataclass(kind) else STRICT if finite else ConfigDict(strict=True)
    return TypeAdapter(kind, config=own).validate_python


def fits(value: Any, kind: Any) -> bool:
    """Whether a type allows a value."""
    try:
        validator(kind)(with_python_types(value, kind, place=""))
    except ValueError:
        return False
    return True


def check_value(key: str, value: Any, kind: Any) -> None:
    """Raises ValueError, `key=value is invalid. Allowed: …`, for a value that a type does not allow."""
    if not fits(with_python_types(value, kind, place=key), kind):
        raise ValueError(wrong(key, value, kind))


def check_types(values: Mapping[str, Any], declared: Mapping[str, Any], *, of: str = "") -> None:
    """Raises ValueError for a value of a file that is missing or not of its declared type."""
    for name, kind in declared.items():
        if name not in values:
            raise ValueError(f"{join(of, name)} is missing, needed is {getattr(kind, '__name__', kind)}")
        try:
            validator(kind, finite=False)(values[name])
        except ValidationError as error:
            first = error.errors()[0]
            within = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
            place = "".join([join(of, name), *within])
            needed = first["type"].partition("_")[0]
            told = f"{first['input']!r:.40}, needed is {needed}"
            raise ValueError(f"{place} is {KEYS.get(needed, told)}") from error


def join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Begins the message of a ValueError with the section that it is about."""
    try:
        yield
    except InvalidOptionError as error:
        prefixed = error.with_message(join(place, str(error)))
        prefixed.key = join(place, error.key)
        raise prefixed from error
    except MessageError as error:
        raise error.with_message(join(place, str(error))) from error
    except ValueError as error:
        raise ValueError(join(place, str(error))) from error


def unknown_name(key: str, allowed: Iterable[str], *, whole: str | None = None) -> str:
    """The message for an option, or for a `group=choice`, that does not exist."""
    parts = {name: name.rpartition(".") for name in allowed}
    by_end = {end: name for name, (place, _, end) in parts.items() if not place or end not in INTERNAL}
    near = difflib.get_close_matches(re.split("[.=]", key)[-1], by_end, n=1, cutoff=0.6)
    listed = ", ".join([*list(by_end.values())[:MOST], *["…"][: len(by_end) > MOST]]) or "none"
    meant = f". Did you mean {by_end[near[0]]}?" if near else ""
    kind = "choice" if "=" in key else "option"
    return f"{key} is invalid: unknown {kind}. Allowed: {whole or listed}{meant}"


def check_names(given: Iterable[str], known: Iterable[str], *, place: str) -> None:
    """Raises ValueError for a name that is not known."""
    names = [join(place, name) for name in known]
    for name in given:
        if join(place, name) not in names:
            raise ValueError(unknown_name(join(place, name), names))


def read_options(kind: type[Read], given: Mapping[str, Any], *, place: str) -> Read:
    """Options from the values of a section. Raises ValueError for one that is unknown, missing or wrong."""
    check_names(given, option_types(kind), place=place)
    needed = [each.name for each in fields(kind) if each.default is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{join(place, missing[0])} is missing. Allowed: {join(place, missing[0])}=VALUE")
    with prefix_errors(place):
        return kind(**given)
