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
    """The run folder's name: method, order, seed and whatever else was chosen on the command line; of a path
    its last part."""
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
    return "; ".join(f"{key.removeprefix('method.')}={value}" for key, value in given)


def list_choices(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and value of the overrides that decide the result and are not the default."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = tuple(str(each.input_line) for each in parsed if is_group(each.key_or_group))
    for each in parsed:
        key = each.get_key_element().lstrip("+~")
        if not (executes(key) or key.startswith("hydra.") or is_default(each, groups)):
            yield key, redact(show_value(each), key)


def show_value(override: Override) -> str:
    """A value as one writes it, numbers in one way: 1e-3 as 0.001."""
    value = override.value()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(canonical("", value))
    return str(override.input_line).partition("=")[2]


def is_default(override: Override, groups: tuple[str, ...]) -> bool:
    """Whether a value or choice is what the config has without it."""
    if not GlobalHydra.instance().is_initialized() or override.is_add() or override.is_delete():
        return False
    key = override.key_or_group
    with suppress(HydraException, OmegaConfBaseException):
        if is_group(key):
            return default_choices(config_loader()).get(override.get_key_element()) == override.value()
        default = OmegaConf.select(load_default(config_loader(), groups), key)
        return not OmegaConf.is_config(default) and same(override.value(), default)
    return False


def same(one: Any, other: Any) -> bool:
    """Whether two values say the same; true is not 1."""
    return canonical("", one) == canonical("", other) and isinstance(one, bool) == isinstance(other, bool)


def is_group(key: str) -> bool:
    return GlobalHydra.instance().is_initialized() and has_options(config_loader(), key.partition("@")[0])


def config_loader() -> ConfigLoader:
    """That of the Hydra of this process."""
    return GlobalHydra.instance().config_loader()


@cache
def has_options(loader: ConfigLoader, group: str) -> bool:
    """Whether there is a group of this name; Hydra composes a list of configs anew whenever it is asked."""
    return bool(loader.get_group_options(group))


@cache
def default_choices(loader: ConfigLoader) -> Mapping[str, str | None]:
    """What is chosen of each group where nothing is given; a config is not composed for that."""
    return loader.compute_defaults_list(CONFIG, [], RunMode.RUN).overrides.known_choices


@cache
def load_default(loader: ConfigLoader, groups: tuple[str, ...]) -> DictConfig:
    """The config with these choices and no other value given."""
    return loader.load_configuration(CONFIG, overrides=list(groups), run_mode=RunMode.RUN)


def built_or_given(checkpoint: str | None, built: Any, given: Any) -> Any:
    """A value for models built here, another for given checkpoints."""
    return built if checkpoint is None else given


OmegaConf.register_new_resolver("built_or_given", built_or_given, replace=True)
# A default that depends on another option: ${by:${method.rule},{ties:1},0.5}, the last for all other choices.
OmegaConf.register_new_resolver("by", lambda choice, values, other: values.get(choice, other), replace=True)
OmegaConf.register_new_resolver("choices", name_run, replace=True)
OmegaConf.register_new_resolver("variant", variant, replace=True)
