"""The methods on 120 domains, in similar and in random order:
`python benchmarks/studies/m2d2_mini.py --root FOLDER` writes docs/studies/m2d2.md.

FOLDER holds a folder per domain with {train,valid,test}.txt, and general/, the pre-training text of the base
model. Rerun the same command to resume."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import claims
import numpy as np
import study

from cpt.evaluation.statistics import compare_pairs
from cpt.reporting.drawing import choose_series_style, escape_label, make_figure, make_png
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown
from cpt.reporting.sections import RunGroup, RunSection

ORDERS_AND_SEEDS = ["order=similar,random", "seed=0,1"]
SWEEPS = (
    ["method=ncl,one,kd,lora,demix"],
    ["method=ewc", "method.merge=decay"],
    ["method=replay", "method.mixture.past_ratio=0.05"],
)
ORDERS = ("similar", "random")
SHOWN = ("CPT", "LC", "FG", "general_drift")
PICTURE = "m2d2-forgetting.png"
SMOOTHED = 15  # domains of a moving mean
Losses = Mapping[tuple[str, int], float]  # nats by domain and seed


@dataclass(frozen=True)
class Studied:
    """The runs of a group by order; `similar` is the one that is not drawn by the seed."""

    group: RunGroup
    similar: tuple[str, ...]

    def runs(self, order: str) -> list[MeasuredRun]:
        return [run for run in self.group.runs if (order_of(run) == self.similar) == (order == "similar")]

    def losses(self, order: str, row: str) -> Losses:
        """Loss on each domain of the base, just after it was learned (`own`), or of the last model."""
        by_domain_and_seed = {}
        for run in self.runs(order):
            for name, loss in losses(run, row).items():
                by_domain_and_seed[name, run.pair[1]] = loss
        return by_domain_and_seed


def order_of(run: MeasuredRun) -> tuple[str, ...]:
    return tuple(run.scores.run["order"])


def find_similar(orders: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The order that most runs have: a random one is one seed's alone."""
    similar, _ = Counter(orders).most_common(1)[0]
    return similar


def name_orders(orders: Sequence[Sequence[str]]) -> list[str]:
    similar = find_similar(map(tuple, orders))
    return ["similar" if tuple(order) == similar else "random" for order in orders]


def losses(run: MeasuredRun, row: str) -> dict[str, float]:
    scores = run.scores
    if row == "own":
        return scores.diagonal
    return {
        name: float(scores.matrix[{"base": 0, "last": -1}[row], scores.domains.index(name)])
        for name in scores.learned
    }


def main() -> None:
    options = study.read_arguments("m2d2_mini", str(__doc__))
    study.make_study(
        options,
        "m2d2_mini",
        [[*ORDERS_AND_SEEDS, *sweep] for sweep in SWEEPS],
        page="m2d2",
        parts=parts,
        name_orders=name_orders,
    )


def parts(section: RunSection) -> Iterator[str]:
    recorded_orders = [
        order_of(run) for run in section.runs if run.scores.similarity
    ]  # not of published ones
    similar = find_similar(recorded_orders or map(order_of, section.runs))
    groups = {group.name: Studied(group, similar) for group in section.groups}
    (study.IMAGES / PICTURE).write_bytes(draw_places(groups))
    first = section.runs[0].scores
    yield (
        f"{len(section.runs)} runs in {len(groups)} groups, {len(first.learned)} domains, "
        f"{first.tokens_read[1]:,} tokens per domain. There are two seeds of each order, "
        "too few for a test: the table of claims shows "
        "the range over runs. Intervals of the last table are over fields, of the mean over seeds: they "
        "generalize to other fields, not to other seeds."
    )
    yield f"![Final forgetting by position in the order](../images/{PICTURE})"
    for block in (tabulate_findings(groups), tabulate_levels(groups), tabulate_orders(groups)):
        yield format_markdown(block, picture="")


def tabulate_findings(groups: Mapping[str, Studied]) -> Block:
    """Yildiz et al., TMLR 2025, with GPT-2: their findings, here with a tiny one.

    Fields of one run share its weights and are no independent pairs. The unit is therefore a run, with the
    mean over its fields; of so few runs there is no test, but the range."""
    ncl = groups["ncl"]
    individual = groups["one"]
    cells = [
        tabulate_finding(
            "sequential training beats individual training on each domain (CPT below FT)",
            mean_by_run(ncl, "own"),
            mean_by_run(individual, "own"),
            direction=-1,
        ),
        tabulate_finding(
            "individual training beats the base model (FT below ZS)",
            mean_by_run(individual, "own"),
            mean_by_run(individual, "base"),
            direction=-1,
        ),
        tabulate_finding(
            "random order has the lower final loss (LC)",
            mean_by_seed(ncl, "random", "last"),
            mean_by_seed(ncl, "similar", "last"),
            direction=-1,
        ),
        tabulate_finding(
            "similar order has the lower loss just after training (CPT)",
            mean_by_seed(ncl, "similar", "own"),
            mean_by_seed(ncl, "random", "own"),
            direction=-1,
        ),
    ]
    for order in ORDERS:
        second_half, first_half = forgotten_by_half(ncl.runs(order))
        text = f"later checkpoints forget more of the previous eight domains, {order} order"
        cells.append(tabulate_finding(text, second_half, first_half, direction=1))
    head = ["claim", "difference, mean over runs", "lowest and highest run", "runs in the claimed direction"]
    return Block(title="Published claims", head=head, cells=cells, num_word_columns=2)


def tabulate_finding(
    text: str, values: Mapping[Hashable, float], baseline: Mapping[Hashable, float], *, direction: int
) -> list[str]:
    """A row of the table of claims: values minus baseline over the runs that both have, in nats.

    `direction` is the sign of the difference that was claimed."""
    differences = [values[run] - baseline[run] for run in values if run in baseline]
    agreeing = sum(difference * direction > 0 for difference in differences)
    return [
        text,
        claims.format_nats(float(np.mean(differences))),
        f"{claims.format_nats(min(differences))}, {claims.format_nats(max(differences))}",
        f"{agreeing} of {len(differences)}",
    ]


def mean_by_run(studied: Studied, row: str) -> dict[Hashable, float]:
    """The mean loss over fields of each run, in nats, by its order and seed."""
    means: dict[Hashable, float] = {}
    for order in ORDERS:
        for seed, mean in mean_by_seed(studied, order, row).items():
            means[order, seed] = mean
    return means


def mean_by_seed(studied: Studied, order: str, row: str) -> dict[Hashable, float]:
    """The mean loss over fields of each run of an order, in nats, by its seed."""
    return {run.pair[1]: float(np.mean([*losses(run, row).values()])) for run in studied.runs(order)}


def mean_by_field(studied: Studied, order: str, row: str) -> dict[Hashable, float]:
    """The mean loss over seeds on each field, in nats."""
    by_field: dict[Hashable, list[float]] = {}
    for (field, _), loss in studied.losses(order, row).items():
        by_field.setdefault(field, []).append(loss)
    return {field: float(np.mean(values)) for field, values in by_field.items()}


def forgotten_by_half(runs: Sequence[MeasuredRun]) -> tuple[dict[Hashable, float], dict[Hashable, float]]:
    """Forgetting, nats, of the domains before a stage that were measured then: means over the stages in the
    second half of the order, and over those in the first, by seed."""
    second_half: dict[Hashable, float] = {}
    first_half: dict[Hashable, float] = {}
    for run in runs:
        scores = run.scores
        just_learned = list(scores.diagonal.values())
        forgetting = []
        for row in range(2, len(scores.rows) - 1):
            losses_before = scores.matrix[row, : row - 1]
            if np.isfinite(losses_before).any():
                forgetting.append(float(np.nanmean(losses_before - just_learned[: row - 1])))

        middle = -(-len(forgetting) // 2)
        first_half[run.pair[1]] = float(np.mean(forgetting[:middle]))
        second_half[run.pair[1]] = float(np.mean(forgetting[middle:]))
    return second_half, first_half


def tabulate_levels(groups: Mapping[str, Studied]) -> Block:
    """The mean over seeds and domains of each metric."""
    cells = []
    for (name, studied), order in product(groups.items(), ORDERS):
        runs = studied.runs(order)
        if runs:
            row = [name, order]
            for metric in SHOWN:
                row.append(show_metric([run.scores.metrics.get(metric) for run in runs]))
            cells.append(row)
    head = ["method", "order", "just trained", "final", "forgetting", "general text"]
    return Block(title="Losses in nats: mean over domains", head=head, cells=cells, num_word_columns=2)


def show_metric(metrics: Sequence[Mapping | None]) -> str:
    values = [metric["nats"] for metric in metrics if metric is not None and metric["nats"] is not None]
    return f"{np.mean(values):.3f}" if len(values) == len(metrics) else "–"


def tabulate_orders(groups: Mapping[str, Studied]) -> Block:
    """Random minus similar order for each method, over fields, of the means over seeds."""
    cells = []
    for name, studied in groups.items():
        cells.append([name])
        for row in ("last", "own"):
            similar = mean_by_field(studied, "similar", row)
            difference = compare_pairs(mean_by_field(studied, "random", row), similar)
            interval = f"[{difference.low:+.4f}, {difference.high:+.4f}]"
            cells[-1].append(f"{difference.mean:+.4f} {interval}" if difference.n else "–")
    title = "Random minus similar order, nats [95 % interval over fields]"
    return Block(title=title, head=["method", "final (LC)", "just trained (CPT)"], cells=cells)


def draw_places(groups: Mapping[str, Studied]) -> bytes:
    """How much of each domain is forgotten at the end, by its position in the order."""
    figure = make_figure((11, 4.2))
    handles: dict[str, Any] = {}
    for axes, order in zip(figure.subplots(1, 2, sharey=True), ORDERS, strict=True):
        for number, (name, studied) in enumerate(groups.items()):
            runs = [] if studied.group.trains_from_base else studied.runs(order)
            if not runs:
                continue
            lost = np.mean([list(forgotten(run).values()) for run in runs], axis=0)
            moving_mean = np.convolve(lost, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
            axes.plot(
                np.arange(len(moving_mean)) + SMOOTHED // 2 + 1,
                moving_mean,
                label=escape_label(name, width=30),
                color=choose_series_style(number).colour,
                linestyle=choose_series_style(number).dashes,
            )
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set(title=f"{order} order", xlabel=f"position in the order (moving mean of {SMOOTHED})")
        lines, labels = axes.get_legend_handles_labels()
        handles.update(zip(labels, lines, strict=True))

    figure.axes[0].set_ylabel("final forgetting, nats")
    axes.legend(handles.values(), handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    means = "; ".join(f"{name}: {np.mean(mean_lost(studied)):+.3f} nats" for name, studied in groups.items())
    return make_png(figure, description=f"Final forgetting by position in the order. Means: {means}")


def forgotten(run: MeasuredRun) -> dict[str, float]:
    """What the last model has lost on each domain since it was learned."""
    just_learned = losses(run, "own")
    return {name: loss - just_learned[name] for name, loss in losses(run, "last").items()}


def mean_lost(studied: Studied) -> list[float]:
    """What each run has lost on each of its domains."""
    lost: list[float] = []
    for run in studied.group.runs:
        lost.extend(forgotten(run).values())
    return lost


if __name__ == "__main__":
    main()
