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
from typing import Any

import numpy as np

from cpt.core.messages import count_noun
from cpt.evaluation.metrics import Array, MatrixLayout, bootstrap, compute_means, find_objective_value

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
# By its name in the papers, a metric of scores: its name for a matrix of losses, its meaning, its formula.
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
# Words, and each character of scripts without blanks between words; torchmetrics has a to z and 0 to 9 only.
WORDS = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u4e00-\u9fff]+")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
WORD = re.compile(r"\w+|[^\w\s]")


def build_score_array(endtasks: Mapping[str, Any], metric: str) -> Array:
    """Scores in 0..1 as [row, task, seed]; nan where not measured."""
    scores = np.array(endtasks["scores"][metric], dtype=float)
    return scores.reshape(-1, len(endtasks["tasks"]), len(endtasks["seeds"]))


def select_headline_scores(endtasks: Mapping[str, Any]) -> Array:
    """Each task in its own metric, as micro-F1 for ChemProt: [row, task, seed]; nan where not measured."""
    columns = []
    for column, task in enumerate(endtasks["tasks"]):
        metric = endtasks["metric"][task]
        columns.append(build_score_array(endtasks, metric)[:, column])
    return np.stack(columns, axis=1)


def average_seeds(scores: Array) -> Array:
    """[row, task, seed] to A as [row, task]: the mean over the seeds there are; nan without any."""
    is_measured = np.isfinite(scores)
    counts = is_measured.sum(-1)
    means = np.where(is_measured, scores, 0).sum(-1) / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.nan)


def sd_over_seeds(scores: Array) -> Array:
    """[row, task, seed] to [row, task]: standard deviation over seeds (n - 1); nan below two of them."""
    counts = np.isfinite(scores).sum(-1)
    squares = np.nansum((scores - average_seeds(scores)[..., None]) ** 2, -1)
    return np.where(counts > 1, np.sqrt(squares / np.maximum(counts - 1, 1)), np.nan)


def find_last_measured(scores: Array) -> list[int | None]:
    """Per task of [row, task, ...], the last row with a score; None without one."""
    is_measured = np.isfinite(scores).any(tuple(range(2, scores.ndim)))
    last_rows: list[int | None] = []
    for column in is_measured.T:
        last_rows.append(int(np.flatnonzero(column)[-1]) if column.any() else None)
    return last_rows


def pick_final(scores: Array) -> Array:
    """The last score of each task, [row, task, ...] to [task, ...]; nan for none. It is that of the last
    model, or for a method that learns each domain from the base that of the domain's model."""
    not_measured = np.full(scores.shape[2:], np.nan)
    final = []
    for column, row in enumerate(find_last_measured(scores)):
        final.append(not_measured if row is None else scores[row, column])
    return np.array(final)


def pick_just_learned(scores: Array, rows: Sequence[str], tasks: Sequence[str]) -> Array:
    """The score of each task in the row of its own domain, A[u][u]: [row, task, ...] to [task, ...]; nan for
    a task whose domain has no row (joint). `rows` may have more names than there are scores so far."""
    not_measured = np.full(scores.shape[2:], np.nan)
    measured_rows = rows[: len(scores)]
    just_learned = []
    for column, task in enumerate(tasks):
        if task in measured_rows:
            row = measured_rows.index(task)
            just_learned.append(scores[row, column])
        else:
            just_learned.append(not_measured)
    return np.array(just_learned)


def forget_rate(scores: Array, rows: Sequence[str], tasks: Sequence[str]) -> float:
    """`1/(T-1) sum_{u<T-1} (A[u][u] - A[T-1][u])` of A as [row, task], > 0 is forgetting; nan if a term is
    missing. The task of the last stage never enters; where it has none, all learned tasks do."""
    earlier_rows = rows[: len(scores)][:-1]
    earlier_tasks = [column for column, task in enumerate(tasks) if task in earlier_rows]
    if not earlier_tasks:
        return float("nan")
    fall_by_task = pick_just_learned(scores, rows, tasks) - scores[-1]
    return float(fall_by_task[earlier_tasks].mean())


def run_objective(scores: Mapping[str, Any], metric: str) -> float | None:
    """What a sweeper optimizes of the fields of scores.json: MF1 and the like of end tasks, or METRIC.UNIT;
    None where the run has no such metric. Raises ValueError for an unknown one."""
    if metric in ENDTASK_MEANINGS:
        return summarise_endtasks(scores["endtasks"], scores["rows"]).get(metric)
    return find_objective_value(scores["metrics"], metric)


def summarise_endtasks(endtasks: Mapping[str, Any], rows: Sequence[str]) -> dict[str, float]:
    """MF1, Acc, forward and forget_rate, on seed means; without those that lack a term, as MF1 and Acc with
    `when: diagonal`, which measures no last model."""
    if not endtasks:
        return {}
    scores = average_seeds(select_headline_scores(endtasks))
    tasks = endtasks["tasks"]

    summary = {}
    if endtasks["when"] != "diagonal":
        accuracy = average_seeds(build_score_array(endtasks, "accuracy"))
        summary["MF1"] = pick_final(scores).mean()
        summary["Acc"] = pick_final(accuracy).mean()
    summary["forward"] = pick_just_learned(scores, rows, tasks).mean()
    summary["forget_rate"] = forget_rate(scores, rows, tasks)
    return {name: float(value) for name, value in summary.items() if np.isfinite(value)}


@dataclass(frozen=True)
class TaskAnswers:
    """What a model has answered to the examples of a task."""

    references: Sequence[str]
    choices: Sequence[Sequence[str]]  # of each example; none where any text may be right
    written: Sequence[str] | None  # by greedy decoding; None where that was not asked for
    ranked: Sequence[str] | None  # the choice of the largest likelihood; None where none was asked for
    ranked_mean: Sequence[str] | None  # the same by the mean over the choice's tokens
    sources: Sequence[str] | None = None  # the texts that were asked about, where a measure is of them


def normalize_text(text: str) -> str:
    """A text without what exact match overlooks."""
    return " ".join(text.lower().translate(NO_PUNCTUATION).split())


def is_equal(answer: str, reference: str) -> bool:
    return answer == reference


def is_match(answer: str, reference: str, choices: Sequence[str] = ()) -> bool:
    normalize = choose_normalizer(choices or [reference])
    return normalize(answer) == normalize(reference)


def is_no_choice(answer: str, choices: Sequence[str]) -> bool:
    normalize = choose_normalizer(choices)
    return normalize(answer) not in {normalize(choice) for choice in choices}


def match_valid(answer: str, reference: str, choices: Sequence[str]) -> float:
    """Whether an answer that is one of the choices is the right one; nan for another answer."""
    return np.nan if is_no_choice(answer, choices) else is_match(answer, reference, choices)


def has_same_first_character(answer: str, reference: str) -> bool:
    """The rule of TRACE (Wang et al. 2023) for answers that give a letter and then reasons."""
    return answer.lstrip()[:1] == reference.lstrip()[:1]


def choose_normalizer(texts: Sequence[str]) -> Callable[[str], str]:
    """How answers are compared: by their words, but as they are where that makes two of the texts equal, or
    one empty, as signs and decimal points do."""
    normalized = [normalize_text(text) for text in texts]
    words_tell_apart = all(normalized) and len(set(normalized)) == len(normalized)
    has_number = any(re.fullmatch(r"[+-]?[\d.,]+", text.strip()) for text in texts)
    return normalize_text if words_tell_apart and not has_number else str.strip


def rouge_l(answer: str, reference: str) -> float:
    """F of the longest common subsequence of words (Lin 2004, section 3), by torchmetrics."""
    from torchmetrics.functional.text.rouge import rouge_score  # which imports torch

    scores = rouge_score(
        [answer],
        [reference],
        normalizer=str.lower,
        tokenizer=WORDS.findall,
        rouge_keys="rougeL",
    )
    return float(scores["rougeL_fmeasure"])


def edit_similarity(answer: str, reference: str) -> float:
    """1 - edits / characters of the longer text (Levenshtein 1966), by torchmetrics."""
    from torchmetrics.functional.text import edit_distance

    return 1 - float(edit_distance(answer, reference)) / max(len(answer), len(reference), 1)


def compute_single_reference_sari(source: str, answer: str, reference: str) -> float:
    return sari(source, answer, [reference])


def sari(source: str, answer: str, references: Sequence[str]) -> float:
    """SARI (Xu et al., TACL 2016, section 4) of a text that was written to simplify a source, in 0..1: the
    mean of F_add, F_keep and P_del, each a mean over n-grams of 1 to 4 words.

    With counts # of an n-gram in source I, output O and, divided by their number, references R: add counts
    each n-gram of O that is not in I once, keep min(#I, #O), deletion max(#I - #O, 0). 0 / 0 is 1, so that a
    reference itself has 1. F is taken of each n before the mean, as in the authors' Python code; the paper
    takes it after. Words are in lower case, signs are words."""
    scores = []
    for length in range(1, 5):
        source_ngrams = count_ngrams(source, length)
        answer_ngrams = count_ngrams(answer, length)
        reference_ngrams = [count_ngrams(reference, length) for reference in references]
        scores.append(score_ngrams(source_ngrams, answer_ngrams, reference_ngrams))
    return float(np.mean(scores))


def count_ngrams(text: str, length: int) -> Counter:
    """The n-grams of a text's words in lower case, tuples of `length` words, with their counts."""
    words = WORD.findall(text.lower())
    shifted = [words[start:] for start in range(length)]
    return Counter(zip(*shifted, strict=False))


def score_ngrams(source: Counter, answer: Counter, references: Sequence[Counter]) -> tuple[float, ...]:
    """F_add, F_keep and P_del of n-grams of one length. Counts are times the number of references."""
    reference = sum(references, Counter())
    source = multiply_counts(source, len(references))
    answer = multiply_counts(answer, len(references))

    # N-grams that are added count once; those that are kept or deleted count as often as they occur.
    added_ngrams = set(answer) - set(source)
    ngrams_to_add = set(reference) - set(source)
    kept_ngrams = source & answer
    ngrams_to_keep = source & reference
    deleted_ngrams = source - answer
    ngrams_to_delete = source - reference
    return (
        f_score(len(added_ngrams & ngrams_to_add), len(added_ngrams), len(ngrams_to_add)),
        f_score((kept_ngrams & reference).total(), kept_ngrams.total(), ngrams_to_keep.total()),
        ratio((deleted_ngrams & ngrams_to_delete).total(), deleted_ngrams.total()),
    )


def multiply_counts(ngrams: Counter, factor: int) -> Counter:
    return Counter({ngram: count * factor for ngram, count in ngrams.items()})


def f_score(num_right: int, num_predicted: int, num_expected: int) -> float:
    """F1, from 0 to 1; 0 without anything right."""
    precision = ratio(num_right, num_predicted)
    recall = ratio(num_right, num_expected)
    if not precision + recall:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def ratio(count: int, total: int) -> float:
    """The share of a total; 1 of nothing: what is not there to do is done."""
    return count / total if total else 1.0


@dataclass(frozen=True)
class AnswerMeasure:
    """A number per example, and the fields of TaskAnswers that it is of."""

    rule: Callable[..., float]
    fields: tuple[str, ...]
    is_closed: bool = False  # whether it is of tasks with choices only

    def compute(self, answers: TaskAnswers) -> Array:
        """[examples]."""
        columns = [getattr(answers, name) for name in self.fields]
        return np.array([self.rule(*values) for values in zip(*columns, strict=False)], float)


MEASURES: Mapping[str, AnswerMeasure] = {
    # the choice of the largest likelihood, sum_t log p(choice_t, end | question), is the reference
    "accuracy_ranked": AnswerMeasure(is_equal, ("ranked", "references")),
    "exact_match": AnswerMeasure(is_match, ("written", "references", "choices")),
    "invalid": AnswerMeasure(is_no_choice, ("written", "choices"), is_closed=True),
    "accuracy_valid": AnswerMeasure(match_valid, ("written", "references", "choices"), is_closed=True),
    "accuracy_ranked_mean": AnswerMeasure(is_equal, ("ranked_mean", "references")),
    "rouge_l": AnswerMeasure(rouge_l, ("written", "references")),
    "edit_similarity": AnswerMeasure(edit_similarity, ("written", "references")),
    "sari": AnswerMeasure(compute_single_reference_sari, ("sources", "written", "references")),
    "first_character": AnswerMeasure(has_same_first_character, ("written", "references")),
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
    means: Mapping[str, float | None]  # of every measure; the first is the task's main one
    head: Array  # [examples]: that one, by example
    seconds: float


def summarise_answers(
    answers: TaskAnswers, *, seconds: float = 0.0, main_measure: str | None = None
) -> AnswerSummary:
    """The means of the measures of choices, or of free text. The first is the task's main measure:
    `main_measure`, or else the default. A mean is over the examples with a value, None where none has one.
    Raises ValueError for a main measure that the answers do not have."""
    values = compute_measures(answers, main_measure=main_measure)
    means: dict[str, float | None] = {}
    for name, by_example in values.items():
        finite = by_example[np.isfinite(by_example)]
        means[name] = float(finite.mean()) if len(finite) else None

    num_examples = len(answers.references)
    chance = None
    majority = None
    if all(answers.choices) and num_examples:
        chance = float(np.mean([1 / len(choices) for choices in answers.choices]))
        majority = max(Counter(answers.references).values()) / num_examples

    head = next(iter(values.values())).astype(np.float32)
    return AnswerSummary(num_examples, chance, majority, means, head, seconds)


def compute_measures(answers: TaskAnswers, *, main_measure: str | None) -> dict[str, Array]:
    """Each measure that the answers have, by example; `main_measure`, if given, is the first.

    Raises ValueError for a main measure that needs answers of another kind."""
    names = [] if main_measure is None else [main_measure]
    has_choices = all(answers.choices)
    names.extend(CLOSED if has_choices else OPEN)

    available = {name for name, column in vars(answers).items() if column is not None}
    values: dict[str, Array] = {}
    for name in dict.fromkeys(names):
        measure = MEASURES[name]
        if available >= set(measure.fields) and (has_choices or not measure.is_closed):
            values[name] = measure.compute(answers)
    if main_measure is not None and main_measure not in values:
        raise ValueError(f"{main_measure} needs answers of another kind. Allowed: {', '.join(values)}")
    return values


def collect_task(rows: Sequence[AnswerSummary | None]) -> dict[str, Any]:
    """A task of `answers`, from what each row's answers come to; None for a row in which it was not asked."""
    example = next(row for row in rows if row is not None)
    measures = {}
    for name in example.means:
        measures[name] = [None if row is None else row.means[name] for row in rows]
    return {
        "examples": example.examples,
        "chance": example.chance,
        "majority": example.majority,
        "measures": measures,
    }


def find_main_measure(task: Mapping[str, Any]) -> str:
    """The measure that a task is known by."""
    return next(iter(task["measures"]))


def build_answer_matrix(answers: Mapping[str, Any]) -> Array:
    """a as [row, task]: each task in the measure that it is known by; nan where it was not asked."""
    columns = [task["measures"][find_main_measure(task)] for task in answers["tasks"].values()]
    return np.array(columns, dtype=float).T


def compute_metrics(
    matrix: Array, *, rows: Sequence[str], tasks: Sequence[str], is_asked: Array | None = None
) -> dict[str, Array]:
    """ANSWER_METRICS of a matrix of scores [..., row, task], each value [...], if their terms exist.
    `is_asked`, [row, task], says which cells were asked (None: all): AP needs those of the last row, the
    others all of them."""
    layout = MatrixLayout(rows=list(rows), domains=list(tasks), tokens=[], bytes=[])
    means = compute_means(matrix, layout=layout, higher_is_better=True)

    is_complete = True
    has_last_row = True
    if is_asked is not None and not is_asked.all():
        is_complete = False
        has_last_row = bool(is_asked[-1].all())

    values = {}
    for name, (loss_metric, _, _) in ANSWER_METRICS.items():
        is_measured = is_complete or (name == "AP" and has_last_row)
        if loss_metric in means and is_measured:
            values[name] = means[loss_metric] + 0.0  # no -0
    return values


def compute_intervals(
    values: Mapping[str, Sequence[Array | None]], *, rows: Sequence[str]
) -> dict[str, list[float]]:
    """95 % percentile bootstrap over the examples of each task, alike for every row: {metric: [low, high]}.
    `values` are each task's, [row][examples], None in a row in which it was not asked."""
    asked_by_task = []
    samples = []
    for rows_of_task in values.values():
        asked_by_task.append([row is not None for row in rows_of_task])
        num_examples = next(len(row) for row in rows_of_task if row is not None)
        not_asked = np.full(num_examples, np.nan)
        stacked = np.stack([not_asked if row is None else row for row in rows_of_task])  # [row, example]
        samples.append((stacked.astype(float), np.ones(num_examples)))
    is_asked = np.array(asked_by_task).T

    def compute(matrix: Array) -> dict[str, dict[str, Array]]:
        return {"score": compute_metrics(matrix, is_asked=is_asked, rows=rows, tasks=list(values))}

    return bootstrap(samples, compute, adjusted=True)["score"]


def describe_task(name: str, task: Mapping[str, Any]) -> str:
    """A task of the harness with what decides its numbers: `hellaswag (acc_norm, 0 shots, version 1.0)`."""
    shots = "shots differ" if task["shots"] is None else count_noun(task["shots"], "shot")
    limit = "" if task["limit"] is None else f", limit {task['limit']:g}"
    return f"{name} ({task['metric']}, {shots}{limit}, version {task['version']})"


def find_last_value(task: Mapping[str, Any]) -> tuple[int, float] | None:
    """The last row in which a task of the harness was measured, and its value there; None for none."""
    measured = [(row, value) for row, value in enumerate(task["values"]) if value is not None]
    return measured[-1] if measured else None
