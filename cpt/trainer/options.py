"""Options of a run as such, of its trainer and of its loggers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cpt.core.naming import LONGEST_TAG
from cpt.core.options import Options, option
from cpt.core.rules import (
    TEXT,
    YES_NO,
    Rule,
    is_list,
    is_steps,
    is_text,
    is_whole,
    number,
    one_of,
    or_null,
    show,
    whole,
)
from cpt.data.orders import WORDS

# A copy of the model per process, or its weights shared out (fsdp: cpt.trainer.fsdp). With others that
# shard (deepspeed) masks and what is kept of a model would be those of a shard, without a word.
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", "fsdp")
PRECISIONS = (
    *("auto", "32-true", "32", 32, "16-mixed", "bf16-mixed", "bf16-true", "16-true", "16", 16, "bf16"),
    *("64-true", "64", 64, "transformer-engine", "transformer-engine-float16"),
)
SHARDED_PRECISIONS = ("auto", "32-true", "32", 32, "bf16-mixed", "bf16", "bf16-true")


@dataclass(frozen=True)
class Fsdp:
    """Weights shared out among processes, as cpt.trainer.fsdp makes a strategy of it."""

    reshard: bool


def is_name(value: Any) -> bool:
    """Whether it is a folder below outputs/: its parts are neither empty nor lead out of it."""
    text = str(value)
    plain = not isinstance(value, bool | None) and text.isprintable() and "\\" not in text
    return plain and all(part.strip() not in ("", ".", "..") for part in text.split("/"))


def is_order(value: Any) -> bool:
    return is_whole(value, 0) or is_text(value) or is_list(value, lambda entry: not isinstance(entry, bool))


def is_objective(value: Any) -> bool:
    return is_text(value) or (is_list(value, is_text) and len(value) > 0)


def is_tag(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_TAG


def is_devices(value: Any) -> bool:
    if isinstance(value, str):
        return value == "auto" or re.fullmatch(r"-1|\d+(,\d+)*", value) is not None
    return (
        value == -1 or is_whole(value, 1) or (is_list(value, lambda at: is_whole(at, 0)) and len(value) > 0)
    )


def minutes_of(value: Any) -> float | None:
    """The minutes in `10min` or `0.5min`; None of anything else, and of none at all."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)min", value) if isinstance(value, str) else None
    return float(found[1]) or None if found else None


WHOLE = "a whole number, 1 or more"
PLAN = Rule(lambda value: isinstance(value, bool) or value == "json", "true, false, json")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What stands at the top of conf/config.yaml."""

    name: Any = option(
        "runs that belong together: outputs/NAME/…, the group on W&B",
        Rule(is_name, "a folder below outputs/, like first or sizes/small"),
    )
    variant: Any = option("what tells this run from others of its method in a comparison")
    tags: tuple[str, ...] = option(
        "labels for W&B",
        Rule(lambda value: is_list(value, is_tag), f"a list of texts, 1 to {LONGEST_TAG} characters each"),
    )
    seed: int = option(
        "order of samples, masked positions, dropout; never the base model, never evaluation", whole(0)
    )
    order: Any = option(
        "in which order domains are learned",
        Rule(is_order, f"the number of a named order, {', '.join(WORDS)}, or a list like [b,a,c]"),
    )
    objective: Any = option(
        "what a sweeper minimises, of scores.json", Rule(is_objective, "METRIC.UNIT, or a list of such")
    )
    check: str = option(
        "whether a run's texts and base are what it began with: by size and time, or every byte",
        one_of("fast", "full"),
    )
    grow: str = option(
        "whether a new folder continues from the longest finished sibling that learned the beginning of its "
        "order: if there is one, only then, never",
        one_of("auto", "require", "never"),
    )
    on_nonfinite: str = option(
        "a loss or gradient that is no number: stop, skip the step, or back to the last checkpoint",
        one_of("stop", "skip", "rollback"),
    )
    plan: Any = option("say what the run will cost, and stop: as a table, or as JSON", PLAN)
    keep_stages: bool = option("keep the weights after every domain, not of the last one only", YES_NO)
    keep_end: bool = option(
        "keep the trainer's state at the end of a run of one domain, so that trainer.steps may be raised",
        YES_NO,
    )
    cache_dir: str = option("tokenised text and base models, shared by all runs", Rule(is_text, "a folder"))


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(Options):
    """How much of each domain is learned, and how; what is not listed goes to lightning.Trainer."""

    steps: int | None = option(
        "optimizer steps per domain", or_null(Rule(is_steps, "a whole number, 1 or more"))
    )
    epochs: float | None = option("passes over the domain's training text", or_null(number("above 0")))
    tokens: float | None = option("tokens per domain", or_null(number("above 0")))
    batch_size: int = option("samples per optimizer step, over all processes and parts", whole(1))
    accumulate_grad_batches: int = option("parts that a process splits its share of a batch into", whole(1))
    eval_batch_size: int = option("samples per forward pass of evaluation and probes, per process", whole(1))
    probe_samples: int = option("samples that importance, Fisher and routing are estimated on", whole(1))
    gradient_clip_val: float | None = option("global norm; null: no clipping", or_null(number("0 or more")))
    precision: Any = option(
        "of weights and computation; auto: bf16-mixed on a GPU that has it, else 32-true",
        one_of(*PRECISIONS),
    )
    attention: str = option("how it is computed, by the name that transformers has for it", TEXT)
    quick_dropout: bool = option(
        "on a processor masks of dropout are drawn 16 bits an entry: other masks than torch's, sooner",
        YES_NO,
        default=False,
    )
    gradient_checkpointing: bool = option(
        "activations are computed again in the backward pass, not kept: less memory, more time", YES_NO
    )
    offload: bool = option(
        "what a method keeps of weights (teachers, anchors, averages, parts) rests in the host's memory",
        YES_NO,
    )
    deterministic: bool = option(
        "on a GPU sums are taken in a fixed order, slower: the same bits", YES_NO, default=False
    )
    compile: bool = option("torch.compile of each transformer block", YES_NO)
    checkpoint_every: Any = option(
        "between checkpoints within a domain: so many steps, or minutes",
        Rule(lambda value: is_steps(value) or minutes_of(value) is not None, f"{WHOLE}, or like 10min"),
    )
    log_every_n_steps: int = option("steps between points of the curves", whole(1))
    workers: int = option("processes that prepare batches", whole(0))
    accelerator: str = option("cpu, gpu, …; auto: what there is", TEXT)
    devices: Any = option(
        "processes on this machine", Rule(is_devices, "1, 2, …; auto or -1 for all; a list like [0,2]")
    )
    num_nodes: int = option("machines", whole(1), default=1)
    strategy: str = option("how processes work together", one_of(*STRATEGIES))
    reshard_after_forward: bool | None = option(
        "of strategy=fsdp: frees a block's weights between its forward and its backward pass; null elsewhere",
        or_null(YES_NO),
        default=None,
    )
    others: Mapping[str, Any] = option("all else, as lightning.Trainer takes it")

    def check_together(self) -> None:
        if self.quick_dropout and self.compile:
            raise ValueError("quick_dropout=true does not go with compile=true; allowed: one of them")
        if self.strategy != "fsdp":
            if self.reshard_after_forward is not None:
                raise ValueError(
                    f"reshard_after_forward={show(self.reshard_after_forward)} is of strategy=fsdp; "
                    f"allowed with {self.strategy}: null"
                )
            return
        if self.precision not in SHARDED_PRECISIONS:
            raise ValueError(
                f"precision={show(self.precision)} does not go with strategy=fsdp; allowed: "
                f"{', '.join(dict.fromkeys(map(str, SHARDED_PRECISIONS)))}"
            )

    @property
    def lightning(self) -> dict[str, Any]:
        """What lightning.Trainer is told."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.strategy == "fsdp":
            own["strategy"] = Fsdp(reshard=self.reshard_after_forward is not False)
        return {name: value for name, value in own.items() if name not in OURS} | dict(self.others)


OURS = (
    *("steps", "epochs", "tokens", "batch_size", "eval_batch_size", "probe_samples", "checkpoint_every"),
    *(
        "workers",
        "others",
        "gradient_checkpointing",
        "attention",
        "quick_dropout",
        "offload",
        "compile",
        "reshard_after_forward",
    ),
)


@dataclass(frozen=True, kw_only=True)
class LoggerOptions(Options):
    """Where curves go."""

    csv: bool = option("metrics.csv in the run folder", YES_NO, default=False)
    wandb: bool = option("Weights & Biases", YES_NO, default=False)
    mode: str = option("of W&B", one_of("online", "offline", "disabled"), default="offline")
    summary: str = option(
        "of W&B: a run's headlines, or every number of its report",
        one_of("headlines", "all"),
        default="headlines",
    )
    per_domain: bool = option("of W&B: also a curve for each domain, over its steps", YES_NO, default=False)
    histograms: bool = option(
        "of W&B: histograms of a method's diagnostics after each domain", YES_NO, default=False
    )
    project: str | None = option("of W&B", or_null(TEXT), default=None)
    entity: str | None = option("of W&B", or_null(TEXT), default=None)
    others: Mapping[str, Any] = option("loggers of Lightning, or of your own, by name")

    @property
    def flags(self) -> dict[str, Any]:
        """What cpt.loggers.loggers is told."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "others"}
