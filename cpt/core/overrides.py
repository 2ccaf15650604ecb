"""Mappings on the command line: `optim.lr_multipliers={head: 0.5}` replaces the mapping of an experiment, as
a list or a number does, and `optim.lr_multipliers.norms=2` adds a key to it or changes one. Hydra would merge
both mappings, or refuse keys that the experiment does not have."""

from collections.abc import Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

# Options that are mappings with keys of the user's own, null or {} by default but for the packages of the
# demo's domains. Other mappings have keys with defaults, some of which a mapping on the command line changes.
OPEN_MAPPINGS = (
    "answers.metrics",
    "benchmark.metrics",
    "domains.catalogue",
    "domains.columns",
    "domains.packages",
    "domains.template.instructions",
    "domains.template.tasks",
    "endtask.tasks",
    "hydra.launcher.additional_parameters",
    "hydra.sweeper.options",
    "hydra.sweeper.params",
    "method.arguments",
    "model.rope_parameters",
    "optim.lr_multipliers",
)
# Mappings with defaults that one with other keys may have to replace, which takes two arguments.
FULL_MAPPINGS = ("model.config",)
TASK_COLUMNS = ("text", "target")  # keys of domains.columns that have defaults with domains=tasks
set_values = ConfigLoaderImpl._apply_overrides_to_config


def set_values_and_mappings(overrides: Sequence[Override], cfg: DictConfig) -> None:
    """Hydra's function that sets the values of a config, except open mappings, which it would merge."""
    for override in overrides:
        if replaces_mapping(override, cfg):
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False)
        elif sets_own_key(override, cfg):
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True, force_add=True)
        else:
            set_values([override], cfg)


def replaces_mapping(override: Override, cfg: DictConfig) -> bool:
    """Whether an override, without a plus, sets an open mapping, where the config has one or null."""
    key = override.key_or_group
    if key not in OPEN_MAPPINGS or override.type != OverrideType.CHANGE:
        return False
    return isinstance(override.value(), dict) and is_open(key, cfg)


def sets_own_key(override: Override, cfg: DictConfig) -> bool:
    """Whether an override `mapping.key=value`, without a plus, sets a key below an open mapping, which is the
    user's own."""
    if override.type != OverrideType.CHANGE:
        return False
    for mapping in OPEN_MAPPINGS:
        if override.key_or_group.startswith(f"{mapping}."):
            return is_open(mapping, cfg)
    return False


def is_open(mapping: str, cfg: DictConfig) -> bool:
    """Whether a config has this one of OPEN_MAPPINGS, as null or with no keys but the user's own."""
    # An empty text stands for a mapping that the config does not have: null is one that may be set.
    stored = OmegaConf.select(cfg, mapping, default="", throw_on_missing=False)
    if stored is None:
        return True
    if not isinstance(stored, DictConfig):
        return False
    has_defaults = mapping == "domains.columns" and any(name in stored for name in TASK_COLUMNS)
    return not has_defaults


ConfigLoaderImpl._apply_overrides_to_config = staticmethod(set_values_and_mappings)  # type: ignore[method-assign]
