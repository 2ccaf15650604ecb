"""What a run is: its choices, the part of the config that decides the result, and errors a user can read."""

import hashlib
import json
import operator
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cpt.processes import is_one_of_several

# How a run is carried out, not what it computes: free to change between two starts of the same run.
EXECUTION = (
    "name",
    "tags",
    "variant",
    "logger",
    "cache_dir",
    "check",
    "domains.ignore",  # what is read is known by its content
    "objective",
    "keep_stages",
    "on_nonfinite",
    "endtask",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.eval_batch_size",
    "trainer.checkpoint_every",
    "trainer.log_every_n_steps",
    "trainer.workers",
)
# Options that came later, and the value with which a run is what it was without them: such folders go on.
NEUTRAL = {"callbacks": {}, "model.resize": False}
FOR_OTHERS = ("name", "rate")  # of a choice: what it is called, its learning rate over the model's
# What a run has a name for, and where text lies; what else it was given tells it from others in a comparison.
NAMED = ("method", "mask", "replay", "domains", "domains.root", "model", "order", "seed", "experiment")
UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
LONGEST = 100


def executes(key: str) -> bool:
    """Whether a config key says how the run is carried out only."""
    return key == "strategy" or any(key == name or key.startswith(f"{name}.") for name in EXECUTION)


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


def digest(value: Any) -> str:
    """A hash of any JSON value, 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def identity(cfg: DictConfig) -> dict[str, Any]:
    """The leaves of the config that decide the result."""
    tree = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    leaves = {key: value for key, value in flat(tree) if not executes(key)}
    return {key: value for key, value in leaves.items() if key not in NEUTRAL or value != NEUTRAL[key]}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: value then -> value now` of every leaf that differs."""
    keys = sorted(set(then) | set(now))
    shown = ((key, then.get(key, "(absent)"), now.get(key, "(absent)")) for key in keys)
    return [f"{key}: {before} -> {after}" for key, before, after in shown if before != after]


def reason(error: BaseException) -> str:
    """An error's message on one line; of an error inside a Hydra instantiation, the cause's."""
    while error.__cause__ is not None and isinstance(error, HydraException):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__


@contextmanager
def readable(*, errors_only: bool) -> Iterator[None]:
    """Bad input ends in one line and exit code 1; a traceback only if not `errors_only`
    (HYDRA_FULL_ERROR=1)."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("cpt: interrupted; the same command goes on from here")
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        if not errors_only:
            raise
        print(f"cpt: {reason(error)}", file=sys.stderr, flush=True)
        # Not sys.exit: the processes of a distributed run must end together, whatever they wait for.
        os._exit(1) if is_one_of_several() else sys.exit(1)


def made(options: DictConfig, **extra: Any) -> Any:
    """What a choice of a config group stands for; what others read of it, and of choices within it, is not
    given to it."""
    told = OmegaConf.to_container(options, resolve=True)
    return instantiate({**own(told), **extra}, _convert_="all") if told["_target_"] else None


def own(options: dict[str, Any]) -> dict[str, Any]:
    inner = {key: own(value) if isinstance(value, dict) else value for key, value in options.items()}
    return {key: value for key, value in inner.items() if key not in FOR_OTHERS}


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


OmegaConf.register_new_resolver("times", operator.mul, replace=True)
OmegaConf.register_new_resolver("built_or_given", built_or_given, replace=True)
OmegaConf.register_new_resolver("choices", choices, replace=True)
OmegaConf.register_new_resolver("variant", variant, replace=True)
