"""What a reader of a comparison must know of its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cpt.evaluation.scores import describe_conditions
from cpt.evaluation.task_metrics import head_of
from cpt.reporting.comparison.groups import ComparedRuns, Group, differing, order_names
from cpt.reporting.comparison.runs import tasks_of
from cpt.reporting.page import few

ASSUMED = (
    "runs do not say all of this, being of an earlier cpt; it is taken from the others, as their texts have "
    "exactly as many tokens, scored tokens and bytes"
)
MASKED = (
    "Bits per byte of a masked model are its loss on masked tokens times tokens per byte: no code length, "
    "and comparable within these runs only."
)
SPAN = (
    "Bits per byte of a model of span corruption are its loss on hidden tokens times tokens per byte: no "
    "code length, and comparable within these runs only."
)
BASE_SEED = "model.base.seed"
ONE_BASE = (
    "The runs of a model share its base and one split of the texts, whatever their seed and order. Intervals "
    "and p-values over runs are about orders, masked positions and dropout: not about other bases or texts."
)
ONE_SPLIT = (
    f"All runs share one split of the texts; their bases differ in {BASE_SEED}. Intervals and p-values over "
    "runs are not about other texts."
)
APART = ("CPT/", "intransigence/", "endtask/", "task/", "cost/")  # what such a method is measured by
SETTINGS = 8  # so many differing settings are named


def is_ranked(group: Group, key: str) -> bool:
    """Whether a group is ranked by a measure: what is said of one model after all domains is not true of
    models that learned a domain each."""
    return not group.alone or key.startswith(APART)


def notes(section: ComparedRuns) -> list[str]:
    """What the names stand for, and what keeps groups from being compared."""
    kinds = (_conditions, _shared, _orders, _alone, _given, _copies, _settings, _measures, _baselines)
    return [line for kind in kinds for line in kind(section)]


def list_measures(section: ComparedRuns) -> dict[str, list[str]]:
    """What each task is known by; of a comparison by it, one measure."""
    said: dict[str, set[str]] = defaultdict(set)
    for run in section.runs:
        for task, told in tasks_of(run).items():
            said[task].add(head_of(told))
    return {task: sorted(names) for task, names in said.items()}


def _measures(section: ComparedRuns) -> list[str]:
    """Tasks that runs know by different measures."""
    several = [
        f"{task} ({', '.join(names)})" for task, names in list_measures(section).items() if len(names) > 1
    ]
    return [f"AP and what goes with it compare different measures: {few(several, between=', ')}."] * bool(
        several
    )


def _conditions(section: ComparedRuns) -> list[str]:
    """What perplexity means here."""
    lines = [f"Perplexity of all these runs: {describe_conditions(section.conditions)}."]
    assumed = [run for run in section.runs if run.assumed]
    if assumed:
        names = ", ".join(dict.fromkeys(name for run in assumed for name in run.assumed))
        lines.append(f"{len(assumed)} of {len(section.runs)} {ASSUMED} ({names}).")
    return lines + {"masked": [MASKED], "span": [SPAN]}.get(section.objective, [])


def _shared(section: ComparedRuns) -> list[str]:
    """What runs with other seeds have in common; nothing where there is one run of each group."""
    bases = {str(run.settings[BASE_SEED]) for run in section.runs if BASE_SEED in run.settings}
    if all(len(group.runs) == 1 for group in section.groups):
        return []
    return [ONE_SPLIT] if len(bases) > 1 else [ONE_BASE]


def _orders(section: ComparedRuns) -> list[str]:
    """What the orders are called, where there are several."""
    names = order_names(section.runs)
    lines = [f"order {name}: {few(order)}" for order, name in names.items() if name != ",".join(order)]
    return lines if len(names) > 1 else []


def explain_alone(groups: Sequence[Group]) -> list[str]:
    """Which of the groups' methods learn every domain from the base, and what that means; nothing if none."""
    methods = " and ".join(sorted({f"`{group.method}`" for group in groups if group.alone}))
    meaning = "their CPT counts; their LC and FG compare models that never met"
    return [f"Methods that learn every domain from the base ({methods}): {meaning}."] if methods else []


def _alone(section: ComparedRuns) -> list[str]:
    return explain_alone(section.groups)


def _given(section: ComparedRuns) -> list[str]:
    names = [group.name for group in section.groups if group.needs_domain]
    return [f"Given the domain of a text at test time: {few(names, between=', ')}."] * bool(names)


def _copies(section: ComparedRuns) -> list[str]:
    return [
        f"{group.name}: runs with one order and seed; copies, or they differ in more than config.yaml says."
        for group in section.groups
        if len({run.pair for run in group.runs}) < len(group.runs)
    ]


def _settings(section: ComparedRuns) -> list[str]:
    """Settings beside those of a method in which the groups differ: the comparison is then of these too."""
    own = ("method.", "mask.", "replay.", "routing.", "model.")
    keys = [key for key in differing(section.runs) if not key.startswith(own)]
    more = f" and {len(keys) - SETTINGS} more" * (len(keys) > SETTINGS)
    return [f"The runs differ beyond their methods, in {', '.join(keys[:SETTINGS])}{more}."] * bool(keys)


def _baselines(section: ComparedRuns) -> list[str]:
    if section.baselines or len(section.groups) < 2:
        return []
    return [
        f"No differences: no single group {section.baseline} with the same model and orders to compare with."
    ]
