"""Options of what a config chooses: frozen and typed, each with its help and its rule, checked where they are
made. Nothing here needs torch, so that a wrong option is told at once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pkgutil import resolve_name
from typing import Any, TypeVar

from cpt.core.errors import reason, unknown_name
from cpt.core.light import HEAVY, load_light
from cpt.core.rules import Rule

Made = TypeVar("Made", bound="Options")


def option(
    help: str,
    rule: Rule | None = None,
    *,
    options: "type[Options] | None" = None,
    default: Any = MISSING,
) -> Any:
    """A field of Options: what it means, and what it may be; `options` where it is a section of its own."""
    return field(default=default, metadata={"help": help, "rule": rule, "options": options})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a choice of a config group is told; its defaults stand in conf/. Raises ValueError,
    `name=value; allowed: …`, for a value that may not be and for values that do not go together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            check_field(each, value)
            inner = each.metadata.get("options")
            if inner is not None and isinstance(value, Mapping):
                object.__setattr__(self, each.name, read_options(inner, value, place=each.name))
            elif isinstance(value, list):
                object.__setattr__(self, each.name, tuple(value))
        self.check_together()

    def check_together(self) -> None:
        """Raises ValueError for options that do not go together. Here: all do."""


@dataclass(frozen=True)
class Choice:
    """What a config group is set to: a class or function, and its options; of a class without an Options of
    its own, its arguments."""

    target: str
    options: Options | Mapping[str, Any]
    below: str | None = field(default=None, compare=False)  # the class that it has to be below, by its name

    def make(self, *shared: Any) -> Any:
        """The object; what is `shared` comes after its options."""
        if isinstance(self.options, Mapping):
            return self.load()(*shared, **self.options)
        return self.load()(self.options, *shared)

    def load(self) -> Any:
        """The class or function; raises ValueError where there is none, or one of another kind."""
        try:
            found = resolve_name(self.target)
        except Exception as error:  # whatever a module raises while it is read in
            raise ValueError(f"_target_={self.target}: {reason(error)}") from error
        if self.below is not None and not is_below(found, resolve_name(self.below)):
            raise ValueError(f"_target_={self.target}; allowed: a class below {self.below}")
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """The options by name."""
        if isinstance(self.options, Mapping):
            return dict(self.options)
        return {each.name: getattr(self.options, each.name) for each in fields(self.options)}


def is_below(found: Any, kind: type) -> bool:
    return isinstance(found, type) and issubclass(found, kind)


def check_field(each: Field, value: Any) -> None:
    """Raises ValueError for a value that the rule of a field does not allow."""
    if (rule := each.metadata.get("rule")) is not None:
        rule.check(each.name, value)


def read_options(kind: type[Made], given: Mapping[str, Any], *, place: str) -> Made:
    """Options from values of a config; `place` is the section, which messages begin with.

    Raises ValueError for a value that is unknown, missing or may not be."""
    check_names(given, [each.name for each in fields(kind)], place=place)
    needed = [each.name for each in fields(kind) if each.default is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{with_dot(place)}{missing[0]} is missing; needed: {', '.join(needed)}")
    with prefix_errors(place):
        return kind(**given)


def with_dot(place: str) -> str:
    return f"{place}." if place else ""


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Begins the message of a ValueError with the section that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{with_dot(place)}{error}") from error


def check_names(given: Iterable[str], allowed: Iterable[str], *, place: str) -> None:
    """Raises ValueError for a name that is not allowed."""
    known = list(allowed)
    for name in given:
        if name not in known:
            raise ValueError(
                unknown_name(f"{with_dot(place)}{name}", [f"{with_dot(place)}{each}" for each in known])
            )


def options_of(target: str, *, place: str) -> type[Options] | None:
    """The Options of a class: the class itself if it is one, else the one called after it in its file
    (`EWCOptions` of `EWC`); None where there is none. Raises ValueError for a module or class that there is
    not."""
    module, _, name = target.rpartition(".")
    if module.partition(".")[0] in HEAVY:  # a class of torch has none, and takes seconds to look for
        return None
    try:
        light = load_light(module)
    except Exception as error:  # whatever a module raises while it is read in
        raise ValueError(f"{place}._target_={target}: {reason(error)}; allowed: module.Class") from error
    own = getattr(light, name, None)
    if isinstance(own, type) and issubclass(own, Options):
        return own
    if name not in light.defined:
        raise ValueError(f"{place}._target_={target}: {module} has no {name}")
    return getattr(light, f"{name}Options", None)
