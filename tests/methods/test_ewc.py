"""EWC: the Fisher against slow loops and the released code (ContinualLM); merging; the penalty."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed
from torch.nn import functional
from transformers import AutoModelForMaskedLM

from cpt.core import distributed as collectives
from cpt.data.collate import inputs_of, labels_of
from cpt.data.replay import NO_REPLAY
from cpt.methods import ewc as subject
from cpt.methods.base import MethodContext
from cpt.methods.ewc import EWC, merge_importances
from cpt.methods.options import EWCOptions
from cpt.models.objectives import Causal
from cpt.models.options import NOT_FROZEN
from tests.conftest import GOLDEN, needs_golden
from tests.methods.test_penalties import moved
from tests.support.making import DROPOUT, assert_close, clones, same
from tests.support.running import batch_of, some_rows


def fisher(model, batches, estimator="per_sample") -> dict[str, torch.Tensor]:
    return clones(subject.fisher(model, batches, objective=Causal(), estimator=estimator))


@pytest.fixture
def learnt(build):
    work = build("ewc")
    work.learn(0)
    work.module.eval()
    return work


def fisher_of(work) -> dict[str, torch.Tensor]:
    return clones(work.module.fisher.named())


@pytest.mark.parametrize(("estimator", "family"), [("per_sample", "masked"), ("batch", "causal")])
def test_the_fisher_is_the_slow_loop(estimator, family, build):
    """By backward() of the whole model's mean loss, by sample or by batch, in double precision."""
    work = build("ewc", "trainer.steps=1", "trainer.importance_samples=20", on=family)
    work.learn(0)
    model, batches = work.module.model.eval(), work.probe()
    assert [len(batch["input_ids"]) for batch in batches] == [16, 4]
    found = fisher(model, batches, estimator)
    assert not any(each.any() for each in fisher(model, [], estimator).values())
    model, count = model.double(), 0
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        size = 1 if estimator == "per_sample" else len(batch["input_ids"])
        for at in range(0, len(batch["input_ids"]), size):
            part = some_rows(batch, list(range(at, at + size)))
            model.zero_grad()
            logits = model(**inputs_of(part)).logits.flatten(0, 1)
            functional.cross_entropy(logits, labels_of(part).flatten(), ignore_index=-100).backward()
            count += 1
            for name, p in model.named_parameters():
                sums[name] += 0 if p.grad is None else size * p.grad**2
    for name, value in sums.items():
        near = {"rtol": 1e-3, "atol": 1e-5 * value.abs().max().item() / count + 1e-14}
        torch.testing.assert_close(found[name].double(), value / count, **near, msg=name)


def test_a_domain_ends_with_its_fisher_and_its_anchor(build):
    work = build("ewc", *DROPOUT)
    base, module, model = work.weights(), work.module, work.module.model
    assert same(module.anchor.named(), base)
    work.learn(0)
    assert same(module.anchor.named(), work.weights()) and not same(work.weights(), base)
    still = fisher(model.eval(), work.probe())
    assert same(fisher_of(work), still) and module.domains == 1
    assert not same(fisher(model.train(), work.probe()), still)
    moved(model.eval())  # the penalty does not leak into the Fisher
    new, module.options = fisher(model, work.probe()), replace(module.options, strength=1e9)
    assert module.penalty() > 1e3
    module.after_domain(work.probe())
    mean = {n: (still[n].double() + new[n].double()) / 2 for n in new}
    assert_close(fisher_of(work), mean, rtol=1e-4, atol=0)


def test_the_fisher_is_that_of_the_loss_in_32_bits_over_samples_with_targets(learnt):
    model, probe = learnt.module.model, learnt.probe()
    expected, labels = fisher(model, probe), labels_of(probe[0])
    assert same(fisher(model, [batch | {"weight": batch["weight"] * 65536} for batch in probe]), expected)
    labels[3] = -100
    fewer = batch_of(probe[0]["input_ids"], labels, probe[0].get("attention_mask"))
    rest = some_rows(probe[0], [row for row in range(len(labels)) if row != 3])
    assert_close(fisher(model, [fewer]), fisher(model, [rest]), rtol=1e-4, atol=1e-12)
    learnt.module.domains.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        learnt.module.after_domain(probe)
    assert same(fisher_of(learnt), expected)
    expected = fisher(model.bfloat16().float(), probe)
    found = fisher(model.bfloat16(), probe)
    assert same(found, expected) and {value.dtype for value in found.values()} == {torch.float32}


@pytest.mark.parametrize(("merge", "third"), [("mean", 5.0), ("decay", 12.12)])
def test_the_mean_counts_each_domain_once(merge, third):
    found = torch.zeros(())
    for number, new in enumerate([2.0, 4.0, 9.0]):
        given = {"domains": torch.tensor(number), "merge": merge, "gamma": 0.6}
        found = merge_importances(found, torch.tensor(new), **given)
    assert found.item() == pytest.approx(third)


def test_away_from_the_anchor_the_fisher_pulls(learnt):
    module, anchors, fishers, expected = learnt.module, learnt.weights(), fisher_of(learnt), 0.0
    penalty = module.penalty()
    penalty.backward()
    assert penalty.item() == 0 and not any(parameter.grad.any() for parameter in module.model.parameters())
    moved(module.model)
    penalty = module.penalty()
    module.zero_grad()
    penalty.backward()
    for name, p in module.model.named_parameters():
        delta, pull = p.detach().double() - anchors[name], module.options.strength * fishers[name].double()
        expected += (pull / 2 * delta**2).sum().item()
        torch.testing.assert_close(p.grad.double(), pull * delta, rtol=1e-4, atol=1e-9)
    assert penalty.item() == pytest.approx(expected, rel=1e-4) != 0


@pytest.mark.parametrize("shares", [(2, 0), (1, 1)])
def test_the_processes_fishers_are_summed(shares, learnt, monkeypatch):
    model, [batch], sent = learnt.module.model, learnt.probe(), []
    learnt.data.eval_batch_size = 9
    probe, expected = learnt.probe(), fisher(model, [batch])
    assert [len(each["input_ids"]) for each in probe] == [9, 7]
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: sent.append(tensor.clone()))
    fisher(model, probe[: shares[0]])
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor.add_(sent.pop(0)))
    assert_close(fisher(model, probe[shares[0] :]), expected, rtol=1e-3, atol=1e-9)


def golden_batches(domain: int) -> list[dict[str, torch.Tensor]]:
    arrays, found = np.load(GOLDEN / "batches.npz"), []
    for number in range(3):
        fields = [f"d{domain}_b{number}_{name}" for name in ("input_ids", "labels", "attention_mask")]
        batch = batch_of(*(torch.from_numpy(arrays[field]).long() for field in fields))
        found.append(batch | {"weight": torch.tensor(1 / len(batch["positions"]))})
    return found


def apart(found: dict[str, torch.Tensor], prefix: str) -> list[float]:
    """The largest differences from released numbers, each in units of its tensor's largest number."""
    with np.load(GOLDEN / "ewc.npz") as arrays:
        own = [name for name in arrays if name.startswith(f"{prefix}/")]
        names = {name.partition("/")[2]: torch.from_numpy(arrays[name]) for name in own}
    assert names.keys() <= found.keys() and names
    return [float((found[n] - e).abs().max() / e.abs().max().clamp_min(1e-9)) for n, e in names.items()]


@needs_golden
def test_fishers_penalty_and_losses_are_those_of_the_released_code():
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    models = [AutoModelForMaskedLM.from_pretrained(GOLDEN / f"tiny_{name}", **given) for name in "ab"]
    strength = json.loads((GOLDEN / "ewc.json").read_text())["settings"]["lamb"]
    shared = {"objective": Causal(), "length": 32, "masks": [], "replay": NO_REPLAY, "seed": 0}
    shared |= {"freeze": NOT_FROZEN, "optimizer": None, "schedule": None}
    options = EWCOptions(strength=strength, estimator="batch", merge="mean", gamma=0.5)
    module = EWC(options, MethodContext(model=models[0], **shared)).eval()
    module.after_domain(golden_batches(0))
    assert max(apart(clones(module.fisher.named()), "fisher0")) < 1e-4
    module.model.load_state_dict(models[1].state_dict())
    arrays, terms = np.load(GOLDEN / "ewc.npz"), module.losses(golden_batches(1)[0])
    found = {"penalty": terms["ewc"], "loss_mlm": terms["lm"], "loss_total": sum(terms.values())}
    expected = {name: arrays[name].item() for name in found}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-4)
    module.after_domain(golden_batches(1))
    merged = clones(module.fisher.named())
    assert max(apart(merged, "fisher01")) < 1e-4 and min(apart(merged, "fisher01_released")) > 0.01
