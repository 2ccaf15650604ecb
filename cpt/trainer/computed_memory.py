"""The memory of a device in a computed plan, by how a run is divided among devices: at the peaks of a step,
of an evaluation, and of the method's work around a domain."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpt.trainer.plan import Plan
from cpt.trainer.simulated_plan import SimulatedPlan
from cpt.trainer.simulation import GRADIENTS, LOGITS, METHOD_STATE, OPTIMIZER_STATE, WEIGHTS

Memory = Mapping[str, Mapping[str, int]]  # bytes by use, of each phase of a run
STEP = "step"
EVALUATION = "evaluation"
AROUND = ("before a domain", "after a domain")
# Uses of memory in addition to those of the simulation, which is of one process.
GATHERED = "gathered by FSDP"
BUCKETS = "gradient buckets"
GOING_BACK = "saved weights"
BASE_WEIGHTS = "weights of the base"


@dataclass(frozen=True)
class Layout:
    """How a run is divided among devices."""

    num_devices: int
    strategy: str  # single, ddp, fsdp
    accumulate: int  # micro-batches of a step
    eval_batch_size: int  # rows
    is_checkpointed: bool

    @property
    def num_shards(self) -> int:
        return self.num_devices if self.strategy == "fsdp" else 1


def make_layout(plan: Plan, num_devices: int) -> Layout:
    """The layout of a plan on a number of devices. With `micro_batch=auto` the batch is undivided, until it
    is known what fits. Raises ValueError for a micro-batch that does not divide what each device has of a
    step."""
    options = plan.trainer
    strategy = "single"
    if num_devices > 1:
        strategy = "fsdp" if options.strategy == "fsdp" else "ddp"
    return Layout(
        num_devices=num_devices,
        strategy=strategy,
        accumulate=options.count_micro_batches(num_devices),
        eval_batch_size=options.eval_batch_size,
        is_checkpointed=options.gradient_checkpointing,
    )


def is_divisible(plan: Plan, layout: Layout) -> bool:
    """Whether the batch of a step divides among the devices and micro-batches."""
    return plan.budget.batch_size % (layout.num_devices * layout.accumulate) == 0


def count_micro_batch_rows(plan: Plan, layout: Layout) -> int:
    """The rows of a micro-batch of a device, replayed ones included."""
    return add_replayed(plan, count_own_rows(plan, layout))


def count_own_rows(plan: Plan, layout: Layout) -> int:
    """The rows of a micro-batch of a device without those that replay appends."""
    return plan.budget.batch_size // (layout.num_devices * layout.accumulate)


def add_replayed(plan: Plan, num_rows: int) -> int:
    """The rows of a micro-batch with those that replay appends to it."""
    replay = plan.mixture
    if not replay.is_appended:
        return num_rows
    return math.ceil(num_rows * (1 + replay.past_ratio + replay.general_ratio + float(replay.source_share)))


def count_importance_rows(plan: Plan, layout: Layout) -> int:
    """The rows of a batch of importance samples."""
    return min(layout.eval_batch_size, plan.trainer.importance_samples)


def find_state_bytes(simulated: SimulatedPlan, layout: Layout) -> int:
    """The bytes of a device between two steps of the last stage."""
    state = simulated.find_last_state()
    return sum(state_bytes.on_device(layout.num_shards) for state_bytes in state.values())


def find_memory(simulated: SimulatedPlan, layout: Layout) -> dict[str, dict[str, int]]:
    """Bytes of a device by use, at the peak of each phase of the last stage."""
    memory = {}
    if simulated.stages:
        memory[STEP] = find_step_memory(simulated, layout)
    evaluation = find_evaluation_memory(simulated, layout)
    if evaluation is not None:
        memory[EVALUATION] = evaluation
    return memory | find_memory_around(simulated, layout)


def find_kept(simulated: SimulatedPlan, layout: Layout) -> dict[str, int]:
    """Bytes of what is on a device in all phases."""
    state = simulated.find_last_state()
    return {use: state[use].on_device(layout.num_shards) for use in (WEIGHTS, METHOD_STATE)}


def find_step_memory(simulated: SimulatedPlan, layout: Layout) -> dict[str, int]:
    """Bytes of a device by use, at the peak of a step."""
    plan = simulated.plan
    state = simulated.find_last_state()
    num_rows = count_micro_batch_rows(plan, layout)
    steps = simulated.find_steps(
        num_rows, is_checkpointed=layout.is_checkpointed, num_micro_batches=layout.accumulate
    )
    gradients = state[GRADIENTS].on_device(layout.num_shards)

    memory = find_kept(simulated, layout)
    memory[OPTIMIZER_STATE] = state[OPTIMIZER_STATE].on_device(layout.num_shards)
    if layout.strategy == "fsdp":
        # A process keeps its rows of the gradients; whole ones, of a block at a time, are among what is
        # gathered.
        memory |= find_largest([step.find_peak(num_rows, excluded_uses=[GRADIENTS]) for step in steps])
        memory[GRADIENTS] = gradients
        memory[GATHERED] = simulated.gathered.in_training
    else:
        memory |= find_largest([step.find_peak(num_rows) for step in steps])
    if layout.strategy == "ddp":
        memory[BUCKETS] = gradients

    # Copies of the trained weights, which are as large as their gradients.
    if plan.num_weight_copies:
        memory[GOING_BACK] = gradients * plan.num_weight_copies
    return memory


def find_largest(peaks: Sequence[dict[str, int]]) -> dict[str, int]:
    """The peak with the most bytes."""
    return max(peaks, key=lambda by_use: sum(by_use.values()))


def find_evaluation_memory(simulated: SimulatedPlan, layout: Layout) -> dict[str, int] | None:
    """Bytes of a device by use, at the peak of an evaluation; None if it could not be simulated."""
    evaluation = simulated.find_evaluation(layout.eval_batch_size)
    if evaluation is None:
        return None
    memory = find_kept(simulated, layout) | evaluation.find_peak(layout.eval_batch_size)
    if layout.num_shards > 1:
        memory[GATHERED] = simulated.gathered.weights

    # The divergence needs the weights of the base, and the logits of both models.
    base_weights = simulated.simulation.method.base_weights
    if simulated.plan.divergence is not None and base_weights is not None:
        num_bytes = sum(tensor.nbytes for tensor in base_weights.named().values())
        memory[BASE_WEIGHTS] = math.ceil(num_bytes / layout.num_shards)
        memory[LOGITS] = 2 * memory.get(LOGITS, 0)
    return memory


def find_memory_around(simulated: SimulatedPlan, layout: Layout) -> dict[str, dict[str, int]]:
    """Bytes of a device by use, at the peaks of the method's work before and after a domain, if any."""
    memory = {}
    num_rows = count_importance_rows(simulated.plan, layout)
    # The list is empty for a method without stages; a hook that does nothing counts no operations.
    for name, work in zip(AROUND, simulated.find_around(num_rows), strict=False):
        if work is not None and work.flops:
            memory[name] = find_kept(simulated, layout) | work.find_peak(num_rows)
            if layout.num_shards > 1:
                memory[name][GATHERED] = simulated.gathered.in_training
    return memory


def find_peak_bytes(memory: Memory) -> int:
    """The most bytes of any phase."""
    return max(sum(by_use.values()) for by_use in memory.values())
