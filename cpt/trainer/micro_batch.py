"""`trainer.micro_batch`: the samples of a process that pass through the model together; a step has as many
micro-batches as make up `trainer.batch_size`. `auto` is the most that fit on the device, which is chosen once
for a run.

Lightning's BatchSizeFinder and accelerate's find_executable_batch_size change the batch of a step as well,
and know nothing of other processes and of stages whose models grow, so that only Lightning's test for errors
of memory is used here."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cpt.core import files
from cpt.core.distributed import gather_objects
from cpt.core.exceptions import DamagedFileError, InvalidOptionError
from cpt.core.memory import find_total_memory
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process, is_one_of_several
from cpt.data.corpora import Corpora
from cpt.data.options import count_micro_batches, list_micro_batch_sizes
from cpt.reporting.formats import format_bytes
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.computed_memory import find_step_memory, make_layout
from cpt.trainer.device_kinds import DeviceKind
from cpt.trainer.lightning import join_processes
from cpt.trainer.micro_batch_trial import try_micro_batch
from cpt.trainer.plan import Plan
from cpt.trainer.simulated_plan import SimulatedPlan

log = logging.getLogger(__name__)
AUTO = "auto"
# Shares of a device's memory that a step may take. The rest is for fragments, workspaces of kernels and
# buffers of NCCL; where nothing was tried, it also covers the error of what is computed. Neither is measured
# on a GPU.
TRIED_SHARE = 0.9
COMPUTED_SHARE = 0.8

Trial = Callable[[int], int | None]  # the bytes that a micro-batch needs; None: more than there are


@dataclass(frozen=True)
class FittingMicroBatch:
    """The largest micro-batch that fits, and the bytes that a process needs with it."""

    micro_batch: int
    num_bytes: int
    source: str  # tried or computed


def choose_micro_batch(plan: Plan, machine: Machine, corpora: Corpora, base: Base, *, stored: Path) -> Plan:
    """The plan with as many micro-batches as `trainer.micro_batch` asks for. A run that has started keeps the
    micro-batch in its `stored` file.

    Raises ValueError for a number that does not divide the batch, and for `auto` where not even one sample
    fits or where memory can be neither tried nor computed."""
    requested = plan.trainer.micro_batch
    if requested is None:
        return plan
    if isinstance(requested, int):
        return with_micro_batch(plan, requested, world_size=machine.world_size)
    if stored.exists():
        return with_stored_micro_batch(plan, machine, stored)

    limit = find_memory_limit(machine)
    if needs_computed_choice(machine):
        choice = compute_choice(plan, machine, limit=int(COMPUTED_SHARE * limit))
        if choice is None:
            raise InvalidOptionError(
                "trainer.micro_batch",
                AUTO,
                context="with strategy=fsdp, torchrun or srun",
                reason=f"the memory of method={plan.names['method']} cannot be computed here",
                allowed="a number",
            )
    else:
        choice = find_fitting_micro_batch(plan, machine, corpora, base, limit=int(TRIED_SHARE * limit))

    if is_first_process():
        num_micro_batches = plan.budget.batch_size // (machine.world_size * choice.micro_batch)
        log.info(
            "Micro-batch (trainer.micro_batch=auto): %s, %s in a step on each of %s; %s of %s, %s",
            count_noun(choice.micro_batch, "sample"),
            count_noun(num_micro_batches, "time"),
            count_noun(machine.world_size, "device"),
            format_bytes(choice.num_bytes),
            format_bytes(limit),
            choice.source,
        )
    return with_micro_batch(plan, choice.micro_batch, world_size=machine.world_size)


def agree_on_micro_batch(plan: Plan, machine: Machine, *, stored: Path) -> Plan:
    """The plan with the smallest micro-batch that a process has chosen, which the first one stores for later
    starts. All processes call it, before any of them makes its data.

    Those that Lightning starts later find the file; with `strategy=fsdp` they are there already."""
    # The settings as they were given: the plan's own option is gone once the micro-batch is chosen.
    is_auto = plan.settings["trainer"].get("micro_batch") == AUTO
    if not is_auto or stored.exists():
        return plan
    if machine.strategy != "fsdp":
        join_processes(machine.lightning_arguments(plan.trainer))
    own_choice = plan.budget.batch_size // (machine.world_size * plan.trainer.accumulate_grad_batches)
    smallest = min(gather_objects(own_choice))
    if is_first_process():
        files.write_atomically(stored, json.dumps({"micro_batch": smallest}))
    return with_micro_batch(plan, smallest, world_size=machine.world_size)


def with_micro_batch(plan: Plan, micro_batch: int, *, world_size: int) -> Plan:
    """The plan with micro-batches of a number of samples. Raises ValueError for one that does not divide a
    process's share of the batch."""
    num_micro_batches = count_micro_batches(plan.budget.batch_size, micro_batch=micro_batch, world=world_size)
    options = replace(plan.trainer, micro_batch=None, accumulate_grad_batches=num_micro_batches)
    return replace(plan, trainer=options)


def with_stored_micro_batch(plan: Plan, machine: Machine, path: Path) -> Plan:
    """The plan with the micro-batch that a run has stored. With more processes than at its start it may be
    more than each of them has of a step; then it is the largest smaller one that divides their share."""
    stored = read_stored(path)
    possible = list_micro_batch_sizes(plan.budget.batch_size, world=machine.world_size)
    micro_batch = max(number for number in possible if number <= stored)
    if is_first_process():
        log.info(
            "Micro-batch (trainer.micro_batch=auto): %s; this run began with %d",
            count_noun(micro_batch, "sample"),
            stored,
        )
    return with_micro_batch(plan, micro_batch, world_size=machine.world_size)


def read_stored(path: Path) -> int:
    """The micro-batch that a run has stored. Raises ValueError for a damaged file."""
    try:
        number = json.loads(path.read_text())["micro_batch"]
    except (ValueError, KeyError, TypeError):
        number = None
    if type(number) is not int or number < 1:
        raise DamagedFileError(path, remedy='restore it from a backup, or write {"micro_batch": N} into it')
    return number


def needs_computed_choice(machine: Machine) -> bool:
    """Whether a trial is not possible. With sharded weights each pass needs all processes, one of which may
    run out of memory alone; and processes that torchrun or srun has started cannot work on their own."""
    return machine.strategy == "fsdp" or is_one_of_several()


def find_share(strategy: str) -> float:
    """The share of a device's memory that a step of a run may take whose processes the run starts itself:
    with torchrun and srun it is COMPUTED_SHARE for all strategies."""
    return COMPUTED_SHARE if strategy == "fsdp" else TRIED_SHARE


def find_memory_limit(machine: Machine) -> int:
    """The bytes that a process of the run has: what is free on its GPU, or its share of the main memory."""
    if machine.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(machine.device)
        return free + torch.cuda.memory_reserved(machine.device)
    return find_total_memory() // machine.num_processes


def compute_choice(plan: Plan, machine: Machine, *, limit: int) -> FittingMicroBatch | None:
    """The largest micro-batch whose step is computed to take at most `limit` bytes, or one sample where none
    does; None for a plan that cannot be computed."""
    is_gpu = machine.device.type == "cuda"
    kind = DeviceKind(str(machine.device), limit, peak_flops={}, source="", is_gpu=is_gpu)
    # A simulation needs some number of micro-batches, which each layout below replaces.
    plan = with_micro_batch(plan, 1, world_size=machine.world_size)

    choice = None
    try:
        simulated = SimulatedPlan(plan, kind)
        layout = make_layout(plan, machine.world_size)
        for micro_batch in reversed(list_micro_batch_sizes(plan.budget.batch_size, world=machine.world_size)):
            num_micro_batches = plan.budget.batch_size // (machine.world_size * micro_batch)
            memory = find_step_memory(simulated, replace(layout, accumulate=num_micro_batches))
            choice = FittingMicroBatch(micro_batch, sum(memory.values()), "computed")
            if choice.num_bytes <= limit:
                break
    except ValueError as error:
        log.debug("The memory of a step cannot be computed", exc_info=error)
        return None
    return choice


def find_fitting_micro_batch(
    plan: Plan, machine: Machine, corpora: Corpora, base: Base, *, limit: int
) -> FittingMicroBatch:
    """The largest micro-batch whose steps were tried and took at most `limit` bytes; the computed one is
    tried first. Raises ValueError where not even one sample fits."""
    computed = compute_choice(plan, machine, limit=limit)
    # What the plan builds needs some number of micro-batches; each trial divides its own steps.
    trial_plan = with_micro_batch(plan, 1, world_size=machine.world_size)
    choice = search(
        list_micro_batch_sizes(plan.budget.batch_size, world=machine.world_size),
        partial(try_micro_batch, trial_plan, machine, corpora, base),
        first=1 if computed is None else computed.micro_batch,
        limit=limit,
        may_run_out=machine.device.type == "cuda",
    )
    if choice is None:
        raise InvalidOptionError(
            "trainer.micro_batch",
            AUTO,
            reason=f"a step with one sample does not fit into {format_bytes(limit)}",
            allowed="trainer.gradient_checkpointing=true, a shorter model.max_seq_length, method=lora; "
            "plan_device=KIND plan=true names what fits",
        )
    return choice


def search(
    sizes: Sequence[int], try_size: Trial, *, first: int, limit: int, may_run_out: bool
) -> FittingMicroBatch | None:
    """The largest of ascending sizes that fits, from the `first` one to be tried down or up; None where none
    does. `may_run_out`: an attempt that takes too much memory fails without other harm."""
    index = sizes.index(first)
    num_bytes = try_size(sizes[index])
    if num_bytes is None or num_bytes > limit:
        for size in reversed(sizes[:index]):
            num_bytes = try_size(size)
            if num_bytes is not None and num_bytes <= limit:
                return FittingMicroBatch(size, num_bytes, "tried")
        return None

    choice = FittingMicroBatch(sizes[index], num_bytes, "tried")
    for size in sizes[index + 1 :]:
        # The system ends a process that takes too much main memory. Memory grows at most in proportion.
        if not may_run_out and choice.num_bytes * size / choice.micro_batch > limit:
            break
        num_bytes = try_size(size)
        if num_bytes is None or num_bytes > limit:
            break
        choice = FittingMicroBatch(size, num_bytes, "tried")
    return choice
