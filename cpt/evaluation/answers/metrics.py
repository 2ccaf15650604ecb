"""How good answers are: for each example a number, from what was asked and what was answered.

The rule of exact match is the one that O-LoRA and MIGU release (their `compute_metrics`): lower case, no
ASCII punctuation, single blanks. It mixes two failures, the wrong class and no class at all, which `invalid`
and `accuracy_valid` tell apart; `accuracy_ranked` asks for the class alone, whatever the model would have
written."""

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpt.evaluation.answers.sari import sari

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Answered:
    """What a model has answered to the examples of a task."""

    references: Sequence[str]
    choices: Sequence[Sequence[str]]  # of each example; none where any text may be right
    written: Sequence[str] | None  # by greedy decoding; None where that was not asked for
    ranked: Sequence[str] | None  # the choice of the largest likelihood; None where there are no choices
    ranked_mean: Sequence[str] | None  # the same by the mean over the choice's tokens
    sources: Sequence[str] | None = None  # the texts that were asked about, where a measure is of them


def normalise(text: str) -> str:
    """A text without what exact match overlooks."""
    return " ".join(text.lower().translate(NO_PUNCTUATION).split())


def exact_match(answered: Answered) -> np.ndarray:
    """1 where what was written is the reference, [examples]."""
    pairs = zip(answered.written, answered.references, strict=True)
    return np.array([normalise(one) == normalise(other) for one, other in pairs], float)


def invalid(answered: Answered) -> np.ndarray:
    """1 where what was written is none of the choices, [examples]."""
    pairs = zip(answered.written, answered.choices, strict=True)
    return np.array([normalise(one) not in set(map(normalise, choices)) for one, choices in pairs], float)


def accuracy_valid(answered: Answered) -> np.ndarray:
    """Exact match where what was written is one of the choices, [examples]; nan elsewhere."""
    return np.where(invalid(answered) == 0, exact_match(answered), np.nan)


def accuracy_ranked(answered: Answered) -> np.ndarray:
    """1 where the choice of the largest likelihood, sum_t log p(choice_t, end | question), is the reference,
    [examples]."""
    return equal(answered.ranked, answered.references)


def accuracy_ranked_mean(answered: Answered) -> np.ndarray:
    """1 where the choice of the largest mean over its tokens is the reference, [examples]."""
    return equal(answered.ranked_mean, answered.references)


def rouge_l(answered: Answered) -> np.ndarray:
    """F of the longest common subsequence of words (Lin 2004, section 3), by torchmetrics, [examples]."""
    from torchmetrics.functional.text.rouge import rouge_score  # which reads in torch

    pairs = zip(answered.written, answered.references, strict=True)
    found = [rouge_score([one], [other], rouge_keys="rougeL")["rougeL_fmeasure"] for one, other in pairs]
    return np.array(found, float)


def edit_similarity(answered: Answered) -> np.ndarray:
    """1 - edits / characters of the longer text (Levenshtein 1966), by torchmetrics, [examples]."""
    from torchmetrics.functional.text import edit_distance

    written, references = list(answered.written), list(answered.references)
    longer = [max(len(one), len(other), 1) for one, other in zip(written, references, strict=True)]
    edits = edit_distance(written, references, reduction="none").numpy()
    return 1 - edits / np.array(longer)


def first_character(answered: Answered) -> np.ndarray:
    """1 where what was written begins as the reference does, [examples]: the rule of TRACE (Wang et al. 2023)
    for answers that give a letter and then reasons."""
    pairs = zip(answered.written, answered.references, strict=True)
    return np.array([one.lstrip()[:1] == other.lstrip()[:1] for one, other in pairs], float)


def simplification(answered: Answered) -> np.ndarray:
    """SARI of what was written, with the reference as the only one, [examples]."""
    triples = zip(answered.sources, answered.written, answered.references, strict=True)
    return np.array([sari(source, one, [other]) for source, one, other in triples], float)


def equal(one: Sequence[str], other: Sequence[str]) -> np.ndarray:
    return np.array([each == wanted for each, wanted in zip(one, other, strict=True)], float)


@dataclass(frozen=True)
class Measure:
    """A number per example, and what there has to be for it."""

    compute: Callable[[Answered], np.ndarray]
    needs: tuple[str, ...]  # fields of Answered
    higher: bool = True


MEASURES: Mapping[str, Measure] = {
    "accuracy_ranked": Measure(accuracy_ranked, ("ranked",)),
    "exact_match": Measure(exact_match, ("written",)),
    "invalid": Measure(invalid, ("written", "ranked"), higher=False),
    "accuracy_valid": Measure(accuracy_valid, ("written", "ranked")),
    "accuracy_ranked_mean": Measure(accuracy_ranked_mean, ("ranked_mean",)),
    "rouge_l": Measure(rouge_l, ("written",)),
    "edit_similarity": Measure(edit_similarity, ("written",)),
    "sari": Measure(simplification, ("written", "sources")),
    "first_character": Measure(first_character, ("written",)),
}
CLOSED = ("accuracy_ranked", "exact_match", "invalid", "accuracy_valid", "accuracy_ranked_mean")
RANKED = ("accuracy_ranked", "accuracy_ranked_mean")
OPEN = ("rouge_l", "exact_match", "edit_similarity")


def measures_of(answered: Answered, known_by: str | None = None) -> list[str]:
    """The measures that a task has: of choices, or of free text; the first is the one that it is known by,
    which may be asked for. Raises ValueError for one that there are no answers for."""
    usual = CLOSED if answered.ranked is not None else OPEN
    there = {name for name in vars(answered) if getattr(answered, name) is not None}
    wanted = dict.fromkeys([known_by, *usual] if known_by else usual)
    found = [name for name in wanted if there >= set(MEASURES[name].needs)]
    if known_by and known_by not in found:
        raise ValueError(f"{known_by} is of answers that there are not; allowed: {', '.join(found)}")
    return found


def chance(choices: Sequence[Sequence[str]]) -> float | None:
    """What a guess among the choices reaches; None where there are none."""
    return float(np.mean([1 / len(each) for each in choices])) if all(choices) and choices else None


def majority(references: Sequence[str], choices: Sequence[Sequence[str]]) -> float | None:
    """What the most frequent answer reaches; None where there are no choices."""
    return max(Counter(references).values()) / len(references) if all(choices) and references else None
