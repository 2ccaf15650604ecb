"""What a comparison says in a few sentences: who is best at what, by how much, and what cannot be told."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cpt.evaluation.pairs import LEVEL, least_p, needed_pairs
from cpt.evaluation.statistics import LEAST, Difference, compare_pairs
from cpt.reporting.comparison.differences import CorrectedDifference, contrasts, correct_holm
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import MEASURES, Measure
from cpt.reporting.page import Block, few

BUDGET = 1.1  # times the baseline's FLOPs: what still counts as equal compute
FORGOTTEN, LAST, FLOPS = "FG/nats", "LC/perplexity", "cost/flops"
UNITS = {"LC/perplexity": "perplexity", "CPT/nats": "nats", FORGOTTEN: "nats"}
QUESTIONS = {  # by measure, how the sentence begins
    FORGOTTEN: "Forgets least",
    "CPT/nats": "Learns most",
    LAST: "Best average at the end",
    "endtask/MF1": "Best end tasks",
    "answers/AP": "Best answers",
}
HOW = (
    "Best by its mean over runs [95 % interval: Student's t, or BCa bootstrap of 8 runs and more; none of "
    "fewer than 3]; against others by the mean paired difference over the orders and seeds that both have, "
    "the sign-flip test (p) and the paired t test, each with Holm over all the others. The sign-flip test "
    "tells groups apart. The best was chosen by the same runs: its lead is, if anything, too large. Left out "
    "are methods without a sequence (`joint`, `one`, `none`)."
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The best group by a measure, and its paired differences from the others, by their names."""

    measure: Measure
    best: Group
    others: Mapping[str, CorrectedDifference]

    @property
    def alike(self) -> list[str]:
        """What the test does not tell apart from it."""
        return [name for name, each in self.others.items() if each.holm >= LEVEL]

    @property
    def within(self) -> list[str]:
        """What even the interval of the difference, without a correction, does not tell apart from it."""
        return [name for name, each in self.others.items() if not excludes_zero(each.difference)]


@lru_cache(maxsize=16)  # the page and the console ask for the same ones
def build_findings(section: ComparedRuns) -> Block:
    """Nothing of fewer than two groups that learned a sequence."""
    lines = [line for groups in split_groups(section) for line in tell_groups(section, groups)]
    return Block(title="Findings", lines=[*lines, HOW] if lines else [])


def split_groups(section: ComparedRuns) -> list[list[Group]]:
    """The groups that can be set beside each other: of one model, and of one order where these are apart."""
    beside = defaultdict(list)
    for group in section.groups:
        if not group.alone and group.mean(FORGOTTEN) is not None:
            beside[group.model, group.order].append(group)
    return [groups for groups in beside.values() if len(groups) > 1]


def tell_groups(section: ComparedRuns, groups: Sequence[Group]) -> list[str]:
    several = len(split_groups(section)) > 1
    whose = f" ({groups[0].model}{', order ' + groups[0].orders[0] if groups[0].order else ''})" * several
    lines = []
    for measure in MEASURES:
        if measure.key in QUESTIONS and (found := find_best(groups, measure)):
            lines.append(tell(found, section, begin=QUESTIONS[measure.key] + whose))
            if measure.key == FORGOTTEN:
                lines += tell_given_domain(section, groups, measure=measure, whose=whose)
    return [*lines, *tell_equal_compute(section, groups, whose=whose)]


def tell_given_domain(
    section: ComparedRuns, groups: Sequence[Group], *, measure: Measure, whose: str
) -> list[str]:
    """Which groups are given the domain at test time, so that a part of the model can be kept for each, and
    the best of the others."""
    given = [group.name for group in groups if group.needs_domain]
    rest = [group for group in groups if not group.needs_domain]
    if not given:
        return []
    lines = [f"Given the domain of a text at test time{whose}: {few(given, between=', ')}."]
    if found := find_best(rest, measure):
        return [*lines, tell(found, section, begin=f"Forgets least without it{whose}")]
    return [f"{lines[0]} Not given it: {rest[0].name if rest else 'none'}."]


def find_best(groups: Sequence[Group], measure: Measure) -> Finding | None:
    """None where fewer than two groups have the number."""
    having = [group for group in groups if group.mean(measure.key) is not None]
    if len(having) < 2:
        return None
    best = sorted(having, key=lambda each: (each.mean(measure.key) or 0.0) * (-1 if measure.higher else 1))[0]
    own = best.by_pair(measure.key)
    pairs = {g.name: compare_pairs(own, g.by_pair(measure.key)) for g in having if g is not best}
    others = correct_holm({name: each for name, each in pairs.items() if each.n})
    return Finding(measure=measure, best=best, others=others)


def tell(found: Finding, section: ComparedRuns, *, begin: str) -> str:
    """`Forgets least: ewc, FG 0.0042 [0.0030, 0.0051] nats (runs: 3); -0.2 [-0.3, -0.1] against ncl …`"""
    measure, spread = found.measure, found.best.spread(found.measure.key)
    bounds = "" if spread.low is None else f" [{measure.show(spread.low)}, {measure.show(spread.high or 0)}]"
    unit = UNITS.get(measure.key, "")
    title = measure.title.removesuffix(f" ({unit})")
    told = f"{begin}: `{found.best.name}`, {title} {measure.show(spread.mean or 0)}{bounds} {unit}".rstrip()
    runs = f" (runs: {spread.n}{'' if bounds else ', no interval'})"
    return f"{told}{runs}{_against_baseline(found, section)}. {_apart(found)}"


def _against_baseline(found: Finding, section: ComparedRuns) -> str:
    given = contrasts(section, found.measure).get(found.best.name)
    if given is None:
        return ""
    mean, low, high, p, n, p_t = given.difference
    show = found.measure.show
    bounds = f" [{show(low)}, {show(high)}]" if math.isfinite(low) else ""
    against = f"{show(mean)}{bounds} against {section.baselines[found.best.name].name}"
    by_t = "" if p_t is None else f", paired t {p_t:.2g}, Holm {given.holm_t:.2g}"
    return f"; {against}, p {p:.2g}, Holm {given.holm:.2g}{by_t} ({n} pair{'s' * (n > 1)})"


def _apart(found: Finding) -> str:
    """What it cannot be told apart from; why, if there are too few pairs."""
    count, alike = len(found.others), found.alike
    if not count:
        return "No other group has an order and seed in common with it."
    if not alike:
        return f"Told apart from all {count} others (Holm p < {LEVEL:.2g})."
    most = max(each.difference.n for each in found.others.values())
    if len(alike) < count or least_p(most) * count < LEVEL:
        names = few(alike, between=", ")
        return f"Not told apart from {len(alike)} of {count} others (Holm p ≥ {LEVEL:.2g}): {names}."
    needed = f"Holm over {count} needs {needed_pairs(count)} pairs"
    if most < LEAST:
        return f"Not told apart from the {count} others by {most} pair{'s' * (most > 1)}: {needed}."
    within = few(found.within, between=", ")
    told = f"The paired intervals exclude 0 against all {count} others{' but ' * bool(within)}{within}"
    return f"{told}; the test cannot confirm it ({most} pairs: no p below {least_p(most):.2g}; {needed})."


def tell_equal_compute(section: ComparedRuns, groups: Sequence[Group], *, whose: str) -> list[str]:
    """The best average among the groups that took no more than the baseline; nothing without a baseline or
    counted operations."""
    bases = {section.baselines[group.name].name for group in groups if group.name in section.baselines}
    if len(bases) != 1:
        return []
    (name,) = bases
    limit = next((g.mean(FLOPS) for g in section.groups if g.name == name), None)
    if not limit:
        return [f"Best at equal compute{whose}: not known, {name} has no counted FLOPs."]
    within = [g for g in groups if (cost := g.mean(FLOPS)) is not None and cost <= BUDGET * limit]
    measure = next(each for each in MEASURES if each.key == LAST)
    found = find_best(within, measure)
    if found is None:
        return [f"Best at equal compute{whose}: no group but {name} took at most {BUDGET} times its FLOPs."]
    begin = f"Best at equal compute{whose} (at most {BUDGET} times {name}'s FLOPs, {len(within)} groups)"
    return [tell(found, section, begin=begin)]


def excludes_zero(difference: Difference) -> bool:
    """Whether the interval of a difference is on one side of 0; where there is none (nan) it is not."""
    return difference.low > 0 or difference.high < 0
