"""Masks, the normalisation of the loss, and that neither depends on how a batch is cut up."""

import ast
import csv
import importlib
import inspect
import logging
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cpt import methods
from cpt.data.sampler import TrainStream
from cpt.gradient_masks.base import GradientMask
from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL
from cpt.trainer.log_settings import log_settings
from tests.support.method_fixtures import StepRecorder


class Half(GradientMask):
    def __init__(self, *, apply_to: str, factor: float, model: nn.Module) -> None:
        super().__init__(apply_to=apply_to)
        self.factor = factor
        self.model = [model]

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.model[0].parameters():
            if parameter.ndim == 2:
                factor = torch.ones(len(parameter), 1)
                factor[: len(parameter) // 2] = self.factor
                yield parameter, factor


@pytest.mark.parametrize(
    ("apply_to", "trainer_option"),
    [("update", "precision=bf16-mixed"), ("frozen", "accumulate_grad_batches=4")],
)
def test_an_update_mask_scales_the_step_of_adam(apply_to, trainer_option, build):
    def weight_changes(*masks: float, steps: int = 1) -> list[Tensor]:
        run = build("ncl", "optim.weight_decay=0.3", f"trainer.{trainer_option}", f"trainer.steps={steps}")
        model = run.module.model
        old = run.weights()
        run.module.masks.extend(Half(apply_to=apply_to, factor=factor, model=model) for factor in masks)
        run.learn(0)
        return [value - old[name] for name, value in run.weights().items() if value.ndim == 2]

    for free, tenth in zip(weight_changes(), weight_changes(0.5, 0.2), strict=True):
        half = len(free) // 2
        torch.testing.assert_close(tenth[:half], 0.1 * free[:half], rtol=1e-3, atol=1e-7)
        assert torch.equal(tenth[half:], free[half:]) and free[:half].any()
    for value in weight_changes(0.0, steps=3):
        assert not value[: len(value) // 2].any() and value[len(value) // 2 :].any()


def test_gradients_are_masked_before_they_are_clipped(build, monkeypatch):
    norms = []
    norm = lambda tensors: torch.cat([tensor.flatten() for tensor in tensors]).norm().item()  # noqa: E731

    def large(module, optimizer):
        norms.append(norm(p.grad[: len(p) // 2] for p in module.model.parameters() if p.ndim == 2))
        for parameter in module.model.parameters():
            parameter.grad.fill_(100.0)

    plain = ["optim=sgd", "optim.lr=1", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]
    parts = ["trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2", "trainer.steps=1"]
    run = build("ncl", *plain, *parts)
    monkeypatch.setattr(NCL, "transform_gradients", large)  # not of the base, which is ncl's too
    run.module.masks.append(Half(apply_to="gradient", factor=0.0, model=run.module.model))
    before = run.weights()
    run.learn(0)
    assert norms == [0.0]
    assert norm(v - before[n] for n, v in run.weights().items()) == pytest.approx(0.5, rel=1e-4)


def test_a_logged_loss_is_the_mean_over_the_micro_batches_of_its_step(small, start, tmp_path, monkeypatch):
    losses = []
    compute_losses = NCL.losses

    def record_losses(module, batch):
        terms = compute_losses(module, batch)
        losses.append(terms["lm"].item())
        return terms

    options = ["order=[law]", "trainer.steps=4", "trainer.log_every_n_steps=2"]
    start(small(*options, "method=none"), tmp_path / "base")  # which is pre-trained and then cached
    monkeypatch.setattr(NCL, "losses", record_losses)
    start(small(*options, "trainer.accumulate_grad_batches=4", "+logger.csv=true"), tmp_path / "run")
    logged = {}
    with (tmp_path / "run" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            if row["name"] == "train/lm/law":
                logged[int(row["step"])] = float(row["value"])
    assert len(losses) == 16 and list(logged) == [1, 3]
    for step, loss in logged.items():
        assert loss == pytest.approx(sum(losses[4 * step : 4 * step + 4]) / 4, rel=1e-5)


def test_every_step_draws_by_a_seed_of_its_own(build):
    run = build("ncl")
    watch = StepRecorder(lambda module: torch.initial_seed())
    for number in (0, 1):
        run.learn(number, watch)
    assert len({seed for _, seed in watch.seen}) == len(watch.seen) == 12

    weight_decay = {}
    for group in run.module.trainer.optimizers[0].param_groups:
        for parameter in group["params"]:
            weight_decay[parameter] = group["weight_decay"]
    parameters = run.module.model.parameters()
    assert weight_decay == {parameter: 0.01 if parameter.ndim >= 2 else 0 for parameter in parameters}


def test_the_hooks_of_a_method_are_called_in_their_order(build, small, start, tmp_path, monkeypatch):
    build("ncl")  # has pre-trained the base, which calls them too
    calls = []
    scored_domains = []
    nll = NCL.nll

    def record_calls(name):
        original = getattr(NCL, name)

        def hook(module, *args):
            calls.append((name, module.domain.index, "train" if module.training else "eval"))
            return original(module, *args)

        monkeypatch.setattr(NCL, name, hook, raising=False)

    def record_domain(module, batch, domain):
        scored_domains.append(domain)
        return nll(module, batch, domain)

    for name in ("before_domain", "after_update", "after_domain"):
        record_calls(name)
    monkeypatch.setattr(NCL, "nll", record_domain)
    start(small("order=[law,food]", "trainer.steps=2"), tmp_path)

    expected = []
    for number in (0, 1):
        expected += [
            ("before_domain", number, "train"),
            ("after_update", number, "train"),
            ("after_update", number, "train"),
            ("after_domain", number, "eval"),
        ]
    assert calls == expected
    assert list(dict.fromkeys(scored_domains)) == [0, 1, -1]


def gradient(module: ContinualMethod, batches: list[dict[str, Tensor]]) -> Tensor:
    """The gradient of the mean of the batches' losses, as Lightning accumulates it."""
    module.zero_grad()
    for batch in batches:
        (sum(module.losses(batch).values()) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["masked", "causal"])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(family, build):
    run = build("ncl", on=family)
    module = run.module.double()
    text = {"law": run.data.train["law"]}
    rows = len(text["law"])
    stream = partial(TrainStream, text, objective=run.data.objective, seed=0, batch_size=8, steps=[2 * rows])
    number = rows // 8  # the step that holds the short last row
    expected = gradient(module, [stream(accumulate=1, rank=0, world=1)[number]])
    for accumulate, world in ((2, 1), (1, 2), (2, 4), (8, 1)):
        batches = []
        for rank in range(world):
            rank_stream = stream(accumulate=accumulate, rank=rank, world=world)
            batches += [rank_stream[number * accumulate + part] for part in range(accumulate)]
        torch.testing.assert_close(gradient(module, batches), expected, rtol=1e-6, atol=1e-10)


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
        run = build(*method.split(), f"trainer.accumulate_grad_batches={micro_batches}", "model=tiny_roberta")
        log_settings(run.plan, run.machine, run.module, run.data)
        lines = [line for line in caplog.messages if line.startswith("Accumulating gradients")]
        if words and micro_batches == 2:
            assert len(lines) == 1 and words in lines[0] and "accumulate_grad_batches=2" in lines[0]
        else:
            assert not lines


def list_methods(parent=ContinualMethod):
    """The classes of cpt below a class, and below these."""
    for child in parent.__subclasses__():
        if child.__module__.startswith("cpt."):
            yield child
        yield from list_methods(child)


def reads_batches(hook):
    """Whether a hook does more with its importance batches than hand them to its super-class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(hook)))
    handed_on = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("super()."):
            handed_on.update(node.args)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in handed_on]
    return any(name.id == "importance_batches" for name in names)


def test_methods_say_whether_they_read_importance_batches():
    for module in pkgutil.iter_modules(methods.__path__):
        importlib.import_module(f"cpt.methods.{module.name}")
    classes = set(list_methods())
    assert len(classes) > 30
    for cls in classes:
        hooks = []
        for ancestor in cls.__mro__:
            hooks += [
                vars(ancestor)[name] for name in ("before_domain", "after_domain") if name in vars(ancestor)
            ]
        assert cls.reads_importance_batches == any(map(reads_batches, hooks)), cls
