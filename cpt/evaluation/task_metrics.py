"""Metrics of tasks: fine-tuned end tasks, ranked and written answers, columns of the lm-evaluation-harness.

End tasks: A[t][u] is the score on the end task of domain u after the model of row t was fine-tuned on it, a
mean over seeds; tasks are in the order of learning. Ke et al. 2023 (DAS, ICLR): MF1, accuracy, forget rate.

Answers: exact match follows the rule that O-LoRA and MIGU release (their `compute_metrics`): lower case, no
ASCII punctuation, single blanks. It mixes two failures, the wrong class and no class at all, which
`invalid` and `accuracy_valid` tell apart; `accuracy_ranked` asks for the class alone."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, NamedTuple

import numpy as np

from cpt.evaluation.metrics import Array, Layout, bootstrap, compute_means, objective_value

ENDTASK_METRICS = ("macro_f1", "micro_f1", "accuracy")
ENDTASK_MEANINGS = {
    "MF1": ("Mean over the tasks of each task's own metric, last model", "mean_u A[n][u]"),
    "Acc": ("Accuracy, a mean over the tasks, last model", "mean_u A_accuracy[n][u]"),
    "forward": ("Each task just after its domain was learned", "mean_u A[u][u]"),
    "forget_rate": (
        "Lost since each task's domain was learned, > 0 is bad",
        "mean_{u<n} (A[u][u] - A[n][u])",
    ),
}
# What the papers call a metric of scores: its name for a matrix of losses, its meaning, its formula.
ANSWER_METRICS = {
    "AP": ("LC", "Average performance of the last model", "mean_j a[n][j]"),
    "LA": ("CPT", "Learning accuracy, each task just after it was learned", "mean_{j<=n} a[j][j]"),
    "BWT": ("BWT_gem", "Backward transfer, < 0 is forgetting", "mean_{j<n} (a[n][j] - a[j][j])"),
    "F": (
        "FG_max",
        "Forgetting since the best model, > 0 is bad",
        "mean_{j<n} (max_{1<=i<=n-1} a[i][j] - a[n][j])",
    ),
    "FWT": ("FWT_gem", "Forward transfer just before learning", "mean_{2<=j} (a[j-1][j] - a[0][j])"),
}
# Words, and each character of scripts without blanks between words; torchmetrics knows a to z and 0 to 9 only
WORDS = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u4e00-\u9fff]+")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
WORD = re.compile(r"\w+|[^\w\s]")


def cube(endtasks: Mapping[str, Any], metric: str) -> Array:
    """Scores in 0..1 as [row, task, seed]; nan where not measured."""
    scores = np.array(endtasks["scores"][metric], dtype=float)
    return scores.reshape(-1, len(endtasks["tasks"]), len(endtasks["seeds"]))


def headline(endtasks: Mapping[str, Any]) -> Array:
    """Each task in its own metric, as micro-F1 for ChemProt: [row, task, seed]; nan where not measured."""
    own = enumerate(endtasks["metric"][task] for task in endtasks["tasks"])
    return np.stack([cube(endtasks, kind)[:, place] for place, kind in own], axis=1)


def over_seeds(scores: Array) -> Array:
    """[row, task, seed] to A as [row, task]: the mean over the seeds there are; nan without any."""
    there = np.isfinite(scores)
    count = there.sum(-1)
    return np.where(count > 0, np.where(there, scores, 0).sum(-1) / np.maximum(count, 1), np.nan)


def sd_over_seeds(scores: Array) -> Array:
    """[row, task, seed] to [row, task]: standard deviation over seeds (n - 1); nan below two of them."""
    count = np.isfinite(scores).sum(-1)
    squares = np.nansum((scores - over_seeds(scores)[..., None]) ** 2, -1)
    return np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)


def last_measured(scores: Array) -> list[int | None]:
    """Per task of [row, task, ...], the last row with a score; None without one."""
    there = np.isfinite(scores).any(tuple(range(2, scores.ndim)))
    return [int(np.flatnonzero(column)[-1]) if column.any() else None for column in there.T]


def pick_final(scores: Array) -> Array:
    """The last score of each task, [row, task, ...] to [task, ...]; nan for none. It is that of the last
    model, or for a method that learns each domain from the base that of the domain's model."""
    nothing, last = np.full(scores.shape[2:], np.nan), enumerate(last_measured(scores))
    return np.array([nothing if row is None else scores[row, task] for task, row in last])


def forward(scores: Array, rows: Sequence[str], tasks: Sequence[str]) -> Array:
    """The diagonal A[u][u]: [row, task, ...] to [task, ...]; nan where a domain has no row (joint)."""
    nothing, there = np.full(scores.shape[2:], np.nan), rows[: len(scores)]
    own = [scores[there.index(name), task] if name in there else nothing for task, name in enumerate(tasks)]
    return np.array(own)


def forget_rate(scores: Array, rows: Sequence[str], tasks: Sequence[str]) -> float:
    """`1/(T-1) sum_{u<T-1} (A[u][u] - A[T-1][u])` of A as [row, task], > 0 is forgetting; nan if a term is
    missing. The task of the last stage never enters; where it has none, all learned tasks do."""
    learned = [place for place, task in enumerate(tasks) if task in rows[: len(scores)][:-1]]
    if not learned:
        return float("nan")
    return float((forward(scores, rows, tasks) - scores[-1])[learned].mean())


def run_objective(scores: Mapping[str, Any], wanted: str) -> float | None:
    """What a sweeper optimizes of the fields of scores.json: MF1 and the like of end tasks, or METRIC.UNIT;
    None where the run has no such metric. Raises ValueError for an unknown one."""
    if wanted in ENDTASK_MEANINGS:
        return summarise_endtasks(scores["endtasks"], scores["rows"]).get(wanted)
    return objective_value(scores["metrics"], wanted)


def summarise_endtasks(endtasks: Mapping[str, Any], rows: Sequence[str]) -> dict[str, float]:
    """MF1, Acc, forward and forget_rate, on seed means; without those that lack a term, as MF1 and Acc with
    `when: diagonal`, which measures no last model."""
    if not endtasks:
        return {}
    scores, tasks = over_seeds(headline(endtasks)), endtasks["tasks"]
    found = {"forward": forward(scores, rows, tasks).mean(), "forget_rate": forget_rate(scores, rows, tasks)}
    if endtasks["when"] != "diagonal":
        accuracy = over_seeds(cube(endtasks, "accuracy"))
        found = {"MF1": pick_final(scores).mean(), "Acc": pick_final(accuracy).mean()} | found
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}


@dataclass(frozen=True)
class TaskAnswers:
    """What a model has answered to the examples of a task."""

    references: Sequence[str]
    choices: Sequence[Sequence[str]]  # of each example; none where any text may be right
    written: Sequence[str] | None  # by greedy decoding; None where that was not asked for
    ranked: Sequence[str] | None  # the choice of the largest likelihood; None where there are no choices
    ranked_mean: Sequence[str] | None  # the same by the mean over the choice's tokens
    sources: Sequence[str] | None = None  # the texts that were asked about, where a measure is of them


def normalize_text(text: str) -> str:
    """A text without what exact match overlooks."""
    return " ".join(text.lower().translate(NO_PUNCTUATION).split())


def is_match(one: str, other: str, choices: Sequence[str] = ()) -> bool:
    normalize = choose_normalizer(choices or [other])
    return normalize(one) == normalize(other)


def is_no_choice(written: str, choices: Sequence[str]) -> bool:
    normalize = choose_normalizer(choices)
    return normalize(written) not in {*map(normalize, choices)}


def choose_normalizer(texts: Sequence[str]) -> Callable[[str], str]:
    """How answers are compared: by their words, but as they are where that makes two of the texts equal, or
    one empty, as signs and decimal points do."""
    words = [normalize_text(each) for each in texts]
    is_number = any(re.fullmatch(r"[+-]?[\d.,]+", each.strip()) for each in texts)
    return normalize_text if all(words) and len({*words}) == len(words) and not is_number else str.strip


def rouge_l(written: str, reference: str) -> float:
    """F of the longest common subsequence of words (Lin 2004, section 3), by torchmetrics."""
    from torchmetrics.functional.text.rouge import rouge_score  # which imports torch

    how: dict[str, Any] = {"normalizer": str.lower, "tokenizer": WORDS.findall, "rouge_keys": "rougeL"}
    return float(rouge_score([written], [reference], **how)["rougeL_fmeasure"])


def edit_similarity(written: str, reference: str) -> float:
    """1 - edits / characters of the longer text (Levenshtein 1966), by torchmetrics."""
    from torchmetrics.functional.text import edit_distance

    return 1 - float(edit_distance(written, reference)) / max(len(written), len(reference), 1)


def sari(source: str, written: str, references: Sequence[str]) -> float:
    """SARI (Xu et al., TACL 2016, section 4) of a text that was written to simplify a source, in 0..1: the
    mean of F_add, F_keep and P_del, each a mean over n-grams of 1 to 4 words.

    With counts # of an n-gram in source I, output O and, divided by their number, references R: add counts
    each n-gram of O that is not in I once, keep min(#I, #O), deletion max(#I - #O, 0). 0 / 0 is 1, so that a
    reference itself has 1. F is taken of each n before the mean, as in the authors' Python code; the paper
    takes it after. Words are in lower case, signs are words."""
    words, scores = [WORD.findall(text.lower()) for text in (source, written, *references)], []
    for order in range(1, 5):
        ngrams = (zip(*(each[start:] for start in range(order)), strict=False) for each in words)
        one, other, *others = map(Counter, ngrams)
        scores.append(score_ngrams(one, other, others))
    return float(np.mean(scores))


def score_ngrams(source: Counter, written: Counter, references: Sequence[Counter]) -> tuple[float, ...]:
    """F_add, F_keep and P_del of n-grams of one length. Counts are times the number of references."""

    def ratio(part: int, whole: int) -> float:
        return part / whole if whole else 1.0

    def f_score(right: int, done: int, wanted: int) -> float:
        precision, recall = ratio(right, done), ratio(right, wanted)
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

    told, times = sum(references, Counter()), len(references)
    source, written = (Counter({g: n * times for g, n in each.items()}) for each in (source, written))
    added, wanted = set(written) - set(source), set(told) - set(source)
    kept, keepable, deleted = source & written, source & told, source - written
    return (
        f_score(len(added & wanted), len(added), len(wanted)),
        f_score((kept & told).total(), kept.total(), keepable.total()),
        ratio((deleted & (source - told)).total(), deleted.total()),
    )


class AnswerMeasure(NamedTuple):
    """A number per example, and the fields of TaskAnswers that it is of."""

    rule: Callable[..., float]
    fields: tuple[str, ...]
    closed: bool = False  # whether it is of tasks with choices only

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that may be None; where choices are ranked there are some."""
        return (*self.fields, "ranked") if self.closed else self.fields

    def compute(self, answered: TaskAnswers) -> Array:
        """[examples]."""
        return np.array([*map(self.rule, *(getattr(answered, name) for name in self.fields))], float)


WRITTEN = ("written", "references")
MEASURES: Mapping[str, AnswerMeasure] = {
    # the choice of the largest likelihood, sum_t log p(choice_t, end | question), is the reference
    "accuracy_ranked": AnswerMeasure(eq, ("ranked", "references")),
    "exact_match": AnswerMeasure(is_match, (*WRITTEN, "choices")),
    "invalid": AnswerMeasure(is_no_choice, ("written", "choices"), closed=True),
    "accuracy_valid": AnswerMeasure(
        lambda one, other, choices: np.nan if is_no_choice(one, choices) else is_match(one, other, choices),
        (*WRITTEN, "choices"),
        closed=True,
    ),
    "accuracy_ranked_mean": AnswerMeasure(eq, ("ranked_mean", "references")),
    "rouge_l": AnswerMeasure(rouge_l, WRITTEN),
    "edit_similarity": AnswerMeasure(edit_similarity, WRITTEN),
    "sari": AnswerMeasure(lambda source, one, other: sari(source, one, [other]), ("sources", *WRITTEN)),
    # the rule of TRACE (Wang et al. 2023) for answers that give a letter and then reasons
    "first_character": AnswerMeasure(lambda one, other: one.lstrip()[:1] == other.lstrip()[:1], WRITTEN),
}
CLOSED = ("accuracy_ranked", "exact_match", "invalid", "accuracy_valid", "accuracy_ranked_mean")
RANKED = ("accuracy_ranked", "accuracy_ranked_mean")
OPEN = ("rouge_l", "exact_match", "edit_similarity")


@dataclass(frozen=True)
class AnswerSummary:
    """What the answers to a task come to: small, as a run of N tasks has N (N + 1) of them."""

    examples: int
    chance: float | None  # what a guess among the choices reaches; None where there are none
    majority: float | None  # what the most frequent answer reaches
    means: Mapping[str, float | None]  # of every measure; the task is known by the first
    head: Array  # [examples]: that one, by example
    seconds: float


def summarise_answers(
    answered: TaskAnswers, *, seconds: float = 0.0, known_by: str | None = None
) -> AnswerSummary:
    """What answers come to in the measures of choices, or of free text; the first is the one that the task is
    known by, which may be asked for. A mean is over the examples that count, None where none does. Raises
    ValueError for a measure without answers."""
    there = {name for name in vars(answered) if getattr(answered, name) is not None}
    wanted = dict.fromkeys([*[known_by] * bool(known_by), *(CLOSED if "ranked" in there else OPEN)])
    names = [name for name in wanted if there >= set(MEASURES[name].needs)]
    if known_by and known_by not in names:
        raise ValueError(f"{known_by} needs answers of another kind. Allowed: {', '.join(names)}")
    values = {name: MEASURES[name].compute(answered) for name in names}
    finite = {name: each[np.isfinite(each)] for name, each in values.items()}
    chance = majority = None
    if all(answered.choices) and answered.references:
        chance = float(np.mean([1 / len(each) for each in answered.choices]))
        majority = max(Counter(answered.references).values()) / len(answered.references)
    means = {name: float(each.mean()) if len(each) else None for name, each in finite.items()}
    head = next(iter(values.values())).astype(np.float32)
    return AnswerSummary(len(answered.references), chance, majority, means, head, seconds)


def collect_task(rows: Sequence[AnswerSummary | None]) -> dict[str, Any]:
    """A task of `answers`, from what each row's answers come to; None for a row in which it was not asked."""
    there = next(row for row in rows if row is not None)
    return {
        "examples": there.examples,
        "chance": there.chance,
        "majority": there.majority,
        "measures": {name: [row and row.means[name] for row in rows] for name in there.means},
    }


def head_of(task: Mapping[str, Any]) -> str:
    """The measure that a task is known by."""
    return next(iter(task["measures"]))


def matrix_of(answers: Mapping[str, Any]) -> Array:
    """a as [row, task]: each task in the measure that it is known by; nan where it was not asked."""
    columns = [task["measures"][head_of(task)] for task in answers["tasks"].values()]
    return np.array(columns, dtype=float).T


def compute_metrics(
    matrix: Array, *, rows: Sequence[str], tasks: Sequence[str], asked: Array | None = None
) -> dict[str, Array]:
    """ANSWER_METRICS of a matrix of scores [..., row, task], each value [...], if their terms exist.
    `asked`, [row, task], says which cells were (None: all): AP needs those of the last row, the others all of
    them."""
    layout = Layout(rows=list(rows), domains=list(tasks), tokens=[], bytes=[])
    found = compute_means(matrix, layout=layout, higher_is_better=True)
    told = {
        name: found[other] + 0.0 for name, (other, *_) in ANSWER_METRICS.items() if other in found
    }  # no -0
    if asked is None or asked.all():
        return told
    return {name: value for name, value in told.items() if name == "AP" and asked[-1].all()}


def compute_intervals(
    values: Mapping[str, Sequence[Array | None]], *, rows: Sequence[str]
) -> dict[str, list[float]]:
    """95 % percentile bootstrap over the examples of each task, alike for every row: {metric: [low, high]}.
    `values` are each task's, [row][examples], None in a row in which it was not asked."""
    asked = np.array([[row is not None for row in each] for each in values.values()]).T
    samples = []
    for each in values.values():
        size = next(len(row) for row in each if row is not None)
        stacked = np.stack([np.full(size, np.nan) if row is None else row for row in each])
        samples.append((stacked.astype(float), np.ones(size)))

    def compute(matrix: Array) -> dict[str, dict[str, Array]]:
        return {"score": compute_metrics(matrix, asked=asked, rows=rows, tasks=list(values))}

    return bootstrap(samples, compute, adjusted=True)["score"]


def describe_task(name: str, task: Mapping[str, Any]) -> str:
    """A task of the harness with what decides its numbers: `hellaswag (acc_norm, 0 shots, version 1.0)`."""
    shots = "shots differ" if task["shots"] is None else f"{task['shots']} shots"
    limit = "" if task["limit"] is None else f", limit {task['limit']:g}"
    return f"{name} ({task['metric']}, {shots}{limit}, version {task['version']})"


def last_value(task: Mapping[str, Any]) -> tuple[int, float] | None:
    """The last row in which a task of the harness was measured, and its value there; None for none."""
    there = [(row, value) for row, value in enumerate(task["values"]) if value is not None]
    return there[-1] if there else None
