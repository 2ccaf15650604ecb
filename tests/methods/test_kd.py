"""KD: the divergence against slow sums, the teacher, and whose mode is whose."""

import math

import pytest
import torch

from cpt.data.collate import labels_of
from cpt.methods.kd import distillation
from tests.support.making import (
    DROPOUT,
    ORDER,
    Watch,
    made,
    same,
)
from tests.support.running import outputs_at


def taught_by(module, batch):
    """What the teacher gives, logits and hidden states."""
    with module.teacher.teaching(module.model):
        return outputs_at(module.model, batch)


@pytest.fixture
def kd(small):
    return lambda *overrides: made(small("method=kd", ORDER, *overrides))


def slow(student, teacher, *, temperature: float) -> list[float]:
    """T^2 sum_v p_v (log p_v - log q_v) with the teacher's p and the student's q, term by term."""
    found = []
    for z, t in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = ([math.exp(v / temperature) for v in row] for row in (z, t))
        q, p = ([v / sum(row) for v in row] for row in (q, p))
        found.append(temperature**2 * sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_divergence_is_the_slow_sum(temperature):
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 4, 7)
    found = distillation(student, teacher, temperature=temperature)
    assert found.tolist() == pytest.approx(slow(student, teacher, temperature=temperature), rel=1e-4)


def test_the_divergence_is_that_of_the_student_from_the_teacher():
    """KL((.9, .1) || (.5, .5)) = .9 ln 1.8 + .1 ln .2; the other way round it is .5108."""
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert distillation(student, teacher, temperature=1.0).item() == pytest.approx(0.368064, abs=1e-5)
    assert distillation(teacher, student, temperature=1.0).item() == pytest.approx(0.510826, abs=1e-5)


def test_the_softmax_is_over_the_features():
    """A constant added to all features of a position changes nothing, whatever the other positions."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 6)
    shift = torch.randn(5, 1)
    expected = distillation(student, teacher, temperature=2.0)
    torch.testing.assert_close(distillation(student + shift, teacher, temperature=2.0), expected)
    torch.testing.assert_close(distillation(student, teacher + shift, temperature=2.0), expected)
    assert (
        distillation(student + shift.T.new_tensor(range(6)), teacher, temperature=2.0) - expected
    ).abs().min() > 0.1


@pytest.mark.parametrize("distilled", ["logits", "hidden"])
def test_the_loss_is_the_mean_over_the_scored_tokens(distilled, kd):
    """Against the whole model's outputs at every position, number by number."""
    work = kd(f"method.distilled={distilled}", "method.strength=3", "method.temperature=2")
    [batch] = work.batches()
    module, inputs = work.module.eval(), {"input_ids": batch["input_ids"]}
    if "attention_mask" in batch:
        inputs["attention_mask"] = batch["attention_mask"]
    run = module.model if distilled == "logits" else module.model.base_model
    field = "logits" if distilled == "logits" else "last_hidden_state"
    teacher = getattr(run(**inputs), field).detach()
    torch.manual_seed(1)
    for parameter in module.model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    student = getattr(run(**inputs), field).detach()
    at = labels_of(batch) != -100
    expected = slow(student[at], teacher[at], temperature=2)
    found = module.losses(batch)["kd"]
    assert found.item() == pytest.approx(3 * sum(expected) / len(expected), rel=1e-3)
    assert found.item() > 1e-3


@pytest.mark.parametrize("distilled", ["logits", "hidden"])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(distilled, kd):
    work = kd(f"method.distilled={distilled}")
    [batch] = work.batches()
    loss = work.module.eval().losses(batch)["kd"]
    assert loss.item() == 0
    loss.backward()
    grads = [p.grad.abs().max().item() for p in work.module.model.parameters() if p.grad is not None]
    assert max(grads) < 1e-6


def test_the_loss_does_not_depend_on_how_the_batch_is_cut(kd):
    work = kd()
    torch.manual_seed(1)
    for parameter in work.module.model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    work.module.eval()
    [whole], parts = work.batches(), work.batches(4, accumulate=4)
    mean = sum(work.module.losses(part)["kd"].item() for part in parts) / 4
    assert mean == pytest.approx(work.module.losses(whole)["kd"].item(), rel=1e-4)


def test_the_teacher_is_the_model_before_the_domain_and_never_changes(kd):
    work = kd()
    for number in (0, 1):
        before = work.weights()
        watch = Watch(lambda m: {name: copy.clone() for name, copy in m.teacher.named().items()})
        work.learn(number, watch)
        assert len(watch.seen) == 6
        assert all(same(teacher, before) for _, teacher in watch.seen)
        assert not same(work.weights(), before)


def test_the_teacher_is_in_eval_mode_while_the_student_has_dropout(kd):
    work = kd(*DROPOUT)
    [batch] = work.batches()
    module = work.module.eval()
    still, _ = outputs_at(module.model, batch)
    module.train()
    module.model.base_model.layers[0].eval()  # modes of its own are kept
    modes = [each.training for each in module.modules()]
    random = torch.get_rng_state()
    taught, hidden = taught_by(module, batch)
    assert torch.equal(taught, still)
    assert not taught.requires_grad and not hidden.requires_grad
    assert [each.training for each in module.modules()] == modes
    assert len(set(modes)) == 2
    assert torch.equal(torch.get_rng_state(), random)
    dropped, _ = outputs_at(module.model, batch)
    assert not torch.equal(dropped, still)
    assert module.losses(batch)["kd"] > 0


def test_only_the_student_has_gradients(kd):
    work = kd(*DROPOUT)
    [batch] = work.batches()
    work.module.train().losses(batch)["kd"].backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in work.module.model.parameters())
    assert all(copy.grad is None and not copy.requires_grad for copy in work.module.teacher.buffers())
