"""The scores of a run for a console of 100 characters."""

from __future__ import annotations

from pandas import DataFrame

from cpt.core.messages import count_noun
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import UNITS
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import describe_task, find_last_value
from cpt.reporting.chat_tables import describe_chats
from cpt.reporting.divergence_tables import describe_divergence
from cpt.reporting.formats import (
    format_decimals,
    format_or_dash,
    format_percent,
    format_perplexity,
    label_single_run,
    list_names,
    shorten,
)
from cpt.reporting.frames import find_matrices
from cpt.reporting.page import Block, align_columns
from cpt.reporting.run_tables import (
    TILES_HEAD,
    Cells,
    describe_quantization,
    format_answers,
    format_cells,
    format_metric,
    list_tiles,
)

METRICS = ("CPT", "LC", "FG", "general_drift")
TABLE_WIDTH = 86  # characters of all columns but the first
MAX_COLUMN_WIDTH = 24
MAX_SHOWN = 9  # rows or columns; of more the first and last four


def format_scores(scores: Scores) -> str:
    """The report of a run for the console: tiles, perplexities, metrics, and what else was measured. If there
    are many domains, it has the first and last columns."""
    matrices = find_matrices(scores)
    num_shown = len(select_ends(len(scores.domains)))
    tiles = [row[:4] for row in list_tiles(scores)]
    metrics = []
    for name in METRICS:
        if name in scores.metrics:
            title, _, _, *values = format_metric(scores, name)
            metrics.append([title, *values])

    perplexities = matrices["perplexity"]
    parts = [
        align_columns(Block(head=TILES_HEAD[:4], num_word_columns=4, cells=tiles)),
        f"Perplexity on {num_shown} of {count_noun(len(scores.domains), 'test text')}:",
        align_ends(perplexities, format_cells(perplexities, format_perplexity)),
        align_columns(Block(head=["", *UNITS], cells=metrics)),
    ]

    chats = describe_chats(scores)
    if chats:
        parts.append("\n".join(chats))

    divergence = describe_divergence(scores)
    if divergence:
        parts.append(divergence)

    quantization = describe_quantization(scores)
    if quantization:
        parts.append(quantization)

    if scores.endtasks:
        numbers = format_percents(task_metrics.summarise_endtasks(scores.endtasks, scores.rows))
        if numbers:
            parts.append(f"end tasks ({len(scores.endtasks['tasks'])}): {numbers}")

    if "answers" in matrices:
        line = f"answers to {count_noun(len(scores.answers['tasks']), 'task')}, in %"
        numbers = format_percents(scores.answers["metrics"])
        parts.append(f"{line}: {numbers}" if numbers else line)
        parts.append(align_ends(matrices["answers"], format_answers(scores, matrices["answers"])))

    benchmarks = describe_benchmarks(scores)
    if benchmarks:
        parts.append(f"benchmarks: {list_names(benchmarks)}")
    parts.append(f"{label_single_run(scores.run)}, seed {scores.run['seed']}, {scores.state}")
    return "\n\n".join(parts)


def select_ends(size: int) -> list[int]:
    """The positions that are shown of a list."""
    if size <= MAX_SHOWN:
        return list(range(size))
    return [*range(4), *range(size - 4, size)]


def align_ends(table: DataFrame, cells: Cells) -> str:
    """The first and last rows and columns of a table."""
    columns = select_ends(len(table.columns))
    width = min(MAX_COLUMN_WIDTH, TABLE_WIDTH // len(columns) - 2)
    head = ["after"]
    for column in columns:
        head.append(shorten(table.columns[column], width=width))
    rows = []
    for row in select_ends(len(cells)):
        name, *values = cells[row]
        rows.append([shorten(name, width=12), *(values[column] for column in columns)])
    return align_columns(Block(head=head, cells=rows))


def format_percents(shares: dict[str, float]) -> str:
    """`MF1 53.10 %, Acc 60.00 %`."""
    return ", ".join(f"{name} {format_percent(share)} %" for name, share in shares.items())


def describe_benchmarks(scores: Scores) -> list[str]:
    """The last value of each task of the harness, and that of the base."""
    descriptions = []
    for name, task in scores.benchmarks.get("tasks", {}).items():
        last = find_last_value(task)
        if last is not None:
            _, value = last
            base = format_or_dash(task["values"][0], format_decimals)
            descriptions.append(f"{describe_task(name, task)} {format_decimals(value)} (base {base})")
    return descriptions
