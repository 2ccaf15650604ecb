"""How good answers are: against values by hand and slow loops."""

from itertools import product

import numpy as np
import pytest

from cpt.evaluation.options import KNOWN_BY
from cpt.evaluation.task_metrics import (
    ANSWER_METRICS,
    MEASURES,
    TaskAnswers,
    compute_intervals,
    compute_metrics,
    count_ngrams,
    describe_task,
    last_value,
    measures_of,
    normalise_text,
    sari,
    score_ngrams,
    summarise_answers,
)

CHOICES = ("World", "Sports", "Science or Technology")


def answered(**changes):
    fields = {
        "references": ["World", "Sports", "World", "Sports"],
        "choices": [CHOICES] * 4,
        "written": ["world.", "Science  or technology", "wordl", " SPORTS!"],
        "ranked": ["World", "World", "World", "Sports"],
        "ranked_mean": ["Sports", "Sports", "World", "Sports"],
    }
    return TaskAnswers(**fields | changes)


def values(measure, given=None):
    return MEASURES[measure].compute(given or answered()).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Very  Negative. ", "very negative"),
        ("Mean Of-Transportation", "mean oftransportation"),
        ("Society & Culture", "society culture"),
        ("\n", ""),
        ("Ärger!", "ärger"),
    ],
)
def test_what_exact_match_overlooks(text, expected):
    assert normalise_text(text) == expected


def test_each_measure_by_hand():
    assert values("exact_match") == [1, 0, 0, 1]
    assert values("invalid") == [0, 0, 1, 0]
    assert values("accuracy_valid")[:2] == [1, 0] and np.isnan(values("accuracy_valid")[2])
    assert values("accuracy_ranked") == [1, 0, 1, 1]
    assert values("accuracy_ranked_mean") == [0, 1, 1, 1]


def lcs(one, other):
    """The longest common subsequence, by trying them all."""
    subsequences = lambda words: {  # noqa: E731
        tuple(word for word, kept in zip(words, chosen, strict=True) if kept)
        for chosen in product([0, 1], repeat=len(words))
    }
    return max(map(len, subsequences(one) & subsequences(other)))


def test_rouge_is_that_of_the_longest_common_subsequence():
    pairs = [
        ("the cat sat on the mat", "the cat lay on a mat"),
        ("a b c d", "d c b a"),
        ("same", "same"),
        ("x", "y"),
    ]
    given = answered(written=[one for one, _ in pairs], references=[other for _, other in pairs])
    for found, (one, other) in zip(values("rouge_l", given), pairs, strict=True):
        common = lcs(one.split(), other.split())
        precision, recall = common / len(one.split()), common / len(other.split())
        expected = 2 * precision * recall / (precision + recall) if common else 0
        assert found == pytest.approx(expected, abs=1e-6)


def test_edit_similarity_counts_characters():
    given = answered(written=["abc", "", "kitten", ""], references=["abd", "", "sitting", "ab"])
    assert values("edit_similarity", given) == pytest.approx([2 / 3, 1, 1 - 3 / 7, 0])


def test_a_task_has_the_measures_that_there_is_something_for():
    assert measures_of(answered())[0] == "accuracy_ranked"
    assert measures_of(answered(written=None)) == ["accuracy_ranked", "accuracy_ranked_mean"]
    free = answered(choices=[()] * 4, ranked=None, ranked_mean=None)
    assert measures_of(free) == ["rouge_l", "exact_match", "edit_similarity"]


def test_a_task_is_known_by_what_is_asked_for():
    free = answered(choices=[()] * 4, ranked=None, ranked_mean=None, sources=["a"] * 4)
    assert measures_of(free, "sari") == ["sari", "rouge_l", "exact_match", "edit_similarity"]
    assert measures_of(free, "edit_similarity")[0] == "edit_similarity"
    assert measures_of(answered(), "exact_match")[:2] == ["exact_match", "accuracy_ranked"]
    told = summarise_answers(answered(), known_by="exact_match")
    assert told.head.tolist() == [1, 0, 0, 1] and list(told.means)[0] == "exact_match"
    with pytest.raises(ValueError, match="sari is of answers that there are not; allowed: rouge_l"):
        measures_of(answered(ranked=None, ranked_mean=None), "sari")


def test_what_may_be_asked_for_are_measures_by_example():
    """In which higher is better and every example counts."""
    assert set(KNOWN_BY) == {name for name, each in MEASURES.items() if each.higher} - {"accuracy_valid"}
    assert all(("written" in MEASURES[name].needs) is of for name, of in KNOWN_BY.items())


def test_the_first_character_is_that_of_a_letter_before_its_reasons():
    given = answered(written=["A. as", " B", "C", ""], references=["A since", "B", "D", "A"])
    assert values("first_character", given) == [1, 1, 0, 0]


def test_chance_and_majority():
    several = answered(choices=[CHOICES, CHOICES[:2]] * 2, references=["World", "World", "World", "Sports"])
    told = summarise_answers(several)
    assert told.chance == pytest.approx((1 / 3 + 1 / 2) / 2) and told.majority == pytest.approx(3 / 4)
    free = answered(choices=[()] * 4, ranked=None, ranked_mean=None)
    assert summarise_answers(free).chance is None and summarise_answers(free).majority is None


MATRIX = np.array(
    [  # rows: base, after a, b, c; columns a, b, c
        [0.2, 0.3, 0.1],
        [0.9, 0.4, 0.2],
        [0.5, 0.8, 0.5],
        [0.6, 0.7, 0.9],
    ]
)
ROWS = ["base", "a", "b", "c"]


def test_the_metrics_are_those_of_the_papers():
    found = compute_metrics(MATRIX, rows=ROWS, tasks=["a", "b", "c"])
    expected = {
        "AP": (0.6 + 0.7 + 0.9) / 3,
        "LA": (0.9 + 0.8 + 0.9) / 3,
        "BWT": ((0.6 - 0.9) + (0.7 - 0.8)) / 2,
        "F": ((0.9 - 0.6) + (0.8 - 0.7)) / 2,
        "FWT": ((0.4 - 0.3) + (0.5 - 0.1)) / 2,
    }
    assert found == pytest.approx(expected)
    assert set(ANSWER_METRICS) == set(expected)


def test_metrics_are_there_as_soon_as_their_terms_are():
    assert set(compute_metrics(MATRIX[:1], rows=ROWS[:1], tasks=["a", "b", "c"])) == {"AP"}
    assert set(compute_metrics(MATRIX[:2], rows=ROWS[:2], tasks=["a", "b", "c"])) == {"AP", "LA", "FWT"}


def test_intervals_are_of_examples_and_paired_between_rows():
    """What every row has alike cancels in a difference: the interval of BWT is a point."""
    draw = np.random.default_rng(0)
    right = draw.integers(0, 2, (2, 400)).astype(float)
    alike = {"a": [right[0]] * 3, "b": [right[1]] * 3}
    found = compute_intervals(alike, rows=["base", "a", "b"])
    assert found["BWT"] == [0, 0] and found["F"] == [0, 0]
    low, high = found["AP"]
    mean, error = right.mean(), np.sqrt(0.25 / 400 / 2)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.01)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.01)


def test_a_task_of_the_harness_is_told_with_what_decides_its_numbers():
    task = {"metric": "acc", "shots": 0, "limit": None, "version": "1.0", "values": [0.5, None]}
    assert describe_task("a", task) == "a (acc, 0 shots, version 1.0)" and last_value(task) == (0, 0.5)
    several = task | {"shots": None, "limit": 0.5, "values": [None]}
    assert describe_task("a", several) == "a (acc, shots differ, limit 0.5, version 1.0)"
    assert last_value(several) is None


SOURCE = "About 95 species are currently accepted ."
REFERENCES = [
    "About 95 species are currently known .",
    "About 95 species are now accepted .",
    "95 species are now accepted .",
]


@pytest.mark.parametrize(("count", "expected"), [(3, 26.953601953601954), (1, 21.805555555555557)])
def test_sari_is_that_of_other_programs(count, expected):
    """Of the metric cards of `sari` and `wiki_split` in Hugging Face's `evaluate`."""
    assert 100 * sari(SOURCE, "About 95 you now get in .", REFERENCES[:count]) == pytest.approx(expected)


def test_sari_by_hand():
    """I = a b, O = a c c, R = a c. Single words: c is added, rightly; a kept, rightly; b deleted, rightly.
    Pairs: O adds ac and cc, R wants ac, F = 2/3; none is kept or to be kept; ab is deleted, rightly.
    Triples: O adds acc and R nothing, precision 0, recall 0 / 0 = 1, F = 0. There are none of four words."""
    expected = ((1 + 1 + 1) + (2 / 3 + 1 + 1) + (0 + 1 + 1) + (1 + 1 + 1)) / 12
    assert sari("a b", "a c c", ["a c"]) == pytest.approx(expected)


def test_counts_of_sari_by_hand():
    """I = a a a b, O = a a, R = a and a a b, so 1.5 a and 0.5 b in each. Kept are 2 a, of which 1.5 are to be
    kept; 1.5 a and 0.5 b of I are to be kept. Deleted are 1 a and 1 b, rightly the 1 a, since R deletes 1.5,
    and 0.5 b."""
    source, written, *references = (count_ngrams(text, 1) for text in ("a a a b", "a a", "a", "a a b"))
    added, kept, deleted = score_ngrams(source, written, references)
    assert added == 1, "nothing is added, nothing is to be added"
    assert kept == pytest.approx(2 * (3 / 4) * (3 / 4) / (3 / 4 + 3 / 4))
    assert deleted == pytest.approx(3 / 4)


def test_a_reference_has_all_and_a_copy_less():
    assert sari(SOURCE, REFERENCES[0], REFERENCES[:1]) == 1
    assert sari("Das Haus ist groß.", "das haus ist GROSS .", ["das haus ist gross."]) == 1
    assert sari("a b c d e", "a b c d e", ["a x y"]) < 0.5
    assert sari("a b", "", ["a"]) > 0


def test_the_measure_is_of_source_and_reference():
    given = TaskAnswers(REFERENCES[:2], [()] * 2, [REFERENCES[0], SOURCE], None, None, [SOURCE] * 2)
    found = MEASURES["sari"].compute(given)
    assert found[0] == 1 and found[1] == pytest.approx(sari(SOURCE, SOURCE, REFERENCES[1:2]))
