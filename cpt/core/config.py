"""What a run is: the leaves of its config that decide the result."""

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write

PACKAGE = Path(__file__).parents[1]
# Within the package once that is installed, next to it in a checkout.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
# How a run is carried out, not what it computes: free to change between two starts of the same run.
EXECUTION = (
    "name",
    "tags",
    "variant",
    "plan",
    "plan_device",
    "logger",
    "cache_dir",
    "verify_inputs",
    "extend",
    "grow",  # of runs of 0.1.0
    "export",  # a finished run may be exported again
    "modules",
    "benchmark",
    "endtask",
    "answers",
    "divergence",  # it measures, and changes no bit of training
    "chats",  # on by default for models with a chat template: it measures, and changes no bit of training
    "optimized_metric",
    "domains.ignore",
    "domains.preprocessing_num_workers",
    "save_all_stages",
    "strategy",
    "on_nonfinite",
    "mask.migu.magnitudes",
    "method.mask.magnitudes",
    "eval.when",  # a finished run may be given more of the matrix
    "eval.columns",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.num_workers",
    "trainer.reshard_after_forward",
    "trainer.eval_batch_size",
    "trainer.checkpoint_every_n_steps",
    "trainer.log_every_n_steps",
    "trainer.gradient_checkpointing",
    "trainer.offload_method_state",
)
# Options at the value with which a run computes the same as one without the option. At this value they are no
# part of the identity, so that runs of 0.1.0, which lack them, are continued and compared with new ones.
# `auto` of the separator and of BOS differs for chat tokenizers and for those that add BOS alone.
NEUTRAL_VALUES: Mapping[str, Any] = {
    "trainer.match": None,
    "trainer.micro_batch": None,
    "domains.on_bad_example": "stop",
    "domains.special_tokens": "split",
    "domains.separator": "auto",
    "domains.bos_in_rows": "auto",
    "domains.date": None,
    "domains.only": None,
    "domains.balanced": False,
    "domains.embedding_samples": 1000,
    "model.tokenizer": None,
    "model.rope_parameters": None,
    "model.router_aux_loss": "auto",
    "model.quantization": "none",
    "model.dtype": "auto",
    "model.max_logits": None,
    "method.target_parameters": "none",
    "optim.lr_multipliers": None,
    "optim.no_decay": [],
    "optim.rounding": "nearest",
    "method.modules_to_save": [],
    "method.use_rslora": False,
    "method.use_dora": False,
    "method.protected_rank": 0,
    "method.init_lora_weights": True,
    "monitor.chats": False,
    "answers.ranked": True,
    "replay.sources": None,
    "replay.sources_ratio": None,
    "replay.sources_temperature": 1,
    "method.mixture.sources": None,
    "method.mixture.sources_ratio": None,
    "method.mixture.sources_temperature": 1,
}
# The options of a monitor that only measures: it neither ends a stage nor chooses its weights.
PASSIVE_MONITOR = {"monitor.stop": None, "monitor.patience": None, "monitor.keep": "last"}
# Keys of a choice that are not options of its class: its name, its learning rate over the model's, and what
# cpt.tune searches.
SEARCH = "search"
CHOICE_KEYS = ("name", "lr_multiplier", SEARCH)
MULTIPLIER = "method.lr_multiplier"  # of model.lr, in the interpolation of conf/ for optim.lr


@cache
def is_execution_key(key: str) -> bool:
    """Whether the option of a config key says only how the run is carried out, not what it computes."""
    if SEARCH in key.split("."):
        return True
    return any(key == name or key.startswith(f"{name}.") for name in EXECUTION)


def digest(value: Any) -> str:
    """A hash of any JSON value, 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings as (dotted key, value); an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_plain_config(cfg: DictConfig) -> dict[str, Any]:
    """A config in Python's own types. Raises MissingMandatoryValue for a value that is missing."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def ignores_multiplier(cfg: DictConfig) -> bool:
    """Whether optim.lr is given in a way, like a number, that does not depend on the method's multiplier."""
    changed = deepcopy(cfg)
    with read_write(changed):
        OmegaConf.update(changed, MULTIPLIER, -1, force_add=True)
    return bool(changed.optim.get("lr") == cfg.optim.get("lr"))


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a config that decide the result, by dotted key: runs with equal ones compute the same.

    Left out are options of how a run is carried out, options at a neutral value, the section `loss` where it
    weighs no token, and the sections of budget and monitor in runs that they do not change."""
    leaves = {
        key: convert_to_canonical(key, value) for key, value in flatten(settings) if not is_execution_key(key)
    }
    leaves = drop_neutral_values(leaves)

    if leaves.get("loss._target_") is None:
        leaves = drop_section(leaves, "loss")
    # A budget acts on the monitoring evaluations: with one, the options of both sections decide the result.
    if has_active_budget(leaves):
        return leaves
    leaves = drop_section(leaves, "budget")
    if is_monitor_passive(leaves):
        leaves = drop_section(leaves, "monitor")
    return leaves


def drop_neutral_values(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a config without options at a neutral value: those of a version without these options."""
    kept_leaves = {}
    for key, value in leaves.items():
        if key not in NEUTRAL_VALUES or value != NEUTRAL_VALUES[key]:
            kept_leaves[key] = value
    return kept_leaves


def drop_section(leaves: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: value for key, value in leaves.items() if not key.startswith(f"{section}.")}


def is_monitor_passive(leaves: Mapping[str, Any]) -> bool:
    """Whether the monitor of a run does not change what is trained."""
    return all(leaves.get(key, value) == value for key, value in PASSIVE_MONITOR.items())


def has_active_budget(leaves: Mapping[str, Any]) -> bool:
    """Whether a run has a budget, which observes the monitoring evaluations and may act on them. It has none
    if `budget._target_` is null, and in configs of 0.1.0, which always name the class of a budget, if all
    options of that class are null."""
    if leaves.get("budget._target_") is None:
        return False
    options = [
        value for key, value in leaves.items() if key.startswith("budget.") and key != "budget._target_"
    ]
    # A class without options, as a user may have, has no null with which it could be switched off.
    has_no_options = not options
    return has_no_options or any(value is not None for value in options)


def convert_to_canonical(key: str, value: Any) -> Any:
    """A value in the form in which configs are compared: 1e3 as 1000, and a class of cpt by its name alone,
    since its module may change from version to version."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if key == "model.dtype" and value == "float32":  # 16 bits of a checkpoint give the same results
        return "auto"
    if isinstance(value, list):
        return [convert_to_canonical("", item) for item in value]
    if key.endswith("_target_") and str(value).startswith("cpt."):
        return str(value).rpartition(".")[2].lower()
    return value


# `${times:a,b}` in a YAML file is the product of two options.
OmegaConf.register_new_resolver("times", operator.mul, replace=True)
