"""EWC: the Fisher against slow loops and closed forms; merging; the penalty."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn import functional

from cpt.core import distributed as collectives
from cpt.data.collate import labels_of
from cpt.data.corpora import Corpora
from cpt.methods import ewc as subject
from cpt.methods.ewc import merge_importances
from cpt.models.loading import build_model, load_tokenizer
from cpt.models.objectives import Causal
from cpt.trainer.base_model import learn_tokenizer
from cpt.trainer.costs import CostMonitor
from cpt.trainer.plan import make_plan
from tests.conftest import ROOT, SMALL
from tests.support.making import (
    DROPOUT,
    ORDER,
    assert_close,
    clones,
    made,
    same,
)
from tests.support.processes import ended, started
from tests.support.running import batch_of, some_rows


@pytest.fixture
def ewc(small):
    return lambda *overrides: made(small("method=ewc", ORDER, *overrides))


@pytest.fixture
def learnt(ewc):
    """After a domain, with the weights of it and its probe."""
    work = ewc()
    work.learn(0)
    work.module.eval()
    return work


def fisher_of(work) -> dict[str, torch.Tensor]:
    return clones(work.module.fisher.named())


fisher = partial(subject.fisher, objective=Causal())  # a masked one runs a model alike


def moved(model, scale: float = 0.05) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(scale * torch.randn_like(parameter))


def whole_model_loss(model, batch) -> torch.Tensor:
    """The mean loss (nats) over the scored tokens, of the model as it is, at every position."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    logits = model(**inputs).logits.flatten(0, 1)
    return functional.cross_entropy(logits, labels_of(batch).flatten(), ignore_index=-100)


def slow_fisher(model, batches, *, estimator: str) -> dict[str, torch.Tensor]:
    """By backward(), sample by sample or batch by batch, in double precision."""
    model = model.double().eval()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    count = 0
    for batch in batches:
        rows = len(batch["input_ids"])
        size = 1 if estimator == "per_sample" else rows
        for at in range(0, rows, size):
            model.zero_grad()
            whole_model_loss(model, some_rows(batch, list(range(at, at + size)))).backward()
            count += 1
            for name, p in model.named_parameters():
                sums[name] += 0 if p.grad is None else size * p.grad**2
    model.zero_grad()
    return {name: value / count for name, value in sums.items()}


@pytest.mark.parametrize("estimator", ["per_sample", "batch"])
@pytest.mark.parametrize("config", ["small", "small_gpt2"])
def test_the_fisher_is_the_slow_loop(estimator, config, request):
    work = made(
        request.getfixturevalue(config)("method=ewc", ORDER, "trainer.steps=1", "trainer.probe_samples=20")
    )
    work.learn(0)
    model, probe = work.module.model.eval(), work.probe()
    assert [len(batch["input_ids"]) for batch in probe] == [16, 4]
    found = clones(fisher(model, probe, estimator=estimator))
    expected = slow_fisher(model, probe, estimator=estimator)
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            found[name].double(), value, rtol=1e-3, atol=1e-5 * scale + 1e-14, msg=name
        )


@pytest.fixture
def deberta(tmp_path, small):
    """Overrides of a tiny DeBERTa-v2 with a tokenizer, whose encoder hands a parameter to a module."""
    cfg = small()
    texts = Corpora.read(make_plan(cfg).source, ["law"], cache=Path(cfg.cache_dir))
    tokenizer = load_tokenizer(learn_tokenizer(texts.general, 300, objective="masked", cache=texts.cache))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    positions = {"max_position_embeddings": 64, "relative_attention": True, "position_buckets": 8}
    kinds = {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
    rest = {"type_vocab_size": 0, "position_biased_input": False}
    config = {"model_type": "deberta-v2", **sizes, **positions, **kinds, **rest}
    for part in (build_model(config, tokenizer, "masked", seed=0), tokenizer):
        part.save_pretrained(tmp_path / "deberta")
    return [f"model.checkpoint={tmp_path / 'deberta'}", "model.objective=masked"]


def test_the_fisher_of_deberta_is_the_slow_loop_while_operations_are_counted(ewc, deberta):
    """The hooks by which torch's counter follows modules would break the gradient of single samples there."""
    work = ewc(*deberta, "trainer.probe_samples=12")
    costs = CostMonitor()
    work.learn(0, costs)
    found, model = fisher_of(work), work.module.model.eval()
    expected = slow_fisher(model, work.probe(), estimator="per_sample")
    moving = [name for name, value in expected.items() if value.abs().max() > 0]
    assert any("rel_embeddings" in name for name in moving) and len(moving) > len(expected) / 2
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            found[name].double(), value, rtol=1e-3, atol=1e-5 * scale + 1e-14, msg=name
        )
    assert costs.flops["after"] > 0


def test_the_fisher_of_an_output_bias_has_a_closed_form(learnt):
    """dL/db = mean_k (softmax(z_k) - e_{y_k}) for each sample; F is the mean of its squares."""
    model, [batch] = learnt.module.model, learnt.probe()
    name = next(name for name, p in model.named_parameters() if p.shape == (model.config.vocab_size,))
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits.double()
    expected = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    for scores, labels in zip(logits, labels_of(batch), strict=True):
        off = [
            s.softmax(0) - functional.one_hot(y, len(s))
            for s, y in zip(scores, labels, strict=True)
            if y >= 0
        ]
        expected += torch.stack(off).mean(0).square() / len(logits)
    found = clones(fisher(model, [batch], estimator="per_sample"))[name]
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-9)


def test_a_domain_ends_with_its_fisher_and_its_anchor(ewc):
    """In eval mode: with dropout in training, the Fisher is that without."""
    work = ewc(*DROPOUT)
    base = work.weights()
    assert same(work.module.anchor.named(), base)
    assert all((value == 0).all() for value in fisher_of(work).values())
    work.learn(0)
    assert same(work.module.anchor.named(), work.weights())
    assert not same(work.weights(), base)
    model = work.module.model
    still = clones(fisher(model.eval(), work.probe(), estimator="per_sample"))
    assert same(fisher_of(work), still)
    assert not same(clones(fisher(model.train(), work.probe(), estimator="per_sample")), still)
    assert work.module.domains == 1


def test_the_penalty_does_not_leak_into_the_fisher(learnt):
    """With a penalty a million times the loss, the Fisher is the same."""
    moved(learnt.module.model)
    expected = clones(fisher(learnt.module.model, learnt.probe(), estimator="per_sample"))
    before = fisher_of(learnt)
    learnt.module.options = replace(learnt.module.options, strength=1e9)
    assert learnt.module.penalty() > 1e3
    learnt.module.after_domain(learnt.probe())
    assert_close(
        fisher_of(learnt),
        {n: (before[n].double() + expected[n].double()) / 2 for n in before},
        rtol=1e-4,
        atol=0,
    )


@pytest.mark.parametrize("precision", ["scaled", "autocast", "half"])
def test_the_fisher_is_that_of_the_loss_in_32_bits(precision, learnt):
    """Neither what a token's loss is multiplied by, nor autocast, nor weights in 16 bits make it another."""
    model, probe = learnt.module.model, learnt.probe()
    if precision == "half":
        model.bfloat16().float()
    expected = clones(fisher(model, probe, estimator="per_sample"))
    if precision == "scaled":
        found = fisher(
            model, [batch | {"weight": batch["weight"] * 65536} for batch in probe], estimator="per_sample"
        )
        assert same(clones(found), expected)
    if precision == "autocast":
        learnt.module.domains.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            learnt.module.after_domain(probe)
        assert same(fisher_of(learnt), expected)
    if precision == "half":
        found = fisher(model.bfloat16(), probe, estimator="per_sample")
        assert all(value.dtype == torch.float32 for value in found.values())
        assert same(clones(found), expected)


def test_a_sample_without_anything_to_predict_is_not_counted(learnt):
    model, [batch] = learnt.module.model, learnt.probe()
    labels = labels_of(batch)
    labels[3] = -100
    fewer = batch_of(batch["input_ids"], labels, batch.get("attention_mask"))
    rest = some_rows(batch, [row for row in range(len(labels)) if row != 3])
    assert_close(
        clones(fisher(model, [fewer], estimator="per_sample")),
        clones(fisher(model, [rest], estimator="per_sample")),
        rtol=1e-4,
        atol=1e-12,
    )


def test_without_samples_there_is_no_fisher(learnt):
    assert all((each == 0).all() for each in fisher(learnt.module.model, [], estimator="batch").values())


def test_it_leaves_no_gradients(learnt):
    fisher(learnt.module.model, learnt.probe(), estimator="per_sample")
    assert all(parameter.grad is None for parameter in learnt.module.model.parameters())
    assert not any(each.requires_grad for each in learnt.module.fisher.buffers())


@pytest.mark.parametrize(("merge", "factor"), [("mean", 1.0), ("decay", 1.6)])
def test_two_identical_domains(merge, factor, ewc):
    work = ewc(f"method.merge={merge}", "method.gamma=0.6")
    work.learn(0)
    once = fisher_of(work)
    work.module.eval().after_domain(work.probe())
    assert_close(
        fisher_of(work), {name: factor * value.double() for name, value in once.items()}, rtol=1e-5, atol=0
    )
    assert work.module.domains == 2


def test_the_mean_counts_each_domain_once():
    found = torch.zeros(())
    for number, new in enumerate([2.0, 4.0, 9.0]):
        found = merge_importances(
            found, torch.tensor(new), domains=torch.tensor(number), merge="mean", gamma=0.5
        )
    assert found.item() == pytest.approx(5.0)
    decayed = torch.zeros(())
    for number, new in enumerate([2.0, 4.0, 9.0]):
        decayed = merge_importances(
            decayed, torch.tensor(new), domains=torch.tensor(number), merge="decay", gamma=0.5
        )
    assert decayed.item() == pytest.approx(0.25 * 2 + 0.5 * 4 + 9)


def test_at_the_anchor_nothing_pulls(learnt):
    penalty = learnt.module.penalty()
    assert penalty.item() == 0
    penalty.backward()
    assert all((parameter.grad == 0).all() for parameter in learnt.module.model.parameters())


def test_away_from_the_anchor_the_fisher_pulls(learnt):
    """The gradient at theta* + delta is strength F delta."""
    module, anchors = learnt.module, learnt.weights()
    moved(module.model)
    penalty = module.penalty()
    expected = 0.0
    penalty.backward()
    for name, parameter in module.model.named_parameters():
        delta, weight = parameter.detach().double() - anchors[name].double(), fisher_of(learnt)[name].double()
        expected += module.options.strength / 2 * (weight * delta**2).sum().item()
        torch.testing.assert_close(
            parameter.grad.double(), module.options.strength * weight * delta, rtol=1e-4, atol=1e-9
        )
    assert penalty.item() == pytest.approx(expected, rel=1e-4)
    assert expected > 0


def test_a_huge_strength_holds_what_matters_and_nothing_else(ewc):
    work = ewc("method.strength=1e6", "trainer.gradient_clip_val=null", "trainer.steps=40")
    for each in work.module.fisher.buffers():
        each[: len(each) // 2] = 1
    before = work.weights()
    work.learn(0)
    far = [
        [
            (value - before[name])[part].abs().mean().item()
            for part in (slice(len(value) // 2), slice(len(value) // 2, None))
        ]
        for name, value in work.weights().items()
        if value.ndim == 2 and "layers" in name
    ]
    assert far and all(held < 0.2 * free for held, free in far)


def test_the_penalty_acts_from_the_second_domain_on(ewc, small):
    """The first is that of ncl, bit for bit; the second ends nearer to the first."""
    work, plain = (
        ewc("method.strength=1e5", "trainer.gradient_clip_val=null"),
        made(small("method=ncl", ORDER, "trainer.gradient_clip_val=null")),
    )
    between = []
    for each in (work, plain):
        each.learn(0)
        between.append(each.weights())
        each.learn(1)
    assert same(*between)
    far = [
        sum((value - between[0][name]).square().sum().item() for name, value in each.weights().items())
        for each in (work, plain)
    ]
    assert far[0] < 0.8 * far[1]


def test_frozen_embeddings_have_no_fisher(ewc):
    work = ewc("freeze.embeddings=true")
    before = work.weights()
    for number in (0, 1):
        work.learn(number)
    frozen = {id(p) for p in work.module.frozen}
    names = {name for name, p in work.module.model.named_parameters() if id(p) in frozen}
    assert names
    for name, value in fisher_of(work).items():
        assert (value == 0).all() if name in names else (value > 0).any(), name
    assert all(torch.equal(work.weights()[name], before[name]) == (name in names) for name in before)


@pytest.mark.parametrize("shares", [(2, 0), (1, 1), (0, 2)])
def test_the_processes_fishers_are_summed(shares, learnt, monkeypatch):
    """Also where one of them has nothing of the probe."""
    model, [batch] = learnt.module.model, learnt.probe()
    learnt.data.eval_batch_size = 9
    probe, sent = learnt.probe(), []
    expected = clones(fisher(model, [batch], estimator="per_sample"))
    assert [len(each["input_ids"]) for each in probe] == [9, 7]
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: sent.append(tensor.clone()))
    fisher(model, probe[: shares[0]], estimator="per_sample")
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor.add_(sent.pop(0)))
    found = clones(fisher(model, probe[shares[0] :], estimator="per_sample"))
    assert_close(found, expected, rtol=1e-3, atol=1e-9)


def test_two_processes_learn_as_one(corpora, cache, small, start, tmp_path):
    """One of them has 16 samples of the probe, the other 8."""
    options = [ORDER, "method=ewc", "trainer.probe_samples=24"]
    start(small(*options), tmp_path / "one")
    places = [
        "domains=texts",
        f"domains.root={corpora}",
        f"cache_dir={cache}",
        f"hydra.run.dir={tmp_path / 'two'}",
    ]
    both = [*places, *SMALL, *options, "strategy=ddp", "trainer.accelerator=cpu"]
    process = started(ROOT / "run.py", *both, cwd=tmp_path, log=tmp_path / "log", twin=True)
    assert ended(process) == 0, (tmp_path / "log").read_text()
    one, two = (
        torch.load(sorted((tmp_path / name / "stages").glob("*.pt"))[-1], weights_only=True)
        for name in ("one", "two")
    )
    assert one["domains"] == two["domains"] == 2
    for name in one:
        scale = one[name].abs().max().item()
        torch.testing.assert_close(one[name], two[name], rtol=1e-2, atol=1e-4 * scale + 1e-9, msg=name)
