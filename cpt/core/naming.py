"""What a run is called: its folder, and what tells it from others of its method. What says the same is called
the same: `optim.lr=1e-3` as `0.001`, and a default that is given outright not at all."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cpt.core.config import canonical, digest, executes, redact

CONFIG = "config"  # the primary config, of our own conf/ and of a user's
# What a run has a name for, and where text lies; what else it was given tells it from others in a comparison.
NAMED = ("method", "mask", "replay", "domains", "domains.root", "model", "order", "seed", "experiment")
UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
LONGEST = 160  # characters of a folder's name; file systems take 255
LONGEST_TAG = 64  # characters, W&B's own limit


def name_run(overrides: Sequence[str], method: str, order: Any, seed: int) -> str:
    """The run folder's name: method, order, seed and what else was chosen; of a path its last part."""
    parts = [method, f"order-{order}", f"seed-{seed}"]
    for key, value in sorted(list_choices(overrides)):
        if key not in ("method", "order", "seed", "hydra"):
            parts.append(f"{key}-{Path(value).name if '/' in value else value}")
    name = "_".join(UNSAFE.sub(".", part).strip(".") for part in parts)
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{digest(parts)[:8]}"
    return name


def variant() -> str:
    """What was chosen on the command line beyond what a run has a name for; empty outside of a Hydra job."""
    if not HydraConfig.initialized():
        return ""
    overrides = HydraConfig.get().overrides.task
    given = ((key, value) for key, value in list_choices(overrides) if key not in NAMED)
    return "; ".join(
        f"{key.removeprefix('routing@').removeprefix('method.')}={value}" for key, value in given
    )


def list_choices(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and value of the overrides that decide the result and are not the default; numbers in one way."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    chosen = [each for each in parsed if loader and has_options(loader, each.key_or_group.partition("@")[0])]
    groups = tuple(str(each.input_line) for each in chosen)
    for each in parsed:
        key, value = each.get_key_element().lstrip("+~"), each.value()
        if executes(key) or key.startswith("hydra.") or (loader and is_default(loader, each, groups)):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        text = str(canonical("", value)) if is_number else str(each.input_line).partition("=")[2]
        yield key, redact(text, key)


def is_default(loader: ConfigLoader, override: Override, groups: tuple[str, ...]) -> bool:
    """Whether a value or choice is what the config has without it; true is not 1."""
    key, value = override.key_or_group, override.value()
    if override.is_add() or override.is_delete():
        return False
    with suppress(HydraException, OmegaConfBaseException):
        if has_options(loader, key.partition("@")[0]):
            return default_choices(loader).get(override.get_key_element()) == value
        default = OmegaConf.select(load_default(loader, groups), key)
        alike = canonical("", value) == canonical("", default) and not OmegaConf.is_config(default)
        return alike and isinstance(value, bool) == isinstance(default, bool)
    return False


@cache
def has_options(loader: ConfigLoader, group: str) -> bool:
    """Whether there is a group of this name; Hydra composes a list of configs again at each call."""
    return bool(loader.get_group_options(group))


@cache
def default_choices(loader: ConfigLoader) -> Mapping[str, str | None]:
    """What is chosen of each group where nothing is given; a config is not composed for that."""
    return loader.compute_defaults_list(CONFIG, [], RunMode.RUN).overrides.known_choices


@cache
def load_default(loader: ConfigLoader, groups: tuple[str, ...]) -> DictConfig:
    """The config with these choices and no other value given."""
    return loader.load_configuration(CONFIG, overrides=list(groups), run_mode=RunMode.RUN)


# A value for models built here, another for given checkpoints.
OmegaConf.register_new_resolver(
    "built_or_given", lambda checkpoint, built, given: built if checkpoint is None else given, replace=True
)
# A default that depends on another option: ${by:${method.rule},{ties:1},0.5}, the last for all other choices.
OmegaConf.register_new_resolver("by", lambda choice, values, other: values.get(choice, other), replace=True)
OmegaConf.register_new_resolver("choices", name_run, replace=True)
OmegaConf.register_new_resolver("variant", variant, replace=True)
