"""What became of the answers to each example, of the files of a run."""

import pytest

from cpt.evaluation.predictions import Moved, answers_in, follow_answers, join_examples, mark_examples
from cpt.evaluation.task_metrics import TaskAnswers
from tests.support.answering import kept, opened, ranked

ROWS = ["base", "law", "food"]
LAW = ([0, 0, 1, 0, 1], [1, 1, 1, 1, 0], [1, 0, 0, 1, 1])
FOOD = ([1, 0], [0, 0], [1, 1])


def moved(folder, answers):
    return {(each.task, each.since): each.counts for each in follow_answers(folder, ROWS, answers)}


def test_from_the_own_stage_and_from_the_base_to_the_end(tmp_path):
    given = {"law": [*map(ranked, LAW)], "food": [*map(ranked, FOOD)]}
    found = moved(tmp_path, kept(tmp_path, given, rows=ROWS))
    assert list(found) == [("law", "base"), ("law", "law"), ("food", "base")]
    learned = found["law", "law"]
    assert (learned["examples"], learned["forgotten"], learned["gained"]) == (5, 2, 1)
    assert (learned["before"], learned["after"]) == (0.8, 0.6)
    assert learned["forgotten_adjusted"] == pytest.approx(2 / 5 - 0.2 * 0.4 / (2 - 1))
    since = found["law", "base"]
    assert (since["forgotten"], since["gained"]) == (1, 2)
    assert found["food", "base"]["gained"] == 1


def test_of_a_graded_measure_examples_fall_and_rise(tmp_path):
    references = ["a b c d", "x y", "same"]
    rows = (["a b", "x y", "same"], ["a b c", "x y", "same"], ["a b c d", "x", "same"])
    given = {"law": [opened(each, references) for each in rows]}
    found = moved(tmp_path, kept(tmp_path, given, rows=ROWS))
    assert [found["law", "law"][name] for name in ("examples", "forgotten", "gained")] == [3, 1, 1]
    assert [found["law", "base"][name] for name in ("forgotten", "gained")] == [1, 1]
    assert "forgotten_adjusted" not in found["law", "law"], "a guess is among choices"


def test_what_a_task_is_known_by_needs_its_sources_in_the_file(tmp_path):
    sources, references = ["a b c", "x y z"], ["a b", "x y"]
    rows = (sources, references, ["a b", "x y z"])
    given = [TaskAnswers(references, [()] * 2, written, None, None, sources) for written in rows]
    answers = kept(tmp_path, {"law": given}, rows=ROWS, known_by="sari")
    counts = moved(tmp_path, answers)["law", "law"]
    assert (counts["before"], counts["forgotten"], counts["gained"]) == (1, 1, 0)
    kept(tmp_path, {"law": [opened(written, references) for written in rows]}, rows=ROWS)
    (error,) = follow_answers(tmp_path, ROWS, answers)
    assert "has no column of the sources, which sari is of" in str(error)


def test_a_file_that_is_gone_or_damaged_is_told_and_the_rest_goes_on(tmp_path):
    names = ("law", "food", "a/b")
    given = {name: [*map(ranked, LAW)] for name in names}
    answers = kept(tmp_path, given, rows=ROWS)
    answers_in(tmp_path, ROWS, 0, "law").unlink()
    damaged = answers_in(tmp_path, ROWS, 2, "food")
    damaged.write_bytes(damaged.read_bytes()[:50])
    gone, broken, *rest = follow_answers(tmp_path, ROWS, answers)
    assert isinstance(gone, FileNotFoundError)
    assert str(gone) == str(answers_in(tmp_path, ROWS, 0, "law"))
    assert str(broken).startswith(f"{damaged}: damaged predictions (") and "give the run again" in str(broken)
    assert [(each.task, each.since) for each in rest if isinstance(each, Moved)] == [("a/b", "base")]


def test_examples_are_joined_by_their_ids():
    one = mark_examples(["a", "b", "c"], ["x", "y", "z"], [1, 0, 1])
    other = mark_examples(["c", "d", "a"], ["z", "y", "x"], [0, 1, 1])
    first, second = join_examples([one, other], what="law")
    assert first.index.tolist() == second.index.tolist() == ["a", "c"]
    assert (first["value"].tolist(), second["value"].tolist()) == ([1, 1], [1, 0])


def test_equal_ids_that_stand_for_other_examples_are_told():
    one = mark_examples(["a", "b"], ["x", "y"], [1, 0])
    with pytest.raises(ValueError, match="law: other right answers for the same ids"):
        join_examples([one, mark_examples(["a", "b"], ["x", "x"], [1, 0])], what="law")
    twice = mark_examples(["a", "a"], ["x", "y"], [1, 0])
    assert join_examples([twice, twice], what="law")[1]["value"].tolist() == [1, 0], "joined by place"
    with pytest.raises(ValueError, match="law: the examples differ, and their ids do not tell them apart"):
        join_examples([twice, mark_examples(["a"], ["x"], [1])], what="law")
