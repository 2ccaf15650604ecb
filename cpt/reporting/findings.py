"""The sentences of a comparison page: the conditions of the runs, the best groups as tiles, and findings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpt.core.messages import abbreviate, count_noun
from cpt.evaluation.scores import describe_conditions
from cpt.evaluation.statistics import SIGNIFICANCE_LEVEL
from cpt.reporting.compare import INTERVAL_LEGEND, format_difference
from cpt.reporting.contrasts import (
    BestGroup,
    find_best,
    find_contrasts,
    find_spreads,
    group_by_sequence,
    is_significantly_better,
)
from cpt.reporting.formats import (
    format_interval,
    format_perplexity,
    format_thousandths,
    list_names,
    list_order,
    shorten,
)
from cpt.reporting.load_runs import LeftOut
from cpt.reporting.measures import MEASURES, ComparedMeasure, select_measured
from cpt.reporting.page import LEGENDS, Block
from cpt.reporting.sections import RunGroup, RunSection, find_differing_settings, name_orders

MAX_NAMED_SETTINGS = 8  # differing settings that a note names
TOKENS_TOLERANCE = 1.01  # times those of another group, up to which they are called equal
FLOPS_TOLERANCE = 1.05
MAX_VALUE_WIDTH = 40  # characters of a setting's value in a note
METHOD_SETTINGS = ("method.", "mask.", "replay.", "routing.")  # in which groups differ by design
TILES = (  # a measure, and how it is computed
    (
        ComparedMeasure("LC/perplexity", "best at the end", format_perplexity),
        "final perplexity, mean over domains",
    ),
    (
        ComparedMeasure("learned/nats", "learned most", format_thousandths, higher_is_better=True),
        "base − just learned",
    ),
    (ComparedMeasure("FG/nats", "forgot least", format_thousandths), "final − just learned"),
    (ComparedMeasure("general_drift/nats", "general rose least", format_thousandths), "final − base"),
)


@dataclass(frozen=True)
class FindingText:
    """How the sentence on a measure begins, and the unit of its numbers."""

    opening: str
    unit: str = ""


FINDINGS = {
    "FG/nats": FindingText("Forgets least", " nats"),
    "CPT/nats": FindingText("Learns most", " nats"),
    "LC/perplexity": FindingText("Best average at the end", " perplexity"),
    "endtask/MF1": FindingText("Best end tasks"),
    "answers/AP": FindingText("Best answers"),
}


def list_conditions(section: RunSection) -> Block:
    """What a reader must know before comparing the groups of a section."""
    groups = section.groups
    objective = section.conditions["objective"]
    lines = [f"Perplexity of all these runs: {describe_conditions(section.conditions)}."]
    if section.other_bases:
        lines.append(describe_bases(section))
    if objective != "causal":
        lines.append(LEGENDS["code"].format(objective=objective))
    if any(len(group.runs) > 1 for group in groups):
        lines.append(LEGENDS["base"])

    order_names = name_orders(section.runs)
    if len(order_names) > 1:
        for domains, name in order_names.items():
            if name != ",".join(domains):
                lines.append(f"order {name}: {list_order(domains)}")

    trained_from_base = sorted({f"`{group.method}`" for group in groups if group.trains_from_base})
    if trained_from_base:
        lines.append(LEGENDS["alone"].format(methods=" and ".join(trained_from_base)))
    needs_domain = [group.name for group in groups if group.needs_domain]
    if needs_domain:
        lines.append(f"Given the domain of a text at test time: {list_names(needs_domain)}.")

    settings = [key for key in find_differing_settings(section.runs) if not key.startswith(METHOD_SETTINGS)]
    if settings:
        lines.append(describe_settings(section, settings))
    costs = {group.name: (group.mean("cost/tokens"), group.mean("cost/flops")) for group in groups}
    fairness = describe_fairness(costs)
    if fairness:
        lines.append(fairness)
    lines += describe_left_out(section)
    lines += describe_versions(section)
    if not section.baselines and len(groups) > 1:
        lines.append(f"No differences: no single group {section.baseline} with the same model and orders.")
    return Block(title="Conditions", lines=lines)


def describe_bases(section: RunSection) -> str:
    """The base of a section, and the bases of sections that differ in nothing else, with their groups and the
    differing settings of the model."""
    other_bases = []
    for base, groups in section.other_bases.items():
        other_bases.append(f"{base} ({list_names(groups)})")

    settings = ""
    if section.base_settings:
        settings = f" They differ in {', '.join(section.base_settings[:MAX_NAMED_SETTINGS])}"
        num_hidden = len(section.base_settings) - MAX_NAMED_SETTINGS
        if num_hidden > 0:
            settings += f" and {num_hidden} more"
        settings += "."
    return (
        f"The bases differ: these runs begin with {section.conditions['base']}, runs of other sections over "
        f"the same texts with {'; '.join(other_bases)}.{settings} A difference between these sections is not "
        "one of methods."
    )


def describe_settings(section: RunSection, settings: Sequence[str]) -> str:
    """The settings in which the runs of a section differ, each with its values and the groups that have
    them."""
    descriptions = []
    for setting in settings[:MAX_NAMED_SETTINGS]:
        groups_by_value: dict[str, dict[str, None]] = defaultdict(dict)  # ordered sets of names
        for group in section.groups:
            for run in group.runs:
                value = run.show_setting(setting)
                groups_by_value[value][group.name] = None

        values = []
        for value, groups in groups_by_value.items():
            values.append(f"{shorten(value, width=MAX_VALUE_WIDTH)} ({abbreviate(groups, with_count=True)})")
        descriptions.append(f"{setting}: {abbreviate(values, with_count=True)}")

    num_hidden = len(settings) - MAX_NAMED_SETTINGS
    if num_hidden > 0:
        descriptions.append(f"and {num_hidden} more")
    return f"The runs differ beyond their methods, in {'; '.join(descriptions)}."


def describe_fairness(costs: Mapping[str, tuple[float | None, float | None]]) -> str:
    """Whether groups took as many tokens and operations per run; empty of fewer than two groups.

    `costs`: both by group, None where they are unknown. A group without tokens trains nothing and is left
    out; operations of 0 for some tokens are unknown, too."""
    known_costs: list[tuple[float, float]] = []
    unknown = []
    for group, (tokens, flops) in costs.items():
        if tokens == 0:
            continue
        if tokens and flops:
            known_costs.append((tokens, flops))
        else:
            unknown.append(group)
    if len(known_costs) < 2:
        return ""

    descriptions = []
    all_tokens, all_flops = zip(*known_costs, strict=True)
    for unit, tolerance, values in (
        ("tokens", TOKENS_TOLERANCE, all_tokens),
        ("operations", FLOPS_TOLERANCE, all_flops),
    ):
        low = min(values)
        high = max(values)
        if high <= tolerance * low:
            descriptions.append(f"equal {unit} ({high:.3g} per run)")
        else:
            descriptions.append(f"different {unit} ({low:.3g} to {high:.3g} per run)")
    if unknown:
        descriptions.append(f"unknown of {list_names(unknown)}")
    return f"Fairness: {', '.join(descriptions)}."


def describe_left_out(section: RunSection) -> list[str]:
    """A line for everything that is not compared, since some runs measured it in another way than most."""
    left_out: dict[LeftOut, None] = {}  # an ordered set
    for run in section.runs:
        left_out |= dict.fromkeys(run.left_out)

    lines = []
    for values in left_out:
        names = [group.name for group in section.groups if has_left_out(group, values)]
        lines.append(f"Not compared: {values} of {list_names(names)}.")
    return lines


def has_left_out(group: RunGroup, values: LeftOut) -> bool:
    """Whether values of some run of a group are not compared."""
    return any(values in run.left_out for run in group.runs)


def describe_versions(section: RunSection) -> list[str]:
    """A line on the packages of which the runs were made with several versions, if there are any."""
    several = []
    for package in ("cpt", "torch"):
        versions = {run.scores.versions.get(package) for run in section.runs}
        if len(versions - {None}) > 1:
            several.append(package)
    return [f"Made with several versions of {', '.join(several)}."] if several else []


def build_tiles(section: RunSection) -> Block:
    """The best group of each measure in TILES, with its difference from the baseline. It is named as leading
    only if it is significantly better than another group."""
    groups_by_model = group_by_sequence(section)
    has_several_models = len(groups_by_model) > 1
    cells = []
    for (model, _), groups in groups_by_model.items():
        for measure, meaning in TILES:
            best = find_best(section, groups, measure)
            if best is None:
                continue
            tile = describe_tile(section, best, measure, meaning, is_only_group=len(groups) == 1)
            if has_several_models:
                tile[-1] += f"; {model}"
            cells.append(tile)

    head = ["best", "mean", "95 % interval", "test", "meaning"]
    lines = []
    if len(section.groups) > 1 and has_single_runs(section):
        lines.append("One run each: nothing is tested.")
    return Block(head=head, cells=cells, lines=lines, num_word_columns=5, is_tiles=True, name="tiles")


def has_single_runs(section: RunSection) -> bool:
    """Whether each group is a single run, so that no difference between groups can be tested."""
    return all(len(group.runs) == 1 for group in section.groups)


def describe_tile(
    section: RunSection, best: BestGroup, measure: ComparedMeasure, meaning: str, *, is_only_group: bool
) -> list[str]:
    """The texts of a tile: title, mean, interval, test and meaning."""
    metric_name, _, unit = measure.key.partition("/")
    spread = find_spreads(section, measure.key)[best.group.name]
    low: float | None = spread.low
    high: float | None = spread.high
    if len(best.group.runs) == 1:
        metric = best.group.runs[0].scores.metrics[metric_name]
        low, high = metric.get("interval", {}).get(unit, (None, None))
        if low is not None:
            meaning += "; interval over documents"
    interval = format_interval(low, high, measure.format_value).strip() or "no interval"

    # A mean that is the best by chance makes no leader.
    leader = best.group.name
    if is_only_group:
        leader += ", the only group"
    elif count_worse(best, measure) == 0:
        leader = "no group leads"
    return [
        f"{measure.title}: {leader}",
        f"{measure.format_value(spread.mean)} {unit}",
        interval,
        describe_lead(section, best, measure, is_only_group=is_only_group),
        f"{meaning}; runs: {spread.n}",
    ]


def describe_lead(
    section: RunSection, best: BestGroup, measure: ComparedMeasure, *, is_only_group: bool
) -> str:
    """`−6.20 against ncl, Holm p 0.03; better than 3 of 5 others`: the difference from the baseline if there
    is one, and how the best group compares with all others. Without a leader the group whose mean it is comes
    first."""
    sentences = []
    if not is_only_group and count_worse(best, measure) == 0:
        extreme = "highest" if measure.higher_is_better else "lowest"
        sentences.append(f"{extreme} mean: {best.group.name}")
    lead = find_contrasts(section, measure.key).get(best.group.name)
    if lead is not None:
        difference = measure.format_value(lead.mean).replace("-", "−")
        baseline = section.baselines[best.group.name].name
        sentence = f"{difference} against {baseline}"
        if not has_single_runs(section):
            sentence += f", Holm p {lead.p_holm:.2g}"
        sentences.append(sentence)

    num_others = len(best.contrasts)
    if num_others > 0 and not has_single_runs(section):
        num_worse = count_worse(best, measure)
        num_pairs = max(contrast.n for contrast in best.contrasts.values())
        num_needed = count_needed_pairs(num_others)
        if num_worse > 0:
            sentences.append(f"better than {num_worse} of {count_noun(num_others, 'other')}")
        elif num_pairs < num_needed:
            pairs = count_noun(num_pairs, "pair")
            sentences.append(f"{pairs}, {num_needed} needed for a test")
        else:
            sentences.append("no significant difference")
    return "; ".join(sentences)


def count_needed_pairs(num_tests: int) -> int:
    """The pairs from which a sign-flip test can be significant after Holm's correction over several tests.

    The smallest p-value of n pairs is 2^(1 - n), which Holm multiplies by the number of tests."""
    return math.ceil(1 + math.log2(num_tests / SIGNIFICANCE_LEVEL))


def count_worse(best: BestGroup, measure: ComparedMeasure) -> int:
    """The number of groups that the best one is significantly better than."""
    return sum(is_significantly_better(contrast, measure) for contrast in best.contrasts.values())


def build_findings(section: RunSection) -> Block:
    """A line for each measure of FINDINGS: the best group, its lead, and which groups may be as good."""
    groups_by_model = {key: groups for key, groups in group_by_sequence(section).items() if len(groups) > 1}
    measures = [measure for measure in select_measured(section, MEASURES) if measure.key in FINDINGS]

    lines = []
    for (model, order), groups in groups_by_model.items():
        scope = ""
        if len(groups_by_model) > 1:
            scope = f" ({model})" if not order else f" ({model}, order {groups[0].orders[0]})"
        for measure in measures:
            best = find_best(section, groups, measure)
            if best is not None:
                finding = describe_best(section, best, measure, scope)
                lines.append(f"{finding}. {describe_verdict(best, measure)}.")

    if lines:
        lines.append(LEGENDS["findings"].format(interval=INTERVAL_LEGEND))
    return Block(title="Findings", lines=lines)


def describe_best(section: RunSection, best: BestGroup, measure: ComparedMeasure, scope: str) -> str:
    """The best group, its mean over its runs, and its difference from the baseline, if it has one."""
    text = FINDINGS[measure.key]
    format_value = measure.format_value
    spread = find_spreads(section, measure.key)[best.group.name]
    title = measure.title.removesuffix(f" ({text.unit.strip()})")
    interval = format_interval(spread.low, spread.high, format_value)
    sentence = f"{text.opening}{scope}: `{best.group.name}`, "
    sentence += f"{title} {format_value(spread.mean)}{interval}{text.unit}, runs: {spread.n}"

    lead = find_contrasts(section, measure.key).get(best.group.name)
    if lead is None:
        return sentence
    baseline = section.baselines[best.group.name].name
    sentence += f"; {format_difference(lead, format_value)} against {baseline}"
    sentence += f", p {lead.p:.2g}, Holm {lead.p_holm:.2g}"
    if not math.isnan(lead.p_t):
        sentence += f", paired t {lead.p_t:.2g}, Holm {lead.p_t_holm:.2g}"
    return f"{sentence} ({count_noun(lead.n, 'pair')})"


def describe_verdict(best: BestGroup, measure: ComparedMeasure) -> str:
    """From how many of the other groups the best one is distinguished, and from which it is not."""
    contrasts = best.contrasts
    num_others = len(contrasts)
    num_worse = count_worse(best, measure)
    undistinguished = [name for name, contrast in contrasts.items() if contrast.p_holm >= SIGNIFICANCE_LEVEL]
    # The best group has the best mean over the pairs that all groups have. Over the pairs that it shares with
    # another group, which may be more, the other can be better.
    num_better = num_others - num_worse - len(undistinguished)

    worse_count = f"{num_worse} of {count_noun(num_others, 'other')}"
    verdict = f"Distinguished from {worse_count} (Holm p < {SIGNIFICANCE_LEVEL:.2g})"
    if num_better > 0:
        verdict += f", and worse than {num_better} over the pairs that they share"
    if not undistinguished:
        return verdict

    num_pairs = max(contrast.n for contrast in contrasts.values())
    min_pairs = count_needed_pairs(num_others)
    if num_pairs < min_pairs and len(undistinguished) == num_others:
        return f"No significant difference ({count_noun(num_pairs, 'pair')}; {min_pairs} needed)"
    if num_pairs < min_pairs:
        return f"{verdict}: Holm over {num_others} needs {count_noun(min_pairs, 'pair')} (here: {num_pairs})"
    return f"{verdict}, not from {list_names(undistinguished)}"
