"""The measures of a comparison: the key of each, its title, its format, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpt.reporting.formats import (
    Format,
    format_bytes,
    format_decimals,
    format_integer,
    format_percent,
    format_perplexity,
)
from cpt.reporting.sections import RunSection


@dataclass(frozen=True)
class ComparedMeasure:
    """A number of every run, and how a table shows it."""

    key: str  # of MeasuredRun.values
    title: str
    format_value: Format = format_decimals
    higher_is_better: bool = False
    is_relative: bool = False  # shown as a mean and its ratio to the baseline's mean

    @property
    def topic(self) -> str:
        """What it is about, as the head of a table says above its title; empty for that of a single task."""
        return TOPICS.get(self.key.partition("/")[0], "")


# By what stands before the slash of a key. Measures of one topic follow each other.
TOPICS = {
    "LC": "final model",
    "CPT": "learned",
    "intransigence": "learned",
    "FG": "forgotten",
    "BWT_zs": "forgotten",
    "FWT_zs": "transfer",
    "general_drift": "general text",
    "answers": "answers to tasks",
    "chat": "chat",
    "divergence": "divergence from the base",
    "endtask": "end tasks",
    "cost": "cost",
}


def format_flops(flops: float) -> str:
    return f"{flops:.2e}" if flops else "0"


MEASURES = (
    ComparedMeasure("LC/perplexity", "final LC (perplexity)", format_perplexity),
    ComparedMeasure("LC/bits_per_byte", "final LC (bits per byte)"),
    ComparedMeasure("CPT/nats", "just learned CPT"),
    ComparedMeasure("intransigence/nats", "intransigence"),
    ComparedMeasure("FG/nats", "forgetting FG"),
    ComparedMeasure("BWT_zs/nats", "BWT_zs", higher_is_better=True),
    ComparedMeasure("FWT_zs/nats", "FWT_zs", higher_is_better=True),
    ComparedMeasure("general_drift/nats", "general drift"),
    ComparedMeasure("answers/AP", "AP (%)", format_percent, higher_is_better=True),
    ComparedMeasure("answers/LA", "LA (%)", format_percent, higher_is_better=True),
    ComparedMeasure("answers/BWT", "BWT (%)", format_percent, higher_is_better=True),
    ComparedMeasure("answers/F", "F (%)", format_percent),
    ComparedMeasure("answers/FWT", "FWT (%)", format_percent, higher_is_better=True),
    ComparedMeasure("chat/rise", "chat loss, rise"),
    ComparedMeasure("chat/base_answer_rise", "loss on the base's answers, rise"),
    ComparedMeasure("chat/broken", "broken answers (%)", format_percent),
    ComparedMeasure("divergence/just_trained", "KL(base || model), text just trained"),
    ComparedMeasure("divergence/general", "KL(base || model), general text"),
    ComparedMeasure("endtask/MF1", "MF1 (%)", format_percent, higher_is_better=True),
    ComparedMeasure("endtask/Acc", "Acc (%)", format_percent, higher_is_better=True),
    ComparedMeasure("endtask/forward", "forward MF1 (%)", format_percent, higher_is_better=True),
    ComparedMeasure("endtask/forget_rate", "forget rate (%)", format_percent),
)
FLOPS = ComparedMeasure("cost/flops", "FLOPs (x baseline)", format_flops, is_relative=True)
COST_MEASURES = (
    ComparedMeasure("cost/tokens", "tokens (x baseline)", format_integer, is_relative=True),
    FLOPS,
    ComparedMeasure("cost/seconds_learn", "learning, s (x baseline)", format_integer, is_relative=True),
    ComparedMeasure("cost/seconds", "all (s)", format_integer),
    ComparedMeasure("cost/memory", "peak memory", format_bytes),
    ComparedMeasure("cost/trained", "trained", format_integer),
    ComparedMeasure("cost/stored", "stored", format_bytes),
    ComparedMeasure("cost/stored_per_domain", "per domain", format_bytes),
)

# Groups are tested against their baseline and ranked in all but these, which are shown as means only: of a
# divergence neither more nor less is better.
UNTESTED_KEYS = ("BWT_zs/nats", "endtask/forward", "divergence/just_trained", "divergence/general")
TESTED_MEASURES = tuple(measure for measure in MEASURES if measure.key not in UNTESTED_KEYS)
BRIEF_KEYS = (  # measures in the console and in TeX
    "LC/perplexity",
    "CPT/nats",
    "FG/nats",
    "general_drift/nats",
    "answers/AP",
    "answers/F",
    "chat/base_answer_rise",
    "divergence/just_trained",
    "endtask/MF1",
    "endtask/forget_rate",
)


def select_measured(section: RunSection, measures: Iterable[ComparedMeasure]) -> list[ComparedMeasure]:
    """The measures that at least one run of the section has."""
    measured_keys = set(section.frame["key"])
    return [measure for measure in measures if measure.key in measured_keys]
