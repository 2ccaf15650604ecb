"""The report of one run, from its folder alone; `python -m cpt.report FOLDER [FOLDER...]` compares runs."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from pathlib import Path

from cpt.data.sources.base import GENERAL
from cpt.evaluation.conditions import conditions
from cpt.evaluation.conditions import describe_conditions as described_conditions
from cpt.evaluation.metrics import METRICS, UNITS, describe_metric
from cpt.evaluation.scores import Scores
from cpt.reporting import endtasks as endtask_report
from cpt.reporting import figures
from cpt.reporting.answers import build_answer_blocks, build_answer_moves, format_answers
from cpt.reporting.frames import decimals, label, megabytes, perplexity, pick_ends, shorten
from cpt.reporting.generated import build_generated_block
from cpt.reporting.inside import build_inside_blocks
from cpt.reporting.monitor import build_budget_block, build_monitor_block
from cpt.reporting.page import Block, align_columns, few, write_page
from cpt.reporting.probes import build_probe_block, format_probes
from cpt.reporting.training_curves import build_training_block

FORMULAS = (
    "L[i][j]: loss on test text j after i stages (0: the base), N domains, n stages learned, g general text. "
    "A metric in a unit is that of the matrix in this unit; a median is over the same terms. In "
    "brackets: 95 % bootstrap over documents."
)
MEDIANS = "medians: nats, perplexity, bits per byte"
MISSING = (
    "Not every cell of the matrix was measured (eval.rows, eval.columns). A metric is the mean of the terms "
    "that were: in brackets how many, of how many."
)


def write_report(folder: Path, scores: Scores | None = None) -> Path:
    """Writes report.md and report.html into a run folder, of these scores or those that stand there; gives
    the path of the latter."""
    scores, config = scores or Scores.load(Path(folder) / "scores.json"), Path(folder) / "config.yaml"
    matrix = Block(
        title="Perplexity on each test text (column) after each stage (row)",
        lines=["Framed: a domain's own stage. Colour: change against the base model."],
        picture=figures.heatmap(scores) if scores.rows else b"",
        name="matrix",
        head=["after", *scores.domains],
        cells=_format_matrix(scores),
        folded=f"{len(scores.rows)} x {len(scores.domains)} perplexities",
    )
    over = figures.stages(scores) if scores.rows else b""
    stages = Block(title="Perplexity over the stages", picture=over, name="stages")
    code = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    settings = Block(title="Config", code=code, folded=f"config.yaml, digest {scores.config_digest}")
    blocks = [_show_run(scores), matrix, stages, _show_parts(scores), _show_metrics(scores)]
    watched = [build_monitor_block(scores), build_budget_block(scores)]
    blocks[3:3] = [build_training_block(scores, Path(folder)), *watched]
    blocks += [_show_similarity(scores), build_generated_block(Path(folder))]
    moves = build_answer_moves(scores, Path(folder))
    blocks[1:1] = [*build_answer_blocks(scores), moves]  # where there are tasks, people look at these first
    blocks += [
        *endtask_report.build_endtask_blocks(scores, Path(folder)),
        build_probe_block(scores),
        endtask_report.build_compute_block(scores),
    ]
    blocks += [
        *build_inside_blocks(scores, Path(folder)),
        _show_rates(scores),
        _show_texts(scores),
        _show_seconds(scores),
        settings,
    ]
    return write_page(
        blocks, title=f"{scores.run['name']}: {label(scores.run)}", stem=Path(folder) / "report"
    )


def format_scores(scores: Scores) -> str:
    """For a console of 100 characters: perplexities and headlines; of many domains the first and last."""
    columns, rows = pick_ends(len(scores.domains)), pick_ends(len(scores.rows))
    names = [shorten(scores.domains[column], width=min(24, 86 // len(columns) - 2)) for column in columns]
    matrix = [
        [shorten(row[0], width=12), *(row[1:][column] for column in columns)]
        for row in _format_matrix(scores)
    ]
    losses = Block(head=["after", *names], cells=[matrix[row] for row in rows])
    shown = [name for name in ("LC", "FG", "general_drift") if name in scores.metrics]
    cells = [[name + _count_terms(scores.metrics[name]), *_in_units(scores.metrics[name])] for name in shown]
    metrics = Block(head=["", *UNITS], cells=cells)
    texts = f"perplexity on {len(columns)} of {len(scores.domains)} test texts:"
    title = f"{label(scores.run)}, seed {scores.run['seed']}, {scores.state}; {texts}"
    parts = [title, align_columns(losses), align_columns(metrics), endtask_report.format_endtasks(scores)]
    parts += [format_answers(scores), format_probes(scores)]
    return "\n\n".join(filter(None, parts))


def _format_matrix(scores: Scores) -> list[list[str]]:
    """The name and the perplexities of each row."""
    losses = figures.perplexities(scores).tolist()
    return [
        [row, *("–" if isnan(value) else perplexity(value) for value in values)]
        for row, values in zip(scores.rows, losses, strict=True)
    ]


def _show_run(scores: Scores) -> Block:
    run = scores.run
    cells = [
        ["method", label(scores.run)],
        ["model", f"{run['model']} ({run['objective']})"],
        ["perplexity", described_conditions(conditions(scores))],
        ["order", few(run["order"])],
        *([["domains were added after", _name_stages(scores)]] if scores.grown else []),
        ["seed", str(run["seed"])],
        ["state", f"{scores.state}; {scores.seconds:,.1f} seconds"],
        ["trained", f"{max(scores.trained, default=0):,} parameters"],
        ["stored beside the model", _stored(scores)],
        *([["steps left out", _skipped(scores)]] if any(scores.skipped) else []),
        *([["losses that jumped", _spikes(scores)]] if any(scores.spikes) else []),
        *([["moved inside what is protected", _leaks(scores)]] if any(scores.leak) else []),
        ["domain at test time", "must be known" if scores.needs_domain else "need not be known"],
        *([["load the model (from this folder)", scores.loading]] if scores.loading else []),
        *([["computed", _computed(scores)]] if scores.numerics else []),
        ["versions", ", ".join(f"{name} {version}" for name, version in scores.versions.items())],
    ]
    return Block(head=["run", run["name"]], cells=cells, words=2)


def _name_stages(scores: Scores) -> str:
    return few([scores.rows[number] for number in scores.grown])


def _stored(scores: Scores) -> str:
    growth = "" if scores.growth is None else f", {megabytes(scores.growth)} more with each domain"
    return megabytes(scores.stored[-1] if scores.stored else 0) + growth


def _skipped(scores: Scores) -> str:
    counts = zip(scores.rows, scores.skipped, strict=True)
    told = ", ".join(f"{count} of {row}" for row, count in counts if count)
    return f"{told}: loss or gradient were not finite (on_nonfinite)"


def _spikes(scores: Scores) -> str:
    """Of each stage how many steps had a loss far above its running median, and the first of them."""
    return "; ".join(
        f"{row}: {each[0]:.0f}, first at step {each[1]:.0f}, {each[2]:.4g} against a median of {each[3]:.4g}"
        for row, each in zip(scores.rows, scores.spikes, strict=False)
        if each
    )


def _computed(scores: Scores) -> str:
    known = scores.numerics
    return f"in {known['precision']}, attention by {known['attention'].replace('auto', 'default')}"


def _leaks(scores: Scores) -> str:
    """The largest share of a stage, and what a random movement would leave there."""
    leak, random = max(each for each in scores.leak if each)
    return f"at most {leak:.2g} of a stage's squared movement; {random:.2g} of a random one"


def _show_parts(scores: Scores) -> Block:
    """Which parts of the model scored each text; nothing of a model without parts."""
    if not any(scores.parts):
        return Block()
    cells = [
        [row, *(_mixture(parts.get(text, {})) for text in scores.domains)]
        for row, parts in zip(scores.rows, scores.parts, strict=True)
    ]
    return Block(
        title="Parts of the model that scored each text",
        lines=["The part of which domain, or the base; with their mean weights where several were mixed."],
        picture=figures.mixtures(scores) if len(scores.rows) > 1 else b"",
        name="parts",
        head=["after", *scores.domains],
        cells=cells,
        words=1 + len(scores.domains),
        folded=f"{len(scores.rows)} x {len(scores.domains)} texts",
    )


def _mixture(weights: Mapping[str, float]) -> str:
    """The heaviest parts, with their weights if there are several."""
    heaviest = sorted(weights, key=weights.get, reverse=True)[:3]
    told = ", ".join(f"{name} {weights[name]:.2f}" if len(weights) > 1 else name for name in heaviest)
    return told + ", …" * (len(weights) > len(heaviest))


def _show_similarity(scores: Scores) -> Block:
    """How alike the domains' texts are, where that decided their order."""
    if not scores.similarity:
        return Block()
    told = scores.similarity
    rows = zip(told["names"], told["matrix"], told["general"], strict=True)
    return Block(
        title="Similarity of the domains' texts, in the order learned",
        lines=[f"{figures.describe_similarity(scores)} Embedding: {told['embedding']}."],
        picture=figures.similarities(scores),
        name="similarity",
        head=["", *told["names"], GENERAL],
        cells=[[name, *(f"{each:.2f}" for each in (*row, near))] for name, row, near in rows],
        folded=f"{len(told['names'])} x {len(told['names'])} cosines",
    )


def _show_metrics(scores: Scores) -> Block:
    head = ["metric", "meaning", "formula", "nats", "perplexity", "bits per byte", MEDIANS]
    cells = [
        [m + _count_terms(units), *describe_metric(METRICS[m].compute), *_in_units(units), _medians(units)]
        for m, units in scores.metrics.items()
    ]
    missing = [MISSING] if any("terms" in units for units in scores.metrics.values()) else []
    lines = [FORMULAS, *missing]
    return Block(title="Metrics", lines=lines, head=head, cells=cells, words=3, chosen=(0, 1, 3, 4, 5))


def _count_terms(metric: Mapping) -> str:
    """How many terms a metric has seen of how many, where some are missing."""
    return " ({:,} of {:,})".format(*metric["terms"]) if "terms" in metric else ""


def _in_units(metric: Mapping) -> list[str]:
    """A metric in nats, as perplexity and in bits per byte, each with its interval if it has one; dashes for
    one of which no term was measured."""
    if metric.get("terms", [1])[0] == 0:
        return ["–"] * len(UNITS)
    bounds, cells = metric.get("interval", {}), []
    for unit, show in zip(UNITS, (decimals, perplexity, decimals), strict=True):
        interval = f" [{', '.join(map(show, bounds[unit]))}]" if unit in bounds else ""
        cells.append(show(metric[unit]) + interval)
    return cells


def _medians(metric: Mapping) -> str:
    """The medians over a metric's terms in its units; a dash in scores of an older cpt, and of no terms."""
    if metric.get("terms", [1])[0] == 0:
        return "–"
    shown = zip(UNITS, (decimals, perplexity, decimals), strict=True)
    return ", ".join(show(metric["median"][unit]) for unit, show in shown) if metric.get("median") else "–"


def _show_rates(scores: Scores) -> Block:
    """The learning rates that the stages were learned with; nothing of a run that noted none."""
    noted = [(row, rates) for row, rates in zip(scores.rows, scores.rates, strict=False) if rates]
    return Block(
        title="Learning rate",
        head=["stage", "first step", "highest", "last step"],
        cells=[[row, *(f"{rate:.3g}" for rate in rates)] for row, rates in noted],
        folded=f"of {len(noted)} stages",
    )


def _show_texts(scores: Scores) -> Block:
    cells = []
    for name, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = [scores.texts.get(name, {}).get(fact, "–") for fact in ("documents", "digest")]
        told = [
            ", ".join(f"{k} {v}" for k, v in f.items()) if isinstance(f, Mapping) else str(f) for f in facts
        ]
        cells.append([name, *(f"{size:,}" for size in sizes), *told])
    head = ["text", "tokens", "scored", "bytes", "documents", "digest"]
    return Block(title="Test texts", head=head, cells=cells, folded=f"{len(cells)} texts")


def _show_seconds(scores: Scores) -> Block:
    cells = [
        [k, stage, f"{each:,.1f}"] for k, stages in scores.phases.items() for stage, each in stages.items()
    ]
    head = ["phase", "stage", "seconds"]
    return Block(title="Seconds", head=head, cells=cells, words=2, folded=f"{len(cells)} phases")
