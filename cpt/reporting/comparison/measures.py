"""What runs are compared by: the columns of the comparison, and how a group's numbers are told."""

from __future__ import annotations

import statistics as stdlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pandas import DataFrame

from cpt.evaluation.statistics import LEAST, intervals_of_means
from cpt.reporting.frames import decimals, megabytes, percent, perplexity

NONE = "–"


def format_whole(number: float) -> str:
    return f"{number:,.0f}"


def format_power(number: float) -> str:
    """Three digits and a power of ten."""
    return "0" if number == 0 else f"{number:.2e}"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of a run: its key in `Run.values`, what its column is called, and how it is shown."""

    key: str
    title: str
    show: Callable[[float], str]
    higher: bool = False  # whether more is better


MEASURES = (
    Measure(key="LC/perplexity", title="LC (perplexity)", show=perplexity),
    Measure(key="LC/bits_per_byte", title="LC (bits per byte)", show=decimals),
    Measure(key="CPT/nats", title="CPT", show=decimals),
    Measure(key="FG/nats", title="FG", show=decimals),
    Measure(key="BWT_zs/nats", title="BWT_zs", show=decimals, higher=True),
    Measure(key="FWT_zs/nats", title="FWT_zs", show=decimals, higher=True),
    Measure(key="general_drift/nats", title="general drift", show=decimals),
    Measure(key="intransigence/nats", title="intransigence", show=decimals),
    Measure(key="answers/AP", title="AP (%)", show=percent, higher=True),
    Measure(key="answers/LA", title="LA (%)", show=percent, higher=True),
    Measure(key="answers/BWT", title="BWT (%)", show=percent, higher=True),
    Measure(key="answers/F", title="F (%)", show=percent),
    Measure(key="answers/FWT", title="FWT (%)", show=percent, higher=True),
    Measure(key="endtask/MF1", title="MF1 (%)", show=percent, higher=True),
    Measure(key="endtask/Acc", title="Acc (%)", show=percent, higher=True),
    Measure(key="endtask/forward", title="forward MF1 (%)", show=percent, higher=True),
    Measure(key="endtask/forget_rate", title="forget rate (%)", show=percent),
)
COSTS = (
    Measure(key="cost/tokens", title="tokens", show=format_whole),
    Measure(key="cost/flops", title="FLOPs", show=format_power),
    Measure(key="cost/seconds_learn", title="learning (s)", show=format_whole),
    Measure(key="cost/seconds", title="all (s)", show=format_whole),
    Measure(key="cost/memory", title="peak memory", show=megabytes),
    Measure(key="cost/trained", title="trained", show=format_whole),
    Measure(key="cost/stored", title="stored", show=megabytes),
    Measure(key="cost/stored_per_domain", title="per domain", show=megabytes),
)
COMPARED = tuple(  # differences and ranks
    measure for measure in MEASURES if measure.key not in ("BWT_zs/nats", "endtask/forward")
)


def measure_task(name: str) -> Measure:
    """The last score of an end task."""
    return Measure(key=f"task/{name}", title=name, show=percent, higher=True)


def measure_probe(told: str, *, higher: bool) -> Measure:
    """The last value of a task of the harness, by its description."""
    return Measure(key=f"probe/{told}", title=told, show=decimals, higher=higher)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A group's numbers in one: mean, standard deviation and 95 % interval over its runs, None where there
    are too few; n of `runs` have the number."""

    n: int
    runs: int
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None


def spread_values(values: DataFrame) -> dict[str, Spread]:
    """By key, of [run, key] with nan where a run has no such number. The standard deviation is the sample's
    (n - 1)."""
    spreads, counts = {}, values.count()
    for n, keys in counts.groupby(counts).groups.items():
        there = np.array([values[key].dropna() for key in keys])
        bounds = intervals_of_means(there).tolist() if n >= LEAST else [(None, None)] * len(keys)
        for key, numbers, (low, high) in zip(keys, there.tolist(), bounds, strict=True):
            deviation = stdlib.stdev(numbers) if n > 1 else None
            mean = stdlib.fmean(numbers) if n else None
            spreads[key] = Spread(n=int(n), runs=len(values), mean=mean, sd=deviation, low=low, high=high)
    return spreads


def format_spread(given: Spread, *, show: Callable[[float], str], bounds: bool) -> str:
    """`53.10 ± 0.30 [52.80, 53.40] (3)`: mean, deviation, interval if wanted, and how many runs have the
    number if not all have."""
    if given.mean is None:
        return NONE
    deviation = "" if given.sd is None else f" ± {show(given.sd)}"
    if bounds and given.low is not None:
        deviation += f" [{show(given.low)}, {show(given.high)}]"
    return show(given.mean) + deviation + f" ({given.n})" * (given.n < given.runs)
