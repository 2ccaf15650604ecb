"""The pictures of the reports, as PNG bytes: matplotlib's objects only, no state of pyplot.

Colours are safe for the colour-blind: the diverging map is ColorBrewer's RdBu, the series are those of Okabe
and Ito (2008).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cpt.formatting import perplexity, shortened
from cpt.metrics import GENERAL
from cpt.scores import Scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

FEW = 12  # up to so many domains are told apart one by one; more are shown as a crowd
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", ":")


@np.errstate(over="ignore")
def perplexities(scores: Scores) -> np.ndarray:
    """The matrix as perplexities, [row, column]."""
    return np.exp(scores.matrix)


def heatmap(scores: Scores) -> bytes:
    """The matrix, coloured by the change in nats against the base model; a domain's own row is marked."""
    change = scores.matrix - scores.matrix[:1]
    columns, few = len(scores.domains), len(scores.domains) <= FEW + 1
    figure = _figure((2.6 + 0.72 * columns, 2.0 + 0.42 * len(scores.rows)) if few else (9.5, 8.5))
    axes = figure.add_subplot()
    image = axes.imshow(change, cmap=_diverging(), aspect="auto", interpolation="nearest", **_limits(change))
    beyond = "both" if np.nanmax(np.abs(change), initial=0) > image.norm.vmax else "neither"
    figure.colorbar(image, ax=axes, extend=beyond, label="change in nats per token\n(blue: better than base)")
    _ticks(axes.xaxis, names=scores.domains, few=few, rotation=35 if few else 90)
    _ticks(axes.yaxis, names=scores.rows, few=few, rotation=0)
    axes.set(xlabel="test text", ylabel="model after stage")
    if few:
        _annotate(axes, scores=scores, strong=0.6 * image.norm.vmax)
    _mark_own(axes, scores=scores, few=few)
    if GENERAL in scores.domains:
        axes.axvline(columns - 1.5, color="black", linewidth=1.5 if few else 0.8)
    return _png(figure)


def stages(scores: Scores) -> bytes:
    """Perplexity on each test text over the stages; a domain's own stage is marked."""
    figure = _figure((8.5, 4.8))
    axes = figure.add_subplot()
    losses = perplexities(scores).T
    losses = np.where(np.isfinite(losses), losses, np.nan)
    axes.set_yscale("log")
    domains = [name for name in scores.domains if name != GENERAL]
    ends = _crowd(axes, losses[: len(domains)]) if len(domains) > FEW else _each(axes, losses, names=domains)
    _own_stages(axes, scores=scores, losses=losses, large=len(domains) <= FEW)
    if GENERAL in scores.domains:
        style = {"linestyle": "-.", "linewidth": 1.8, "marker": _dot(losses)}
        axes.plot(losses[-1], color="black", zorder=3, **style)
        ends[GENERAL] = (losses[-1], "black")
    _plain_logarithm(axes.yaxis, losses)
    axes.set(xlabel="stages learned", ylabel="perplexity (log scale)")
    if len(scores.rows) <= FEW + 1:
        _ticks(axes.xaxis, names=scores.rows, few=True, rotation=35)
    axes.grid(axis="y", color="0.9")
    _direct_labels(axes, ends)
    return _png(figure)


def mixtures(scores: Scores) -> bytes:
    """The weight of each part in the last model's score of each text."""
    names = ["base", *scores.learned]
    weights = np.array([[scores.parts[-1].get(t, {}).get(n, 0.0) for n in names] for t in scores.domains])
    few = max(weights.shape) <= FEW + 1
    figure = _figure((3.2 + 0.72 * len(names), 2.0 + 0.42 * len(weights)) if few else (9.5, 8.5))
    axes = figure.add_subplot()
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="mean weight")
    _ticks(axes.xaxis, names=names, few=few, rotation=35 if few else 90)
    _ticks(axes.yaxis, names=scores.domains, few=few, rotation=0)
    axes.set(xlabel="part of", ylabel="test text")
    for (row, column), value in np.ndenumerate(weights if few else weights[:0]):
        axes.text(
            column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black"
        )
    return _png(figure)


def trade_off(groups: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]]) -> bytes:
    """Forgetting (nats) against average perplexity, a point per run; large: the mean of a group.

    A group is two sequences, forgetting and perplexity by run. One without forgetting (joint training,
    zero-shot) is a line at its mean perplexity.
    """
    figure = _figure((8.5, 4.8))
    axes = figure.add_subplot()
    levels = {}
    for place, (name, values) in enumerate(groups.items()):
        x, y = np.array(values, float)
        there, measured = np.isfinite(x) & np.isfinite(y), np.isfinite(y)
        if there.any():
            style = {"color": SERIES[place % 6], "marker": MARKERS[place % len(MARKERS)]}
            _points(axes, x[there], y[there], label=_literal(name, width=44), style=style)
        elif measured.any():
            levels[name] = float(y[measured].mean())
    axes.margins(0.12)
    _levels(axes, levels)
    axes.set(xlabel="forgetting FG (nats; left is better)", ylabel="average perplexity LC (down is better)")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, markerscale=0.7, labelspacing=0.8)
    return _png(figure)


def _points(axes: Axes, x: np.ndarray, y: np.ndarray, *, label: str, style: Mapping[str, str]) -> None:
    """The runs of a group, and their mean as a large hollow mark."""
    axes.scatter(x, y, s=24, alpha=0.7, linewidths=0, **style)
    hollow = {"facecolors": "none", "edgecolors": style["color"], "linewidths": 2}
    axes.scatter(x.mean(), y.mean(), s=130, marker=style["marker"], label=label, **hollow)


def _levels(axes: Axes, levels: Mapping[str, float]) -> None:
    """A line per level; one that would press the points together is only named."""
    heights = list(levels.values()) or [0.0]
    low, high = axes.get_ylim() if axes.collections else (min(heights), max(heights))
    bottom, top = low - 0.6 * (high - low), high + 0.6 * (high - low)
    for place, (name, level) in enumerate(levels.items()):
        label = f"{_literal(name, width=30)}: {perplexity(level)}"
        style = {"color": "black", "linewidth": 1.2, "linestyle": DASHES[place % 3]}
        if bottom <= level <= top:
            axes.axhline(level, label=label, **style)
        else:
            axes.plot([], [], label=f"{label} (off the axis)", **style)


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=130, layout="constrained")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _diverging() -> Colormap:
    import matplotlib

    return matplotlib.colormaps["RdBu_r"].with_extremes(bad="0.75")


def _limits(change: np.ndarray) -> dict[str, float]:
    """Limits around 0 that a few outliers do not widen."""
    size = np.abs(change[np.isfinite(change)])
    bound = float(np.percentile(size, 99)) if size.size > (FEW + 1) ** 2 else float(size.max(initial=0))
    return {"vmin": -(bound or 1.0), "vmax": bound or 1.0}


def _literal(name: str, *, width: int) -> str:
    """The name as matplotlib shows it unchanged; a dollar sign would start a formula."""
    return shortened(name, width=width).replace("$", r"\$")


def _ticks(axis: Axis, *, names: Sequence[str], few: bool, rotation: int) -> None:
    """Names as labels; of many, at most 30 and the last."""
    step = 1 if few else -(-len(names) // 30)
    places = [*range(0, len(names) - 1 - step // 2, step), len(names) - 1]
    axis.set_ticks(places, [_literal(names[place], width=22) for place in places])
    aligned = {"rotation_mode": "anchor", "ha": "right"} if 0 < rotation < 90 else {}
    for label in axis.get_ticklabels():
        label.set(rotation=rotation, fontsize=9 if few else 7, **aligned)


def _annotate(axes: Axes, *, scores: Scores, strong: float) -> None:
    change = scores.matrix - scores.matrix[:1]
    for (row, column), value in np.ndenumerate(perplexities(scores)):
        colour = "white" if abs(change[row, column]) > strong else "black"
        axes.text(column, row, perplexity(value), ha="center", va="center", fontsize=9, color=colour)


def _mark_own(axes: Axes, *, scores: Scores, few: bool) -> None:
    """A frame round each domain's own row: what is below it was measured after the domain was learned."""
    from matplotlib.patches import Rectangle

    for name in scores.learned:
        corner = (scores.domains.index(name) - 0.5, scores.rows.index(name) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=2 if few else 0.7))


def _each(axes: Axes, losses: np.ndarray, *, names: Sequence[str]) -> dict[str, tuple[np.ndarray, str]]:
    """A line per domain; gives what the labels at their ends need."""
    ends = {}
    for place, name in enumerate(names):
        colour, dashes = SERIES[place % 6], DASHES[place // 6]
        axes.plot(losses[place], color=colour, linestyle=dashes, marker=".", linewidth=1.6)
        ends[name] = (losses[place], colour)
    return ends


def _crowd(axes: Axes, losses: np.ndarray) -> dict[str, tuple[np.ndarray, str]]:
    """Thin grey lines and their median."""
    axes.plot(losses.T, color="0.6", linewidth=0.4, alpha=0.5, marker=_dot(losses))
    middle = np.nanmedian(np.where(np.isnan(losses), np.inf, losses), axis=0)
    axes.plot(middle, color=SERIES[0], linewidth=2.5, zorder=4, marker=_dot(losses))
    return {f"median of {len(losses)}": (middle, SERIES[0])}


def _dot(losses: np.ndarray) -> str:
    """A marker where there is a single stage and hence no line."""
    return "." if losses.shape[1] == 1 else ""


def _own_stages(axes: Axes, *, scores: Scores, losses: np.ndarray, large: bool) -> None:
    for place, name in enumerate(scores.learned):
        column, row = scores.domains.index(name), scores.rows.index(name)
        label = "own stage" if place == 0 else None
        style = {"s": 70, "linewidths": 1.8} if large else {"s": 5, "linewidths": 0.7}
        axes.scatter(
            row, losses[column, row], facecolors="none", edgecolors="black", zorder=5, label=label, **style
        )
    if scores.learned:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, markerscale=1 if large else 2)


def _plain_logarithm(axis: Axis, losses: np.ndarray) -> None:
    """Ticks written out, also where the values span less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    known = losses[np.isfinite(losses)]
    narrow = known.max(initial=0) < 5 * known.min(initial=np.inf)
    axis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _direct_labels(axes: Axes, ends: Mapping[str, tuple[np.ndarray, str]]) -> None:
    """Names at the right of their lines, moved apart where they would overlap."""
    low, high = np.log(axes.get_ylim())
    known = {name: line[-1] for name, (line, _) in ends.items() if np.isfinite(line[-1])}
    wanted = {name: (np.log(value) - low) / (high - low) for name, value in known.items()}
    for name, height in _apart(wanted, gap=0.052).items():
        axes.annotate(
            _literal(name, width=22),
            xy=(1, wanted[name]),
            xytext=(1.06, height),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=ends[name][1],
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def _apart(wanted: Mapping[str, float], *, gap: float) -> dict[str, float]:
    """Heights at least `gap` apart, close to the wanted ones, within 0..1 where there is room."""
    placed: dict[str, float] = {}
    below = -np.inf
    for name in sorted(wanted, key=wanted.get):
        below = placed[name] = max(wanted[name], below + gap)
    above = 1 + gap
    for name in reversed(list(placed)):
        above = placed[name] = min(placed[name], above - gap)
    return placed
