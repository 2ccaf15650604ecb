"""Tables of a paper: their numbers as frames (`cpt.load_tables`), and TeX for booktabs (`--tex FOLDER`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame, concat

from cpt.core.config import digest
from cpt.core.files import write_atomically
from cpt.core.messages import count_noun
from cpt.core.schema import Number, fits
from cpt.evaluation.scores import describe_conditions
from cpt.evaluation.statistics import SIGNIFICANCE_LEVEL
from cpt.reporting.contrasts import find_contrasts, find_group_values, find_spreads, is_ranked
from cpt.reporting.formats import (
    MAX_LISTED,
    Format,
    format_deviation,
    format_percent,
    format_perplexity,
    strip_controls,
)
from cpt.reporting.frames import find_matrices
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.measures import BRIEF_KEYS, MEASURES, ComparedMeasure
from cpt.reporting.page import LEGENDS
from cpt.reporting.sections import RunGroup, RunSection, find_differing_settings, name_orders

BY_ORDER = {"answers/AP": "AP", "endtask/MF1": "MF1", "LC/perplexity": "LC"}
OVER_TASKS = ("endtask/MF1", "endtask/Acc", "endtask/forget_rate")
TASK_PREFIX = "task/"  # of the key of an end task
MEASURES_BY_KEY = {measure.key: measure for measure in MEASURES}
MATRICES: dict[str, tuple[Format, str]] = {
    "perplexity": (format_perplexity, "perplexity"),
    "answers": (format_percent, "score of the task answers, in %"),
    "endtasks": (format_percent, "score of the downstream tasks, in %"),
}
MATRIX_COLUMNS = ["group", "order", "kind", "row", "text", "mean", "sd", "n"]
NO_OPTIONS = ("name", "seed", "_target_", "_partial_")  # keys of a config that the settings leave out
MAX_STEM = 80  # characters of a file's name
LONG_NAME = 32  # characters from which on the name of a group is broken into lines
BREAK = r"\allowbreak{}"
SEPARATORS = re.compile(r"(/|,|=|\.|:|-|\\_|\\\{|\+)(?=\S)")  # in TeX, after which a line may end
ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "±": r"$\pm$",
    "−": "$-$",
    "→": r"$\rightarrow$",
    "<": "$<$",
    ">": "$>$",
    "|": r"\textbar{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
}
TRANSLATION = str.maketrans(ESCAPED)


class PaperTable(NamedTuple):
    name: str  # of its file
    caption: str
    cells: DataFrame  # TeX; the columns are its head


def measure_tables(section: RunSection) -> dict[str, DataFrame]:
    """The numbers of all tables, tidy: `main`, `endtasks` and `orders` have a row for each group, measure and
    order (all: over all runs), `matrix` for each cell of the mean matrix of a group and an order, `settings`
    for each option of a group in which runs differ. Shares are in 0..1."""
    return {
        "main": measure_groups(section, [measure for measure in MEASURES if measure.key in BRIEF_KEYS]),
        "endtasks": measure_endtasks(section),
        "orders": measure_orders(section),
        "matrix": measure_matrices(section),
        "settings": list_settings(section),
    }


def measure_groups(section: RunSection, measures: Iterable[ComparedMeasure]) -> DataFrame:
    """A row for each group and measure: mean, sd, n, the interval [low, high] of the mean over runs, and the
    paired difference from the baseline with p-values of both tests, before and after Holm's correction."""
    rows = []
    for measure in measures:
        spreads = find_spreads(section, measure.key)
        contrasts = find_contrasts(section, measure.key)
        for group in section.groups:
            spread = spreads.get(group.name)
            if spread is None:
                continue
            row = {
                "group": group.name,
                "measure": measure.key,
                "order": "all",
                "n": spread.n,
                "mean": spread.mean,
                "sd": spread.sd,
                "low": spread.low,
                "high": spread.high,
            }
            contrast = contrasts.get(group.name)
            if contrast is not None:
                row["baseline"] = section.baselines[group.name].name
                row["difference"] = contrast.mean
                row["p"] = contrast.p
                row["p_holm"] = contrast.p_holm
                row["p_t"] = contrast.p_t
                row["p_t_holm"] = contrast.p_t_holm
            rows.append(row)

    numbers = ["mean", "sd", "low", "high", "difference", "p", "p_holm", "p_t", "p_t_holm"]
    columns = ["group", "measure", "order", "baseline", "n", *numbers]
    return DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))


def measure_endtasks(section: RunSection) -> DataFrame:
    """The columns of `measure_groups` for each end task, and for OVER_TASKS; empty without end tasks."""
    tasks: dict[str, None] = {}  # an ordered set
    for run in section.runs:
        tasks |= dict.fromkeys(run.scores.endtasks.get("metric", {}))
    if not tasks:
        return DataFrame()
    measures = [make_task_measure(f"{TASK_PREFIX}{task}") for task in tasks]
    return measure_groups(section, [*measures, *(MEASURES_BY_KEY[key] for key in OVER_TASKS)])


def make_task_measure(key: str) -> ComparedMeasure:
    """An end task in its own metric."""
    return ComparedMeasure(key, key.removeprefix(TASK_PREFIX), format_percent, higher_is_better=True)


def measure_orders(section: RunSection) -> DataFrame:
    """A row for each group, measure of BY_ORDER and order: mean, sd and n; then those of `measure_groups`
    over all orders. Empty with one order."""
    order_names = name_orders(section.runs)
    if len(order_names) <= 1:
        return DataFrame()
    frame = section.frame[section.frame["key"].isin(BY_ORDER)].rename(columns={"key": "measure"})
    frame["order"] = frame["order"].map(order_names)
    values = frame.groupby(["group", "measure", "order"], sort=False)["value"]
    by_order = values.agg(mean="mean", sd="std", n="count").reset_index()
    over_all = measure_groups(section, [MEASURES_BY_KEY[key] for key in BY_ORDER])
    return concat([by_order, over_all], ignore_index=True)


def measure_matrices(section: RunSection) -> DataFrame:
    """A row for each cell that some run of a group and an order has: mean, sd and n over these runs."""
    order_names = name_orders(section.runs)
    rows = []
    for group in section.groups:
        orders = dict.fromkeys(run.pair[0] for run in group.runs)  # an ordered set
        for order in orders:
            runs = [run for run in group.runs if run.pair[0] == order]
            for (kind, row, text), values in collect_cells(runs).items():
                sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
                mean = float(np.mean(values))
                rows.append((group.name, order_names[order], kind, row, text, mean, sd, len(values)))
    return DataFrame(rows, columns=MATRIX_COLUMNS)


def collect_cells(runs: Sequence[MeasuredRun]) -> dict[tuple[str, str, str], list[float]]:
    """The finite values of the runs by kind of matrix, row and column, one for each pair of order and seed:
    copies of a run have their mean."""
    values_by_cell: dict[tuple[str, str, str], dict[tuple, list[float]]] = {}
    for run in runs:
        for kind, matrix in find_matrices(run.scores).items():
            for row, column in np.argwhere(np.isfinite(matrix.to_numpy())).tolist():
                cell = kind, matrix.index[row], matrix.columns[column]
                values_by_pair = values_by_cell.setdefault(cell, defaultdict(list))
                values_by_pair[run.pair].append(float(matrix.iat[row, column]))

    cells = {}
    for cell, values_by_pair in values_by_cell.items():
        cells[cell] = [float(np.mean(values)) for values in values_by_pair.values()]
    return cells


def list_settings(section: RunSection) -> DataFrame:
    """A row for each group and option in which runs differ, as the group's first run has it."""
    rows = []
    settings = [key for key in find_differing_settings(section.runs) if key.split(".")[-1] not in NO_OPTIONS]
    for group in section.groups:
        for setting in settings:
            value = group.runs[0].settings.get(setting)
            if value not in (None, {}):
                rows.append((group.name, setting, value))
    return DataFrame(rows, columns=["group", "setting", "value"])


def list_tables(section: RunSection) -> Iterator[PaperTable]:
    """The tables of a section, as TeX."""
    frames = measure_tables(section)
    legend = LEGENDS["tex"].format(baseline=escape_group_name(section.baseline), level=SIGNIFICANCE_LEVEL)
    conditions = escape(describe_conditions(section.conditions))
    caption = f"{conditions}. In nats if no unit is named. {legend}"
    yield PaperTable("main", caption, format_groups(section, frames["main"], "measure"))

    if len(frames["endtasks"]) > 0:
        caption = "Downstream tasks after the last stage in which each was measured, in \\%; MF1, Acc: means."
        cells = format_groups(section, frames["endtasks"], "measure")
        yield PaperTable("endtasks", f"{caption} {legend}", cells)

    if len(frames["orders"]) > 0:
        for key, frame in frames["orders"].groupby("measure", sort=False):
            title = escape(MEASURES_BY_KEY[key].title)
            caption = f"{title} by the order of the domains. {legend} The tests are over all orders."
            yield PaperTable(f"orders-{BY_ORDER[key]}", caption, format_groups(section, frame, "order"))

    for (group, order, kind), frame in frames["matrix"].groupby(["group", "order", "kind"], sort=False):
        if frame["row"].nunique() > 1 and frame["text"].nunique() <= MAX_LISTED + 1:
            yield format_matrix(frame, group=group, order=order, kind=kind)

    settings = format_settings(frames["settings"])
    if len(settings) > 0:
        yield PaperTable("settings", "Numeric options in which the methods differ.", settings)


def format_groups(section: RunSection, frame: DataFrame, by: str) -> DataFrame:
    """A row for each group and a column for each measure or order: mean ± sd, the best mean in bold, with
    marks, and the number of runs where not all of the group's have the value."""
    groups = {group.name: group for group in section.groups}
    orders = name_orders(section.runs)
    table = DataFrame({"method": map(escape_in_column, groups)}, index=list(groups))
    for name, column_frame in frame.groupby(by, sort=False):
        key = column_frame["measure"].iloc[0]
        measure = MEASURES_BY_KEY.get(key) or make_task_measure(key)
        best = find_best_mean(section, column_frame, measure)

        column = dict.fromkeys(groups, "--")
        for row in column_frame.to_dict("records"):
            group = groups[row["group"]]
            num_runs = count_runs(group, orders, order=row["order"])
            column[group.name] = format_tex_mean(row, measure, is_best=row["mean"] == best, num_runs=num_runs)

        order_title = "all orders" if name == "all" else f"order {name}"
        table[escape(measure.title if by == "measure" else order_title)] = column
    return table.reset_index(drop=True)


def find_best_mean(section: RunSection, frame: DataFrame, measure: ComparedMeasure) -> float | None:
    """The best mean among ranked groups; None if not all means are over the same pairs of order and seed."""
    groups = {group.name: group for group in section.groups}
    means = frame.set_index("group")["mean"]
    ranked = means[[name for name in means.index if is_ranked(groups[name], measure.key)]]
    values = find_group_values(section, measure.key)
    if len({frozenset(values.get(name, ())) for name in ranked.index}) != 1:
        return None
    return ranked.max() if measure.higher_is_better else ranked.min()


def format_tex_mean(row: Mapping[str, Any], measure: ComparedMeasure, *, is_best: bool, num_runs: int) -> str:
    """`53.10 ± 0.30` as TeX, from a row of a frame; marks are of significant differences."""
    text = measure.format_value(row["mean"])
    if not np.isnan(row["sd"]):
        text += f" ± {format_deviation(row['sd'], row['mean'], measure.format_value)}"
    text = escape_number(text)
    if is_best:
        text = f"\\textbf{{{text}}}"
    marks = "*" if row["p_holm"] < SIGNIFICANCE_LEVEL else ""
    if row["p_t_holm"] < SIGNIFICANCE_LEVEL:
        marks += r"\dagger"
    if marks:
        text += f"\\textsuperscript{{${marks}$}}"
    if row["n"] < num_runs:
        text += f" ({row['n']})"
    return text


def count_runs(group: RunGroup, orders: Mapping[tuple[str, ...], str], *, order: str) -> int:
    """The number of runs of a group that differ in order or seed: those of one order, by its name in
    `orders`, or of `all`."""
    pairs = {run.pair for run in group.runs}
    if order == "all":
        return len(pairs)
    return sum(orders[pair[0]] == order for pair in pairs)


def format_matrix(frame: DataFrame, *, group: str, order: str, kind: str) -> PaperTable:
    """The mean matrix of a group and an order; a row for each stage."""
    format_value, description = MATRICES[kind]
    rows = list(dict.fromkeys(frame["row"]))
    texts = list(dict.fromkeys(frame["text"]))
    cells = frame.pivot(index="row", columns="text", values="mean").loc[rows, texts]
    cells = cells.map(format_value).replace("nan", "–")
    cells = cells.reset_index(names="after", allow_duplicates=True).map(escape)
    cells.columns = ["after", *map(escape, texts)]

    min_runs = frame["n"].min()
    max_runs = frame["n"].max()
    run_count = count_noun(max_runs, "run")
    if min_runs < max_runs:
        run_count = f"{min_runs} to {run_count}"
    caption = (
        f"{escape_group_name(group)}, order {escape_group_name(order)}: {escape(description)} on each test "
        f"set (column) after each stage (row); means over {run_count}."
    )
    return PaperTable(f"matrix-{kind}-{group}-{order}", caption, cells)


def format_settings(settings: DataFrame) -> DataFrame:
    """A row for each group: its numeric options, `strength~=~5, temperature~=~0.1`."""
    options: dict[str, list[str]] = defaultdict(list)
    for row in settings.itertuples():
        if fits(row.value, Number) and not isinstance(row.value, bool):
            name = row.setting.removeprefix("method.")
            options[row.group].append(f"{escape(name)}~=~{escape(f'{row.value:g}')}")
    cells = [(escape_in_column(group), ", ".join(texts)) for group, texts in options.items()]
    return DataFrame(cells, columns=["method", "options"])


def escape(text: object) -> str:
    """Text as TeX shows it."""
    return strip_controls(str(text)).translate(TRANSLATION)


def escape_group_name(name: str) -> str:
    """The name of a group or an order as TeX shows it. A long one, like that of a group with sources of
    replay and their paths, may be broken after its separators."""
    escaped = escape(name)
    return escaped if len(name) < LONG_NAME else SEPARATORS.sub(lambda match: match[0] + BREAK, escaped)


def escape_in_column(name: str) -> str:
    """The name of a group as a cell of the first column, which has lines if a name is long."""
    return escape(name) if len(name) < LONG_NAME else rf"{{\raggedright {escape_group_name(name)}\par}}"


def choose_column_format(table: PaperTable) -> str:
    """The columns of a table as TeX has them: text on one line, text in lines of a width, numbers."""
    names = table.cells.iloc[:, 0]
    has_long_names = names.str.startswith(r"{\raggedright").any()
    name_column = r"p{0.35\linewidth}" if has_long_names else "l"
    if table.name == "settings":
        return name_column + (r"p{0.55\linewidth}" if has_long_names else r"p{0.7\linewidth}")
    return name_column + "r" * (len(table.cells.columns) - 1)


def escape_number(text: str) -> str:
    """A cell of numbers as TeX shows it. The sign of a negative one is a minus: a hyphen is shorter."""
    return escape(text.replace("-", "−"))


def write_tables(sections: Sequence[RunSection], folder: Path) -> list[Path]:
    """Writes NAME.tex for each table; of several sections, section_2-NAME.tex. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    stems: set[str] = set()  # in lower case, as some file systems do not distinguish it
    for number, section in enumerate(sections, start=1):
        for table in list_tables(section):
            stem = re.sub(r"[^\w.-]+", "_", table.name, flags=re.A).replace("_-", "-").strip("_")
            if len(sections) > 1:
                stem = f"section_{number}-{stem}"
            if len(stem) > MAX_STEM or stem.lower() in stems:
                stem = f"{stem[:MAX_STEM]}-{digest(table.name)[:8]}"
            stems.add(stem.lower())

            text = table.cells.to_latex(
                index=False,
                escape=False,
                caption=table.caption,
                label=f"tab:{stem}",
                column_format=choose_column_format(table),
                position="t",
            )
            text = text.replace("\\begin{table}[t]\n", "\\begin{table}[t]\n\\centering\n", 1)
            write_atomically(folder / f"{stem}.tex", f"% needs \\usepackage{{booktabs}}\n{text}")
            paths.append(folder / f"{stem}.tex")
    return paths
