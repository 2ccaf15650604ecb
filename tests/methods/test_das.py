"""DAS and DGA: the contrastive loss against loops and the authors' numbers; what they protect."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.data.collate import labels_of
from cpt.gradient_masks import soft as soft_masks
from cpt.gradient_masks.soft import SoftMask
from cpt.methods import das as contrasting
from cpt.methods.das import ContrastMethod, contrastive
from cpt.methods.options import ContrastOptions
from cpt.models.forward import dropout, mean_over
from cpt.models.objectives import Causal
from cpt.models.units import gate_units
from tests.conftest import GOLDEN, needs_golden
from tests.gradient_masks.test_soft import batch_of, roberta
from tests.support.making import same

ROBERTA = ["model=tiny_roberta", "model.config.hidden_dropout_prob=0.1", "trainer.steps=3"]


def test_a_fully_important_head_does_not_move(build):
    neutral = ["method.contrast=0", "method.general=null", "method.domains=false"]
    work = build("das", *ROBERTA, *neutral, "method.apply_to=update", "optim.weight_decay=0.3")
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
    work = build("das", *ROBERTA, "trainer.importance_samples=20")
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
    work = build("dga", *ROBERTA, "method.contrast=0")
    module, start, begun, levels = work.module, work.weights(), [], []
    assert {group.kind for group in module.soft.groups} == {"heads"}
    kind = type(module.proxy)
    proxy, noted = kind.measure, lambda *given: begun.append(work.weights()) or proxy(*given)
    monkeypatch.setattr(kind, "measure", noted)
    for number in (0, 1):
        work.learn(number)
        levels.append(module.soft.importance.clone())
    assert len(begun) == 2 and all(same(each, start) for each in begun)
    assert not torch.equal(*levels) and not (levels[1] >= levels[0]).all()


@needs_golden
@pytest.mark.parametrize("size", ["b8", "b5"])
def test_value_and_gradients_are_those_of_the_authors_code(size):
    golden = np.load(GOLDEN / "contrast.npz").items()
    arrays = {name: torch.from_numpy(np.asarray(value)) for name, value in golden}
    three = [arrays[f"{size}_z{number}"].requires_grad_() for number in (1, 2, 3)]
    loss = contrastive(three[1], three[0], three[2], temperature=0.05)
    torch.testing.assert_close(loss, arrays[f"{size}_loss3"], rtol=1e-4, atol=1e-6)
    for number, ours in enumerate(torch.autograd.grad(loss, three), start=1):
        theirs = arrays[f"{size}_loss3_dz{number}"]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())


def test_the_samples_of_other_processes_are_candidates(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    three, others = torch.randn(2, 3, 3, 6, dtype=torch.float64, generator=draw)
    joined, terms = torch.cat([others, three], dim=1), []
    gathered = torch.stack([joined[1], joined[2]], dim=1), len(others[0])
    monkeypatch.setattr(contrasting, "gather_rows", lambda rows: gathered)
    for n, anchor in enumerate(three[0]):
        both = [*joined[1], *joined[2]]
        cosines = torch.stack([torch.cosine_similarity(anchor, other, dim=0) for other in both]) / 0.1
        terms.append(cosines.logsumexp(0) - cosines[len(others[0]) + n])
    torch.testing.assert_close(contrastive(*three, temperature=0.1), torch.stack(terms).mean())


def test_padding_is_left_out_of_the_mean():
    hidden = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(mean_over(hidden, None), hidden.mean(1))
    assert torch.equal(mean_over(hidden, torch.tensor([[1, 1, 0, 0]])), hidden[:, :2].mean(1))


class Uncorrupting(Causal):
    """As masked text does: the labels are the text."""

    def restored(self, batch):
        labels = labels_of(batch)
        return {**batch, "input_ids": torch.where(labels == -100, batch["input_ids"], labels)}


def contrast(model, soft, *, objective=None, step=0, temperature=0.1, contrast=1.0, **options):
    """What of a method its contrastive term is made of."""
    given = {"text": "corrupted", "dropout": 0.3, "samples": 1.0, "every": 1}
    named = {f"contrast_{name}": value for name, value in (given | options).items()}
    made = SimpleNamespace(model=model, objective=objective or Causal(), soft=soft)
    made.options = ContrastOptions(contrast=contrast, temperature=temperature, **named)
    made.trainer = SimpleNamespace(global_step=step)
    made.contrast = lambda *given: ContrastMethod.contrast(made, *given)
    return made


def soft_mask(model):
    soft = SoftMask(model, kinds=("heads", "neurons", "outputs"), apply_to="update", normalize="rank")
    soft.set(torch.rand(len(soft.importance), generator=torch.Generator().manual_seed(1)))
    return soft


def by_hand(model, batch, soft, *, passes):
    """Vectors of so many passes with dropout, and of one with each unit times its importance."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def mean():
        return mean_over(model.roberta(**inputs).last_hidden_state, batch["attention_mask"])

    with dropout(model, 0.3):
        found = [mean() for _ in range(passes)]
        with gate_units(soft.groups, soft.gates()):
            return [*found, mean()]


@pytest.mark.parametrize("text", ["uncorrupted", "corrupted"])
def test_the_term_contrasts_the_three_passes(text):
    model, whole = roberta(rate=0.3), batch_of(4)
    corrupted, soft = whole["input_ids"].clone(), soft_mask(model)
    corrupted.flatten()[whole["positions"]] = 4
    targets = whole["input_ids"].flatten()[whole["positions"]]
    batch = {**whole, "input_ids": corrupted, "targets": targets}
    hidden = torch.randn(4, 12, 32, requires_grad=True)
    made = contrast(model, soft, contrast=2.0, temperature=0.5, text=text, objective=Uncorrupting())
    torch.manual_seed(5)
    term = made.contrast(batch, hidden)
    torch.manual_seed(5)
    if text == "uncorrupted":
        passes = by_hand(model, whole, soft, passes=2)
    else:
        passes = [mean_over(hidden, batch["attention_mask"]), *by_hand(model, batch, soft, passes=1)]
    assert term.item() == pytest.approx(2 * contrastive(*passes, temperature=0.5).item(), rel=1e-4)
    term.backward()
    assert (hidden.grad is not None) == (text == "corrupted")
    assert model.roberta.encoder.layer[0].output.dense.weight.grad.any()


def test_in_some_steps_only_it_weighs_as_much_more():
    model, batch = roberta(rate=0.0), batch_of(4)
    soft = soft_mask(model)

    def terms(step, **options):
        torch.manual_seed(5)
        made = contrast(model, soft, step=step, **options)
        return ContrastMethod.losses(made, {**batch, "weight": 1.0})

    plain, rare = terms(0), terms(0, every=3)
    assert rare["contrast"].item() == pytest.approx(3 * plain["contrast"].item())
    assert rare["lm"] == plain["lm"]
    assert [step for step in range(7) if "contrast" in terms(step, every=3)] == [0, 3, 6]
    assert "contrast" not in terms(0, contrast=0.0, dropout=None)
