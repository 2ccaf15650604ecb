"""Deprecated names of options, accepted for one version with a warning each."""

import re
import sys
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

GROUPS = {"probe": "benchmark"}
KEYS = {
    "check": "verify_inputs",
    "data.workers": "data.preprocessing_num_workers",
    "freeze.only": "trainable",
    "from": "init_from",
    "keep_end": "save_trainer_state",
    "keep_stages": "save_all_stages",
    "model.checkpoint": "model.name_or_path",
    "model.length": "model.max_seq_length",
    "model.mask_rate": "model.mlm_probability",
    "model.vocabulary": "model.vocab_size",
    "objective": "optimized_metric",
    "optim.carry": "optim.state_across_domains",
    "parts.keep": "modules.storage",
    "trainer.attention": "trainer.attn_implementation",
    "trainer.offload": "trainer.offload_method_state",
    "trainer.probe_samples": "trainer.importance_samples",
    "trainer.workers": "trainer.num_workers",
}
CHOICES = {("model", "checkpoint"): "hf"}
OVERRIDE = re.compile(r"(~)([\w/.@]+)()|([+~]{0,2})([\w/.@]+)(=.*)", re.DOTALL)


def new_name(key: str) -> str:
    """The present name of a key or group; the key itself if it was not renamed."""
    head, dot, rest = key.partition(".")
    return KEYS.get(key) or f"{GROUPS.get(head, head)}{dot}{rest}"


def warn(old: str, new: str) -> None:
    print(f"cpt: {old} is deprecated and will be removed in the next version: use {new}", file=sys.stderr)


def rename_overrides(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with present names; warns of each old one on stderr."""
    renamed = []
    for each in arguments:
        if found := OVERRIDE.fullmatch(each):
            sign, key, value = (part for part in found.groups() if part is not None)
            if (new := new_name(key)) != key:
                warn(key, new)
            for (group, old), choice in CHOICES.items():
                if key == group and re.search(rf"\b{old}\b", value):
                    warn(f"{group}={old}", f"{group}={choice}")
                    value = re.sub(rf"\b{old}\b", choice, value)
            each = f"{sign}{new}{value}"
        renamed.append(each)
    return renamed


def rename_keys(cfg: DictConfig) -> None:
    """Moves the values of old keys that a YAML file has set to the present ones, in place, where the command
    line does not set these; warns of each on stderr."""
    given = OmegaConf.select(cfg, "hydra.overrides.task") or ()
    on_command_line = {each.lstrip("+").partition("=")[0] for each in given}
    for old in (*KEYS, *GROUPS):
        place, _, name = old.rpartition(".")
        node = OmegaConf.select(cfg, place) if place else cfg
        if isinstance(node, DictConfig) and name in node:
            warn(old, new_name(old))
            with open_dict(cfg):
                value = node.pop(name)
                if new_name(old) not in on_command_line:
                    OmegaConf.update(cfg, new_name(old), value, merge=True)
