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
CHOICES = {"model=checkpoint": "model=hf"}
OVERRIDE = re.compile(r"([+~]{0,2})([\w/.@]+)(=.*|$)", re.DOTALL)


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
        found = OVERRIDE.fullmatch(each)
        if found and not each.startswith("-") and (new := new_name(found[2])) != found[2]:
            warn(found[2], new)
            each = f"{found[1]}{new}{found[3]}"
        if each in CHOICES:
            warn(each, CHOICES[each])
            each = CHOICES[each]
        renamed.append(each)
    return renamed


def rename_keys(cfg: DictConfig) -> None:
    """Moves the values of old keys that a YAML file has set to the present ones, in place; warns of each on
    stderr."""
    for old in (*KEYS, *GROUPS):
        place, _, name = old.rpartition(".")
        node = OmegaConf.select(cfg, place) if place else cfg
        if isinstance(node, DictConfig) and name in node:
            warn(old, new_name(old))
            with open_dict(cfg):
                value = node.pop(name)
                OmegaConf.update(cfg, new_name(old), value, merge=True)
