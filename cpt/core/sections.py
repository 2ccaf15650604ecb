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

from cpt.core.config import CHOICE_KEYS
from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.core.preemption import check_signals
from cpt.core.schema import (
    Options,
    Read,
    Text,
    check_names,
    check_value,
    join,
    list_option_types,
    read_options,
)

RESERVED_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", *CHOICE_KEYS)  # of a choice: no options
LIBRARIES = ("torch", "lightning", "transformers", "peft", "torchmetrics")  # slow to import, without Options


def load_target(target: str, *, section: str = "") -> Any:
    """The class or function of a `_target_`; raises ValueError if it does not exist."""
    key = join(section, "_target_")
    try:
        loaded = resolve_name(target)
    except (Exception, SystemExit) as error:  # whatever a module raises while it is imported
        check_signals()  # a library that a signal stops while it is imported raises an error of its own
        cause = find_import_error(target, error)
        raise InvalidOptionError(
            key, target, reason=describe_import_error(cause), allowed="module.Class"
        ) from cause

    if not callable(loaded):
        kind = type(loaded).__name__
        raise InvalidOptionError(key, target, reason=f"a {kind}", allowed="module.Class")
    return loaded


def find_import_error(target: str, error: BaseException) -> BaseException:
    """The error that says why `target` cannot be resolved; `error` is what `resolve_name` raised.

    `resolve_name` reports a module as missing also if the module exists and one of its own imports fails.
    That failed import is returned if there is one, else `error`."""
    module_name = target.rpartition(".")[0]
    # Any other error is the module's own. It is not imported a second time, which may have effects.
    if not module_name or not isinstance(error, ImportError | AttributeError):
        return error
    try:
        import_module(module_name)
    except ImportError as import_error:
        # One without a module's name, or about a part of the target itself, says no more than `error`.
        is_about_target = import_error.name is None or target.startswith(import_error.name)
        if not is_about_target:
            return import_error
    except (Exception, SystemExit) as other_error:
        return other_error
    return error


def describe_import_error(error: BaseException) -> str:
    """The message of an error that a module raised while it was imported. Errors other than a missing name or
    a ValueError begin with their class: their message alone may be a single word."""
    if isinstance(error, ImportError | AttributeError | ValueError):
        return find_reason(error)
    return f"{type(error).__name__} while it is imported: {find_reason(error)}"


@dataclass(frozen=True)
class Choice:
    """What a config group is set to: a class or function with its Options, else its arguments."""

    target: str
    options: Options | Mapping[str, Any]
    base_class: str | None = field(default=None, compare=False)  # of the target, as module.Class

    def make(self, *shared: Any) -> Any:
        """The object; what is `shared` comes after its options."""
        if isinstance(self.options, Mapping):
            return self.load()(*shared, **self.options)
        return self.load()(self.options, *shared)

    def check_call(self, section: str, *, num_shared: int) -> None:
        """Raises ValueError for a class without Options that `make` cannot call with the arguments in its
        section and `num_shared` shared ones."""
        if not isinstance(self.options, Mapping):
            return
        signature = inspect.signature(self.load())
        shared = [None] * num_shared
        try:
            signature.bind(*shared, **self.options)
        except TypeError as error:
            name = self.target.rpartition(".")[2]
            raise InvalidOptionError(
                f"{section}._target_",
                self.target,
                context=f"with {', '.join(self.options)}",
                reason=f"its module has no {name}Options, and {name} does not take them ({error})",
                allowed=f"a class whose module has a @config class {name}Options",
            ) from error

    def load(self) -> Any:
        """The class or function; raises ValueError if it does not exist or is of another kind."""
        loaded = load_target(self.target)
        if self.base_class is not None:
            base_class = resolve_name(self.base_class)
            if not (isinstance(loaded, type) and issubclass(loaded, base_class)):
                raise InvalidOptionError("_target_", self.target, allowed=f"a class below {self.base_class}")
        return loaded

    @property
    def arguments(self) -> dict[str, Any]:
        if isinstance(self.options, Mapping):
            return dict(self.options)
        return dict(vars(self.options))


def find_class_options(target: str, *, section: str) -> type[Options] | None:
    """The Options of a class: `NameOptions` in options.py of its package, the class itself, or of a user's
    class `NameOptions` in its module; None if it has none. Raises ValueError where there is no such class."""
    module_name, _, name = target.rpartition(".")
    if module_name.partition(".")[0] in LIBRARIES:
        return None
    try:
        return find_options_class(target, module_name, name, section=section)
    except (Exception, SystemExit) as error:  # whatever a module raises while it is imported
        check_signals()
        raise InvalidOptionError(
            f"{section}._target_", target, reason=describe_import_error(error), allowed="module.Class"
        ) from error


def find_options_class(target: str, module_name: str, name: str, *, section: str) -> type[Options] | None:
    """As `find_class_options`, for a `target` that is the class `name` of a module. Raises whatever the
    module raises while it is imported."""
    package = module_name.rpartition(".")[0]
    if package and find_spec(f"{package}.options"):
        options = getattr(import_module(f"{package}.options"), f"{name}Options", None)
        if options is not None:
            return options

    # A module of cpt is imported only where it needs no torch: where the class is its own Options.
    if module_name.startswith("cpt.") and not is_config_class(module_name, name):
        return None

    module = import_module(module_name)
    loaded = getattr(module, name) if name in vars(module) else load_target(target, section=section)
    if isinstance(loaded, type) and issubclass(loaded, Options):
        return loaded
    return vars(module).get(f"{name}Options")


def is_config_class(module_name: str, name: str) -> bool:
    """Whether a module, which is read and not imported, defines a class with `@config`. Raises ValueError if
    it defines neither a class nor a function of the name."""
    spec = find_spec(module_name)
    if spec is None or spec.origin is None:  # no such module, or a folder without __init__.py
        raise ValueError(f"there is no module {module_name}")

    source = Path(spec.origin).read_text(encoding="utf-8")
    pattern = rf"^(?P<decorator>@config\n)?(class|def) {re.escape(name)}\b"
    definition = re.search(pattern, source, re.MULTILINE)
    if definition is None:
        raise ValueError(f"{module_name} has no {name}")
    return definition["decorator"] is not None


@dataclass(frozen=True)
class Section:
    """The values of a section; `interpolated` are the names that other values interpolate."""

    name: str
    values: Mapping[str, Any]
    interpolated: frozenset[str] = frozenset()

    def read(self, kind: type[Read]) -> Read:
        """The options of the section. Raises ValueError as `read_options`."""
        types = list_option_types(kind)
        values = {}
        for name, value in self.values.items():
            # Skip unknown keys that other values refer to by ${…}: helper variables, not misspelt options.
            if name not in types and name in self.interpolated:
                continue
            if isinstance(value, Mapping) and "_target_" in value:
                values[name] = Section(join(self.name, name), value).choose()
            else:
                values[name] = value
        return read_options(kind, values, section=self.name)

    def choose(self, *, is_required: bool = False) -> Any:
        """What `_target_` chooses: Options where a class is its own Options, else a Choice; None where
        nothing is chosen. Raises ValueError for that if a choice is required."""
        target = self.values.get("_target_")
        check_value(join(self.name, "_target_"), target, Text if is_required else Text | None)
        if target is None:
            return None

        kind = find_class_options(target, section=self.name)
        arguments = self.only(name for name in self.values if name not in RESERVED_KEYS)
        if kind is None and not target.startswith("cpt."):  # a library's class or a user's without Options
            return Choice(target, arguments.values or Options())

        # A class of cpt without Options takes none: every entry is refused as an unknown option.
        options = arguments.read(kind or Options)
        is_own_options = kind is not None and target.endswith(f".{kind.__name__}")
        return options if is_own_options else Choice(target, options)

    def only(self, names: Iterable[str]) -> "Section":
        return replace(self, values={name: self.values[name] for name in names})

    def split(self, kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values that Options have a name for, and the others."""
        types = list_option_types(kind)
        options = {name: value for name, value in self.values.items() if name in types}
        other_values = {name: value for name, value in self.values.items() if name not in types}
        return options, other_values


def read_section(cfg: DictConfig, section: str, config_text: str, *, names: Sequence[str] = ()) -> Section:
    """A section of a config, or these names at its top. `config_text` is the whole config as it is written,
    not resolved. Raises MissingMandatoryValue."""
    node = OmegaConf.select(cfg, section) if section else cfg
    if not isinstance(node, DictConfig):
        check_value(section, to_python(node), Mapping[str, Any])

    values = {}
    for name in names or map(str, node):
        if name in node or OmegaConf.is_missing(node, name):
            values[name] = to_python(node[name])  # raises for what is missing
    interpolated = frozenset(name for name in values if is_used(join(section, name), config_text))
    return Section(section, values, interpolated)


def to_python(value: Any) -> Any:
    """A value in Python's own types. Raises MissingMandatoryValue for one with a part that is missing."""
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def is_used(key: str, text: str) -> bool:
    """Whether a config, as written, interpolates a key."""
    return re.search(rf"\$\{{(oc\.select:)?{re.escape(key)}\b", text) is not None


def check_arguments(section: str, arguments: Mapping[str, Any], *, given_by_cpt: Iterable[str] = ()) -> None:
    """Raises ValueError for a value that the chosen class, or one above it, does not take as an argument."""
    target = arguments.get("_target_")
    if not isinstance(target, str):
        return
    chosen = load_target(target, section=section)
    if inspect.isclass(chosen):
        makers = [vars(kind).get("__init__", object.__init__) for kind in chosen.__mro__]
    else:
        makers = [chosen]

    # A constructor that takes any keyword hands it to the one above: their names add up until one does not.
    excluded = ("self", *given_by_cpt)
    names: dict[str, None] = {}
    for maker in makers:
        try:
            parameters = inspect.signature(maker).parameters.values()
        except ValueError:  # of a built-in type
            return
        for parameter in parameters:
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and parameter.name not in excluded:
                names[parameter.name] = None

        passes_on_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not passes_on_others:
            check_names((name for name in arguments if name not in RESERVED_KEYS), names, section=section)
            return
