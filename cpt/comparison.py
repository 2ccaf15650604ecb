"""Runs side by side, from their `scores.json`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cpt import figures
from cpt.formatting import decimals, megabytes, perplexity
from cpt.labels import label, shared_values
from cpt.metrics import GENERAL, intransigence
from cpt.pages import Block, few
from cpt.scores import Scores

COLUMNS = ("group", "n", "LC (perplexity)", "CPT", "FG", "general drift", "intransigence")
COSTS = ("trained", "stored", "per domain", "domain known", "seconds")
SPREAD = "Mean ± standard deviation over n runs, in nats where not said; (k): over k runs of n."
STORED = (
    "trained: parameters; stored: what the method keeps beside the model; per domain: how much that grows "
    "with each; domain known: whether it must be, at test time."
)
ONE = "`one` learns every domain from the base: its CPT counts; its LC and FG compare models that never met."


def found(folders: Sequence[Path]) -> tuple[dict[Path, Scores], list[str]]:
    """The runs below the folders by their own folder, and a line for each that cannot be read."""
    runs, damaged = {}, []
    paths = {path.resolve(): path for folder in folders for path in folder.rglob("scores.json")}
    for path in sorted(paths.values()):
        try:
            runs[path.parent] = Scores.load(path)
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return runs, damaged


def compared(runs: Mapping[Path, Scores], *, damaged: Sequence[str]) -> list[Block]:
    """A block per set of domains and objective, then the runs that are unfinished or could not be read."""
    alike, unfinished = defaultdict(list), []
    for path, scores in runs.items():
        run = scores.run
        if run["finished"]:
            alike[run["objective"], *sorted(set(scores.domains) - {GENERAL})].append(scores)
        else:
            unfinished.append([str(path), label(scores.run), str(run["seed"]), scores.state])
    return [
        *(_comparison(each, title=f"{key[0]}: {few(key[1:], between=', ')}") for key, each in alike.items()),
        Block(title="Unfinished runs", head=("folder", "method", "seed", "state"), cells=unfinished, words=4),
        Block(title="Runs that could not be read", lines=damaged),
    ]


def _comparison(runs: Sequence[Scores], *, title: str) -> Block:
    """Groups of runs that differ in their seed alone, the best average perplexity first."""
    groups, points = _groups(runs), {}
    for name, group in groups.items():
        if group[0].run["method"] != "one":
            points[name] = _values(group, "FG"), _values(group, "LC", unit="perplexity")
    cells = [[name, str(len(group)), *_row(group, runs=runs)] for name, group in groups.items()]
    lines, picture = [SPREAD, STORED, *_notes(groups)], figures.trade_off(points) if points else b""
    return Block(title=title, lines=lines, head=COLUMNS + COSTS, cells=cells, picture=picture)


def _groups(runs: Sequence[Scores]) -> dict[str, list[Scores]]:
    """The runs by what was chosen: the method and what is laid over it, model and order where they differ."""
    models, orders = ([*dict.fromkeys(str(s.run[key]) for s in runs)] for key in ("model", "order"))
    shared, groups = shared_values(scores.run for scores in runs), defaultdict(list)
    for scores in sorted(runs, key=lambda scores: _values([scores], "LC")[0] or float("inf")):
        model = [scores.run["model"]] if len(models) > 1 else []
        order = [f"order {orders.index(str(scores.run['order'])) + 1}"] if len(orders) > 1 else []
        groups[", ".join([label(scores.run, shared=shared), *model, *order])].append(scores)
    return groups


def _notes(groups: Mapping[str, Sequence[Scores]]) -> list[str]:
    """What the names of groups stand for, and what keeps runs from being compared."""
    runs = [scores for group in groups.values() for scores in group]
    digests = {tuple(text.get("digest") for _, text in sorted(scores.texts.items())) for scores in runs}
    notes = [f"{name}: {few(group[0].run['order'])}" for name, group in groups.items() if ", order " in name]
    for name, group in groups.items():
        if len({scores.run["seed"] for scores in group}) < len(group):
            notes.append(f"{name}: runs with one seed; they are copies, or differ in more than their seed.")
    notes += ["The test texts differ between the runs."] if len(digests) > 1 else []
    return notes + ([ONE] if any(scores.run["method"] == "one" for scores in runs) else [])


def _row(group: Sequence[Scores], *, runs: Sequence[Scores]) -> list[str]:
    nats = [_values(group, name) for name in ("CPT", "FG", "general_drift")]
    against_one = [_against_one(scores, runs=runs) for scores in group]
    perplexities = _spread(_values(group, "LC", unit="perplexity"), show=perplexity)
    return [
        perplexities,
        *(_spread(values, show=decimals) for values in [*nats, against_one]),
        *_costs(group),
    ]


def _costs(group: Sequence[Scores]) -> list[str]:
    """What a group trains, stores, must be told and takes."""
    whole, known = "{:,.0f}".format, sorted({scores.needs_domain for scores in group})
    return [
        _spread([max(scores.trained, default=0) for scores in group], show=whole),
        _spread([scores.stored[-1] if scores.stored else None for scores in group], show=megabytes),
        _spread([scores.growth for scores in group], show=megabytes),
        " or ".join("yes" if each else "no" for each in known),
        _spread([scores.seconds for scores in group], show=whole),
    ]


def _values(group: Sequence[Scores], metric: str, *, unit: str = "nats") -> list[float | None]:
    return [scores.metrics.get(metric, {}).get(unit) for scores in group]


def _against_one(scores: Scores, *, runs: Sequence[Scores]) -> float | None:
    """Intransigence, against the run of `one` alone with this model and order, and this seed if there is
    one."""
    plain = {"method": "one", "mask": "none", "replay": "none"}
    sought, diagonal = {key: scores.run[key] for key in ("model", "order")} | plain, scores.diagonal
    alone = [other for other in runs if all(other.run[key] == value for key, value in sought.items())]
    if not diagonal or not alone or scores in alone:
        return None
    one = min(alone, key=lambda other: other.run["seed"] != scores.run["seed"]).diagonal
    return float(intransigence([*diagonal.values()], one=[one[name] for name in diagonal]))


def _spread(values: Sequence[float | None], *, show: Callable[[float], str]) -> str:
    """Mean ± standard deviation of the values there are, and how many of all if some are not."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    deviation = f" ± {show(statistics.stdev(known))}" if len(known) > 1 else ""
    return show(statistics.fmean(known)) + deviation + f" ({len(known)})" * (len(known) < len(values))
