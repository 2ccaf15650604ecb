"""A comparison as data: CSV (a line per run), LaTeX (the main table) and JSON (everything)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas

from cpt.core.files import replacing
from cpt.evaluation.conditions import describe_conditions
from cpt.evaluation.scores import RUN_KEYS
from cpt.reporting.comparison.answered import Line, on_answers
from cpt.reporting.comparison.differences import (
    CorrectedDifference,
    contrasts,
    list_present,
    measures_of_probes,
    on_examples,
    rank_groups,
)
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import COMPARED, COSTS, MEASURES, Measure, format_spread
from cpt.reporting.comparison.notes import is_ranked
from cpt.reporting.comparison.runs import Run
from cpt.reporting.frames import strip_controls, summarize_scores

# Columns of the CSV.
CONDITIONS = ("texts", "score_on", "tokenizer", "length", "mask_rate", "packing", "scored", "cap")
KINDS = ("csv", "latex", "json")
IN_TABLE = (
    "LC/perplexity",
    "CPT/nats",
    "FG/nats",
    "general_drift/nats",
    "answers/AP",
    "answers/F",
    "endtask/MF1",
    "endtask/forget_rate",
)
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "→": r"$\rightarrow$",
    "±": r"$\pm$",
    "…": r"\ldots{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what a formula begins with (OWASP, CSV injection)
Fault = Mapping[str, Any]


def export_sections(
    sections: Sequence[ComparedRuns], *, stem: Path, kinds: Sequence[str], beside: Fault
) -> list[Path]:
    """Writes STEM.csv, .tex, .json, whichever are asked for; `beside` goes into the JSON as it is."""
    writers: dict[str, tuple[str, Callable[[], str]]] = {
        "csv": (".csv", lambda: format_csv(sections, top=stem.parent)),
        "latex": (".tex", lambda: format_latex(sections)),
        "json": (".json", lambda: format_json(sections, top=stem.parent, beside=beside)),
    }
    paths = []
    for suffix, text in (writers[kind] for kind in kinds):
        paths.append(stem.with_name(stem.name + suffix))
        with replacing(paths[-1]) as partial:
            partial.write_text(text(), encoding="utf-8")
    return paths


def format_csv(sections: Sequence[ComparedRuns], *, top: Path) -> str:
    """A line per run: what it is, its group, the measures of the comparison and every number of its report.

    The latter are of all its texts, whatever `--domains` says; the former (`compared/…`) are not.
    """
    lines = [
        {
            **_facts(run, top=top),
            "section": number,
            "group": group.name,
            **{name: run.conditions[name] for name in CONDITIONS},
            **{f"compared/{key}": value for key, value in run.values.items()},
            **{
                f"{key}/value" if key in RUN_KEYS else key: x
                for key, x in summarize_scores(run.scores).items()
            },
        }
        for number, section in enumerate(sections, start=1)
        for group in section.groups
        for run in group.runs
    ]
    frame = pandas.DataFrame(lines, dtype=object).map(defuse)
    return frame.rename(columns=defuse).to_csv(index=False, lineterminator="\n")


def defuse(value: Any) -> Any:
    """With an apostrophe before a text that a spreadsheet would take for a formula; numbers stay."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _facts(run: Run, *, top: Path) -> dict[str, Any]:
    told = {key: run.scores.run[key] for key in RUN_KEYS if key not in ("order", "finished")}
    place = Path(os.path.relpath(run.folder, top)).as_posix()
    return {"folder": place, **told, "order": " ".join(run.scores.run["order"])}


def format_latex(sections: Sequence[ComparedRuns]) -> str:
    """A booktabs table per section: mean ± standard deviation, the best mean of each column in bold."""
    head = "% needs \\usepackage{booktabs}\n"
    return head + "\n".join(_tabular(section) for section in sections)


def _tabular(section: ComparedRuns) -> str:
    measures = [measure for measure in list_present(section, MEASURES) if measure.key in IN_TABLE]
    best = {measure.key: _best(section.groups, measure) for measure in measures}
    rows = [
        [
            escape_latex(group.name),
            str(len(group.runs)),
            *(_format_cell(group, each, best[each.key]) for each in measures),
        ]
        for group in section.groups
    ]
    head = ["group", "n", *(escape_latex(measure.title) for measure in measures)]
    shown = pandas.DataFrame(rows, columns=head).style.hide(axis="index")
    tabular = shown.to_latex(hrules=True, column_format="l" + "r" * (len(head) - 1))
    comments = (section.title, describe_conditions(section.conditions))
    return "".join(f"% {escape_latex(comment)}\n" for comment in comments) + tabular


def _best(groups: Sequence[Group], measure: Measure) -> float | None:
    counting = [group.mean(measure.key) for group in groups if is_ranked(group, measure.key)]
    means = [mean for mean in counting if mean is not None]
    return (max if measure.higher else min)(means, default=None)


def _format_cell(group: Group, measure: Measure, best: float | None) -> str:
    """Bold also where another mean is as good in the digits shown."""
    spread = group.spread(measure.key)
    text = escape_latex(format_spread(spread, show=measure.show, bounds=False)).replace(
        "-", "$-$", 1 if spread.n else 0
    )
    equal = best is not None and spread.mean is not None and is_ranked(group, measure.key)
    equal = equal and measure.show(spread.mean) == measure.show(best)
    return rf"\textbf{{{text}}}" if equal else text


def escape_latex(text: str) -> str:
    """As LaTeX prints it, on one line."""
    return re.sub("|".join(map(re.escape, SPECIAL)), lambda found: SPECIAL[found[0]], strip_controls(text))


def format_json(sections: Sequence[ComparedRuns], *, top: Path, beside: Fault) -> str:
    """Groups with their spreads, differences, ranks, values by run. A number that is not finite is null."""
    told = {"version": 1, "sections": [_describe_data(section, top=top) for section in sections], **beside}
    plain = json.loads(json.dumps(told), parse_constant=lambda constant: None)  # JSON has no nan and infinity
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _describe_data(section: ComparedRuns, *, top: Path) -> dict[str, Any]:
    differing = {
        each.key: {name: _describe_difference(given) for name, given in contrasts(section, each).items()}
        for each in list_present(section, [*COMPARED, *measures_of_probes(section)])
    }
    examples, _ = on_examples(section)
    return {
        "title": section.title,
        "objective": section.objective,
        "domains": section.domains,
        "conditions": dict(section.conditions),
        "groups": [_describe_group(group) for group in section.groups],
        "baselines": {name: group.name for name, group in section.baselines.items()},
        "differences": {key: found for key, found in differing.items() if found},
        "differences_on_examples": {name: _describe_difference(given) for name, given in examples.items()},
        "differences_on_answers": _describe_answers(section),
        "ranks": {key: found for key, found in rank_groups(section).items() if found},
        "runs": [
            {**_facts(run, top=top), "group": group.name, "values": run.values}
            for group in section.groups
            for run in group.runs
        ],
    }


def _describe_answers(section: ComparedRuns) -> dict[str, Any]:
    """By group: over all tasks, and of each task with what it is known by."""
    found = on_answers(section)
    return {
        name: {
            **_describe_line(whole),
            "tasks": {
                task: {"measure": lines[name].measures[0], **_describe_line(lines[name])}
                for task, lines in found.by_task.items()
                if name in lines
            },
        }
        for name, whole in found.whole.items()
    }


def _describe_line(line: Line) -> dict[str, Any]:
    counts = {name: getattr(line, name) for name in ("both", "group", "baseline")}
    return {**_describe_difference(line.difference), **counts}


def _describe_group(group: Group) -> dict[str, Any]:
    """Its spreads by key, of those that a run of it has."""
    keys = dict.fromkeys(
        [each.key for each in (*MEASURES, *COSTS)] + [k for r in group.runs for k in r.values]
    )
    spreads = {key: asdict(group.spread(key)) for key in keys if group.mean(key) is not None}
    facts = {"name": group.name, "method": group.method, "model": group.model, "orders": list(group.orders)}
    return {**facts, "runs": len(group.runs), "spreads": spreads}


def _describe_difference(given: CorrectedDifference) -> dict[str, Any]:
    return {**given.difference._asdict(), "p_holm": given.holm, "p_t_holm": given.holm_t}
