"""ELLE: growth keeps what is known, recovery is of past text, each text is read with its domain's prompt."""

import json
import logging

import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import cpt.adapters.export
from cpt.core.randomness import key
from cpt.gradient_masks.migu import magnitudes
from cpt.models.units import blocks, sublayers
from tests.methods.test_contract import bits
from tests.support.killing import KilledError
from tests.support.making import ORDER, Watch, made

ALONE = {  # each part by itself
    "neurons": ["method.neurons=1.5"],
    "heads": ["method.heads=2"],
    "layers": ["method.layers=1"],
    "hidden": ["method.hidden=2"],
    "recovery": ["method.recovery=0.5"],
    "prompt": ["method.prompt=2"],
}
NEUTRAL = ["neurons=1", "heads=0", "layers=0", "hidden=1", "recovery=0", "prompt=0"]
NOTHING = ["method=elle", *(f"method.{each}" for each in NEUTRAL)]
THREE = "order=[law,food,space]"


def width(work) -> int:
    return sublayers(work.module.model, ("neurons",))[0].count


def loss(work, domain: int = 0) -> Tensor:
    batch = work.probe()[0]
    with torch.no_grad():
        return work.module.eval().nll(batch, domain)[0]


def entered(work, number: int) -> None:
    work.data.enter(work.data.domains[number])
    work.module.setup_stage(work.data.domains[number])


GROWING = [
    ("small", "neurons"), ("small", "layers"), ("small", "hidden"), ("small_gpt2", "neurons"),
    ("small_gpt2", "layers"), ("small_gpt2", "hidden"), ("small_t5", "neurons"), ("small_t5", "heads"),
    ("small_t5", "layers"), ("small_t5", "hidden"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "part"), GROWING)
def test_what_is_known_stays_when_the_model_grows(size, part, request):
    options = [*NOTHING, *ALONE[part], ORDER, "trainer.steps=3", "optim.lr=0.02"]
    work = made(request.getfixturevalue(size)(*options))
    work.learn(0)
    before, count = loss(work), work.module.model.num_parameters()
    entered(work, 1)
    work.data.enter(work.data.domains[0])
    assert work.module.model.num_parameters() > count
    assert (loss(work) - before).abs().max() < 1e-5
    assert work.module.diagnostics()["elle/moved"] < 1e-5
    work.learn(1)
    work.data.enter(work.data.domains[0])
    assert (loss(work) - before).abs().max() > 1e-3


def test_a_line_tells_how_far_growing_has_moved_the_loss(small, caplog):
    roberta = ["model=tiny_roberta", "model.length=16", "model.config.hidden_size=32", ORDER]
    roberta += ["model.config.intermediate_size=48", "model.config.num_attention_heads=2"]
    roberta += ["model.config.num_hidden_layers=2", "model.base.steps=40", "model.vocabulary=300"]
    for options, told in (
        (["method.neurons=2"], "food: grown from "),
        ([*roberta, "method.neurons=2"], "exact: the loss of a token moves by "),
        ([*roberta, "method.layers=1"], "not exact, as further blocks are not where a norm follows each sum"),
    ):
        work = made(small(*NOTHING, ORDER, "trainer.steps=1", *options))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            work.learn(0)
            assert told not in caplog.text
            work.learn(1)
        assert told in caplog.text, caplog.text


def test_a_new_optimizer_and_its_schedule_begin_behind_recovery(small):
    work = made(small(*NOTHING, "method.recovery=0.5", ORDER, "trainer.steps=4", "schedule.warmup=0"))
    assert [work.data.steps(domain) for domain in work.data.domains] == [4, 6]
    watch = Watch(
        lambda module: (
            module.trainer.optimizers[0].param_groups[0]["lr"],
            {int(state["step"]) for state in module.trainer.optimizers[0].state.values()},
        )
    )
    work.learn(0)
    work.learn(1, watch)
    rates = [rate for _, (rate, _) in watch.seen]
    assert [step for step, _ in watch.seen] == [1, 2, 3, 4, 5, 6]
    assert [made for _, (_, made) in watch.seen] == [{1}, {2}, {1}, {2}, {3}, {4}]
    peak = work.plan.optim.arguments["lr"]
    # After each step the rate of the next: of two of recovery, then of four of the domain.
    assert rates == pytest.approx([peak / 2, peak, peak * 3 / 4, peak / 2, peak / 4, 0])


def test_carried_moments_go_on_through_recovery(small):
    work = made(small(*NOTHING, "method.recovery=0.5", ORDER, "trainer.steps=4", "optim.carry=moments"))
    watch = Watch(lambda module: {int(s["step"]) for s in module.trainer.optimizers[0].state.values()})
    work.learn(0)
    work.learn(1, watch)
    assert [made for _, made in watch.seen] == [{5}, {6}, {7}, {8}, {9}, {10}]


class Seen(Callback):
    def __init__(self) -> None:
        self.domains, self.ids = [], []

    def on_train_batch_start(self, trainer, module, batch, number):
        self.domains.append(batch["domains"].tolist())
        self.ids.append(module.objective.restored(batch)["input_ids"].clone())


def test_recovery_is_of_past_text_and_the_domain_is_what_it_was(small):
    plain, work = made(small("method=ncl", THREE)), made(small(*NOTHING, "method.recovery=0.5", THREE))
    one, other = Seen(), Seen()
    for number in range(3):
        plain.learn(number, one)
        work.learn(number, other)
    assert len(one.domains) == 18 and len(other.domains) == 6 + 9 + 9
    assert other.domains[6:9] == [[0] * 8] * 3
    for domains in other.domains[15:18]:
        assert sorted(domains) == [0] * 4 + [1] * 4
    own = other.ids[:6] + other.ids[9:15] + other.ids[18:]
    assert all(torch.equal(first, second) for first, second in zip(one.ids, own, strict=True))


def test_recovery_draws_from_the_memory_of_replay(small):
    memory = ["replay=past", "replay.memory=6", "method.recovery=2", "trainer.steps=6"]
    work, seen = made(small(*NOTHING, THREE, *memory)), Seen()
    work.learn(0)
    work.learn(1)
    work.learn(2, seen)
    recovered = torch.cat(seen.ids[:12])
    kept = work.data.replay_pools(work.data.domains[2])[0]
    parts, rows, _ = kept.locate(np.arange(100))
    texts = list(kept.texts.values())
    known = {
        tuple(texts[part].ids(np.array([row]))[0].tolist()) for part, row in zip(parts, rows, strict=True)
    }
    assert len(recovered) == 96 and len(known) == 6
    assert {tuple(row) for row in recovered.tolist()} == known
    assert [len(set(each)) for each in seen.domains[:12]] == [2] * 12


def prompted(work, batch, domain: int) -> Tensor:
    """The loss of a batch as the exported form reads it: one prompt for all rows."""
    with torch.no_grad():
        return work.module.objective.nll(work.module.model_for(domain).eval(), batch)


@pytest.mark.parametrize("size", ["small", "small_gpt2", "small_t5"])
def test_each_row_is_read_with_its_domains_prompt(size, request):
    work = made(request.getfixturevalue(size)(*NOTHING, "method.prompt=2", THREE, "replay=past"))
    work.learn(0)
    work.learn(1)
    entered(work, 2)
    with torch.no_grad():
        for place, prompt in enumerate(work.module.prompts):
            prompt.mul_(1 + 3 * place)
    batch = next(iter(work.batches()))
    batch["domains"] = torch.tensor([0, 1, 2, -1] * 2)
    work.module.eval()
    with torch.no_grad(), work.module.prompting.reading(work.module.model, batch["domains"]):
        found = work.module.objective.nll(work.module.model, batch)
    apart = set()
    for row, domain in enumerate(batch["domains"].tolist()):
        own = batch["rows"] == row
        expected = prompted(work, batch, 2 if domain == -1 else domain)
        torch.testing.assert_close(found[own], expected[own], rtol=1e-5, atol=1e-5)
        apart.add(round(float(prompted(work, batch, domain).sum()), 4))
    assert len(apart) == 3
    found.sum()
    with work.module.prompting.reading(work.module.model, torch.tensor([1] * 8)):
        work.module.objective.nll(work.module.model, batch).sum().backward()
    grads = [None if each.grad is None else bool(each.grad.any()) for each in work.module.prompts]
    assert grads == [False, True, False]


def test_a_mask_counts_a_prompt_and_no_padding():
    output, present = torch.randn(2, 3 + 4, 5), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    counted = torch.cat([output[0, :6], output[1, :5]]).abs().sum(0)
    torch.testing.assert_close(magnitudes(output, present), counted)
    work = output[:, 3:].abs() * present[..., None]
    torch.testing.assert_close(magnitudes(output[:, 3:], present), work.sum((0, 1)))


@pytest.mark.parametrize(("options", "learning"), [([], [1]), (["replay=past"], [0, 1])])
def test_the_prompts_learn_whose_text_is_met(options, learning, small):
    work = made(small(*NOTHING, "method.prompt=2", ORDER, "optim.lr=0.02", "trainer.steps=3", *options))
    work.learn(0)
    before = work.module.prompts[0].detach().clone()
    entered(work, 1)
    drawn = work.module.prompts[1].detach().clone()
    work.learn(1)
    moved = [not torch.equal(*each) for each in zip((before, drawn), work.module.prompts, strict=True)]
    assert [place for place, has in enumerate(moved) if has] == learning


def test_text_that_is_not_learned_yet_is_read_with_the_latest_prompt(small):
    work = made(small(*NOTHING, "method.prompt=1", THREE, "trainer.steps=1"))
    part_of = work.module.prompting.part_of
    assert work.module.needs_domain and part_of(0) == -1
    work.learn(0)
    assert part_of(2) == part_of(-1) == part_of(0) == 0
    work.learn(1)
    assert [part_of(domain) for domain in (0, 1, 2, -1)] == [0, 1, 1, 1]
    batch = work.probe()[0]
    found, counts = work.module.eval().nll(batch, 0)
    torch.testing.assert_close(found.detach(), prompted(work, batch, 0))
    assert work.module.used(0) == {0: 1.0}
    assert (counts == 1).all() and (found.detach() - prompted(work, batch, 1)).abs().max() > 1e-6


class Dies(Callback):
    """When the model has grown for a stage, and nothing has been learned."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_start(self, trainer, module):
        if trainer.datamodule.domain.name == self.name:
            raise KilledError


BRANCH = ["optim.carry=moments", "schedule=wsd", "schedule.decay=0.5"]
KILLED = {"all": ["method.hidden=[2,1]"], "branched": BRANCH, "frozen": ["freeze.layers=1"]}


@pytest.mark.parametrize("kind", KILLED)
def test_killed_between_growing_and_the_first_step(kind, killing, small, start, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ["method=elle", THREE, "trainer.steps=3", "replay=past", *KILLED[kind]]
    start(small(*options), whole)
    for name in ("food", "space"):
        killing(Dies(name))
        with pytest.raises(KilledError):
            start(small(*options), killed)
    killing(None)
    start(small(*options), killed)
    assert bits(killed) == bits(whole)


def test_a_branch_grows_where_it_goes_on(small):
    """And not from the weights that its decay has ended with."""
    work = made(small(*NOTHING, "method.neurons=2", ORDER, "trainer.steps=4", "optim.lr=0.02", *BRANCH))
    work.learn(0)
    decayed = work.weights()
    work.module.trunk.restore(work.module.model)
    before = loss(work)
    work.module.model.load_state_dict(decayed, strict=False)
    assert (loss(work) - before).abs().max() > 1e-4
    work.module.expand_to(work.data.domains[1])
    work.module.begin_from_trunk()
    assert width(work) == 96 and (loss(work) - before).abs().max() < 1e-5


def test_every_stage_is_exported_in_its_size(small, start, tmp_path):
    options = small("method=elle", THREE, "trainer.steps=2", "keep_stages=true", "method.hidden=[2,1]")
    start(options, tmp_path)
    work, sizes = made(options), []
    for number in range(1, 4):
        work.module.expand_to(work.data.domains[number - 1])
        state = torch.load(tmp_path / "stages" / f"{number:03}.pt", weights_only=True)
        work.module.load_state_dict(state)
        folder = tmp_path / f"export{number}"
        work.module.export(folder, ["law", "food", "space"][:number])
        plain = transformers.AutoModelForMaskedLM.from_pretrained(folder)
        sizes.append((plain.config.hidden_size, plain.config.intermediate_size, len(blocks(plain))))
        batch = work.batches()[0]
        with torch.no_grad():
            for domain, name in enumerate(["law", "food", "space"][:number]):
                loaded = cpt.adapters.export.load(folder, domain=name)
                found = work.module.objective.nll(loaded, batch)
                torch.testing.assert_close(found, work.module.eval().nll(batch, domain)[0])
    assert sizes == [(32, 48, 2), (64, 60, 3), (64, 75, 4)]
    told = json.loads((tmp_path / "scores.json").read_text())
    assert sorted(told["trained"][1:]) == told["trained"][1:] and len({*told["trained"]}) == 4


def test_what_it_draws_is_a_function_of_seed_and_stage(small):
    def grown(*options: str) -> Tensor:
        work = made(small("method=elle", ORDER, *options))
        torch.manual_seed(key("anything", *options) % 2**63)
        for number in range(2):
            entered(work, number)
        return sublayers(work.module.model, ("neurons",))[0].out.module.weight.detach().clone()

    assert torch.equal(grown(), grown()) and not torch.equal(grown(), grown("seed=7"))
