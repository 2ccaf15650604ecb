"""Masks, the normalisation of the loss, and that neither depends on how a batch is cut up."""

import logging
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cpt.data.sampler import TrainStream
from cpt.gradient_masks.base import GradientMask
from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL
from cpt.trainer.log_settings import log_settings
from tests.support.method_fixtures import StepRecorder


class Half(GradientMask):
    def __init__(self, *, apply_to: str, factor: float, model: nn.Module) -> None:
        super().__init__(apply_to=apply_to)
        self.factor, self.model = factor, [model]

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.model[0].parameters():
            if parameter.ndim == 2:
                factor = torch.ones(len(parameter), 1)
                factor[: len(parameter) // 2] = self.factor
                yield parameter, factor


@pytest.mark.parametrize(
    ("apply_to", "how"), [("update", "precision=bf16-mixed"), ("frozen", "accumulate_grad_batches=4")]
)
def test_an_update_mask_scales_the_step_of_adam(apply_to, how, build):
    def moved(*masks: float, steps: int = 1) -> list[Tensor]:
        work = build("ncl", "optim.weight_decay=0.3", f"trainer.{how}", f"trainer.steps={steps}")
        model, old = work.module.model, work.weights()
        work.module.masks.extend(Half(apply_to=apply_to, factor=factor, model=model) for factor in masks)
        work.learn(0)
        return [value - old[name] for name, value in work.weights().items() if value.ndim == 2]

    for free, tenth in zip(moved(), moved(0.5, 0.2), strict=True):
        half = len(free) // 2
        torch.testing.assert_close(tenth[:half], 0.1 * free[:half], rtol=1e-3, atol=1e-7)
        assert torch.equal(tenth[half:], free[half:]) and free[:half].any()
    for value in moved(0.0, steps=3):
        assert not value[: len(value) // 2].any() and value[len(value) // 2 :].any()


def test_gradients_are_masked_before_they_are_clipped(build, monkeypatch):
    seen = []
    norm = lambda tensors: torch.cat([each.flatten() for each in tensors]).norm().item()  # noqa: E731

    def large(module, optimizer):
        seen.append(norm(p.grad[: len(p) // 2] for p in module.model.parameters() if p.ndim == 2))
        for parameter in module.model.parameters():
            parameter.grad.fill_(100.0)

    plain = ["optim=sgd", "optim.lr=1", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]
    parts = ["trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2", "trainer.steps=1"]
    work = build("ncl", *plain, *parts)
    monkeypatch.setattr(NCL, "transform_gradients", large)  # not of the base, which is ncl's too
    work.module.masks.append(Half(apply_to="gradient", factor=0.0, model=work.module.model))
    before = work.weights()
    work.learn(0)
    assert seen == [0.0]
    assert norm(v - before[n] for n, v in work.weights().items()) == pytest.approx(0.5, rel=1e-4)


def test_every_step_draws_by_a_seed_of_its_own(build):
    work, watch = build("ncl"), StepRecorder(lambda module: torch.initial_seed())
    for number in (0, 1):
        work.learn(number, watch)
    assert len({seed for _, seed in watch.seen}) == len(watch.seen) == 12
    groups = work.module.trainer.optimizers[0].param_groups
    decay = {id(each): group["weight_decay"] for group in groups for each in group["params"]}
    assert decay == {id(p): 0.01 * (p.ndim >= 2) for p in work.module.model.parameters()}


def test_the_hooks_of_a_method_are_called_in_their_order(build, small, start, tmp_path, monkeypatch):
    build("ncl")  # has pre-trained the base, which calls them too
    calls, scored, nll = [], [], NCL.nll

    def noted(name):
        original = getattr(NCL, name)

        def hook(module, *args):
            calls.append((name, module.domain.index, "train" if module.training else "eval"))
            return original(module, *args)

        return hook

    for name in ("before_domain", "after_update", "after_domain"):
        monkeypatch.setattr(NCL, name, noted(name), raising=False)
    listened = lambda module, batch, domain: (scored.append(domain), nll(module, batch, domain))[1]  # noqa: E731
    monkeypatch.setattr(NCL, "nll", listened)
    start(small("order=[law,food]", "trainer.steps=2"), tmp_path)
    hooks = [("before_domain", "train"), *[("after_update", "train")] * 2, ("after_domain", "eval")]
    assert calls == [(name, number, mode) for number in (0, 1) for name, mode in hooks]
    assert list(dict.fromkeys(scored)) == [0, 1, -1]


def gradient(module: ContinualMethod, batches: list[dict[str, Tensor]]) -> Tensor:
    """The gradient of the mean of the batches' losses, as Lightning accumulates it."""
    module.zero_grad()
    for batch in batches:
        (sum(module.losses(batch).values()) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["masked", "causal"])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(family, build):
    work = build("ncl", on=family)
    module, text = work.module.double(), {"law": work.data.train["law"]}
    rows = len(text["law"])
    given = {"objective": work.data.objective, "seed": 0, "batch_size": 8, "steps": [2 * rows]}
    stream = partial(TrainStream, text, **given)
    number = rows // 8  # the step that holds the short last row
    whole = gradient(module, [stream(accumulate=1, rank=0, world=1)[number]])
    for accumulate, world in ((2, 1), (1, 2), (2, 4), (8, 1)):
        own = [stream(accumulate=accumulate, rank=rank, world=world) for rank in range(world)]
        parts = [each[number * accumulate + part] for each in own for part in range(accumulate)]
        torch.testing.assert_close(gradient(module, parts), whole, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(("method", "words"), [
    ("derpp", "each micro-batch draws its own past samples"),
    ("das", "the contrastive loss compares the samples of each micro-batch"),
    ("das method.contrast=0", ""),
    ("ncl", ""),
])  # fmt: skip
def test_what_micro_batches_change_is_logged(method, words, build, caplog):
    caplog.set_level(logging.INFO)
    for micro_batches in (1, 2):
        caplog.clear()
        work = build(
            *method.split(), f"trainer.accumulate_grad_batches={micro_batches}", "model=tiny_roberta"
        )
        log_settings(work.plan, work.machine, work.module, work.data)
        lines = [line for line in caplog.messages if line.startswith("Accumulating gradients")]
        if words and micro_batches == 2:
            assert len(lines) == 1 and words in lines[0] and "accumulate_grad_batches=2" in lines[0]
        else:
            assert not lines
