"""What is kept of text that a model wrote, and the rows of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from cpt.core.randomness import key, shuffle
from cpt.data.generated import (
    GeneratedText,
    Sample,
    choose_tokens,
    draw_beginnings,
    file_of,
    keep_samples,
    load_kept,
    save_kept,
    write_sample,
)
from cpt.data.replay import Generated
from tests.support.data_fixtures import bare, rows_by_hand

LENGTH = 8


def made(seed: int, count: int = 60) -> list[Sample]:
    """Texts that ended and texts that were broken off."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ended = bool(draw.random() < 0.6)
        size = int(draw.integers(1, LENGTH)) if ended else LENGTH
        ids = [1000 + 10 * number + place for place in range(size)]
        found.append(Sample(ids, min(2, size), ended, float(draw.random()), f"text {number}"))
    return found


@pytest.mark.parametrize("tokens", [1, 50, 137, 200])
@pytest.mark.parametrize("drop", [0.0, 0.25, 0.9])
def test_the_budget_is_met_to_the_token(tokens, drop):
    samples = made(3, count=900)
    sizes, nll = np.array([each.size for each in samples]), np.array([each.nll for each in samples])
    options = Generated(
        **{"past": 0.1, "general": 0.0, "adds": False, "tokens": tokens, "drop": drop, "prefix": 0},
        **{"starts": 1, "prompt": None, "temperature": 1.0, "top_p": 1.0, "batch_size": 1, "forms": 0.0},
    )
    wanted = options.wanted(tokens)
    kept = choose_tokens(sizes, nll, tokens=tokens, wanted=wanted)
    assert kept[kept > 0].sum() == tokens
    asked = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1  # the first that come to what is wanted
    assert (kept[asked:] == -1).all() and (kept[:asked] >= 0).all()
    if drop and (kept == 0).any():
        assert nll[kept > 0].max() <= nll[kept == 0].min()
        left = sizes[kept == 0].sum() + (sizes - kept)[kept > 0].sum()
        assert left == pytest.approx(drop * wanted, abs=2 * LENGTH)
    if not drop:
        assert (np.diff(np.flatnonzero(kept > 0)) == 1).all() and kept[0] > 0


def test_what_nobody_asked_for_changes_nothing():
    """So that a larger block of texts keeps the same ones."""
    samples = made(4, count=200)
    sizes, nll = np.array([each.size for each in samples]), np.array([each.nll for each in samples])
    whole = choose_tokens(sizes, nll, tokens=90, wanted=120)
    asked = int((whole >= 0).sum())
    fewer = choose_tokens(sizes[:asked], nll[:asked], tokens=90, wanted=120)
    assert whole[:asked].tolist() == fewer.tolist()


@pytest.mark.parametrize("tokens", [40, 301])
def test_rows_hold_every_token_that_is_kept(tmp_path: Path, tokens):
    """Ended texts one behind another with their ends, a broken-off one in a row of its own."""
    samples, tokenizer = made(5), bare()
    end = tokenizer.eos_token_id
    file_of(tmp_path, "a/b", "jsonl").write_bytes(b"".join(map(write_sample, samples)))
    facts = keep_samples(tmp_path, "a/b", tokens=tokens, wanted=tokens, length=LENGTH, tokenizer=tokenizer)
    rows = GeneratedText(
        Dataset.from_file(str(file_of(tmp_path, "a/b", "arrow"))), LENGTH, 0, facts["texts"], facts["bytes"]
    )
    lengths = rows.row_lengths
    assert lengths.sum() == tokens == facts["tokens"]
    ids = [row[:size].tolist() for row, size in zip(rows.ids(np.arange(len(rows))), lengths, strict=True)]
    left, packed, alone = tokens, [], []
    for sample in samples:
        whole = [*sample.ids, *[end] * sample.ended]
        if left and sample.ended and len(whole) <= left:
            packed += whole
        elif left:
            alone.append(whole[:left])
        left -= min(left, len(whole))
    assert [row for row in ids if row in alone] == alone
    assert [each for row in ids if row not in alone for each in row] == packed
    documents = rows.document_of(np.arange(len(rows)))
    assert len(set(documents[documents >= 0].tolist())) == facts["texts"]


def test_beginnings_are_those_of_the_probe():
    text = rows_by_hand(31, last=2, seed=1)
    found = draw_beginnings(text, "law", count=12, prefix=3)
    rows = shuffle(np.arange(12), 31, stream=key("probe", "law"))
    rows = rows[rows != 30]  # which has two tokens
    assert found == text.ids(rows)[:, :3].tolist()
    with pytest.raises(ValueError, match=r"^replay.prefix=8: no row of law that could be kept has more tok"):
        draw_beginnings(text, "law", count=12, prefix=text.length)


def test_damaged_beginnings_are_not_gone_on_with(tmp_path: Path):
    path = tmp_path / "law.json"
    with pytest.raises(ValueError, match=r"law.json is gone; bring it back$"):
        load_kept(path, instead="bring it back")
    save_kept(path, [[1, 2], [3, 4]])
    assert load_kept(path, instead="") == [[1, 2], [3, 4]]
    known = json.loads(path.read_text())
    for wrong in (path.read_text()[:-9], json.dumps(known | {"kept": [[1, 2], [3, 5]]}), "[]"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"law.json is damaged \(.*; bring it back$"):
            load_kept(path, instead="bring it back")
