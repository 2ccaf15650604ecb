"""Tables of a paper: their numbers as frames (`cpt.load_tables`), and TeX for booktabs (`--tex FOLDER`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pandas import DataFrame, concat

from cpt.core.config import digest
from cpt.core.files import replace
from cpt.core.schema import Number, fits
from cpt.evaluation.scores import describe_conditions
from cpt.evaluation.statistics import LEVEL
from cpt.reporting import compare
from cpt.reporting.compare import ComparedMeasure
from cpt.reporting.frames import FEW, Show, find_matrices, percent, perplexity, strip_controls
from cpt.reporting.load_runs import RunGroup, RunSection, differing_settings, name_orders
from cpt.reporting.page import LEGENDS

BY_ORDER = {"answers/AP": "AP", "endtask/MF1": "MF1", "LC/perplexity": "LC"}
OVER_TASKS = ("endtask/MF1", "endtask/Acc", "endtask/forget_rate")
KNOWN = {measure.key: measure for measure in compare.MEASURES}
MATRICES: dict[str, tuple[Show, str]] = {
    "perplexity": (perplexity, "perplexity"),
    "answers": (percent, "score of the task answers, in %"),
    "endtasks": (percent, "score of the downstream tasks, in %"),
}
NOT_OPTIONS = ("name", "seed", "_target_", "_partial_")
LONGEST_STEM = 80  # characters of a file's name
ESCAPED = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
ESCAPED |= {"±": r"$\pm$", "−": "$-$", "→": r"$\rightarrow$", "<": "$<$", ">": "$>$", "|": r"\textbar{}"}
ESCAPED |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


class PaperTable(NamedTuple):
    name: str  # of its file
    caption: str
    cells: DataFrame  # TeX; the columns are its head


def measure_tables(section: RunSection) -> dict[str, DataFrame]:
    """The numbers of all tables, tidy: `main`, `endtasks` and `orders` have a row for each group, measure and
    order (all: over all runs), `matrix` for each cell of the mean matrix of a group and an order, `settings`
    for each option of a group in which runs differ. Shares are in 0..1."""
    tasks = {task: None for run in section.runs for task in run.scores.endtasks.get("metric", {})}
    names = name_orders(section.runs)
    frame = section.frame[section.frame["key"].isin(BY_ORDER)].rename(columns={"key": "measure"})
    frame["order"] = frame["order"].map(names)
    each = frame.groupby(["group", "measure", "order"], sort=False)["value"]
    orders = each.agg(mean="mean", sd="std", n="count").reset_index()
    over_all = measure_groups(section, [KNOWN[key] for key in BY_ORDER])
    keys = [key for key in differing_settings(section.runs) if key.split(".")[-1] not in NOT_OPTIONS]
    settings = [
        (group.name, key, group.runs[0].settings[key])
        for group in section.groups
        for key in keys
        if group.runs[0].settings.get(key) not in (None, {})
    ]
    endtasks = [*(list_task(task) for task in tasks), *(KNOWN[key] for key in OVER_TASKS)]
    return {
        "main": measure_groups(section, [m for m in compare.MEASURES if m.key in compare.BRIEF]),
        "endtasks": measure_groups(section, endtasks) if tasks else DataFrame(),
        "orders": concat([orders, over_all], ignore_index=True) if len(names) > 1 else DataFrame(),
        "matrix": DataFrame(measure_matrices(section)),
        "settings": DataFrame(settings, columns=["group", "setting", "value"]),
    }


def list_task(task: str) -> ComparedMeasure:
    """An end task in its own metric."""
    return ComparedMeasure(f"task/{task}", task, percent, higher=True)


def measure_groups(section: RunSection, measures: Iterable[ComparedMeasure]) -> DataFrame:
    """A row for each group and measure: mean, sd, n, the interval [low, high] of the mean over runs, and the
    paired difference from the baseline with p-values of both tests, before and after Holm's correction."""
    rows, spreads = [], compare.spread_values(section)
    for measure in measures:
        contrasts = compare.contrast_groups(section, measure.key)
        for group in section.groups:
            if spread := spreads[group.name].get(measure.key):
                row = {"group": group.name, "measure": measure.key, "order": "all", **spread._asdict()}
                if contrast := contrasts.get(group.name):
                    row |= {"baseline": section.baselines[group.name].name, "difference": contrast.mean}
                    row |= {name: getattr(contrast, name) for name in ("p", "p_holm", "p_t", "p_t_holm")}
                rows.append(row)
    numbers = ["mean", "sd", "low", "high", "difference", "p", "p_holm", "p_t", "p_t_holm"]
    columns = ["group", "measure", "order", "baseline", "n", *numbers]
    return DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))


def measure_matrices(section: RunSection) -> Iterator[dict[str, object]]:
    """The cells that some run of a group and an order has, means over these runs."""
    names = name_orders(section.runs)
    for group in section.groups:
        for order in dict.fromkeys(run.pair[0] for run in group.runs):
            cells: dict[tuple[str, str, str], list[float]] = defaultdict(list)
            for scores in (run.scores for run in group.runs if run.pair[0] == order):
                for kind, table in find_matrices(scores).items():
                    for row, column in np.argwhere(np.isfinite(table.to_numpy())).tolist():
                        place = kind, table.index[row], table.columns[column]
                        cells[place].append(float(table.iat[row, column]))
            for (kind, stage, text), values in cells.items():
                about = {"group": group.name, "order": names[order], "kind": kind, "row": stage, "text": text}
                sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
                yield about | {"mean": float(np.mean(values)), "sd": sd, "n": len(values)}


def list_tables(section: RunSection) -> Iterator[PaperTable]:
    """The tables of a section, as TeX."""
    found = measure_tables(section)
    tested = LEGENDS["tex"].format(baseline=escape(section.baseline), level=LEVEL)
    main = format_groups(section, found["main"], "measure")
    yield PaperTable("main", f"{escape(describe_conditions(section.conditions))}. {tested}", main)
    if len(found["endtasks"]):
        told = "Downstream tasks after the last stage in which each was measured, in \\%; MF1, Acc: means."
        yield PaperTable("endtasks", f"{told} {tested}", format_groups(section, found["endtasks"], "measure"))
    for key, frame in found["orders"].groupby("measure", sort=False) if len(found["orders"]) else ():
        title = escape(KNOWN[key].title)
        about = f"{title} by the order of the domains. {tested} The tests are over all orders."
        yield PaperTable(f"orders-{BY_ORDER[key]}", about, format_groups(section, frame, "order"))
    matrices = found["matrix"]
    for (group, order, kind), cells in matrices.groupby(["group", "order", "kind"], sort=False):
        texts = list(dict.fromkeys(cells["text"]))
        if cells["row"].nunique() > 1 and len(texts) <= FEW + 1:
            show, about = MATRICES[kind]
            table = cells.pivot(index="row", columns="text", values="mean")
            table = table.loc[list(dict.fromkeys(cells["row"])), texts].map(show).replace("nan", "–")
            table = table.reset_index(names="after", allow_duplicates=True).map(escape)
            table.columns = ["after", *map(escape, texts)]
            fewest, most = cells["n"].min(), cells["n"].max()
            runs = str(most) if fewest == most else f"{fewest} to {most}"
            caption = (
                f"{escape(group)}, order {escape(order)}: {escape(about)} on each test set (column) after "
                f"each stage (row); means over {runs} runs."
            )
            yield PaperTable(f"matrix-{kind}-{group}-{order}", caption, table)
    settings = found["settings"]
    numeric = settings[[fits(value, Number) and not isinstance(value, bool) for value in settings["value"]]]
    if len(numeric):
        told = numeric["setting"].str.removeprefix("method.") + "~=~" + numeric["value"].map("{:g}".format)
        cells = told.groupby(numeric["group"], sort=False).agg(", ".join).reset_index()
        cells = cells.map(lambda text: escape(text).replace(escape("~=~"), "~=~"))
        cells.columns = ["method", "options"]
        yield PaperTable("settings", "Numeric options in which the methods differ.", cells)


def format_groups(section: RunSection, frame: DataFrame, by: str) -> DataFrame:
    """A row per group and a column per measure or order: mean ± sd, the best mean in bold, with marks, and
    the number of runs where not all of the group's have the value."""
    groups = {group.name: group for group in section.groups}
    orders = name_orders(section.runs)
    table = DataFrame({"method": map(escape, groups)}, index=list(groups))
    for name, cells in frame.groupby(by, sort=False):
        measure = KNOWN.get(cells["measure"].iloc[0]) or list_task(cells["measure"].iloc[0][5:])
        means = cells.set_index("group")["mean"]
        ranked = means[[group for group in means.index if compare.is_ranked(groups[group], measure.key)]]
        best = ranked.max() if measure.higher else ranked.min()
        pairs = compare.pair_values(section, measure.key)
        has_equal_pairs = len({frozenset(pairs.get(group, ())) for group in ranked.index}) == 1

        column = dict.fromkeys(groups, "--")
        for cell in cells.to_dict("records"):
            deviation = "" if np.isnan(cell["sd"]) else f" ± {measure.show(cell['sd'])}"
            text = escape(measure.show(cell["mean"]) + deviation)
            if cell["mean"] == best and has_equal_pairs:
                text = f"\\textbf{{{text}}}"
            marks = "*" if cell["p_holm"] < LEVEL else ""
            if cell["p_t_holm"] < LEVEL:
                marks += r"\dagger"
            if marks:
                text += f"\\textsuperscript{{${marks}$}}"
            if cell["n"] < count_runs(groups[cell["group"]], orders, order=cell["order"]):
                text += f" ({cell['n']})"
            column[cell["group"]] = text
        order_title = "all orders" if name == "all" else f"order {name}"
        table[escape(measure.title if by == "measure" else order_title)] = column
    return table.reset_index(drop=True)


def count_runs(group: RunGroup, orders: Mapping[tuple[str, ...], str], *, order: str) -> int:
    """The runs of a group that differ in order or seed: of one order by its name in `orders`, or of `all`."""
    pairs = {run.pair for run in group.runs}
    if order == "all":
        return len(pairs)
    return sum(orders[pair[0]] == order for pair in pairs)


def escape(text: object) -> str:
    """Text as TeX shows it."""
    return strip_controls(str(text)).translate({ord(sign): tex for sign, tex in ESCAPED.items()})


def write_tables(sections: Sequence[RunSection], folder: Path) -> list[Path]:
    """Writes NAME.tex for each table; of several sections, section_2-NAME.tex. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    stems: set[str] = set()  # in lower case, as some file systems do not distinguish it
    for number, section in enumerate(sections, start=1):
        for name, caption, cells in list_tables(section):
            stem = re.sub(r"[^\w.-]+", "_", name, flags=re.A).replace("_-", "-").strip("_")
            if len(sections) > 1:
                stem = f"section_{number}-{stem}"
            if len(stem) > LONGEST_STEM or stem.lower() in stems:
                stem = f"{stem[:LONGEST_STEM]}-{digest(name)[:8]}"
            stems.add(stem.lower())
            numbers = "r" * (len(cells.columns) - 1)
            text = cells.to_latex(
                index=False,
                escape=False,
                caption=caption,
                label=f"tab:{stem}",
                column_format=r"lp{0.7\linewidth}" if name == "settings" else f"l{numbers}",
                position="t",
            )
            replace(folder / f"{stem}.tex", f"% needs \\usepackage{{booktabs}}\n{text}")
            written.append(folder / f"{stem}.tex")
    return written
