"""The time of a run in a computed plan: the operations of its simulation, over those that a device makes in a
second."""

import time
from dataclasses import dataclass

import torch

from cpt.data.sources.base import GENERAL
from cpt.trainer.computed_memory import Layout, count_importance_rows, count_rows
from cpt.trainer.device_kinds import CPU_SHARES, SHARE_OF_LARGE, SHARE_OF_SMALL, SMALL_MODEL
from cpt.trainer.options import BF16, FP16_MIXED
from cpt.trainer.plan import Plan
from cpt.trainer.simulated_plan import SimulatedPlan

MATRIX_SIZE = 1024  # of the products that are timed
TIMED_SECONDS = 0.3


@dataclass(frozen=True)
class Rate:
    """Operations per second of a device in training: a share of its peak."""

    peak: float
    share: float

    @property
    def flops(self) -> float:
        return self.peak * self.share


def find_rate(simulated: SimulatedPlan) -> Rate:
    """The operations per second of a device with the model of a plan."""
    kind = simulated.kind
    is_16_bit = simulated.machine.precision in (*BF16, *FP16_MIXED)
    dtype = torch.bfloat16 if is_16_bit else torch.float32
    type_name = str(dtype).removeprefix("torch.")
    if kind.is_gpu:
        share = SHARE_OF_SMALL if simulated.num_parameters < SMALL_MODEL else SHARE_OF_LARGE
    else:
        share = CPU_SHARES[type_name]
    peak = kind.peak_flops.get(type_name)
    if peak is None:  # on this machine, of which there is no data sheet
        peak = measure_products(torch.device("cuda" if kind.is_gpu else "cpu"), dtype)
    return Rate(peak, share)


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of large matrix products on a device of this machine. On a CPU its own time is
    measured, without that of other programs."""
    read_clock = time.thread_time if device.type == "cpu" else time.perf_counter
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=dtype)
    # Once before time is taken, as the first product loads its kernel. Reading a number makes a GPU finish.
    float((matrix @ matrix)[0, 0])
    num_products = 0
    seconds = 0.0
    start_time = read_clock()
    while seconds < TIMED_SECONDS:
        float((matrix @ matrix)[0, 0])
        num_products += 1
        seconds = read_clock() - start_time
    return num_products * 2 * MATRIX_SIZE**3 / seconds


def count_step_flops(simulated: SimulatedPlan, layout: Layout) -> float:
    """The operations of a device in a step, the mean of steps that differ."""
    num_rows = count_rows(simulated.plan, layout)
    steps = simulated.find_steps(
        num_rows, is_checkpointed=layout.is_checkpointed, num_micro_batches=layout.accumulate
    )
    total = sum(step.count_flops(num_rows) for step in steps)
    return layout.accumulate * total / len(steps)


def count_steps(plan: Plan) -> int | None:
    """The steps of a domain in full rows; None where they depend on its text."""
    if plan.budget.epochs is not None:
        return None
    return plan.budget.steps_for((), length=plan.model.max_seq_length)


def find_seconds(simulated: SimulatedPlan, layout: Layout, rate: Rate) -> dict[str, float | None]:
    """Seconds of a run by what they are spent on, without communication between devices; None where they
    depend on texts."""
    plan = simulated.plan
    num_stages = len(simulated.stages)
    num_steps = count_steps(plan)
    step: float | None = None
    training: float | None = None
    if simulated.stages:
        step = count_step_flops(simulated, layout) / rate.flops
    if step is not None and num_steps is not None:
        training = num_stages * num_steps * step

    flops_around = 0.0
    num_samples = plan.trainer.importance_samples / layout.num_devices
    for work in simulated.find_around(count_importance_rows(plan, layout)):
        if work is not None:
            flops_around += work.flops / work.num_rows * num_samples
    return {
        "step": step,
        "training": training,
        "around domains": num_stages * flops_around / rate.flops,
        "evaluation": find_evaluation_seconds(simulated, layout, rate),
    }


def find_evaluation_seconds(simulated: SimulatedPlan, layout: Layout, rate: Rate) -> float | None:
    """Seconds of all evaluations at most; None where eval.max_tokens does not bound them."""
    plan = simulated.plan
    max_tokens = plan.settings["eval"]["max_tokens"]
    evaluation = simulated.find_evaluation(layout.eval_batch_size)
    if evaluation is None or max_tokens is None:
        return None
    num_texts = 0
    for number in range(len(simulated.stages) + 1):
        scored_texts = plan.evaluation.choose_columns(
            number,
            stages=[stage.texts for stage in simulated.stages],
            texts=[*plan.order, GENERAL],
        )
        num_texts += len(scored_texts)
    flops_per_token = evaluation.flops / (evaluation.num_rows * plan.model.max_seq_length)
    return num_texts * max_tokens * flops_per_token / layout.num_devices / rate.flops
