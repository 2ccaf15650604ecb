"""A config checked: everything that can be wrong with it is found here, before torch is imported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from cpt import orders
from cpt.budget import Budget, share
from cpt.checks import check, is_own
from cpt.config import digest, identity, made
from cpt.endtasks.tasks import Planned, checked
from cpt.metrics import METRICS, UNITS
from cpt.sources import Source


@dataclass(frozen=True)
class Plan:
    """A config that has been checked, its text source, the order of its domains and its end tasks."""

    cfg: DictConfig
    source: Source
    budget: Budget
    order: list[str]
    config_digest: str
    endtasks: Planned | None


def planned(cfg: DictConfig) -> Plan:
    """The plan of a config; raises ValueError for what is wrong with it."""
    check(cfg)
    made_of = identity(cfg)
    objective_value({}, cfg.objective)
    options = {name: cfg.trainer[name] for name in ("steps", "epochs", "tokens", "batch_size")}
    processes = cfg.trainer.devices if isinstance(cfg.trainer.devices, int) else 1
    made(cfg.replay)
    if is_own(OmegaConf.select(cfg, "method.mixture")):
        made(cfg.method.mixture)
    share(cfg.trainer.batch_size, accumulate=cfg.trainer.accumulate_grad_batches, world=max(1, processes))
    source = instantiate({key: value for key, value in cfg.domains.items() if key != "name"}, _convert_="all")
    order = orders.resolve(cfg.order, names=source.names, orders=source.orders, seed=cfg.seed)
    endtasks = checked(cfg.endtask, source.names, order)
    return Plan(cfg, source, Budget(**options), order, digest(made_of), endtasks)


def objective_value(
    metrics: dict[str, dict], objective: str | Sequence[str]
) -> float | list[float | None] | None:
    """What a sweeper minimises, METRIC.UNIT, or a list of such; None where the run has no such metric."""
    if not isinstance(objective, str):
        return [objective_value(metrics, each) for each in objective]
    metric, _, unit = objective.partition(".")
    if metric not in METRICS or unit not in UNITS:
        raise ValueError(
            f"objective={objective}; allowed: METRIC.UNIT of {', '.join(METRICS)} and {', '.join(UNITS)}"
        )
    value = metrics.get(metric, {}).get(unit)
    return value if value is None or math.isfinite(value) else None


def endtask_digest(cfg: DictConfig, endtasks: Planned | None) -> str:
    """What the end tasks of a config are known by: their options, and the sizes and times of their data."""
    stamp = endtasks.stamp if endtasks else ""
    return digest([OmegaConf.to_container(cfg.endtask, resolve=True), stamp])
