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

from cpt.core.exceptions import InvalidOptionError, MessageError
from cpt.core.foreign_names import find_value
from cpt.core.messages import abbreviate

T = TypeVar("T")
Read = TypeVar("Read", bound="Options")
declared_types = functools.cache(functools.partial(get_type_hints, include_extras=True))
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
MAX_LISTED = 24  # names in a message
MAX_LISTED_WITH_SUGGESTION = 6  # which is most likely what is meant
INTERNAL = ("name", "_target_", "_partial_", "_convert_", "_recursive_")  # of a section, and no options
PROBLEMS = {"missing": "missing", "extra": "unknown"}  # by the first word of pydantic's types of errors
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
FileOrFolder = Annotated[Text, AfterValidator(os.path.expanduser), Allowed("a file or folder")]
TextList = Annotated[tuple[Text, ...], Allowed("a list of texts")]
Pattern = Annotated[str, Predicate(is_pattern), Allowed("a regular expression")]
Subset = Annotated[tuple[T, ...], Predicate(lambda values: len(set(values)) == len(values))]
OneOrMore = Annotated[Subset[T], MinLen(1)]
PerDomain = Annotated[T | tuple[T, ...], Predicate(lambda value: value != ())]  # the last: all further ones


def describe_allowed(kind: Any) -> str:
    """What a type allows, in words; nothing for Any."""
    base = kind
    limits: list[Any] = []
    if get_origin(kind) is Annotated:
        base, *limits = get_args(kind)
    # The value of a limit is its attribute of the same name: Ge(0).ge is 0. Of one without such an
    # attribute, like MinLen, only whether it is there counts.
    bounds = {type(limit): getattr(limit, type(limit).__name__.lower(), None) for limit in limits}
    origin = get_origin(base)
    arguments = get_args(base)

    if Allowed in bounds:
        return str(bounds[Allowed])
    if origin is Literal:
        return ", ".join(dict.fromkeys(map(str, arguments)))
    if origin is tuple:
        return describe_allowed_list(arguments[0], is_required=MinLen in bounds)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return describe_allowed_mapping(arguments[1])
    if base is int:
        return f"a whole number, {bounds[Ge]} or more"
    if base == Number:
        return describe_allowed_number(bounds)
    if arguments:
        return describe_allowed_union(arguments)
    if is_dataclass(base):
        return MAPPING
    return {bool: "true, false", str: "a text"}.get(base, "")


def describe_allowed_list(item: Any, *, is_required: bool) -> str:
    choices = describe_allowed(item)
    if get_origin(item) is not Literal:
        return f"a list, each {choices}"
    return f"one or more of {choices}" if is_required else f"some of {choices}, or []"


def describe_allowed_mapping(values: Any) -> str:
    if values is str:
        return "keys with texts, {key: text}"
    if values == Sequence[str]:
        return "keys with lists of texts, {key: [text]}"
    return MAPPING


def describe_allowed_number(bounds: Mapping[type, Any]) -> str:
    if Ge in bounds and Le in bounds:
        return f"{bounds[Ge]:g} to {bounds[Le]:g}"
    low = f"{bounds[Ge]:g} or more" if Ge in bounds else f"above {bounds[Gt]:g}"
    if Le in bounds:
        return f"{low}, at most {bounds[Le]:g}"
    if Lt in bounds:
        return f"{low} and below {bounds[Lt]:g}"
    return low


def describe_allowed_union(kinds: Sequence[Any]) -> str:
    words = [describe_allowed(kind) for kind in kinds if kind is not NoneType]
    if NoneType in kinds:
        words.insert(0, "null")
    separator = "; or " if words[-1].startswith("a list, each") else " or "
    return separator.join(words)


def option(help: str, *, default: Any = MISSING) -> Any:
    """A field of Options and what it means; its type says what it may be."""
    return field(default=default, metadata={"help": help})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def config(kind: type[T]) -> type[T]:
    """A frozen pydantic dataclass that raises ValueError, `name=value is invalid. Allowed: …`."""
    dataclass_kind: Any = pydantic.dataclasses.dataclass(kind, frozen=True, kw_only=True, config=STRICT)
    validating_init = dataclass_kind.__init__

    def init(self: Any, **options: Any) -> None:
        # A config has lists and mappings, where the strict types are tuples and Options.
        types = list_option_types(dataclass_kind)
        values = {}
        for name, value in options.items():
            values[name] = convert_to_python_types(value, types.get(name), section=name)
        try:
            validating_init(self, **values)
        except ValidationError as error:
            raise describe_error(error, options, types) from error

    dataclass_kind.__init__ = init
    return dataclass_kind


def describe_error(
    error: ValidationError, options: Mapping[str, Any], types: Mapping[str, Any]
) -> ValueError:
    """The error of one line for the first that pydantic has found among options."""
    first = error.errors()[0]
    if not first["loc"]:  # raised by __post_init__
        cause = first["ctx"]["error"]
        return cause.with_message(str(cause)) if isinstance(cause, MessageError) else ValueError(str(cause))

    name = str(first["loc"][0])
    if name in types and name in options:
        return wrong_value_error(name, options[name], types[name])
    problem = "is invalid: unknown option" if name in options else "is missing"
    return ValueError(f"{name} {problem}. Allowed: {', '.join(types)}")


@config
class Options:
    """The options of a choice of a config group; its defaults are in conf/."""

    def __post_init__(self) -> None:
        """Raises ValueError for options that do not go together."""


def list_option_types(kind: type) -> dict[str, Any]:
    """The declared type of each option."""
    types = declared_types(kind)
    return {option.name: types[option.name] for option in fields(kind)}


def convert_to_python_types(value: Any, kind: Any, *, section: str) -> Any:
    """A list as a tuple; keys with values as the Options that are declared there."""
    if isinstance(value, Mapping):
        for declared in (kind, *get_args(kind)):
            if isinstance(declared, type) and issubclass(declared, Options):
                return read_options(declared, value, section=section)
    if isinstance(value, list):
        return tuple(value)
    return value


def wrong_value_error(key: str, value: Any, kind: Any) -> InvalidOptionError:
    """The error for a value that a type does not allow, with the value that may be meant."""
    is_too_large = isinstance(value, int | float) and value >= 2**63
    limit = ", below 2^63" if is_too_large else ""
    return InvalidOptionError(
        key, value, meant=suggest_value(key, value, kind), allowed=f"{describe_allowed(kind)}{limit}"
    )


def suggest_value(key: str, value: Any, kind: Any) -> str:
    """The allowed value of a type for which a text may have been meant; else empty."""
    values = [str(choice) for choice in list_literals(kind)]
    if not isinstance(value, str) or value in values:
        return ""
    foreign_value = find_value(key.rpartition(".")[2], value)
    if foreign_value in values:
        return foreign_value
    similar = difflib.get_close_matches(value.lower(), values, n=1, cutoff=0.6)
    return similar[0] if similar else ""


def list_literals(kind: Any) -> Iterator[Any]:
    """The values that a type names, wherever they are in it."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
        return
    for part in get_args(kind):
        yield from list_literals(part)


@functools.cache
def make_validator(kind: Any, *, finite: bool = True) -> Callable[[Any], Any]:
    """A function that raises ValidationError for a value that the type does not allow; with `finite` also for
    NaN and infinities."""
    if is_dataclass(kind):
        adapter = TypeAdapter(kind)  # pydantic takes the dataclass's own config
    else:
        adapter = TypeAdapter(kind, config=STRICT if finite else ConfigDict(strict=True))
    return adapter.validate_python


def fits(value: Any, kind: Any) -> bool:
    """Whether a type allows a value."""
    try:
        make_validator(kind)(convert_to_python_types(value, kind, section=""))
    except ValueError:
        return False
    return True


def check_value(key: str, value: Any, kind: Any) -> None:
    """Raises ValueError, `key=value is invalid. Allowed: …`, for a value that a type does not allow."""
    if not fits(convert_to_python_types(value, kind, section=key), kind):
        raise wrong_value_error(key, value, kind)


def check_types(values: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    """Raises ValueError for a value of a file that is missing or not of its declared type."""
    for name, kind in declared.items():
        if name not in values:
            raise ValueError(f"{name} is missing, needed is {getattr(kind, '__name__', kind)}")
        try:
            make_validator(kind, finite=False)(values[name])
        except ValidationError as error:
            raise ValueError(describe_wrong_type(error, name)) from error


def describe_wrong_type(error: ValidationError, key: str) -> str:
    """The message for the first wrong value that pydantic has found below a key."""
    first = error.errors()[0]
    path = key
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"

    # pydantic's type of an error is `missing`, `extra_forbidden`, or the type that a value had to be.
    expected = first["type"].partition("_")[0]
    if expected in PROBLEMS:
        return f"{path} is {PROBLEMS[expected]}"
    return f"{path} is {first['input']!r:.40}, needed is {expected}"


def join(section: str, name: str) -> str:
    """The key of a name in a section, which is empty at the top of a config."""
    return f"{section}.{name}" if section else name


@contextmanager
def prefix_errors(section: str) -> Iterator[None]:
    """Begins the message of a ValueError with the section that it is about."""
    try:
        yield
    except InvalidOptionError as error:
        prefixed = error.with_message(join(section, str(error)))
        prefixed.key = join(section, error.key)
        raise prefixed from error
    except MessageError as error:
        raise error.with_message(join(section, str(error))) from error
    except ValueError as error:
        raise ValueError(join(section, str(error))) from error


def describe_unknown_name(
    key: str,
    allowed: Iterable[str],
    *,
    name: str = "",
    listing: str | None = None,
    meant: str = "",
    cause: str = "",
    kind: str = "",
) -> str:
    """The message for an option, or for a `group=choice`, that does not exist: what may be meant, then what
    is allowed, of which many names are left out.

    `name` is the last part of the key if that is a domain or a task, not an option: it may have dots.
    `listing` replaces the list of what is allowed where nothing is suggested. `meant` is suggested instead of
    the most similar name. `cause` replaces the words that the name is unknown, and any suggestion. `kind`
    says what is unknown, where the key has more than the name."""
    _, _, choice = key.partition("=")
    is_option = not name and not choice
    unknown = key.rpartition(".")[2] if is_option else name or choice

    # Options are compared without their section, the names of choices, domains and tasks as they are.
    allowed_by_end = {}
    for allowed_name in allowed:
        section, _, end = allowed_name.rpartition(".")
        if not is_option:
            allowed_by_end[allowed_name] = allowed_name
        elif not section or end not in INTERNAL:
            allowed_by_end[end] = allowed_name

    suggestion = meant
    if not suggestion and not cause:
        allowed_by_lower_end = {end.lower(): allowed_name for end, allowed_name in allowed_by_end.items()}
        similar = difflib.get_close_matches(unknown.lower(), allowed_by_lower_end, n=1, cutoff=0.6)
        suggestion = allowed_by_lower_end[similar[0]] if similar else ""

    if not kind:
        kind = "choice" if "=" in key else "option"
    message = f"{key} is invalid: {cause or f'unknown {kind}'}."
    if suggestion:
        message += f" Did you mean {suggestion}?"
    if listing is None or suggestion:
        limit = MAX_LISTED_WITH_SUGGESTION if suggestion else MAX_LISTED
        listing = abbreviate(allowed_by_end.values(), limit=limit, with_count=True)
    if listing:
        message += f" Allowed: {listing}"
    return message


def check_names(names: Iterable[str], allowed: Iterable[str], *, section: str) -> None:
    """Raises ValueError for a name that is not allowed in a section."""
    allowed_keys = [join(section, name) for name in allowed]
    for name in names:
        if join(section, name) not in allowed_keys:
            raise ValueError(describe_unknown_name(join(section, name), allowed_keys))


def read_options(kind: type[Read], values: Mapping[str, Any], *, section: str) -> Read:
    """Options from the values of a section. Raises ValueError for one that is unknown, missing or wrong."""
    check_names(values, list_option_types(kind), section=section)
    for declared in fields(kind):
        if declared.default is MISSING and declared.name not in values:
            key = join(section, declared.name)
            raise ValueError(f"{key} is missing. Allowed: {key}=VALUE")
    with prefix_errors(section):
        return kind(**values)
