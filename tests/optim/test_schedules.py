"""Learning-rate policies within and across domains: hand values, what happens at the edges."""

import math

import pytest
import torch
from torch import nn

from cpt.optim import schedulers
from cpt.optim.schedulers import WSD, Cosine, Infinite, Progress, ReciprocalRoot, Rewarm, Schedule
from cpt.optim.state import CarriedState, lay_out_moments, match_strides
from tests.support.method_fixtures import ORDER, StepRecorder, build_method_fixture, equal_tensors

STEPS = (10, 10, 20)
ACROSS = "lr_scheduler._target_=tests.support.hook_methods.Across"
BRANCHED = ["lr_scheduler=wsd", "lr_scheduler.warmup_ratio=0", "lr_scheduler.decay=0.5"]


def factor(schedule: Schedule, domain: int, step: int, steps: tuple[int, ...] = STEPS) -> float:
    before = sum(steps[:domain])
    return schedule(Progress(step, steps[domain], domain, len(steps), before + step, sum(steps), steps[0]))


def make_infinite(anneal: float, form: str = "cosine") -> Infinite:
    shape = {"warmup_ratio": 0.2, "cooldown": 0.6, "constant": 0.5, "final": 0.05, "annealed": "last"}
    return Infinite(**shape, form=form, anneal=anneal)


FALLEN = (1 / math.sqrt(6) - 1) / (1 / math.sqrt(11) - 1)
TENTH = {"warmup_ratio": 0.1, "decay": 0.2, "final": 0.1}
ROOT = {"warmup_ratio": 0.4, "cooldown": 0.2, "final": 0.1}
PEAKS, AGAIN = ({"warmup_ratio": 0.2, "final": 0.1, "peaks": peaks} for peaks in ([1, 0.5], None))
BY_ROOT = {(0, 0): 0.25, (0, 3): 1, (0, 7): 0.9 * math.sqrt(0.5) + 0.1, (0, 9): 0.1 + 0.45 * math.sqrt(4 / 9)}
STABLE = {(0, 0): 0.5, (0, 1): 1, (0, 8): 1}


@pytest.mark.parametrize(("schedule", "expected"), [
    (schedulers.Linear(warmup_ratio=0.2), {(0, 0): 1 / 3, (0, 2): 1, (0, 6): 0.5, (0, 10): 0, (1, 6): 0.5}),
    (Cosine(warmup_ratio=0.2, final=0.1), {(0, 1): 2 / 3, (0, 6): 0.55, (0, 10): 0.1, (1, 6): 0.55}),
    (schedulers.Constant(warmup_ratio=0.2), {(0, 0): 1 / 3, (0, 2): 1, (0, 9): 1, (1, 0): 1 / 3}),
    (Rewarm(**PEAKS), {(0, 2): 1, (1, 0): 1 / 6, (1, 2): 0.5, (1, 6): 0.275, (2, 12): 0.275}),
    (Rewarm(**AGAIN), {(0, 2): 1, (1, 2): 1, (2, 12): 0.55}),
    (schedulers.Once(warmup_ratio=0.1, final=0.1), {(0, 0): 0.2, (0, 4): 1, (2, 2): 0.55, (2, 20): 0.1}),
    (schedulers.Decayed(warmup_ratio=0.2, final=0.25), {(0, 2): 1, (0, 6): 0.625, (2, 19): 0.25}),
    (schedulers.Autoregressive(warmup_ratio=0.2, final=0.1), {(1, 2): 0.55, (1, 6): 0.325, (2, 4): 0.55}),
    (make_infinite(0), {(0, 0): 1 / 3, (0, 2): 1, (0, 5): 0.75, (0, 8): 0.5, (1, 0): 0.5, (2, 19): 0.5}),
    (make_infinite(0, "inverse_square_root"), {(0, 5): 1 - 0.5 * FALLEN, (0, 8): 0.5, (2, 19): 0.5}),
    (make_infinite(0.2), {(0, 5): 0.75, (1, 9): 0.5, (2, 16): 0.5, (2, 18): 0.5 * 0.1**0.5}),
    (WSD(**TENTH, form="root", branched=False), STABLE | {(0, 9): 1 - 0.9 * math.sqrt(0.5), (1, 0): 0.5}),
    (WSD(**TENTH, form="linear", branched=True), STABLE | {(0, 9): 0.55, (1, 0): 1, (1, 9): 0.55}),
    (ReciprocalRoot(**ROOT, across=False), BY_ROOT | {(1, 0): 0.25}),
    (ReciprocalRoot(**ROOT, across=True), BY_ROOT | {(1, 0): 0.9 * math.sqrt(4 / 11) + 0.1}),
])  # fmt: skip
def test_factors_by_hand(schedule, expected):
    assert {at: factor(schedule, *at) for at in expected} == pytest.approx(expected)


def test_a_branch_begins_where_the_decay_does():
    options = {"warmup_ratio": 0.0, "cooldown": 0.1, "constant": 0.5, "form": "cosine", "final": 0.1}
    stable = WSD(warmup_ratio=0.0, decay=0.5, form="root", final=0.1, branched=True)
    for schedule in (stable, Infinite(**options, anneal=0.5, annealed="each")):
        assert schedule.branches and schedule.branch_step(6) == 4
        assert [factor(schedule, 1, step, (6, 6)) < 0.5 for step in range(6)] == [False] * 4 + [True] * 2


def counts(module: object) -> set[float]:
    return {state["step"].item() for state in module.trainer.optimizers[0].state.values()}


@pytest.mark.parametrize("option", [ACROSS, "optim.state_across_domains=all"])
def test_all_that_is_carried_makes_one_domain_of_two(option, small):
    watch = StepRecorder(lambda module: module.trainer.optimizers[0].param_groups[0]["lr"])
    run = build_method_fixture(small(ORDER, option, "optim.lr=1", "lr_scheduler.warmup_ratio=0"))
    for number in (0, 1):
        run.learn(number, watch)
    assert [rate for _, rate in watch.seen] == pytest.approx([1 - step / 12 for step in range(1, 13)])
    with pytest.raises(ValueError, match=r"^optim\.state_across_domains=all is invalid: lr_scheduler="):
        build_method_fixture(small(ORDER, *BRANCHED, "optim.state_across_domains=all"))


def test_the_next_domain_goes_on_with_the_weights_before_the_branch(small):
    options = ["optim.state_across_domains=moments", "trainer.accumulate_grad_batches=2"]
    run = build_method_fixture(small(ORDER, *BRANCHED, *options))
    first_watch = StepRecorder(lambda module: (run.weights(), counts(module)))
    second_watch = StepRecorder(counts)
    run.learn(0, first_watch)
    # after the fourth step: steps 0 to 3 are at the peak, 6 * 0.5 = 3 of them before x = 0
    weights, steps = [record for step, record in first_watch.seen if step == 4][-1]
    assert equal_tensors(run.module.weights_before_decay.named(), weights)
    assert not equal_tensors(run.weights(), weights)

    starts = []
    run.module.before_domain = lambda importance_batches: starts.append(run.weights())
    run.learn(1, second_watch)
    assert equal_tensors(starts[0], weights) and steps == {4.0} and second_watch.seen[1][1] == {5.0}


def copy_moments(module) -> dict[str, torch.Tensor]:
    state = module.trainer.optimizers[0].state
    return {name: state[parameter]["exp_avg"].clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("carry", ["moments", "none"])
def test_the_moments_carried_are_those_of_the_domain_before(carry, small):
    options = [f"optim.state_across_domains={carry}", "trainer.gradient_clip_val=null"]
    run = build_method_fixture(small(ORDER, *options))
    run.learn(0)
    before = copy_moments(run.module)
    first_gradients = {}

    def record_gradients(optimizer) -> None:
        for name, parameter in run.module.named_parameters():
            first_gradients.setdefault(name, parameter.grad.clone())

    run.module.transform_gradients = record_gradients
    watch = StepRecorder(lambda module: (copy_moments(module), counts(module)))
    run.learn(1, watch)
    moments, steps = watch.seen[0][1]
    assert steps == {1.0 if carry == "none" else 7.0}
    for name, moment in moments.items():
        carried = torch.zeros_like(moment) if carry == "none" else before[name]
        torch.testing.assert_close(moment, 0.9 * carried + 0.1 * first_gradients[name])


def make_optimizer(**sizes: int) -> tuple[torch.optim.Optimizer, list[tuple[str, nn.Parameter]]]:
    """AdamW over parameters of these numbers of rows, which have gradients."""
    named_parameters = []
    for name, size in sizes.items():
        parameter = nn.Parameter(torch.ones(size, 2))
        parameter.grad = torch.ones_like(parameter)
        named_parameters.append((name, parameter))
    return torch.optim.AdamW([parameter for _, parameter in named_parameters]), named_parameters


def test_what_is_new_or_gone_begins_anew():
    carried = CarriedState()
    first, first_parameters = make_optimizer(kept=3, wider=3, left=3)
    second, second_parameters = make_optimizer(kept=3, wider=4, added=3)
    first.step()
    carried.capture(first, first_parameters)
    carried.load_into(second, second_parameters)
    assert [name for name, parameter in second_parameters if parameter in second.state] == ["kept"]


def test_a_matrix_by_columns_learns_as_one_by_rows():
    weight, *gradients = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    columns = weight.T.contiguous().T

    def trained(weight, *, laid=None):
        """With `laid`, the state is loaded again after each step, row after row, as from a file."""
        parameter = nn.Parameter(weight.clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        for gradient in gradients:
            parameter.grad = match_strides(gradient, parameter)
            optimizer.step()
            if laid is not None:
                state = optimizer.state_dict()
                for parameter_state in state["state"].values():
                    parameter_state.update(
                        {name: value.contiguous() for name, value in parameter_state.items()}
                    )
                optimizer.load_state_dict(state)
            if laid:
                lay_out_moments(optimizer)
        return parameter.detach().contiguous()

    expected = trained(columns)
    torch.testing.assert_close(expected, trained(weight), rtol=0, atol=1e-6)
    assert torch.equal(trained(columns, laid=True), expected)
    assert (trained(columns, laid=False) - expected).abs().max() > 0.01
