"""DAS and DGA as runs: what they protect, and when they measure."""

import pytest
import torch

from cpt.data.sampler import TrainStream
from cpt.gradient_masks import soft as soft_masks
from cpt.models.forward import dropout_of, in_mode
from tests.conftest import VOCABULARIES, sentences
from tests.support.running import token_nll

ROBERTA = ["model=tiny_roberta", "model.config.hidden_dropout_prob=0.1", "trainer.steps=3"]
NEUTRAL = ["method.contrast=0", "method.general=null", "method.domains=false"]


@pytest.mark.parametrize("acts_on", ["update", "frozen"])
def test_a_fully_important_head_does_not_move(acts_on, build):
    """Rows of its query, key and value and columns of the output, under AdamW with decay; all else moves.
    Masked along the input, as in the released code, rows of other heads would stand still."""
    work = build("das", *ROBERTA, *NEUTRAL, f"method.acts_on={acts_on}", "optim.weight_decay=0.3")
    work.module.soft.gates()["roberta.encoder.layer.0.attention.heads"][1] = 1
    attention = work.module.model.roberta.encoder.layer[0].attention
    maps = [each.weight for each in (attention.self.query, attention.self.key, attention.self.value)]
    maps.append(attention.output.dense.weight.T)
    before = [each.detach().clone() for each in maps]
    work.learn(0)
    for old, new in zip(before, maps, strict=True):
        still = (old == new).all(1)
        assert still[16:].all() and not still[:16].any()
    assert attention.output.dense.bias.any()


def test_when_importances_are_measured(build, monkeypatch):
    """General knowledge once, before anything is learned, in train mode, on uncorrupted text; each domain
    after it, in eval mode, on corrupted text; both over the probe; and importances only rise."""
    work = build("das", *ROBERTA, "trainer.probe_samples=20")
    module, calls, corrupted, gradients = work.module, [], [], soft_masks.gate_gradients

    def read(model, args, inputs):
        corrupted.append((inputs["input_ids"] == work.data.objective.mask).any().item())

    def noted(model, groups, batch, losses, *, passes):
        corrupted.clear()
        found = gradients(model, groups, batch, losses, passes=passes)
        kind = "general" if passes == 2 else "domain"
        calls.append((kind, model.training, len(batch["input_ids"]), *corrupted))
        return found

    module.model.register_forward_pre_hook(read, with_kwargs=True)
    monkeypatch.setattr(soft_masks, "gate_gradients", noted)
    levels = [module.soft.importance.clone()]
    for number in (0, 1):
        work.learn(number)
        levels.append(module.soft.importance.clone())
    domain = [("domain", False, 16, True), ("domain", False, 4, True)]
    assert calls == [("general", True, 16, False), ("general", True, 4, False), *domain, *domain]
    assert all((new >= old).all() for old, new in zip(levels, levels[1:], strict=False))
    assert not torch.equal(levels[1], levels[2])


def test_dga_protects_heads_and_begins_each_domain_at_the_base(build, monkeypatch):
    """Without its contrast, at the first step, it moves what it does not protect as `one` does."""
    work = build("dga", *ROBERTA, "method.contrast=0")
    module, start, begun = work.module, work.weights(), []
    assert {group.kind for group in module.soft.groups} == {"heads"}
    proxy = type(module.proxy).measure

    def noted(self, soft, probe):
        begun.append(work.weights())
        return proxy(self, soft, probe)

    monkeypatch.setattr(type(module.proxy), "measure", noted)
    levels = []
    for number in (0, 1):
        work.learn(number)
        levels.append(module.soft.importance.clone())
    assert len(begun) == 2 and all(torch.equal(each[n], v) for each in begun for n, v in start.items())
    assert not torch.equal(*levels) and not (levels[1] >= levels[0]).all()
    works = (
        build("dga", *ROBERTA, "method.contrast=0", "trainer.steps=1"),
        build("one", *ROBERTA, "trainer.steps=1"),
    )
    for work in works:
        work.learn(0)
    name = "roberta.encoder.layer.0.output.dense.weight"
    assert torch.equal(*(work.weights()[name] for work in works))


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["das", "dga"])
def test_a_model_without_dropout_learns_its_domain(method, build, tmp_path):
    """With the default contrast, in ten steps from a base that has hardly learned, of text that is like what
    it has: the contrast of corrupted text pushes such a model away from what it knows."""
    for name, seed in (("general", 0), ("street", 5)):
        (tmp_path / name).mkdir()
        text = sentences(VOCABULARIES["general"], count=240, seed=seed)
        (tmp_path / name / "all.txt").write_text("\n".join(text) + "\n")
    few = ["model.base.steps=15", "model.base.batch_size=32", "trainer.steps=10", "trainer.batch_size=32"]
    few += ["model.config.hidden_size=128", "model.config.intermediate_size=192", "model.length=64"]
    work = build(method, "order=[street]", f"domains.root={tmp_path}", *few)
    assert not any(rate for *_, rate in dropout_of(work.module.model))
    options = {"seed": 9, "accumulate": 1, "batch_size": 32, "steps": [4], "rank": 0, "world": 1}
    stream = TrainStream({"street": work.data.train["street"]}, objective=work.data.objective, **options)

    @torch.no_grad()
    def loss() -> float:
        with in_mode(work.module, training=False):
            return torch.cat([token_nll(work.module.model, stream[n]) for n in range(4)]).mean().item()

    before = loss()
    work.learn(0)
    assert loss() < before
