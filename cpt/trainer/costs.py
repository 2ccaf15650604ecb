"""The costs of a method: what it trains, stores in addition to the model, reads and computes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper
from transformers import PreTrainedModel

from cpt.core.distributed import is_sharded, to_local
from cpt.core.memory import read_peak_bytes, reset_peak_bytes, trim_heap
from cpt.core.processes import rank_and_world
from cpt.data.collate import Batch
from cpt.evaluation.scores import StageCosts
from cpt.methods.base import ContinualMethod
from cpt.models.loading import make_skeleton
from cpt.models.quantization import count_stored

ATEN = torch.ops.aten
BYTES_PER_GB = 1e9


def count_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def count_attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def count_grouped_products(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """The operations of `_grouped_mm`. One or both of its arguments have an axis of groups in addition to
    those of a product, or lie group after group along the axis that is summed over."""
    return 2 * rows[-2] * rows[-1] * weights[-1]


CPU_ATTENTION_COUNTS = {  # attention on a CPU, which the counter lacks; shapes [B, H, T, D]
    ATEN._scaled_dot_product_flash_attention_for_cpu: count_attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: count_attention_backward,
}
OPERATION_COUNTS = flop_registry | {
    kernel: shape_wrapper(count) for kernel, count in CPU_ATTENTION_COUNTS.items()
}
OPERATION_COUNTS[ATEN.addmm_] = flop_registry[ATEN.addmm]  # by which chunks of logits add up their gradient
OPERATION_COUNTS[ATEN._grouped_mm] = shape_wrapper(count_grouped_products)  # of mixtures of experts
COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd


class OperationCounter(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention, forward and backward.

    As torch's FlopCounterMode, but each kernel is looked up once: on a CPU it takes 4 µs more instead of 15,
    which counts while importances are measured. Nor are there hooks on modules, which break
    torch.autograd.grad where an input is a parameter (relative positions of DeBERTa-v2)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        # By kernel: what counts its operations, and whether it has to be decomposed first.
        self.kernels: dict[Any, tuple[Callable[..., int] | None, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.kernels:
            count = OPERATION_COUNTS.get(getattr(func, "_overloadpacket", func))
            is_known = func.namespace != "prim"  # as prim.device, of tensors without storage
            is_composite = count is None and is_known and func.has_kernel_for_dispatch_key(COMPOSITE_KEY)
            self.kernels[func] = (count, is_composite)

        count, is_composite = self.kernels[func]
        if is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        output = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=output)
        return output


def find_original_names(model: PreTrainedModel) -> set[str]:
    """The names of the parameters and buffers that a model has without adapters and whatever else a method
    has attached to it: those of a new model of its configuration."""
    new_model = make_skeleton(model)
    names = set(new_model.state_dict())
    names.update(name for name, _ in new_model.named_buffers())
    return names


def restore_original_name(name: str) -> str:
    """The name that a parameter had before peft moved the weight of its layer into a `base_layer`."""
    return name.replace(".base_layer", "")


def count_added_state_bytes(module: ContinualMethod, state: Mapping[str, Tensor]) -> int:
    """Bytes of the state that a method adds to its model: those of `state`, its state dict, and of its other
    buffers, without the original weights of the model."""
    return count_stored_bytes(dict(module.named_buffers()) | dict(state), find_original_names(module.model))


def count_stored_bytes(state: Mapping[str, Tensor], model_names: set[str]) -> int:
    """Bytes of a method's tensors beyond the weights of its model, whose names in the model are
    `model_names`. A tensor with two names counts once."""
    names_in_method = {f"model.{name}" for name in model_names}
    sizes: dict[int, int] = {}  # by address
    for name, tensor in state.items():
        if restore_original_name(name) in names_in_method:
            continue
        sizes[find_address(tensor)] = tensor.nbytes
    return sum(sizes.values())


def find_address(tensor: Tensor) -> int:
    """Where a tensor lies in memory; of a sharded one its local rows."""
    if is_sharded(tensor):
        return to_local(tensor).untyped_storage()._cdata
    return tensor.data_ptr()


def count_weights(model: PreTrainedModel) -> int:
    """The numbers in a model without what a method has attached to it."""
    names = find_original_names(model)
    num_quantized = count_stored(model)
    count = 0
    for name, parameter in model.named_parameters():
        if restore_original_name(name) in names:
            count += num_quantized.get(id(parameter), parameter.numel())
    return count


def count_trained_parameters(module: nn.Module) -> int:
    """The number of values that the optimizer updates."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


class CostMonitor(Callback):
    """Measures a stage: tokens that its steps read, floating-point operations, peak memory, learning rates.

    Operations of forward, backward and a method's own passes are counted during the first step, which stands
    for all (where steps differ, the mean of a `period` of the method's, from the step on in which it is
    `settled`), and during the method's work before and after the domain. A resumed stage continues the counts
    of its checkpoint.

    `earlier_steps`: optimizer steps of the stages before, with which curves count those of the whole run."""

    def __init__(self, *, earlier_steps: int = 0) -> None:
        self.earlier_steps = earlier_steps
        self.tokens = 0
        self.memory = 0
        self.rates: list[float] = []  # of the first step, highest, of the last
        self.flops = {"before": 0, "step": 0, "after": 0}

        self.counter: OperationCounter | None = None  # while operations are counted
        self.excluded_flops = 0  # of the current count
        self.num_counted_steps = 0
        self.last_counted_step = 0

        # The last point of the curves of throughput.
        self.point_step = 0
        self.point_tokens = 0
        self.point_time = 0.0
        self.tokens_per_s = 0.0  # of this process up to that point; 0 before the second one

    def stage_costs(self, trainer: Trainer) -> StageCosts:
        """The measured part of a stage's costs: sums over all processes, and the memory of the process that
        needs most. Every process has to call it."""
        flops = self.flops["before"] + self.flops["step"] * trainer.global_step + self.flops["after"]
        # float64: exact up to 2^53 tokens, and to 16 digits beyond.
        counts = torch.tensor([self.tokens, flops], dtype=torch.float64, device=trainer.strategy.root_device)
        total_tokens, total_flops = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        return StageCosts(
            tokens_read=int(total_tokens),
            flops=int(total_flops),
            memory=self.memory,
            rates=self.rates,
        )

    def start_counting(self) -> None:
        self.counter = OperationCounter()
        self.counter.__enter__()

    def stop_counting(self, phase: str) -> None:
        """Stores the operations since `start_counting` as those of a phase, if they are counted."""
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            self.flops[phase] = self.counter.total - self.excluded_flops
            self.counter = None
            self.excluded_flops = 0

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Inside the context operations are not counted: they are not part of the stage."""
        if self.counter is None:
            yield
            return
        total_before = self.counter.total
        yield
        self.excluded_flops += self.counter.total - total_before

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trim_heap()
        reset_peak_bytes(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_point(trainer.global_step)
        self.last_counted_step = 0  # an attempt may have been rolled back
        if trainer.global_step == 0:
            self.start_counting()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        is_counted = self.flops["step"] != 0 or self.last_counted_step > trainer.global_step
        if is_counted:
            return
        self.stop_counting("before")

        method = cast(ContinualMethod, pl_module)
        first_counted_step = min(method.settled, trainer.max_steps - 1)
        if trainer.global_step >= first_counted_step:
            self.start_counting()
            self.num_counted_steps = min(method.period, trainer.max_steps - trainer.global_step)
            self.last_counted_step = trainer.global_step + self.num_counted_steps

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        if not self.rates:
            self.rates = [rate, rate, rate]
            return
        first, highest, _ = self.rates
        self.rates = [first, max(highest, rate), rate]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self.last_counted_step and self.counter is not None:
            self.stop_counting("step")
            self.flops["step"] //= self.num_counted_steps

        self.tokens += count_tokens(batch)
        if step != self.point_step and step % trainer.log_every_n_steps == 0:
            self.log_throughput(step, pl_module)

    def log_throughput(self, step: int, module: Any) -> None:
        """Logs the tokens and steps so far, the tokens per second since the last point, and the peak memory
        (GB) of the process that needs most."""
        previous_tokens = self.point_tokens
        previous_time = self.point_time
        self.start_point(step)
        self.tokens_per_s = (self.tokens - previous_tokens) / (self.point_time - previous_time)

        domain = module.domain.name
        module.log(f"train/tokens/{domain}", float(self.tokens), sync_dist=True, reduce_fx="sum")
        module.log(f"train/tokens_per_s/{domain}", self.tokens_per_s, sync_dist=True, reduce_fx="sum")
        module.log(f"train/global_step/{domain}", float(self.earlier_steps + step))
        memory = read_peak_bytes(module.device) / BYTES_PER_GB
        module.log(f"train/memory_gb/{domain}", memory, sync_dist=True, reduce_fx="max")

    def start_point(self, step: int) -> None:
        self.point_step = step
        self.point_tokens = self.tokens
        self.point_time = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_counting()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stop_counting("after")
        self.memory = max(self.memory, read_peak_bytes(trainer.strategy.root_device))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.stop_counting("before")

    def state_dict(self) -> dict[str, Any]:
        _, num_processes = rank_and_world()
        return {
            "tokens": self.tokens,
            "memory": self.memory,
            "rates": self.rates,
            **self.flops,
            "processes": num_processes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counts are those of one process: with another number of processes each takes its share."""
        stored_processes = state["processes"]
        _, num_processes = rank_and_world()
        self.memory = state["memory"]
        self.rates = list(state["rates"])
        self.tokens = round(state["tokens"] * stored_processes / num_processes)
        for phase in self.flops:
            self.flops[phase] = round(state[phase] * stored_processes / num_processes)


def count_tokens(batch: Any) -> int:
    """The tokens that a model reads of a batch, without padding."""
    mask = batch.get("attention_mask")
    num_tokens = batch["input_ids"].numel() if mask is None else int(mask.sum())
    if "decoder_input_ids" in batch:
        num_tokens += len(batch["positions"])
    return num_tokens


@contextmanager
def time_phase(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of a phase to those that it has taken before."""
    start_time = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start_time
