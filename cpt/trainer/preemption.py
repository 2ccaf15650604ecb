"""How a run leaves on a signal, and the callback by which a fit or an evaluation of Lightning does so.

**Who receives the signal.** `cpt/__main__.py` installs the handlers of SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and
SIGHUP (`handle_signals` in cpt/core/preemption.py); `make_trainer` turns Lightning's off. A handler records
the number of the first signal in `notice`. A second signal, half a second later or more, ends the process at
once, with exit code 128 + number. Processes that load or tokenize data ignore signals: their parent ends
them.

**Where the run leaves.** A process that no other one waits for leaves in the handler itself, by the exception
`Preempted`. Within `defer_signals`, and in a run of several processes, the signal is only recorded, and all
processes leave at the next of these places:

- in training, after an optimizer step: `Preemption.on_train_batch_end`. Each process sends its signal along
  with the NaN guard's reduction, so that a step has one reduction;
- at the start of a fit or an evaluation, and after each evaluated batch that all processes have:
  `Preemption.setup`, `Preemption.on_validation_batch_end`;
- between two batches on which a method measures importances (`ProbeLoader` in cpt/data/datamodule.py), and of
  text that replay generates;
- after each unit of work on end tasks, answers and benchmarks, where every process works on its own and they
  tell each other by the store of the process group (`check_all_signals` in cpt/core/distributed.py);
- before a row of the matrix is committed (cpt/trainer/matrix.py), before the model is exported, and before
  the report is written (cpt/trainer/finalize.py).

**What is saved.** In training the state of the trainer after the current step (`StepCheckpoint`), elsewhere
nothing: committed rows and results of evaluators are on disk, and what is under way is repeated.

**How it ends.** W&B's run is marked as preempted (`track` in cpt/loggers/loggers.py), and progress.json gets
the state `preempted`. `handle_signals` prints one line, such as `cpt: stopped by SIGTERM after step 3 of 50
of law; run the same command again to continue`, waits for the processes that this one has started, and ends
with exit code 75 (EX_TEMPFAIL), on which sweeps and batch scripts start the run again. That start resumes
with the same bits."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cpt.core.distributed import leave_together
from cpt.core.preemption import leave_all, notice
from cpt.core.processes import is_distributed
from cpt.trainer.step_checkpoint import StepCheckpoint


def get_received_signal() -> int:
    """The number of the signal that this process has received, 0 for none."""
    return notice.number


class Preemption(Callback):
    """Leaves a fit or an evaluation on a signal, in all processes at the same place.

    `step_checkpoint` saves the state of a stage before the run leaves it; without one, training is not left.
    Lightning has to call this callback last, as the others change their states after a step."""

    def __init__(self, step_checkpoint: StepCheckpoint | None = None) -> None:
        self.step_checkpoint = step_checkpoint
        self.step = 0  # the last optimizer step that was seen
        if step_checkpoint is not None:
            step_checkpoint.guard.read_signal = get_received_signal

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_together()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        is_micro_batch = step == self.step  # it made no optimizer step
        if self.step_checkpoint is None or is_micro_batch:
            return
        self.step = step

        signal_number = get_received_signal()
        if is_distributed():
            signal_number = self.step_checkpoint.guard.common_signal
        if signal_number:
            self.step_checkpoint.save_once(trainer, pl_module)
            domain = trainer.datamodule.domain.name
            leave_all(signal_number, f"after step {step} of {trainer.max_steps} of {domain}")

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx < trainer.val_dataloaders.sampler.common:
            leave_together("while scoring")
