"""Options of a run as such, of its trainer and of its loggers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Len, MinLen, Predicate

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
    show,
)
from cpt.data.orders import WORDS
from cpt.models.options import Trainable

BF16 = ("bf16-mixed", "bf16", "bf16-true")
SHARDED_PRECISIONS = ("auto", "32-true", "32", 32, *BF16)
PRECISIONS = (
    *("auto", "32-true", "32", 32, "16-mixed", "bf16-mixed", "bf16-true", "16-true", "16", 16, "bf16"),
    *("64-true", "64", 64, "transformer-engine", "transformer-engine-float16"),
)
TAGS = f"a list of texts, 1 to {LONGEST_TAG} characters each"
ORDERS = f"the number of a named order, {', '.join(WORDS)}, or a list like [b,a,c]"
# With a strategy that shards otherwise (deepspeed) masks and what is kept of a model would be a shard's.
Strategy = Literal[
    "auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "fsdp"
]


@dataclass(frozen=True)
class Fsdp:
    """Weights sharded across processes, as cpt.trainer.lightning makes a strategy of it."""

    reshard: bool


def is_name(value: Any) -> bool:
    """Whether it is a folder below outputs/: its parts are neither empty nor lead out of it."""
    text = str(value)
    plain = not isinstance(value, bool | None) and text.isprintable() and "\\" not in text
    return plain and all(part.strip() not in ("", ".", "..") for part in text.split("/"))


def is_order(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and not any(isinstance(entry, bool) for entry in value)
    return listed or fits(value, Natural) or fits(value, Text)


def is_devices(value: Any) -> bool:
    """Whether it is auto, -1, a number of devices, or a list of their numbers."""
    if isinstance(value, str):
        return value == "auto" or re.fullmatch(r"-1|\d+(,\d+)*", value) is not None
    listed = isinstance(value, list | tuple) and len(value) > 0 and all(fits(at, Natural) for at in value)
    return listed or value == -1 or fits(value, Count)


def minutes_of(value: Any) -> float | None:
    """The minutes in `10min` or `0.5min`; None of anything else, and of none at all."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)min", value) if isinstance(value, str) else None
    return float(found[1]) or None if found else None


Name = Annotated[Any, Predicate(is_name), Allowed("a folder below outputs/, like first or sizes/small")]
Order = Annotated[Any, Predicate(is_order), Allowed(ORDERS)]
Devices = Annotated[Any, Predicate(is_devices), Allowed("1, 2, …; auto or -1 for all; a list like [0,2]")]
Tags = Annotated[tuple[Annotated[str, Len(1, LONGEST_TAG)], ...], Allowed(TAGS)]
Metrics = Annotated[Text | Annotated[tuple[Text, ...], MinLen(1)], Allowed("METRIC.UNIT, or a list of such")]
Interval = Annotated[
    Steps | Annotated[str, Predicate(minutes_of)], Allowed("a whole number, 1 or more, or like 10min")
]
Precision = Annotated[
    str | int, Predicate(PRECISIONS.__contains__), Allowed(", ".join(dict.fromkeys(map(str, PRECISIONS))))
]


@config
class RunOptions(Options):
    """The options at the top of conf/config.yaml."""

    name: Name = option("runs that belong together: outputs/NAME/…, the group on W&B")
    variant: Any = option("what tells this run from others of its method in a comparison")
    tags: Tags = option("labels for W&B")
    seed: Natural = option("order of samples, masked positions, dropout; never base model or evaluation")
    order: Order = option("in which order domains are learned")
    optimized_metric: Metrics = option("what a sweeper minimises, of scores.json")
    verify_inputs: Literal["fast", "full"] = option(
        "whether a run's texts and base are what it began with: by size and time, or every byte"
    )
    trainable: Trainable | None = option(
        "train only these parameters: norms, biases, attention (its linear layers), a regular expression for "
        "names, or a list of such; null: all that are not frozen",
        default=None,
    )
    grow: Literal["auto", "require", "never"] = option(
        "whether a new folder continues from the longest finished sibling that learned the beginning of its "
        "order: if there is one, only then, never"
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = option(
        "on a non-finite loss or gradient: stop, skip the step, or back to the last checkpoint"
    )
    plan: Annotated[bool | Literal["json"], Allowed("true, false, json")] = option(
        "say what the run will cost, and stop: as a table, or as JSON"
    )
    save_all_stages: bool = option("keep the weights after every domain, not of the last one only")
    save_trainer_state: bool = option(
        "keep the trainer's state at the end of a run of one domain, so that trainer.steps may be raised"
    )
    cache_dir: Folder = option("tokenised text and base models, shared by all runs")


@config
class TrainerOptions(Options):
    """How much of each domain is learned, and how; what is not listed goes to lightning.Trainer."""

    steps: Steps | None = option("optimizer steps per domain")
    epochs: Positive | None = option("passes over the domain's training text")
    tokens: Positive | None = option("tokens per domain")
    batch_size: Count = option("samples per optimizer step, over all processes and parts")
    accumulate_grad_batches: Count = option("parts that a process splits its share of a batch into")
    eval_batch_size: Count = option("samples per forward pass of evaluation and probes, per process")
    importance_samples: Count = option("samples that importance, Fisher and routing are estimated on")
    gradient_clip_val: NonNegative | None = option("global norm; null: no clipping")
    precision: Precision = option("auto: bf16-mixed on a GPU that has it, else 32-true")
    attn_implementation: Text = option("attention implementation, by its name in transformers")
    quick_dropout: bool = option(
        "on a CPU draw dropout masks 16 bits an entry: faster, other masks than torch's", default=False
    )
    gradient_checkpointing: bool = option(
        "recompute activations in the backward pass: less memory, more time"
    )
    offload_method_state: bool = option(
        "keep method state (teachers, anchors, averages, parts) in CPU memory"
    )
    deterministic: bool = option(
        "on a GPU sums are taken in a fixed order, slower: the same bits", default=False
    )
    compile: bool = option("torch.compile of each transformer block")
    checkpoint_every: Interval = option("steps or minutes between checkpoints within a domain")
    log_every_n_steps: Count = option("steps between points of the curves")
    num_workers: Natural | Literal["auto"] = option(
        "processes that prepare batches; auto: 2 per GPU where there are the cores, 0 on a CPU"
    )
    accelerator: Text = option("cpu, gpu, …; auto: the available one")
    devices: Devices = option("processes on this machine")
    num_nodes: Count = option("machines", default=1)
    strategy: Strategy = option("how processes work together")
    reshard_after_forward: bool | None = option(
        "of strategy=fsdp: frees a block's weights between its forward and its backward pass; null elsewhere",
        default=None,
    )
    others: Mapping[str, Any] = option("all else, as lightning.Trainer takes it")

    def __post_init__(self) -> None:
        if self.quick_dropout and self.compile:
            raise ValueError("quick_dropout=true is invalid with compile=true. Allowed: one of them")
        if self.strategy != "fsdp" and self.reshard_after_forward is not None:
            told = f"reshard_after_forward={show(self.reshard_after_forward)} is invalid with {self.strategy}"
            raise ValueError(f"{told}. Allowed: null")
        if self.strategy == "fsdp" and self.precision not in SHARDED_PRECISIONS:
            known = ", ".join(dict.fromkeys(map(str, SHARDED_PRECISIONS)))
            why = f"precision={show(self.precision)} is invalid with strategy=fsdp"
            raise ValueError(f"{why}. Allowed: {known}")

    @property
    def lightning(self) -> dict[str, Any]:
        """The arguments of lightning.Trainer."""
        own: dict[str, Any] = {name: getattr(self, name) for name in FOR_LIGHTNING}
        if self.strategy == "fsdp":
            own["strategy"] = Fsdp(reshard=self.reshard_after_forward is not False)
        return own | dict(self.others)


FOR_LIGHTNING = (
    *("accumulate_grad_batches", "gradient_clip_val", "precision", "deterministic", "log_every_n_steps"),
    *("accelerator", "devices", "num_nodes", "strategy"),
)


@config
class LoggerOptions(Options):
    """Where curves go."""

    csv: bool = option("metrics.csv in the run folder", default=False)
    wandb: bool = option("Weights & Biases", default=False)
    mode: Literal["online", "offline", "disabled"] = option("of W&B", default="offline")
    summary: Literal["headlines", "all"] = option(
        "of W&B: a run's headlines, or every number of its report", default="headlines"
    )
    per_domain: bool = option("of W&B: also a curve for each domain, over its steps", default=False)
    histograms: bool = option("of W&B: histograms of a method's diagnostics after each domain", default=False)
    project: Text | None = option("of W&B", default=None)
    entity: Text | None = option("of W&B", default=None)
    others: Mapping[str, Any] = option("loggers of Lightning, or of your own, by name")

    @property
    def flags(self) -> dict[str, Any]:
        """The options of cpt's own loggers (cpt.loggers.loggers)."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "others"}
