"""The arguments of the command line, before Hydra takes them."""

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException

from cpt.core.config import CONF


def parse_arguments(arguments: Sequence[str]) -> dict[str, Override]:
    """The overrides among the arguments, without those that Hydra will refuse."""
    parsed = {}
    for argument in arguments:
        try:
            if not argument.startswith("-"):
                (parsed[argument],) = OverridesParser.create().parse_overrides([argument])
        except HydraException:
            continue
    return parsed


def leave_to_jobs(arguments: Sequence[str]) -> list[str]:
    """Of a sweep over the choices of a group, the options of that group become sweeps of one value.

    Hydra composes a config for the sweep itself, with the group's default, and sets a fixed option in
    that: `-m method=lora,olora method.rate=1` would be refused, since `method=ncl` has no rate."""
    if not {"-m", "--multirun"} & set(arguments):
        return list(arguments)
    parsed = parse_arguments(arguments)
    swept = tuple(f"{each.key_or_group}." for each in parsed.values() if each.is_sweep_override())
    deferred = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        fixed = argument in parsed and not parsed[argument].is_sweep_override()
        deferred.append(f"{name}=choice({value})" if fixed and value and name.startswith(swept) else argument)
    return deferred


def check_choices(arguments: Sequence[str]) -> None:
    """Raises ValueError for a choice of a group that is not a name, which Hydra reports in many lines."""
    for argument, given in parse_arguments(arguments).items():
        if not (CONF / given.key_or_group).is_dir() or given.type is OverrideType.DEL:
            continue
        value = given.value()
        names = value if isinstance(value, list) else []
        if (
            value is None
            or isinstance(value, int | float)
            or not all(isinstance(each, str | QuotedString) for each in names)
        ):
            raise ValueError(f"{argument}; allowed: a choice of conf/{given.key_or_group}, or a list of them")
