"""The pictures of groups side by side, a heat map for each: see cpt.reporting.drawing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.reporting import drawing
from cpt.reporting.comparison.charts import Marks, list_told
from cpt.reporting.drawing import FEW, png
from cpt.reporting.figures import heaviest, mark_own, part_weights
from cpt.reporting.vectors import name_marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def matrices(runs: Mapping[str, Scores], *, marks: Marks | None = None) -> bytes:
    """The runs' matrices side by side, coloured on one scale by the change in nats against the base model; a
    domain's own stage is framed. A run that learned nothing is left out. `marks` says of what a group's marks
    stand for, here as in the others: its heat map."""
    shown = {name: scores for name, scores in runs.items() if len(scores.rows) > 1}
    changes = {name: scores.matrix - scores.matrix[:1] for name, scores in shown.items()}
    figure, grid = drawing.panels({name: each.shape for name, each in changes.items()}, each=0.36)
    everything = np.concatenate([np.ravel(each) for each in changes.values()] or [np.zeros(1)])
    scale = drawing.limits(everything)
    for (name, scores), axes in zip(shown.items(), grid, strict=False):
        how = {"cmap": drawing.diverging(), **scale}
        names = {"rows": scores.rows, "columns": scores.domains}
        image = drawing.panel(axes, changes[name], title=name, **names, **how)
        strong = np.abs(changes[name]) > 0.6 * scale["vmax"]
        if len(shown) <= FEW:
            drawing.write_numbers(axes, changes[name], white=strong, most=8, sign="+")
        mark_own(axes, scores=scores, columns=scores.domains)
        name_marks(name, [axes])
    _scale(figure, image if shown else None, label="change in nats per token\n(blue: better than base)")
    domains = {name: [text != GENERAL for text in scores.domains] for name, scores in shown.items()}
    ends = [f"{name} {changes[name][-1, domains[name]].mean():+.2f}" for name in shown]
    return png(
        figure, told=f"Change in nats of the last model, mean over domains. {list_told(ends)}", marks=marks
    )


def overlaps(matrices: Mapping[str, tuple[list[str], np.ndarray]], *, marks: Marks | None = None) -> bytes:
    """How far domains share what each uses, side by side: names [n] and similarities [n, n] in 0..1, each
    called as its group and a quantity, `das: importance`."""
    shapes = {name: values.shape for name, (_, values) in matrices.items()}
    figure, grid = drawing.panels(shapes, each=0.42)
    image, ends = None, []
    for (title, (names, values)), axes in zip(matrices.items(), grid, strict=False):
        how = {"cmap": drawing.sequential(), "vmin": 0, "vmax": 1}
        image = drawing.panel(axes, values, title=title, rows=names, columns=names, **how)
        drawing.write_numbers(axes, values, white=values > 0.6, most=9)
        name_marks(title.rpartition(": ")[0], [axes])
        others = values[~np.eye(len(names), dtype=bool)]
        if np.isfinite(others).any():
            ends.append(f"{title} {np.nanmean(others):.2f}")
    _scale(figure, image, label="similarity of two domains")
    return png(figure, told=f"Similarity between domains, mean over pairs. {list_told(ends)}", marks=marks)


def posteriors(groups: Mapping[str, Scores], *, marks: Marks | None = None) -> bytes:
    """The weights of the parts in the last models' scores of each text, side by side."""
    shown = {name: part_weights(scores) for name, scores in groups.items()}
    figure, grid = drawing.panels({name: weights.shape for name, (_, weights) in shown.items()}, each=0.42)
    image = None
    for (title, (parts, weights)), axes in zip(shown.items(), grid, strict=False):
        how = {"cmap": drawing.sequential(), "vmin": 0, "vmax": 1}
        texts = groups[title].domains
        image = drawing.panel(axes, weights, title=title, rows=texts, columns=parts, **how)
        drawing.write_numbers(axes, weights, white=weights > 0.6, most=9)
        name_marks(title, [axes])
    _scale(figure, image, label="mean weight of a part (column)\nin the score of a text (row)")
    told = [f"{name}: {heaviest(scores)}" for name, scores in list(groups.items())[:FEW]]
    return png(figure, told=" ".join(told) or "No group.", marks=marks)


def _scale(figure: Figure, image: object, *, label: str) -> None:
    """One colour scale beside all panels; none where there is no panel."""
    if image is not None:
        shown = [axes for axes in figure.axes if axes.get_visible()]
        how = {"aspect": 24, "shrink": min(1.0, 3.2 / figure.get_figheight()), "anchor": (0, 1)}
        figure.colorbar(image, ax=shown, label=label, **how)
