"""`plan=true` without weights and texts: memory and time of a run on 1, 4 and 8 devices of a kind, and what
makes it fit.

They are computed from a simulation of the method (cpt.trainer.simulation) and from data sheets
(cpt.trainer.device_kinds). Nothing of the run is executed; a CPU of this machine is timed."""

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from omegaconf import DictConfig
from transformers.utils import CONFIG_NAME

from cpt.core.exceptions import InvalidOptionError
from cpt.core.memory import find_total_memory
from cpt.core.messages import count_noun
from cpt.models import loading
from cpt.optim.options import KINDS
from cpt.reporting.formats import format_bytes
from cpt.trainer.check_checkpoint import WEIGHT_SUFFIXES
from cpt.trainer.check_optimizer import check_optimizer
from cpt.trainer.computed_changes import ChangeSearch, PlanChange
from cpt.trainer.computed_memory import (
    BUCKETS,
    GATHERED,
    GOING_BACK,
    STEP,
    Layout,
    Memory,
    count_importance_rows,
    count_micro_batch_rows,
    find_memory,
    find_peak_bytes,
    find_state_bytes,
    is_divisible,
    make_layout,
)
from cpt.trainer.computed_model import find_quantization, read_computed_config
from cpt.trainer.computed_time import Rates, count_steps, find_rates, find_seconds
from cpt.trainer.device_kinds import GPUS, SHARE_SOURCES, THIS_CPU, DeviceKind
from cpt.trainer.dry_run import list_excluded_options
from cpt.trainer.micro_batch import AUTO, COMPUTED_SHARE, TRIED_SHARE, find_share
from cpt.trainer.options import count_devices
from cpt.trainer.plan import Plan
from cpt.trainer.simulated_plan import MEASURED_PLAN, SimulatedPlan
from cpt.trainer.simulation import (
    ACTIVATIONS,
    ADAMW_8BIT,
    GRADIENTS,
    LOGITS,
    METHOD_STATE,
    OPTIMIZER_STATE,
    WEIGHT_COPIES,
    WEIGHTS,
)
from cpt.trainer.skeleton import build_skeleton

log = logging.getLogger(__name__)
NUM_DEVICES = (1, 4, 8)
STATE_BYTES = 16  # of a parameter that AdamW trains in 32 bits: weight, gradient and two moments
HOST_BYTES = 4  # of a weight, as which each process loads a checkpoint
HEAP_HOLES = 0.5  # of a step's activations, in bytes between them that the C heap keeps (docs/plan.md)
USES = (  # in the order of the table
    WEIGHTS,
    METHOD_STATE,
    GRADIENTS,
    OPTIMIZER_STATE,
    WEIGHT_COPIES,
    LOGITS,
    ACTIVATIONS,
    GATHERED,
    BUCKETS,
    GOING_BACK,
)


def check_computable(plan: Plan) -> None:
    """Raises ValueError for what takes other operations with other weights: weights are not read."""
    if plan.loss is not None and plan.needs_reference:
        raise InvalidOptionError(
            "loss._target_",
            plan.loss.target,
            context="for a plan that is computed",
            reason="which tokens its second model chooses depends on the values of weights",
            allowed=f"{MEASURED_PLAN}; or loss=eaft, none",
        )
    if plan.method.load().needs_examples:
        raise InvalidOptionError(
            "method",
            plan.names["method"],
            context="for a plan that is computed",
            reason="how many tokens it writes depends on the values of weights",
            allowed=f"{MEASURED_PLAN}; or another method",
        )


def compute_plan(cfg: DictConfig, plan: Plan, *, cause: str) -> dict[str, Any]:
    """What a run needs on devices of a kind, as plan=json prints it; `cause` says why it is computed. Raises
    ValueError for a plan that cannot be run or simulated."""
    check_computable(plan)
    # A library that is missing here may be installed on the machine of the run.
    optimizer_kind = KINDS.get(plan.optim.target)
    if optimizer_kind is None or optimizer_kind.is_installed:
        check_optimizer("optim", {"_target_": plan.optim.target, **plan.optim.arguments})

    kind = choose_kind(plan)
    log.info(
        "Computing what %s with method %s needs on %s; this may take minutes, no weights and texts are read",
        plan.model.name_or_path or "the model",
        plan.names["method"],
        kind.description,
    )
    # Before anything is simulated: a run on a CPU has the same libraries in its process.
    process_bytes = 0 if kind.is_gpu else measure_process(plan)
    simulated = SimulatedPlan(plan, kind)
    rates = find_rates(simulated)
    changes = ChangeSearch(cfg, simulated, kind)

    layouts = list_possible_layouts(plan, kind)
    if plan.trainer.micro_batch == AUTO:
        divided = []
        for layout in layouts:
            # As in a run, the limit includes what libraries hold in the process.
            limit = int(find_share(layout.strategy) * find_limit(kind, layout))
            divided.append(changes.divide(simulated, layout, limit=limit - process_bytes))
        layouts = divided
    estimates = []
    for layout in layouts:
        estimate = estimate_layout(simulated, layout, rates, changes, process_bytes=process_bytes)
        estimates.append(asdict(estimate))
    return {
        "figures": "computed",
        "cause": cause,
        "run": {**plan.names, "seed": plan.run.seed},
        "device": {
            "name": kind.description,
            "memory": kind.memory,
            "peak_flops": rates.peak,
            "share": rates.share,
            "source": kind.source,
            "per_second": describe_rates(rates),
        },
        "precision": simulated.machine.precision,
        "model_type": simulated.config.model_type,
        "parameters": simulated.num_parameters,
        "trained_parameters": simulated.num_trained,
        "tokens_per_step": plan.budget.batch_size * plan.model.max_seq_length,
        "stages": len(simulated.stages),
        "steps_per_stage": count_steps(plan),
        "process": process_bytes,
        "micro_batch": plan.trainer.micro_batch,
        "estimates": estimates,
        "not_included": list_not_included(simulated, layouts),
    }


def measure_process(plan: Plan) -> int:
    """The bytes of main memory that this process holds: Python and the libraries of a run. bitsandbytes is
    imported for a run that needs it, as a computed plan does not."""
    needs_kernels = find_quantization(plan) != "none" or plan.optim.target == ADAMW_8BIT
    if needs_kernels and importlib.util.find_spec("bitsandbytes") is not None:
        importlib.import_module("bitsandbytes")
    return psutil.Process().memory_info().rss


def list_possible_layouts(plan: Plan, kind: DeviceKind) -> list[Layout]:
    """The layouts on numbers of devices among which the batch of a step divides."""
    layouts = []
    for num_devices in list_num_devices(plan, kind):
        try:
            layout = make_layout(plan, num_devices)
        except InvalidOptionError:  # of trainer.micro_batch
            continue
        if is_divisible(plan, layout):
            layouts.append(layout)
    return layouts


def find_limit(kind: DeviceKind, layout: Layout) -> int:
    """The bytes of memory that a process of a layout may take: processes on a CPU share the main memory."""
    return kind.memory if kind.is_gpu else kind.memory // layout.num_devices


@dataclass(frozen=True)
class Estimate:
    """What a run needs in a layout, and what makes it fit if it does not."""

    devices: int
    strategy: str
    micro_batch: int  # rows
    memory: Memory
    peak: int
    holes: int  # bytes of the C heap between tensors; 0 on a GPU
    free: int  # bytes; below 0 where it does not fit
    change: PlanChange | None  # None where it fits, and where no change makes it fit
    host: int  # bytes of main memory
    seconds: Mapping[str, float | None]


def estimate_layout(
    simulated: SimulatedPlan, layout: Layout, rates: Rates, changes: ChangeSearch, *, process_bytes: int
) -> Estimate:
    """What a run needs in a layout. On a CPU the process has `process_bytes` without any tensor."""
    memory = find_memory(simulated, layout)
    peak = find_peak_bytes(memory)
    holes = count_heap_holes(simulated.kind, layout, memory)
    limit = find_limit(simulated.kind, layout) - process_bytes - holes
    return Estimate(
        devices=layout.num_devices,
        strategy=layout.strategy,
        micro_batch=count_micro_batch_rows(simulated.plan, layout),
        memory=memory,
        peak=peak,
        holes=holes,
        free=limit - peak,
        change=changes.find(layout, limit=limit) if peak > limit else None,
        host=count_host_bytes(simulated, layout),
        seconds=find_seconds(simulated, layout, rates),
    )


def count_heap_holes(kind: DeviceKind, layout: Layout, memory: Memory) -> int:
    """The bytes that the C heap of a CPU keeps between the tensors of a step, and in which none of them fits.
    With activation checkpointing it returns what is freed, and has few."""
    if kind.is_gpu or layout.is_checkpointed or STEP not in memory:
        return 0
    return int(HEAP_HOLES * memory[STEP].get(ACTIVATIONS, 0))


def describe_rates(rates: Rates) -> dict[str, Any]:
    """What a device does in a second, as plan=json prints it; null for what the rate of products includes."""
    return {
        "flops": dict(rates.flops),
        "num_bytes": None if math.isinf(rates.num_bytes) else rates.num_bytes,
        "num_dequantized": None if math.isinf(rates.num_dequantized) else rates.num_dequantized,
    }


def why_computed(plan: Plan) -> str:
    """Why a plan is computed instead of measured here; "" where it is measured."""
    if plan.run.plan_device is not None:
        return f"plan_device={plan.run.plan_device}"
    checkpoint = plan.model.name_or_path
    if checkpoint is not None and has_config_alone(Path(checkpoint)):
        return f"{checkpoint} has no weights"

    # Most models are small, and need no simulation to see it.
    kind = choose_kind(plan)
    if STATE_BYTES * count_parameters(plan) <= kind.memory:
        return ""
    log.info("Computing whether the run fits this machine")
    try:
        simulated = SimulatedPlan(plan, kind)
    except ValueError:  # which the checks of the measured plan report
        return ""
    state_bytes = find_state_bytes(simulated, make_layout(plan, 1))
    if state_bytes <= kind.memory:
        return ""
    return (
        f"weights, gradients and optimizer state are {format_bytes(state_bytes)}, too much for this machine"
    )


def count_parameters(plan: Plan) -> int:
    """The parameters of a model; 0 of one that cannot be built, which the checks of the plan report."""
    try:
        config = read_computed_config(plan)
        objective_name = loading.resolve_objective(plan.model.objective, config)
        skeleton = build_skeleton(config, objective_name, source="model")
    except ValueError:
        return 0
    return sum(parameter.numel() for parameter in skeleton.parameters())


def has_config_alone(folder: Path) -> bool:
    """Whether a folder has the configuration of a model and no file of weights."""
    if not (folder / CONFIG_NAME).is_file():
        return False
    return not any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir())


def choose_kind(plan: Plan) -> DeviceKind:
    """The kind of device that a plan is computed for: that of `plan_device`, else this machine's."""
    name = plan.run.plan_device
    if name is not None and name != THIS_CPU:
        return GPUS[name]
    source = "its speed is measured here"
    has_gpu = name is None and plan.trainer.accelerator != "cpu" and torch.cuda.is_available()
    if has_gpu:
        properties = torch.cuda.get_device_properties(0)
        return DeviceKind(
            f"{properties.name}, of this machine", properties.total_memory, peak_flops={}, source=source
        )
    return DeviceKind("CPU of this machine", find_total_memory(), peak_flops={}, source=source, is_gpu=False)


def list_num_devices(plan: Plan, kind: DeviceKind) -> list[int]:
    """The numbers of devices for which a plan is computed, including that of the config. A CPU is one device;
    its processes are those of the config."""
    numbers = set(NUM_DEVICES) if kind.is_gpu else {1}
    num_configured = count_devices(plan.trainer.devices)
    if num_configured is not None:
        numbers.add(num_configured * plan.trainer.num_nodes)
    return sorted(numbers)


def count_host_bytes(simulated: SimulatedPlan, layout: Layout) -> int:
    """The bytes of a machine's main memory while its processes load a checkpoint, with what is offloaded."""
    num_processes = max(1, layout.num_devices // simulated.plan.trainer.num_nodes)
    state = simulated.find_last_state()
    loaded = HOST_BYTES * simulated.num_parameters
    is_narrow = simulated.machine.base_dtype != torch.float32
    if is_narrow or simulated.quantization != "none":  # each tensor is converted as it is read
        loaded = state[WEIGHTS].on_device(1)
    offloaded = sum(state_bytes.offloaded for state_bytes in state.values())
    return num_processes * (loaded + offloaded)


def list_not_included(simulated: SimulatedPlan, layouts: Sequence[Layout]) -> list[str]:
    """What a run does or needs and the plan leaves out."""
    not_included = ["communication between devices", "checkpoints", "fragments of memory"]
    evaluation = simulated.find_evaluation(layouts[0].eval_batch_size)
    if evaluation is None:
        not_included.append("evaluation")
    if None in simulated.find_around(count_importance_rows(simulated.plan, layouts[0])):
        not_included.append("the method's work before or after a domain")
    if simulated.plan.trainer.compile:
        not_included.append("what trainer.compile saves")
    if simulated.plan.measures_chats:
        not_included.append("chats")
    return [*not_included, *list_excluded_options(simulated.plan)]


def format_device(device: Mapping[str, Any]) -> str:
    """The name of a device and its memory, which the name of a GPU has."""
    if device["name"] in {gpu.description for gpu in GPUS.values()}:
        return str(device["name"])
    return f"{device['name']}, {format_bytes(device['memory'])}"


def format_computed(cost: Mapping[str, Any]) -> str:
    """What plan=true prints of a computed plan."""
    run = cost["run"]
    device = cost["device"]
    choices = " ".join(f"{group}={run[group]}" for group in ("method", "mask", "replay", "model", "seed"))
    steps = cost["steps_per_stage"]
    shown_steps = "as many steps as its text has" if steps is None else count_noun(steps, "step")
    sections = [
        f"Computed plan ({cost['cause']}): {choices}, {cost['precision']}",
        f"Model: {cost['model_type']}, {cost['parameters']:,} parameters, "
        f"{cost['trained_parameters']:,} trained; {count_noun(cost['stages'], 'domain')} of {shown_steps}, "
        f"{count_noun(cost['tokens_per_step'], 'token')} a step",
        f"Device: {format_device(device)} ({device['source']})",
        format_estimates(cost["estimates"], cost["process"]),
        *[format_fitting_change(estimate) for estimate in cost["estimates"] if estimate["free"] < 0],
        f"Computed, not measured: memory of allocated tensors, time of {format_rates(device)}.",
        f"Not included: {', '.join(cost['not_included'])}.",
    ]
    if cost["micro_batch"] == AUTO:
        sections.append(
            f"trainer.micro_batch=auto takes at most {TRIED_SHARE:.0%} of the memory, as in a run; "
            f"with strategy=fsdp {COMPUTED_SHARE:.0%}."
        )
    return "\n\n".join(sections)


def format_rates(device: Mapping[str, Any]) -> str:
    """What the time of operations follows from."""
    if device["share"] is not None:
        return (
            f"operations at {device['share']:.0%} of {device['peak_flops'] / 1e12:,.4g} TFLOP/s "
            f"({SHARE_SOURCES[device['share']]})"
        )
    per_second = device["per_second"]
    products = [f"{flops / 1e9:,.3g} GFLOP/s in {name}" for name, flops in per_second["flops"].items()]
    return (
        "operations that were timed on this CPU when the plan was made; of updates and casts of weights at "
        f"{' and '.join(products)}, {per_second['num_bytes'] / 1e9:,.3g} GB/s of bytes moved"
    )


def format_estimates(estimates: Sequence[Mapping[str, Any]], process_bytes: int) -> str:
    """A table with a column for each number of devices."""
    columns = {}
    for estimate in estimates:
        columns[f"{estimate['devices']} x {estimate['strategy']}"] = format_column(estimate, process_bytes)
    frame = pd.DataFrame(columns)
    is_empty = frame.map(lambda cell: cell in ("", "0 B")).all(axis=1)
    return frame[~is_empty].to_string()


def format_column(estimate: Mapping[str, Any], process_bytes: int) -> dict[str, str]:
    """The cells of a column: memory of a step by use, peaks of the phases, what the process holds besides
    tensors, and time."""
    step_memory = estimate["memory"].get(STEP, {})
    cells = {"samples of a micro-batch": str(estimate["micro_batch"])}
    for use in USES:
        cells[use] = format_bytes(step_memory.get(use, 0))
    for phase, by_use in estimate["memory"].items():
        cells[f"peak of {phase}"] = format_bytes(sum(by_use.values()))
    cells["Python and libraries"] = format_bytes(process_bytes)
    cells["holes of the C heap"] = format_bytes(estimate["holes"])
    free = estimate["free"]
    cells["fits"] = f"yes, {format_bytes(free)} free" if free >= 0 else f"no, {format_bytes(-free)} too much"
    cells["main memory of the host"] = format_bytes(estimate["host"])

    seconds = estimate["seconds"]
    if seconds["step"] is not None:
        cells["seconds of a step"] = f"{seconds['step']:,.3g}"
    for name in ("training", "around domains", "evaluation"):
        if seconds[name]:
            shown_name = "evaluation, at most" if name == "evaluation" else name
            cells[f"time: {shown_name}"] = str(timedelta(seconds=round(seconds[name])))
    return cells


def format_fitting_change(estimate: Mapping[str, Any]) -> str:
    """The line that says what makes a run fit."""
    devices = f"{estimate['devices']} x {estimate['strategy']}"
    change = estimate["change"]
    if change is None:
        return f"{devices} fits with none of the changes that were tried."
    overrides = " ".join(change["overrides"])
    step_seconds = change["seconds"]["step"]
    shown_time = "" if step_seconds is None else f", {step_seconds:,.3g} s a step"
    return f"{devices} fits with {overrides} ({format_bytes(change['peak'])}{shown_time})."
