"""Fine-tuning examples/s of cpt's end tasks against the Hugging Face Trainer's.

Both train the same classifier on the same rows in the same order, padded to the longest of a batch, with the
same AdamW, schedule and bar, without clipping. They take turns in one process, an epoch each; what is
built before the first step is not counted. A first, untimed pass without dropout shows that they do the same
work: the weights at its end. `grouped` and `bf16` are what a run may choose beside (endtask.grouped=20, then
endtask.precision=bf16-mixed); the Trainer's own clock leaves out its set-up."""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ground import arguments
from measuring import busy, paired, rotated, save, spread, wait_until_quiet
from stage import prepare
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

from cpt.core.heartbeat import progress_bar
from cpt.evaluation import finetune as classifier
from cpt.evaluation.finetune import EncodedExamples, FinetuneJob
from cpt.evaluation.finetune_tasks import FinetuneOptions
from cpt.models.loading import train_tokenizer

Run = Callable[[], object]  # gives the Trainer's result, where it has one
CPU, SEED, CLASSES = torch.device("cpu"), 7, 6
VOCABULARY, SHORTEST, LONGEST = 2048, 10, 60
SIZES = {"2 x 128": (2, 128), "4 x 256": (4, 256)}
LR, WEIGHT_DECAY = 3e-5, 0.01


@dataclass(frozen=True)
class Course:
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

    def job(self, **chosen: Any) -> FinetuneJob:
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
            grouped=1,
            max_seq_length=LONGEST,
            precision="32-true",
            dropout=self.dropout,
            frozen=False,
            metric="macro_f1",
            select="last",
        )
        settings = replace(settings, **chosen)
        return FinetuneJob("task", rows, None, rows, CLASSES, settings, pad=1, eval_batch_size=64)

    def start(self, model: PreTrainedModel) -> classifier.Classifier:
        with classifier.forked_generators(CPU, SEED):
            return classifier.Classifier(model, classes=CLASSES, dropout=self.dropout, frozen=False)


def ours(model: classifier.Classifier, job: FinetuneJob) -> Run:
    """An epoch of cpt's, with its bar."""
    optimizer, schedule = classifier.make_optimizer(model, job)

    def run() -> None:
        with progress_bar("cpt", total=job.steps, hidden=False) as bar:
            for _ in classifier.train_epoch(model, job, optimizer, schedule, seed=SEED, epoch=1):
                bar.update()

    return run


class WithLoss(nn.Module):
    """The same classifier as the Trainer calls it."""

    def __init__(self, model: classifier.Classifier) -> None:
        super().__init__()
        self.made = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.made({"input_ids": input_ids, "attention_mask": attention_mask})
        return {"loss": functional.cross_entropy(logits.float(), labels), "logits": logits}


def theirs(model: classifier.Classifier, job: FinetuneJob) -> Run:
    """An epoch of the Trainer's over the same rows in the same order, with its bar."""
    order = [row for rows in job.batches(SEED, 1) for row in rows]
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
    "cpt": (ours, {}),
    "cpt grouped": (ours, {"grouped": 20}),
    "cpt grouped bf16": (ours, {"grouped": 20, "precision": "bf16-mixed"}),
    "hf": (theirs, {}),
}


def equality(course: Course) -> dict[str, float]:
    """The largest difference of a weight after an epoch of each, and the largest change of one."""
    model, ends = course.model(), {}
    for name in ("cpt", "hf"):
        subject, subject_model = SUBJECTS[name][0], course.start(model)
        subject(subject_model, course.job())()
        ends[name] = torch.cat([value.detach().flatten() for value in subject_model.parameters()])
    initial_weights = torch.cat([value.detach().flatten() for value in course.start(model).parameters()])
    return {
        "apart": (ends["cpt"] - ends["hf"]).abs().max().item(),
        "moved": (ends["cpt"] - initial_weights).abs().max().item(),
    }


def timed(run: Run) -> dict[str, float]:
    gc.collect()
    wall, cpu, busy_before = time.perf_counter(), time.process_time(), busy()
    result = run()
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    own_clock_seconds = getattr(result, "metrics", {}).get("train_runtime", seconds["wall"])
    foreign = (busy() - busy_before - seconds["cpu"]) / seconds["wall"]
    return seconds | {"own": own_clock_seconds, "foreign_cores": foreign}


def play(course: Course, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The times of each subject, round by round; the first round is not counted."""
    model, jobs = course.model(), {name: course.job(**chosen) for name, (_, chosen) in SUBJECTS.items()}
    models = {name: course.start(model) for name in SUBJECTS}
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in SUBJECTS}
    for turn in range(rounds + 1):
        for name in rotated(list(SUBJECTS), turn):
            chunks[name].append(timed(SUBJECTS[name][0](models[name], jobs[name])))
    return {name: times[1:] for name, times in chunks.items()}


def summary(course: Course, rounds: int) -> dict[str, Any]:
    chunks = play(course, rounds)
    kinds = {
        kind: {name: [each[kind] for each in chunks[name]] for name in chunks}
        for kind in ("wall", "cpu", "own")
    }
    return {
        "examples_per_s": {n: course.examples / statistics.median(t) for n, t in kinds["wall"].items()},
        **{
            f"{name} over_hf{told}": paired(kinds[kind][name], kinds[kind]["hf"])
            for name in chunks
            if name != "hf"
            for kind, told in (("wall", ""), ("cpu", "_by_cpu_time"), ("own", "_by_its_own_clock"))
        },
        "foreign_cores": spread([each["foreign_cores"] for times in chunks.values() for each in times]),
        "chunks": chunks,
    }


def options() -> argparse.Namespace:
    parser = arguments("Fine-tuning examples/s of cpt's end tasks and of the Hugging Face Trainer.")
    parser.add_argument("--rounds", type=int, default=9, help="fine-tunings of each")
    parser.add_argument("--examples", type=int, default=800, help="examples of a fine-tuning")
    parser.add_argument("--batch", type=int, default=16, help="examples per step")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    prepare(chosen.threads)
    torch.set_num_threads(chosen.threads)
    results: dict[str, Any] = {}
    for name, (layers, width) in SIZES.items():
        wait_until_quiet(chosen.patience)
        shared = {"layers": layers, "width": width, "batch": chosen.batch}
        equal = equality(Course(**shared, examples=10 * chosen.batch, dropout=0.0))
        course = Course(**shared, examples=chosen.examples, dropout=0.1)
        results[name] = {"equal_work": equal, **summary(course, chosen.rounds)}
        print(name, {key: value for key, value in results[name].items() if key != "chunks"})
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")}
    save("endtask", {"options": settings, "sizes": results}, out=chosen.out)


if __name__ == "__main__":
    main()
