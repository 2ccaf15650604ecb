"""Masks, the normalisation of the loss, and that neither depends on how a batch is cut up."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cpt.data.collate import labels_of
from cpt.data.corpora import Corpora
from cpt.data.sampler import TrainStream
from cpt.gradient_masks.base import GradientMask, scale_
from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL
from cpt.trainer import build, loop
from cpt.trainer.base_model import make_base
from cpt.trainer.plan import make_plan
from tests.support import making


class Half(GradientMask):
    """A factor on the upper half of the rows of every matrix."""

    def __init__(self, *, acts_on: str, factor: float, model: nn.Module) -> None:
        super().__init__(acts_on=acts_on)
        self.factor, self.model = factor, [model]

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.model[0].parameters():
            if parameter.ndim == 2:
                factor = torch.ones(len(parameter), 1)
                factor[: len(parameter) // 2] = self.factor
                yield parameter, factor


@pytest.fixture
def fitted(small):
    """Fits the first domain under masks and config overrides; gives the module and each parameter's
    displacement."""

    def fit(*overrides: str, masks: tuple[tuple[str, float], ...] = (), steps: int = 1):
        plan = make_plan(small("order=[law,food]", *overrides))
        texts = Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))
        module = build.build_method(plan, make_base(plan.model, texts, accelerator="cpu"))
        module.masks.extend(
            Half(acts_on=acts_on, factor=factor, model=module.model) for acts_on, factor in masks
        )
        data = build.build_data(plan, texts, make_base(plan.model, texts, accelerator="cpu"), module)
        data.enter(data.domains[0])
        old = {name: value.detach().clone() for name, value in module.model.named_parameters()}
        loop.make_trainer(plan.trainer.lightning, label="", steps=steps).fit(module, datamodule=data)
        return module, {name: value.detach() - old[name] for name, value in module.model.named_parameters()}

    return fit


def matrices(moved: dict[str, Tensor]) -> list[Tensor]:
    return [value for value in moved.values() if value.ndim == 2]


@pytest.mark.parametrize(
    "how",
    ["trainer.precision=32-true", "trainer.precision=bf16-mixed", "trainer.accumulate_grad_batches=4"],
)
@pytest.mark.parametrize("acts_on", ["update", "frozen"])
def test_an_update_mask_scales_the_step_of_adam(acts_on, how, fitted):
    _, whole = fitted("optim.weight_decay=0.3", how)
    _, masked = fitted("optim.weight_decay=0.3", how, masks=((acts_on, 0.1),))
    for free, tenth in zip(matrices(whole), matrices(masked), strict=True):
        half = len(free) // 2
        torch.testing.assert_close(tenth[:half], 0.1 * free[:half], rtol=1e-3, atol=1e-7)
        assert torch.equal(tenth[half:], free[half:])
        assert free[:half].abs().sum() > 0


def test_a_gradient_mask_is_divided_out_by_adam(fitted):
    """The finding that `acts_on` exists for: Adam's first step is lr times the sign, whatever the factor."""
    _, whole = fitted("optim.eps=1e-12", "trainer.gradient_clip_val=null")
    _, masked = fitted("optim.eps=1e-12", "trainer.gradient_clip_val=null", masks=(("gradient", 0.1),))
    moved = [
        (tenth[: len(free) // 2].norm() / free[: len(free) // 2].norm()).item()
        for free, tenth in zip(matrices(whole), matrices(masked), strict=True)
    ]
    assert min(moved) > 0.9


def test_gradients_are_masked_before_they_are_clipped(fitted):
    """Masked to nothing on half of the rows, the rest is clipped by its own norm."""
    plain = ["optim=sgd", "optim.lr=1", "schedule.warmup=0"]
    _, moved = fitted(*plain, "trainer.gradient_clip_val=1e-3", masks=(("gradient", 0.0),))
    assert sum(value.square().sum() for value in moved.values()).sqrt().item() == pytest.approx(
        1e-3, rel=1e-3
    )


def test_every_step_draws_by_a_seed_of_its_own(small):
    work, watch = making.made(small("order=[law,food]")), making.Watch(lambda module: torch.initial_seed())
    for number in (0, 1):
        work.learn(number, watch)
    seeds = [seed for _, seed in watch.seen]
    assert len(set(seeds)) == len(seeds) == 12


def test_decay_reaches_matrices_only(fitted):
    module, _ = fitted()
    decay = {
        id(parameter): group["weight_decay"]
        for group in module.trainer.optimizers[0].param_groups
        for parameter in group["params"]
    }
    assert {decay[id(p)] for p in module.model.parameters() if p.ndim >= 2} == {0.01}
    assert {decay[id(p)] for p in module.model.parameters() if p.ndim < 2} == {0.0}
    assert len(decay) == len(list(module.model.parameters()))


def test_the_hooks_of_a_method_are_called_in_their_order(small, start, tmp_path, monkeypatch):
    calls = []

    def noted(name):
        original = getattr(NCL, name)

        def hook(module, *args):
            probe = args[0] if name in ("before_domain", "after_domain") else ()
            state = "eval" if not module.training else "train"
            calls.append(
                (name, state, *[len(batch["input_ids"]) for batch in probe], *args[:1][: name == "activate"])
            )
            return original(module, *args)

        return hook

    for name in ("activate", "before_domain", "after_update", "after_domain"):
        monkeypatch.setattr(NCL, name, noted(name), raising=False)
    start(small("order=[law,food]", "trainer.steps=2", "trainer.probe_samples=20"), tmp_path)
    learned = [("before_domain", "train", 16, 4), ("after_update", "train"), ("after_update", "train")]
    ended = ("after_domain", "eval", 16, 4)
    assert calls == [call for number in (0, 1) for call in (("activate", "train", number), *learned, ended)]


def test_gradients_of_probes_are_not_left_behind(fitted, monkeypatch):
    def probing(module, probe):
        for batch in probe:
            sum(module.losses(batch).values()).backward()

    for hook in ("before_domain", "after_domain"):
        monkeypatch.setattr(NCL, hook, probing)
    with monkeypatch.context() as patched:
        patched.setattr(
            NCL,
            "training_step",
            lambda module, batch, number: (
                gradients.append([p.grad for p in module.parameters()]) or sum(module.losses(batch).values())
            ),
        )
        gradients = []
        module, _ = fitted(steps=1)
    assert all(gradient is None for gradient in gradients[0])
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_evaluation_knows_whose_text_it_scores(small, start, tmp_path, monkeypatch):
    seen = []
    nll = NCL.nll
    monkeypatch.setattr(
        NCL, "nll", lambda module, batch, domain: (seen.append(domain), nll(module, batch, domain))[1]
    )
    start(small("order=[law,food]", "trainer.steps=1"), tmp_path / "ncl")
    assert list(dict.fromkeys(seen)) == [0, 1, -1]


@pytest.mark.parametrize("acts_on", ["update", "frozen"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_factor_zero_keeps_the_bits_under_weight_decay(precision, acts_on, fitted):
    chosen = ["optim.weight_decay=0.3", f"trainer.precision={precision}"]
    _, moved = fitted(*chosen, masks=((acts_on, 0.0),), steps=3)
    for value in matrices(moved):
        half = len(value) // 2
        assert (value[:half] == 0).all()
        assert (value[half:] != 0).any()


@pytest.mark.parametrize("acts_on", ["update", "gradient", "frozen"])
def test_factor_one_is_no_mask_bit_for_bit(acts_on, fitted):
    module, _ = fitted(steps=4)
    masked, _ = fitted(masks=((acts_on, 1.0),), steps=4)
    for one, other in zip(module.model.parameters(), masked.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_masks_multiply_in_any_order(fitted):
    _, both = fitted(masks=(("update", 0.5), ("update", 0.2)))
    _, turned = fitted(masks=(("update", 0.2), ("update", 0.5)))
    _, product = fitted(masks=(("update", 0.1),))
    for one, other, tenth in zip(matrices(both), matrices(turned), matrices(product), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(one, tenth, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_is_exact_at_both_ends(dtype):
    start, tensor = torch.randn(2, 50, 50, dtype=dtype)
    for factor, whole, moved in ((0.0, torch.zeros_like(tensor), start), (1.0, tensor, tensor)):
        scaled, step = tensor.clone(), tensor.clone()
        scale_(scaled, torch.tensor([[factor]]))
        scale_(step, torch.tensor([[factor]]), start=start)
        assert torch.equal(scaled, whole) and torch.equal(step, moved)
    scale_(tensor, torch.tensor([[0.25]]), start=start.fill_(4))
    assert tensor.float().mean().item() == pytest.approx(3, abs=0.1)


def gradient(module: ContinualMethod, batches: list[dict[str, Tensor]]) -> Tensor:
    """The gradient of the mean of the batches' losses, as Lightning accumulates it."""
    module.zero_grad()
    for batch in batches:
        (sum(module.losses(batch).values()) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("config", ["small", "small_gpt2"])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(config, request):
    plan = make_plan(request.getfixturevalue(config)("order=[law]"))
    texts = Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))
    start = make_base(plan.model, texts, accelerator="cpu")
    module = build.build_method(plan, start).double()
    data = build.build_data(plan, texts, start, module)
    rows = len(data.train["law"])
    stream = partial(
        TrainStream,
        {"law": data.train["law"]},
        objective=data.objective,
        seed=0,
        batch_size=8,
        steps=[2 * rows],
    )
    number = rows // 8  # the step that holds the short last row
    whole = gradient(module, [stream(accumulate=1, rank=0, world=1)[number]])
    for accumulate, world in ((2, 1), (1, 2), (2, 4), (8, 1)):
        parts = [
            stream(accumulate=accumulate, rank=rank, world=world)[number * accumulate + part]
            for rank in range(world)
            for part in range(accumulate)
        ]
        torch.testing.assert_close(gradient(module, parts), whole, rtol=1e-6, atol=1e-10)


def test_the_loss_is_the_mean_over_the_scored_tokens(fitted):
    module, _ = fitted()
    data = module.trainer.datamodule
    batch = next(iter(data.train_dataloader()))
    module.eval()
    logits = module.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels_of(batch).flatten(), ignore_index=-100
    )
    torch.testing.assert_close(module.losses(batch)["lm"], expected)


def test_the_score_is_that_of_the_whole_text(fitted):
    """Corpus loss: not a mean of batch means, and the same for any batch size."""
    module, _ = fitted()
    data = module.trainer.datamodule
    rows = []
    for size in (3, 64):
        data.eval_batch_size = size
        loop.make_trainer({"accelerator": "cpu", "devices": 1}, label="").validate(
            module, datamodule=data, verbose=False
        )
        rows.append([(nll.sum() / count.sum()).item() for nll, count in module.row().values()])
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    assert len(rows[0]) == 3
    total, scored = 0.0, 0
    for batch in data.val_dataloader():
        if int(batch["column"]) == 0:
            total += module.nll(batch, 0)[0].sum().item()
            scored += len(batch["positions"])
    assert rows[1][0] == pytest.approx(total / scored, rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run(fitted):
    with pytest.raises(ValueError, match=r"the lm loss is (nan|inf) .*at step \d+ of law; a lower rate"):
        fitted("optim.lr=1e30", "trainer.gradient_clip_val=null", steps=6)
