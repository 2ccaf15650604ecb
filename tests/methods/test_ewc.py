"""EWC, L2, MAS, SI, RecAdam and KD: slow loops, sums by hand, the released code of EWC (ContinualLM)."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM

from cpt.core import distributed as collectives
from cpt.data.collate import inputs_of, labels_of
from cpt.data.replay import NO_REPLAY
from cpt.gradient_masks.base import StepSnapshot
from cpt.methods import ewc as subject
from cpt.methods.base import MethodContext
from cpt.methods.ewc import EWC, SI, Recall, merge_importances
from cpt.methods.options import EWCOptions, RecAdamOptions
from cpt.models.fisher import split_batch
from cpt.models.objectives import Causal
from cpt.models.options import NOT_FROZEN
from tests.conftest import GOLDEN, needs_golden
from tests.support.forward_passes import make_batch, outputs_at, select_rows
from tests.support.method_fixtures import (
    DROPOUT,
    StepRecorder,
    assert_close,
    clone_tensors,
    count_state_bytes_outside_model,
    equal_tensors,
)


def moved(model, scale: float = 0.05) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(scale * torch.randn_like(parameter))


def fisher(model, batches, estimator="per_sample") -> dict[str, torch.Tensor]:
    return clone_tensors(subject.fisher(model, batches, objective=Causal(), estimator=estimator))


@pytest.fixture
def learnt(build):
    work = build("ewc")
    work.learn(0)
    work.module.eval()
    return work


def fisher_of(work) -> dict[str, torch.Tensor]:
    return clone_tensors(work.module.fisher.named())


@pytest.mark.parametrize(("estimator", "family"), [("per_sample", "masked"), ("batch", "causal")])
def test_the_fisher_is_the_slow_loop(estimator, family, build):
    """By backward() of the whole model's mean loss, by sample or by batch, in double precision."""
    few = ["trainer.steps=1", "trainer.importance_samples=20", "trainer.eval_batch_size=16"]
    work = build("ewc", *few, on=family)
    work.learn(0)
    model, batches = work.module.model.eval(), work.importance_batches()
    assert [len(batch["input_ids"]) for batch in batches] == [16, 4]
    found = fisher(model, batches, estimator)
    assert not any(each.any() for each in fisher(model, [], estimator).values())
    model, count = model.double(), 0
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        size = 1 if estimator == "per_sample" else len(batch["input_ids"])
        for at in range(0, len(batch["input_ids"]), size):
            part = select_rows(batch, list(range(at, at + size)))
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
    assert equal_tensors(module.anchor.named(), base)
    work.learn(0)
    assert equal_tensors(module.anchor.named(), work.weights()) and not equal_tensors(work.weights(), base)
    still = fisher(model.eval(), work.importance_batches())
    assert equal_tensors(fisher_of(work), still) and module.domains == 1
    assert not equal_tensors(fisher(model.train(), work.importance_batches()), still)
    moved(model.eval())  # the penalty does not leak into the Fisher
    new, module.options = fisher(model, work.importance_batches()), replace(module.options, strength=1e9)
    assert module.penalty() > 1e3
    module.after_domain(work.importance_batches())
    mean = {n: (still[n].double() + new[n].double()) / 2 for n in new}
    assert_close(fisher_of(work), mean, rtol=1e-4, atol=0)


def test_the_fisher_is_that_of_the_loss_in_32_bits_over_samples_with_targets(learnt):
    model, probe = learnt.module.model, learnt.importance_batches()
    expected, labels = fisher(model, probe), labels_of(probe[0])
    assert equal_tensors(
        fisher(model, [batch | {"weight": batch["weight"] * 65536} for batch in probe]), expected
    )
    labels[3] = -100
    fewer = make_batch(probe[0]["input_ids"], labels, probe[0].get("attention_mask"))
    rest = select_rows(probe[0], [row for row in range(len(labels)) if row != 3])
    assert_close(fisher(model, [fewer]), fisher(model, [rest]), rtol=1e-4, atol=1e-12)
    learnt.module.domains.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        learnt.module.after_domain(probe)
    assert equal_tensors(fisher_of(learnt), expected)
    expected = fisher(model.bfloat16().float(), probe)
    found = fisher(model.bfloat16(), probe)
    assert equal_tensors(found, expected) and {value.dtype for value in found.values()} == {torch.float32}


@pytest.mark.parametrize(("merge", "third"), [("mean", 5.0), ("decay", 12.12)])
def test_the_mean_counts_each_domain_once(merge, third):
    found = torch.zeros(())
    for number, new in enumerate([2.0, 4.0, 9.0]):
        given = {"domains": torch.tensor(number), "merge": merge, "gamma": 0.6}
        found = merge_importances(found, torch.tensor(new), **given)
    assert found.item() == pytest.approx(third)


def test_away_from_the_anchor_the_fisher_pulls(learnt):
    module, anchors, fishers, expected = learnt.module, learnt.weights(), fisher_of(learnt), 0.0
    assert module.penalty().item() == 0
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
    model, [batch], sent = learnt.module.model, learnt.importance_batches(), []
    learnt.data.eval_batch_size = 9
    probe, expected = learnt.importance_batches(), fisher(model, [batch])
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
        batch = make_batch(*(torch.from_numpy(arrays[field]).long() for field in fields))
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
    assert max(apart(clone_tensors(module.fisher.named()), "fisher0")) < 1e-4
    module.model.load_state_dict(models[1].state_dict())
    arrays, terms = np.load(GOLDEN / "ewc.npz"), module.losses(golden_batches(1)[0])
    found = {"penalty": terms["ewc"], "loss_mlm": terms["lm"], "loss_total": sum(terms.values())}
    expected = {name: arrays[name].item() for name in found}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-4)
    module.after_domain(golden_batches(1))
    merged = clone_tensors(module.fisher.named())
    assert max(apart(merged, "fisher01")) < 1e-4 and min(apart(merged, "fisher01_released")) > 0.01


@pytest.mark.parametrize("towards", ["previous", "base"])
def test_l2_pulls_to_the_previous_model_or_the_base(towards, build):
    work = build("l2", "method.strength=0.3", f"method.towards={towards}")
    base, module = work.weights(), work.module
    work.learn(0)
    between = work.weights()
    work.learn(1)
    anchors, now = between if towards == "previous" else base, dict(module.model.named_parameters())
    assert equal_tensors(module.anchor.named(), anchors) and not equal_tensors(between, base)
    assert count_state_bytes_outside_model(module) == sum(p.nbytes for p in now.values()) * (
        towards == "previous"
    )
    penalty = module.losses(work.batches()[0])["l2"]
    by_hand = sum(((p.detach().double() - anchors[n]) ** 2).sum() for n, p in now.items())
    assert penalty.item() == pytest.approx(0.15 * by_hand.item(), rel=1e-5) != 0
    gradients = torch.autograd.grad(penalty, list(now.values()))
    expected = {name: 0.3 * (p.detach() - anchors[name]) for name, p in now.items()}
    assert_close(dict(zip(now, gradients, strict=True)), expected)


def sensitivity(work, output="logits"):
    """Means of |gradients| of each sample's mean squared norm, one after another."""
    model, trained = work.module.model.eval(), dict(work.module.model.named_parameters())
    parts = [each for batch in work.importance_batches() for each in split_batch(batch, "per_sample")]
    sums = dict.fromkeys(trained, 0)
    for each in parts:
        logits, hidden = work.module.objective.outputs(model, each)
        values = logits if output == "logits" else hidden.flatten(0, 1)[each["positions"]]
        total = (values.float() ** 2).sum(-1).mean()
        found = torch.autograd.grad(total, list(trained.values()), materialize_grads=True, allow_unused=True)
        sums = {name: sums[name] + value.abs() for name, value in zip(trained, found, strict=True)}
    return {name: value / len(parts) for name, value in sums.items()}


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_importance_is_the_mean_absolute_gradient_by_sample(output, build):
    work = build("mas", f"method.output={output}", "trainer.importance_samples=6", "method.strength=3")
    work.learn(0)
    first, module = clone_tensors(work.module.importance.named()), work.module
    assert_close(first, sensitivity(work, output), rtol=1e-3, atol=1e-5)
    probe = [batch | {"targets": (batch["targets"] + 7) % 50} for batch in work.importance_batches()]
    assert_close(module.eval().measure(probe), first, rtol=1e-4, atol=1e-6)
    work.learn(1)
    expected = {name: first[name] + value for name, value in sensitivity(work, output).items()}
    assert_close(module.importance.named(), expected, rtol=1e-3, atol=1e-4)
    anchor, importance = work.weights(), module.importance.named()
    moved(module.model)
    ways = [(importance[n] * (value - anchor[n]).square()).sum() for n, value in work.weights().items()]
    assert module.losses(probe[0])["mas"].item() == pytest.approx(3 * sum(ways).item(), rel=1e-4)


def test_importance_is_the_path_integral_over_the_squared_way(build, monkeypatch):
    """omega by hand: minus the sum of the loss's gradient, without the penalty, times the step."""
    sums, (gradients, update) = {}, (SI.transform_gradients, SI.after_update)

    def before(module, optimizer):
        module.began, module.own = (
            clone_tensors({n: p.detach() for n, p in module.model.named_parameters()}),
            {},
        )
        for name, parameter in module.model.named_parameters():
            pulled = module.importance.named()[name] * (parameter.detach() - module.anchor.named()[name])
            module.own[name] = parameter.grad - 2 * module.options.strength * pulled
        gradients(module, optimizer)

    def after(module):
        update(module)
        for name, parameter in module.model.named_parameters():
            sums[name] = sums.get(name, 0) - module.own[name] * (parameter.detach() - module.began[name])

    monkeypatch.setattr(SI, "transform_gradients", before)
    monkeypatch.setattr(SI, "after_update", after)
    given = ["optim=sgd", "optim.lr=0.01", "optim.weight_decay=5", "trainer.accumulate_grad_batches=2"]
    work = build("si", *given, "method.damping=1e-3")
    known = dict.fromkeys(work.weights(), torch.zeros(()))
    for number in (0, 1):
        start = work.weights()
        sums.clear()
        work.learn(number)
        squares = {name: (value - start[name]) ** 2 + 1e-3 for name, value in work.weights().items()}
        expected = {name: (known[name] + sums[name] / each).clamp_min(0) for name, each in squares.items()}
        assert any((each < 0).any() for each in sums.values())
        assert_close(work.module.importance.named(), expected, rtol=1e-3, atol=1e-5)
        known = clone_tensors(work.module.importance.named())
    assert all((each == 0).all() for each in work.module.path_integral.named().values())


def recalled(share, *, gradient, **options):
    """A weight that was 3 and whose anchor is 1 after a step of AdamW at a rate of 0.1."""
    given = {"strength": 5.0, "annealed": True, "middle": 0.5, "slope": 8.0, "towards": "previous"} | options
    weight, anchor = nn.Parameter(torch.tensor([3.0])), {"weight": torch.tensor([1.0])}
    anchors = SimpleNamespace(named=lambda: anchor, on_module_device=lambda stored: stored)
    recall = Recall(anchors, RecAdamOptions(**given))
    recall.anchor_names, recall.share = {weight: "weight"}, share
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([gradient])
    held = StepSnapshot(recall, recall.covered())
    optimizer.step()
    held.apply(optimizer)
    return weight.item()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_step_counts_its_share_and_the_pull_comes_after_it(share):
    assert recalled(share, gradient=0.0) == pytest.approx(3 - 0.1 * (1 - share) * 5 * 2)
    x = 3 - 0.1 * share
    assert recalled(share, gradient=2.0) == pytest.approx(x - 0.1 * (1 - share) * 5 * (x - 1), rel=1e-5)
    assert recalled(1.0, gradient=2.0, annealed=False) == pytest.approx(2.9 - 0.1 * 5 * 1.9, rel=1e-5)


def test_the_sigmoid_runs_over_a_domains_steps(build):
    module = build("recadam", "method.middle=0.5", "method.slope=10").module
    for step in (0, 30, 50, 99):
        module.trainer = SimpleNamespace(global_step=step, max_steps=100)
        module.transform_gradients(None)
        assert module.recall.share == pytest.approx(1 / (1 + math.exp(-0.1 * (step - 50))))


@pytest.mark.parametrize(("distilled", "temperature"), [("logits", 0.5), ("hidden", 2)])
def test_the_divergence_is_that_of_the_student_from_the_teacher(distilled, temperature, build):
    """T^2 sum_v p_v (log p_v - log q_v), teacher's p and student's q, in the mean over the scored tokens."""
    given = [f"method.distilled={distilled}", "method.strength=3", f"method.temperature={temperature}"]
    work, expected = build("kd", *given), []
    [batch], module = work.batches(), work.module.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    at = labels_of(batch) != -100

    def outputs():
        hidden = module.model.base_model(**inputs).last_hidden_state
        found = module.model(**inputs).logits if distilled == "logits" else hidden
        return (found.detach()[at].double() / temperature).softmax(-1).tolist()

    teacher = outputs()
    assert module.losses(batch)["kd"].item() == 0
    moved(module.model)
    for p, q in zip(teacher, outputs(), strict=True):
        apart = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        expected.append(temperature**2 * apart)
    found = module.losses(batch)["kd"].item()
    assert found == pytest.approx(3 * sum(expected) / len(expected), rel=1e-3) and found > 1e-3
    parts = [module.losses(part)["kd"].item() for part in work.batches(4, accumulate=4)]
    assert sum(parts) / 4 == pytest.approx(found, rel=1e-4)


def test_the_teacher_is_the_model_before_the_domain_in_eval_mode(build):
    work = build("kd", *DROPOUT)
    for number in (0, 1):
        before, watch = work.weights(), StepRecorder(lambda m: clone_tensors(m.teacher.named()))
        work.learn(number, watch)
        assert len(watch.seen) == 6 and all(equal_tensors(teacher, before) for _, teacher in watch.seen)
        assert not equal_tensors(work.weights(), before)
    [batch], module = work.batches(), work.module.eval()
    module.teacher.capture(module.model)
    still, _ = outputs_at(module.model, batch)
    module.train()
    module.model.base_model.layers[0].eval()  # modes of its own are kept
    modes = [each.training for each in module.modules()]
    with module.teacher.teaching(module.model):
        taught, _ = outputs_at(module.model, batch)
    assert torch.equal(taught, still) and not taught.requires_grad
    assert [each.training for each in module.modules()] == modes and len(set(modes)) == 2
    assert not torch.equal(outputs_at(module.model, batch)[0], still)
