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
from cpt.core.memory import forget_peak, give_back, peak
from cpt.core.processes import rank_and_world
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod
from cpt.models.loading import make_skeleton

ATEN = torch.ops.aten
ON_CPU = {  # attention on a CPU, which the counter lacks; shapes [B, H, T, D]
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *rest, **options: (
        sdpa_flop_count(query, key, value)
    ),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *rest, **how: (
        sdpa_backward_flop_count(grad, query, key, value)
    ),
}


COUNTS = {**flop_registry, **{kernel: shape_wrapper(count) for kernel, count in ON_CPU.items()}}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperationCounter(TorchDispatchMode):
    """Counts the operations of matrix products, convolutions and attention, forward and backward.

    As torch's FlopCounterMode, but each kernel is looked up once: on a CPU it takes 4 µs more instead of 15,
    which counts while importances are measured. Nor are there hooks on modules, which break
    torch.autograd.grad where an input is a parameter (relative positions of DeBERTa-v2)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.known: dict[Any, tuple[Callable[..., int] | None, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.known:
            count = COUNTS.get(getattr(func, "_overloadpacket", func))
            self.known[func] = count, count is None and func.has_kernel_for_dispatch_key(COMPOSITE)
        count, composite = self.known[func]
        if composite:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out


def own_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters and buffers of a model's class, without what was attached since."""
    authors = make_skeleton(model)
    return {*authors.state_dict(), *(name for name, _ in authors.named_buffers())}


def stored_beside(module: ContinualMethod, state: dict[str, Tensor]) -> int:
    """Bytes that a method stores in its state_dict and other buffers beyond its `model`'s own weights."""
    return stored_bytes(dict(module.named_buffers()) | state, own_names(module.model))


def stored_bytes(state: Mapping[str, Tensor], own: set[str]) -> int:
    """Bytes of a method's tensors beyond the model's own weights; a tensor with two names counts once."""
    sizes, inside = dict[int, int](), {f"model.{name}" for name in own}
    for name, each in state.items():
        if name.replace(".base_layer", "") not in inside:  # where peft moves the weight of a layer
            place = to_local(each).untyped_storage()._cdata if is_sharded(each) else each.data_ptr()
            sizes[place] = each.nbytes
    return sum(sizes.values())


def trained_parameters(module: nn.Module) -> int:
    """The number of values that the optimizer updates."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


class CostMonitor(Callback):
    """Measures a stage: tokens that its steps read, floating-point operations, peak memory, learning rates.

    Operations of forward, backward and a method's own passes are counted during the first step, which stands
    for all (where steps differ, the mean of a `period` of the method's, from the step on in which it is
    `settled`), and during the method's work before and after the domain. A resumed stage continues the counts
    of its checkpoint."""

    def __init__(self) -> None:
        self.tokens, self.memory = 0, 0
        self.rates: list[float] = []  # of the first step, highest, of the last
        self.flops = {"before": 0, "step": 0, "after": 0}
        self.counter: OperationCounter | None = None
        self.counted_to = self.counted = self.left_out = 0  # the last step that is counted, and how many are
        self.paced = (0, 0, 0.0)  # step, tokens and time of the last point of the curves

    def costs(self, trainer: Trainer) -> dict[str, int]:
        """Sums of all processes, memory of the one that needs most. Every process has to call it."""
        flops = self.flops["before"] + self.flops["step"] * trainer.global_step + self.flops["after"]
        own = torch.tensor([self.tokens, flops], dtype=torch.float64, device=trainer.strategy.root_device)
        # float64: exact up to 2^53 tokens, and to 16 digits beyond.
        tokens, flops = trainer.strategy.reduce(own, reduce_op="sum").tolist()
        return {"seen": int(tokens), "flops": int(flops), "memory": self.memory}

    def begin(self) -> None:
        self.counter = OperationCounter()
        self.counter.__enter__()

    def end(self, phase: str) -> None:
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            self.flops[phase] = self.counter.total - self.left_out
            self.counter, self.left_out = None, 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leaves out the operations of what is not part of the stage."""
        before = self.counter.total if self.counter else 0
        yield
        self.left_out += self.counter.total - before if self.counter else 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        give_back()
        forget_peak(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.paced = trainer.global_step, self.tokens, time.perf_counter()
        self.counted_to = 0  # of a try that was rolled back
        if trainer.global_step == 0:
            self.begin()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Batch, at: int) -> None:
        settled = min(getattr(cast(Any, module), "settled", 0), trainer.max_steps - 1)
        if self.flops["step"] == 0 and self.counted_to <= trainer.global_step:
            self.end("before")
            if trainer.global_step < settled:
                return
            self.begin()
            self.counted = min(getattr(module, "period", 1), trainer.max_steps - trainer.global_step)
            self.counted_to = trainer.global_step + self.counted

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        first, highest, _ = self.rates or [rate] * 3
        self.rates = [first, max(highest, rate), rate]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, at: int) -> None:
        step = trainer.global_step
        if step == self.counted_to and self.counter is not None:
            self.end("step")
            self.flops["step"] //= self.counted
        present = batch.get("attention_mask")
        self.tokens += batch["input_ids"].numel() if present is None else int(present.sum())
        if "decoder_input_ids" in batch:  # without padding
            self.tokens += len(batch["positions"])
        last, tokens, then = self.paced
        if step != last and step % trainer.log_every_n_steps == 0:
            self.paced = step, self.tokens, time.perf_counter()
            per_s = (self.tokens - tokens) / (self.paced[2] - then)
            for name, value in (("tokens", float(self.tokens)), ("tokens_per_s", per_s)):
                module.log(f"train/{name}/{module.domain.name}", value, sync_dist=True, reduce_fx="sum")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.end("after")
        self.memory = max(self.memory, peak(trainer.strategy.root_device))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.end("before")

    def state_dict(self) -> dict[str, Any]:
        own = {"tokens": self.tokens, "memory": self.memory, "rates": self.rates, **self.flops}
        return own | {"processes": rank_and_world()[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counts are those of one process: with another number of processes each takes its share."""
        then, now = state["processes"], rank_and_world()[1]
        self.memory, self.rates = state["memory"], list(state["rates"])
        self.tokens = round(state["tokens"] * then / now)
        self.flops = {phase: round(state[phase] * then / now) for phase in self.flops}


@contextmanager
def time_phase(took: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of a phase to those of others."""
    began = time.perf_counter()
    yield
    took[phase] = took.get(phase, 0.0) + time.perf_counter() - began
