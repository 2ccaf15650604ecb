"""The tables that the page of a run, the console and the model card share, as formatted cells."""

from __future__ import annotations

from math import isnan
from typing import NamedTuple

import numpy as np
import yaml
from pandas import DataFrame

from cpt.core.messages import count_noun
from cpt.evaluation.metrics import METRICS, TITLES
from cpt.evaluation.scores import Scores
from cpt.reporting.chat_tables import list_chat_tiles
from cpt.reporting.formats import (
    MISSING,
    Format,
    format_decimals,
    format_interval,
    format_or_dash,
    format_percent,
    format_perplexity,
    format_signed,
    format_thousandths,
)
from cpt.reporting.page import TEMPLATES

Cells = list[list[str]]
FORMATS: dict[str, Format] = {  # by unit of a loss
    "nats": format_decimals,
    "perplexity": format_perplexity,
    "bits_per_byte": format_decimals,
}
METRIC_HEAD = ("metric", "meaning", "formula", "nats", "perplexity", "bits per byte")
TILES_HEAD = ("", "mean", "95 % interval", "", "meaning")
NO_INTERVAL = "no interval"


class Tile(NamedTuple):
    """How a metric is shown, and the words for intervals above 0, below 0 and around it."""

    title: str
    meaning: str
    word_if_above: str
    word_if_below: str
    word_if_around: str

    def choose_word(self, low: float, high: float) -> str:
        """The word for an interval."""
        if low > 0:
            return self.word_if_above
        if high < 0:
            return self.word_if_below
        return self.word_if_around


def load_tiles() -> dict[str, Tile]:
    """The tiles of tiles.yaml, by metric."""
    tiles = {}
    texts_by_metric = yaml.safe_load((TEMPLATES / "tiles.yaml").read_text(encoding="utf-8"))
    for name, (title, meaning, word_if_above, word_if_below, word_if_around) in texts_by_metric.items():
        tiles[name] = Tile(
            title=title,
            meaning=meaning,
            word_if_above=word_if_above,
            word_if_below=word_if_below,
            word_if_around=word_if_around,
        )
    return tiles


TILES = load_tiles()


def list_tiles(scores: Scores) -> Cells:
    """The cells of TILES_HEAD for each of TILES, and for chats where they were measured: title, mean in nats,
    interval, a word for the interval, and meaning."""
    cells = []
    for name, tile in TILES.items():
        metric = scores.metrics.get(name, {})
        value = metric.get("nats")
        low, high = metric.get("interval", {}).get("nats", (None, None))
        if value is None or isnan(value):
            cells.append([tile.title, MISSING, "", "not measured", tile.meaning])
            continue

        interval = format_interval(low, high, format_thousandths).strip() or NO_INTERVAL
        word = ""
        if scores.trains_from_base and name == "FG":
            # Each domain's model starts from the base and learns nothing after its domain: "no measurable
            # forgetting" would praise the method for what is so by construction.
            word = "a model per domain"
        elif interval != NO_INTERVAL:
            word = tile.choose_word(low, high)
        mean = f"{format_thousandths(value)} nats"
        cells.append([tile.title, mean, interval, word, tile.meaning])
    return [*cells, *list_chat_tiles(scores)]


def describe_quantization(scores: Scores) -> str:
    """What quantization costs the base, on the texts that were scored before and after; empty without it."""
    losses = []
    for text, before in scores.unquantized.items():
        after = scores.nll[0][scores.domains.index(text)]
        if before is not None and after is not None:
            losses.append((before, after))
    if not losses:
        return ""
    before_mean, after_mean = np.mean(losses, axis=0).tolist()
    kind = scores.numerics.get("quantization", "few bits")
    difference = format_signed(after_mean - before_mean)
    return (
        f"Quantization of the base ({kind}): {format_thousandths(before_mean)} nats before, "
        f"{format_thousandths(after_mean)} after ({difference}), mean of {count_noun(len(losses), 'text')}."
    )


def format_cells(table: DataFrame, format_value: Format, deviations: np.ndarray | None = None) -> Cells:
    """Each row's name and its values, with their deviations where these are known."""
    cells = []
    for name, values in zip(table.index, table.to_numpy().tolist(), strict=True):
        cells.append([name, *(format_or_dash(value, format_value) for value in values)])
    if deviations is not None:
        for row, column in np.argwhere(np.isfinite(deviations)).tolist():
            cells[row][1 + column] += f" ± {format_value(deviations[row, column])}"
    return cells


def format_metric(scores: Scores, name: str) -> list[str]:
    """The cells of METRIC_HEAD; dashes where no term was measured, the count of terms if some are missing."""
    metric = scores.metrics[name]
    intervals = metric.get("interval", {})
    title = TITLES.get(name, name)
    num_measured, num_terms = metric.get("terms", (None, None))
    if num_terms:
        title += f" ({num_measured:,} of {num_terms:,})"

    cells = []
    for unit, format_value in FORMATS.items():
        low, high = intervals.get(unit, (None, None))
        if num_measured == 0:
            cells.append(MISSING)
        else:
            text = format_or_dash(metric[unit], format_value)
            cells.append(text + format_interval(low, high, format_value))
    return [title, METRICS[name].meaning, METRICS[name].formula, *cells]


def format_answers(scores: Scores, shares: DataFrame) -> Cells:
    """The rows in which tasks were evaluated, and what a guess and the most frequent answer reach."""
    cells = format_cells(shares.dropna(how="all"), format_percent)
    for name in ("chance", "majority"):
        levels = [task[name] for task in scores.answers["tasks"].values()]
        table = DataFrame([levels], [name], dtype=float)
        if table.notna().any(axis=None):
            cells += format_cells(table, format_percent)
    return cells
