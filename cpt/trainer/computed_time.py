"""The time of a run in a computed plan: the work of its simulation, over what a device does in a second.

A GPU's rate is a share of the peak of its matrix products, and stands for all other operations, too. On a
CPU each operation over the rows of a batch is made and timed when the plan is made: kernels of one kind
differ by a factor of ten with the type and the shape of what they get. What has the size of the weights, like
an update, is counted, and has three rates: of products, of bytes that other operations move, and of weights
that are dequantized."""

import importlib.util
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from cpt.core.memory import keep_blocks_for_run
from cpt.data.sources.base import GENERAL
from cpt.trainer.computed_memory import Layout, count_importance_rows, count_micro_batch_rows
from cpt.trainer.computed_work import Work
from cpt.trainer.device_kinds import SHARE_OF_LARGE, SHARE_OF_SMALL, SMALL_MODEL, DeviceKind
from cpt.trainer.kernel_calls import KernelCall, KernelTimer, time_calls
from cpt.trainer.options import BF16, FP16_MIXED
from cpt.trainer.plan import Plan
from cpt.trainer.simulated_plan import SimulatedPlan
from cpt.trainer.simulation import ADAMW_8BIT, MUON

CPU = torch.device("cpu")
MATRIX_SIZE = 1024  # of the products that are timed
TIMED_SECONDS = 0.2
NUM_MATRICES = 48  # that are cast and changed: more than caches hold
QUANTIZED_SIZE = 1024  # rows and columns of the weight that is dequantized, or updated


@dataclass(frozen=True)
class Rates:
    """What a device does in a second. Infinite rates are those of a GPU: the share of its peak that products
    reach includes all else."""

    flops: Mapping[str, float]  # operations of products, by the type of their inputs
    num_bytes: float = math.inf  # moved by all other operations
    num_dequantized: float = math.inf  # weights, from 4 bits
    num_8bit_updates: float = math.inf  # weights
    peak: float | None = None  # operations per second of a GPU's products; None: a CPU
    share: float | None = None  # of the peak, which makes `flops`; None: a CPU
    timer: KernelTimer | None = None  # of calls on this CPU; None: calls are counted by the rates, too

    def find_flops(self, type_name: str) -> float:
        """The operations per second of products of a type; the lowest rate for a type that was not timed."""
        return self.flops.get(type_name, min(self.flops.values()))


def find_rates(simulated: SimulatedPlan) -> Rates:
    """What a device does in a second with the model of a plan."""
    kind = simulated.kind
    is_16_bit = simulated.machine.precision in (*BF16, *FP16_MIXED)
    has_muon = simulated.plan.optim.target == MUON  # whose products are in 16 bits in any run
    if not kind.is_gpu:
        return measure_cpu_once(
            has_16_bit_products=is_16_bit or has_muon,
            is_quantized=simulated.quantization in ("nf4", "fp4"),
            is_checkpointed=simulated.plan.trainer.gradient_checkpointing,
            has_8bit_moments=simulated.plan.optim.target == ADAMW_8BIT,
        )

    dtype = torch.bfloat16 if is_16_bit else torch.float32
    share = SHARE_OF_SMALL if simulated.num_parameters < SMALL_MODEL else SHARE_OF_LARGE
    peak = find_peak_flops(kind, dtype)
    flops = {name_type(dtype): peak * share}
    if has_muon:
        flops[name_type(torch.bfloat16)] = find_peak_flops(kind, torch.bfloat16) * share
    return Rates(flops, peak=peak, share=share)


def name_type(dtype: torch.dtype) -> str:
    """The name of a type as work is counted by it."""
    return str(dtype).removeprefix("torch.")


def find_peak_flops(kind: DeviceKind, dtype: torch.dtype) -> float:
    """Operations per second of a GPU's products: from its data sheet, or measured on this machine's GPU."""
    peak = kind.peak_flops.get(name_type(dtype))
    return measure_products(torch.device("cuda"), dtype) if peak is None else peak


def measure_cpu(
    *, has_16_bit_products: bool, is_quantized: bool, is_checkpointed: bool, has_8bit_moments: bool
) -> Rates:
    """What this CPU does in a second in a run with such options, in as many threads as torch has. It takes
    about two seconds."""
    keep_blocks_for_run(is_checkpointed=is_checkpointed)
    dtypes = [torch.float32, torch.bfloat16] if has_16_bit_products else [torch.float32]
    flops = {name_type(dtype): measure_products(CPU, dtype) for dtype in dtypes}
    num_bytes = measure_moved_bytes()
    # Without bitsandbytes its kernels count as the 32-bit numbers that they move at least: one of a weight
    # that is dequantized, three of one that is updated (the weight, its gradient and the new weight).
    num_dequantized = num_bytes / torch.float32.itemsize
    num_8bit_updates = num_bytes / (3 * torch.float32.itemsize)
    if importlib.util.find_spec("bitsandbytes") is not None:
        if is_quantized:
            num_dequantized = measure_dequantized()
        if has_8bit_moments:
            num_8bit_updates = measure_8bit_updates()
    return Rates(
        flops,
        num_bytes=num_bytes,
        num_dequantized=num_dequantized,
        num_8bit_updates=num_8bit_updates,
        timer=KernelTimer(),
    )


measure_cpu_once = cache(measure_cpu)  # for the layouts and changes of a plan


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of large matrix products on a device of this machine."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=dtype)

    def multiply() -> None:
        float((matrix @ matrix)[0, 0])  # reading a number makes a GPU finish

    read_clock = time.thread_time if device.type == "cpu" else time.perf_counter
    return 2 * MATRIX_SIZE**3 / time_calls(multiply, at_least=TIMED_SECONDS, read_clock=read_clock)


def measure_moved_bytes() -> float:
    """Bytes per second that operations other than products move on this CPU, as in a step: weights that do
    not fit into caches are cast to 16 bits and back, and changed in place."""
    weights = [torch.ones(MATRIX_SIZE, MATRIX_SIZE) for _ in range(NUM_MATRICES)]

    def move() -> None:
        casts = [weight.to(torch.bfloat16) for weight in weights]
        changes = [narrow.to(torch.float32) for narrow in casts]
        for weight, change in zip(weights, changes, strict=True):
            weight.add_(change, alpha=0.5)

    # For each weight 4 bytes are read and 2 written, 2 read and 4 written, 8 read and 4 written.
    num_bytes = 24 * NUM_MATRICES * MATRIX_SIZE**2
    return num_bytes / time_calls(move, at_least=TIMED_SECONDS)


def measure_dequantized() -> float:
    """Weights per second that bitsandbytes dequantizes from nf4 on this CPU."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.ones(1, QUANTIZED_SIZE**2)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    seconds = time_calls(lambda: dequantize_4bit(packed, state), at_least=TIMED_SECONDS)
    return weight.numel() / seconds


def measure_8bit_updates() -> float:
    """Weights per second that bitsandbytes updates by AdamW with moments in 8 bits on this CPU."""
    from cpt.optim.adamw_8bit import AdamW8bit

    weight = torch.nn.Parameter(torch.ones(QUANTIZED_SIZE, QUANTIZED_SIZE))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW8bit([weight], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, min_8bit_size=0)
    return weight.numel() / time_calls(optimizer.step, at_least=TIMED_SECONDS)


def find_work_seconds(work: Work, rates: Rates) -> float:
    """The seconds of work whose operations follow each other."""
    seconds = work.num_bytes / rates.num_bytes
    seconds += work.num_dequantized / rates.num_dequantized
    seconds += work.num_8bit_updates / rates.num_8bit_updates
    for type_name, num_flops in work.flops.items():
        seconds += num_flops / rates.find_flops(type_name)
    for call, num_calls in work.calls.items():
        seconds += num_calls * find_call_seconds(call, rates)
    return seconds


def find_call_seconds(call: KernelCall, rates: Rates) -> float:
    """The seconds of a call: as timed, or those of what it computes and moves where it cannot be timed."""
    seconds = None if rates.timer is None else rates.timer.find_seconds(call)
    if seconds is None:
        seconds = call.num_flops / rates.find_flops(call.flops_type) + call.num_bytes / rates.num_bytes
    return seconds


def count_step_work(simulated: SimulatedPlan, layout: Layout) -> Work:
    """The work of a device in a step, its update included; the mean of steps that differ."""
    num_rows = count_micro_batch_rows(simulated.plan, layout)
    steps = simulated.find_steps(
        num_rows, is_checkpointed=layout.is_checkpointed, num_micro_batches=layout.accumulate
    )
    mean = Work()
    for step in steps:
        work = step.count_work(num_rows, num_passes=layout.accumulate, num_shards=layout.num_shards)
        mean = mean.plus(work, times=1 / len(steps))
    return mean


def count_steps(plan: Plan) -> int | None:
    """The steps of a domain in full rows; None where they depend on its text."""
    if plan.budget.epochs is not None:
        return None
    return plan.budget.steps_for((), length=plan.model.max_seq_length)


def find_seconds(simulated: SimulatedPlan, layout: Layout, rates: Rates) -> dict[str, float | None]:
    """Seconds of a step, and of a run by what they are spent on, without communication between devices; None
    where they depend on texts, and without stages."""
    plan = simulated.plan
    num_stages = len(simulated.stages)
    num_steps = count_steps(plan)
    step: float | None = None
    training: float | None = None
    if simulated.stages:
        step = find_work_seconds(count_step_work(simulated, layout), rates)
    if step is not None and num_steps is not None:
        training = num_stages * num_steps * step

    seconds_around = 0.0
    num_importance_rows = count_importance_rows(plan, layout)
    num_batches = plan.trainer.importance_samples / layout.num_devices / num_importance_rows
    for work_around in simulated.find_around(num_importance_rows):
        if work_around is not None:
            work = work_around.count_work(num_importance_rows)
            seconds_around += num_batches * find_work_seconds(work, rates)
    return {
        "step": step,
        "training": training,
        "around domains": num_stages * seconds_around,
        "evaluation": find_evaluation_seconds(simulated, layout, rates),
    }


def find_evaluation_seconds(simulated: SimulatedPlan, layout: Layout, rates: Rates) -> float | None:
    """Seconds of all evaluations at most; None where eval.max_tokens does not bound them, or where their pass
    could not be simulated."""
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
    batch_seconds = find_work_seconds(evaluation.count_work(layout.eval_batch_size), rates)
    token_seconds = batch_seconds / (layout.eval_batch_size * plan.model.max_seq_length)
    return num_texts * max_tokens * token_seconds / layout.num_devices
