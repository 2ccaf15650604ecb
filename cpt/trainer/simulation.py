"""A method without storage, and the passes that it would make: their memory and their operations.

The model, the method and its optimizer are built inside torch's FakeTensorMode, where operations compute
shapes alone, and the method's own hooks run in the order of a stage. So the figures are right for any
architecture, and for any method whose steps do not depend on the values of weights."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from math import ceil
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from cpt.adapters.domain_store import BASE, list_tensors_in_memory
from cpt.core.allocations import AllocationRecorder, AllocationTable, KnownValues, UnitScalars
from cpt.core.distributed import clip_gradients, total_norm
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.methods.base import ContinualMethod
from cpt.models import chunked_head, loading
from cpt.models.activation_checkpointing import checkpoint_activations, stop_checkpointing
from cpt.models.chunked_head import count_head_entries
from cpt.models.fast_kernels import pad_head, use_quick_dropout
from cpt.models.forward import set_mode, set_temporarily
from cpt.models.fsdp import list_sharded_blocks
from cpt.models.narrow_layers import make_narrow
from cpt.models.objectives import Objective
from cpt.models.quantization import count_stored
from cpt.models.simulated_quantization import simulate_quantization
from cpt.models.without_storage import without_storage
from cpt.optim.schedulers import Progress
from cpt.optim.state import CarriedState
from cpt.trainer.auto import Machine, make_autocast
from cpt.trainer.build import assemble_method
from cpt.trainer.computed_work import Work, WorkRecorder
from cpt.trainer.costs import count_trained_parameters, find_original_names, restore_original_name
from cpt.trainer.full_batch import make_full_batch
from cpt.trainer.plan import Plan

# Uses of memory: of the state between two steps, and of a pass.
WEIGHTS = "weights"
METHOD_STATE = "method state"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
WEIGHT_COPIES = "copies of weights"
LOGITS = "logits and loss"
ACTIVATIONS = "activations and rest"

ADAMW_8BIT = "cpt.optim.adamw_8bit.AdamW8bit"
MUON = "cpt.optim.muon.MuonWithAdamW"
SIMULATED_ADAMW_8BIT = "cpt.optim.simulated_8bit.SimulatedAdamW8bit"
NEVER = 2**62  # more steps than any run has, and a size that no tensor has
MAX_TIMED_TOKENS = 512  # of a call of a kernel that is timed; of more it takes so much longer
MAX_KNOWN_VALUES = 2**20  # numbers in a buffer whose values may be known
PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
WEIGHT_TYPES: Mapping[Any, torch.dtype] = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the tensors with one use between two steps: sharded by FSDP, held by each process, and
    offloaded to the host."""

    sharded: int = 0
    replicated: int = 0
    offloaded: int = 0

    def on_device(self, num_shards: int) -> int:
        return ceil(self.sharded / num_shards) + self.replicated

    def plus(self, increment: "StateBytes", *, times: int) -> "StateBytes":
        return StateBytes(
            sharded=self.sharded + times * increment.sharded,
            replicated=self.replicated + times * increment.replicated,
            offloaded=self.offloaded + times * increment.offloaded,
        )


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of whole tensors that FSDP has in addition to a process's rows: weights in a forward pass,
    weights and gradients in training.

    Weights outside of the blocks are there throughout a pass. Those of blocks are the block that is computed,
    the next one, and the buffer that the next one is gathered in. Gradients are those of a block and the
    buffer that they are sent from."""

    weights: int
    in_training: int


class StorageCounts:
    """Bytes of storages by their use, each counted once."""

    def __init__(self) -> None:
        self.by_use = dict.fromkeys((WEIGHTS, METHOD_STATE, GRADIENTS, OPTIMIZER_STATE), StateBytes())
        self.counted: set[int] = set()  # addresses

    def add(self, use: str, tensor: Tensor, *, is_sharded: bool, is_offloaded: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.counted:
            return
        self.counted.add(storage._cdata)
        before = self.by_use[use]
        if is_offloaded:
            self.by_use[use] = replace(before, offloaded=before.offloaded + storage.nbytes())
        elif is_sharded:
            self.by_use[use] = replace(before, sharded=before.sharded + storage.nbytes())
        else:
            self.by_use[use] = replace(before, replicated=before.replicated + storage.nbytes())


class Pass:
    """The allocations of a pass over a batch, in addition to the state, and its work, for any number of rows.
    Their logits are divided into chunks if those of the recorded rows are.

    The recorded number of rows divides no size of the model: bytes that it divides grow with the rows. Logits
    have a row for each position of a chunk, `num_logit_rows` of them as recorded, and `count_logit_rows` says
    how many for another number of rows of the batch."""

    def __init__(
        self,
        allocations: AllocationTable,
        *,
        work: Mapping[tuple[bool, bool], Work],
        num_rows: int,
        num_logit_rows: int,
        count_logit_rows: Callable[[int], int],
        max_timed_rows: int,
        chunk_sizes: Collection[int],
    ) -> None:
        self.allocations = allocations
        self.work = work  # by whether it is of the update, and whether it grows with the rows
        self.num_rows = num_rows
        self.num_logit_rows = num_logit_rows
        self.count_logit_rows = count_logit_rows
        self.max_timed_rows = max_timed_rows  # of a call that is timed
        self.chunk_sizes = chunk_sizes  # the positions of recorded chunks of logits

    def find_peak(self, num_rows: int, *, excluded_uses: Sequence[str] = ()) -> dict[str, int]:
        """The bytes by use at the peak of a pass over a number of rows, without those of some uses."""
        table = self.allocations
        grows_with_rows = table.num_bytes % self.num_rows == 0
        factors = np.where(grows_with_rows, num_rows / self.num_rows, 1.0)
        if LOGITS in table.has_use:
            factors[table.has_use[LOGITS]] = self.count_logit_rows(num_rows) / self.num_logit_rows
        num_bytes = (factors * table.num_bytes).astype(np.int64)
        return table.find_peak(num_bytes, excluded_uses=excluded_uses)

    @property
    def flops(self) -> float:
        """The operations of products over the recorded rows."""
        return sum(work.total_flops for work in self.work.values())

    def count_work(self, num_rows: int, *, num_passes: int = 1, num_shards: int = 1) -> Work:
        """The work of a process in `num_passes` passes over `num_rows` rows each, and in one update of its
        shard of the weights, which is one of `num_shards`."""
        total = Work()
        for (is_update, grows), recorded_work in self.work.items():
            work = self.scale_calls(recorded_work, min(num_rows, self.max_timed_rows))
            times = num_rows / self.num_rows if grows else 1.0
            if is_update:
                sharded_work = replace(
                    work,
                    num_bytes=work.num_bytes / num_shards,
                    num_8bit_updates=work.num_8bit_updates / num_shards,
                )
                total = total.plus(sharded_work, times=times)
            else:
                total = total.plus(work, times=num_passes * times)
        return total

    def scale_calls(self, work: Work, num_rows: int) -> Work:
        """The work, with its calls over a number of rows each."""

        def scale_size(size: int) -> int:
            if size in self.chunk_sizes:
                return ceil(size * num_rows / self.num_rows)
            grows = 0 < size < NEVER and size % self.num_rows == 0
            return size // self.num_rows * num_rows if grows else size

        return work.scale_calls(scale_size, share=num_rows / self.num_rows)


class SimulatedData:
    """What a method reads of the sequence of domains: every stage has the same importance batch."""

    def __init__(self, domains: Sequence[Domain], importance_batch: Batch) -> None:
        self.domains = domains
        self.domain = domains[0]
        self.importance_batch = importance_batch
        self.domain_indices = {domain.name: domain.index for domain in domains}

    def steps(self, domain: Domain) -> int:
        return NEVER

    def recovery_steps(self, domain: Domain) -> int:
        return 0

    def importance_batches(self) -> list[Batch]:
        return [self.importance_batch]

    def progress(self, step: int) -> Progress:
        return Progress.in_single_domain(step, steps=NEVER)


class Simulation:
    """The method of a plan with the model of a configuration, without storage, in one process at its first
    stage. `is_gpu` says whether the kernels are those of a GPU, `quantization` how the linear layers of the
    base are stored; the machine has the other choices.

    Its methods raise RuntimeError for a method whose computation depends on the values of weights."""

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        config: PretrainedConfig,
        objective: Objective,
        objective_name: str,
        *,
        is_gpu: bool,
        quantization: str,
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.objective = objective
        self.is_gpu = is_gpu
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        # What methods read of Lightning's trainer.
        self.trainer = SimpleNamespace(
            global_step=0,
            max_steps=NEVER,
            log_every_n_steps=NEVER,
            accumulate_grad_batches=plan.trainer.accumulate_grad_batches,
            world_size=1,
            global_rank=0,
            optimizers=[],
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )

        # Kernels of bitsandbytes read values.
        plan_without_kernels = plan
        if plan.optim.target == ADAMW_8BIT:
            simulated_optim = replace(plan.optim, target=SIMULATED_ADAMW_8BIT)
            plan_without_kernels = replace(plan, optim=simulated_optim)

        with self.active():
            # Initialization may draw weights again until their values are in a range; here they have none.
            with no_init_weights():
                model = loading.AUTO_MODELS[objective_name].from_config(config, dtype=torch.float32)
            model.tie_weights()
            if quantization != "none":
                simulate_quantization(model, quantization)
            if machine.base_dtype != torch.float32:
                make_narrow(model, machine.base_dtype)

            model.train()
            pad_head(model)
            if machine.attn_implementation != "auto":
                model.set_attn_implementation(machine.attn_implementation)
            self.original_names = find_original_names(model)

            loaded_names = {name for name, _ in model.named_parameters()}
            self.method = assemble_method(
                plan_without_kernels, machine, model, objective, loaded_names=loaded_names
            )
            weight_type = WEIGHT_TYPES.get(machine.precision)
            if weight_type is not None:
                self.method.to(weight_type)
        self.fill_small_buffers()

        self.num_rows = self.choose_num_rows()
        self.batch = self.make_batch(self.num_rows)
        self.method.trainer = cast(Any, self.trainer)
        self.stages = self.method.stages(plan.order)
        if self.stages:
            self.data = SimulatedData(self.stages, self.batch)
            self.trainer.datamodule = self.data

    def active(self) -> AbstractContextManager[Any]:
        """Inside the context tensors have no storage, and operations are those of the device."""
        stack = ExitStack()
        stack.enter_context(use_quick_dropout(self.machine.quick_dropout))
        stack.enter_context(without_storage(self.fake_mode, is_gpu=self.is_gpu))
        return stack

    def autocast(self, *, keeps_copies: bool = True) -> AbstractContextManager[Any]:
        """Mixed precision, where it is the run's; autocast keeps its copies of weights, or makes them for
        each product."""
        return make_autocast(self.machine.precision, "cpu", cache_enabled=keeps_copies)

    def fill_small_buffers(self) -> None:
        """Replaces the method's small buffers, which have no storage here, by zeros on the CPU: a method may
        branch on their values, as on a count of domains. Nearly all are 0 in a new method."""
        modules_of_model = set(self.method.model.modules())
        for module in self.method.modules():
            if module in modules_of_model:
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() <= MAX_KNOWN_VALUES:
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)

    def choose_num_rows(self) -> int:
        """A number of rows that divides no size of the model, and so tells apart what grows with the rows."""
        sizes = {self.plan.model.max_seq_length}
        sizes.update(find_whole_numbers(self.method.model.config.to_dict()))
        for parameter in self.method.parameters():
            sizes.update(parameter.shape)
        for prime in PRIMES:
            multiples = [size for size in sizes if size > 0 and size % prime == 0]
            if not multiples:
                return prime
        return PRIMES[-1]  # some sizes seem to grow with the rows

    def make_batch(self, num_rows: int) -> Batch:
        """A training batch of full rows."""
        return make_full_batch(
            self.objective,
            num_rows=num_rows,
            length=self.plan.model.max_seq_length,
            num_entries=count_head_entries(self.method.model),
            has_examples=self.plan.source.encoding is not None,
        )

    def record(self, run: Callable[[], object], *, is_chunked: bool) -> Pass:
        """The pass over the batch that a function makes, with its logits divided into chunks or not."""
        num_entries = count_head_entries(self.method.model)
        weights = {weight.untyped_storage()._cdata for weight in self.method.model.parameters()}

        def find_use(operation: Any, first_argument: Any, result: Tensor) -> str:
            is_copy = operation is torch.ops.aten._to_copy.default
            if is_copy and first_argument.untyped_storage()._cdata in weights:
                return WEIGHT_COPIES
            if result.ndim and result.shape[-1] == num_entries:
                return LOGITS
            return ACTIVATIONS

        recorder = AllocationRecorder(find_use)
        recorder.ignore(self.state_tensors())
        for gradient in self.gradients():
            recorder.add(gradient, GRADIENTS)
        self.work_recorder = WorkRecorder(self.grows_with_rows, keeps_calls=not self.is_gpu)

        # Two chunks represent any number of them. The plan's own limit is set aside meanwhile.
        num_positions = len(self.batch["positions"])
        num_logit_rows = ceil(num_positions / 2) if is_chunked else num_positions
        chunks_set = set_temporarily(
            (chunked_head, "MAX_LOGITS", num_logit_rows * num_entries), (self.objective, "max_logits", None)
        )
        # The mode that is entered last is asked first: whether the tensors of an operation have values.
        with chunks_set, self.active(), self.work_recorder, recorder, KnownValues():
            run()

        recorder.rename(self.gradients(), GRADIENTS)
        recorder.drop(self.state_tensors())
        return Pass(
            AllocationTable(recorder),
            work=self.work_recorder.work,
            num_rows=self.num_rows,
            num_logit_rows=num_logit_rows,
            count_logit_rows=self.count_logit_rows,
            max_timed_rows=max(1, MAX_TIMED_TOKENS // self.plan.model.max_seq_length),
            chunk_sizes={num_logit_rows, num_positions - num_logit_rows} if is_chunked else (),
        )

    def grows_with_rows(self, tensor: Tensor) -> bool:
        """Whether the bytes of a tensor grow with the rows of the batch. Those of logits do, although a chunk
        of them may have a number of positions that the number of rows does not divide."""
        has_logits = tensor.ndim > 1 and tensor.shape[-1] == count_head_entries(self.method.model)
        return has_logits or tensor.numel() % self.num_rows == 0

    def count_positions(self, num_rows: int) -> int:
        """The scored positions of a batch."""
        return len(self.batch["positions"]) * num_rows // self.num_rows

    def count_logit_rows(self, num_rows: int) -> int:
        """The positions of a chunk of logits."""
        num_positions = self.count_positions(num_rows)
        num_entries = count_head_entries(self.method.model)
        max_rows = chunked_head.count_chunk_positions(num_entries, self.objective.max_logits)
        num_chunks = ceil(num_positions / max_rows)
        return ceil(num_positions / num_chunks)

    def is_chunked(self, num_rows: int) -> bool:
        """Whether the logits of a batch are divided into chunks."""
        return self.count_logit_rows(num_rows) < self.count_positions(num_rows)

    def start_stage(self) -> None:
        """Makes the optimizer of the stage, with the state that it has after a step."""
        with self.active():
            self.method.setup_stage(self.data.domain)
            self.method.train()
            optimizer = self.method.configure_optimizers()["optimizer"]
            self.trainer.optimizers = [optimizer]
        self.make_gradients()
        with self.active(), UnitScalars():
            optimizer.step()

    def make_gradients(self) -> None:
        """Gives each trained parameter the gradient that a step leaves, without values."""
        with self.active():
            for parameter in self.method.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)

    def record_start(self, *, is_chunked: bool) -> Pass:
        """The work before a stage's first step, on the batch as importance samples."""
        self.trainer.global_step = 0
        return self.record(self.method.on_train_start, is_chunked=is_chunked)

    def record_step(self, *, is_chunked: bool) -> list[Pass]:
        """The passes of the steps of one period, after which a method repeats what it computes: each is the
        last micro-batch of a step and its update."""
        self.make_gradients()
        passes = []
        for number in range(self.method.period):
            # Not step 0, in which metrics are logged.
            self.trainer.global_step = self.method.settled + 1 + number
            passes.append(self.record(self.make_step, is_chunked=is_chunked))
        return passes

    def make_step(self) -> None:
        """What Lightning does in a step, in its order. In the forward pass the gradients of the last step are
        still there. The norm of the gradients is computed in any case, for the guard."""
        method = self.method
        optimizer = self.trainer.optimizers[0]
        method.on_train_batch_start(self.batch, self.trainer.global_step)
        with self.autocast():
            loss = method.training_step(self.batch, self.trainer.global_step)
        if self.trainer.accumulate_grad_batches == 1:
            optimizer.zero_grad()
        loss.backward()
        del loss

        self.work_recorder.is_update = True
        method.on_before_optimizer_step(optimizer)
        parameters = [parameter for parameter in method.parameters() if parameter.grad is not None]
        norm = total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
        max_norm = self.plan.trainer.gradient_clip_val
        if max_norm:
            clip_gradients(parameters, max_norm, norm)
        with UnitScalars():
            optimizer.step()
        for snapshot in sorted(method.snapshots, key=lambda snapshot: not snapshot.mask.comes_first):
            snapshot.apply(optimizer)
        method.after_update()
        method.snapshots.clear()

    def record_end(self, *, is_chunked: bool) -> Pass:
        """The work after a stage's last step, on the batch as importance samples."""
        self.method.zero_grad()
        return self.record(self.run_end, is_chunked=is_chunked)

    def run_end(self) -> None:
        with set_mode(self.method, training=False):
            self.method.after_domain(self.data.importance_batches())
            self.method.zero_grad()

    def record_evaluation(self, *, is_chunked: bool) -> Pass:
        """A batch of held-out text."""

        def run() -> None:
            # In torch's inference mode, in which Lightning evaluates, no copies are kept.
            autocast = self.autocast(keeps_copies=False)
            with torch.no_grad(), autocast, set_mode(self.method, training=False):
                self.method.nll(self.batch, self.stages[0].index if self.stages else BASE)

        self.method.zero_grad()
        return self.record(run, is_chunked=is_chunked)

    def end_stage(self) -> None:
        """Does the work after a stage's last step."""
        with self.active(), KnownValues():
            self.run_end()

    def enter_second_stage(self) -> dict[str, StateBytes]:
        """Grows the model for the second stage; returns the bytes of its state."""
        self.data.domain = self.stages[1]
        with self.active(), KnownValues():
            self.method.setup_stage(self.data.domain)
        return self.count_state()

    def set_micro_batches(self, num_micro_batches: int) -> None:
        self.trainer.accumulate_grad_batches = num_micro_batches

    def set_checkpointing(self, is_enabled: bool) -> None:
        """Has activations recomputed in backward passes from now on, or not."""
        if is_enabled:
            checkpoint_activations(self.method.model)
        else:
            stop_checkpointing(self.method.model)

    @property
    def can_checkpoint(self) -> bool:
        """Whether the class of the model supports activation checkpointing."""
        return self.method.model.supports_gradient_checkpointing

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.method.parameters() if parameter.grad is not None]

    def state_tensors(self) -> list[Tensor]:
        """Weights, method state and optimizer state."""
        tensors = [*self.method.parameters(), *self.method.buffers()]
        for optimizer in self.trainer.optimizers:
            for state in optimizer.state.values():
                tensors.extend(value for value in state.values() if isinstance(value, Tensor))
        return tensors

    def count_state(self) -> dict[str, StateBytes]:
        """The bytes between two steps, by their use."""
        sharded_parameters = set()  # ids
        sharded_shapes = {}
        for name, parameter in self.method.model.named_parameters():
            if restore_original_name(name) in self.original_names:  # FSDP leaves what a method adds whole
                sharded_parameters.add(id(parameter))
                sharded_shapes[name] = parameter.shape

        sharded_state = set()  # ids
        offloaded_state = set()
        for module in self.method.modules():
            if not isinstance(module, NamedTensors):
                continue
            for name, tensor in module.named().items():
                if sharded_shapes.get(module.parameter_of(name)) == tensor.shape:
                    sharded_state.add(id(tensor))
                if module.offloaded or isinstance(module, CarriedState):
                    offloaded_state.add(id(tensor))

        # The weights first: a method's tensors include the model's, and a storage is counted once.
        counts = StorageCounts()
        for tensor in list_tensors_in_memory(self.method.model):
            counts.add(WEIGHTS, tensor, is_sharded=id(tensor) in sharded_parameters)
        for tensor in list_tensors_in_memory(self.method):
            counts.add(
                METHOD_STATE,
                tensor,
                is_sharded=id(tensor) in sharded_state,
                is_offloaded=id(tensor) in offloaded_state,
            )
        for parameter in self.method.parameters():
            is_sharded = id(parameter) in sharded_parameters
            if parameter.grad is not None:
                counts.add(GRADIENTS, parameter.grad, is_sharded=is_sharded)
            for optimizer in self.trainer.optimizers:
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        counts.add(OPTIMIZER_STATE, value, is_sharded=is_sharded and value.ndim > 0)
        return counts.by_use

    def count_gathered(self) -> GatheredBytes:
        """The bytes of whole tensors that FSDP gathers, at most. Raises ValueError for a model without
        blocks."""
        sharded_parameters = set()
        for name, parameter in self.method.model.named_parameters():
            if restore_original_name(name) in self.original_names:
                sharded_parameters.add(parameter)
        parameters_outside = set(sharded_parameters)  # of all blocks
        largest_block = set[Tensor]()
        for block in list_sharded_blocks(self.method.model):
            block_parameters = sharded_parameters.intersection(block.parameters())
            parameters_outside -= block_parameters
            largest_block = max(largest_block, block_parameters, key=sum_bytes)

        # Three blocks of weights and two of gradients: see GatheredBytes.
        weights = sum_bytes(parameters_outside) + 3 * sum_bytes(largest_block)
        trained_outside = [parameter for parameter in parameters_outside if parameter.requires_grad]
        trained_in_block = [parameter for parameter in largest_block if parameter.requires_grad]
        gradients = sum_bytes(trained_outside) + 2 * sum_bytes(trained_in_block)
        return GatheredBytes(weights=weights, in_training=weights + gradients)

    @property
    def may_grow(self) -> bool:
        """Whether a further stage may need other memory than the first."""
        method_class = type(self.method)
        has_hooks = any(
            getattr(method_class, name) is not getattr(ContinualMethod, name)
            for name in ("expand", "before_domain", "after_domain")
        )
        return len(self.stages) > 1 and (has_hooks or self.method.domain_params is not None)

    def count_parameters(self) -> int:
        stored = count_stored(self.method.model)  # of quantized layers
        parameters = self.method.model.parameters()
        return sum(stored.get(id(parameter), parameter.numel()) for parameter in parameters)

    def count_trained(self) -> int:
        """The parameters that are trained in this stage; 0 of a method without stages."""
        return count_trained_parameters(self.method) if self.stages else 0


def sum_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def find_whole_numbers(values: Any) -> list[int]:
    """The whole numbers in a configuration."""
    if isinstance(values, bool):
        return []
    if isinstance(values, int):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    numbers = []
    if isinstance(values, list | tuple):
        for value in values:
            numbers.extend(find_whole_numbers(value))
    return numbers
