"""What the trials of a search are averaged over: seeds and orders, of which a search should choose none."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hydra.core.utils import JobReturn


@dataclass(frozen=True)
class Averaged:
    """The values of each key, as `{"seed": [0, 1, 2]}`; a trial is a run with every combination of them.

    Raises ValueError for what is no list of different values."""

    values: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        for key, given in self.values.items():
            listed = isinstance(given, Sequence) and not isinstance(given, str)
            if not listed or not given or len({str(each) for each in given}) < len(given):
                raise ValueError(
                    f"hydra.sweeper.{key}s={given}; allowed: null, or a list of different values as [0,1,2]"
                )

    @property
    def runs(self) -> list[list[str]]:
        """The overrides of each run of a trial."""
        lists = ([f"{key}={value}" for value in given] for key, given in self.values.items())
        return [list(each) for each in itertools.product(*lists)]

    def check_free(self, keys: Sequence[str], *, space: Collection[str]) -> None:
        """Raises ValueError where a key is searched for, or given as well."""
        if searched := [key for key in ("seed", "order") if key in space]:
            raise ValueError(
                f"{searched[0]} is invalid as a dimension of a search: the luckiest would win. "
                f"Allowed: hydra.sweeper.{searched[0]}s=[…], the values that each trial is averaged over "
                "(hydra.sweeper.seeds=[0,1,2], hydra.sweeper.orders=[0,1])"
            )
        if both := [key for key in self.values if key in keys]:
            given = f"hydra.sweeper.{both[0]}s={list(self.values[both[0]])}"
            raise ValueError(f"{both[0]}=… and {given}; allowed: one of them")


def average_objectives(returned: Sequence[JobReturn]) -> Any:
    """The means of the objectives of a trial's runs; what one returned that has none, where there is one."""
    found = [as_list(each._return_value) for each in returned]
    for each, job in zip(found, returned, strict=True):
        if not all(isinstance(value, int | float) for value in each):
            return job._return_value
    return [fmean(values) for values in zip(*found, strict=True)]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def group(returned: Sequence[JobReturn], size: int) -> list[Sequence[JobReturn]]:
    """What jobs returned, by trial."""
    return [returned[start : start + size] for start in range(0, len(returned), size)]
