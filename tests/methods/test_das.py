"""DAS and DGA as runs: what they protect, when they measure, and their neutral strength."""

import pytest
import torch

from cpt.data.sampler import TrainStream
from cpt.gradient_masks import soft as soft_masks
from cpt.models.forward import dropout_of, in_mode
from cpt.trainer import loop
from tests.conftest import VOCABULARIES, sentences
from tests.support import making
from tests.support.making import ORDER
from tests.support.running import token_nll

ROBERTA = ["model=tiny_roberta", "model.config.hidden_dropout_prob=0.1"]
NEUTRAL = ["method=das", "method.contrast=0", "method.general=null", "method.domains=false"]


@pytest.fixture
def made(small):
    """A method's module, its data and the config's trainer."""

    def build(*overrides: str):
        run = making.made(small(ORDER, *overrides))
        return run.module, run.data, run.plan.trainer.lightning

    return build


def fit(module, data, options, *, place: int = 0, steps: int = 3) -> None:
    domain = data.domains[place]
    data.enter(domain)
    module.activate(domain.index)
    loop.make_trainer(options, label="", steps=steps).fit(module, datamodule=data)


@pytest.mark.parametrize("acts_on", ["update", "frozen"])
def test_a_fully_important_head_does_not_move(acts_on, made):
    """Rows of its query, key and value and columns of the output, under AdamW with decay; all else moves.
    Masked along the input, as in the released code, rows of other heads would stand still."""
    module, data, options = made(*ROBERTA, *NEUTRAL, f"method.acts_on={acts_on}", "optim.weight_decay=0.3")
    module.soft.gates()["roberta.encoder.layer.0.attention.heads"][1] = 1
    attention = module.model.roberta.encoder.layer[0].attention
    maps = [attention.self.query, attention.self.key, attention.self.value]
    before = [each.weight.detach().clone() for each in maps] + [
        attention.output.dense.weight.detach().T.clone()
    ]
    fit(module, data, options)
    after = [each.weight for each in maps] + [attention.output.dense.weight.T]
    for old, new in zip(before, after, strict=True):
        still = (old == new).all(1)
        assert still[16:].all() and not still[:16].any()
    assert not torch.equal(attention.output.dense.bias, torch.zeros(32))


@pytest.mark.parametrize(("acts_on", "low", "high"), [("update", 0.09, 0.11), ("gradient", 0.7, 1.3)])
def test_importance_scales_the_step_and_not_just_the_gradient(acts_on, low, high, made):
    """Importance 0.9 on half of the neurons: with AdamW a tenth of the displacement, where steps are
    scaled; scaled gradients are divided out again."""
    overrides = [*ROBERTA, *NEUTRAL, f"method.acts_on={acts_on}", "method.units=[neurons]"]
    overrides += ["optim.eps=1e-12", "trainer.gradient_clip_val=null"]
    moved = []
    for value in (0.0, 0.9):
        module, data, options = made(*overrides)
        up = module.model.roberta.encoder.layer[0].intermediate.dense.weight
        before = up.detach().clone()
        module.soft.gates()["roberta.encoder.layer.0.neurons"][:24] = value
        fit(module, data, options, steps=1)
        moved.append((up - before).abs())
    ratio = moved[1][:24].sum() / moved[0][:24].sum()
    assert low < ratio < high
    assert torch.equal(moved[1][24:], moved[0][24:])


def test_when_importances_are_measured(made, monkeypatch):
    """General knowledge once, before anything is learned, in train mode, on uncorrupted text; each domain
    after it, in eval mode, on corrupted text; both over the probe; and importances only rise."""
    module, data, options = made(*ROBERTA, "method=das", "trainer.probe_samples=20")
    calls, gradients, corrupted = [], soft_masks.gate_gradients, []
    mask_token = data.objective.mask
    module.model.register_forward_pre_hook(
        lambda model, args, inputs: corrupted.append((inputs["input_ids"] == mask_token).any().item()),
        with_kwargs=True,
    )

    def noted(model, groups, batch, losses, *, passes):
        kind = "general" if passes == 2 else "domain"
        corrupted.clear()
        found = gradients(model, groups, batch, losses, passes=passes)
        calls.append((kind, model.training, len(batch["input_ids"]), *corrupted))
        return found

    monkeypatch.setattr(soft_masks, "gate_gradients", noted)
    levels = [module.soft.importance.clone()]
    for place in (0, 1):
        fit(module, data, options, place=place)
        levels.append(module.soft.importance.clone())
    general = [("general", True, 16, False), ("general", True, 4, False)]
    domain = [("domain", False, 16, True), ("domain", False, 4, True)]
    assert calls == [*general, *domain, *domain]
    assert all((new >= old).all() for old, new in zip(levels, levels[1:], strict=False))
    assert not torch.equal(levels[1], levels[2])


def test_dga_protects_heads_and_begins_each_domain_at_the_base(made, monkeypatch):
    module, data, options = made(*ROBERTA, "method=dga", "method.contrast=0")
    assert {group.kind for group in module.soft.groups} == {"heads"}
    start = [parameter.detach().clone() for parameter in module.model.parameters()]
    begun, proxy = [], type(module.proxy).measure

    def noted(self, soft, probe):
        begun.append([parameter.detach().clone() for parameter in module.model.parameters()])
        return proxy(self, soft, probe)

    monkeypatch.setattr(type(module.proxy), "measure", noted)
    levels = []
    for place in (0, 1):
        fit(module, data, options, place=place)
        levels.append(module.soft.importance.clone())
    assert (
        all(torch.equal(a, b) for each in begun for a, b in zip(start, each, strict=True)) and len(begun) == 2
    )
    assert not torch.equal(*levels) and not (levels[1] >= levels[0]).all()


def test_without_its_contrast_dga_moves_what_it_does_not_protect_as_one_does(made):
    """At the first step, before the protected heads differ: the feed-forward weights."""
    moved = {}
    for method in (["method=one"], ["method=dga", "method.contrast=0"]):
        module, data, options = made(*ROBERTA, *method)
        fit(module, data, options, steps=1)
        moved[method[0]] = module.model.roberta.encoder.layer[0].output.dense.weight.detach().clone()
    assert torch.equal(*moved.values())


FEW = ["model.base.steps=15", "model.base.batch_size=32", "trainer.steps=10", "trainer.batch_size=32"]
WIDE = ["model.config.hidden_size=128", "model.config.intermediate_size=192", "model.length=64"]


@pytest.mark.parametrize("method", ["das", "dga"])
def test_a_model_without_dropout_learns_its_domain(method, small, tmp_path):
    """With the default contrast, in ten steps from a base that has hardly learned, of text that is like what
    it has: the contrast of corrupted text pushes such a model away from what it knows."""
    for name, seed in (("general", 0), ("street", 5)):
        (tmp_path / name).mkdir()
        text = sentences(VOCABULARIES["general"], count=240, seed=seed)
        (tmp_path / name / "all.txt").write_text("\n".join(text) + "\n")
    cfg = small("order=[street]", f"domains.root={tmp_path}", f"method={method}", *FEW, *WIDE)
    run = making.made(cfg)
    assert not any(rate for *_, rate in dropout_of(run.module.model))
    batches = other_batches(run.data.train, run.data.objective)
    before = loss(run.module, batches)
    fit(run.module, run.data, run.plan.trainer.lightning, steps=10)
    assert loss(run.module, batches) < before


def other_batches(texts, objective) -> list:
    """Training text, in an order that it is not learned in."""
    options = {"seed": 9, "accumulate": 1, "batch_size": 32, "steps": [4], "rank": 0, "world": 1}
    stream = TrainStream({"street": texts["street"]}, objective=objective, **options)
    return [stream[number] for number in range(4)]


@torch.no_grad()
def loss(module, text) -> float:
    """Mean negative log-likelihood of its scored tokens, in eval mode."""
    with in_mode(module, training=False):
        return torch.cat([token_nll(module.model, batch) for batch in text]).mean().item()
