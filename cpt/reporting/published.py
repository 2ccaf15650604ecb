"""Published numbers in addition to those of our runs, with the differences. The files are in
benchmarks/results/published, which is installed within the package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpt.core.config import PACKAGE
from cpt.core.messages import count_noun
from cpt.reporting.compare import format_spread
from cpt.reporting.contrasts import measure_spreads
from cpt.reporting.formats import format_interval, format_percent, split_variant
from cpt.reporting.measures import MEASURES
from cpt.reporting.page import Block
from cpt.reporting.sections import RunGroup, RunSection

IN_CHECKOUT = PACKAGE.parent / "benchmarks" / "results" / "published"
PUBLISHED = PACKAGE / "published" if (PACKAGE / "published").is_dir() else IN_CHECKOUT
MACHINE_OPTIONS = {  # on which no published number depends
    "strategy",
    "model.name_or_path",
    "endtask.splits",
    "trainer.accumulate_grad_batches",
    "trainer.eval_batch_size",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.precision",
}


class PublishedRow(NamedTuple):
    """Published numbers in percent, and the groups of runs that they are for; null: any."""

    name: str
    groups: Sequence[str]
    values: Mapping[str, float]  # by key of a measure
    source: str
    table: str | None
    page: int | None
    orders: Sequence[str] | None = None
    settings: Mapping[str, Any] | None = None
    note: str = ""

    @property
    def reference(self) -> str:
        """Where it was published: `Ke et al. (2023), table 2, page 7`."""
        parts = [self.source]
        if self.table:
            parts.append(f"table {self.table}")
        if self.page:
            parts.append(f"page {self.page}")
        parts.append(self.note)
        return ", ".join(part for part in parts if part)

    def fits(self, group: RunGroup) -> bool:
        """Whether a group of runs has the method and the settings of the published ones, and no others."""
        if group.label not in self.groups:
            return False
        settings = self.settings or {}
        for run in group.runs:
            if any(run.settings.get(key) != value for key, value in settings.items()):  # 1 is 1.0
                return False
            for value in split_variant(run.scores.run):
                option = value.partition("=")[0]
                is_published = option in settings or f"method.{option}" in settings
                if option not in MACHINE_OPTIONS and not is_published:
                    return False
        return True


def read_published(name: str) -> list[PublishedRow]:
    """The rows of a file, or of one that is shipped. Raises ValueError for another name or form."""
    shipped = {path.stem: path for path in sorted(PUBLISHED.glob("*.json"))}
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise ValueError(
            f"--published {name} is invalid: there is no such file. Allowed: {', '.join(shipped)}, or a file "
            f"like those in {PUBLISHED}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [PublishedRow(**row) for row in content["rows"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--published {name} is invalid: {error!r}. Allowed: {', '.join(shipped)}, or a file like those "
            f"in {PUBLISHED}"
        ) from error


def tabulate_published(sections: Sequence[RunSection], published: Sequence[PublishedRow]) -> Block:
    """A row for each measured value that was published; the interval is that of our mean."""
    cells = []
    measured_rows: set[str] = set()  # as texts: rows of a file may be equal
    for section in sections:
        for group in section.groups:
            for row in published:
                if row.fits(group):
                    row_cells = list(compare_group(group, row))
                    cells += row_cells
                    if row_cells:
                        measured_rows.add(repr(row))

    num_unmeasured = len(published) - len(measured_rows)
    row_count = count_noun(len(published), "published row")
    return Block(
        title="Published numbers",
        head=("group", "published as", "source", "measure", "ours", "published", "difference [95 %]"),
        cells=cells,
        num_word_columns=4,
        lines=[f"Without a group here: {num_unmeasured} of {row_count}."],
    )


def compare_group(group: RunGroup, row: PublishedRow) -> Iterator[list[str]]:
    """The cells of each published value that some run of the group has."""
    titles = {measure.key: measure.title for measure in MEASURES}
    runs = [run for run in group.runs if row.orders is None or run.order_name in row.orders]
    group_of_orders = replace(group, runs=runs)
    for key, value in row.values.items():
        values = group_of_orders.list_values(key)
        measured = [measured_value for measured_value in values if measured_value is not None]
        if not measured:
            continue
        spread = measure_spreads(np.array([measured]), num_runs=len(values))[0]
        difference = f"{100 * spread.mean - value:+.2f}"
        difference += format_interval(100 * spread.low - value, 100 * spread.high - value, format_points)
        yield [
            group.name,
            row.name,
            row.reference,
            titles.get(key, f"{key} (%)"),
            format_spread(spread, format_percent, with_interval=False),
            format_points(value),
            difference,
        ]


def format_points(value: float) -> str:
    return f"{value:.2f}"
