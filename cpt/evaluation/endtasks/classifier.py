"""A sequence classifier on the body of a language model, fine-tuned by a plain loop."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import get_total_norm
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from cpt.core.randomness import key
from cpt.evaluation.endtasks.encoding import Encoded, FineTuning
from cpt.models.forward import in_mode, mean_over, reader, uncached
from cpt.optim.schedulers import Linear, Progress

STD = 0.02  # of a new head where the model's configuration does not say it
CHECK_EVERY = 20  # steps between two looks at the loss, each of which waits for the device


def is_masked(model: PreTrainedModel) -> bool:
    """Whether a model was trained to fill masks, and not to go on with a text."""
    kinds = MODEL_FOR_MASKED_LM_MAPPING
    return type(model.config) in kinds and isinstance(model, kinds[type(model.config)])


class Classifier(nn.Module):
    """A copy of a model's body with a new head: dropout, D x D, tanh, dropout, D x C, as of RoBERTa (Liu et
    al., 2019). It reads the first token of a masked model, the last token of the text of a causal one, and of
    an encoder with a decoder the mean over the text.

    All of the copy is trained but parts that say `stays_in_end_tasks`; with `frozen`, the head alone. Weights
    are float32. What is drawn comes from torch's generator of the CPU."""

    def __init__(self, model: PreTrainedModel, *, classes: int, dropout: float, frozen: bool) -> None:
        super().__init__()
        self.first, self.mean = is_masked(model), model.config.is_encoder_decoder
        self.body = deepcopy(reader(model)).float().requires_grad_(not frozen)
        for part in self.body.modules():
            if getattr(part, "stays_in_end_tasks", False):
                part.requires_grad_(False)
        self.frozen, self.options = frozen, uncached(self.body)
        width = self.width()
        self.dropout = nn.Dropout(dropout)
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, classes)
        std = getattr(model.config, "initializer_range", None) or STD
        for linear_map in (self.dense, self.out):
            nn.init.normal_(linear_map.weight, std=std)
            nn.init.zeros_(linear_map.bias)

    @torch.no_grad()
    def width(self) -> int:
        """The features of the body's output."""
        device = next(self.body.parameters()).device
        token = torch.ones((1, 1), dtype=torch.long, device=device)
        with in_mode(self.body, training=False):
            output = self.body(input_ids=token, attention_mask=token, **self.options)
        return output.last_hidden_state.shape[-1]

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.frozen:
            self.body.eval()
        return self

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits [B, C] of a batch."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            hidden = self.body(**inputs, **self.options).last_hidden_state
        pooled = self.pooled(hidden, batch["attention_mask"])
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))

    def pooled(self, hidden: Tensor, present: Tensor) -> Tensor:
        """What the head reads, [B, D], of hidden states [B, T, D] of a text that is `present` [B, T]."""
        if self.mean:
            return mean_over(hidden, present)
        last = 0 if self.first else present.sum(1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last]


@contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Afterwards torch's generators of the CPU and of the device are as they were before."""
    if device.type == "cpu":
        forked = torch.random.fork_rng(devices=[])
    else:
        forked = torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)
    with forked:
        yield


def seed_generators(device: torch.device, *parts: str | int) -> None:
    """Makes what is drawn from now on, on the CPU and on the device, a function of a key."""
    number = key(*parts) % 2**63
    torch.random.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    elif device.type != "cpu":
        getattr(torch, device.type).manual_seed(number)


def fine_tune(
    model: PreTrainedModel, job: FineTuning, *, seed: int, device: torch.device, step: Callable[[], object]
) -> tuple[np.ndarray, int]:
    """Learns a task on a copy of a model; gives the predicted class of each test example, [N], and the epoch
    whose model made them, counted from 1. `step` is called after every optimizer step.

    The result is a function of model, task and seed; model and torch's generators stay as they are. Raises
    ValueError where the loss is no number."""
    settings = job.settings
    with unchanged_generators(device):
        seed_generators(device, "end task", job.name, seed)
        classifier = Classifier(
            model, classes=job.classes, dropout=settings.dropout, frozen=settings.frozen
        ).to(device)
        optimizer, schedule = optimizer_of(classifier, job)
        best: tuple[float, int, dict[str, Tensor]] | None = None
        for epoch in range(1, settings.epochs + 1):
            learn_epoch(classifier, job, optimizer, schedule, seed=seed, epoch=epoch, step=step)
            if job.dev is not None:
                score = scores_of(predict(classifier, job, job.dev), job.dev.labels, job.classes)
                if best is None or score[settings.metric] > best[0]:
                    best = score[settings.metric], epoch, state_of(classifier)
        if best is not None:
            classifier.load_state_dict(best[2])
        return predict(classifier, job, job.test).numpy(), best[1] if best else settings.epochs


def state_of(classifier: Classifier) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in classifier.state_dict().items()}


def optimizer_of(classifier: Classifier, job: FineTuning) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW (Loshchilov and Hutter, 2019) on all that is trained, decay included, and its linear schedule."""
    settings = job.settings
    trained = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    policy = Linear(warmup=settings.warmup)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: policy(Progress.alone(step, steps=job.steps))
    )
    return optimizer, schedule


def learn_epoch(
    classifier: Classifier,
    job: FineTuning,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    *,
    seed: int,
    epoch: int,
    step: Callable[[], object],
) -> None:
    """An epoch of training; ValueError where loss or gradient are no numbers, on which no step is made."""
    device = classifier.out.weight.device
    failed = torch.full((), math.inf, device=device)  # the first step that was not made
    classifier.train()
    for number, rows in enumerate(job.batches(seed, epoch), start=1):
        batch = job.train.batch(rows, pad=job.pad, device=device)
        with mixed_precision(device, job.settings.precision):
            logits = classifier(batch)
        loss = functional.cross_entropy(logits.float(), batch["labels"])
        loss.backward()
        fine = (loss.detach() + gradient_norm(classifier)).isfinite()
        optimizer.found_inf = (~fine).float()  # with which a fused optimizer makes no step
        failed = torch.where(fine, failed, failed.clamp_max(number))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if number % CHECK_EVERY == 0:
            check_steps(failed, job.name, seed=seed, epoch=epoch)
        step()
    check_steps(failed, job.name, seed=seed, epoch=epoch)


def gradient_norm(classifier: Classifier) -> Tensor:
    """That of all that is trained, a scalar."""
    return get_total_norm([each.grad for each in classifier.parameters() if each.grad is not None])


def check_steps(failed: Tensor, name: str, *, seed: int, epoch: int) -> None:
    """Raises ValueError where a step of an epoch was not made."""
    if torch.isfinite(failed):
        raise ValueError(
            f"loss or gradient of end task {name}, seed {seed}, are not finite at step {int(failed)} of "
            f"epoch {epoch}; a lower rate (endtask.lr, +endtask.tasks.{name}.lr) or "
            "endtask.precision=32-true may help"
        )


def mixed_precision(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


@torch.no_grad()
def predict(classifier: Classifier, job: FineTuning, examples: Encoded) -> Tensor:
    """The most probable class of each example, [N] int64 on the CPU."""
    device = classifier.out.weight.device
    classifier.eval()
    found = torch.empty(len(examples), dtype=torch.long, device=device)
    for rows in examples.by_length(job.eval_batch_size):
        with mixed_precision(device, job.settings.precision):
            logits = classifier(examples.batch(rows, pad=job.pad, device=device))
        found[torch.tensor(rows, device=device)] = logits.float().argmax(-1)
    return found.cpu()


def scores_of(predictions: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Macro-F1, micro-F1 and accuracy of predicted classes [N], 0 to 1.

    A class of train with neither an example nor a prediction here has no F1 and is left out of the macro
    average, so that a class that test lacks (SUBSTRATE_PRODUCT-OF of ChemProt) does not lower it; one that is
    predicted without an example counts as 0. Micro-F1 of single labels is accuracy."""
    given = {"preds": predictions, "target": labels, "num_classes": classes}
    return {
        "macro_f1": multiclass_f1_score(**given, average="macro").item(),
        "micro_f1": multiclass_f1_score(**given, average="micro").item(),
        "accuracy": multiclass_accuracy(**given, average="micro").item(),
    }
