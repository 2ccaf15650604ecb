"""A config checked: everything that can be wrong with it is found here, before torch is imported."""

from dataclasses import dataclass

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from cpt.core.config import digest, identity, made
from cpt.data import orders
from cpt.data.budget import Budget, share
from cpt.data.sources.base import Source
from cpt.evaluation.endtasks.tasks import Planned, checked
from cpt.evaluation.objective import objective_value
from cpt.training.checks import check, is_own


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


def endtask_digest(cfg: DictConfig, endtasks: Planned | None) -> str:
    """What the end tasks of a config are known by: their options, and the sizes and times of their data."""
    stamp = endtasks.stamp if endtasks else ""
    return digest([OmegaConf.to_container(cfg.endtask, resolve=True), stamp])
