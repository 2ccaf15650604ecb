"""The options of classes that have no Options of their own: the arguments that they take."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pkgutil import resolve_name
from typing import Any

from cpt.core.errors import reason, unknown_name
from cpt.core.rules import is_text
from cpt.core.sections import GIVEN


def check_arguments(section: str, options: Mapping[str, Any], *, given_by_cpt: Iterable[str] = ()) -> None:
    """The options of a choice are arguments of its class or function, apart from those that cpt gives."""
    if not is_text(options.get("_target_")):
        return
    allowed = arguments(target(section, options))
    if allowed is None:
        return
    names = [name for name in allowed if name not in given_by_cpt]
    for key in options:
        if key not in GIVEN and key not in names:
            raise ValueError(unknown_name(f"{section}.{key}", [f"{section}.{name}" for name in names]))


def target(section: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The class or function of a choice; raises ValueError where there is none."""
    told = f"{section}._target_={options['_target_']}"
    try:
        found = resolve_name(options["_target_"])
    except Exception as error:  # whatever a module raises while it is read in
        raise ValueError(f"{told}: {reason(error)}; allowed: module.Class") from error
    if not callable(found):
        raise ValueError(f"{told}: that is a {type(found).__name__}; allowed: module.Class")
    return found


def arguments(made_by: Callable[..., Any]) -> list[str] | None:
    """The names that a function takes, or a class with those that it hands on to the class above; None where
    it takes any, or does not say (built-in types)."""
    kinds = made_by.__mro__ if inspect.isclass(made_by) else ()
    makers = [vars(kind).get("__init__", object.__init__) for kind in kinds] or [made_by]
    names: list[str] = []
    for maker in makers:
        try:
            taken = inspect.signature(maker).parameters.values()
        except ValueError:
            return None
        names += [each.name for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        if not any(each.kind is each.VAR_KEYWORD for each in taken):
            return [name for name in dict.fromkeys(names) if name != "self"]
    return None
