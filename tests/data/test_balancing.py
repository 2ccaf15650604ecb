"""Domains cut to one size."""

import numpy as np
import pytest

from cpt.core.randomness import key
from cpt.data.balancing import balance, cut
from cpt.models.objectives import Causal
from tests.support.data_fixtures import rows_by_hand

SIZES = {"a": (40, 8), "b": (7, 3), "c": (25, 1)}  # rows, tokens of the last


@pytest.fixture
def texts():
    return {name: rows_by_hand(rows, last=last, seed=rows) for name, (rows, last) in SIZES.items()}


def scored(text) -> int:
    return int(Causal().scored(text.sizes()).sum())


def test_every_domain_has_the_tokens_of_the_smallest_but_for_a_row(texts, caplog):
    with caplog.at_level("INFO"):
        equal = balance(texts)
    tokens = {name: int(text.row_lengths.sum()) for name, text in equal.items()}
    assert tokens["b"] == 6 * 8 + 3 and all(51 <= count < 51 + 8 for count in tokens.values())
    assert all(abs(scored(text) - scored(equal["b"])) <= 8 for text in equal.values())
    assert "2 of 3 domains are cut to 51 tokens, those of b" in caplog.text
    assert scored(texts["a"]) > 4 * scored(equal["a"])


def test_what_is_cut_reads_as_the_rows_that_were_drawn(texts):
    chosen, whole = balance(texts)["a"], texts["a"]
    rows = whole.draw_rows(51, stream=key("balanced", "a"))
    assert len(chosen) == len(rows) == 7 and list(rows) != list(range(7))
    here = np.arange(len(chosen))
    assert (chosen.ids(here) == whole.ids(rows)).all()
    assert (chosen.document_of(here) == whole.document_of(rows)).all()
    assert (chosen.text_tokens == whole.text_tokens[rows]).all()
    assert (chosen.row_lengths == whole.row_lengths[rows]).all()


def test_a_short_last_row_that_is_drawn_keeps_its_length():
    text = rows_by_hand(9, last=2)
    chosen = cut(text, 57, name="a")
    assert 8 in text.draw_rows(57, stream=key("balanced", "a")) and len(chosen) < 9
    ids = chosen.document_of(np.arange(len(chosen)))
    assert list(chosen.row_lengths) == (ids >= 0).sum(1).tolist() and chosen.row_lengths[-1] == 2


def test_a_budget_leaves_what_is_smaller(texts, caplog):
    with caplog.at_level("INFO"):
        equal = balance(texts, tokens=100)
    assert len(equal["b"]) == 7 and len(equal["a"]) == 13 and len(equal["c"]) in (13, 14)
    assert "2 of 3 domains are cut to 100 tokens" in caplog.text and "those of" not in caplog.text


def test_fewer_tokens_are_among_more(texts):
    few, more = (set(texts["a"].draw_rows(count, stream=3)) for count in (50, 150))
    assert few < more
