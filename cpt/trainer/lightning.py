"""lightning.Trainer as cpt uses it: one for each stage or evaluation, resumable at every optimizer step; its
progress bar, and the strategy `fsdp`."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from tqdm import tqdm

from cpt.core.distributed import barrier, is_sharded, leave_together, shard_like
from cpt.core.errors import reason
from cpt.core.exceptions import MessageError
from cpt.core.heartbeat import progress_bar
from cpt.core.processes import is_distributed
from cpt.core.slurm import is_slurm_task, is_started_by_torchrun, requested_tasks
from cpt.core.tensors import NamedTensors, load_tensors
from cpt.models.fsdp import named_weights, reshard, shard_model
from cpt.trainer.checkpoint import AtomicCheckpointIO, fill_tensors, layout_of, save_sharded
from cpt.trainer.costs import own_names

NOISE = (
    ".*LeafSpec.*",  # Lightning's own, on torch 2.13
    ".*dataloader is not resumable.*",  # it is: its sampler begins at the trainer's step
    ".*does not have many workers.*",  # on two cores one process is right
    ".*smaller than the logging interval.*",  # of short runs
    r"FSDP2-wrapped module \(FSDP\w+(For|LMHead)\w+\) returned a view",  # of logits, which stay as they are
    ".*in eval mode at the start of training.*",  # a teacher is
    "GPU available but not used.*",  # trainer.accelerator=cpu was asked for
    ".*was called before the ``update``.*",  # a process may have no batch of a short text
    ".*`srun` command is available on your system but is not used.*",  # one process is right, too
)


class ProgressBar(Callback):
    """One bar for each phase, with its name and the time left; in a log file, a line every few seconds. On a
    signal, all processes leave at the same place: at first, and after an evaluation batch that all have."""

    def __init__(self, label: str) -> None:
        self.label, self.bar = label, tqdm(disable=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_together()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hidden, total, done = not trainer.is_global_zero, trainer.max_steps, trainer.global_step
        self.bar = progress_bar(self.label, total=total, done=done, hidden=hidden)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = int(sum(trainer.num_val_batches))
        self.bar = progress_bar(self.label, total=total, hidden=not trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, value in trainer.progress_bar_metrics.items():
            self.bar.set_postfix({name.split("/")[1]: f"{value:.3f}"}, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_batch_end(
        self, trainer: Any, module: LightningModule, outputs: Any, batch: Any, at: int, *args: Any
    ) -> None:
        self.bar.update()
        if at < trainer.val_dataloaders.sampler.common:
            leave_together("while scoring")

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.bar.close()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        self.bar.close()
        fetcher = trainer.fit_loop._data_fetcher
        loader = None if fetcher is None else fetcher._combined_loader
        if loader is not None and loader._iterator is None:  # it could not start: its teardown would hide why
            trainer.fit_loop._data_fetcher = None


class FSDP2Strategy(DDPStrategy):
    """`strategy=fsdp`: weights, gradients, optimizer state and checkpoints are sharded across processes. With
    `reshard`, a block's weights are freed between its forward and its backward pass.

    A thin strategy of our own on `torch.distributed.fsdp.fully_shard`: Lightning's ModelParallelStrategy
    shards a module in `configure_model`, once per Trainer; here one module is trained by a Trainer per stage,
    and what a method keeps of the weights (anchors, Fisher, averages, parts) is sharded like them."""

    lockstep = True  # every process makes as many passes as the others, and of the same text

    def __init__(self, *, reshard: bool) -> None:
        super().__init__()
        self.reshard = reshard

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module: Any = self.lightning_module
        model, fits = module.model, trainer.state.fn == TrainerFn.FITTING
        self.precision_plugin.convert_module(module)
        if self.world_size > 1 and not isinstance(model, FSDPModule):
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            # What the method has added to the model is small, and stays whole in every process.
            own = own_names(model)
            added = {p for name, p in model.named_parameters() if name.replace(".base_layer", "") not in own}
            shard_model(model, mesh, ignored=added, reshard=self.reshard)
            shared = {name: p for name, p in named_weights(model).items() if is_sharded(p)}
            for part in module.modules():
                if isinstance(part, NamedTensors):
                    part.shard(shared)
            module.register_load_state_dict_pre_hook(shard_state)
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint is read when it is known which rows are whose."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return inner.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save_sharded(checkpoint, Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module: Any = self.lightning_module
        parameters = [parameters_of(each) for each in self.optimizers]
        reshard(module.model)

        def like(place: list[Any], shape: torch.Size) -> Tensor | None:
            if place[0] == "state_dict":
                return layout_of(module, place[1], shape)
            found = parameters[place[1]][place[3]]  # of optimizer_states
            return found if found.shape == shape else None

        return fill_tensors(load_tensors(checkpoint_path), Path(checkpoint_path), like)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            own, parameters = {}, parameters_of(optimizer)
            for place, kept in state["state"].items():
                like = parameters[place]
                own[place] = {
                    name: shard_like(value, like) if getattr(value, "shape", None) == like.shape else value
                    for name, value in kept.items()
                }
            optimizer.load_state_dict({**state, "state": own})

    def teardown(self) -> None:
        """As Lightning's, but the weights stay where they are."""
        module: Any = self.lightning_module
        reshard(module.model)
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters, as its state_dict counts them."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def shard_state(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Of a state that is loaded, the rows of this process."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = shard_like(state[prefix + name], parameter)


def make_trainer(
    options: Mapping[str, Any],
    *,
    label: str,
    folder: Path | None = None,
    loggers: Sequence[Logger] = (),
    steps: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """A Trainer with `options` of lightning.Trainer (and of FSDP2Strategy) for `steps` optimizer steps or,
    without, an evaluation; what it writes goes to a folder, or nowhere. Raises ValueError for options that
    Lightning rejects."""
    quiet()
    options = dict(options)
    reshard = options.pop("reshard_after_forward", None) is not False
    if options.get("strategy") == "fsdp":
        options["strategy"] = FSDP2Strategy(reshard=reshard)  # one for each Trainer
    if steps is not None and "log_every_n_steps" in options:  # a short stage has a point at its end
        options["log_every_n_steps"] = min(options["log_every_n_steps"], steps)
    try:
        made = Trainer(
            max_steps=1 if steps is None else steps,
            max_epochs=-1,
            limit_val_batches=1.0 if steps is None else 0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=list(loggers) or False,
            callbacks=[ProgressBar(label), *callbacks],
            default_root_dir=folder or os.devnull,  # the working folder otherwise
            plugins=[AtomicCheckpointIO(), *slurm_environment()],
            **options,
        )
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"trainer is invalid: {error}") from error
    # Lightning's handlers: SIGTERM ends the program with exit code 0 and waits for other processes; on SLURM
    # SIGUSR1 writes a checkpoint into the working folder.
    connector: Any = made._signal_connector
    connector.register_signal_handlers = lambda: None
    return made


def slurm_environment() -> list[ClusterEnvironment]:
    """Inside a SLURM job, what counts the processes of a run: SLURM for a task that srun started, else
    Lightning, which takes a batch script or the shell of salloc for a task. Empty elsewhere: Lightning
    finds out itself."""
    if requested_tasks() == 0 or is_started_by_torchrun():
        return []
    return [SLURMEnvironment() if is_slurm_task() else LightningEnvironment()]


def join_processes(options: Mapping[str, Any]) -> None:
    """Makes the process group of torchrun, SLURM or MPI, which Lightning makes when it first fits or
    evaluates: a resumed run decides and works before. Waits until every process is here."""
    strategy: Any = make_trainer(options, label="", steps=1).strategy
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, LightningEnvironment):  # which starts them at a fit
        return
    if environment.world_size() > 1 and not is_distributed():
        strategy.setup_environment()
    barrier()


def drop_optimizer(trainer: Trainer) -> None:
    """Frees the optimizer's state of a finished phase, which the trainer keeps, as it refers to itself."""
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []


def quiet() -> None:
    """Silences Lightning's notices, transformers' bars, and the warnings in NOISE."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def naming_cause(section: str) -> Iterator[None]:
    """Turns any exception of a library into a one-line ValueError that begins with a config section."""
    try:
        yield
    except Exception as error:
        message = f"{section} is invalid: {reason(error).removeprefix('trainer is invalid: ')}"
        if isinstance(error, MessageError):
            raise error.with_message(message) from error
        raise ValueError(message) from error
