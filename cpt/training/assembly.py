"""From a checked config to the pieces of a run: the method with its model, its data, its empty scores."""

import logging
import platform
from importlib import metadata
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from cpt.core.config import made
from cpt.core.randomness import key
from cpt.data.corpora import Corpora, tokenizer_digest
from cpt.data.datamodule import DomainSequence
from cpt.data.replay import NOTHING
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualModule
from cpt.models.freezing import Freeze
from cpt.optim.carry import CarriedState
from cpt.training.plan import Plan
from cpt.training.pretraining import Base

log = logging.getLogger(__name__)
PACKAGES = ("torch", "lightning", "transformers", "datasets", "cpt")


def method(cfg: DictConfig, start: Base) -> ContinualModule:
    """The method, with the base model in it; what it draws at random depends on the seed alone."""
    tell_rate(cfg)
    torch.manual_seed(key(cfg.seed, "method") % 2**63)
    mask = made(cfg.mask)
    # Partial: Hydra would copy a model that is handed through its config.
    module = made(cfg.method, _partial_=True)(
        model=start.model(),
        objective=start.objective,
        length=start.length,
        masks=[] if mask is None else [mask],
        replay=made(cfg.replay),
        freeze=Freeze(**cfg.freeze),
        optimizer=made(cfg.optim),
        schedule=instantiate(cfg.schedule),
        seed=cfg.seed,
    )
    module.beside.update(module.companions())
    if cfg.optim.get("carry"):
        module.carried = CarriedState()
    return module


def tell_rate(cfg: DictConfig) -> None:
    """Tells, in a line, where a method's own rate has no effect: a learning rate that is given stands as it
    is."""
    rate = cfg.method.get("rate", 1)
    if rate != 1 and not OmegaConf.is_interpolation(cfg.optim, "lr"):
        log.info(
            "optim.lr=%g is the learning rate as it stands: method.rate=%g of %s has no effect "
            "(model.lr=… would be multiplied by it)",
            cfg.optim.lr,
            rate,
            cfg.method.name,
        )


def sequence(plan: Plan, corpora: Corpora, start: Base, module: ContinualModule) -> DomainSequence:
    """The stages of a method over the domains of a plan."""
    options = plan.cfg.trainer
    domains = module.stages(plan.order)
    replay = module.replay or NOTHING
    learned = [part for domain in domains for part in domain.parts] + [GENERAL] * bool(replay.general)

    def packed(name: str, split: str) -> Any:
        return corpora.packed(name, split, tokenizer=start.tokenizer, length=plan.cfg.model.length)

    return DomainSequence(
        domains,
        train={name: packed(name, "train") for name in learned},
        held_out={name: packed(name, plan.source.score_on) for name in (*plan.order, GENERAL)},
        objective=start.objective,
        budget=plan.budget,
        replay=replay,
        seed=plan.cfg.seed,
        accumulate=options.accumulate_grad_batches,
        eval_batch_size=options.eval_batch_size,
        probe_samples=options.probe_samples,
        workers=options.workers,
    )


def opened(plan: Plan, corpora: Corpora, start: Base, data: DomainSequence) -> Scores:
    """Scores without rows: what is measured, on what."""
    cfg, held_out, objective = plan.cfg, data.held_out.values(), start.objective
    per_text = [(text.text_tokens, text.row_lengths) for text in held_out]
    return Scores(
        domains=list(data.held_out),
        tokens=[int(objective.scorable(*sizes).sum()) for sizes in per_text],
        bytes=[text.bytes for text in held_out],
        scored=[int(objective.scored(*sizes).sum()) for sizes in per_text],
        run={
            "name": str(cfg.name),
            "method": cfg.method.name,
            "mask": cfg.mask.name,
            "replay": cfg.replay.name,
            "variant": str(cfg.variant),
            "model": str(cfg.model.name),
            "order": plan.order,
            "seed": cfg.seed,
            "finished": False,
            "objective": start.objective_name,
        },
        texts={name: dict(corpora.by_name[name].facts) for name in data.held_out},
        conditions={
            "score_on": plan.source.score_on,
            "tokenizer": tokenizer_digest(start.tokenizer)[:8],
            "length": start.length,
            "mask_rate": cfg.model.mask_rate if start.objective_name == "masked" else None,
        },
        config_digest=plan.config_digest,
        versions={"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
    )
