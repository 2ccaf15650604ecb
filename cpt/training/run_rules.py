"""What the values of conf/ may be, by key; those of methods stand in cpt/training/method_rules.py."""

import re
from collections.abc import Mapping
from typing import Any

from cpt.core.naming import LONGEST_TAG
from cpt.core.values import (
    MAPPING,
    TEXT,
    YES_NO,
    Rule,
    Rules,
    is_list,
    is_number,
    is_text,
    is_whole,
    number,
    one_of,
    or_null,
    whole,
)

MODES = ("online", "offline", "disabled")  # of W&B
BYTES = 261  # the least vocabulary: all bytes, and five special tokens
POSITIVE = number("above 0")
SHARE = number("0 to 1")
# A copy of the model per process. With sharded weights (fsdp, deepspeed) a gradient's norm, masks and what is
# kept of a model would be those of a shard, without a word.
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")
PRECISIONS = (
    *("32-true", "32", 32, "16-mixed", "bf16-mixed", "bf16-true", "16-true", "16", 16, "bf16"),
    *("64-true", "64", 64, "transformer-engine", "transformer-engine-float16"),
)


def is_name(value: Any) -> bool:
    """Whether it is a folder below outputs/: its parts are neither empty nor lead out of it."""
    text = str(value)
    plain = not isinstance(value, bool | None) and text.isprintable() and "\\" not in text
    return plain and all(part.strip() not in ("", ".", "..") for part in text.split("/"))


def is_order(value: Any) -> bool:
    return is_whole(value, 0) or is_text(value) or is_list(value, lambda entry: not isinstance(entry, bool))


def is_devices(value: Any) -> bool:
    if isinstance(value, str):
        return value == "auto" or re.fullmatch(r"-1|\d+(,\d+)*", value) is not None
    return (
        value == -1 or is_whole(value, 1) or (is_list(value, lambda at: is_whole(at, 0)) and len(value) > 0)
    )


def is_steps(value: Any) -> bool:
    """A whole number, also one written as 1e3."""
    return is_number(value) and value >= 1 and float(value).is_integer()


def is_tag(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_TAG


def is_domain_list(value: Any) -> bool:
    return is_list(value, lambda each: is_list(each, is_text))


def is_tasks(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(own, Mapping | None) for own in value.values())


BETAS = Rule(
    lambda value: is_list(value, lambda beta: is_number(beta) and 0 <= beta < 1) and len(value) == 2,
    "two numbers, 0 or more and below 1",
)
HELD_OUT = Rule(lambda value: is_number(value) and 0 < value < 0.5, "shares above 0 and below 0.5")
MOST = Rule(lambda value: value is None or is_whole(value, 1), "null, or 1 document or more")
CLIP = or_null(number("0 or more"))


def optimizer(prefix: str) -> Rules:
    rules = {"lr": number("0 or more"), "weight_decay": number("0 or more"), "eps": POSITIVE}
    rules |= {"betas": BETAS, "momentum": number("0 or more")}
    return {f"{prefix}.{name}": rule for name, rule in rules.items()}


RUN: Rules = {
    "name": Rule(is_name, "a folder below outputs/, like first or sizes/small"),
    "tags": Rule(
        lambda value: is_list(value, is_tag), f"a list of texts, 1 to {LONGEST_TAG} characters each"
    ),
    "seed": whole(0),
    "order": Rule(is_order, "the number of a named order, reverse, random, or a list like [b,a,c]"),
    "objective": Rule(
        lambda value: is_text(value) or (is_list(value, is_text) and len(value) > 0),
        "METRIC.UNIT, or a list of such",
    ),
    "freeze": MAPPING,
    "freeze.embeddings": YES_NO,
    "freeze.layers": whole(0),
    "keep_stages": YES_NO,
    "cache_dir": Rule(is_text, "a folder"),
    "on_nonfinite": one_of("stop", "skip", "rollback"),
    "check": one_of("fast", "full"),
    "callbacks": MAPPING,
    "logger": MAPPING,
    "logger.csv": YES_NO,
    "logger.wandb": YES_NO,
    "logger.mode": one_of(*MODES),
    "logger.project": or_null(TEXT),
    "logger.entity": or_null(TEXT),
}
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
)
MODEL: Rules = {
    "model.name": TEXT,
    "model.checkpoint": or_null(Rule(is_text, "a Hugging Face name or a folder")),
    "model.objective": one_of("masked", "causal", "auto"),
    "model.mask_rate": or_null(number("above 0 and below 1")),
    "model.length": whole(2),
    "model.resize": YES_NO,
    "model.vocabulary": or_null(whole(BYTES)),
    "model.config": or_null(MAPPING),
    **{f"model.config.{name}": whole(1) for name in SIZES},
    "model.base": or_null(MAPPING),
    "model.base.steps": whole(0),
    "model.base.batch_size": whole(1),
    "model.base.seed": whole(0),
    "model.base.warmup": SHARE,
    "model.base.gradient_clip_val": CLIP,
    "model.base.optim": MAPPING,
    **optimizer("model.base.optim"),
    "model.lr": number("0 or more"),
}
TRAINER: Rules = {
    "trainer.steps": or_null(Rule(is_steps, "a whole number, 1 or more")),
    "trainer.epochs": or_null(POSITIVE),
    "trainer.tokens": or_null(POSITIVE),
    "trainer.batch_size": whole(1),
    "trainer.accumulate_grad_batches": whole(1),
    "trainer.eval_batch_size": whole(1),
    "trainer.probe_samples": whole(1),
    "trainer.gradient_clip_val": CLIP,
    "trainer.precision": one_of(*PRECISIONS),
    "trainer.checkpoint_every": whole(1),
    "trainer.log_every_n_steps": whole(1),
    "trainer.workers": whole(0),
    "trainer.accelerator": TEXT,
    "trainer.devices": Rule(is_devices, "1, 2, …; auto or -1 for all; a list like [0,2]"),
    "trainer.num_nodes": whole(1),
    "trainer.strategy": one_of(*STRATEGIES),
}
DATA: Rules = {
    "domains.root": Rule(is_text, "a folder"),
    "domains.folder": Rule(is_text, "a folder below domains.root"),
    "domains.column": TEXT,
    "domains.streaming": YES_NO,
    "domains.packages": MAPPING,
    "domains.catalogue": MAPPING,
    "domains.orders": or_null(Rule(is_domain_list, "a list of orders like [[a,b],[b,a]]")),
    "domains.held_out": MAPPING,
    "domains.held_out.valid": HELD_OUT,
    "domains.held_out.test": HELD_OUT,
    "domains.held_out.seed": whole(0),
    "domains.held_out.most": MOST,
    "endtask.tasks": or_null(Rule(is_tasks, "for each task its own values, or null")),
    "endtask.columns": MAPPING,
}
LEARNING: Rules = {"method.rate": number("0 or more"), "optim.carry": YES_NO, **optimizer("optim")}
SCHEDULE: Rules = {"warmup": SHARE, "final": SHARE}
RULES: Rules = {**RUN, **MODEL, **TRAINER, **DATA, **LEARNING}
CLOSED = ("freeze", "model", "model.base", "domains.held_out")  # their keys are those that have a rule

# Options of lightning.Trainer that cpt sets, or that would change unseen how much is learned and scored.
BUDGET = "trainer.steps, trainer.epochs or trainer.tokens say how much of a domain is learned"
SCORING = "every domain is scored as a whole after each; domains.held_out.most bounds what is held out"
OWN = "cpt does that itself"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("max_steps", "min_steps", "max_epochs", "min_epochs", "max_time"), BUDGET),
    **dict.fromkeys(("limit_train_batches", "overfit_batches", "fast_dev_run"), BUDGET),
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), SCORING),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"), SCORING),
    "callbacks": "callbacks=…, or '+callbacks.my._target_=module.Class'",
    "logger": "logger=…, or '+logger.my._target_=module.Class'",
    "default_root_dir": "hydra.run.dir=… is the folder of a run",
    "enable_checkpointing": "trainer.checkpoint_every says how often",
    "enable_progress_bar": OWN,
    "enable_model_summary": "+callbacks.summary._target_=lightning.pytorch.callbacks.ModelSummary",
    "use_distributed_sampler": OWN,
    "reload_dataloaders_every_n_epochs": OWN,
    "plugins": OWN,
    "barebones": "logger=none is the fastest",
}
# What goes to lightning.Trainer as it is; a name that is in neither list is looked for in its signature.
PASSED = (
    *("benchmark", "deterministic", "detect_anomaly", "enable_autolog_hparams", "gradient_clip_algorithm"),
    *("inference_mode", "model_registry", "profiler", "sync_batchnorm"),
)
