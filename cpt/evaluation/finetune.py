"""A sequence classifier on the body of a language model, fine-tuned on an end task by a plain loop."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import get_total_norm
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from cpt.core.randomness import key, permute, torch_seed
from cpt.evaluation.finetune_tasks import FinetuneOptions, LabelledExample
from cpt.models.forward import cache_arguments, find_input_stack, mean_over_tokens, set_mode
from cpt.models.loading import find_max_positions
from cpt.optim.schedulers import Linear, Progress

STD = 0.02  # of a new head where the model's configuration has no initializer_range
CHECK_EVERY = 20  # steps between two checks of the loss, each of which waits for the device


@dataclass(frozen=True)
class EncodedExamples:
    """Tokenised examples: ids and, from some tokenizers, types, lists of [T] int64; labels [N]."""

    ids: list[Tensor]
    types: list[Tensor] | None
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int] | np.ndarray, *, pad: int, device: torch.device) -> dict[str, Tensor]:
        """Rows padded at their end: input_ids, attention_mask, perhaps token_type_ids [B, T], labels [B]."""
        ids = nn.utils.rnn.pad_sequence([self.ids[row] for row in rows], batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(self.ids[row]) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": self.labels[torch.as_tensor(rows)]}

        if self.types is not None:
            types = [self.types[row] for row in rows]
            batch["token_type_ids"] = nn.utils.rnn.pad_sequence(types, batch_first=True)
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def encode_examples(
    examples: Sequence[LabelledExample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    classes: list[str],
    has_types: bool,
) -> EncodedExamples:
    """Examples as a tokenizer's own template has them, cut at the longer text to `length` tokens in all."""
    # A tokenizer takes either texts or pairs of texts.
    singles = [index for index, example in enumerate(examples) if example.text_pair is None]
    pairs = [index for index, example in enumerate(examples) if example.text_pair is not None]
    rows: list[dict[str, Any]] = [{}] * len(examples)
    for indices, has_pair in ((singles, False), (pairs, True)):
        if not indices:
            continue
        encoded = tokenizer(
            [examples[index].text for index in indices],
            [str(examples[index].text_pair) for index in indices] if has_pair else None,
            truncation="longest_first",
            max_length=length,
            padding=False,
            split_special_tokens=True,  # spelled out they stay text
        )
        for row, index in enumerate(indices):
            rows[index] = {name: values[row] for name, values in encoded.items()}

    has_second_type = any(any(row.get("token_type_ids", ())) for row in rows)
    token_types = None
    if has_types and has_second_type:
        token_types = [torch.tensor(row["token_type_ids"]) for row in rows]
    return EncodedExamples(
        ids=[torch.tensor(row["input_ids"]) for row in rows],
        types=token_types,
        labels=torch.tensor([classes.index(example.label) for example in examples]),
    )


@dataclass(frozen=True)
class FinetuneJob:
    """A task's encoded splits, and how it is learned; `dev` is empty where it is not used."""

    name: str
    train: EncodedExamples
    dev: EncodedExamples | None
    test: EncodedExamples
    classes: int
    settings: FinetuneOptions
    pad: int
    eval_batch_size: int

    @property
    def steps(self) -> int:
        return math.ceil(len(self.train) / self.settings.batch_size) * self.settings.epochs

    def autocast(self, device: torch.device) -> torch.autocast:
        is_mixed = self.settings.precision == "bf16-mixed"
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed)

    def batches(self, seed: int, epoch: int) -> list[np.ndarray]:
        """The rows of the training set in each batch of an epoch: a shuffle that is a function of task, seed
        and epoch. With `group_by_length` the rows of some batches are sorted by length and divided among
        these batches again, which saves padding; then the order of the batches is shuffled."""
        batch_size = self.settings.batch_size
        stream = key("end task", self.name, seed, epoch)
        rows = permute(np.arange(len(self.train)), len(self.train), stream=stream)
        if self.settings.sorted_batches == 1:
            return split_rows(rows, batch_size)

        lengths = np.array([len(ids) for ids in self.train.ids])
        batches = []
        for group in split_rows(rows, batch_size * self.settings.sorted_batches):
            by_length = group[np.argsort(lengths[group], kind="stable")]
            batches.extend(split_rows(by_length, batch_size))
        order = permute(np.arange(len(batches)), len(batches), stream=stream)
        return [batches[index] for index in order]


def split_rows(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Rows in parts of `size`, the last of which may be smaller."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def find_max_length(model: PreTrainedModel, length: int) -> int:
    """The tokens of an example that a model takes, `length` at most: a prompt has positions too."""
    max_positions = find_max_positions(model)
    if max_positions is None:
        return length
    prompt_length = sum(getattr(part, "positions_taken", 0) for part in model.modules())
    return min(length, max_positions - prompt_length)


class Classifier(nn.Module):
    """A float32 copy of a model's body with RoBERTa's head (dropout, D x D, tanh, dropout, D x C). It reads
    the first token of a masked model, the last of a causal one, the mean of an encoder with a decoder. All is
    trained but modules with `stays_in_end_tasks`; with `freeze_encoder`, the head alone."""

    def __init__(self, model: PreTrainedModel, *, classes: int, dropout: float, freeze_encoder: bool) -> None:
        super().__init__()
        self.reads_first_token = is_masked_model(model)
        self.reads_mean = model.config.is_encoder_decoder
        self.freeze_encoder = freeze_encoder

        self.body = deepcopy(find_input_stack(model)).float().requires_grad_(not freeze_encoder)
        for part in self.body.modules():
            if getattr(part, "stays_in_end_tasks", False):
                part.requires_grad_(False)
        self.body_arguments = cache_arguments(self.body)

        # The width of what the body returns: not every configuration names it alike.
        token = torch.ones((1, 1), dtype=torch.long, device=next(self.body.parameters()).device)
        with torch.no_grad(), set_mode(self.body, training=False):
            output = self.body(input_ids=token, attention_mask=token, **self.body_arguments)
        width = output.last_hidden_state.shape[-1]

        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, classes)
        std = getattr(model.config, "initializer_range", None) or STD
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.freeze_encoder:
            self.body.eval()
        return self

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits [B, C] of a batch."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        mask = batch["attention_mask"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_encoder):
            hidden = self.body(**inputs, **self.body_arguments).last_hidden_state  # [B, T, D]

        rows = torch.arange(len(hidden), device=hidden.device)
        if self.reads_mean:
            pooled = mean_over_tokens(hidden, mask)
        elif self.reads_first_token:
            pooled = hidden[rows, 0]
        else:  # the last token
            pooled = hidden[rows, mask.sum(1) - 1]
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


def is_masked_model(model: PreTrainedModel) -> bool:
    """Whether a model's class is the one for masked language modelling of its configuration."""
    classes = MODEL_FOR_MASKED_LM_MAPPING
    return type(model.config) in classes and isinstance(model, classes[type(model.config)])


@contextmanager
def forked_generators(device: torch.device, *parts: str | int) -> Iterator[None]:
    """Restores torch's generators of the CPU and of the device at the end of the context. With `parts`, draws
    inside the context are a function of their key."""
    devices = [] if device.type == "cpu" else [device.index or 0]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        if parts:
            seed = torch_seed(*parts)
            torch.random.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.default_generators[devices[0]].manual_seed(seed)
            elif devices:
                getattr(torch, device.type).manual_seed(seed)
        yield


@dataclass(frozen=True)
class BestEpoch:
    """The epoch after which a classifier was best on dev, its score there, and its state on the CPU."""

    epoch: int
    score: float
    state: dict[str, Tensor]


def fine_tune(
    model: PreTrainedModel, job: FinetuneJob, *, seed: int, device: torch.device, step: Callable[[], object]
) -> tuple[np.ndarray, int]:
    """Learns a task on a copy of a model; gives the predicted class of each test example, [N], and the epoch
    whose model made them, from 1: a function of model, task and seed. `step` is called after every step."""
    settings = job.settings
    with forked_generators(device, "end task", job.name, seed):
        classifier = Classifier(
            model, classes=job.classes, dropout=settings.dropout, freeze_encoder=settings.freeze_encoder
        ).to(device)
        optimizer, schedule = make_optimizer(classifier, job)

        best: BestEpoch | None = None
        for epoch in range(1, settings.epochs + 1):
            for _ in train_epoch(classifier, job, optimizer, schedule, seed=seed, epoch=epoch):
                step()
            if job.dev:
                scores = score_predictions(predict(classifier, job, job.dev), job.dev.labels, job.classes)
                score = scores[settings.metric]
                if best is None or score > best.score:
                    state = {name: value.cpu().clone() for name, value in classifier.state_dict().items()}
                    best = BestEpoch(epoch, score, state)

        if best is not None:
            classifier.load_state_dict(best.state)
        last_epoch = settings.epochs if best is None else best.epoch
        return predict(classifier, job, job.test).numpy(), last_epoch


def make_optimizer(classifier: Classifier, job: FinetuneJob) -> tuple[AdamW, LambdaLR]:
    """AdamW (Loshchilov and Hutter, 2019) on all that is trained, decay included, and its linear schedule."""
    settings = job.settings
    trained = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)

    schedule = Linear(warmup_ratio=settings.warmup_ratio)
    return optimizer, LambdaLR(
        optimizer, lambda step: schedule(Progress.in_single_domain(step, steps=job.steps))
    )


def train_epoch(
    classifier: Classifier, job: FinetuneJob, optimizer: AdamW, schedule: LambdaLR, *, seed: int, epoch: int
) -> Iterator[None]:
    """An epoch, step by step; raises ValueError where loss or gradient are not finite: no step is made
    then."""
    device = classifier.out.weight.device
    first_failed = torch.full((), math.inf, device=device)  # the first step that was not made
    classifier.train()
    batches = job.batches(seed, epoch)

    for number, rows in enumerate(batches, start=1):
        batch = job.train.batch(rows, pad=job.pad, device=device)
        with job.autocast(device):
            logits = classifier(batch)
        loss = functional.cross_entropy(logits.float(), batch["labels"])
        loss.backward()
        gradients = [parameter.grad for parameter in classifier.parameters() if parameter.grad is not None]
        is_finite = (loss.detach() + get_total_norm(gradients)).isfinite()

        # Decided on the device, which nothing waits for: with `found_inf` a fused optimizer makes no step.
        optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        first_failed = torch.where(is_finite, first_failed, first_failed.clamp_max(number))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

        is_check_due = number % CHECK_EVERY == 0 or number == len(batches)
        if is_check_due and torch.isfinite(first_failed):
            raise ValueError(
                f"loss or gradient of end task {job.name}, seed {seed}, are not finite at step "
                f"{int(first_failed)} of epoch {epoch}; a lower endtask.lr, endtask.tasks.{job.name}.lr or "
                "endtask.precision=32-true may help"
            )
        yield


@torch.no_grad()
def predict(classifier: Classifier, job: FinetuneJob, examples: EncodedExamples) -> Tensor:
    """The most probable class of each example, [N] int64 on the CPU."""
    device = classifier.out.weight.device
    classifier.eval()
    predictions = torch.empty(len(examples), dtype=torch.long, device=device)

    # Examples of similar length share a batch, which saves padding.
    order = sorted(range(len(examples)), key=lambda row: -len(examples.ids[row]))
    for begin in range(0, len(order), job.eval_batch_size):
        rows = order[begin : begin + job.eval_batch_size]
        with job.autocast(device):
            logits = classifier(examples.batch(rows, pad=job.pad, device=device))
        predictions[torch.tensor(rows, device=device)] = logits.float().argmax(-1)
    return predictions.cpu()


def score_predictions(predictions: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Macro-F1, micro-F1 and accuracy of predicted classes [N], 0 to 1. A class with neither an example nor a
    prediction here (as SUBSTRATE_PRODUCT-OF of ChemProt) is left out of the macro average."""
    macro = multiclass_f1_score(predictions, labels, num_classes=classes, average="macro").item()
    micro = multiclass_accuracy(predictions, labels, num_classes=classes, average="micro").item()
    return {"macro_f1": macro, "micro_f1": micro, "accuracy": micro}
