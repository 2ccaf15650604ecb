"""What a method costs: what it trains, keeps beside the model, reads and computes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel

from cpt.core.memory import forget_peak, give_back, peak
from cpt.core.sharding import is_sharded, local
from cpt.data.batch import Batch
from cpt.models.loading import skeleton


def own_names(model: PreTrainedModel) -> set[str]:
    """The names of the parameters and buffers of a model as its authors wrote it, without what was attached
    since."""
    authors = skeleton(model)
    return {*authors.state_dict(), *(name for name, _ in authors.named_buffers())}


def stored_beside(module: nn.Module, state: Mapping[str, Tensor]) -> int:
    """Bytes that a method keeps beyond its `model`'s own weights: in its state_dict, and in buffers that are
    not part of it, as copies that construction always gives again."""
    return stored_bytes(dict(module.named_buffers()) | state, own_names(module.model))


def stored_bytes(state: Mapping[str, Tensor], own: set[str]) -> int:
    """Bytes of a method's tensors beyond the model's own weights; what has two names counts once."""
    # peft moves the weight of a map that it adapts one level down.
    inside = {f"model.{name}" for name in own}
    beside = [value for name, value in state.items() if name.replace(".base_layer", "") not in inside]
    return sum({place_of(each): each.nbytes for each in beside}.values())


def place_of(tensor: Tensor) -> int:
    """Where a tensor is in memory; of one that is shared out, whose own rows are."""
    return local(tensor).untyped_storage()._cdata if is_sharded(tensor) else tensor.data_ptr()


def trained_parameters(module: nn.Module) -> int:
    """How many numbers the optimizer moves."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def attention(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any) -> int:
    """Operations of attention, from shapes [B, H, T, D]."""
    return sdpa_flop_count(query, key, value)


def attention_backward(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **options: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


ON_CPU = {  # the processor's own attention, which the counter lacks
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


class Nowhere:
    """In place of torch's ModuleTracker, which says in which module an operation is: only the sum is asked
    for, and its hooks on the inputs of modules break torch.autograd.grad where such an input is a parameter
    (DeBERTa-v2 hands its relative positions to a norm)."""

    parents = ("Global",)

    def __enter__(self) -> None:
        """Nothing is watched."""

    def __exit__(self, *args: Any) -> None:
        """Nothing was watched."""


def count_operations() -> FlopCounterMode:
    """Counts, while it is on, floating-point operations: those of matrix products, convolutions and
    attention, forward and backward."""
    counter = FlopCounterMode(display=False, custom_mapping=ON_CPU)
    counter.mod_tracker = Nowhere()
    return counter


class Compute(Callback):
    """Measures a stage: tokens that its steps read, floating-point operations, peak memory.

    Operations are those of matrix products, convolutions and attention, forward, backward and a method's own
    passes: counted during the first step, which stands for all (where steps differ, the mean of a `period` of
    the method's), and during what a method does before and after the domain. What was measured before a kill
    comes back with the trainer's state."""

    def __init__(self) -> None:
        self.tokens, self.memory = 0, 0
        self.flops = {"before": 0, "step": 0, "after": 0}
        self.counter: FlopCounterMode | None = None
        self.counted_to = self.counted = self.left_out = 0  # the last step that is counted, and how many are
        self.paced = (0, 0, 0.0)  # step, tokens and moment of the last point of the curves

    def costs(self, trainer: Trainer) -> dict[str, int]:
        """Of all processes together; memory of the one that needs most. Asked by every process."""
        flops = self.flops["before"] + self.flops["step"] * trainer.global_step + self.flops["after"]
        own = torch.tensor([self.tokens, flops], dtype=torch.float64, device=trainer.strategy.root_device)
        # float64: exact up to 2^53 tokens, and to 16 digits beyond.
        tokens, flops = trainer.strategy.reduce(own, reduce_op="sum").tolist()
        return {"seen": int(tokens), "flops": int(flops), "memory": self.memory}

    def begin(self) -> None:
        self.counter = count_operations()
        self.counter.__enter__()

    def end(self, phase: str) -> None:
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            self.flops[phase] = self.counter.get_total_flops() - self.left_out
            self.counter, self.left_out = None, 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is computed while it lasts is no part of the stage."""
        before = self.counter.get_total_flops() if self.counter else 0
        yield
        self.left_out += self.counter.get_total_flops() - before if self.counter else 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        give_back()
        forget_peak(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.paced = trainer.global_step, self.tokens, time.perf_counter()
        if trainer.global_step == 0:
            self.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self.flops["step"] == 0 and self.counted_to <= trainer.global_step:
            self.end("before")
            self.begin()
            self.counted = min(getattr(pl_module, "period", 1), trainer.max_steps - trainer.global_step)
            self.counted_to = trainer.global_step + self.counted

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self.counted_to and self.counter is not None:
            self.end("step")
            self.flops["step"] //= self.counted
        present = batch.get("attention_mask")
        self.tokens += batch["input_ids"].numel() if present is None else int(present.sum())
        if "decoder_input_ids" in batch:  # whose padding nothing is to be predicted at
            self.tokens += len(batch["positions"])
        self.note_pace(trainer, pl_module)

    def note_pace(self, trainer: Trainer, module: LightningModule) -> None:
        """Logs the tokens of the stage so far, and how many a second since the last time."""
        step, now = trainer.global_step, time.perf_counter()
        if step == self.paced[0] or step % trainer.log_every_n_steps:
            return
        _, tokens, then = self.paced
        self.paced = step, self.tokens, now
        noted = {"tokens": self.tokens, "tokens_per_s": (self.tokens - tokens) / (now - then)}
        for name, value in noted.items():
            module.log(f"train/{name}/{module.domain.name}", float(value), sync_dist=True, reduce_fx="sum")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.end("after")
        self.memory = max(self.memory, peak(trainer.strategy.root_device))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.end("before")

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "memory": self.memory, **self.flops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens, self.memory = state["tokens"], state["memory"]
        self.flops = {phase: state[phase] for phase in self.flops}


@contextmanager
def time_phase(took: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of a phase to the others."""
    began = time.perf_counter()
    yield
    took[phase] = took.get(phase, 0.0) + time.perf_counter() - began
