"""EWC, L2, MAS, SI, RecAdam and KD: slow loops, sums by hand, the released code of EWC (ContinualLM)."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM

from cpt.core import distributed as collectives
from cpt.data.collate import place_labels, select_inputs
from cpt.data.replay import NO_REPLAY
from cpt.gradient_masks.base import StepSnapshot
from cpt.methods.base import MethodContext
from cpt.methods.ewc import EWC, SI, Recall, merge_importances
from cpt.methods.options import EWCOptions, RecAdamOptions
from cpt.models.fisher import estimate_fisher, split_batch
from cpt.models.objectives import Causal
from cpt.models.options import NOT_FROZEN
from tests.conftest import GOLDEN, needs_golden
from tests.support.campaign import run_few
from tests.support.forward_passes import make_batch, outputs_at, select_rows
from tests.support.method_fixtures import (
    DROPOUT,
    StepRecorder,
    assert_close,
    clone_tensors,
    count_state_bytes_outside_model,
    equal_tensors,
)


def move_weights(model, scale: float = 0.05) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(scale * torch.randn_like(parameter))


def measure_fisher(model, batches, estimator="per_sample") -> dict[str, torch.Tensor]:
    return clone_tensors(estimate_fisher(model, batches, objective=Causal(), estimator=estimator))


@pytest.fixture
def learnt(build):
    run = build("ewc")
    run.learn(0)
    run.module.eval()
    return run


def fisher_of(run) -> dict[str, torch.Tensor]:
    return clone_tensors(run.module.fisher.named())


@pytest.mark.parametrize(("estimator", "family"), [("per_sample", "masked"), ("batch", "causal")])
def test_the_fisher_is_the_slow_loop(estimator, family, build):
    """By backward() of the whole model's mean loss, by sample or by batch, in double precision."""
    few_steps = ["trainer.steps=1", "trainer.importance_samples=20", "trainer.eval_batch_size=16"]
    run = build("ewc", *few_steps, on=family)
    run.learn(0)
    model = run.module.model.eval()
    batches = run.importance_batches()
    assert [len(batch["input_ids"]) for batch in batches] == [16, 4]
    measured = measure_fisher(model, batches, estimator)
    assert not any(value.any() for value in measure_fisher(model, [], estimator).values())

    model = model.double()
    num_passes = 0
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for batch in batches:
        size = 1 if estimator == "per_sample" else len(batch["input_ids"])
        for first in range(0, len(batch["input_ids"]), size):
            part = select_rows(batch, list(range(first, first + size)))
            model.zero_grad()
            logits = model(**select_inputs(part)).logits.flatten(0, 1)
            functional.cross_entropy(logits, place_labels(part).flatten(), ignore_index=-100).backward()
            num_passes += 1
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] += size * parameter.grad**2

    for name, value in sums.items():
        atol = 1e-5 * value.abs().max().item() / num_passes + 1e-14
        expected = value / num_passes
        torch.testing.assert_close(measured[name].double(), expected, rtol=1e-3, atol=atol, msg=name)


def test_a_domain_ends_with_its_fisher_and_its_anchor(build):
    run = build("ewc", *DROPOUT)
    base = run.weights()
    module = run.module
    model = module.model
    assert equal_tensors(module.anchor.named(), base)
    run.learn(0)
    assert equal_tensors(module.anchor.named(), run.weights()) and not equal_tensors(run.weights(), base)

    first = measure_fisher(model.eval(), run.importance_batches())
    assert equal_tensors(fisher_of(run), first) and module.domains == 1
    assert not equal_tensors(measure_fisher(model.train(), run.importance_batches()), first)

    move_weights(model.eval())  # the penalty does not leak into the Fisher
    second = measure_fisher(model, run.importance_batches())
    module.options = replace(module.options, strength=1e9)
    assert module.penalty() > 1e3
    module.after_domain(run.importance_batches())
    mean = {name: (first[name].double() + second[name].double()) / 2 for name in second}
    assert_close(fisher_of(run), mean, rtol=1e-4, atol=0)


def test_the_fisher_is_that_of_the_loss_in_32_bits_over_samples_with_targets(learnt):
    model = learnt.module.model
    batches = learnt.importance_batches()
    expected = measure_fisher(model, batches)
    weighted = [batch | {"weight": batch["weight"] * 65536} for batch in batches]
    assert equal_tensors(measure_fisher(model, weighted), expected)

    # A sample without a target counts as if it were not there.
    labels = place_labels(batches[0])
    labels[3] = -100
    without_targets = make_batch(batches[0]["input_ids"], labels, batches[0].get("attention_mask"))
    other_rows = select_rows(batches[0], [row for row in range(len(labels)) if row != 3])
    measured = measure_fisher(model, [without_targets])
    assert_close(measured, measure_fisher(model, [other_rows]), rtol=1e-4, atol=1e-12)

    learnt.module.domains.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        learnt.module.after_domain(batches)
    assert equal_tensors(fisher_of(learnt), expected)

    expected = measure_fisher(model.bfloat16().float(), batches)
    coarse = measure_fisher(model.bfloat16(), batches)
    assert equal_tensors(coarse, expected)
    assert {value.dtype for value in coarse.values()} == {torch.float32}


@pytest.mark.parametrize(("merge", "third"), [("mean", 5.0), ("decay", 12.12)])
def test_the_mean_counts_each_domain_once(merge, third):
    merged = torch.zeros(())
    for number, importance in enumerate([2.0, 4.0, 9.0]):
        merged = merge_importances(
            merged, torch.tensor(importance), domains=torch.tensor(number), merge=merge, gamma=0.6
        )
    assert merged.item() == pytest.approx(third)


def test_away_from_the_anchor_the_fisher_pulls(learnt):
    module = learnt.module
    anchors = learnt.weights()
    fishers = fisher_of(learnt)
    assert module.penalty().item() == 0

    move_weights(module.model)
    penalty = module.penalty()
    module.zero_grad()
    penalty.backward()
    expected = 0.0
    for name, parameter in module.model.named_parameters():
        distance = parameter.detach().double() - anchors[name]
        pull = module.options.strength * fishers[name].double()
        expected += (pull / 2 * distance**2).sum().item()
        torch.testing.assert_close(parameter.grad.double(), pull * distance, rtol=1e-4, atol=1e-9)
    assert penalty.item() == pytest.approx(expected, rel=1e-4) != 0


@pytest.mark.parametrize("shares", [(2, 0), (1, 1)])
def test_the_processes_fishers_are_summed(shares, learnt, monkeypatch):
    model = learnt.module.model
    [batch] = learnt.importance_batches()
    learnt.data.eval_batch_size = 9
    batches = learnt.importance_batches()
    expected = measure_fisher(model, [batch])
    assert [len(part["input_ids"]) for part in batches] == [9, 7]

    # The first process sends its sums, the second one adds them to its own.
    sent = []
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: sent.append(tensor.clone()))
    measure_fisher(model, batches[: shares[0]])
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor.add_(sent.pop(0)))
    assert_close(measure_fisher(model, batches[shares[0] :]), expected, rtol=1e-3, atol=1e-9)


def golden_batches(domain: int) -> list[dict[str, torch.Tensor]]:
    arrays = np.load(GOLDEN / "batches.npz")
    batches = []
    for number in range(3):
        fields = [f"d{domain}_b{number}_{name}" for name in ("input_ids", "labels", "attention_mask")]
        batch = make_batch(*(torch.from_numpy(arrays[field]).long() for field in fields))
        batches.append(batch | {"weight": torch.tensor(1 / len(batch["positions"]))})
    return batches


def relative_differences(tensors: dict[str, torch.Tensor], prefix: str) -> list[float]:
    """The largest differences from released numbers, each in units of its tensor's largest number."""
    with np.load(GOLDEN / "ewc.npz") as arrays:
        stored_names = [name for name in arrays if name.startswith(f"{prefix}/")]
        released = {name.partition("/")[2]: torch.from_numpy(arrays[name]) for name in stored_names}
    assert released.keys() <= tensors.keys() and released
    differences = []
    for name, expected in released.items():
        largest = (tensors[name] - expected).abs().max()
        differences.append(float(largest / expected.abs().max().clamp_min(1e-9)))
    return differences


@needs_golden
def test_fishers_penalty_and_losses_are_those_of_the_released_code():
    first_model, second_model = (
        AutoModelForMaskedLM.from_pretrained(
            GOLDEN / f"tiny_{name}", dtype=torch.float32, attn_implementation="eager"
        )
        for name in "ab"
    )
    strength = json.loads((GOLDEN / "ewc.json").read_text())["settings"]["lamb"]
    options = EWCOptions(strength=strength, estimator="batch", merge="mean", gamma=0.5)
    context = MethodContext(
        model=first_model,
        objective=Causal(),
        length=32,
        masks=[],
        replay=NO_REPLAY,
        seed=0,
        freeze=NOT_FROZEN,
        optimizer=None,
        schedule=None,
    )
    module = EWC(options, context).eval()
    module.after_domain(golden_batches(0))
    assert max(relative_differences(clone_tensors(module.fisher.named()), "fisher0")) < 1e-4

    module.model.load_state_dict(second_model.state_dict())
    released = np.load(GOLDEN / "ewc.npz")
    terms = module.losses(golden_batches(1)[0])
    measured = {"penalty": terms["ewc"], "loss_mlm": terms["lm"], "loss_total": sum(terms.values())}
    expected = {name: released[name].item() for name in measured}
    assert {name: value.item() for name, value in measured.items()} == pytest.approx(expected, rel=1e-4)

    module.after_domain(golden_batches(1))
    merged = clone_tensors(module.fisher.named())
    assert max(relative_differences(merged, "fisher01")) < 1e-4
    assert min(relative_differences(merged, "fisher01_released")) > 0.01


@pytest.mark.parametrize("target", ["previous", "base"])
def test_l2_pulls_to_the_previous_model_or_the_base(target, build):
    run = build("l2", "method.strength=0.3", f"method.towards={target}")
    module = run.module
    base = run.weights()
    run.learn(0)
    previous = run.weights()
    run.learn(1)
    anchors = previous if target == "previous" else base
    parameters = dict(module.model.named_parameters())
    assert equal_tensors(module.anchor.named(), anchors) and not equal_tensors(previous, base)

    # Of the base no copy is stored.
    num_bytes = sum(parameter.nbytes for parameter in parameters.values())
    assert count_state_bytes_outside_model(module) == (num_bytes if target == "previous" else 0)

    penalty = module.losses(run.batches()[0])["l2"]
    distances = {name: parameter.detach() - anchors[name] for name, parameter in parameters.items()}
    squared = sum(
        ((parameter.detach().double() - anchors[name]) ** 2).sum() for name, parameter in parameters.items()
    )
    assert penalty.item() == pytest.approx(0.15 * squared.item(), rel=1e-5) != 0
    gradients = torch.autograd.grad(penalty, list(parameters.values()))
    expected = {name: 0.3 * distance for name, distance in distances.items()}
    assert_close(dict(zip(parameters, gradients, strict=True)), expected)


def sensitivity(run, output="logits"):
    """Means of |gradients| of each sample's mean squared norm, one after another."""
    model = run.module.model.eval()
    parameters = dict(model.named_parameters())
    samples = []
    for batch in run.importance_batches():
        samples += split_batch(batch, "per_sample")

    sums = dict.fromkeys(parameters, 0)
    for sample in samples:
        logits, hidden = run.module.objective.outputs(model, sample)
        values = logits if output == "logits" else hidden.flatten(0, 1)[sample["positions"]]
        mean_norm = (values.float() ** 2).sum(-1).mean()
        gradients = torch.autograd.grad(
            mean_norm, list(parameters.values()), materialize_grads=True, allow_unused=True
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            sums[name] = sums[name] + gradient.abs()
    return {name: value / len(samples) for name, value in sums.items()}


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_importance_is_the_mean_absolute_gradient_by_sample(output, build):
    run = build("mas", f"method.output={output}", "trainer.importance_samples=6", "method.strength=3")
    module = run.module
    run.learn(0)
    first = clone_tensors(module.importance.named())
    assert_close(first, sensitivity(run, output), rtol=1e-3, atol=1e-5)

    # The targets are of no importance.
    batches = [batch | {"targets": (batch["targets"] + 7) % 50} for batch in run.importance_batches()]
    assert_close(module.eval().measure(batches), first, rtol=1e-4, atol=1e-6)

    run.learn(1)
    expected = {name: first[name] + value for name, value in sensitivity(run, output).items()}
    assert_close(module.importance.named(), expected, rtol=1e-3, atol=1e-4)

    anchors = run.weights()
    importances = module.importance.named()
    move_weights(module.model)
    penalty = 0.0
    for name, weight in run.weights().items():
        penalty += (importances[name] * (weight - anchors[name]).square()).sum().item()
    assert module.losses(batches[0])["mas"].item() == pytest.approx(3 * penalty, rel=1e-4)


ON_THE_PATH = [
    "sgd optim.lr=0.01 optim.weight_decay=5",
    "adamw optim.lr=0.01 optim.weight_decay=1",
    "muon optim.lr=0.01 optim.weight_decay=1",
    "adafactor optim.lr=0.1",
    "adamw_8bit optim.lr=0.01 optim.min_8bit_size=256",
]


@pytest.mark.parametrize("optimizer", run_few(ON_THE_PATH, [ON_THE_PATH[0], ON_THE_PATH[2]]))
def test_importance_is_the_path_integral_over_the_squared_way(optimizer, build, monkeypatch):
    """omega by hand: minus the sum of the loss's gradient, without the penalty, times the step."""
    if optimizer.startswith("adamw_8bit"):
        pytest.importorskip("bitsandbytes", reason="the extra: pip install -e '.[bitsandbytes]'")
    path_integrals = {}
    weights_before_step = {}
    loss_gradients = {}
    transform_gradients = SI.transform_gradients
    after_update = SI.after_update

    def record_gradients(module, optimizer):
        importances = module.importance.named()
        anchors = module.anchor.named()
        for name, parameter in module.model.named_parameters():
            weight = parameter.detach()
            weights_before_step[name] = weight.clone()
            pull = importances[name] * (weight - anchors[name])
            loss_gradients[name] = parameter.grad - 2 * module.options.strength * pull
        transform_gradients(module, optimizer)

    def add_step(module):
        after_update(module)
        for name, parameter in module.model.named_parameters():
            step = parameter.detach() - weights_before_step[name]
            path_integrals[name] = path_integrals.get(name, 0) - loss_gradients[name] * step

    monkeypatch.setattr(SI, "transform_gradients", record_gradients)
    monkeypatch.setattr(SI, "after_update", add_step)
    options = [*f"optim={optimizer}".split(), "trainer.accumulate_grad_batches=2"]
    run = build("si", *options, "method.damping=1e-3")
    importances = dict.fromkeys(run.weights(), torch.zeros(()))
    for number in (0, 1):
        start = run.weights()
        path_integrals.clear()
        run.learn(number)
        if optimizer == ON_THE_PATH[0]:  # by its decay, against the gradient
            assert any((integral < 0).any() for integral in path_integrals.values())
        expected = {}
        for name, weight in run.weights().items():
            damped_square = (weight - start[name]) ** 2 + 1e-3
            expected[name] = (importances[name] + path_integrals[name] / damped_square).clamp_min(0)
        assert_close(run.module.importance.named(), expected, rtol=1e-3, atol=1e-5)
        importances = clone_tensors(run.module.importance.named())
    assert all((integral == 0).all() for integral in run.module.path_integral.named().values())


def step_with_recall(share, *, gradient, annealed=True):
    """A weight that was 3 and whose anchor is 1 after a step of AdamW at a rate of 0.1."""
    options = RecAdamOptions(strength=5.0, annealed=annealed, middle=0.5, slope=8.0, towards="previous")
    weight = nn.Parameter(torch.tensor([3.0]))
    anchor = {"weight": torch.tensor([1.0])}
    anchors = SimpleNamespace(named=lambda: anchor, on_module_device=lambda stored: stored)
    recall = Recall(anchors, options)
    recall.anchor_names = {weight: "weight"}
    recall.share = share

    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([gradient])
    snapshot = StepSnapshot(recall, recall.covered())
    optimizer.step()
    snapshot.apply(optimizer)
    return weight.item()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_step_counts_its_share_and_the_pull_comes_after_it(share):
    assert step_with_recall(share, gradient=0.0) == pytest.approx(3 - 0.1 * (1 - share) * 5 * 2)
    after_adam = 3 - 0.1 * share
    expected = after_adam - 0.1 * (1 - share) * 5 * (after_adam - 1)
    assert step_with_recall(share, gradient=2.0) == pytest.approx(expected, rel=1e-5)
    weight = step_with_recall(1.0, gradient=2.0, annealed=False)
    assert weight == pytest.approx(2.9 - 0.1 * 5 * 1.9, rel=1e-5)


def test_the_sigmoid_runs_over_a_domains_steps(build):
    module = build("recadam", "method.middle=0.5", "method.slope=10").module
    for step in (0, 30, 50, 99):
        module.trainer = SimpleNamespace(global_step=step, max_steps=100)
        module.transform_gradients(None)
        assert module.recall.share == pytest.approx(1 / (1 + math.exp(-0.1 * (step - 50))))


@pytest.mark.parametrize(("distilled", "temperature"), [("logits", 0.5), ("hidden", 2)])
def test_the_divergence_is_that_of_the_student_from_the_teacher(distilled, temperature, build):
    """T^2 sum_v p_v (log p_v - log q_v), teacher's p and student's q, in the mean over the scored tokens."""
    options = [f"method.distilled={distilled}", "method.strength=3", f"method.temperature={temperature}"]
    run = build("kd", *options)
    [batch] = run.batches()
    module = run.module.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    is_scored = place_labels(batch) != -100

    def probabilities():
        hidden = module.model.base_model(**inputs).last_hidden_state
        values = module.model(**inputs).logits if distilled == "logits" else hidden
        return (values.detach()[is_scored].double() / temperature).softmax(-1).tolist()

    teacher = probabilities()
    assert module.losses(batch)["kd"].item() == 0

    move_weights(module.model)
    divergences = []
    for p, q in zip(teacher, probabilities(), strict=True):
        divergence = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        divergences.append(temperature**2 * divergence)
    loss = module.losses(batch)["kd"].item()
    assert loss == pytest.approx(3 * sum(divergences) / len(divergences), rel=1e-3) and loss > 1e-3

    micro_losses = [module.losses(part)["kd"].item() for part in run.batches(4, accumulate=4)]
    assert sum(micro_losses) / 4 == pytest.approx(loss, rel=1e-4)


def test_the_teacher_is_the_model_before_the_domain_in_eval_mode(build):
    run = build("kd", *DROPOUT)
    for number in (0, 1):
        before = run.weights()
        watch = StepRecorder(lambda module: clone_tensors(module.teacher.named()))
        run.learn(number, watch)
        assert len(watch.seen) == 6 and all(equal_tensors(teacher, before) for _, teacher in watch.seen)
        assert not equal_tensors(run.weights(), before)

    [batch] = run.batches()
    module = run.module.eval()
    module.teacher.capture(module.model)
    expected, _ = outputs_at(module.model, batch)
    module.train()
    module.model.base_model.layers[0].eval()  # modes of its own are kept
    modes = [part.training for part in module.modules()]
    with module.teacher.teaching(module.model):
        taught, _ = outputs_at(module.model, batch)
    assert torch.equal(taught, expected) and not taught.requires_grad
    assert [part.training for part in module.modules()] == modes and len(set(modes)) == 2
    assert not torch.equal(outputs_at(module.model, batch)[0], expected)
