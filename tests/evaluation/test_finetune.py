import numpy as np
import pytest
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from cpt.adapters import soft_prompt as prompt
from cpt.adapters.gates import Gate
from cpt.evaluation import finetune as subject
from cpt.evaluation.finetune import (
    Classifier,
    FinetuneJob,
    encode_examples,
    fine_tune,
    longest,
    predict,
    scores_of,
)
from cpt.evaluation.finetune_tasks import FinetuneOptions, LabelledExample
from tests.support.endtask_fixtures import model, rows, tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CLASSES = ["bad", "good"]
SETTINGS = FinetuneOptions(
    epochs=3,
    lr=3e-3,
    weight_decay=0.01,
    warmup=0.0,
    batch_size=8,
    grouped=1,
    length=24,
    precision="32-true",
    dropout=0.1,
    frozen=False,
    metric="macro_f1",
    select="last",
)
KINDS = ["roberta", "gpt2", "bert"]


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def examples(count, *, seed, paired=False):
    made = rows("law", count=count, seed=seed)
    pair = "the court" if paired else None
    return [LabelledExample(row["id"], row["text"], pair, row["label"]) for row in made]


def job(words, *, dev=False, name="law", train=60, **changes):
    settings = FinetuneOptions(**{**vars(SETTINGS), **changes})
    splits = {"train": examples(train, seed=0), "dev": examples(16, seed=1), "test": examples(30, seed=2)}
    made = {
        split: encode_examples(each, words, length=24, classes=CLASSES, types=False)
        for split, each in splits.items()
    }
    made["dev"] = made["dev"] if dev else None
    return FinetuneJob(name, **made, classes=2, settings=settings, pad=words.pad_token_id, eval_batch_size=7)


def tuned(start, work, *, seed=3, steps=None):
    found, epoch = fine_tune(
        start, work, seed=seed, device=CPU, step=(lambda: steps.append(1)) if steps is not None else list
    )
    return found, epoch


@pytest.mark.parametrize("kind", ["roberta", "gpt2", "t5"])
def test_a_task_that_a_word_tells_is_learned(kind, words):
    work, steps = job(words, epochs=6, train=100), []
    found, epoch = tuned(model(kind, words, dropout=0.1), work, steps=steps)
    assert scores_of(torch.from_numpy(found), work.test.labels, 2)["accuracy"] > 0.8
    assert (epoch, len(steps)) == (6, work.steps) == (6, 6 * 13)


def test_on_an_encoder_it_reads_the_mean_over_the_text(words):
    """Whatever pads a batch, and the model's decoder is no part of it."""
    start = model("t5", words)
    made = Classifier(start, classes=2, dropout=0.0, frozen=False).eval()
    assert sum(p.numel() for p in made.body.parameters()) == sum(
        p.numel() for p in start.get_encoder().parameters()
    )
    ids = torch.randint(5, 60, (2, 9))
    present = (torch.arange(9) < torch.tensor([[9], [4]])).long()
    logits = made({"input_ids": ids * present, "attention_mask": present})
    for row, length in enumerate((9, 4)):
        hidden = start.eval().get_encoder()(input_ids=ids[row : row + 1, :length]).last_hidden_state
        expected = made.out(torch.tanh(made.dense(hidden.mean(1))))
        torch.testing.assert_close(logits[row : row + 1], expected)


def reference(start, work, seed):
    """The same fine-tuning as transformers' schedule and padding to one length have it; logits of test."""
    torch.manual_seed(0)
    copy_of = Classifier(start, classes=2, dropout=0.0, frozen=False)
    with subject.forked_generators(CPU, "end task", work.name, seed):
        own = Classifier(start, classes=2, dropout=0.0, frozen=False)
    copy_of.load_state_dict(own.state_dict())
    settings = work.settings
    optimizer = torch.optim.AdamW(
        copy_of.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, foreach=False
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 0, work.steps)
    copy_of.train()
    for epoch in range(1, settings.epochs + 1):
        for chosen in work.batches(seed, epoch):
            batch = work.train.batch(chosen, pad=work.pad, device=CPU)
            nn.functional.cross_entropy(copy_of(batch), batch["labels"]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return copy_of


def test_fine_tuning_is_a_plain_loop(words, monkeypatch):
    kept = []
    monkeypatch.setattr(subject, "predict", lambda made, *_: kept.append(made) or torch.zeros(30).long())
    work, start = job(words, epochs=2, dropout=0.0), model("roberta", words)
    tuned(start, work)
    theirs = reference(start, work, 3)
    for (name, ours), value in zip(kept[0].named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-4, atol=2e-5, msg=name)
    moved = (kept[0].dense.bias - Classifier(start, classes=2, dropout=0.0, frozen=False).dense.bias).abs()
    assert moved.max() > 1e-3


def test_warm_up_is_a_share_of_the_steps(words):
    work = job(words, warmup=0.5)
    made = Classifier(model("roberta", words), classes=2, dropout=0.0, frozen=False)
    optimizer, schedule = subject.make_optimizer(made, work)
    rates = []
    for _ in range(work.steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert np.argmax(rates) in (work.steps // 2 - 1, work.steps // 2)
    assert rates[0] < 0.2 * max(rates) > rates[-1] > 0
    assert schedule.get_last_lr()[0] == 0
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}
    assert len(optimizer.param_groups) == 1


def test_the_same_seed_and_task_give_the_same_bits_and_others_do_not(words, monkeypatch):
    start, states = model("roberta", words, dropout=0.1), []
    whole = subject.predict

    def keep(made, *rest):
        states.append(torch.cat([value.flatten() for value in made.state_dict().values()]))
        return whole(made, *rest)

    monkeypatch.setattr(subject, "predict", keep)
    for seed, name in [(3, "law"), (4, "law"), (3, "food"), (3, "law")]:
        torch.rand(7)
        tuned(start, job(words, name=name, epochs=1), seed=seed)
    assert torch.equal(states[0], states[3])
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_the_model_and_the_generators_stay_as_they_are(words):
    start = model("roberta", words, dropout=0.1)
    start.roberta.embeddings.requires_grad_(False)
    start.roberta.encoder.layer[0].eval()
    start.lm_head.bias.grad = torch.ones_like(start.lm_head.bias)
    first = next(start.roberta.encoder.parameters())
    first.grad = torch.ones_like(first)

    def seen():
        values = [(name, value.clone()) for name, value in start.state_dict().items()]
        grads = [None if p.grad is None else p.grad.clone() for p in start.parameters()]
        flags = [p.requires_grad for p in start.parameters()], [m.training for m in start.modules()]
        return values, grads, flags, torch.get_rng_state()

    before = seen()
    tuned(start, job(words, epochs=1, dev=True, select="dev"))
    after = seen()
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(before[0], after[0], strict=True))
    for one, other in zip(before[1], after[1], strict=True):
        assert one is other is None or torch.equal(one, other)


def test_all_of_the_copy_is_trained_but_closed_gates(words):
    start = model("roberta", words).requires_grad_(False)
    start.roberta.encoder.layer[0].add_module("gate", Gate(4, s_max=400.0))
    made = Classifier(start, classes=2, dropout=0.0, frozen=False)
    assert {name for name, p in made.named_parameters() if not p.requires_grad} == {
        "body.encoder.layer.0.gate.e"
    }


def test_frozen_trains_the_head_alone(words, monkeypatch):
    kept, start = [], model("roberta", words, dropout=0.3)
    monkeypatch.setattr(subject, "predict", lambda made, *_: kept.append(made) or torch.zeros(30).long())
    tuned(start, job(words, epochs=1, frozen=True))
    body = {f"roberta.{name}": value for name, value in kept[0].body.state_dict().items()}
    assert all(torch.equal(value, start.state_dict()[name]) for name, value in body.items())
    assert not any(part.training for part in kept[0].body.modules())
    assert kept[0].out.bias.abs().max() > 0


def test_another_precision_keeps_float32_weights(words):
    start = model("roberta", words).to(torch.bfloat16)
    made = Classifier(start, classes=2, dropout=0.0, frozen=False)
    assert {value.dtype for value in made.parameters()} == {torch.float32}
    work = job(words, epochs=6, precision="bf16-mixed")
    types = []
    hook = Classifier.forward
    try:
        Classifier.forward = lambda self, batch: (
            types.append(torch.is_autocast_enabled("cpu")) or hook(self, batch)
        )
        found, _ = tuned(model("roberta", words), work)
    finally:
        Classifier.forward = hook
    assert all(types)
    assert scores_of(torch.from_numpy(found), work.test.labels, 2)["accuracy"] > 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_company_do_not_change_a_logit(kind, words):
    made = Classifier(model(kind, words), classes=3, dropout=0.5, frozen=False).eval()
    data = job(words).train
    with torch.no_grad():
        together = made(data.batch(range(12), pad=words.pad_token_id, device=CPU))
        alone = torch.cat([made(data.batch([row], pad=words.pad_token_id, device=CPU)) for row in range(12)])
    assert len({len(ids) for ids in data.ids[:12]}) > 1
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
    assert together.std(0).min() > 0


def test_a_masked_model_is_read_at_its_first_token_a_causal_one_at_its_last(words):
    for kind, first in [("roberta", True), ("bert", True), ("gpt2", False)]:
        made, seen = Classifier(model(kind, words), classes=2, dropout=0.0, frozen=False).eval(), []
        made.dense.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        batch = job(words).train.batch([0, 1, 2], pad=words.pad_token_id, device=CPU)
        hidden = []
        made.body.register_forward_hook(lambda m, a, out, h=hidden: h.append(out.last_hidden_state))
        logits = made(batch)
        lengths = batch["attention_mask"].sum(1)
        expected = [hidden[0][row, 0 if first else lengths[row] - 1] for row in range(3)]
        assert torch.equal(seen[0], torch.stack(expected))
        torch.testing.assert_close(logits, made.out(made.dense(torch.stack(expected)).tanh()))


def test_pairs_are_encoded_by_the_tokenizers_own_template(words):
    given = [
        LabelledExample("0", "the court", None, "bad"),
        LabelledExample("1", "the court", "a river", "good"),
        LabelledExample("2", "a telescope", None, "good"),
    ]
    made = encode_examples(given, words, length=24, classes=CLASSES, types=False)
    assert [ids.tolist() for ids in made.ids] == [
        words("the court")["input_ids"],
        words("the court", "a river")["input_ids"],
        words("a telescope")["input_ids"],
    ]
    assert made.labels.tolist() == [0, 1, 1]


def test_the_longer_text_is_cut(words):
    long = " ".join(["telescope"] * 30)
    made = encode_examples(
        [LabelledExample("0", "the court", long, "bad")], words, length=16, classes=CLASSES, types=False
    )
    short = words("the court", add_special_tokens=False)["input_ids"]
    assert len(made.ids[0]) == 16
    assert made.ids[0].tolist()[1 : 1 + len(short)] == short


def test_no_more_tokens_than_positions(words):
    assert longest(model("roberta", words), 24) == 24
    assert longest(model("roberta", words), 400) == 48 - words.pad_token_id - 1
    assert longest(model("gpt2", words), 400) == 48
    prompted = model("gpt2", words)
    prompt.attach_prompt(prompted, tokens=5, causal=True)
    assert longest(prompted, 400) == 43


def test_types_tell_a_pair_apart_where_the_model_has_them(words):

    class Typed:
        def __call__(self, *texts, **options):
            found = words(*texts, **options)
            rows = found["input_ids"]
            return {"input_ids": rows, "token_type_ids": [[0, *[1] * (len(row) - 1)] for row in rows]}

    given = examples(4, seed=0, paired=True)
    typed, plain = (
        encode_examples(given, Typed(), length=24, classes=CLASSES, types=types) for types in (True, False)
    )
    made = Classifier(model("bert", words), classes=2, dropout=0.0, frozen=False).eval()
    assert plain.types is None
    outputs = [made(each.batch([0, 1], pad=1, device=CPU)) for each in (typed, plain)]
    assert not torch.equal(*outputs)


def test_predictions_stand_in_the_order_of_the_file(words):
    work = job(words)
    made = Classifier(model("roberta", words), classes=2, dropout=0.5, frozen=False).train()
    with torch.no_grad():
        batches = [work.test.batch([row], pad=words.pad_token_id, device=CPU) for row in range(30)]
        logits = torch.cat([made.eval()(batch) for batch in batches])
        made.out.bias -= logits.median(0).values
    expected = (logits - logits.median(0).values).argmax(-1)
    assert torch.equal(predict(made.train(), work, work.test), expected)
    assert len(set(expected.tolist())) == 2


def test_the_best_epoch_on_dev_is_taken_and_the_first_of_equals(words, monkeypatch):
    work = job(words, dev=True, select="dev", epochs=4)
    score, states = iter([0.2, 0.7, 0.7, 0.1]), []
    monkeypatch.setattr(subject, "scores_of", lambda *_: {"macro_f1": next(score), "accuracy": 0.0})
    whole = subject.predict

    def keep(made, given, examples):
        states.append((len(examples), made.out.weight.detach().clone()))
        return whole(made, given, examples)

    monkeypatch.setattr(subject, "predict", keep)
    _, epoch = tuned(model("roberta", words), work)
    assert epoch == 2
    assert [count for count, _ in states] == [16] * 4 + [30]
    assert torch.equal(states[-1][1], states[1][1])
    assert not torch.equal(states[-1][1], states[3][1])


def test_a_loss_that_is_no_number_is_told(words):
    with pytest.raises(
        ValueError,
        match=r"^loss or gradient of end task law, seed 3, are not finite at step \d+ of epoch 1; a lower",
    ):
        tuned(model("roberta", words), job(words, lr=1e30))


def test_a_class_with_neither_example_nor_prediction_has_no_part():
    labels, found = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 0])
    f1 = (0.8 + 2 / 3) / 2
    assert scores_of(found, labels, 2)["macro_f1"] == pytest.approx(f1, abs=1e-6)
    assert scores_of(found, labels, 3)["macro_f1"] == pytest.approx(f1, abs=1e-6)
    predicted = torch.tensor([0, 2, 1, 0])
    assert scores_of(predicted, labels, 3)["macro_f1"] == pytest.approx((0.5 + 2 / 3 + 0) / 3, abs=1e-6)


def test_no_step_is_made_on_a_gradient_that_is_no_number(words, monkeypatch):
    """Of the last step, whose loss is a number: what it spoiled would be published."""
    norms = []

    def spoiled(classifier):
        norms.append(classifier)
        grad = classifier.out.weight.grad
        if len(norms) == LAST:
            before.update({name: value.clone() for name, value in classifier.state_dict().items()})
            grad.fill_(float("nan"))
        return norm_of(classifier)

    norm_of, before = subject.gradient_norm, {}
    work = job(words, epochs=1)
    LAST = work.steps  # noqa: N806
    monkeypatch.setattr(subject, "gradient_norm", spoiled)
    with pytest.raises(ValueError, match=f"are not finite at step {LAST} of epoch 1"):
        tuned(model("roberta", words), work)
    assert all(torch.equal(value, before[name]) for name, value in norms[-1].state_dict().items())
