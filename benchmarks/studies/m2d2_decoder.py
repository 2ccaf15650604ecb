"""Twenty fields of science with a real decoder, in similar and in random order:
`python benchmarks/studies/m2d2_decoder.py --root FOLDER --model FOLDER` writes their part of
docs/studies/m2d2.md.

FOLDER of --root is that of m2d2_mini.py; --model is a decoder. Rerun the same command to resume."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
import study
from m2d2_mini import ORDERS, Studied, find_similar, name_orders, order_of, tabulate_levels

from cpt.reporting.drawing import choose_series_style, make_figure, make_png
from cpt.reporting.formats import format_signed
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown
from cpt.reporting.sections import RunSection

EXPERIMENT = "m2d2_decoder"
SWEEPS = (["order=similar,random", "seed=0,1", "method=ncl"],)
PICTURE = "m2d2-decoder.png"
LINE_STYLES = ("-", "--")  # of the seeds


class TransferPoint(NamedTuple):
    """Changes of the mean loss since the base after a number of stages, in nats per token."""

    stages: int
    change_on_earlier: float  # on the fields of these stages
    change_on_later: float  # on the fields that come after them; nan after the last


def main() -> None:
    options = study.read_arguments(EXPERIMENT, str(__doc__))
    study.make_study(options, EXPERIMENT, SWEEPS, page="m2d2", parts=write_parts, name_orders=name_orders)


def write_parts(section: RunSection) -> Iterator[str]:
    """The parts of the page: what was run, the figure, changes by stage, and the levels."""
    recorded_orders = [order_of(run) for run in section.runs if run.scores.similarity]
    similar = find_similar(recorded_orders or map(order_of, section.runs))
    groups = {group.name: Studied(group, similar) for group in section.groups}
    runs_by_order = {order: groups["ncl"].runs(order) for order in ORDERS}

    first = section.runs[0].scores
    yield (
        f"{len(section.runs)} runs of `ncl`, {len(first.learned)} fields, {first.tokens_read[1]:,} tokens "
        "per field: two seeds of each order, too few for a test."
    )
    (study.IMAGES / PICTURE).write_bytes(draw_transfer(runs_by_order))
    yield f"![Change on earlier and later fields by stage, in both orders](../images/{PICTURE})"
    yield format_markdown(tabulate_transfer(runs_by_order), picture="")
    yield format_markdown(tabulate_levels(groups), picture="")


def trace_transfer(run: MeasuredRun) -> list[TransferPoint]:
    """A point for each measured stage of a run at which all of its fields were scored."""
    scores = run.scores
    columns = [scores.domains.index(name) for name in scores.learned]
    losses = scores.matrix[:, columns]  # [row, field], fields in the order of learning
    points = []
    for row in range(1, len(losses)):
        change = losses[row] - losses[0]
        if np.isfinite(change).all():
            change_on_earlier = float(change[:row].mean())
            change_on_later = float(change[row:].mean()) if row < len(columns) else float("nan")
            points.append(TransferPoint(row, change_on_earlier, change_on_later))
    return points


def tabulate_transfer(runs_by_order: Mapping[str, Sequence[MeasuredRun]]) -> Block:
    """Changes after each measured stage, mean over seeds, with the lowest and highest of them."""
    cells = []
    for order, runs in runs_by_order.items():
        for points in zip(*map(trace_transfer, runs), strict=True):
            on_earlier = format_range([point.change_on_earlier for point in points])
            on_later = format_range([point.change_on_later for point in points])
            cells.append([order, str(points[0].stages), on_earlier, on_later])
    head = ["order", "fields learned", "earlier fields", "later fields"]
    return Block(title="Change of the loss since the base, nats", head=head, cells=cells)


def format_range(values: Sequence[float]) -> str:
    """Mean, and the lowest and highest value: `-0.110 [-0.120, -0.100]`."""
    if np.isnan(values).any():
        return "–"
    low = format_signed(min(values))
    high = format_signed(max(values))
    return f"{format_signed(float(np.mean(values)))} [{low}, {high}]"


def draw_transfer(runs_by_order: Mapping[str, Sequence[MeasuredRun]]) -> bytes:
    """Perplexity relative to the base on earlier and later fields, by the number of fields learned: a colour
    for each order, a kind of line for each seed."""
    figure = make_figure((11, 4.2))
    earlier_panel, later_panel = figure.subplots(1, 2, sharey=True)
    for number, (order, runs) in enumerate(runs_by_order.items()):
        colour = choose_series_style(number).colour
        runs_by_seed = sorted(runs, key=lambda run: run.pair[1])
        for run, line_style in zip(runs_by_seed, cycle(LINE_STYLES), strict=False):
            points = trace_transfer(run)
            stages = [point.stages for point in points]
            on_earlier = np.exp([point.change_on_earlier for point in points])
            on_later = np.exp([point.change_on_later for point in points])
            label = f"{order} order, seed {run.pair[1]}"
            earlier_panel.plot(stages, on_earlier, line_style, marker="o", color=colour, label=label)
            later_panel.plot(stages, on_later, line_style, marker="o", color=colour)

    for axes, title in ((earlier_panel, "earlier fields"), (later_panel, "later fields")):
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set(title=title, xlabel="fields learned")
    earlier_panel.set_ylabel("perplexity / that of the base")
    earlier_panel.legend(fontsize=8)
    return make_png(figure, description="Perplexity relative to the base on earlier and on later fields")


if __name__ == "__main__":
    main()
