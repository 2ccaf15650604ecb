"""Deprecated names of options, accepted for one version with a warning each: on the command line, in YAML
files, and in the folders of earlier runs."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from cpt.core.config import CONF, flatten
from cpt.core.exceptions import format_value
from cpt.core.schema import option_types
from cpt.core.sections import GIVEN, options_class


def pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


GROUPS = pairs("probe benchmark  schedule lr_scheduler")
KEYS = pairs("""
    check verify_inputs  from init_from  keep_stages save_all_stages  objective optimized_metric
    freeze.only trainable  parts.keep modules.storage  optim.carry optim.state_across_domains
    data.workers data.preprocessing_num_workers  domains.held_out.most domains.held_out.max_documents
    eval.tokens eval.max_tokens  monitor.tokens monitor.max_tokens
    model.pretraining.warmup model.pretraining.warmup_ratio  model.checkpoint model.name_or_path
    model.length model.max_seq_length  model.mask_rate model.mlm_probability
    model.vocabulary model.vocab_size  trainer.attention trainer.attn_implementation
    trainer.offload trainer.offload_method_state  trainer.probe_samples trainer.importance_samples
    trainer.workers trainer.num_workers
""")
SECTIONS = {"model.base": "model.pretraining"}
# By place; only where the class that is chosen there has the new name: method.alpha is LoRA's and DER++'s.
OPTIONS = {
    "answers": pairs("most max_documents  tokens max_new_tokens"),
    "benchmark": pairs("limit max_documents"),
    "endtask endtask.tasks.*": pairs("length max_seq_length  warmup warmup_ratio"),
    "lr_scheduler": pairs("warmup warmup_ratio"),
    "mask.* method.mask": pairs("acts_on apply_to  mass top_p"),
    "method": pairs("""
        acts_on apply_to  alpha lora_alpha  draw minibatch_size  dropout lora_dropout  experts num_experts
        memory buffer_size  normalise normalize  rate lr_multiplier
        reduction reduction_factor  targets target_modules  tokens num_virtual_tokens
    """),
    "replay method.mixture": pairs("""
        adds mode  general general_ratio  memory buffer_size  past past_ratio  tokens max_tokens
    """),
}
MODES = pairs("false replace  true append")
VALUES = {
    "domains.packing": pairs("isolated document_mask  per_document none"),
    "method.mixture.mode": MODES,
    "model": pairs("checkpoint hf"),
    "replay.mode": MODES,
}
OVERRIDE = re.compile(r"(~)([\w/.@]+)()|([+~]{0,2})([\w/.@]+)(=.*)", re.DOTALL)


def warn(old: str, new: str) -> None:
    print(f"cpt: {old} is deprecated and will be removed in the next version: use {new}", file=sys.stderr)


def new_name(key: str, config: Mapping[str, Any]) -> str:
    """The present name of a key or group; `config`: leaves, for the classes that they choose."""
    head, dot, rest = key.partition(".")
    key = f"{GROUPS.get(head, head)}{dot}{rest}"
    for old, new in SECTIONS.items():
        key = new + key.removeprefix(old) if f"{key}.".startswith(f"{old}.") else key
    place, _, old = key.rpartition(".")
    for places, names in OPTIONS.items():
        if old in names and any(fnmatchcase(place, each) for each in places.split()):
            return f"{place}.{names[old]}" if has_option(place, names[old], config) else key
    return KEYS.get(key, key)


def has_option(place: str, name: str, config: Mapping[str, Any]) -> bool:
    """Whether the class of a section, if it has one, has an option."""
    target = config.get(f"{place}._target_")
    if not isinstance(target, str) or name in GIVEN:
        return True
    with suppress(ValueError):
        kind = options_class(target, place=place)
        return place == "endtask" if kind is None else name in option_types(kind)
    return False


def new_value(name: str, value: Any) -> Any:
    """The present form of a value of a key with this present name."""
    return VALUES.get(name, {}).get(format_value(value), value)


def rename_keys(cfg: DictConfig) -> None:
    """Moves the values of old keys that a YAML file has set to the present ones, in place, where the command
    line does not set these, and renames the keys of a sweep; warns of each on stderr."""
    given = OmegaConf.select(cfg, "hydra.overrides.task") or ()
    on_command_line = {each.lstrip("+").partition("=")[0] for each in given}
    tree = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    leaves = dict(flatten(tree))  # type: ignore[arg-type]
    for key, value in leaves.items():
        name = new_name(key, leaves)
        if (present := new_value(name, value)) != value:
            warn(f"{key}={format_value(value)}", f"{name}={present}")
        elif name != key:
            warn(key, name)
        else:
            continue
        with open_dict(cfg):
            left = key
            while left:  # the key, and the sections that it leaves empty
                left, _, last = left.rpartition(".")
                node = OmegaConf.select(cfg, left) if left else cfg
                del node[last]
                left *= not node
            if name == key or name not in on_command_line:
                OmegaConf.update(cfg, name, present, merge=True)
    if params := OmegaConf.select(cfg, "hydra.sweeper.params"):
        renamed = rename_overrides([f"{key}={value}" for key, value in params.items()])
        with read_write(cfg), open_dict(cfg):
            cfg.hydra.sweeper.params = dict(each.split("=", 1) for each in renamed)


def rename_overrides(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with present names; warns of each old one on stderr."""
    present = [rename_argument(each, {}, say=lambda *names: None) for each in arguments]
    config = {} if present == list(arguments) else compose_choices(present)
    return [rename_argument(each, config) for each in arguments]


def rename_argument(
    argument: str, config: Mapping[str, Any], *, say: Callable[[str, str], None] = warn
) -> str:
    if not (found := OVERRIDE.fullmatch(argument)):
        return argument
    sign, key, value = (part for part in found.groups() if part is not None)
    name, present = new_name(key, config), value
    for old, new in VALUES.get(name, {}).items():
        present = re.sub(rf"\b{old}\b", new, present, flags=re.IGNORECASE)
    if present != value:
        say(f"{key}{value}", f"{name}{present}")
    elif name != key:
        say(key, name)
    return f"{sign}{name}{present}"


def compose_choices(arguments: Sequence[str]) -> dict[str, Any]:
    """The leaves of the config of the choices among the arguments, of a sweep the first ones, without further
    values; none where they cannot be composed."""
    given, _ = get_args_parser().parse_known_args(list(arguments))
    found = [each.split(",")[0] for each in arguments if re.fullmatch(r"[\w/]+=[^=]+", each)]
    groups = [each for each in found if (CONF / each.partition("=")[0]).is_dir()]
    added = [f"hydra.searchpath=[file://{Path(given.config_dir).absolute()}]"] if given.config_dir else []
    try:
        running = GlobalHydra.instance().is_initialized()
        with nullcontext() if running else initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose(given.config_name or "config", overrides=[*groups, *added])
        return dict(flatten(OmegaConf.to_container(cfg)))  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException):
        return {}
