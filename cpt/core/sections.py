"""Sections of a Hydra config read into typed options, whether all of it is given yet or not.

`options.py` of a package has `NameOptions` for each class `Name` that a config may choose. It imports no
torch, so that a wrong value is reported at once."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cpt.core.config import FOR_OTHERS
from cpt.core.errors import reason
from cpt.core.schema import Options, Read, Text, check_names, check_value, join, option_types, read_options

GIVEN = ("_target_", "_partial_", "_convert_", "_recursive_", *FOR_OTHERS)  # in addition to the options
LIBRARIES = ("torch", "lightning", "transformers", "peft", "torchmetrics")  # slow to import, without Options


def load_target(target: str, *, place: str = "") -> Any:
    """The class or function of a `_target_`; raises ValueError if it does not exist."""
    told = f"{join(place, '_target_')}={target}"
    try:
        found = resolve_name(target)
    except Exception as error:  # whatever a module raises while it is read in
        try:
            import_module(target.rpartition(".")[0])
        except ImportError as hidden:  # resolve_name says that a module which fails is not there
            error = error if target.startswith(hidden.name or target) else hidden
        raise ValueError(f"{told} is invalid: {reason(error)}. Allowed: module.Class") from error
    if not callable(found):
        raise ValueError(f"{told} is invalid: a {type(found).__name__}. Allowed: module.Class")
    return found


@dataclass(frozen=True)
class Choice:
    """What a config group is set to: a class or function with its Options, else its arguments."""

    target: str
    options: Options | Mapping[str, Any]
    below: str | None = field(default=None, compare=False)  # the class that it has to be below, by its name

    def make(self, *shared: Any) -> Any:
        """The object; what is `shared` comes after its options."""
        if isinstance(self.options, Mapping):
            return self.load()(*shared, **self.options)
        return self.load()(self.options, *shared)

    def load(self) -> Any:
        """The class or function; raises ValueError if it does not exist or is of another kind."""
        found = load_target(self.target)
        if self.below and not (isinstance(found, type) and issubclass(found, resolve_name(self.below))):
            raise ValueError(f"_target_={self.target} is invalid. Allowed: a class below {self.below}")
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.options if isinstance(self.options, Mapping) else vars(self.options))


def options_class(target: str, *, place: str) -> type[Options] | None:
    """The Options of a class: `NameOptions` in options.py of its package, the class itself, or of a user's
    class `NameOptions` in its module; None if it has none. Raises ValueError where there is no such class."""
    module, _, name = target.rpartition(".")
    package = module.rpartition(".")[0]
    if module.partition(".")[0] in LIBRARIES:
        return None
    try:
        if package and find_spec(f"{package}.options"):
            found = getattr(import_module(f"{package}.options"), f"{name}Options", None)
            if found is not None:
                return found
        if module.startswith("cpt."):  # not imported before it is known to need no torch
            spec = find_spec(module)
            source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
            stated = re.search(rf"^(@config\n)?(class|def) {re.escape(name)}\b", source, re.MULTILINE)
            if stated is None:
                raise ValueError(f"{module} has no {name}")
            if not stated[1]:
                return None
        space = vars(import_module(module))
        found = space[name] if name in space else load_target(target, place=place)
    except Exception as error:  # whatever a module raises while it is read in
        raise ValueError(
            f"{place}._target_={target} is invalid: {reason(error)}. Allowed: module.Class"
        ) from error
    return found if isinstance(found, type) and issubclass(found, Options) else space.get(f"{name}Options")


@dataclass(frozen=True)
class Section:
    """The given values of a section; `used` are the names that other values interpolate."""

    place: str
    values: Mapping[str, Any]
    used: frozenset[str] = frozenset()

    def read(self, kind: type[Read]) -> Read:
        """The options of the section. Raises ValueError as `read_options`."""
        types = option_types(kind)
        values: dict[str, Any] = {}
        for name, value in self.values.items():
            if name in types or name not in self.used:
                nested = isinstance(value, Mapping) and "_target_" in value
                values[name] = Section(join(self.place, name), value).choose() if nested else value
        return read_options(kind, values, place=self.place)

    def choose(self, *, needed: bool = False) -> Any:
        """What `_target_` chooses: Options where a class is its own Options, else a Choice; None where
        nothing is chosen, unless it is `needed`."""
        target = self.values.get("_target_")
        check_value(join(self.place, "_target_"), target, Text if needed else Text | None)
        if target is None:
            return None
        kind = options_class(target, place=self.place)
        own = self.only(name for name in self.values if name not in GIVEN)
        if kind is None and not target.startswith("cpt."):
            return Choice(target, own.values or Options())
        options = own.read(kind or Options)
        is_its_own = kind is not None and target.endswith(f".{kind.__name__}")
        return options if is_its_own else Choice(target, options)

    def only(self, names: Iterable[str]) -> "Section":
        return replace(self, values={name: self.values[name] for name in names})

    def split(self, kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values that Options have a name for, and the others."""
        own = {name: value for name, value in self.values.items() if name in option_types(kind)}
        return own, {name: value for name, value in self.values.items() if name not in own}


def read_section(cfg: DictConfig, place: str, written: str, *, names: Sequence[str] = ()) -> Section:
    """A section of a config that is `written` so, or these names at its top. Raises MissingMandatoryValue."""
    node = OmegaConf.select(cfg, place) if place else cfg
    if not isinstance(node, DictConfig):
        check_value(place, to_python(node), Mapping[str, Any])
    there = [name for name in names or map(str, node) if name in node or OmegaConf.is_missing(node, name)]
    values = {name: to_python(node[name]) for name in there}
    used = frozenset(name for name in values if is_used(join(place, name), written))
    return Section(place, values, used)


def to_python(value: Any) -> Any:
    """A value in Python's own types. Raises MissingMandatoryValue for one with a part that is missing."""
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def is_used(key: str, text: str) -> bool:
    """Whether a config, as written, interpolates a key."""
    return re.search(rf"\$\{{(oc\.select:)?{re.escape(key)}\b", text) is not None


def check_arguments(place: str, given: Mapping[str, Any], *, given_by_cpt: Iterable[str] = ()) -> None:
    """Raises ValueError for a value that the chosen class, or one above it, does not take as an argument."""
    if not isinstance(given.get("_target_"), str):
        return
    found = load_target(given["_target_"], place=place)
    names: dict[str, None] = {}
    kinds = found.__mro__ if inspect.isclass(found) else ()
    for maker in [vars(kind).get("__init__", object.__init__) for kind in kinds] or [found]:
        try:
            taken = inspect.signature(maker).parameters.values()
        except ValueError:  # of a built-in type
            return
        own = [each for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        names |= dict.fromkeys(each.name for each in own if each.name not in ("self", *given_by_cpt))
        if not any(each.kind is each.VAR_KEYWORD for each in taken):
            check_names((name for name in given if name not in GIVEN), names, place=place)
            return
