"""What a search is over: Hydra's grammar as Optuna's distributions, and a trial's values as overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from cpt.core.config import executes

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DIGITS = 6  # of a number that is given to a run: it stands in the folder's name


def identify_space(
    space: Mapping[str, Override], fixed: Sequence[str], objectives: Sequence[str]
) -> dict[str, Any]:
    """What makes a search another one."""
    decides = sorted(line for line in fixed if not executes(line.lstrip("+~").partition("=")[0]))
    texts = {key: str(each.get_value_string()) for key, each in sorted(space.items())}
    return {"space": texts, "fixed": decides, "objective": list(objectives)}


def distributions(space: Mapping[str, Override], *, grid: bool) -> dict[str, BaseDistribution]:
    """Optuna's for Hydra's: choices are text, ranges and intervals are numbers unless a grid is asked for."""
    from optuna.distributions import CategoricalDistribution

    made: dict[str, BaseDistribution] = {}
    for key, each in space.items():
        if grid or each.is_choice_sweep():
            made[key] = CategoricalDistribution(values(each))
        else:
            made[key] = numbers(key, each)
    return made


def values(override: Override) -> list[str]:
    """The values of a choice or a range, as an override gives them."""
    if override.is_interval_sweep():
        raise ValueError(f"{override.input_line} has no grid; allowed with sampler=grid: choices and ranges")
    return list(dict.fromkeys(override.sweep_string_iterator()))


def numbers(key: str, override: Override) -> BaseDistribution:
    """Raises ValueError for bounds that Optuna does not take."""
    from optuna.distributions import FloatDistribution, IntDistribution

    sweep: Any = override.value()
    logarithmic = "log" in sweep.tags
    if isinstance(sweep, RangeSweep):
        points = sorted(float(f"{float(given):.12g}") for given in values(override))  # 0.1 + 0.2 is 0.3
        low, high, step = points[0], points[-1], abs(sweep.step)
    else:
        low, high, step = bounds(sweep)
    kind = IntDistribution if isinstance(step, int) else FloatDistribution
    cast = int if kind is IntDistribution else float
    try:
        return kind(cast(low), cast(high), log=logarithmic, **({} if step is None else {"step": step}))
    except ValueError as error:
        raise ValueError(f"{key}={override.get_value_string()}: {error}") from error


def bounds(sweep: IntervalSweep) -> tuple[float, float, int | None]:
    """The ends of an interval; a step of 1 between whole numbers, `int(interval(1,8))`."""
    low, high = sweep.start, sweep.end
    assert low is not None and high is not None
    return low, high, 1 if isinstance(low, int) and isinstance(high, int) else None


def write_overrides(params: Mapping[str, Any]) -> list[str]:
    """A trial's values as overrides."""
    return [f"{key}={text(value)}" for key, value in params.items()]


def text(value: str | int | float) -> str:
    return repr(float(f"{value:.{DIGITS}g}")) if isinstance(value, float) else str(value)
