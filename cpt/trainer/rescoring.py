"""Scores models that were made of a finished run's on the texts of that run, as the run scored its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from cpt.core.config import CONF, flatten, make_plain_config
from cpt.core.exceptions import InvalidOptionError
from cpt.core.naming import CONFIG
from cpt.core.schema import Options
from cpt.core.secrets import HIDDEN, find_set_variable, find_stored_fingerprint
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
ONE_PROCESS = {"devices": 1, "num_nodes": 1, "strategy": "auto", "reshard_after_forward": None}
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
    divergence, benchmarks. Raises ValueError for a config that leaves values out, as those of environment
    variables that have another value by now."""
    run.stored_config()  # raises for a damaged one
    config = load_config_here(run)
    for key, value in flatten(make_plain_config(config)):
        is_left_out = find_stored_fingerprint(value) is not None or HIDDEN in str(value)
        if is_left_out and not key.startswith("callbacks."):
            raise InvalidOptionError(
                "RUN", run.path, reason=f"its config.yaml leaves out the value of {key}", allowed=ALLOWED_RUN
            )
    plan = make_plan(config, run=run)
    plan = replace(plan, order=list(order), endtasks=None, answers=None, divergence=None, benchmark=None)
    return date_chats(plan)


def load_config_here(run: RunDir) -> DictConfig:
    """The stored config of a run for this process alone, without loggers. Values of environment variables
    that are set as they were are read from them again; another cache than the run's has the same content."""
    config = OmegaConf.load(run.config)
    assert isinstance(config, DictConfig)
    config.logger = {}
    config.trainer.update(ONE_PROCESS)
    restore_variables(config)
    if find_stored_fingerprint(config.cache_dir) is not None:
        defaults = yaml.safe_load((CONF / f"{CONFIG}.yaml").read_text(encoding="utf-8"))
        config.cache_dir = defaults["cache_dir"]
    return config


def restore_variables(node: DictConfig | ListConfig) -> None:
    """Has the values of a config that were hidden read from their environment variables again, if these are
    set to the same texts."""
    keys: Sequence[Any] = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for key in keys:
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            restore_variables(value)
            continue
        variable = find_set_variable(value) if isinstance(value, str) else None
        if variable is not None:
            node[key] = f"${{oc.env:{variable}}}"


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
