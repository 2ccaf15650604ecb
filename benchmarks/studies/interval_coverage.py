"""How often the 95 % intervals of a mean cover it: Student's t and BCa, by the number of runs.

    python benchmarks/studies/interval_coverage.py --out benchmarks/results/interval_coverage.json

Draws samples of each size from distributions whose mean is known, and counts the intervals that contain it.
The standard error of a share of .95 from 10,000 samples is .002."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats

from cpt.evaluation.statistics import compute_mean_intervals

SIZES = (3, 5, 8, 10, 12, 16, 20, 25, 30, 50)
SMALLEST_BOOTSTRAP = 8  # of fewer values BCa is not defined well
AT_ONCE = 500  # samples whose bootstrap is in memory
REPLICATES = 2000  # of a bootstrap

Sampler = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def draw_normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_normal(shape)


def draw_t4(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_t(4, shape)


def draw_uniform(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.uniform(-1, 1, shape)


def draw_skewed(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A gamma distribution of skewness 1, centered."""
    return generator.gamma(4, 1, shape) - 4


def draw_two_groups(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One run in five is three standard deviations away, as after a loss spike; centered."""
    spikes = generator.random(shape) < 0.2
    return generator.standard_normal(shape) + 3 * (spikes - 0.2)


DISTRIBUTIONS: dict[str, Sampler] = {
    "normal": draw_normal,
    "t4": draw_t4,
    "uniform": draw_uniform,
    "gamma, skewness 1": draw_skewed,
    "one in five 3 sd away": draw_two_groups,
}


def bootstrap_intervals(series: np.ndarray, seed: int) -> np.ndarray:
    """95 % intervals of the means of [series, value] by BCa (Efron 1987), as [series, 2].

    Its levels are widened as t is wider than the normal distribution (Hesterberg 2015)."""
    size = series.shape[-1]
    widened = stats.t.ppf(0.975, size - 1) * np.sqrt(size / (size - 1))

    def mean_of_rows(rows: np.ndarray, axis: int) -> np.ndarray:
        # numpy adds in another order where rows are apart
        return np.ascontiguousarray(rows).mean(axis)

    bootstrap = stats.bootstrap(
        (series,),
        mean_of_rows,
        n_resamples=REPLICATES,
        confidence_level=1 - 2 * stats.norm.sf(widened),
        method="BCa",
        axis=-1,
        rng=np.random.default_rng(seed),
    )
    return np.stack([bootstrap.confidence_interval.low, bootstrap.confidence_interval.high], axis=-1)


def measure_coverage(sampler: Sampler, size: int, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """The share of intervals that contain the mean, 0, and their mean width, by the kind of interval."""
    generator = np.random.default_rng([seed, size])
    intervals: dict[str, list[np.ndarray]] = {"t": []}
    if size >= SMALLEST_BOOTSTRAP:
        intervals["bca"] = []
    for first in range(0, samples, AT_ONCE):
        series = sampler(generator, (min(AT_ONCE, samples - first), size))
        intervals["t"].append(compute_mean_intervals(series))
        if size >= SMALLEST_BOOTSTRAP:
            intervals["bca"].append(bootstrap_intervals(series, seed=first))

    measured = {}
    for kind, parts in intervals.items():
        bounds = np.concatenate(parts)
        covers = (bounds[:, 0] <= 0) & (bounds[:, 1] >= 0)
        measured[kind] = {
            "coverage": round(float(covers.mean()), 4),
            "width": round(float((bounds[:, 1] - bounds[:, 0]).mean()), 4),
        }
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    results = []
    for name, sampler in DISTRIBUTIONS.items():
        for size in SIZES:
            measured = measure_coverage(sampler, size, arguments.samples, arguments.seed)
            results.append({"distribution": name, "n": size, **measured})
            print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        table = {"samples": arguments.samples, "seed": arguments.seed, "results": results}
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
