"""A config as Python's own values, section by section, whether all of it is given yet or not."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

from cpt.core.config import FOR_OTHERS
from cpt.core.options import (
    Choice,
    Options,
    check_field,
    check_names,
    options_of,
    prefix_errors,
    read_options,
    with_dot,
)
from cpt.core.rules import MAPPING, TEXT, or_null

# Of a choice: what makes it and what others read of it, not its options.
GIVEN = ("_target_", "_partial_", "_convert_", "_recursive_", *FOR_OTHERS)
OWN = __name__.partition(".")[0]
Read = TypeVar("Read", bound=Options)


@dataclass(frozen=True)
class Section:
    """The values of a section that are given; `complete` if none is missing (`???`), as in a sweep; `used`
    are the names that other values are made of."""

    place: str
    values: Mapping[str, Any]
    complete: bool
    used: frozenset[str]

    def read(self, kind: type[Read]) -> Read | None:
        """The options of the section; None where a value is missing. Raises ValueError for a value that is
        unknown or may not be."""
        known = [each.name for each in fields(kind)]
        given = {name: value for name, value in self.values.items() if name in known or name not in self.used}
        check_names(given, known, place=self.place)
        values = {
            name: choose_within(value, f"{with_dot(self.place)}{name}") for name, value in given.items()
        }
        if self.complete:
            return read_options(kind, values, place=self.place)
        with prefix_errors(self.place):
            for each in fields(kind):
                if each.name in values:
                    check_field(each, values[each.name])
        return None

    def choose(self, *, needed: bool = False) -> Any:
        """What the section chooses: the options themselves where a class is its own options, else a Choice;
        None where a value is missing or, unless it is `needed`, nothing is chosen. Raises ValueError for a
        class that there is not and for its options as `read` does."""
        target = self.values.get("_target_")
        rule = TEXT if needed and self.complete else or_null(TEXT)
        rule.check(f"{with_dot(self.place)}_target_", target)
        if target is None:
            return None
        kind = options_of(target, place=self.place)
        own = self.only(name for name in self.values if name not in GIVEN)
        if kind is None and not target.startswith(f"{OWN}."):
            return Choice(target, own.values or Options()) if self.complete else None
        options = own.read(kind or Options)
        is_its_own = kind is not None and target.endswith(f".{kind.__name__}")
        return options if options is None or is_its_own else Choice(target, options)

    def only(self, names: Any) -> "Section":
        """The section with these values alone."""
        return Section(self.place, {name: self.values[name] for name in names}, self.complete, self.used)

    def split(self, kind: type[Options]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values that options have a name for, and the others."""
        known = {each.name for each in fields(kind)}
        own = {name: value for name, value in self.values.items() if name in known}
        return own, {name: value for name, value in self.values.items() if name not in known}


def read_section(
    cfg: DictConfig, place: str, *, names: Sequence[str] | None = None, written: str | None = None
) -> Section:
    """A section of a config, or these names at its top; raises ValueError where it is none. `written` is the
    config `as_written`, where it is known."""
    node = OmegaConf.select(cfg, place) if place else cfg
    if not isinstance(node, DictConfig):
        MAPPING.check(place, to_python(node))
    values: dict[str, Any] = {}
    looked_at = node if names is None else [name for name in names if name in node]
    for name in map(str, looked_at):
        try:
            values[name] = to_python(node[name])
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            continue
    text = as_written(cfg) if written is None else written
    used = frozenset(name for name in map(str, looked_at) if is_used(f"{with_dot(place)}{name}", text))
    return Section(place, values, len(values) == len(looked_at), used)


def to_python(value: Any) -> Any:
    """A value in Python's own types. Raises MissingMandatoryValue for one with a part that is missing."""
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def as_written(cfg: DictConfig) -> str:
    """A config's values with what they are made of, not with what they come to."""
    return str(OmegaConf.to_container(cfg, resolve=False))


def is_used(key: str, text: str) -> bool:
    """Whether a value of a config, as written, is made of another one."""
    return re.search(rf"\$\{{(oc\.select:)?{re.escape(key)}\b", text) is not None


def choose_within(value: Any, place: str) -> Any:
    """What a value chooses that is a choice itself, like a method's routing; else the value."""
    if isinstance(value, Mapping) and "_target_" in value:
        return Section(place, value, True, frozenset()).choose()
    return value
