"""The domain loop: learn, evaluate, commit; and what a killed run needs to go on with it."""

import logging
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from cpt import report
from cpt.base import Base, base
from cpt.config import made
from cpt.corpora import Corpora
from cpt.costs import own_names, stored_bytes, trained_parameters
from cpt.data import Domain, DomainSequence
from cpt.figures import heatmap
from cpt.folder import RunFolder, check_archive, replacing
from cpt.freezing import Freeze
from cpt.methods.base import ContinualModule
from cpt.metrics import UNITS
from cpt.model import configuration
from cpt.parts import BASE
from cpt.plan import Plan, is_first_process, objective_value
from cpt.randomness import key
from cpt.replay import NOTHING
from cpt.scores import Scores
from cpt.sources import GENERAL
from cpt.tracking import log_result, log_row, tracked
from cpt.trainers import Checkpoint, trainer

log = logging.getLogger(__name__)

PACKAGES = ("torch", "lightning", "transformers", "datasets", "cpt")


def fold(plan: Plan, place: RunFolder) -> Scores:
    """Learns what a run folder does not hold yet, and reports; gives the finished scores."""
    cfg = plan.cfg
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if cfg.model.checkpoint is not None:
        configuration(cfg.model.checkpoint)  # a wrong name is told before hours of reading
    phases: dict[str, float] = {}
    with timed(phases, "read the texts"):
        corpora = Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir))
    with timed(phases, "make the base"):
        start = base(cfg.model, corpora, accelerator=cfg.trainer.accelerator)
        module = method(cfg, start)
    with timed(phases, "tokenise"):
        data = sequence(plan, corpora, start, module)
    scores = place.scores() or opened(plan, corpora, start, data)
    scores.phases = {
        name: scores.phases.get(name, 0.0) + phases.get(name, 0.0) for name in phases | scores.phases
    }
    config = OmegaConf.to_container(cfg, resolve=True)
    with tracked(
        cfg.logger, place.path, group=cfg.name, job=cfg.method.name, tags=cfg.tags, config=config
    ) as loggers:
        learner = Learner(cfg, place, module=module, data=data, scores=scores, loggers=loggers)
        learner.learn()
        if is_first_process():
            learner.conclude(start)
    return scores


def method(cfg: DictConfig, start: Base) -> ContinualModule:
    """The method, with the base model in it; what it draws at random depends on the seed alone."""
    torch.manual_seed(key(cfg.seed, "method") % 2**63)
    mask = made(cfg.mask)
    # Partial: Hydra would copy a model that is handed through its config.
    return made(cfg.method, _partial_=True)(
        model=start.model(),
        objective=start.objective,
        length=start.length,
        masks=[] if mask is None else [mask],
        replay=made(cfg.replay),
        freeze=Freeze(**cfg.freeze),
        optimizer=instantiate(cfg.optim),
        schedule=instantiate(cfg.schedule),
        seed=cfg.seed,
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
            "name": cfg.name,
            "method": cfg.method.name,
            "mask": cfg.mask.name,
            "replay": cfg.replay.name,
            "variant": cfg.variant,
            "model": cfg.model.name,
            "order": plan.order,
            "seed": cfg.seed,
            "finished": False,
            "objective": start.objective_name,
        },
        texts={name: dict(corpora.by_name[name].facts) for name in data.held_out},
        config_digest=plan.config_digest,
        versions={"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
    )


class Learner:
    """A run at work: its method, its data and its scores so far."""

    def __init__(
        self,
        cfg: DictConfig,
        place: RunFolder,
        *,
        module: ContinualModule,
        data: DomainSequence,
        scores: Scores,
        loggers: Sequence[Logger],
    ) -> None:
        self.cfg, self.place, self.module, self.data = cfg, place, module, data
        self.scores, self.loggers = scores, loggers
        self.own = own_names(module.model)
        scores.needs_domain = module.needs_domain

    def learn(self) -> None:
        """Every stage that is not committed yet."""
        done = len(self.scores.rows)
        if done == 0:
            self.commit("base")
        elif done > 1:
            self.restore(done - 1)
        for number, domain in list(enumerate(self.data, start=1))[max(0, done - 1) :]:
            costs = self.fit(number, domain)
            self.commit(domain.name, **costs)

    def restore(self, number: int) -> None:
        """The method's state after so many stages."""
        path = self.place.stage(number)
        check_archive(path, instead=f"delete {self.place.path} to start again")
        self.module.load_state_dict(torch.load(path, weights_only=True))
        log.info("going on after %s", self.scores.rows[-1])

    def fit(self, number: int, domain: Domain) -> dict[str, int]:
        """Learns one domain, from its checkpoint if it has one; gives the costs of the stage, as the scores
        take them."""
        checkpoint = self.place.checkpoint(number, domain.name)
        if checkpoint.exists():
            check_archive(
                checkpoint, instead=f"delete it to learn {domain.name} again; what came before is kept"
            )
            log.info("going on within %s", domain.name)
        self.data.enter(domain)
        self.module.activate(domain.index)
        self.module.train()
        steps = self.data.steps(domain)
        fitting = trainer(
            self.cfg.trainer,
            label=f"{domain.name} ({number}/{len(self.data)})",
            loggers=self.loggers,
            steps=steps,
            callbacks=[Checkpoint(checkpoint, every=self.cfg.trainer.checkpoint_every)],
        )
        with timed(self.scores.phases, f"learn {domain.name}"):
            fitting.fit(
                self.module,
                datamodule=self.data,
                ckpt_path=str(checkpoint) if checkpoint.exists() else None,
                weights_only=True,
            )
        state = self.module.state_dict()  # by every process: a method may bring its shards together
        if is_first_process():
            with replacing(self.place.stage(number)) as partial:
                torch.save(state, partial)
        return {"trained": trained_parameters(self.module), "stored": stored_bytes(state, self.own)}

    def commit(self, row: str, **costs: int) -> None:
        """Evaluates, and writes the row: what a restart finds is the run up to here."""
        with timed(self.scores.phases, f"score {row}"):
            trainer(self.cfg.trainer, label=f"scoring after {row}").validate(
                self.module, datamodule=self.data, verbose=False
            )
            losses = dict(zip(self.data.held_out, self.module.row(), strict=True))
        means = [(nll.sum() / count.sum()).item() for nll, count in losses.values()]
        self.scores.append(row, nll=means, parts=self.parts(), **costs)
        perplexity = dict(zip(self.scores.domains, np.exp(self.scores.matrix[-1]).tolist(), strict=True))
        shown = ", ".join(f"{name} {value:.1f}" for name, value in perplexity.items())
        log.info("after %s, perplexity: %s", row, shown)
        looked_at = {name: array(values) for name, values in self.module.diagnostics().items()}
        log_row(self.loggers, stage=len(self.scores.rows) - 1, perplexity=perplexity, distributions=looked_at)
        if is_first_process():
            number = len(self.scores.rows) - 1
            arrays = {name: np.stack([nll.cpu(), count.cpu()]) for name, (nll, count) in losses.items()}
            self.place.save_documents(number, arrays)
            self.place.save_diagnostics(number, looked_at)
            self.save()
            self.place.tidy(number, keep=self.cfg.keep_stages)

    def parts(self) -> dict[str, dict[str, float]]:
        """The parts of the model that scored each text, by name."""
        places = self.data.places
        names = {place: name for name, place in places.items()} | {BASE: "base"}
        used = {text: self.module.used(places.get(text, BASE)) for text in self.scores.domains}
        return {text: {names[part]: round(w, 4) for part, w in each.items()} for text, each in used.items()}

    def save(self) -> None:
        self.scores.seconds = sum(self.scores.phases.values())
        self.scores.save(self.place.scores_file)

    def conclude(self, start: Base) -> None:
        """Intervals, the exported model, the report and the run's summary; then the run is finished."""
        loading = self.module.export(self.place.model, [domain.name for domain in self.data])
        self.scores.loading = loading.replace(f"{self.place.path}/", "")  # the folder may be moved
        start.tokenizer.save_pretrained(self.place.model)
        rows = self.place.load_documents(len(self.scores.rows))
        sums = [np.stack([row[name][0] for row in rows]) for name in self.scores.domains]
        self.scores.measure(nll_sums=sums, counts=[rows[0][name][1] for name in self.scores.domains])
        self.scores.objective = objective_value(self.scores.metrics, self.cfg.objective)
        self.scores.run["finished"] = True
        self.save()
        report.write(self.place.path)
        rows = [[row, *losses] for row, losses in zip(self.scores.rows, self.scores.nll, strict=True)]
        log_result(
            self.loggers,
            columns=["after", *self.scores.domains],
            rows=rows,
            picture=partial(heatmap, self.scores),
            summary={
                f"{name}/{unit}": values[unit]
                for name, values in self.scores.metrics.items()
                for unit in UNITS
            },
        )


def array(values: torch.Tensor) -> np.ndarray:
    """The same for numpy, which has no bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()


@contextmanager
def timed(phases: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of a phase to the others."""
    began = time.perf_counter()
    yield
    phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - began
