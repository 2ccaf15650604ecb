"""What a run is called in reports: its method, what is laid over it, and the values that set it apart."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any


def label(run: Mapping[str, Any], *, shared: Collection[str] = ()) -> str:
    """`das + migu + replay past (temperature=0.1)`, without the values that all runs share."""
    method, mask, replay = (run[key] for key in ("method", "mask", "replay"))
    own = ", ".join(value for value in split_variant(run) if value not in shared)
    laid = f" + {mask}" * (mask != "none") + f" + replay {replay}" * (replay != "none")
    return method + laid + f" ({own})" * bool(own)


def split_variant(run: Mapping[str, Any]) -> list[str]:
    """The values given for a run, `key=value`."""
    return [value for value in run["variant"].split("; ") if value]


def shared_values(runs: Iterable[Mapping[str, Any]]) -> set[str]:
    """The values that all runs were given."""
    return set.intersection(*(set(split_variant(run)) for run in runs))
