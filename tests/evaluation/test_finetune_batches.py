"""Rows of an end task in batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.evaluation.finetune import EncodedExamples, FinetuneJob


def job(*, count=103, grouped, size=8):
    lengths = np.random.default_rng(0).integers(3, 60, count)
    train = EncodedExamples(
        ids=[torch.ones(n, dtype=torch.long) for n in lengths], types=None, labels=torch.zeros(count)
    )
    settings = SimpleNamespace(batch_size=size, grouped=grouped, epochs=1)
    return FinetuneJob(
        name="law", train=train, dev=None, test=train, classes=2, settings=settings, pad=0, eval_batch_size=8
    )


def padded(work, batches):
    return sum(len(batch) * max(len(work.train.ids[row]) for row in batch) for batch in batches)


@pytest.mark.parametrize("grouped", [1, 4, 100])
def test_every_row_stands_in_one_batch(grouped):
    work = job(grouped=grouped)
    batches = work.batches(0, 1)
    assert sorted(np.concatenate(batches)) == list(range(103))
    assert len(batches) == work.steps == 13
    assert sorted(map(len, batches)) == [7] + [8] * 12


@pytest.mark.parametrize("grouped", [1, 4])
def test_batches_are_a_function_of_seed_and_epoch(grouped):
    work = job(grouped=grouped)
    told = [np.concatenate(work.batches(*each)).tolist() for each in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert told[0] == told[1] and told[0] != told[2] and told[0] != told[3]


def test_grouped_rows_are_of_near_length_and_in_no_order_of_it():
    plain, grouped = job(grouped=1), job(grouped=100)
    batches = grouped.batches(0, 1)
    assert padded(grouped, batches) < 0.75 * padded(plain, plain.batches(0, 1))
    means = [np.mean([len(grouped.train.ids[row]) for row in batch]) for batch in batches]
    assert means != sorted(means) and means != sorted(means, reverse=True)
    assert grouped.batches(0, 1)[0].tolist() != grouped.batches(0, 2)[0].tolist()


def test_a_span_mixes_no_rows_of_another():
    work, size = job(grouped=4), 8
    order = np.concatenate(job(grouped=1).batches(0, 1))
    spans = [set(order[first : first + 4 * size]) for first in range(0, len(order), 4 * size)]
    assert all(any(set(batch) <= span for span in spans) for batch in work.batches(0, 1))
