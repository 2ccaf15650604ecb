"""Options of a run as such, of its trainer and of its loggers."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Len, Predicate
from pydantic import BeforeValidator

from cpt.core.exceptions import InvalidOptionError
from cpt.core.naming import LONGEST_TAG
from cpt.core.schema import (
    Allowed,
    Count,
    Folder,
    Natural,
    NonNegative,
    Options,
    Positive,
    Steps,
    Text,
    config,
    fits,
    option,
)
from cpt.data.options import count_micro_batches
from cpt.data.orders import WORDS
from cpt.loggers.wandb_environment import WandbPlace
from cpt.models.options import Trainable
from cpt.trainer.device_kinds import KIND_NAMES

BF16 = ("bf16-mixed", "bf16", "bf16-true")
FP16_MIXED = ("16-mixed", "16", 16)
SHARDED_PRECISIONS = ("auto", "32-true", "32", 32, *BF16)
TAGS = f"a list of texts, 1 to {LONGEST_TAG} characters each"
ORDERS = f"the number of a named order, {', '.join(WORDS)}, swapped, a domain, or a list like [b,a,c]"
# With a strategy that shards otherwise (deepspeed) masks and what is kept of a model would be a shard's.
Strategy = Literal[
    "auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "fsdp"
]


def is_name(value: Any) -> bool:
    """Whether it is a folder below outputs/: its parts are neither empty nor lead out of it."""
    text = str(value)
    if isinstance(value, bool | None) or not text.isprintable() or "\\" in text:
        return False
    return all(part.strip() not in ("", ".", "..") for part in text.split("/"))


def is_order(value: Any) -> bool:
    """Whether it is a list of domains, the number of a named order, or a word."""
    if isinstance(value, list | tuple):
        return not any(isinstance(entry, bool) for entry in value)
    return fits(value, Natural) or fits(value, Text)


def is_devices(value: Any) -> bool:
    """Whether it is auto, -1, a number of devices, or a list of their numbers."""
    if isinstance(value, str):
        return value == "auto" or re.fullmatch(r"-1|\d+(,\d+)*", value) is not None
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(fits(number, Natural) for number in value)
    return value == -1 or fits(value, Count)


def count_devices(value: Any) -> int | None:
    """The number of devices that an option names; None for all, whose number Lightning knows."""
    if isinstance(value, str) and "," in value:
        return len(value.split(","))
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int) and value > 0 else None


DeviceKindName = Annotated[
    Literal[KIND_NAMES],  # type: ignore[valid-type]  # names of a table
    BeforeValidator(lambda name: str(name) if isinstance(name, int) else name),  # 4090 is a number for Hydra
]
Name = Annotated[Any, Predicate(is_name), Allowed("a folder below outputs/, like first or sizes/small")]
Order = Annotated[Any, Predicate(is_order), Allowed(ORDERS)]
Devices = Annotated[Any, Predicate(is_devices), Allowed("1, 2, …; auto or -1 for all; a list like [0,2]")]
Tags = Annotated[tuple[Annotated[str, Len(1, LONGEST_TAG)], ...], Allowed(TAGS)]
MetricName = Annotated[
    Text, Allowed("METRIC.UNIT or METRIC/UNIT of scores.json, or of end tasks MF1, Acc, …")
]
# Not 16-true: AdamW's mean squared gradients are 0 in float16 below 6e-8, so that steps become gradients over
# epsilon.
Precision = Literal[
    "auto", "32-true", "32", 32, "16-mixed", "bf16-mixed", "bf16-true", "16", 16, "bf16", "64-true"
]


@config
class RunOptions(Options):
    """The options at the top of conf/config.yaml."""

    name: Name = option("name of the experiment: the folder outputs/NAME, the group on W&B")
    variant: Any = option("label of the run's options in a comparison")
    tags: Tags = option("labels for W&B")
    seed: Natural = option("seed of sample order, masks and dropout; not of the base model or the evaluation")
    order: Order = option("order of the domains")
    optimized_metric: MetricName = option("metric of scores.json that a sweeper minimizes")
    verify_inputs: Literal["fast", "full"] = option(
        "verification of texts and base model on resume: by size and time, or every byte"
    )
    trainable: Trainable | None = option(
        "train only these parameters: norms, biases, attention (its linear layers), a regular "
        "expression for names, or a list; null: all that are not frozen",
        default=None,
    )
    extend: Folder | None = option(
        "folder of a finished run, to which this new run adds the further domains of its order; null: "
        "all domains are trained",
        default=None,
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = option(
        "on a non-finite loss or gradient: stop, skip the step, or roll back to the last checkpoint"
    )
    plan: Annotated[bool | Literal["json"], Allowed("true, false, json")] = option(
        "estimate the cost and stop: true prints a table, json JSON"
    )
    plan_device: DeviceKindName | None = option(
        "kind of device for which plan=true and json are computed, without weights, texts or a step; cpu: "
        "this machine's; null: measured on this machine, computed where weights are missing or do not fit",
        default=None,
    )
    save_all_stages: bool = option("keep the weights of every stage, not only of the last")
    cache_dir: Folder = option("folder of tokenized text and base models, shared by all runs")

    def __post_init__(self) -> None:
        if self.plan_device is not None and self.plan is False:
            raise InvalidOptionError(
                "plan_device", self.plan_device, context="with plan=false", allowed="null; or plan=true, json"
            )


@config
class ExportOptions(Options):
    """The exported model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "type of the exported weights, rounded once from what was trained; auto: as most weights of the "
        "checkpoint are stored, float32 of a new model",
        default="auto",
    )


@config
class TrainerOptions(Options):
    """How much of each domain is learned, and how; what is not listed goes to lightning.Trainer."""

    steps: Steps | None = option("optimizer steps per domain")
    epochs: Positive | None = option("passes over the domain's training text")
    tokens: Positive | None = option("tokens per domain")
    match: Literal["ncl"] | None = option(
        "equal compute: scale steps, epochs or tokens to the operations of method=ncl; null: as given",
        default=None,
    )
    batch_size: Count = option("samples per optimizer step, over all processes and micro-batches")
    accumulate_grad_batches: Count = option("micro-batches per process and optimizer step")
    micro_batch: Count | Literal["auto"] | None = option(
        "samples per process and forward pass in training, in place of accumulate_grad_batches; auto: the "
        "most that fit on the device, chosen once for a run; null: as accumulate_grad_batches says",
        default=None,
    )
    eval_batch_size: Count = option("samples per forward pass of an evaluation, per process")
    importance_samples: Count = option("samples that estimate importances, Fisher and routing")
    gradient_clip_val: NonNegative | None = option("maximum global gradient norm; null: no clipping")
    precision: Precision = option(
        "precision of Lightning; auto: bf16-mixed on a GPU that supports it, else 32-true"
    )
    attn_implementation: Text = option("attention implementation, by its name in transformers")
    quick_dropout: Literal["auto"] | bool = option(
        "draw dropout masks from 16 bits per entry on a CPU: faster, not torch's masks; "
        "auto: unless compile=true",
        default="auto",
    )
    gradient_checkpointing: bool = option(
        "recompute activations in the backward pass: less memory, more time"
    )
    offload_method_state: bool = option(
        "keep method state (teachers, anchors, averages, modules) in CPU memory"
    )
    deterministic: bool = option(
        "use deterministic algorithms on a GPU: slower, bitwise reproducible", default=False
    )
    compile: bool | Literal["auto"] = option(
        "torch.compile of each transformer block; auto: on a GPU, in runs that are long enough and have "
        "batches of one width"
    )
    checkpoint_every_n_steps: Steps = option("steps between checkpoints within a domain")
    log_every_n_steps: Count = option("steps between points of the training curves")
    num_workers: Natural | Literal["auto"] = option(
        "processes that prepare batches; auto: 2 per GPU where there are the cores, 0 on a CPU"
    )
    accelerator: Text = option("accelerator: cpu, gpu, …; auto: the available one")
    devices: Devices = option("devices per machine")
    num_nodes: Count = option("number of machines", default=1)
    strategy: Strategy = option("parallel strategy")
    reshard_after_forward: bool | None = option(
        "free the gathered weights of a block between its forward and backward pass "
        "(strategy=fsdp); null elsewhere",
        default=None,
    )
    others: Mapping[str, Any] = option("further arguments of lightning.Trainer")

    def __post_init__(self) -> None:
        if self.quick_dropout is True and self.compile is True:
            raise ValueError("quick_dropout=true is invalid with compile=true. Allowed: one of them")
        if self.micro_batch is not None and self.accumulate_grad_batches != 1:
            raise InvalidOptionError(
                "accumulate_grad_batches",
                self.accumulate_grad_batches,
                context=f"with micro_batch={self.micro_batch}",
                reason="it follows from it",
                allowed="1, or micro_batch=null",
            )
        if self.strategy != "fsdp" and self.reshard_after_forward is not None:
            raise InvalidOptionError(
                "reshard_after_forward",
                self.reshard_after_forward,
                context=f"with {self.strategy}",
                allowed="null",
            )
        if self.strategy == "fsdp" and self.precision not in SHARDED_PRECISIONS:
            raise InvalidOptionError(
                "precision",
                self.precision,
                context="with strategy=fsdp",
                allowed=", ".join(dict.fromkeys(map(str, SHARDED_PRECISIONS))),
            )

    def count_micro_batches(self, world_size: int) -> int:
        """The micro-batches of a process and step; 1 of `micro_batch=auto`, which is chosen later. Raises
        ValueError for a micro-batch that does not divide what each process has of the batch."""
        if self.micro_batch is None or self.micro_batch == "auto":
            return self.accumulate_grad_batches
        return count_micro_batches(self.batch_size, micro_batch=self.micro_batch, world=world_size)

    @property
    def lightning(self) -> dict[str, Any]:
        """The arguments of cpt.trainer.lightning.make_trainer."""
        arguments = {name: getattr(self, name) for name in LIGHTNING_ARGUMENTS}
        return arguments | dict(self.others)


LIGHTNING_ARGUMENTS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "precision",
    "deterministic",
    "log_every_n_steps",
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "reshard_after_forward",
)


@config
class LoggerOptions(Options):
    """Where curves go."""

    csv: bool = option("write metrics.csv in the run folder", default=False)
    wandb: bool = option("log to Weights & Biases", default=False)
    mode: Literal["auto", "online", "offline", "disabled"] = option(
        "mode of W&B; auto: WANDB_MODE, else online if logged in, else offline", default="auto"
    )
    project: Text | None = option("project of W&B; null: WANDB_PROJECT, else cpt", default=None)
    entity: Text | None = option("user or team of W&B; null: WANDB_ENTITY, else your default", default=None)
    others: Mapping[str, Any] = option("Lightning or custom loggers, by name")

    @property
    def wandb_place(self) -> WandbPlace | None:
        """Where on W&B the run goes; None: nowhere."""
        if not self.wandb:
            return None
        return WandbPlace(mode=self.mode, project=self.project, entity=self.entity)
