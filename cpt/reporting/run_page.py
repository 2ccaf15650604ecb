"""The page of one run, from its folder alone.

`python -m cpt.report FOLDER [FOLDER...]` compares runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from cpt.core.messages import count_noun
from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.derived_rows import describe_tuned_chats, find_derived_rows
from cpt.evaluation.metrics import METRICS
from cpt.evaluation.monitor import CHAT_LOSSES
from cpt.evaluation.scores import Scores, describe_conditions, find_conditions
from cpt.evaluation.task_metrics import describe_task, find_main_measure
from cpt.reporting import run_figures
from cpt.reporting.chat_tables import (
    ANSWER_HEAD,
    CHAT_HEAD,
    format_chat_answers,
    format_chats,
    format_derived_chats,
    read_chat_answers,
)
from cpt.reporting.divergence_tables import describe_divergence, format_divergence, format_divergences
from cpt.reporting.formats import (
    MAX_LISTED,
    MISSING,
    Format,
    format_bytes,
    format_decimals,
    format_integer,
    format_interval,
    format_or_dash,
    format_percent,
    format_perplexity,
    format_signed,
    label_run,
    label_single_run,
    list_names,
    list_order,
)
from cpt.reporting.frames import ReportedValue, find_matrices, list_costs, list_values, tidy_scores
from cpt.reporting.monitoring import MonitoredStage, find_evaluation, read_monitor
from cpt.reporting.overlap import LARGEST_ROWS, measure_overlap, read_diagnostics, read_distributions
from cpt.reporting.page import LEGENDS, Block, build_picture_block, write_page
from cpt.reporting.page_head import describe_run_head
from cpt.reporting.run_tables import (
    METRIC_HEAD,
    TILES_HEAD,
    describe_quantization,
    format_answers,
    format_cells,
    format_metric,
    list_tiles,
)
from cpt.reporting.training_curves import find_stages, read_training

MIN_POINTS = 6  # of a figure of training, where stages have one point each
HEADLINE_METRICS = ("learned", "FG", "general_drift", "LC", "CPT", "ZS")  # first in the table of metrics


def write_report(folder: Path, scores: Scores | None = None) -> Path:
    """Writes report.md and report.html into a run folder, of `scores` or its scores.json."""
    folder = Path(folder)
    scores = scores or Scores.load(folder / "scores.json")
    title = f"{scores.run['name']}: {label_single_run(scores.run)}"
    head = describe_run_head(folder, scores)
    return write_page(build_blocks(folder, scores), title=title, stem=folder / "report", head=head)


def build_blocks(folder: Path, scores: Scores) -> list[Block]:
    """The sections of a run page: what came out first, pictures, then tables, and how the run was made."""
    matrices = find_matrices(scores)
    blocks = [build_tiles_block(scores)]
    if "answers" in matrices:
        blocks.append(build_answer_matrix_block(scores, matrices["answers"]))
    if scores.rows:
        blocks += build_matrix_blocks(scores, matrices["perplexity"])
    blocks += [
        *build_chat_blocks(scores, folder),
        build_divergence_block(scores),
        build_training_block(scores, folder),
        build_mixture_block(scores),
        build_monitor_block(scores),
        build_modules_block(scores),
        build_similarity_block(scores),
        *build_overlap_blocks(scores, folder),
        build_derived_block(scores, folder),
        build_metrics_block(scores),
    ]
    if "answers" in matrices:
        blocks += [build_answer_means_block(scores), build_last_answers_block(scores)]
    if "endtasks" in matrices:
        blocks += [
            build_endtask_matrix_block(scores, matrices["endtasks"]),
            build_endtask_means_block(scores),
        ]
    blocks += [
        build_benchmarks_block(scores),
        build_costs_block(scores),
        build_texts_block(scores),
        build_run_block(scores),
        build_config_block(scores, folder),
    ]
    return blocks


def build_tiles_block(scores: Scores) -> Block:
    return Block(head=TILES_HEAD, cells=list_tiles(scores), is_tiles=True, num_word_columns=5)


def build_matrix_blocks(scores: Scores, perplexities: DataFrame) -> list[Block]:
    """The matrix of perplexities, and the same as curves over the stages."""
    quantization = describe_quantization(scores)
    matrix = build_picture_block(
        "matrix",
        run_figures.draw_matrix(scores, perplexities),
        lines=[quantization] if quantization else [],
        head=["after", *scores.domains],
        cells=format_cells(perplexities, format_perplexity),
        fold_label=f"{len(scores.rows)} x {count_noun(len(scores.domains), 'perplexity', 'perplexities')}",
    )
    return [matrix, build_picture_block("stages", run_figures.draw_text_curves(scores, perplexities))]


def build_derived_block(scores: Scores, folder: Path) -> Block:
    """The perplexities of models that were made of the run's, in folders of its own, below those of its last
    model."""
    last_row = dict(zip(scores.domains, scores.nll[-1], strict=True)) if scores.rows else {}
    cells = []
    lines = []
    for model_folder, row in find_derived_rows(folder):
        losses = dict(zip(row.domains, row.nll, strict=True))
        cells.append([model_folder.name, *format_losses(losses, scores.domains)])
        lines.append(f"{model_folder.name}: {row.description}.")
        if row.chats:
            lines.append(f"{describe_tuned_chats(row)}.")
    if not cells:
        return Block()
    return Block(
        title="Models made of this run: perplexities",
        lines=lines,
        head=["model", *scores.domains],
        cells=[[scores.rows[-1], *format_losses(last_row, scores.domains)], *cells],
    )


def format_losses(losses: Mapping[str, float | None], texts: Sequence[str]) -> list[str]:
    """The perplexity of each text, a dash where it was not measured."""
    formatted = []
    for text in texts:
        loss = losses.get(text)
        formatted.append(MISSING if loss is None else format_perplexity(float(np.exp(loss))))
    return formatted


def build_chat_blocks(scores: Scores, folder: Path) -> list[Block]:
    """The loss on held-out chats after each stage, and what the base and the last model answer."""
    if not scores.chats.get("chats"):
        return []
    losses = build_picture_block(
        "chats",
        run_figures.draw_chat_losses(scores),
        lines=[LEGENDS["chats"]],
        head=CHAT_HEAD,
        cells=[*format_chats(scores), *format_derived_chats(folder)],
    )
    answers = format_chat_answers(read_chat_answers(folder, scores))
    answered = Block(
        title="Answers in chats",
        head=ANSWER_HEAD,
        cells=answers,
        num_word_columns=len(ANSWER_HEAD),
        fold_label=count_noun(len(answers), "question"),
    )
    return [losses, answered]


def build_divergence_block(scores: Scores) -> Block:
    """How far the model has gone from the base on each text, after each stage."""
    cells = format_divergences(scores)
    if not cells:
        return Block()
    return Block(
        title="Divergence from the base",
        lines=[LEGENDS["divergence"], describe_divergence(scores)],
        head=["after", *scores.domains],
        cells=cells,
    )


def build_training_block(scores: Scores, folder: Path) -> Block:
    """Curves over the tokens of the whole run; a short run without curves has its losses in a sentence."""
    training = read_training(folder / "metrics.csv", scores)
    if not training:
        return Block()
    missing = [name for name in scores.learned if name not in training]
    lines = [f"Without a point: {list_names(missing)}."] if missing else []
    num_points = [len(table) for table in training.values()]
    if max(num_points) == 1 and sum(num_points) < MIN_POINTS:
        losses = [f"{name} {table['lm'].iloc[0]:.3f}" for name, table in training.items() if "lm" in table]
        lines.insert(
            0,
            f"Loss at the only point of each stage: {', '.join(losses)} nats. Curves need several points: "
            "more steps, or a smaller `trainer.log_every_n_steps`.",
        )
        return Block(title="Training", lines=lines)
    return build_picture_block(
        "training", run_figures.draw_training(training, find_stages(scores)), lines=lines
    )


def build_mixture_block(scores: Scores) -> Block:
    """What the stages have read of new text, past domains, general text and each source of replay."""
    part_names: list[str] = []  # those that some stage was to read
    for record in scores.mixture.values():
        for name, part in record.items():
            if name not in part_names and (part["rows"] or part["asked_share"]):
                part_names.append(name)
    cells = []
    for stage, record in scores.mixture.items():
        cells += [format_part(stage, name, record) for name in part_names]
    if not cells:
        return Block()
    return Block(
        title="Mixture",
        lines=[
            "Ratios ask for shares of the rows; rows of short texts have fewer tokens than others. Shares of "
            "the rows asked for and read, of the tokens read, and of those scored; epochs of the run."
        ],
        head=["stage", "part", "asked, % of rows", "rows, %", "tokens, %", "scored, %", "tokens", "epochs"],
        cells=cells,
        num_word_columns=2,
        fold_label=count_noun(len(scores.mixture), "stage") if len(cells) > 2 * MAX_LISTED else "",
    )


def format_part(stage: str, name: str, record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The cells of a part of a stage."""
    part = record[name]
    num_rows = sum(counts["rows"] for counts in record.values())
    num_tokens = sum(counts["tokens"] for counts in record.values())
    num_scored = sum(counts["scored"] for counts in record.values())
    return [
        stage,
        name,
        format_percent(part["asked_share"]),
        format_percent(part["rows"] / max(1, num_rows)),
        format_percent(part["tokens"] / max(1, num_tokens)),
        format_percent(part["scored"] / max(1, num_scored)),
        format_integer(part["tokens"]),
        format_or_dash(part["epochs"], format_decimals),
    ]


def build_monitor_block(scores: Scores) -> Block:
    """What training did to other text, and what the observer of the stages reports."""
    if not scores.monitor:
        return Block()
    stages = read_monitor(scores)
    head = ["stage", "steps", "its own text, nats", "most risen of the past", GENERAL, "ended early"]
    cells = [format_monitored_stage(stage) for stage in stages]

    # A run that monitors chats has a column for each of their losses.
    for chat_loss in CHAT_LOSSES:
        if any(chat_loss in stage.changes for stage in stages):
            head.append(chat_loss)
            for row, stage in zip(cells, stages, strict=True):
                row.append(format_kept_change(stage, chat_loss))

    if any("divergence" in stage for stage in scores.monitor.values()):
        head.append("KL from the base, its own text")
        for row, record in zip(cells, scores.monitor.values(), strict=True):
            row.append(format_own_divergence(record))

    # An observer may report further columns, for example what a budget allowed and did.
    reports = [stage.get("budget", {}).get("report", {}) for stage in scores.monitor.values()]
    titles: dict[str, None] = {}  # an ordered set
    for report in reports:
        titles.update(dict.fromkeys(report))
    head += titles
    for row, report in zip(cells, reports, strict=True):
        row += [report.get(title, MISSING) for title in titles]
    return build_picture_block(
        "monitor",
        run_figures.draw_monitor(stages),
        head=head,
        cells=cells,
        fold_label=count_noun(len(cells), "stage"),
    )


def format_monitored_stage(stage: MonitoredStage) -> list[str]:
    """The changes of losses from the first evaluation of a stage to the weights that it kept."""
    own_mean = MISSING
    if stage.own_texts:
        own_changes = [stage.change(text) for text in stage.own_texts]
        own_mean = format_or_dash(float(np.mean(own_changes)), format_signed)
    most_risen = stage.find_most_risen()
    past = f"{most_risen} {format_signed(stage.change(most_risen))}" if most_risen else MISSING
    general = format_kept_change(stage, GENERAL)
    return [stage.name, str(stage.steps[-1]), own_mean, past, general, stage.reason_ended or MISSING]


def format_kept_change(stage: MonitoredStage, text: str) -> str:
    """The change of a loss with its interval, at the weights that the stage kept."""
    if text not in stage.intervals:
        return MISSING
    low, high = stage.intervals[text][stage.kept_evaluation].tolist()
    change = format_or_dash(stage.change(text), format_signed)
    return f"{change} [{format_or_dash(low, format_signed)}, {format_or_dash(high, format_signed)}]"


def format_own_divergence(stage: Mapping[str, Any]) -> str:
    """The divergence from the base on each text of a stage's domain, at the weights that it kept."""
    index = find_evaluation(stage, stage.get("kept"))
    texts = stage.get("divergence", {})
    estimates = [f"{text} {format_divergence(values[index])}" for text, values in texts.items()]
    return list_names(estimates) or MISSING


def build_modules_block(scores: Scores) -> Block:
    """Which module scored which text."""
    if len(scores.rows) <= 1 or not any(scores.modules):
        return Block()
    return build_picture_block("modules", run_figures.draw_modules(scores))


def build_similarity_block(scores: Scores) -> Block:
    """The cosine of mean embeddings of the domains' texts, where it decided their order."""
    similarity = scores.similarity
    if not similarity:
        return Block()
    matrix = np.array(similarity["matrix"])
    description = "One domain: there is nothing to compare it with."
    if len(matrix) > 1:
        neighbours = np.diagonal(matrix, 1).mean()
        is_pair = ~np.eye(len(matrix), dtype=bool)
        description = (
            f"Mean cosine of domains learned one after another: {neighbours:.2f}; of any two: "
            f"{matrix[is_pair].mean():.2f}."
        )

    with_general = np.column_stack([matrix, similarity["general"]]).astype(float)
    np.fill_diagonal(with_general, np.nan)
    domains = similarity["names"]
    picture = run_figures.draw_similarity(with_general, domains, [*domains, GENERAL], description)
    caption = f"{description} Embedding: {similarity['embedding']}."
    return build_picture_block("similarity", picture, caption=caption)


def build_overlap_blocks(scores: Scores, folder: Path) -> list[Block]:
    """How far domains share what a method keeps of them, also by layer, and MIGU's product magnitudes."""
    diagnostics = read_diagnostics(folder, scores)
    by_text = {}
    by_domain = {}
    layered = {}
    for title, overlap in measure_overlap(diagnostics, scores).items():
        if title.startswith(LARGEST_ROWS):
            by_text[title] = overlap
            continue
        by_domain[title] = overlap
        if len(overlap.by_layer) > 1:
            layered[title] = overlap
    distributions = read_distributions(diagnostics, scores)

    blocks = []
    if by_domain:
        blocks.append(build_picture_block("overlap", run_figures.draw_overlap(by_domain)))
    if layered:
        blocks.append(build_picture_block("overlap_by_layer", run_figures.draw_layers(layered)))
    if by_text:
        blocks.append(build_picture_block("largest_rows", run_figures.draw_overlap(by_text)))
    if distributions:
        blocks.append(build_picture_block("magnitudes", run_figures.draw_distributions(distributions)))
    return blocks


def build_metrics_block(scores: Scores) -> Block:
    """The metrics of the loss matrix [model after a stage, test text], in each unit, with their intervals."""
    lines = [LEGENDS["metrics"]]
    if any("terms" in metric for metric in scores.metrics.values()):
        lines.append(LEGENDS["terms"])
    names = [name for name in HEADLINE_METRICS if name in scores.metrics]
    names += [name for name in METRICS if name in scores.metrics and name not in names]
    names += [name for name in scores.metrics if name not in names]  # of another version
    return Block(
        title="Metrics",
        lines=lines,
        head=METRIC_HEAD,
        cells=[format_metric(scores, name) for name in names],
        num_word_columns=3,  # metric, meaning, formula
        shown_columns=find_shown_columns(METRIC_HEAD, hidden=["formula"]),
    )


def find_shown_columns(head: Sequence[str], *, hidden: Sequence[str]) -> list[int]:
    """The indices of the columns that the page shows at first: all but the `hidden` ones."""
    return [column for column, name in enumerate(head) if name not in hidden]


def build_answer_matrix_block(scores: Scores, shares: DataFrame) -> Block:
    """The answers to each task after each stage, in the task's own measure."""
    measures = {task: find_main_measure(answers) for task, answers in scores.answers["tasks"].items()}
    picture = None
    if shares.notna().to_numpy().any():
        picture = run_figures.draw_tasks("answers", shares)
    return Block(
        name="answers",
        title=f"Answers to each task (column) after each stage (row): {describe_measures(measures)}",
        picture=picture,
        caption="" if picture is None else LEGENDS["tasked"],
        head=["after", *shares.columns],
        cells=format_answers(scores, shares),
    )


def build_answer_means_block(scores: Scores) -> Block:
    """The means of the answers' scores over the tasks: AP, LA, BWT, F and FWT."""
    answers = scores.answers
    meanings = {}
    for name, (_, meaning, formula) in task_metrics.ANSWER_METRICS.items():
        meanings[name] = meaning, formula
    timing = f"answers.when={answers['when']}, {answers['seconds']:,.1f} seconds."
    return build_task_means_block(
        "score", scores, meanings, title="Scores", lines=[LEGENDS["answers"], timing]
    )


def build_last_answers_block(scores: Scores) -> Block:
    """Every measure of the last model's answers: a row for each task, a column for each measure."""
    tasks = scores.answers["tasks"]
    measured: set[str] = set()
    for answers in tasks.values():
        measured |= set(answers["measures"])
    measures = [measure for measure in task_metrics.MEASURES if measure in measured]

    last_values = tidy_scores(scores, "answer").drop_duplicates(["text", "metric"], keep="last")
    table = last_values.pivot(index="text", columns="metric", values="value")
    table = table.reindex(index=list(tasks), columns=measures)
    return Block(
        title="Answers of the last model",
        fold_label=count_noun(len(table), "task"),
        head=["task", *table.columns],
        cells=format_cells(table, format_percent),
    )


def build_endtask_matrix_block(scores: Scores, shares: DataFrame) -> Block:
    """The end tasks after each stage, in the task's own metric, with deviations over seeds."""
    endtasks = scores.endtasks
    is_measured = np.isfinite(shares).any(axis=1)
    deviations = task_metrics.sd_over_seeds(task_metrics.select_headline_scores(endtasks))[is_measured]
    cells = format_cells(shares.dropna(how="all"), format_percent, deviations)
    picture = None
    caption = ""
    if len(cells) > 1:
        picture = run_figures.draw_tasks("endtasks", shares)
        caption = LEGENDS["tasked"]
    return Block(
        name="endtasks",
        title=f"End tasks: {describe_measures(endtasks['metric'])}",
        picture=picture,
        caption=caption,
        head=["after", *shares.columns],
        cells=cells,
    )


def build_endtask_means_block(scores: Scores) -> Block:
    """MF1, accuracy and the forget rate."""
    endtasks = scores.endtasks
    seeds = list_names([str(seed) for seed in endtasks["seeds"]])
    lines = [
        LEGENDS["endtask"],
        f"{count_noun(len(endtasks['tasks']), 'task')}, seeds {seeds}, endtask.when={endtasks['when']}, "
        f"{endtasks['seconds']:,.1f} seconds.",
    ]
    return build_task_means_block(
        "task", scores, task_metrics.ENDTASK_MEANINGS, title="End tasks", lines=lines
    )


def describe_measures(measures: Mapping[str, str]) -> str:
    """The measure of all tasks, or of each."""
    if len(set(measures.values())) == 1:
        return next(iter(measures.values()))
    by_task = [f"{task} {measure}" for task, measure in measures.items()]
    return f"each in its own: {list_names(by_task)}"


def build_task_means_block(
    kind: str,
    scores: Scores,
    meanings: Mapping[str, tuple[str, str]],
    *,
    title: str,
    lines: Sequence[str],
) -> Block:
    """The table of the metrics over all tasks, in percent with their intervals: those values of `kind` (one
    of VALUE_KINDS) whose metric is in `meanings`, by metric its meaning and formula."""
    cells = []
    for reported in list_values(scores, kind):
        if reported.metric in meanings:  # the others are of single tasks
            cells.append([reported.metric, *meanings[reported.metric], format_share(reported)])
    head = ("number", "meaning", "formula", "%")
    return Block(
        title=title,
        lines=lines,
        head=head,
        cells=cells,
        num_word_columns=3,  # number, meaning, formula
        shown_columns=find_shown_columns(head, hidden=["formula"]),
    )


def format_share(reported: ReportedValue) -> str:
    """A share in percent, with its interval."""
    text = format_or_dash(reported.value, format_percent)
    return text + format_interval(reported.low, reported.high, format_percent)


def build_benchmarks_block(scores: Scores) -> Block:
    """Each task of the harness in every row that was measured, and chance where the harness gives it."""
    tasks = scores.benchmarks.get("tasks")
    if not tasks:
        return Block()
    # Columns of tasks that were measured in fewer rows end in nan.
    values = DataFrame({name: Series(task["values"], dtype=float) for name, task in tasks.items()})
    errors = DataFrame({name: Series(task["errors"], dtype=float) for name, task in tasks.items()})
    values.index = scores.rows[: len(values)]
    cells = []
    for row in format_cells(values, format_decimals, errors.to_numpy()):
        if any(cell != MISSING for cell in row[1:]):
            cells.append(row)
    cells.append(["chance", *(format_or_dash(task["chance"], format_decimals) for task in tasks.values())])

    facts = []
    for name, task in tasks.items():
        fact = f"{name}: {count_noun(task['examples'], 'example')}"
        if task["truncated"]:
            fact += f", {task['truncated']:,} or more requests cut from the left"
        if not task["higher"]:
            fact += ", lower is better"
        facts.append(fact)
    return Block(
        title="Benchmarks",
        lines=[LEGENDS["benchmarks"].format(**scores.benchmarks), f"{list_names(facts, separator='; ')}."],
        head=["after", *(describe_task(name, task) for name, task in tasks.items())],
        cells=cells,
    )


def format_significant(value: float) -> str:
    return f"{value:.3g}"


def format_seconds(value: float) -> str:
    return f"{value:,.1f}"


COST_COLUMNS: dict[str, tuple[str, Format]] = {  # title: one of frames.COST_UNITS, and its format
    "tokens": ("tokens", format_integer),
    "FLOPs": ("flops", format_significant),
    "learn, s": ("seconds_learn", format_seconds),
    "score, s": ("seconds_score", format_seconds),
    "end tasks, s": ("seconds_endtasks", format_seconds),
    "peak memory": ("memory", format_bytes),
    "trained": ("trained", format_integer),
    "stored": ("stored", format_bytes),
}
COUNTED_COSTS = ("tokens", "flops", "memory", "trained", "stored")  # a row has all of these or is left out


def build_costs_block(scores: Scores) -> Block:
    """The table of COST_COLUMNS: a row for each stage in which all of COUNTED_COSTS were counted, and one for
    the whole run."""
    costs_by_row: dict[str, dict[str, float | None]] = {}
    costs_of_run: dict[str, float | None] = {}
    for reported in list_costs(scores):
        if reported.row is None:
            costs_of_run[reported.metric] = reported.value
        else:
            costs_by_row.setdefault(reported.row, {})[reported.metric] = reported.value

    cells = []
    for row, costs in costs_by_row.items():
        if all(costs.get(name) is not None for name in COUNTED_COSTS):
            cells.append([row, *format_costs(costs)])
    num_stages = len(cells)
    lines = []
    if num_stages > 0:
        lines.append(LEGENDS["compute"])
        cells.append(["whole run", *format_costs(costs_of_run)])
    head = ["after", *COST_COLUMNS]
    return Block(
        title="Compute",
        lines=lines,
        head=head,
        cells=cells,
        shown_columns=find_shown_columns(head, hidden=["learn, s", "score, s", "end tasks, s", "trained"]),
        fold_label=count_noun(num_stages, "stage") if num_stages > 2 * MAX_LISTED else "",
    )


def format_costs(costs: Mapping[str, float | None]) -> list[str]:
    """The cells of COST_COLUMNS."""
    return [format_or_dash(costs[name], format_value) for name, format_value in COST_COLUMNS.values()]


def build_texts_block(scores: Scores) -> Block:
    """The table of test texts. Near-duplicates are a column where a text has been compared for them, the
    share of unknown tokens where the tokenizer does not know all of a text."""
    is_compared = any("near_duplicates" in facts for facts in scores.texts.values())
    score_on = scores.conditions.get("score_on", "test")
    unknown_shares = {}
    for name, facts in scores.texts.items():
        unknown_shares[name] = facts.get("unknown", {}).get(score_on, 0)
    has_unknown = any(unknown_shares.values())

    cells = []
    for name, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = scores.texts.get(name, {})
        row = [name, *(f"{size:,}" for size in sizes), describe_documents(facts)]
        if has_unknown:
            row.append(f"{unknown_shares.get(name, 0):.2%}")
        if is_compared:
            duplicates = facts.get("near_duplicates")
            row.append(f"{duplicates['found']} of {duplicates['compared']}" if duplicates else MISSING)
        row.append(facts.get("hash", MISSING))
        cells.append(row)

    head = ["text", "tokens", "scored", "bytes", "documents"]
    if has_unknown:
        head.append("unknown tokens")
    if is_compared:
        head.append("near-duplicates")
    head.append("hash")
    return Block(title="Test texts", head=head, cells=cells, fold_label=count_noun(len(cells), "text"))


def describe_documents(facts: Mapping[str, Any]) -> str:
    """`train 900, test 7; skipped: 2 × empty`."""
    counts = [f"{split} {count}" for split, count in facts.get("documents", {}).items()]
    description = ", ".join(counts) or MISSING
    skipped = [f"{count} × {kind}" for kind, count in (facts.get("skipped") or {}).items()]
    if skipped:
        description += f"; skipped: {', '.join(skipped)}"
    return description


def build_run_block(scores: Scores) -> Block:
    """The facts of a run, without those that do not apply."""
    run = scores.run
    facts = {
        "method": label_run(run),
        "model": f"{run['model']} ({run['objective']})",
        "base model": format_base_origin(scores),
        "perplexity": describe_conditions(find_conditions(scores)),
        "order": list_order(run["order"]),
        "extended after": list_order([scores.rows[row] for row in scores.grown]),
        "seed": str(run["seed"]),
        "state": f"{scores.state}; {scores.seconds:,.1f} seconds",
        "trained": count_noun(max(scores.trained, default=0), "parameter"),
        "stored by the method": describe_storage(scores),
        "skipped steps, non-finite loss or gradient (on_nonfinite)": describe_skipped_steps(scores),
        "movement in the protected subspace": describe_movement(scores),
        "numerics": format_numerics(scores),
        "domain of an input": "must be known to use the model"
        if scores.needs_domain
        else "need not be known",
        "exported model": describe_exported(scores),
        "load the model (from this folder)": scores.loading,
        "versions": ", ".join(f"{name} {version}" for name, version in scores.versions.items()),
    }
    cells = [[name, fact] for name, fact in facts.items() if fact]
    return Block(title="Run", head=["run", run["name"]], cells=cells, num_word_columns=2)


def format_base_origin(scores: Scores) -> str:
    """Where the weights came from; empty for those that the run built."""
    if scores.base.get("origin") == "built":
        return ""
    return "; ".join(scores.base[key] for key in ("name", "adapted") if key in scores.base)


def describe_storage(scores: Scores) -> str:
    """What the method stores at the end of the run, and its growth by domain."""
    stored = format_bytes(scores.stored[-1] if scores.stored else 0)
    if scores.growth is None:
        return stored
    return f"{stored}, {format_bytes(scores.growth)} more with each domain"


def describe_skipped_steps(scores: Scores) -> str:
    """`2 of law, 1 of food`."""
    steps_by_row = zip(scores.rows, scores.skipped_steps, strict=False)
    return ", ".join(f"{num_steps} of {row}" for row, num_steps in steps_by_row if num_steps)


def describe_movement(scores: Scores) -> str:
    """The largest share of a stage's movement in the subspace that a method protects; empty without one."""
    movements = [movement for movement in scores.protected_movement if movement]
    if not movements:
        return ""
    share, random_share = max(movements)
    return f"at most {share:.2g} of a stage's squared movement; {random_share:.2g} of a random one"


def format_numerics(scores: Scores) -> str:
    """The precision and the implementation of attention."""
    if not scores.numerics:
        return ""
    attention = scores.numerics.get("attention", "").replace("auto", "default")
    return f"precision {scores.numerics['precision']}, attention {attention}"


def describe_exported(scores: Scores) -> str:
    """`bfloat16: loss 2.345 on 2,048 tokens of law, with the run's weights 2.344`; empty without an export,
    and of one by 0.1.0."""
    exported = scores.exported
    if not exported:
        return ""
    losses = f"loss {exported['nll']:.4f} on {count_noun(exported['tokens'], 'token')} of {exported['text']}"
    return f"{exported['dtype']}: {losses}, with the run's weights {exported['run_nll']:.4f}"


def build_config_block(scores: Scores, folder: Path) -> Block:
    """The config as it was written."""
    path = folder / "config.yaml"
    if not path.exists():
        return Block()
    code = path.read_text(encoding="utf-8", errors="replace")
    return Block(title="Config", code=code, fold_label=f"config.yaml, hash {scores.config_hash}")
