"""Scores models that were made of a finished run's on the texts of that run, as the run scored its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import Options
from cpt.core.secrets import HIDDEN
from cpt.core.sections import Choice
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.replay import NO_REPLAY
from cpt.evaluation.derived_rows import DOCUMENTS_FILE, DerivedRow
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.models.options import NOT_FROZEN
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base, make_base
from cpt.trainer.build import build_data, build_method, read_corpora
from cpt.trainer.chat_date import date_chats
from cpt.trainer.initial_scores import find_loss_conditions, find_numerics, find_versions
from cpt.trainer.manifest import check_manifest
from cpt.trainer.matrix import MatrixEvaluator, TextScore, check_losses
from cpt.trainer.plan import Plan, make_plan
from cpt.trainer.preflight import prepare_run
from cpt.trainer.run_dir import RunDir

ALLOWED_RUN = "the folder of a finished run that trained"
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)")
ONE_PROCESS = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
NO_METHOD = Choice("cpt.methods.ncl.ZeroShot", Options())  # which trains nothing


def load_finished_scores(run: RunDir) -> Scores:
    """The scores of a finished run with trained stages. Raises ValueError for any other folder."""
    scores = run.load_scores()
    if scores is None:
        raise InvalidOptionError("RUN", run.path, reason="it has no scores.json", allowed=ALLOWED_RUN)
    if not scores.run["finished"] or len(scores.rows) < 2:
        raise InvalidOptionError("RUN", run.path, reason=scores.state, allowed=ALLOWED_RUN)
    return scores


def load_plan(run: RunDir, order: Sequence[str]) -> Plan:
    """The plan of a run with domains in an order, from its stored config, without loggers, tasks,
    divergence, benchmarks.
    Raises ValueError for a config that leaves values out, as those of environment variables."""
    for key, value in run.stored_config().items():
        variable = FROM_ENVIRONMENT.search(str(value))
        is_unused = key.startswith(("logger.", "callbacks."))
        if not is_unused and (variable or HIDDEN in str(value)):
            raise InvalidOptionError(
                "RUN", run.path, reason=f"its config.yaml leaves out the value of {key}", allowed=ALLOWED_RUN
            )
    plan = make_plan(load_config_here(run), run=run)
    plan = replace(plan, order=list(order), endtasks=None, answers=None, divergence=None, benchmark=None)
    return date_chats(plan)


def load_config_here(run: RunDir) -> DictConfig:
    """The stored config of a run for this process alone, without loggers."""
    config = OmegaConf.load(run.config)
    assert isinstance(config, DictConfig)
    config.logger = {}
    config.trainer.update(ONE_PROCESS)
    return config


@contextmanager
def known_texts() -> Iterator[None]:
    """Inside the context only errors are logged about texts: a run that has read them has warned of what is
    in them, and texts that have changed since are refused."""
    log_of_texts = logging.getLogger("cpt.data")
    level = log_of_texts.level
    log_of_texts.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log_of_texts.setLevel(level)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTexts:
    """The held-out texts of a finished run, and what scores them."""

    method_plan: Plan  # of the run
    plan: Plan  # of the same run without stages
    run: RunDir
    scores: Scores
    machine: Machine
    corpora: Corpora
    base: Base  # of the run, with its tokenizer and objective

    def build_method(self) -> ContinualMethod:
        """The method of the run with the base model."""
        return build_method(self.method_plan, self.machine, self.base)

    def build_module(self, checkpoint: Path) -> ContinualMethod:
        """The model of a folder, with rows by the ids of the run's tokenizer."""
        base = replace(
            self.base,
            checkpoint=str(checkpoint),
            untrained=None,
            resize=False,
            own_tokenizer=None,
            rope=None,
            quantization="none",
        )
        machine = replace(self.machine, base_dtype=torch.float32)  # nothing of it is frozen
        return build_method(self.plan, machine, base)

    @known_texts()
    def score(self, module: ContinualMethod, *, row: str) -> dict[str, TextScore]:
        """The losses of a module on all texts of the matrix, by text. Raises ValueError for losses that are
        not finite, and for texts that have changed since the run."""
        data = build_data(self.plan, self.machine, self.corpora, self.base, module)
        self.check_conditions(data)
        matrix = MatrixEvaluator(
            plan=self.plan,
            machine=self.machine,
            run=self.run,
            module=module,
            data=data,
            scores=self.scores,
            original_files=[],
        )
        text_scores = matrix.evaluate(row, self.scores.domains)
        check_losses(row, text_scores)
        return text_scores

    def check_conditions(self, data: DomainSequence) -> None:
        """Raises ValueError if the texts or the base are not those that the run was scored with."""
        conditions = find_loss_conditions(self.plan, self.corpora, self.base, data)
        for key, value in self.scores.conditions.items():
            if conditions.get(key) != value:
                raise ValueError(
                    f"{self.run.path} was scored with {key} {value}, now it is {conditions.get(key)}: "
                    "losses would not be comparable; restore the texts and the base model of the run"
                )

    def store(
        self,
        folder: Path,
        text_scores: Mapping[str, TextScore],
        *,
        row: str,
        description: str,
        chats: Mapping[str, Any] | None = None,
        run_chats: Mapping[str, Any] | None = None,
        inputs: str = "",
    ) -> DerivedRow:
        """Writes the row of a model into its folder, with the losses by document."""
        documents = {}
        for text, score in text_scores.items():
            if score.documents is not None:
                documents[text] = score.documents
        self.run.save_arrays(folder / DOCUMENTS_FILE, documents)
        derived = DerivedRow(
            row=row,
            description=description,
            config_hash=self.scores.config_hash,
            domains=list(self.scores.domains),
            scored=list(self.scores.scored),
            nll=[text_scores[text].nll for text in self.scores.domains],
            conditions=dict(self.scores.conditions),
            numerics=find_numerics(self.machine, replace(self.base, quantization="none")),
            versions=find_versions(),
            chats=dict(chats or {}),
            run_chats=dict(run_chats or {}),
            inputs=inputs,
        )
        derived.save(folder)
        return derived


@known_texts()
def open_run_texts(run: RunDir, scores: Scores, *, needs_base: bool) -> RunTexts:
    """Reads the texts of a finished run. If it `needs_base`, one that the run made and the cache lacks is
    rebuilt. Raises ValueError for texts or a base that have changed."""
    method_plan = load_plan(run, scores.run["order"])
    check_manifest(method_plan, run, update=False)
    plan = replace(method_plan, method=NO_METHOD, masks=(), replay=NO_REPLAY, freeze=NOT_FROZEN, loss=None)
    machine = prepare_run(method_plan, run).machine
    corpora = read_corpora(plan)
    base = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator, trains=needs_base)
    return RunTexts(
        method_plan=method_plan,
        plan=plan,
        run=run,
        scores=scores,
        machine=machine,
        corpora=corpora,
        base=base,
    )
