"""What a method keeps of each domain inside the model: importances, masks, gates, from `diagnostics/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cpt.evaluation.scores import Scores
from cpt.reporting.drawing import FEW, draw_heat, png, sequential, write_numbers
from cpt.reporting.frames import shorten
from cpt.reporting.overlap import measure_overlap, read_stage
from cpt.reporting.page import Block
from cpt.reporting.plots import HeatMap, draw_heat_maps

KINDS = {  # what the names of arrays begin with
    "importance": "importance, accumulated",
    "measured": "importance of each domain",
    "chosen": "share of steps in which a row was updated",
}
INSIDE = (
    "Mean over the units of each part of the model, after each stage; from `diagnostics/`. Similarity of two "
    "domains: the soft Jaccard index of what the method chose for each."
)
MOST = 40  # parts of the model that are shown


def build_inside_blocks(scores: Scores, folder: Path) -> list[Block]:
    """A picture of the means by part of the model, and one of how far domains share what was chosen; nothing
    of a method that keeps neither."""
    stages = {row: read_stage(folder, number) for number, row in enumerate(scores.rows) if number}
    blocks = [draw_means(kind, {row: each for row, each in stages.items() if each}) for kind in KINDS]
    shared = measure_overlap(folder, scores)
    if shared:
        maps = {title: HeatMap(values, names, names) for title, (names, values) in shared.items()}
        picture = draw_heat_maps(maps, label="similarity of two domains")
        blocks.append(Block(title="What domains share inside the model", picture=picture, name="overlap"))
    there = [block for block in blocks if block.picture]
    return [Block(title="Inside the model", lines=[INSIDE]), *there] if there else []


def draw_means(kind: str, stages: Mapping[str, Mapping[str, np.ndarray]]) -> Block:
    """A heat map, part of the model by stage; nothing where no stage has such arrays of one size."""
    found = {
        row: {
            name.partition("/")[2]: float(np.mean(values))
            for name, values in each.items()
            if is_of(kind, name, values)
        }
        for row, each in stages.items()
    }
    rows = [row for row, means in found.items() if means]
    parts = list(dict.fromkeys(part for row in rows for part in found[row]))
    if not rows:
        return Block()
    values = np.array([[found[row].get(part, np.nan) for row in rows] for part in parts])
    shown = values[:MOST]
    few = len(rows) <= FEW and len(shown) <= MOST
    names = [shorten(part.removeprefix("model."), width=34) for part in parts[:MOST]]
    how = {"cmap": sequential(), "vmin": 0, "few": few, "label": "mean", "margin": 4.2}
    drawn, axes = draw_heat(shown, rows=names, columns=rows, **how)
    axes.set(xlabel="after stage")
    top = np.nanmax(shown) if np.isfinite(shown).any() else 1.0
    write_numbers(axes, shown, white=shown > 0.6 * top, most=FEW + 1)
    more = [f"{len(parts) - MOST} more parts are not shown."] if len(parts) > MOST else []
    told = f"{KINDS[kind]}: mean {np.nanmean(values[:, 0]):.3f} after {rows[0]}, "
    told += f"{np.nanmean(values[:, -1]):.3f} after {rows[-1]}."
    title = KINDS[kind][0].upper() + KINDS[kind][1:]
    return Block(title=title, lines=more, picture=png(drawn, told=told), name=f"inside_{kind}")


def is_of(kind: str, name: str, values: np.ndarray) -> bool:
    return name.startswith(f"{kind}/") and values.size > 0 and bool(np.isfinite(values).all())
