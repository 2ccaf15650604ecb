"""ELLE: growth keeps what is known, recovery is of past text, each text is read with its domain's prompt."""

import pytest
import torch
from torch import Tensor

import cpt.adapters.export
from cpt.core.randomness import torch_seed
from cpt.models.units import find_sublayers
from tests.support.method_fixtures import StepRecorder

THREE = "order=[law,food,space]"


@pytest.fixture
def elle(build):
    nothing = ["neurons=1", "heads=0", "layers=0", "hidden=1", "recovery=0", "prompt=0"]
    return lambda *overrides, **arguments: build(
        "elle", *(f"method.{option}" for option in nothing), *overrides, **arguments
    )


def enter_domain(run, number: int) -> None:
    run.data.enter(run.data.domains[number])
    run.module.setup_stage(run.data.domains[number])


GROWING = [("masked", "neurons=1.5"), ("masked", "layers=1"), ("masked", "hidden=2"), ("causal", "hidden=2")]
GROWING += [("both", "heads=2"), ("both", "hidden=2")]


@pytest.mark.parametrize(("family", "part"), GROWING)
def test_what_is_known_stays_when_the_model_grows(family, part, elle):
    def loss(run) -> Tensor:
        with torch.no_grad():
            return run.module.eval().nll(run.importance_batches()[0], 0)[0]

    run = elle(f"method.{part}", "trainer.steps=3", "optim.lr=0.02", on=family)
    run.learn(0)
    before = loss(run)
    count = run.module.model.num_parameters()
    enter_domain(run, 1)
    run.data.enter(run.data.domains[0])
    assert run.module.model.num_parameters() > count
    assert (loss(run) - before).abs().max() < 1e-5 > run.module.diagnostics()["elle/moved"]
    run.learn(1)
    run.data.enter(run.data.domains[0])
    assert (loss(run) - before).abs().max() > 1e-3


def count_steps(optimizer) -> set[int]:
    return {int(state["step"]) for state in optimizer.state.values()}


def record_optimizer(module) -> tuple[set[int], float]:
    optimizer = module.trainer.optimizers[0]
    return count_steps(optimizer), optimizer.param_groups[0]["lr"]


def test_a_new_optimizer_its_schedule_and_a_branch_begin_behind_recovery(elle):
    options = ["method.recovery=0.5", "trainer.steps=4", "lr_scheduler.warmup_ratio=0"]
    carry = "optim.state_across_domains=moments"

    def learn_two_domains(*overrides):
        run = elle(*options, *overrides)
        assert [run.data.steps(domain) for domain in run.data.domains] == [4, 6]
        watch = StepRecorder(record_optimizer)
        run.learn(0)
        run.learn(1, watch)
        steps, rates = zip(*(record for _, record in watch.seen), strict=True)
        return run, list(steps), list(rates)

    run, steps, rates = learn_two_domains()
    _, carried_steps, _ = learn_two_domains(carry)
    assert steps == [{1}, {2}, {1}, {2}, {3}, {4}]
    assert carried_steps == [{5}, {6}, {7}, {8}, {9}, {10}]

    # after each step the rate of the next: of two of recovery, then of four of the domain
    peak = run.plan.optim.arguments["lr"]
    assert rates == pytest.approx([peak / 2, peak, peak * 3 / 4, peak / 2, peak / 4, 0])

    run = elle(*options, carry, "lr_scheduler=wsd", "lr_scheduler.decay=0.5")
    run.learn(0)
    enter_domain(run, 1)
    assert run.module.branch_step == 2 + 3


def learn_recorded(run) -> tuple[list[list[int]], list[Tensor]]:
    """The domains of the rows, and the text, of each batch that three domains are learned on."""
    batches = []
    losses = run.module.losses

    def record_batch(batch):
        batches.append(batch)
        return losses(batch)

    run.module.losses = record_batch
    for number in range(3):
        run.learn(number)
    domains = [batch["domains"].tolist() for batch in batches]
    texts = [run.module.objective.restore(batch)["input_ids"] for batch in batches]
    return domains, texts


def test_recovery_trains_on_past_text_and_leaves_the_domain_as_it_was(elle, build):
    _, plain_texts = learn_recorded(build("ncl", THREE))
    domains, texts = learn_recorded(elle("method.recovery=0.5", THREE))
    assert domains[6:9] == [[0] * 8] * 3 and len(domains) == 6 + 9 + 9
    assert all(sorted(row_domains) == [0] * 4 + [1] * 4 for row_domains in domains[15:18])
    domain_texts = texts[:6] + texts[9:15] + texts[18:]
    assert all(torch.equal(*pair) for pair in zip(plain_texts, domain_texts, strict=True))


@pytest.mark.parametrize("family", ["masked", "both"])
def test_each_row_is_read_with_its_domains_prompt(family, elle):
    run = elle("method.prompt=2", THREE, "replay=past", on=family)
    run.learn(0)
    run.learn(1)
    enter_domain(run, 2)
    module = run.module.eval()
    for number, prompt in enumerate(module.prompts):
        prompt.data.mul_(1 + 3 * number)
    [batch] = run.batches()
    batch["domains"] = torch.tensor([0, 1, 2, -1] * 2)
    with module.prompting.reading(module.model, batch["domains"]):
        nll = module.objective.nll(module.model, batch)

    sums = set()
    for row, domain in enumerate(batch["domains"].tolist()):
        # as the exported form reads it: one prompt for all rows
        expected = module.objective.nll(module.model_for(2 if domain == -1 else domain).eval(), batch)
        is_of_row = batch["rows"] == row
        torch.testing.assert_close(nll[is_of_row], expected[is_of_row], rtol=1e-5, atol=1e-5)
        sums.add(round(float(expected.detach().sum()), 4))
    assert len(sums) == 3

    nll[batch["domains"][batch["rows"]] == 1].sum().backward()
    assert [bool(prompt.grad.any()) for prompt in module.prompts] == [False, True, False]


def test_every_stage_is_exported_in_its_size(elle, tmp_path):
    run = elle("method.neurons=1.25", "method.layers=1", "method.hidden=[2,1]", "method.prompt=2")
    names = []
    [batch] = run.batches()
    for number, stage in enumerate(run.data.domains):
        run.module.expand_to(stage)
        run.module.activate(number)
        names.append(stage.name)
        run.module.export(tmp_path, names)
        for domain, name in enumerate(names):
            loaded_nll = run.module.objective.nll(cpt.adapters.export.load(tmp_path, domain=name), batch)
            torch.testing.assert_close(loaded_nll, run.module.eval().nll(batch, domain)[0])


def test_what_it_draws_is_a_function_of_seed_and_stage(build):
    def grown(*options: str) -> Tensor:
        run = build("elle", *options)
        torch.manual_seed(torch_seed("anything", *options))
        for number in range(2):
            enter_domain(run, number)
        return find_sublayers(run.module.model, ("neurons",))[0].out.module.weight.detach().clone()

    first = grown()
    assert torch.equal(first, grown())
    assert not any(torch.equal(first, grown(option)) for option in ("seed=7", "order=[food,law]"))
