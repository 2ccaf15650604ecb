"""Fine-tuning examples/s of cpt's end tasks against the Hugging Face Trainer's.

Both train the same classifier on the same rows in the same order, padded to the longest of a batch, with the
same AdamW, schedule and bar, without clipping. They take turns in one process, an epoch each; what is
built before the first step is not counted. A first, untimed pass without dropout shows that they do the same
work: the weights at its end. `grouped` and `bf16` are what a run may choose beside
(endtask.group_by_length=20, then endtask.precision=bf16-mixed); the Trainer's own clock leaves out its
set-up."""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from cpt.core.heartbeat import make_progress_bar
from cpt.evaluation import finetune as classifier
from cpt.evaluation.finetune import EncodedExamples, FinetuneJob
from cpt.evaluation.finetune_tasks import FinetuneOptions
from cpt.models.loading import train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import make_parser
from common.measuring import compare_times, read_busy_seconds, rotate, save, summarize_times, wait_until_quiet
from common.stage import prepare

Run = Callable[[], object]  # gives the Trainer's result, where it has one
CPU = torch.device("cpu")
SEED = 7
CLASSES = 6
VOCABULARY, SHORTEST, LONGEST = 2048, 10, 60
SIZES = {"2 x 128": (2, 128), "4 x 256": (4, 256)}
LR, WEIGHT_DECAY = 3e-5, 0.01


@dataclass(frozen=True)
class FinetuneSetup:
    """What is fine-tuned: the size of the model, and how many examples in what batches."""

    layers: int
    width: int
    examples: int
    batch: int
    dropout: float

    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "roberta",
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 32,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )
        return AutoModelForMaskedLM.from_config(config)

    def job(self, *, group_by_length: int = 1, precision: str = "32-true") -> FinetuneJob:
        draw = np.random.default_rng(0)
        ids = [
            torch.from_numpy(draw.integers(5, VOCABULARY, size=draw.integers(SHORTEST, LONGEST)))
            for _ in range(self.examples)
        ]
        rows = EncodedExamples(ids, None, torch.from_numpy(draw.integers(CLASSES, size=self.examples)))
        settings = FinetuneOptions(
            epochs=1,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            warmup_ratio=0.0,
            batch_size=self.batch,
            group_by_length=group_by_length,
            max_seq_length=LONGEST,
            precision=precision,
            dropout=self.dropout,
            freeze_encoder=False,
            metric="macro_f1",
            load_best_model_at_end=False,
        )
        return FinetuneJob("task", rows, None, rows, CLASSES, settings, pad=1, eval_batch_size=64)

    def start(self, model: PreTrainedModel) -> classifier.Classifier:
        with classifier.forked_generators(CPU, SEED):
            return classifier.Classifier(model, classes=CLASSES, dropout=self.dropout, freeze_encoder=False)


def make_cpt_epoch(model: classifier.Classifier, job: FinetuneJob) -> Run:
    """An epoch of cpt's, with its bar."""
    optimizer, schedule = classifier.make_optimizer(model, job)

    def run() -> None:
        with make_progress_bar("cpt", total=job.steps, hidden=False) as bar:
            for _ in classifier.train_epoch(model, job, optimizer, schedule, seed=SEED, epoch=1):
                bar.update()

    return run


class WithLoss(nn.Module):
    """The same classifier as the Trainer calls it."""

    def __init__(self, model: classifier.Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model({"input_ids": input_ids, "attention_mask": attention_mask})
        return {"loss": functional.cross_entropy(logits.float(), labels), "logits": logits}


def make_hf_epoch(model: classifier.Classifier, job: FinetuneJob) -> Run:
    """An epoch of the Trainer's over the same rows in the same order, with its bar."""
    order: list[int] = []
    for batch in job.batches(SEED, 1):
        order.extend(batch)
    rows = [{"input_ids": job.train.ids[r].tolist(), "labels": int(job.train.labels[r])} for r in order]
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        per_device_train_batch_size=job.settings.batch_size,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        logging_steps=500,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
    )
    tokenizer = train_tokenizer(iter(["a b"]), vocabulary=300, objective="masked")
    trainer = Trainer(
        model=WithLoss(model),
        args=settings,
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        optimizers=classifier.make_optimizer(model, job),
    )
    return trainer.train


SUBJECTS: dict[str, tuple[Callable[[classifier.Classifier, FinetuneJob], Run], dict[str, Any]]] = {
    "cpt": (make_cpt_epoch, {}),
    "cpt grouped": (make_cpt_epoch, {"group_by_length": 20}),
    "cpt grouped bf16": (make_cpt_epoch, {"group_by_length": 20, "precision": "bf16-mixed"}),
    "hf": (make_hf_epoch, {}),
}


def compare_weights(setup: FinetuneSetup) -> dict[str, float]:
    """The largest difference of a weight after an epoch of each, and the largest change of one."""
    model = setup.model()
    weights = {}
    for name in ("cpt", "hf"):
        subject = setup.start(model)
        make_epoch, _ = SUBJECTS[name]
        run = make_epoch(subject, setup.job())
        run()
        weights[name] = flatten_weights(subject)
    initial_weights = flatten_weights(setup.start(model))
    return {
        "apart": (weights["cpt"] - weights["hf"]).abs().max().item(),
        "moved": (weights["cpt"] - initial_weights).abs().max().item(),
    }


def flatten_weights(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def time_run(run: Run) -> dict[str, float]:
    gc.collect()
    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    busy_before = read_busy_seconds()
    result = run()
    wall = time.perf_counter() - wall_start
    cpu = time.process_time() - cpu_start
    return {
        "wall": wall,
        "cpu": cpu,
        "own": getattr(result, "metrics", {}).get("train_runtime", wall),
        "foreign_cores": (read_busy_seconds() - busy_before - cpu) / wall,
    }


def measure_rounds(setup: FinetuneSetup, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The times of each subject, round by round; the first round is not counted."""
    model = setup.model()
    jobs = {name: setup.job(**job_options) for name, (_, job_options) in SUBJECTS.items()}
    models = {name: setup.start(model) for name in SUBJECTS}
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in SUBJECTS}
    for turn in range(rounds + 1):
        for name in rotate(list(SUBJECTS), turn):
            make_epoch, _ = SUBJECTS[name]
            chunks[name].append(time_run(make_epoch(models[name], jobs[name])))
    return {name: times[1:] for name, times in chunks.items()}


def summarize(setup: FinetuneSetup, rounds: int) -> dict[str, Any]:
    chunks = measure_rounds(setup, rounds)
    speeds = {}
    foreign_cores: list[float] = []
    for name, chunk in chunks.items():
        speeds[name] = setup.examples / statistics.median([times["wall"] for times in chunk])
        foreign_cores.extend(times["foreign_cores"] for times in chunk)

    ratios = {}
    for name, chunk in chunks.items():
        if name == "hf":
            continue
        for kind, suffix in (("wall", ""), ("cpu", "_by_cpu_time"), ("own", "_by_its_own_clock")):
            ours = [times[kind] for times in chunk]
            theirs = [times[kind] for times in chunks["hf"]]
            ratios[f"{name} over_hf{suffix}"] = compare_times(ours, theirs)
    return {
        "examples_per_s": speeds,
        **ratios,
        "foreign_cores": summarize_times(foreign_cores),
        "chunks": chunks,
    }


def parse_options() -> argparse.Namespace:
    parser = make_parser("Fine-tuning examples/s of cpt's end tasks and of the Hugging Face Trainer.")
    parser.add_argument("--rounds", type=int, default=9, help="fine-tunings of each")
    parser.add_argument("--examples", type=int, default=800, help="examples of a fine-tuning")
    parser.add_argument("--batch", type=int, default=16, help="examples per step")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    prepare(options.threads)
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for name, (layers, width) in SIZES.items():
        wait_until_quiet(options.patience)
        shared = {"layers": layers, "width": width, "batch": options.batch}
        equal = compare_weights(FinetuneSetup(**shared, examples=10 * options.batch, dropout=0.0))
        setup = FinetuneSetup(**shared, examples=options.examples, dropout=0.1)
        results[name] = {"equal_work": equal, **summarize(setup, options.rounds)}
        print(name, {key: value for key, value in results[name].items() if key != "chunks"})
    settings = {name: value for name, value in vars(options).items() if name not in ("cache", "out")}
    save("endtask", {"options": settings, "sizes": results}, out=options.out)


if __name__ == "__main__":
    main()
