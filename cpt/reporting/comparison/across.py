"""What a reader must know of several sections, and the one number that may be compared across them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cpt.evaluation.conditions import NONE as NOT_SAID
from cpt.evaluation.conditions import is_unknown, text_digest
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import NONE, Measure, format_spread
from cpt.reporting.comparison.notes import explain_alone, is_ranked
from cpt.reporting.frames import decimals
from cpt.reporting.page import Block, few

APART = (
    "sections, each with its own tables, ranks, differences and pictures: a perplexity means another thing "
    "in each, so that no number of one may be compared with one of another"
)
BITS = "Bits per byte of causal models on the same bytes"
SIDE_BY_SIDE = (
    "Sections that differ in tokenizer or length alone: bits per byte are over the same held-out bytes, "
    "whatever the tokens are. A longer row gives more context; the first token of a row is not scored and "
    "counts as a mean one. Not ranked, no differences."
)
UNKNOWN = (
    "unknown: an earlier cpt did not write it down; what stands in brackets is equal where the texts have as "
    "many tokens, scored tokens or bytes."
)
CUT = (
    "Of texts above the cap (eval.tokens) a part is scored, drawn by rows: there bits per byte are an "
    "estimate of those of the whole text, from other tokens in each section."
)
MEASURES = tuple(
    Measure(key=f"{name}/bits_per_byte", title=name, show=decimals) for name in ("ZS", "CPT", "LC", "FG")
)


def build_heading(sections: Sequence[ComparedRuns]) -> list[Block]:
    """What keeps the sections apart, if there are several, and what may be compared all the same."""
    if len(sections) < 2:
        return []
    bits = bits_per_byte(sections)
    but = f", but for what stands under “{BITS}”." if bits else "."
    lines = [
        f"{len(sections)} {APART}{but}",
        *(_describe_section(s, n, sections) for n, s in enumerate(sections, 1)),
    ]
    if any(is_unknown(value) for section in sections for value in section.conditions.values()):
        lines.append(UNKNOWN)
    return [Block(lines=[*lines, *_other_texts(sections)]), *bits]


def _describe_section(section: ComparedRuns, number: int, sections: Sequence[ComparedRuns]) -> str:
    """`Section 2, 6 runs of tiny_gpt2: tokenizer 0123abcd, length 64.`"""
    own = section.conditions
    keys = [
        key for key in own if len({each.conditions[key] for each in sections}) > 1 and own[key] != NOT_SAID
    ]
    words = {"domains": few(section.domains, between=", ")}
    models = few(sorted({group.model for group in section.groups}), between=", ")
    runs = len(section.runs)
    said = ", ".join(f"{key} {words.get(key, own[key])}" for key in keys)
    return f"Section {number}, {runs} run{'s' * (runs > 1)} of {models}: {said}."


def _other_texts(sections: Sequence[ComparedRuns]) -> list[str]:
    """The domains of which one name stands for several texts."""
    digests = defaultdict(set)
    for section in sections:
        scores = section.runs[0].scores
        for name in scores.domains:
            digests[name].add(text_digest(scores, name))
    several = [name for name, found in digests.items() if len(found) > 1]
    return [f"Not the same text in all sections: {few(several, between=', ')}."] if several else []


def bits_per_byte(sections: Sequence[ComparedRuns]) -> list[Block]:
    """A table of the causal groups for each text that several sections were scored on."""
    alike = defaultdict(list)
    for number, section in enumerate(sections, start=1):
        if section.objective == "causal" and _has_digests(section):
            key = [section.conditions[name] for name in ("domains", "texts", "score_on", "packing")]
            alike[tuple(key)].append((number, section))
    return [_tabulate_bits(found) for found in alike.values() if len(found) > 1]


def _has_digests(section: ComparedRuns) -> bool:
    scores = section.runs[0].scores
    return not any(is_unknown(text_digest(scores, name)) for name in scores.domains)


def _tabulate_bits(numbered: Sequence[tuple[int, ComparedRuns]]) -> Block:
    cells = [
        [str(number), group.name, section.conditions["tokenizer"], section.conditions["length"], group.size]
        + [_format_bits(group, measure) for measure in MEASURES]
        for number, section in numbered
        for group in section.groups
    ]
    alone = explain_alone([group for _, section in numbered for group in section.groups])
    head = ["section", "group", "tokenizer", "length", "runs", *(measure.title for measure in MEASURES)]
    cut = [CUT] * any(section.conditions["cap"] != NOT_SAID for _, section in numbered)
    return Block(
        title=BITS, lines=[SIDE_BY_SIDE, *cut, *alone], head=head, cells=cells, words=5, sortable=False
    )


def _format_bits(group: Group, measure: Measure) -> str:
    if not is_ranked(group, measure.key):
        return NONE
    return format_spread(group.spread(measure.key), show=measure.show, bounds=True)
