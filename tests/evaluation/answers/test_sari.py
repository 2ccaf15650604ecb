"""SARI against values that were published, and by hand."""

import pytest

from cpt.evaluation.answers.metrics import MEASURES, Answered
from cpt.evaluation.answers.sari import sari

SOURCE = "About 95 species are currently accepted ."
REFERENCES = [
    "About 95 species are currently known .",
    "About 95 species are now accepted .",
    "95 species are now accepted .",
]


@pytest.mark.parametrize(("count", "expected"), [(3, 26.953601953601954), (1, 21.805555555555557)])
def test_values_of_other_programs(count, expected):
    """Of the metric cards of `sari` and `wiki_split` in Hugging Face's `evaluate`."""
    assert 100 * sari(SOURCE, "About 95 you now get in .", REFERENCES[:count]) == pytest.approx(expected)


def test_by_hand():
    """I = a b, O = a c c, R = a c. Single words: c is added, rightly; a kept, rightly; b deleted, rightly.
    Pairs: O adds ac and cc, R wants ac, F = 2/3; none is kept or to be kept; ab is deleted, rightly.
    Triples: O adds acc and R nothing, precision 0, recall 0 / 0 = 1, F = 0. There are none of four words."""
    expected = ((1 + 1 + 1) + (2 / 3 + 1 + 1) + (0 + 1 + 1) + (1 + 1 + 1)) / 12
    assert sari("a b", "a c c", ["a c"]) == pytest.approx(expected)


def test_counts_by_hand():
    """I = a a a b, O = a a, R = a and a a b, so 1.5 a and 0.5 b in each. Kept are 2 a, of which 1.5 are to be
    kept; 1.5 a and 0.5 b of I are to be kept. Deleted are 1 a and 1 b, rightly the 1 a, since R deletes 1.5,
    and 0.5 b."""
    from cpt.evaluation.answers.sari import count_ngrams, score_order

    source, written, *references = (count_ngrams(text, 1) for text in ("a a a b", "a a", "a", "a a b"))
    added, kept, deleted = score_order(source, written, references)
    assert added == 1, "nothing is added, nothing is to be added"
    assert kept == pytest.approx(2 * (3 / 4) * (3 / 4) / (3 / 4 + 3 / 4))
    assert deleted == pytest.approx(3 / 4)


def test_a_reference_has_all_and_a_copy_less():
    assert sari(SOURCE, REFERENCES[0], REFERENCES[:1]) == 1
    assert sari("Das Haus ist groß.", "das haus ist GROSS .", ["das haus ist gross."]) == 1
    assert sari("a b c d e", "a b c d e", ["a x y"]) < 0.5
    assert sari("a b", "", ["a"]) > 0


def test_the_measure_is_of_source_and_reference():
    given = Answered(REFERENCES[:2], [()] * 2, [REFERENCES[0], SOURCE], None, None, [SOURCE] * 2)
    found = MEASURES["sari"].compute(given)
    assert found[0] == 1 and found[1] == pytest.approx(sari(SOURCE, SOURCE, REFERENCES[1:2]))
