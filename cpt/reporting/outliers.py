"""What lies so far off that it would press everything else in a picture together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axis import Axis

FEWEST = 5  # values: of fewer none is called far off
FAR = 3.0  # interquartile ranges beyond the quartiles (Tukey's outer fences)
PRESSED = 0.4  # only where the others would have less than this share of the axis
MARGIN = 0.12


def find_inner(values: np.ndarray) -> tuple[float, float] | None:
    """The range of the values without those far off; None where there is none, or where leaving it out would
    not make much room."""
    known = values[np.isfinite(values)]
    if known.size < FEWEST:
        return None
    low, high = np.percentile(known, [25, 75])
    reach = FAR * (high - low)
    inner = known[(known >= low - reach) & (known <= high + reach)]
    if inner.size == known.size or not 0 < np.ptp(inner) < PRESSED * np.ptp(known):
        return None
    return float(inner.min()), float(inner.max())


def find_window(points: Mapping[str, np.ndarray], *, logarithmic: bool) -> tuple[float, float] | None:
    """Limits of an axis that show all runs of all groups, [run] each, but those far off by their mean."""
    means = {name: float(values.mean()) for name, values in points.items() if values.size}
    scaled = np.array([*means.values()], dtype=float)
    inner = find_inner(np.log(scaled) if logarithmic and (scaled > 0).all() else scaled)
    if inner is None:
        return None
    low, high = np.exp(inner) if logarithmic else inner
    slack = 1e-9 * (abs(low) + abs(high))
    near = [n for n, mean in means.items() if low - slack <= mean <= high + slack]
    runs = np.concatenate([points[name] for name in near])
    return widen(float(runs.min()), float(runs.max()), logarithmic=logarithmic)


def widen(low: float, high: float, *, logarithmic: bool) -> tuple[float, float]:
    """With a margin at both ends."""
    ends = np.log([low, high]) if logarithmic else np.array([low, high])
    ends = ends + MARGIN * np.ptp(ends) * np.array([-1, 1])
    low, high = (np.exp(ends) if logarithmic else ends).tolist()
    return low, high


def hold(axis: Axis, window: tuple[float, float] | None) -> None:
    """Sets the limits of an axis, if there are some."""
    if window is not None:
        {"x": axis.axes.set_xlim, "y": axis.axes.set_ylim}[axis.axis_name](*window)
