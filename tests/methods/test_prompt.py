"""Prompt tuning: what learns, whose prompt scores a text, and what is kept and exported."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import cpt.adapters.export
from cpt.adapters.domain_store import BASE
from cpt.data.sampler import EvalSubset
from tests.support.making import DROPOUT, ORDER, made, same, state_beside_the_model
from tests.support.running import encoded, token_nll

N, D = 4, 32
FEW = [f"method.tokens={N}", "trainer.steps=3", "optim.lr=0.03"]


@pytest.fixture
def prompt(small):
    return lambda *overrides: made(small("method=prompt", ORDER, *FEW, *overrides))


@pytest.fixture
def causal(small_gpt2):
    return lambda *overrides: made(small_gpt2("method=prompt", ORDER, *FEW, *overrides))


def kept(work, domain: int) -> torch.Tensor:
    """A domain's prompt, [n, D]."""
    [values] = work.module.bank.weights(domain).values()
    return values.clone()


def rest(work) -> dict[str, torch.Tensor]:
    """The model's weights apart from the prompt."""
    return {name: value for name, value in work.weights().items() if name != work.module.name}


def scored(work, text: str) -> list[dict[str, torch.Tensor]]:
    """The batches of a held-out text."""
    held_out = {text: work.data.held_out[text]}
    rows = {text: np.arange(len(held_out[text]))}
    options = {"objective": work.data.objective, "batch_size": 16, "purpose": "score"}
    batches = EvalSubset(held_out, rows, **options)
    return [batches[number] for number in range(len(batches))]


def test_the_prompt_learns_and_nothing_else_changes(prompt):
    work = prompt("optim.weight_decay=0.5", *DROPOUT)
    before, start = rest(work), work.module.prompt.detach().clone()
    work.learn(0)
    assert same(rest(work), before)
    assert [n for n, p in work.module.model.named_parameters() if p.requires_grad] == [work.module.name]
    assert ((work.module.prompt - start).abs().amax(1) > 1e-3).all()


@pytest.mark.parametrize("made_of", ["prompt", "causal"])
def test_the_first_output_sees_the_prompt(made_of, request):
    """In a causal model it is the prompt's last place, which predicts the second token."""
    work = request.getfixturevalue(made_of)()
    ids = scored(work, "law")[0]["input_ids"]
    model, base = work.module.model, work.module.model_for(BASE)
    assert not torch.equal(model(ids).logits[:, 0], base(ids).logits[:, 0])


@pytest.mark.parametrize("per_domain", [True, False])
@pytest.mark.parametrize("made_of", ["prompt", "causal"])
def test_before_it_has_learned_it_is_the_base_bit_for_bit(made_of, per_domain, request, small, small_gpt2):
    work = request.getfixturevalue(made_of)(f"method.per_domain={per_domain}")
    ncl = made({"prompt": small, "causal": small_gpt2}[made_of]("method=ncl", ORDER))
    batch = scored(ncl, "law")[0]
    for one, other in zip(work.module.nll(batch, 0), ncl.module.nll(batch, 0), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(token_nll(work.module.model, batch), ncl.module.nll(batch, 0)[0])


def test_each_domain_is_scored_by_its_own_prompt(prompt):
    work = prompt()
    batch, base = scored(work, "law")[0], rest(work)
    first = work.module.nll(batch, BASE)[0]
    for number in (0, 1):
        work.learn(number)
    for domain in (0, 1):
        weights = {work.module.name: kept(work, domain)}
        assert torch.equal(
            work.module.nll(batch, domain)[0], token_nll(work.module.model, batch, weights=weights)
        )
    assert not torch.equal(work.module.nll(batch, 0)[0], work.module.nll(batch, 1)[0])
    assert torch.equal(work.module.nll(batch, BASE)[0], first)
    assert same(rest(work), base)
    assert work.module.needs_domain
    assert work.module.used(0) == {0: 1.0} and work.module.used(1) == {1: 1.0}
    assert work.module.used(BASE) == {BASE: 1.0}


def test_a_prompt_that_has_learned_stays(prompt):
    work = prompt()
    work.learn(0)
    first = kept(work, 0)
    assert torch.equal(first, work.module.prompt)
    work.learn(1)
    assert torch.equal(kept(work, 0), first)
    assert torch.equal(kept(work, 1), work.module.prompt)
    assert not torch.equal(kept(work, 1), first)


class Start(Callback):
    """Notes the prompt before a domain's first step."""

    def on_train_batch_start(self, trainer, module, *args):
        if trainer.global_step == 0:
            self.prompt = module.prompt.detach().clone()


@pytest.mark.parametrize(
    ("options", "carried"),
    [
        (["method.start=vocabulary"], False),
        (["method.start=previous"], True),
        (["method.start=vocabulary", "method.per_domain=false"], True),
    ],
)
def test_where_a_prompt_begins(options, carried, prompt):
    work = prompt(*options)
    starts = [Start(), Start()]
    work.learn(0, starts[0])
    last = work.module.prompt.detach().clone()
    work.learn(1, starts[1])
    rows = work.module.model.get_input_embeddings().weight
    from_rows = [(each.prompt[:, None] == rows).all(-1).any(1).all().item() for each in starts]
    assert from_rows == [True, not carried]
    assert torch.equal(starts[1].prompt, last) == carried
    assert not torch.equal(starts[0].prompt, starts[1].prompt)


def test_the_draw_is_that_of_seed_and_domain_in_every_process(prompt, monkeypatch):
    """Gradients are averaged over processes, and parameters are not sent again."""
    found = []
    for rank, seed in ((0, 0), (1, 0), (0, 1)):
        work, start = prompt(f"seed={seed}", "method.start=vocabulary"), Start()
        monkeypatch.setattr(type(work.module), "global_rank", rank)
        work.learn(0, start)
        monkeypatch.undo()
        found.append(start.prompt)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_one_prompt_for_all_domains(prompt):
    work = prompt("method.per_domain=false")
    batch = scored(work, "law")[0]
    base = work.module.nll(batch, 1)[0]
    for number in (0, 1):
        work.learn(number)
        assert work.module.bank.domains == [0]
        found = token_nll(work.module.model, batch)
        for domain in (BASE, 0, 1):
            assert torch.equal(work.module.nll(batch, domain)[0], found)
        assert not torch.equal(found, base)
    assert not work.module.needs_domain and work.module.used(0) == {}
    assert torch.equal(work.module.model_for(1).get_parameter(work.module.name), work.module.prompt)


def test_memory_grows_by_one_prompt_per_domain(prompt):
    work = prompt()
    before = state_beside_the_model(work.module)
    assert before == 0
    for domain in range(12):
        work.module.bank.keep(work.module.model, domain)
        assert state_beside_the_model(work.module) == (domain + 1) * N * D * 4


@pytest.mark.parametrize("made_of", ["prompt", "causal"])
def test_a_backbone_has_the_domains_prompt_and_is_a_copy(made_of, request):
    work = request.getfixturevalue(made_of)()
    base = work.module.model_for(BASE)
    for number in (0, 1):
        work.learn(number)
    batch = scored(work, "law")[0]
    for domain in (0, 1):
        model = work.module.model_for(domain)
        model.eval()
        assert torch.equal(token_nll(model, batch), work.module.nll(batch, domain)[0])
        assert model(batch["input_ids"]).logits.shape == (*batch["input_ids"].shape, model.config.vocab_size)
        assert encoded(model, batch).shape == (*batch["input_ids"].shape, D)
        assert model.get_parameter(work.module.name).requires_grad
    state = {name: value.clone() for name, value in work.module.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert same(state, work.module.state_dict())
    assert torch.equal(token_nll(base.eval(), batch), work.module.nll(batch, BASE)[0])


@pytest.mark.parametrize("made_of", ["prompt", "causal"])
def test_the_exported_model_is_the_learned_one(made_of, request, tmp_path):
    work = request.getfixturevalue(made_of)()
    for number in (0, 1):
        work.learn(number)
    expression = work.module.export(tmp_path, ["law", "food"])
    assert expression == f'cpt.adapters.export.load("{tmp_path}", domain="food")'
    batch = scored(work, "law")[0]
    for domain, name in enumerate(["law", "food"]):
        found = token_nll(cpt.adapters.export.load(tmp_path, domain=name), batch)
        assert torch.equal(found, work.module.nll(batch, domain)[0])
    plain = type(work.module.model).from_pretrained(tmp_path)
    assert torch.equal(token_nll(plain, batch), work.module.nll(batch, BASE)[0])


@pytest.mark.parametrize("importance", ["output", "gradient"])
def test_a_mask_over_linear_maps_has_nothing_to_do(importance, prompt, caplog):
    masked, plain = prompt("mask=migu", f"mask.migu.importance={importance}"), prompt()
    for work in (masked, plain):
        work.learn(0)
    assert "nothing to mask" in caplog.text
    assert torch.equal(masked.module.prompt, plain.module.prompt)
