"""Texts and examples that a model writes: how they are sampled, which are kept, their rows and files."""

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from cpt.contrib.generative_replay.writer import (
    COMMIT_FILE,
    MARK,
    GrowingFiles,
    Sample,
    TextWriter,
    WritingJob,
    choose_texts,
    from_form,
    sample_file,
)
from cpt.core.files import read_checked_json, write_checked_json
from cpt.core.randomness import draw_uniforms, key, sample_keys
from cpt.data.packing import Packed
from cpt.data.token_rows import ArrowRows
from cpt.models.generation import Sampling, sample_texts
from tests.support.data_fixtures import bare_tokenizer
from tests.support.task_fixtures import LABELS

LENGTH = 8


def make_job(text: str, *, tokens_to_replay: int, tokens_to_write: int) -> WritingJob:
    return WritingJob(
        text=text,
        domain=0,
        contexts=[],
        tokens_to_write=tokens_to_write,
        tokens_to_replay=tokens_to_replay,
        stream=0,
    )


def write_samples(folder: Path, name: str, samples: list[Sample]) -> None:
    sample_file(folder, name, "jsonl").write_text(
        "".join(json.dumps(vars(sample)) + "\n" for sample in samples)
    )


def make_samples(seed: int, count: int = 60) -> list[Sample]:
    """Samples with drawn lengths and losses, no token in two of them. About 60 % were ended by the model; the
    others were broken off at LENGTH tokens."""
    draw = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        is_ended = bool(draw.random() < 0.6)
        size = int(draw.integers(1, LENGTH)) if is_ended else LENGTH
        first_id = 1000 + 10 * number
        samples.append(
            Sample(
                ids=list(range(first_id, first_id + size)),
                real=min(2, size),
                ended=is_ended,
                nll=float(draw.random()),
                text=f"text {number}",
            )
        )
    return samples


@pytest.mark.parametrize(("tokens", "drop"), [(1, 0.9), (137, 0.0), (200, 0.9)])
def test_the_budget_is_met_to_the_token(tokens, drop):
    samples = make_samples(3, count=900)
    sizes = np.array([sample.size for sample in samples])
    nll = np.array([sample.nll for sample in samples])
    num_tokens_wanted = round(tokens / (1 - drop) + 0.49)
    kept_sizes = choose_texts(
        sizes, nll, tokens_to_replay=tokens, tokens_to_write=num_tokens_wanted, is_cut=True
    )
    assert kept_sizes[kept_sizes > 0].sum() == tokens
    num_asked = (
        int(np.searchsorted(np.cumsum(sizes), num_tokens_wanted)) + 1
    )  # the first that come to what is wanted
    assert (kept_sizes[num_asked:] == -1).all() and (kept_sizes[:num_asked] >= 0).all()
    if drop and (kept_sizes == 0).any():
        assert nll[kept_sizes > 0].max() <= nll[kept_sizes == 0].min()
        num_dropped = sizes[kept_sizes == 0].sum() + (sizes - kept_sizes)[kept_sizes > 0].sum()
        assert num_dropped == pytest.approx(drop * num_tokens_wanted, abs=2 * LENGTH)


def test_valid_examples_are_kept_up_to_the_budget():
    sizes = np.array([5, 6, 7, 8, 9, 5])
    nll = np.array([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    valid = np.array([True, False, True, True, True, True])

    def chosen(valid, **budget):
        return np.flatnonzero(choose_texts(sizes, nll, is_valid=valid, **budget) > 0).tolist()

    assert chosen(valid, tokens_to_replay=20, tokens_to_write=20) == [0, 2, 3]  # of the first 4
    assert chosen(valid, tokens_to_replay=19, tokens_to_write=19) == [0, 2]
    assert chosen(valid, tokens_to_replay=11, tokens_to_write=26) == [3]  # of the lowest nats
    assert chosen(valid, tokens_to_replay=15, tokens_to_write=26) == [2, 3]
    assert chosen(~valid & False, tokens_to_replay=20, tokens_to_write=40) == []


def test_rows_hold_every_token_that_is_kept(tmp_path: Path):
    """Ended texts one after another with their ends, a broken-off one in a row of its own."""
    samples = make_samples(5)
    tokenizer = bare_tokenizer()
    tokens = 301
    end = tokenizer.eos_token_id
    write_samples(tmp_path, "a/b", samples)
    text_format = SimpleNamespace(row_start=None)
    run = SimpleNamespace(
        tokenizer=tokenizer, length=LENGTH, sampling=SimpleNamespace(end=end), text_format=text_format
    )
    job = make_job("a/b", tokens_to_replay=tokens, tokens_to_write=tokens)
    facts = TextWriter.write_rows(run, tmp_path, job)
    data = Dataset.from_file(str(sample_file(tmp_path, "a/b", "arrow")))
    rows = Packed(ArrowRows(data), LENGTH, 0, facts["texts"], facts["bytes"])
    lengths = rows.row_lengths
    row_indices = np.arange(len(rows))
    assert lengths.sum() == tokens == facts["tokens"]
    ids = [row[:size].tolist() for row, size in zip(rows.ids(row_indices), lengths, strict=True)]

    packed = []  # tokens of ended texts
    cut_rows = []
    remaining_tokens = tokens
    for sample in samples:
        sample_ids = [*sample.ids, end] if sample.ended else sample.ids
        if remaining_tokens and sample.ended and len(sample_ids) <= remaining_tokens:
            packed += sample_ids
        elif remaining_tokens:
            cut_rows.append(sample_ids[:remaining_tokens])
        remaining_tokens -= min(remaining_tokens, len(sample_ids))
    assert [row for row in ids if row in cut_rows] == cut_rows
    assert list(itertools.chain(*[row for row in ids if row not in cut_rows])) == packed
    documents = rows.document_of(row_indices)
    assert len(set(documents[documents >= 0].tolist())) == facts["texts"]
    assert rows.sharing.tolist() == [len(set(row[row >= 0].tolist())) for row in documents]


def test_an_answer_has_to_be_one_of_the_choices():
    valid = [f"a question{MARK}tu ", f"a {MARK} b {MARK} mu na"]
    invalid = [f"a question {MARK} mu", f"{MARK} tu", f"a {MARK}", "a tu", ""]
    for text in (*valid, *invalid):
        assert (from_form(text, task="law", number=0, choices=LABELS) is not None) == (text in valid)
    assert from_form(f"a {MARK} b", task="law", number=0, choices=()).target == "b", "open ones may be any"


def test_damaged_beginnings_are_not_used(tmp_path: Path):
    path = tmp_path / "law.json"
    write_checked_json(path, [[1, 2], [3, 4]])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept": [[1, 2], [3, 5]]}))
    with pytest.raises(ValueError, match="law.json is damaged"):
        read_checked_json(path, remedy="restore it")


DAMAGE = {
    "nothing": lambda folder: None,
    "a truncated place": lambda folder: os.truncate(folder / COMMIT_FILE, 40),
    "a file that is gone": lambda folder: (folder / "counts").unlink(),
    "a file that is too short": lambda folder: os.truncate(folder / "rows", 5),
    "another form": lambda folder: (folder / COMMIT_FILE).write_text('{"form": 2, "sizes": {}, "place": 1}'),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_files_that_grow_resume_at_the_last_commit_or_restart_where_they_do_not_fit_it(tmp_path: Path, harm):
    files = GrowingFiles(tmp_path, ("rows", "counts"), form=1)
    for number, part in enumerate([b"first ", b"second ", b"third "]):
        files.append("rows", part)
        if number < 2:
            files.commit({"number": number})
    files.close()
    DAMAGE[harm](tmp_path)
    files = GrowingFiles(tmp_path, ("rows", "counts"), form=1)
    restored = files.committed_value, (tmp_path / "rows").read_bytes()
    assert restored == ((None, b"") if harm != "nothing" else ({"number": 1}, b"first second "))
    files.close()


END, ENTRIES, VOCABULARY = 3, 90, 96
CONTEXTS = np.random.default_rng(0).integers(4, ENTRIES, (40, 5)).tolist()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=VOCABULARY, n_positions=64)
    gpt2 = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        gpt2.transformer.wte.weight.mul_(5)  # sharp enough for texts to differ from chance
    gpt2.generation_config.repetition_penalty = 5.0  # a checkpoint's habits are not this run's
    gpt2.generation_config.eos_token_id = 7
    return gpt2


def numbers(count):
    return torch.from_numpy(
        draw_uniforms(sample_keys(key("texts"), np.arange(count)), 20, stream=key("tokens"))
    )


def sample_by_hand(model, context, uniforms, sampling):
    """A text, token by token, by whole forward passes in double precision."""
    ids = list(context)
    nll = []
    for uniform in uniforms.tolist():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        logits[sampling.entries :] = -torch.inf
        probabilities = (logits / sampling.temperature).softmax(-1).numpy()
        order = np.argsort(-probabilities, kind="stable")
        upper = np.cumsum(probabilities[order])
        num_kept = int((upper - probabilities[order] < sampling.top_p).sum())
        token = int(order[np.searchsorted(upper, uniform * upper[num_kept - 1], side="right")])
        ids.append(token)
        nll.append(-logits.log_softmax(-1)[token].item())
        if token == sampling.end:
            break
    return ids[len(context) :], float(np.mean(nll))


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_texts_are_those_of_a_walk_by_hand_in_any_batch(model, temperature, top_p):
    sampling = Sampling(temperature=temperature, top_p=top_p, entries=ENTRIES, end=END)
    uniforms = numbers(40)
    samples = sample_texts(model, CONTEXTS, uniforms, sampling=sampling)
    assert any(END in ids for ids, _ in samples) and len({len(ids) for ids, _ in samples}) > 1
    for (ids, nll), context, row in zip(samples[:8], CONTEXTS, uniforms, strict=False):
        expected, mean = sample_by_hand(model, context, row, sampling)
        assert ids == expected and nll == pytest.approx(mean, abs=1e-4)

    samples_in_batches = []
    for first in range(0, 40, 7):
        batch = slice(first, first + 7)
        samples_in_batches += sample_texts(model, CONTEXTS[batch], uniforms[batch], sampling=sampling)
    assert [ids for ids, _ in samples_in_batches] == [ids for ids, _ in samples]
