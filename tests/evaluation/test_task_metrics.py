"""Metrics of end tasks and of answers by hand, and predictions from the files that a run leaves."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from cpt.evaluation import task_metrics
from cpt.evaluation.predictions import join_examples, load_correctness, mark_examples
from cpt.evaluation.task_metrics import MEASURES, TaskAnswers, sari, summarise_answers

TASKS = ["law", "food", "space"]
ROWS = ["base", *TASKS]
NAN = np.nan
A = np.array([[NAN] * 3, [0.80, NAN, NAN], [0.70, 0.60, NAN], [0.75, 0.50, 0.90]])


def make_endtask_scores(
    matrix=A, *, metric="macro_f1", policy="each", seeds=(0, 1), tasks=TASKS, seed_spread=0.02
):
    """End tasks whose seeds lie around a matrix; accuracy is 0.01 higher, micro-F1 0.02."""
    cube = np.asarray(matrix)[..., None] + seed_spread * np.linspace(-1, 1, len(seeds))
    kinds = {"macro_f1": cube, "accuracy": cube + 0.01, "micro_f1": cube + 0.02}
    return {
        "when": policy,
        "tasks": list(tasks),
        "seeds": list(seeds),
        "hash": "0a1b",
        "seconds": 12.5,
        "classes": dict.fromkeys(tasks, 3),
        "examples": dict.fromkeys(tasks, 6),
        "metric": dict.fromkeys(tasks, metric) if isinstance(metric, str) else metric,
        "scores": {kind: np.where(np.isnan(x), None, x).tolist() for kind, x in kinds.items()},
    }


def summarise_scores(matrix=A, *, rows=ROWS, **options):
    return task_metrics.summarise_endtasks(make_endtask_scores(matrix, **options), rows)


def test_the_numbers_by_hand():
    expected = {"MF1": 2.15 / 3, "Acc": 2.18 / 3, "forward": 2.3 / 3, "forget_rate": (0.05 + 0.10) / 2}
    assert summarise_scores() == pytest.approx(expected)
    assert [*summarise_scores()] == [*task_metrics.ENDTASK_MEANINGS]
    assert task_metrics.summarise_endtasks({}, ROWS) == {}
    metric = {"law": "macro_f1", "food": "micro_f1", "space": "accuracy"}
    assert summarise_scores(metric=metric)["MF1"] == pytest.approx((0.75 + 0.52 + 0.91) / 3)
    cube = np.array([[[0.2, NAN, 0.4], [NAN] * 3]])  # seeds are averaged, those there are
    mean = task_metrics.average_seeds(cube)[0]
    deviation = task_metrics.sd_over_seeds(cube)[0]
    assert (mean[0], deviation[0]) == (pytest.approx(0.3), pytest.approx(np.std([0.2, 0.4], ddof=1)))
    assert np.isnan([mean[1], deviation[1], task_metrics.sd_over_seeds(cube[..., :1])[0, 0]]).all()


def test_the_forget_rate_needs_a_later_stage_and_all_terms_and_the_last_column_never_enters():
    rate = partial(task_metrics.forget_rate, rows=ROWS, tasks=TASKS)
    changed = A.copy()
    gained = A.copy()
    changed[:, 2] = [0.1, 0.2, 0.3, 0.0]
    gained[3, :2] = 0.95
    assert (rate(changed), rate(gained)) == (pytest.approx(0.075), pytest.approx(-0.25))
    assert np.isnan(rate(A[:2])) and np.isnan(rate(np.where(A == 0.60, NAN, A)))
    assert rate(A[:3]) == rate(A[:3], rows=ROWS[:3]) == pytest.approx(0.1)
    assert rate(A[:, :2], tasks=TASKS[:2]) == pytest.approx(0.075)  # the last domain has no task
    assert np.isnan(rate(A[[0, 3]], rows=["base", "joint"]))


def test_the_final_score_is_that_of_the_last_row_measured_and_the_diagonal_goes_by_name():
    diagonal = np.where(np.eye(4, 3, -1) > 0, A, NAN)  # `one`: each domain from the base
    assert summarise_scores(diagonal, policy="last")["MF1"] == pytest.approx(2.3 / 3)
    assert "forget_rate" not in summarise_scores(diagonal, policy="last")
    assert task_metrics.find_last_measured(A[:3]) == [2, 2, None] and np.isnan(
        task_metrics.pick_final(A[:3])[2]
    )
    swapped = task_metrics.pick_just_learned(A[:, [1, 0, 2]], ROWS, ["food", "law", "space"])
    assert swapped == pytest.approx([0.60, 0.80, 0.90])
    assert np.isnan(task_metrics.pick_just_learned(A[:2], ROWS, TASKS)[1:]).all()


def write_predictions(folder, row, task, seed, right, *, rows=ROWS):
    """A file of predictions: 1 is right."""
    path = folder / "endtasks" / f"{row:03d}-{rows[row]}" / f"{task}-{seed}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"id": [f"doc#{index}" for index in range(len(right))], "label": ["x"] * len(right)}
    table = pa.table(columns | {"prediction": ["x" if is_right else "y" for is_right in right]})
    metadata = {b"cpt": json.dumps({"digest": "0a1b", "seconds": 1.0}).encode()}
    table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, path, compression="none", write_page_checksum=True)
    return path


@pytest.mark.parametrize("harm", [lambda data: data[:-30], lambda data: data.replace(b"\0y", b"\0x")])
def test_damaged_predictions_are_one_line_and_missing_ones_are_left_out(tmp_path, harm):
    for seed in (0, 1):
        path = write_predictions(tmp_path, 3, "law", seed, [1, 0, 1, seed])
    correct_answers = {
        key: is_correct.tolist()
        for key, is_correct in load_correctness(tmp_path, ROWS, make_endtask_scores()).items()
    }
    assert correct_answers == {("law", seed): [True, False, True, bool(seed)] for seed in (0, 1)}
    assert (
        load_correctness(tmp_path / "none", ROWS, make_endtask_scores())
        == load_correctness(tmp_path, ROWS, {})
        == {}
    )
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match=r"law-1\.parquet: damaged predictions \(.*delete it.*$"):
        load_correctness(tmp_path, ROWS, make_endtask_scores())


CHOICES = ("World", "Sports", "Science or Technology")


def make_answers(**changes):
    fields = {
        "references": ["World", "Sports", "World", "Sports"],
        "choices": [CHOICES] * 4,
        "written": ["world.", "Science  or technology", "wordl", " SPORTS!"],
        "ranked": ["World", "World", "World", "Sports"],
        "ranked_mean": ["Sports", "Sports", "World", "Sports"],
    }
    return TaskAnswers(**fields | changes)


def free(**changes):
    return make_answers(choices=[()] * 4, ranked=None, ranked_mean=None, **changes)


def values(measure, answers=None):
    return MEASURES[measure].compute(answers or make_answers()).tolist()


def test_each_measure_by_hand():
    texts = [" Very  Negative. ", "Mean Of-Transportation", "Society & Culture", "\n", "Ärger!"]
    plain = ["very negative", "mean oftransportation", "society culture", "", "ärger"]
    assert [*map(task_metrics.normalize_text, texts)] == plain
    assert values("exact_match") == [1, 0, 0, 1] and values("invalid") == [0, 0, 1, 0]
    assert values("accuracy_valid")[:2] == [1, 0] and np.isnan(values("accuracy_valid")[2])
    assert values("accuracy_ranked") == [1, 0, 1, 1] and values("accuracy_ranked_mean") == [0, 1, 1, 1]
    answers = make_answers(written=["abc", "", "kitten", ""], references=["abd", "", "sitting", "ab"])
    assert values("edit_similarity", answers) == pytest.approx([2 / 3, 1, 1 - 3 / 7, 0])
    answers = make_answers(written=["A. as", " B", "C", ""], references=["A since", "B", "D", "A"])
    assert values("first_character", answers) == [1, 1, 0, 0]
    # Signs and decimal points tell answers apart.
    answers = make_answers(
        choices=[("+1", "-1")] * 4, written=["-1"] * 4, references=["+1", "-1", "+1", "-1"]
    )
    assert values("exact_match", answers) == [0, 1, 0, 1] and values("invalid", answers) == [0, 0, 0, 0]
    answers = free(written=["3.5", "35", "Paris!", "-"], references=["3.5", "3.5", "paris", "+"])
    assert values("exact_match", answers) == [1, 0, 1, 0]


@pytest.mark.parametrize(("prediction", "reference", "num_common", "num_words"), [
    ("The Cat Sat On The Mat", "the cat lay on a mat", 4, 12),
    ("A B C D", "d c b a", 1, 8),
    ("Привет Мир", "привет дом", 1, 4),
    ("X", "y", 0, 2),
    ("今天天气", "今天很好", 2, 8),  # a character is a word
])  # fmt: skip
def test_rouge_l_is_the_f1_score_of_the_longest_common_subsequence(
    prediction, reference, num_common, num_words
):
    # With n words of the prediction and m of the reference: F1 of num_common/n and num_common/m.
    [score] = values("rouge_l", free(written=[prediction], references=[reference]))
    assert score == pytest.approx(2 * num_common / num_words, abs=1e-6)


def test_a_summary_has_the_accuracy_of_a_guess_and_of_the_most_frequent_answer():
    two_and_three_choices = make_answers(
        choices=[CHOICES, CHOICES[:2]] * 2, references=["World", "World", "World", "Sports"]
    )
    summary = summarise_answers(two_and_three_choices)
    assert summary.chance == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert summary.majority == pytest.approx(3 / 4)


def test_a_summary_of_free_answers_has_no_chance_and_no_majority():
    summary = summarise_answers(free())
    assert summary.chance is None and summary.majority is None


def test_the_metrics_are_those_of_the_papers_as_soon_as_their_terms_are_there():
    matrix = np.array([[0.2, 0.3, 0.1], [0.9, 0.4, 0.2], [0.5, 0.8, 0.5], [0.6, 0.7, 0.9]])
    rows = ["base", "a", "b", "c"]
    tasks = ["a", "b", "c"]
    expected = {"AP": (0.6 + 0.7 + 0.9) / 3, "LA": (0.9 + 0.8 + 0.9) / 3, "BWT": -0.2, "F": 0.2, "FWT": 0.25}
    assert task_metrics.compute_metrics(matrix, rows=rows, tasks=tasks) == pytest.approx(expected)
    assert set(task_metrics.compute_metrics(matrix[:1], rows=rows[:1], tasks=tasks)) == {"AP"}
    assert set(task_metrics.compute_metrics(matrix[:2], rows=rows[:2], tasks=tasks)) == {"AP", "LA", "FWT"}


def test_intervals_are_of_examples_and_paired_between_rows():
    right = np.random.default_rng(0).integers(0, 2, (2, 400)).astype(float)
    correct_by_task = {"a": [right[0]] * 3, "b": [right[1]] * 3}
    intervals = task_metrics.compute_intervals(correct_by_task, rows=["base", "a", "b"])
    assert intervals["BWT"] == [0, 0] and intervals["F"] == [0, 0]
    error = 1.96 * np.sqrt(0.25 / 400 / 2)
    assert intervals["AP"] == pytest.approx([right.mean() - error, right.mean() + error], abs=0.01)


SOURCE = "About 95 species are currently accepted ."
REFERENCES = ["About 95 species are currently known .", "About 95 species are now accepted ."]
REFERENCES += ["95 species are now accepted ."]


def test_sari_is_that_of_other_programs_and_by_hand():
    # Of the metric cards of `sari` and `wiki_split` in Hugging Face's `evaluate`.
    for count, expected in ((3, 26.953601953601954), (1, 21.805555555555557)):
        assert 100 * sari(SOURCE, "About 95 you now get in .", REFERENCES[:count]) == pytest.approx(expected)
    expected = ((1 + 1 + 1) + (2 / 3 + 1 + 1) + (0 + 1 + 1) + (1 + 1 + 1)) / 12
    assert sari("a b", "a c c", ["a c"]) == pytest.approx(expected)
    assert sari("Das Haus ist groß.", "das haus ist GROSS .", ["das haus ist gross."]) == 1
    answers = TaskAnswers(REFERENCES[:2], [()] * 2, [REFERENCES[0], SOURCE], None, None, [SOURCE] * 2)
    assert values("sari", answers) == [1, pytest.approx(sari(SOURCE, SOURCE, REFERENCES[1:2]))]


def test_examples_are_joined_by_their_ids_where_these_stand_for_the_same():
    marked = mark_examples(["a", "b", "c"], ["x", "y", "z"], [1, 0, 1])
    first, second = join_examples(
        [marked, mark_examples(["c", "d", "a"], ["z", "y", "x"], [0, 1, 1])], label=""
    )
    assert first.index.tolist() == second.index.tolist() == ["a", "c"]
    assert (first["value"].tolist(), second["value"].tolist()) == ([1, 1], [1, 0])
    with pytest.raises(ValueError, match="law: other right answers for the same ids"):
        join_examples([marked, mark_examples(["a", "b"], ["x", "x"], [1, 0])], label="law")
    twice = mark_examples(["a", "a"], ["x", "y"], [1, 0])
    assert join_examples([twice, twice], label="law")[1]["value"].tolist() == [1, 0], "joined by place"
    with pytest.raises(ValueError, match="law: the examples differ, and their ids do not tell them apart"):
        join_examples([twice, mark_examples(["a"], ["x"], [1])], label="law")
