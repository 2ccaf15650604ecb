"""ELLE: growth keeps what is known, recovery is of past text, each text is read with its domain's prompt."""

import pytest
import torch
from torch import Tensor

import cpt.adapters.export
from cpt.core.randomness import key
from cpt.models.units import find_sublayers
from tests.support.method_fixtures import StepRecorder

THREE = "order=[law,food,space]"


@pytest.fixture
def elle(build):
    nothing = ["neurons=1", "heads=0", "layers=0", "hidden=1", "recovery=0", "prompt=0"]
    return lambda *overrides, **how: build("elle", *(f"method.{each}" for each in nothing), *overrides, **how)


def entered(work, number: int) -> None:
    work.data.enter(work.data.domains[number])
    work.module.setup_stage(work.data.domains[number])


GROWING = [("masked", "neurons=1.5"), ("masked", "layers=1"), ("masked", "hidden=2"), ("causal", "hidden=2")]
GROWING += [("both", "heads=2"), ("both", "hidden=2")]


@pytest.mark.parametrize(("family", "part"), GROWING)
def test_what_is_known_stays_when_the_model_grows(family, part, elle):
    def loss(work) -> Tensor:
        with torch.no_grad():
            return work.module.eval().nll(work.importance_batches()[0], 0)[0]

    work = elle(f"method.{part}", "trainer.steps=3", "optim.lr=0.02", on=family)
    work.learn(0)
    before, count = loss(work), work.module.model.num_parameters()
    entered(work, 1)
    work.data.enter(work.data.domains[0])
    assert work.module.model.num_parameters() > count
    assert (loss(work) - before).abs().max() < 1e-5 > work.module.diagnostics()["elle/moved"]
    work.learn(1)
    work.data.enter(work.data.domains[0])
    assert (loss(work) - before).abs().max() > 1e-3


def test_a_new_optimizer_its_schedule_and_a_branch_begin_behind_recovery(elle):
    given = ["method.recovery=0.5", "trainer.steps=4", "lr_scheduler.warmup_ratio=0"]
    counts = lambda optimizer: {int(state["step"]) for state in optimizer.state.values()}  # noqa: E731
    seen = []
    for carried in ([], ["optim.state_across_domains=moments"]):
        work = elle(*given, *carried)
        assert [work.data.steps(domain) for domain in work.data.domains] == [4, 6]
        watch = StepRecorder(lambda m: (counts(o := m.trainer.optimizers[0]), o.param_groups[0]["lr"]))
        work.learn(0)
        work.learn(1, watch)
        seen.append([each for _, each in watch.seen])
    new, kept = seen
    assert [each for each, _ in new] == [{1}, {2}, {1}, {2}, {3}, {4}]
    assert [each for each, _ in kept] == [{5}, {6}, {7}, {8}, {9}, {10}]
    # after each step the rate of the next: of two of recovery, then of four of the domain
    peak = work.plan.optim.arguments["lr"]
    assert [rate for _, rate in new] == pytest.approx([peak / 2, peak, peak * 3 / 4, peak / 2, peak / 4, 0])
    work = elle(*given, *carried, "lr_scheduler=wsd", "lr_scheduler.decay=0.5")
    work.learn(0)
    entered(work, 1)
    assert work.module.branch_step == 2 + 3


def test_recovery_is_of_past_text_and_the_domain_is_what_it_was(elle, build):
    seen = []
    for work in (build("ncl", THREE), elle("method.recovery=0.5", THREE)):
        steps = []
        losses = work.module.losses
        work.module.losses = lambda batch, losses=losses, steps=steps: steps.append(batch) or losses(batch)
        for number in range(3):
            work.learn(number)
        texts = [work.module.objective.restore(batch)["input_ids"] for batch in steps]
        seen.append(([batch["domains"].tolist() for batch in steps], texts))
    (_, plain), (domains, texts) = seen
    assert domains[6:9] == [[0] * 8] * 3 and len(domains) == 6 + 9 + 9
    assert all(sorted(each) == [0] * 4 + [1] * 4 for each in domains[15:18])
    own = texts[:6] + texts[9:15] + texts[18:]
    assert all(torch.equal(first, second) for first, second in zip(plain, own, strict=True))


@pytest.mark.parametrize("family", ["masked", "both"])
def test_each_row_is_read_with_its_domains_prompt(family, elle):
    work = elle("method.prompt=2", THREE, "replay=past", on=family)
    work.learn(0)
    work.learn(1)
    entered(work, 2)
    for place, prompt in enumerate(work.module.prompts):
        prompt.data.mul_(1 + 3 * place)
    [batch], module, apart = work.batches(), work.module.eval(), set()
    batch["domains"] = torch.tensor([0, 1, 2, -1] * 2)
    with module.prompting.reading(module.model, batch["domains"]):
        found = module.objective.nll(module.model, batch)
    for row, domain in enumerate(batch["domains"].tolist()):
        # as the exported form reads it: one prompt for all rows
        expected = module.objective.nll(module.model_for(2 if domain == -1 else domain).eval(), batch)
        own = batch["rows"] == row
        torch.testing.assert_close(found[own], expected[own], rtol=1e-5, atol=1e-5)
        apart.add(round(float(expected.detach().sum()), 4))
    assert len(apart) == 3
    found[batch["domains"][batch["rows"]] == 1].sum().backward()
    grads = [None if each.grad is None else bool(each.grad.any()) for each in module.prompts]
    assert grads == [False, True, False]


def test_every_stage_is_exported_in_its_size(elle, tmp_path):
    work, names = elle("method.neurons=1.25", "method.layers=1", "method.hidden=[2,1]", "method.prompt=2"), []
    [batch] = work.batches()
    for number, stage in enumerate(work.data.domains):
        work.module.expand_to(stage)
        work.module.activate(number)
        names.append(stage.name)
        work.module.export(tmp_path, names)
        for domain, name in enumerate(names):
            found = work.module.objective.nll(cpt.adapters.export.load(tmp_path, domain=name), batch)
            torch.testing.assert_close(found, work.module.eval().nll(batch, domain)[0])


def test_what_it_draws_is_a_function_of_seed_and_stage(build):
    def grown(*options: str) -> Tensor:
        work = build("elle", *options)
        torch.manual_seed(key("anything", *options) % 2**63)
        for number in range(2):
            entered(work, number)
        return find_sublayers(work.module.model, ("neurons",))[0].out.module.weight.detach().clone()

    first = grown()
    assert torch.equal(first, grown())
    assert not any(torch.equal(first, grown(other)) for other in ("seed=7", "order=[food,law]"))
