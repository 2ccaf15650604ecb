"""Published numbers in addition to those of our runs, with the differences. The files are in
benchmarks/results/published, which is installed within the package."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpt.core.config import PACKAGE
from cpt.reporting.compare import MEASURES, format_spread, measure_spreads
from cpt.reporting.frames import format_interval, percent, split_variant
from cpt.reporting.load_runs import RunGroup, RunSection
from cpt.reporting.page import Block

BESIDE = PACKAGE.parent / "benchmarks" / "results" / "published"  # in a checkout
PUBLISHED = PACKAGE / "published" if (PACKAGE / "published").is_dir() else BESIDE
POINTS = "{:.2f}".format
OF_THE_MACHINE = (  # options that no published number depends on
    *("strategy", "model.name_or_path", "endtask.splits", "trainer.accumulate_grad_batches"),
    *("trainer.eval_batch_size", "trainer.devices", "trainer.num_nodes", "trainer.precision"),
)


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

    def fits(self, group: RunGroup) -> bool:
        wanted = self.settings or {}  # 1 is 1.0
        alike = all(run.settings.get(key) == wanted[key] for run in group.runs for key in wanted)
        given = {each.partition("=")[0] for run in group.runs for each in split_variant(run.scores.run)}
        ablated = {key for key in given - {*OF_THE_MACHINE} if not {key, f"method.{key}"} & wanted.keys()}
        return group.plain in self.groups and alike and not ablated


def read_published(given: str) -> list[PublishedRow]:
    """The rows of a file, or of one that is shipped. Raises ValueError for another name or form."""
    shipped = {path.stem: path for path in sorted(PUBLISHED.glob("*.json"))}
    try:
        whole = json.loads(shipped.get(given, Path(given)).read_text(encoding="utf-8"))
        return [PublishedRow(**row) for row in whole["rows"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        allowed = f"{', '.join(shipped)}, or a file like those in benchmarks/results/published"
        raise ValueError(f"--published {given} is invalid: {error!r}. Allowed: {allowed}") from error


def tabulate_published(sections: Sequence[RunSection], published: Sequence[PublishedRow]) -> Block:
    """A row for each measured value that was published; the interval is that of our mean."""
    shown, cells, used = {measure.key: measure.title for measure in MEASURES}, [], set[str]()
    pairs = ((group, row) for section in sections for group, row in product(section.groups, published))
    for group, row in ((group, row) for group, row in pairs if row.fits(group)):
        runs = [run for run in group.runs if row.orders is None or run.order in row.orders]
        table, page = f"table {row.table}" if row.table else "", f"page {row.page}" if row.page else ""
        place = ", ".join(filter(None, (row.source, table, page, row.note)))
        for key, value in row.values.items():
            if found := [run.values[key] for run in runs if key in run.values]:
                used.add(json.dumps(row))
                own = measure_spreads(np.array([found]), runs=len(runs))[0]
                low, high = (None if end is None else 100 * end - value for end in (own.low, own.high))
                difference = f"{100 * own.mean - value:+.2f}" + format_interval(low, high, POINTS)
                numbers = [format_spread(own, percent, bounds=False), POINTS(value), difference]
                cells.append([group.name, row.name, place, shown.get(key, f"{key} (%)"), *numbers])
    head = ("group", "published as", "source", "measure", "ours", "published", "difference [95 %]")
    lines = [f"{len(published) - len(used)} of {len(published)} published rows have no group here."]
    return Block(title="Published numbers", head=head, cells=cells, words=4, lines=lines)
