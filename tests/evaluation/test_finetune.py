"""End tasks learned: a plain loop, the same bits from the same seed, and nothing else changed."""

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from cpt.adapters import soft_prompt as prompt
from cpt.adapters.gates import Gate
from cpt.evaluation import finetune
from cpt.evaluation.finetune import (
    Classifier,
    EncodedExamples,
    FinetuneJob,
    encode_examples,
    score_predictions,
)
from cpt.evaluation.finetune_tasks import FinetuneOptions, LabelledExample
from tests.support.endtask_fixtures import model, rows, tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CLASSES = ["bad", "good"]
DEFAULTS = FinetuneOptions(
    epochs=3,
    lr=3e-3,
    weight_decay=0.01,
    warmup_ratio=0.0,
    batch_size=8,
    group_by_length=False,
    max_seq_length=24,
    precision="32-true",
    dropout=0.1,
    freeze_encoder=False,
    metric="macro_f1",
    load_best_model_at_end=False,
)


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def encode_rows(words, *, count, seed):
    examples = []
    for row in rows("law", count=count, seed=seed):
        examples.append(LabelledExample(row["id"], row["text"], None, row["label"]))
    return encode_examples(examples, words, length=24, classes=CLASSES, has_types=False)


def job(words, *, dev=False, name="law", train=60, **changes):
    return FinetuneJob(
        name,
        train=encode_rows(words, count=train, seed=0),
        dev=encode_rows(words, count=16, seed=2) if dev else None,
        test=encode_rows(words, count=30, seed=1),
        classes=2,
        settings=replace(DEFAULTS, **changes),
        pad=words.pad_token_id,
        eval_batch_size=7,
    )


def classifier(start, *, classes=2, dropout=0.0):
    return Classifier(start, classes=classes, dropout=dropout, freeze_encoder=False)


class Prediction(NamedTuple):
    """One call of `predict`: of how many examples, and a copy of the model."""

    num_examples: int
    model: nn.Module


@pytest.fixture
def prediction_log(monkeypatch):
    """The calls of `predict`, as `Prediction`."""
    predictions = []
    predict = finetune.predict

    def log_prediction(trained_model, endtask_job, task_split):
        predictions.append(Prediction(len(task_split), deepcopy(trained_model)))
        return predict(trained_model, endtask_job, task_split)

    monkeypatch.setattr(finetune, "predict", log_prediction)
    return predictions


def tune_on_job(start, endtask_job, *, seed=3, step=list):
    return finetune.fine_tune(start, endtask_job, seed=seed, device=CPU, step=step)


def test_a_task_that_a_word_tells_is_learned(words):
    endtask_job = job(words, epochs=6, train=100, precision="bf16-mixed")
    steps = []
    start = model("roberta", words, dropout=0.1).bfloat16()
    assert {value.dtype for value in classifier(start).parameters()} == {torch.float32}
    predicted_labels, epoch = tune_on_job(start, endtask_job, step=lambda: steps.append(1))
    assert score_predictions(torch.from_numpy(predicted_labels), endtask_job.test.labels, 2)["accuracy"] > 0.8
    assert (epoch, len(steps)) == (6, endtask_job.steps) == (6, 6 * 13)


def test_fine_tuning_is_a_plain_loop(words, prediction_log):
    endtask_job = job(words, epochs=2, dropout=0.0)
    start = model("roberta", words)
    tune_on_job(start, endtask_job)

    with finetune.forked_generators(CPU, "end task", "law", 3):
        reference = classifier(start).train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=3e-3, weight_decay=0.01, foreach=False)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, endtask_job.steps)
    for row_indices in [*endtask_job.batches(3, 1), *endtask_job.batches(3, 2)]:
        batch = endtask_job.train.batch(row_indices, pad=endtask_job.pad, device=CPU)
        nn.functional.cross_entropy(reference(batch), batch["labels"]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    (prediction,) = prediction_log
    tuned_model = prediction.model
    for (name, ours), theirs in zip(tuned_model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, msg=name)
    assert (tuned_model.dense.bias - classifier(start).dense.bias).abs().max() > 1e-3

    _, schedule = finetune.make_optimizer(classifier(start), job(words, warmup_ratio=0.5))
    assert schedule.get_last_lr()[0] < 0.2 * 3e-3


def test_the_same_seed_and_task_give_the_same_bits(words, prediction_log):
    start = model("roberta", words, dropout=0.1)
    for seed, name in [(3, "law"), (4, "law"), (3, "food"), (3, "law")]:
        torch.rand(7)
        tune_on_job(start, job(words, name=name, epochs=1), seed=seed)
    states = []
    for prediction in prediction_log:
        states.append(torch.cat([value.flatten() for value in prediction.model.state_dict().values()]))
    assert [torch.equal(states[0], state) for state in states[1:]] == [False, False, True]


def test_frozen_trains_the_head_alone_and_otherwise_all_but_closed_gates(words, prediction_log):
    start = model("roberta", words, dropout=0.3)
    tune_on_job(start, job(words, epochs=1, freeze_encoder=True))
    (prediction,) = prediction_log
    tuned_model = prediction.model
    body = {f"roberta.{name}": value for name, value in tuned_model.body.state_dict().items()}
    assert all(torch.equal(value, start.state_dict()[name]) for name, value in body.items())
    assert not any(part.training for part in tuned_model.body.modules())
    assert tuned_model.out.bias.abs().max() > 0

    start.requires_grad_(False).roberta.encoder.layer[0].add_module("gate", Gate(4, s_max=400.0))
    fixed = {name for name, p in classifier(start).named_parameters() if not p.requires_grad}
    assert fixed == {"body.encoder.layer.0.gate.e"}


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_padding_changes_no_logit_of_the_first_the_last_or_the_mean_token(kind, words):
    endtask_model = classifier(model(kind, words), classes=3, dropout=0.5).eval()
    data = job(words).train
    hidden = []
    assert len({len(ids) for ids in data.ids[:12]}) > 1
    endtask_model.body.register_forward_hook(lambda m, a, out: hidden.append(out.last_hidden_state))
    with torch.no_grad():
        batch_logits = endtask_model(data.batch(range(12), pad=words.pad_token_id, device=CPU))
        single_batches = [data.batch([row], pad=words.pad_token_id, device=CPU) for row in range(12)]
        single_logits = torch.cat([endtask_model(batch) for batch in single_batches])

        pools = {"bert": lambda states: states[0], "gpt2": lambda states: states[-1]}
        pool = pools.get(kind, lambda states: states.mean(0))
        states = torch.stack([pool(hidden[0][row, : len(data.ids[row])]) for row in range(12)])
        torch.testing.assert_close(batch_logits, endtask_model.out(endtask_model.dense(states).tanh()))
    torch.testing.assert_close(batch_logits, single_logits, rtol=1e-4, atol=1e-6)


def test_pairs_are_encoded_by_the_tokenizers_own_template_and_the_longer_text_is_cut(words):
    long = " ".join(["telescope"] * 30)
    pairs = [("the court", None, "bad"), ("the court", "a river", "good"), ("the court", long, "good")]
    examples = [LabelledExample(str(number), *pair) for number, pair in enumerate(pairs)]
    encoded = encode_examples(examples, words, length=16, classes=CLASSES, has_types=False)
    assert encoded.ids[0].tolist() == words("the court")["input_ids"]
    assert encoded.ids[1].tolist() == words("the court", "a river")["input_ids"]
    short = words("the court", add_special_tokens=False)["input_ids"]
    assert len(encoded.ids[2]) == 16 and encoded.ids[2].tolist()[1 : 1 + len(short)] == short
    assert encoded.labels.tolist() == [0, 1, 1]
    prompted = model("gpt2", words)  # it has 48 positions, of which a prompt takes 5
    assert finetune.find_max_length(prompted, 400) == 48 and finetune.find_max_length(prompted, 24) == 24
    prompt.attach_prompt(prompted, tokens=5, causal=True)
    assert finetune.find_max_length(prompted, 400) == 43


def test_predictions_are_in_the_order_of_the_file(words):
    endtask_job = job(words)
    endtask_model = classifier(model("roberta", words), dropout=0.5)
    with torch.no_grad():
        batches = [endtask_job.test.batch([row], pad=words.pad_token_id, device=CPU) for row in range(30)]
        logits = torch.cat([endtask_model.eval()(batch) for batch in batches])
        endtask_model.out.bias -= logits.median(0).values
    expected = (logits - logits.median(0).values).argmax(-1)
    assert torch.equal(finetune.predict(endtask_model.train(), endtask_job, endtask_job.test), expected)
    assert len(set(expected.tolist())) == 2
    # A class with neither an example nor a prediction has no part in the macro average.
    labels = torch.tensor([0, 0, 1, 1])
    of_two_classes = score_predictions(torch.tensor([0, 0, 1, 0]), labels, 3)
    assert of_two_classes["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 2, abs=1e-6)
    of_three_classes = score_predictions(torch.tensor([0, 2, 1, 0]), labels, 3)
    assert of_three_classes["macro_f1"] == pytest.approx((0.5 + 2 / 3 + 0) / 3, abs=1e-6)


def test_the_best_epoch_on_dev_is_taken_and_the_first_of_equals(words, prediction_log, monkeypatch):
    score = iter([0.2, 0.7, 0.7, 0.1])
    monkeypatch.setattr(finetune, "score_predictions", lambda *_: {"macro_f1": next(score), "accuracy": 0.0})
    _, epoch = tune_on_job(
        model("roberta", words), job(words, dev=True, load_best_model_at_end=True, epochs=4)
    )
    assert epoch == 2 and [prediction.num_examples for prediction in prediction_log] == [16] * 4 + [30]
    weights = [prediction.model.out.weight for prediction in prediction_log]
    assert torch.equal(weights[4], weights[1]) and not torch.equal(weights[4], weights[3])
    with pytest.raises(ValueError, match=r"end task law, seed 3, are not finite at step \d+ of epoch 1"):
        tune_on_job(model("roberta", words), job(words, lr=1e30))


def test_every_row_is_in_one_batch_which_depends_on_seed_and_epoch():
    ids = [torch.ones(n, dtype=torch.long) for n in np.random.default_rng(0).integers(3, 60, 103)]
    train = EncodedExamples(ids=ids, types=None, labels=torch.zeros(103))
    padded = {}
    for grouped in (False, 1, 4, True):
        settings = replace(DEFAULTS, batch_size=8, group_by_length=grouped, epochs=1)
        endtask_job = FinetuneJob(
            "law", train, None, train, classes=2, pad=0, settings=settings, eval_batch_size=8
        )
        batches = endtask_job.batches(0, 1)
        assert sorted(np.concatenate(batches)) == list(range(103))
        assert len(batches) == endtask_job.steps == 13
        assert sorted(map(len, batches)) == [7] + [8] * 12

        rows_by_batch = [*map(list, batches)]
        assert rows_by_batch == [*map(list, endtask_job.batches(0, 1))]
        assert rows_by_batch != [*map(list, endtask_job.batches(1, 1))]
        assert rows_by_batch != [*map(list, endtask_job.batches(0, 2))]
        padded[grouped] = 0
        for batch in batches:
            padded[grouped] += len(batch) * max(len(ids[row]) for row in batch)
    assert padded[True] < 0.75 * padded[False]  # near lengths together
