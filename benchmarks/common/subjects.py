"""What trains in the throughput benchmark: cpt, the Hugging Face Trainer, and PyTorch loops of a few lines.

A subject is a function of a setup (what is trained on what, how long) and of a step timer, which it calls
after every step."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.ground import DROPOUT, Workload, build_workload, make_labels
from common.stage import StepTimer, TimingOptions
from common.variants import QUICK
from lightning.pytorch.callbacks import Callback

from cpt.core.memory import keep_freed_blocks
from cpt.data.collate import select_inputs
from cpt.data.options import Domain
from cpt.loggers.loggers import LoggedRun, track
from cpt.loggers.wandb_environment import WandbLabels
from cpt.models.fast_kernels import use_quick_dropout
from cpt.optim.nan_guard import NanGuard
from cpt.trainer.lightning import make_trainer
from cpt.trainer.step_checkpoint import StepCheckpoint

FIRST_DOMAIN_STEPS = 8  # untimed steps in the domain before
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")


@dataclass(frozen=True)
class TrainingSetup(TimingOptions):
    """What the subjects run. `equal` means identical batches and no dropout."""

    cache: str
    batch: int
    length: int
    fused: bool
    equal: bool
    shape: str = "roberta"
    config: tuple[str, ...] = ()  # overrides

    def build_workload(self, *overrides: str) -> Workload:
        fused = ["++optim.fused=true"] if self.fused else []
        workload = build_workload(
            self.cache,
            *self.config,
            f"model.max_seq_length={self.length}",
            *(f"{name}=0.1" for name in DROPOUT.get(self.shape, [])),
            f"trainer.batch_size={self.batch}",
            f"trainer.steps={self.steps}",
            *fused,
            *overrides,
            shape=self.shape,
        )

        if self.equal:
            for layer in workload.module.modules():
                if isinstance(layer, torch.nn.Dropout):
                    layer.p = 0.0
        return workload


class StepCallback(Callback):
    """Calls the step timer after every batch of cpt's training."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.timer(outputs["loss"], len(batch["positions"]))


def fit(
    workload: Workload,
    domain: Domain,
    *,
    steps: int,
    callbacks: Sequence[Callback] = (),
    keeping: bool = True,
) -> None:
    """Learns a domain as `python run.py` does, with its bar, checkpoint callback, guard and curves. The
    checkpoint of the last step is written when `callbacks` have heard of it, as others write none. `keeping`
    says whether the heap keeps what a step frees, as it does there."""
    if keeping:
        keep_freed_blocks()
    options = workload.plan.trainer
    guard = NanGuard()
    workload.data.enter(domain)
    workload.module.setup_stage(domain)
    workload.module.train()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        last = StepCheckpoint(folder / "last.ckpt", interval=options.checkpoint_every_n_steps, guard=guard)
        labels = WandbLabels(name="bench", group="bench", job_type="bench", tags=())
        run = LoggedRun(folder=folder, labels=labels, config={}, texts=[])
        csv_file = workload.plan.logger.csv
        with track(run, csv_file=csv_file, wandb=None, custom={}) as loggers:
            trainer = make_trainer(
                workload.machine.lightning_arguments(options),
                label=domain.name,
                loggers=loggers,
                steps=steps,
                callbacks=[guard, *callbacks, last],
            )
            with use_quick_dropout(workload.machine.quick_dropout):
                trainer.fit(workload.module, datamodule=workload.data)


def train_cpt(setup: TrainingSetup, timer: StepTimer) -> None:
    """The training of `python run.py method=ncl`."""
    workload = setup.build_workload()
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[StepCallback(timer)])


def train_with_default_heap(setup: TrainingSetup, timer: StepTimer) -> None:
    """The same with the C heap as it comes."""
    workload = setup.build_workload()
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[StepCallback(timer)], keeping=False)


def train_in_bf16(setup: TrainingSetup, timer: StepTimer) -> None:
    """The same with trainer.precision=bf16-mixed."""
    workload = setup.build_workload("trainer.precision=bf16-mixed", "trainer.attn_implementation=eager")
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[StepCallback(timer)])


def train_with_quick_dropout(setup: TrainingSetup, timer: StepTimer, *, precision: str = "32-true") -> None:
    """The same with trainer.quick_dropout=true."""
    workload = setup.build_workload(f"trainer.precision={precision}", *QUICK)
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[StepCallback(timer)])


def train_second_domain(setup: TrainingSetup, timer: StepTimer, *, method: str) -> None:
    """A method with quick dropout, in a domain after the first: it has importances then, or a Fisher."""
    overrides = ("order=[sympy,networkx]", "trainer.importance_samples=32", *QUICK)
    workload = setup.build_workload(f"method={method}", *overrides)
    first, second = workload.data
    fit(workload, first, steps=FIRST_DOMAIN_STEPS)
    fit(workload, second, steps=workload.steps, callbacks=[StepCallback(timer)])


def run_loop(setup: TrainingSetup, timer: StepTimer, *, loss_of: Callable[[Any, Any], Any]) -> None:
    """A training loop of a few lines on cpt's batches."""
    workload = setup.build_workload()
    model = workload.module.model
    max_norm = workload.plan.trainer.gradient_clip_val
    optimizer, schedule = workload.optimizer(model)
    for batch in workload.loader():
        loss = loss_of(workload.module, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        timer(loss, len(batch["positions"]))


def train_bare(setup: TrainingSetup, timer: StepTimer) -> None:
    """The loop with cpt's head, which is computed at the scored positions only."""
    run_loop(setup, timer, loss_of=lambda module, batch: module.losses(batch)["lm"])


def train_dense(setup: TrainingSetup, timer: StepTimer) -> None:
    """The loop with the model's own loss, whose head is computed at every position: what part of cpt's gain
    is the head."""

    def loss_of(module: Any, batch: Any) -> Any:
        return module.model(**select_inputs(batch), labels=make_labels(module, batch)).loss

    run_loop(setup, timer, loss_of=loss_of)


def train_hf(
    setup: TrainingSetup, timer: StepTimer, *, bf16: bool = False, is_compiled: bool = False
) -> None:
    """The Hugging Face Trainer as run_mlm and run_clm use it; its optimizer and schedule are cpt's. Of T5,
    whose corruption transformers does not make, the Seq2SeqTrainer on cpt's very batches."""
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class StepCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            timer(losses[-1], scored[state.global_step - 1])

    workload = setup.build_workload()
    losses: list[Any] = []
    scored: list[int] = []
    timer.wait_for_warm_up()

    model = workload.module.model
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss))
    is_seq2seq = setup.shape == "t5"
    arguments_class = Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments
    settings = arguments_class(
        output_dir=tempfile.mkdtemp(),
        max_steps=workload.steps,
        per_device_train_batch_size=setup.batch,
        max_grad_norm=workload.plan.trainer.gradient_clip_val,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=setup.device == "cpu",
        bf16=bf16,
        torch_compile=is_compiled,
    )

    if setup.equal or is_seq2seq:
        rows, collator = list_batches(workload)
    else:
        rows, collator = list_unmasked_rows(workload)
    trainer_class = Seq2SeqTrainer if is_seq2seq else Trainer
    trainer = trainer_class(
        model=model,
        args=settings,
        train_dataset=rows,
        data_collator=count_scored(collator, scored),
        optimizers=workload.optimizer(model),
        callbacks=[StepCallback()],
    )
    trainer.train()


def train_llama_factory(setup: TrainingSetup, timer: StepTimer) -> None:
    """LLaMA-Factory's stage `pt` with its defaults, on the same text, model, optimizer's rate, schedule and
    sizes; it shuffles and packs the text itself."""
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    class StepCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            def hear(module: Any, inputs: Any, output: Any) -> None:
                losses.append(output.loss)

            kwargs["model"].register_forward_hook(hear)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            timer(losses[-1], setup.batch * (setup.length - 1))

    workload = setup.build_workload()
    losses: list[Any] = []
    timer.wait_for_warm_up()

    folder = Path(tempfile.mkdtemp())
    rows = workload.input_ids()["input_ids"][:]
    texts = workload.start.tokenizer.batch_decode(rows, skip_special_tokens=True)
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "domain.jsonl").write_text("\n".join(lines), encoding="utf-8")
    dataset_info = {"domain": {"file_name": "domain.jsonl", "columns": {"prompt": "text"}}}
    (folder / "dataset_info.json").write_text(json.dumps(dataset_info), encoding="utf-8")
    workload.module.model.save_pretrained(folder / "model")
    workload.start.tokenizer.save_pretrained(folder / "model")

    arguments = {
        "stage": "pt",
        "finetuning_type": "full",
        "do_train": True,
        "max_steps": workload.steps,
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "out"),
        "dataset": "domain",
        "dataset_dir": str(folder),
        "cutoff_len": setup.length,
        "per_device_train_batch_size": setup.batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": workload.plan.optim.arguments["lr"],
        "lr_scheduler_type": "linear",
        "max_grad_norm": workload.plan.trainer.gradient_clip_val,
        "use_cpu": setup.device == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 10,
    }
    run_exp(arguments, callbacks=[StepCallback()])


def list_unmasked_rows(workload: Workload) -> tuple[Any, Any]:
    """cpt's rows in cpt's order, and the collator that masks them, or makes labels of them."""
    import numpy as np
    from transformers import DataCollatorForLanguageModeling

    stream = workload.stream()
    order = stream.locate(np.arange(len(stream) * stream.batch_size))[1]
    texts = workload.input_ids().select(order)
    first = stream[0]
    masked = workload.start.objective_name == "masked"
    original = workload.start.objective.restore(first)["input_ids"]
    if texts[: stream.batch_size]["input_ids"] != original.tolist():
        raise RuntimeError("the rows are not those of cpt")
    rate = workload.start.objective.rate if masked else None
    return texts, DataCollatorForLanguageModeling(workload.start.tokenizer, mlm=masked, mlm_probability=rate)


def list_batches(workload: Workload) -> tuple[Any, Any]:
    """cpt's very batches, row by row, and the collator that only stacks them."""
    from transformers import default_data_collator

    stream = workload.stream()
    batches = [stream[number] for number in range(len(stream))]
    for batch in batches:
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        batch["labels"] = make_labels(workload.module, batch)

    names = [name for name in (*INPUTS, "labels") if name in batches[0]]
    rows = []
    for batch in batches:
        for row in range(stream.batch_size):
            rows.append({name: batch[name][row] for name in names})
    return rows, default_data_collator


def count_scored(collator: Any, scored: list[int]) -> Any:
    """A collator that also notes how many tokens each of its batches scores (about 10 µs)."""

    def collate(rows: Any) -> Any:
        batch = collator(rows)
        scored.append(int((batch["labels"] >= 0).sum()))
        return batch

    return collate


SUBJECTS = {
    "cpt": train_cpt,
    "cpt, heap as it comes": train_with_default_heap,
    "cpt, bf16": train_in_bf16,
    "cpt, quick dropout": train_with_quick_dropout,
    "cpt, bf16, quick dropout": partial(train_with_quick_dropout, precision="bf16-mixed"),
    "bare": train_bare,
    "dense": train_dense,
    "hf": train_hf,
    "hf, bf16": partial(train_hf, bf16=True),
    "llama-factory": train_llama_factory,
    "cpt, das": partial(train_second_domain, method="das"),
    "cpt, migu": partial(train_second_domain, method="migu"),
    "cpt, ewc": partial(train_second_domain, method="ewc"),
    "cpt, lora": partial(train_second_domain, method="lora"),
}
DEFAULT_SUBJECTS = tuple(SUBJECTS)[:8]
