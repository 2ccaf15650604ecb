"""What `auto` becomes on this machine: devices, strategy, data loader processes, precision, dropout and
attention implementation."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PretrainedConfig

from cpt.core.processes import count_cores, is_first_process
from cpt.models.fast_kernels import drops_attention
from cpt.trainer.compile_choice import choose_compilation
from cpt.trainer.options import BF16, FP16_MIXED, Precision, Strategy, TrainerOptions
from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)
MIN_BF16_WIDTH = 256  # hidden size from which bf16 is faster than fp32 on a CPU
MAX_EAGER_LENGTH = 512  # tokens to which eager is faster in 16 bits (benchmarks/costs/attention.py)
BF16_CAPABILITIES = ("avx512_bf16", "amx_tile")  # of torch.cpu.get_capabilities
MAX_NUM_WORKERS = 2  # data loader processes for each device
AUTOCAST_TYPES: Mapping[Any, torch.dtype] = {  # by trainer.precision
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    **dict.fromkeys(FP16_MIXED, torch.float16),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The processes of a run, and the options of its trainer with what `auto` became."""

    device: torch.device  # of this process
    num_processes: int  # on this machine
    world_size: int  # processes on all machines
    devices: Any  # of trainer.devices
    strategy: Strategy
    num_workers: int  # data loader processes of each process
    precision: Precision
    attn_implementation: str  # `auto` is the default of the model
    quick_dropout: bool
    base_dtype: torch.dtype = torch.float32  # of the weights that no stage changes
    compiles_blocks: bool = False

    def lightning_arguments(self, options: TrainerOptions) -> dict[str, Any]:
        """The arguments of `cpt.trainer.lightning.make_trainer`."""
        return options.lightning | {
            "devices": self.devices,
            "strategy": self.strategy,
            "precision": self.precision,
        }


def make_autocast(
    precision: Precision, device_type: str, *, cache_enabled: bool = True
) -> AbstractContextManager[Any]:
    """Autocast as Lightning's precision has it; nothing for a precision that is not mixed."""
    dtype = AUTOCAST_TYPES.get(precision)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device_type, dtype, cache_enabled=cache_enabled)


def choose_devices(options: TrainerOptions) -> tuple[Any, Strategy]:
    """The devices and the strategy. `strategy=auto` takes the GPUs of this machine among which a micro-batch
    divides evenly, with DDP; else one device."""
    if options.strategy != "auto" or options.devices != "auto":
        return options.devices, options.strategy

    num_gpus = count_gpus(options)
    num_shares = options.batch_size // options.accumulate_grad_batches  # of a step, among the devices
    if isinstance(options.micro_batch, int):
        num_shares = options.batch_size // options.micro_batch
    num_devices = 1
    for number in range(1, num_gpus + 1):
        if num_shares % number == 0:
            num_devices = number
    if num_gpus > 1 and is_first_process():
        log.info(
            "Using %d of %d GPUs (strategy=auto, trainer.batch_size=%d)",
            num_devices,
            num_gpus,
            options.batch_size,
        )
    return num_devices, "ddp" if num_devices > 1 else "auto"


def count_gpus(options: TrainerOptions) -> int:
    """The GPUs of this machine that the accelerator may use; 0 for a CPU."""
    if options.accelerator not in ("auto", "gpu", "cuda"):
        return 0
    return torch.cuda.device_count()


def choose_num_workers(options: TrainerOptions, devices: Any) -> int:
    """The data loader processes of each device: one core is left for the training process."""
    if options.num_workers != "auto":
        return options.num_workers
    num_gpus = count_gpus(options)
    if num_gpus == 0:
        return 0
    num_devices = num_gpus
    if isinstance(devices, int) and devices > 0:
        num_devices = devices
    free_cores = count_cores() // num_devices - 1
    return min(MAX_NUM_WORKERS, max(0, free_cores))


def choose_precision(
    options: TrainerOptions,
    config: PretrainedConfig,
    device: torch.device,
    *,
    stored_precision: Precision | None,
) -> Precision:
    """The precision on a device. `auto` is the `stored_precision` of a run that is resumed. For a new run it
    is bf16-mixed on a GPU that supports it, else 32-true."""
    precision = options.precision
    if precision == "auto":
        precision = stored_precision or choose_fastest_precision(device)
        hint = ""
        if stored_precision is None and precision == "32-true" and is_bf16_faster(device, config):
            hint = "; bf16-mixed was 1.9 times as fast on such a CPU (docs/studies/performance.md)"
        log.info("Precision (trainer.precision=auto): %s%s", precision, hint)

    if precision in FP16_MIXED and device.type == "cpu":
        # Lightning would do the same, and scores.json would name another precision than that of the losses.
        log.warning("Precision: bf16-mixed in place of %s, which a CPU does not support", precision)
        precision = "bf16-mixed"
    if precision in BF16 and device.type == "cpu" and is_bf16_emulated():
        log.warning(
            "Precision: %s is slow on this CPU, whose products in bf16 take 5 to 60 times as long as in 32 "
            "bits, as it has no AVX-512. trainer.precision=32-true is faster",
            precision,
        )
    return precision


def choose_fastest_precision(device: torch.device) -> Precision:
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return "bf16-mixed"
    return "32-true"


def is_bf16_emulated() -> bool:
    """Whether this CPU has neither instructions for bf16 nor those with which oneDNN does without them."""
    capabilities = torch.cpu.get_capabilities()
    return capabilities.get("architecture") == "x86_64" and not capabilities.get("avx512_f", False)


def is_bf16_faster(device: torch.device, config: PretrainedConfig) -> bool:
    """Whether a CPU multiplies in bf16, and the model is wide enough to gain from it."""
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    if not any(capabilities.get(name, False) for name in BF16_CAPABILITIES):
        return False
    return config.get_text_config().hidden_size >= MIN_BF16_WIDTH


def choose_attention(
    options: TrainerOptions,
    config: PretrainedConfig,
    device: torch.device,
    *,
    precision: Precision,
    quick_dropout: bool,
    max_seq_length: int,
) -> str:
    """The attention implementation on a device: `auto` is eager on a CPU if that is faster than torch's
    kernel. Quick dropout acts on eager attention alone, and in 16 bits it is faster for short sequences."""
    if options.attn_implementation != "auto" or device.type != "cpu":
        return options.attn_implementation

    has_quick_dropout = quick_dropout and drops_attention(config)
    is_short_in_bf16 = precision in BF16 and max_seq_length <= MAX_EAGER_LENGTH
    if not has_quick_dropout and not is_short_in_bf16:
        return "auto"
    log.info("Attention (trainer.attn_implementation=auto): eager, which is faster on a CPU here")
    return "eager"


def resolve_machine(
    plan: Plan,
    config: PretrainedConfig,
    *,
    device: torch.device,
    devices: Any,
    strategy: Strategy,
    num_processes: int,
    stored_numerics: Mapping[str, str],
    base_dtype: torch.dtype,
) -> Machine:
    """The machine of a run with the model of `config`. Devices and strategy are those of `choose_devices`;
    `stored_numerics` are those of a run that is resumed, empty for a new one."""
    options = plan.trainer
    precision = choose_precision(
        options,
        config,
        device,
        stored_precision=cast(Precision | None, stored_numerics.get("precision")),
    )
    compiles_blocks = choose_compilation(plan, device, stored=stored_numerics.get("compile"))
    quick_dropout = options.quick_dropout
    if quick_dropout == "auto":
        quick_dropout = device.type == "cpu" and not compiles_blocks
    attention = choose_attention(
        options,
        config,
        device,
        precision=precision,
        quick_dropout=quick_dropout,
        max_seq_length=plan.model.max_seq_length,
    )
    return Machine(
        device=device,
        num_processes=num_processes,
        world_size=num_processes * options.num_nodes,
        devices=devices,
        strategy=strategy,
        num_workers=choose_num_workers(options, devices),
        precision=precision,
        attn_implementation=attention,
        quick_dropout=quick_dropout,
        base_dtype=base_dtype,
        compiles_blocks=compiles_blocks,
    )
