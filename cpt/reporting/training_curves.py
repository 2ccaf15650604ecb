"""How a run was trained: loss, gradient norm, rate and pace over all tokens, from its metrics.csv."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cpt.evaluation.scores import Scores
from cpt.reporting.drawing import FEW, SERIES, figure, literal, png
from cpt.reporting.page import Block, few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "lm": "loss (nats)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens/s",
}
LOGARITHMIC = ("grad_norm",)
PLACE = "tokens"  # what a stage had read by a step
EXPLAINED = (
    "From metrics.csv, a point each `trainer.log_every_n_steps`: the loss on the batch of that step, the "
    "norm of the gradient before clipping, the rate of the step, the pace since the point before. Upright "
    "lines: a stage begins."
)


class Curve(NamedTuple):
    """Values [n] over the tokens that the run had read by then [n]."""

    tokens: np.ndarray
    values: np.ndarray


def build_training_block(scores: Scores, folder: Path) -> Block:
    """Nothing of a run without curves."""
    stages = place_curves(read_curves(folder / "metrics.csv"), scores)
    if not any(curves for curves in stages.values()):
        return Block()
    missing = [name for name in scores.learned if not stages.get(name)]
    lines = [EXPLAINED, *([f"Without a point: {few(missing, between=', ')}."] if missing else [])]
    return Block(
        title="Training",
        lines=lines,
        picture=draw_training(stages, borders(scores)),
        head=["stage", "points", "first loss", "last loss", "gradient norm, median", "tokens/s, median"],
        cells=[[name, *describe_stage(curves)] for name, curves in stages.items() if curves],
        name="training",
        folded=f"{len(stages)} stages",
    )


def read_curves(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """`train/TERM/STAGE` of metrics.csv by stage, term and step; of two lines with one step the later counts.
    A file that is missing has none, and a line that is torn is left out."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in csv.reader(lines):
        kind, _, rest = line[1].partition("/") if len(line) == 3 else ("", "", "")
        term, _, stage = rest.partition("/")
        if kind == "train" and stage:
            try:
                found[stage][term][int(line[0])] = float(line[2])
            except ValueError:
                continue
    return found


def place_curves(
    found: Mapping[str, Mapping[str, Mapping[int, float]]], scores: Scores
) -> dict[str, dict[str, Curve]]:
    """By stage, in the order learned, and by term, over the tokens of the whole run. Where a step's tokens
    were not written down, the stage's are spread over its steps."""
    starts, placed = borders(scores), {}
    for name in scores.learned:
        terms = found.get(name, {})
        begin, end = starts.get(name, (0.0, 0.0))
        last = max((step for values in terms.values() for step in values), default=0) + 1
        noted = terms.get(PLACE, {})
        placed[name] = {
            term: Curve(
                np.array(
                    [begin + noted.get(step, (end - begin) * (step + 1) / last) for step in sorted(values)]
                ),
                np.array([values[step] for step in sorted(values)]),
            )
            for term, values in terms.items()
            if term != PLACE and values
        }
    return placed


def borders(scores: Scores) -> dict[str, tuple[float, float]]:
    """Where each learned stage begins and ends, in tokens; each is as long as any where they are unknown."""
    read = list(scores.seen) if any(scores.seen) else [0, *[1] * (len(scores.rows) - 1)]
    ends = np.cumsum([*read, *[0] * (len(scores.rows) - len(read))]).tolist()
    return {
        row: (ends[place - 1], ends[place])
        for place, row in enumerate(scores.rows)
        if place and row in scores.learned
    }


def describe_stage(curves: Mapping[str, Curve]) -> list[str]:
    def tell(term: str, how: str) -> str:
        if term not in curves:
            return "–"
        known = curves[term].values[np.isfinite(curves[term].values)]
        return how.format(np.median(known)) if known.size else "–"

    losses = curves["lm"].values if "lm" in curves else []
    ends = [f"{losses[place]:.4f}" for place in (0, -1)] if len(losses) else ["–"] * 2
    return [str(len(losses)), *ends, tell("grad_norm", "{:.3g}"), tell("tokens_per_s", "{:,.0f}")]


def draw_training(
    stages: Mapping[str, Mapping[str, Curve]], ends: Mapping[str, tuple[float, float]]
) -> bytes:
    """A panel for each of PANELS that some stage has, over one axis of tokens."""
    shown = [term for term in PANELS if any(term in curves for curves in stages.values())]
    drawn = figure((10, 1.2 + 1.7 * max(1, len(shown))))
    grid = drawn.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    for term, axes in zip(shown, grid, strict=False):
        draw_panel(axes, term, {name: each[term] for name, each in stages.items() if term in each})
        for begin, _ in ends.values():
            axes.axvline(begin, color="0.75", linewidth=0.8, zorder=0)
    name_stages(grid[0], ends)
    grid[-1].set_xlabel("tokens read by the optimizer steps, all stages")
    told = [f"{name} {curves['lm'].values[-1]:.3f}" for name, curves in stages.items() if "lm" in curves]
    return png(drawn, told=f"Loss at the last point of each stage: {few(told, between='; ')}.")


def draw_panel(axes: Axes, term: str, curves: Mapping[str, Curve]) -> None:
    for curve in curves.values():
        dot = "." if len(curve.values) < 3 else ""
        axes.plot(curve.tokens, curve.values, color=SERIES[0], linewidth=1.1, marker=dot)
    values = np.concatenate([curve.values for curve in curves.values()])
    if term in LOGARITHMIC and (values[np.isfinite(values)] > 0).all() and values.size:
        axes.set_yscale("log")
    axes.set_ylabel(PANELS[term], fontsize=9)
    axes.grid(axis="y", color="0.92")


def name_stages(axes: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """The names of the stages above the picture; of many stages some."""
    names: Sequence[str] = list(ends)
    step = 1 if len(names) <= FEW else -(-len(names) // FEW)
    above = axes.secondary_xaxis("top")
    above.set_xticks([sum(ends[name]) / 2 for name in names[::step]])
    above.set_xticklabels([literal(name, width=18) for name in names[::step]], fontsize=8)
    above.tick_params(length=0)
