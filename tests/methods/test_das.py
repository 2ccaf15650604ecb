"""DAS and DGA: the contrastive loss against loops and the authors' numbers; what they protect."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.gradient_masks import soft as soft_masks
from cpt.methods import das as contrasting
from cpt.methods.das import contrastive
from cpt.models.forward import mean_over_tokens, set_dropout
from cpt.models.units import gate_units
from tests.conftest import GOLDEN, needs_golden
from tests.support.forward_passes import select_rows
from tests.support.method_fixtures import equal_tensors

ROBERTA = ["model=tiny_roberta", "model.config.hidden_dropout_prob=0.1", "trainer.steps=3"]


def test_a_fully_important_head_does_not_move(build):
    neutral = ["method.contrast=0", "method.general_importance=null", "method.domain_importance=false"]
    run = build("das", *ROBERTA, *neutral, "method.apply_to=update", "optim.weight_decay=0.3")
    run.module.soft.gates()["roberta.encoder.layer.0.attention.heads"][1] = 1
    attention = run.module.model.roberta.encoder.layer[0].attention
    maps = [
        projection.weight for projection in (attention.self.query, attention.self.key, attention.self.value)
    ]
    maps.append(attention.output.dense.weight.T)
    before = [weight.detach().clone() for weight in maps]
    run.learn(0)
    for old, new in zip(before, maps, strict=True):
        unchanged = (old == new).all(1)
        assert unchanged[16:].all() and not unchanged[:16].any()
    assert attention.output.dense.bias.any()


def test_when_importances_are_measured(build, monkeypatch):
    run = build("das", *ROBERTA, "trainer.importance_samples=20", "trainer.eval_batch_size=16")
    module = run.module
    calls = []
    corrupted = []
    gradients = soft_masks.gate_gradients

    def read(model, args, inputs):
        corrupted.append((inputs["input_ids"] == run.data.objective.mask_id).any().item())

    def record_call(model, groups, batch, losses, *, passes):
        corrupted.clear()
        sample_gradients = gradients(model, groups, batch, losses, passes=passes)
        kind = "general" if passes == 2 else "domain"
        calls.append((kind, model.training, len(batch["input_ids"]), *corrupted))
        return sample_gradients

    module.model.register_forward_pre_hook(read, with_kwargs=True)
    monkeypatch.setattr(soft_masks, "gate_gradients", record_call)
    levels = [module.soft.importance.clone()]
    for number in (0, 1):
        run.learn(number)
        levels.append(module.soft.importance.clone())
    domain = [("domain", False, 16, True), ("domain", False, 4, True)]
    assert calls == [("general", True, 16, False), ("general", True, 4, False), *domain, *domain]
    assert all((new >= old).all() for old, new in zip(levels, levels[1:], strict=False))
    assert not torch.equal(levels[1], levels[2])


def test_dga_protects_heads_and_begins_each_domain_at_the_base(build, monkeypatch):
    run = build("dga", *ROBERTA, "method.contrast=0")
    module = run.module
    assert {group.kind for group in module.soft.groups} == {"heads"}
    base = run.weights()
    measured_weights = []
    proxy_class = type(module.proxy)
    measure = proxy_class.measure

    def record_weights(*arguments):
        measured_weights.append(run.weights())
        return measure(*arguments)

    monkeypatch.setattr(proxy_class, "measure", record_weights)
    importances = []
    for number in (0, 1):
        run.learn(number)
        importances.append(module.soft.importance.clone())
    assert len(measured_weights) == 2 and all(equal_tensors(weights, base) for weights in measured_weights)
    first, second = importances
    assert not torch.equal(first, second) and not (second >= first).all()


@needs_golden
@pytest.mark.parametrize("size", ["b8", "b5"])
def test_value_and_gradients_are_those_of_the_authors_code(size):
    golden = np.load(GOLDEN / "contrast.npz").items()
    arrays = {name: torch.from_numpy(np.asarray(value)) for name, value in golden}
    positives, anchors, negatives = (arrays[f"{size}_z{number}"].requires_grad_() for number in (1, 2, 3))
    loss = contrastive(anchors, positives, negatives, temperature=0.05)
    torch.testing.assert_close(loss, arrays[f"{size}_loss3"], rtol=1e-4, atol=1e-6)
    gradients = torch.autograd.grad(loss, (positives, anchors, negatives))
    for number, ours in enumerate(gradients, start=1):
        theirs = arrays[f"{size}_loss3_dz{number}"]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())


def test_the_samples_of_other_processes_are_candidates(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    local, remote = torch.randn(2, 3, 3, 6, dtype=torch.float64, generator=draw)
    joined = torch.cat([remote, local], dim=1)
    terms = []
    gathered = torch.stack([joined[1], joined[2]], dim=1), len(remote[0])
    monkeypatch.setattr(contrasting, "gather_rows", lambda rows: gathered)
    for n, anchor in enumerate(local[0]):
        candidates = [*joined[1], *joined[2]]
        cosines = (
            torch.stack([torch.cosine_similarity(anchor, candidate, dim=0) for candidate in candidates]) / 0.1
        )
        terms.append(cosines.logsumexp(0) - cosines[len(remote[0]) + n])
    torch.testing.assert_close(contrastive(*local, temperature=0.1), torch.stack(terms).mean())


def test_padding_is_left_out_of_the_mean():
    hidden = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(mean_over_tokens(hidden, None), hidden.mean(1))
    assert torch.equal(mean_over_tokens(hidden, torch.tensor([[1, 1, 0, 0]])), hidden[:, :2].mean(1))


@pytest.fixture
def das(build):
    def build_das(**options):
        settings = {"contrast_samples": 1, "contrast_every": 1, "contrast_dropout": 0.3, "temperature": 0.5}
        overrides = [f"method.{name}={value}" for name, value in (settings | options).items()]
        run = build("das", "model=tiny_roberta", *overrides)
        soft = run.module.eval().soft
        soft.set_importance(torch.rand(len(soft.importance), generator=torch.Generator().manual_seed(1)))
        return run.module, run.batches()[0]

    return build_das


@pytest.mark.parametrize("text", ["uncorrupted", "corrupted"])
def test_the_term_contrasts_the_three_passes(text, das):
    module, batch = das(contrast=2, contrast_text=text)
    hidden = torch.randn(*batch["input_ids"].shape, 32, requires_grad=True)
    text_batch = batch if text == "corrupted" else module.objective.restore(batch)
    mean = lambda: module.model.roberta(input_ids=text_batch["input_ids"]).last_hidden_state.mean(1)  # noqa: E731
    torch.manual_seed(5)
    term = module.contrast(batch, hidden)
    torch.manual_seed(5)
    with set_dropout(module.model, 0.3):
        anchor = hidden.mean(1) if text == "corrupted" else mean()
        positive = mean()
        with gate_units(module.soft.groups, module.soft.gates()):
            negative = mean()
    expected = 2 * contrastive(anchor, positive, negative, temperature=0.5)
    assert term.item() == pytest.approx(expected.item(), rel=1e-4) and "attention_mask" not in batch
    term.backward()
    assert (hidden.grad is not None) == (text == "corrupted")
    assert module.model.roberta.encoder.layer[0].output.dense.weight.grad.any()


def test_in_some_steps_only_it_weighs_as_much_more(das):
    def terms(module, step):
        module._trainer = SimpleNamespace(global_step=step)
        torch.manual_seed(5)
        return module.losses(batch)

    plain, batch = das()
    rare, _ = das(contrast_every=3)
    expected = terms(plain, 0)
    rare_terms = terms(rare, 0)
    assert rare_terms["contrast"].item() == pytest.approx(3 * expected["contrast"].item())
    assert rare_terms["lm"] == expected["lm"]
    assert [step for step in range(7) if "contrast" in terms(rare, step)] == [0, 3, 6]


@pytest.mark.parametrize(("share", "contrasted"), [(0.5, 3), (0.2, 1), (0.21, 2), (1, 5)])
def test_a_share_of_the_samples_is_rounded_up(share, contrasted, das, monkeypatch):
    module, batch = das(contrast_samples=share)
    five = select_rows(batch, range(5))
    counts = []

    def record_shapes(anchors, positives, negatives, *, temperature):
        counts.extend(len(vectors) for vectors in (anchors, positives, negatives))
        return contrastive(anchors, positives, negatives, temperature=temperature)

    monkeypatch.setattr(contrasting, "contrastive", record_shapes)
    module.contrast(five, torch.randn(*five["input_ids"].shape, 32))
    assert counts == [contrasted] * 3


def test_the_proxys_passes_have_the_dropout_of_the_option(build):
    run = build("das", *ROBERTA, "method.proxy_dropout=0.37", "method.contrast=0")
    module = run.module
    rates = []

    def record_rates(model, args, inputs):
        if len(inputs["input_ids"]) > 16:  # the two passes of the proxy are one batch of twice the size
            rates.append({part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)})

    module.model.register_forward_pre_hook(record_rates, with_kwargs=True)
    run.learn(0)
    assert rates and all(pass_rates == {0.37} for pass_rates in rates)
