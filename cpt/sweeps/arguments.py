"""The arguments of the command line, before Hydra takes them."""

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException

from cpt.core.places import CONF

SWEEPS = ("-m", "--multirun")


def leave_to_jobs(arguments: Sequence[str]) -> list[str]:
    """Of a sweep over the choices of a group, the options of that group become sweeps of one value.

    Hydra composes a config for the sweep itself, with the group's default, and has a fixed option put into
    that: `-m method=lora,olora method.rate=1` would be refused, since `method=ncl` has no rate."""
    if not set(SWEEPS) & set(arguments):
        return list(arguments)
    found = {each: read(each) for each in arguments if not each.startswith("-")}
    groups = [one.key_or_group for one in found.values() if one and one.is_sweep_override()]
    return [defer(each, found.get(each), groups) for each in arguments]


def check_choices(arguments: Sequence[str]) -> None:
    """Raises ValueError for a choice of a group that is no name: Hydra says it in its own lines, or ends."""
    for argument in arguments:
        given = None if argument.startswith("-") else read(argument)
        if given is None or not (CONF / given.key_or_group).is_dir() or given.type is OverrideType.DEL:
            continue
        named = given.value() if isinstance(given.value(), list) else []
        if not all(isinstance(each, str | QuotedString) for each in named) or is_plain(given.value()):
            raise ValueError(f"{argument}; allowed: a choice of conf/{given.key_or_group}, or a list of them")


def is_plain(value: Any) -> bool:
    """Whether a value is neither a name nor keys with values nor a sweep."""
    return value is None or isinstance(value, int | float)


def read(argument: str) -> Override | None:
    """What an argument overrides; None where Hydra will refuse it."""
    try:
        (found,) = OverridesParser.create().parse_overrides([argument])
    except HydraException:
        return None
    return found


def defer(argument: str, given: Override | None, groups: Sequence[str]) -> str:
    """The argument, as a sweep of one value where it fixes an option of one of these groups."""
    name, _, value = argument.partition("=")
    if given is None or given.is_sweep_override() or not value:
        return argument
    return f"{name}=choice({value})" if name.startswith(tuple(f"{each}." for each in groups)) else argument
