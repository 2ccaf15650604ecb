"""What a run is called: its folder, and what tells it from others of its method."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from cpt.core.config import digest, executes

CONF = Path(__file__).parents[2] / "conf"
# What a run has a name for, and where text lies; what else it was given tells it from others in a comparison.
NAMED = ("method", "mask", "replay", "domains", "domains.root", "model", "order", "seed", "experiment")
UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
LONGEST = 100
LONGEST_TAG = 64  # characters, W&B's own limit


def choices(overrides: Sequence[str], method: str, order: Any, seed: int) -> str:
    """The run folder's name: method, order, seed and whatever else was chosen on the command line."""
    parts = [method, f"order-{order}", f"seed-{seed}"]
    for override in sorted(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        if (
            key not in ("method", "order", "seed", "hydra")
            and not executes(key)
            and not key.startswith("hydra.")
        ):
            parts.append(f"{key}-{value}")
    name = "_".join(UNSAFE.sub(".", part).strip(".") for part in parts)
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{digest(parts)[:8]}"
    return name


def built_or_given(checkpoint: str | None, built: Any, given: Any) -> Any:
    """A value for models built here, another for given checkpoints."""
    return built if checkpoint is None else given


def variant() -> str:
    """What was chosen on the command line beyond what a run has a name for; empty outside of a Hydra job."""
    if not HydraConfig.initialized():
        return ""
    pairs = (override.lstrip("+~").partition("=") for override in HydraConfig.get().overrides.task)
    return "; ".join(
        f"{key.removeprefix('method.')}={value}"
        for key, _, value in pairs
        if key not in NAMED and not executes(key) and not key.startswith("hydra.")
    )


OmegaConf.register_new_resolver("built_or_given", built_or_given, replace=True)
OmegaConf.register_new_resolver("choices", choices, replace=True)
OmegaConf.register_new_resolver("variant", variant, replace=True)
