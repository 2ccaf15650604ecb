"""The base model: a checkpoint as it is, or a new model pre-trained on the general text, made once for all
runs."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.options import Options
from cpt.core.preemption import defer_signals
from cpt.core.tensors import check_state
from cpt.data.budget import Budget
from cpt.data.corpora import Corpora, tokenizer_digest
from cpt.data.corpus import Corpus
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.replay import NOTHING
from cpt.data.sources.base import CONCAT, GENERAL
from cpt.methods.base import Shared
from cpt.methods.ncl import NCL
from cpt.models import loading
from cpt.models.block_attention import try_isolation
from cpt.models.growth import entries, fit_rows
from cpt.models.objectives import Objective
from cpt.models.options import NOT_FROZEN, ModelOptions
from cpt.optim.nan_guard import NanGuard
from cpt.optim.schedulers import Linear
from cpt.trainer.checkpointing import Checkpoint
from cpt.trainer.trainer import drop_optimizer, make_trainer

log = logging.getLogger(__name__)
FORMAT = 1
TOKENIZER_FORMAT = 2  # raise it when other tokenizers are made of the same text
CHECKPOINT_EVERY = 200
READ_AT_ONCE = 100
ADVICE = (
    "this is the base model, not yet the run: a lower rate (model.base.optim.lr) or a clipped gradient "
    "(model.base.gradient_clip_val) may help"
)


@dataclass(frozen=True)
class Base:
    """Where the sequence starts: the folder or name of a model, its tokenizer and its objective."""

    checkpoint: str
    tokenizer: PreTrainedTokenizerBase
    objective_name: str
    objective: Objective
    length: int
    resize: bool = False

    @property
    def seq2seq(self) -> bool:
        """Whether the model has two stacks."""
        return self.objective_name in loading.SEQ2SEQ

    def model(self) -> PreTrainedModel:
        """A fresh copy of the base model, its embedding resized to the tokenizer if that is asked for."""
        loaded = loading.load_model(self.checkpoint, self.objective_name)
        if self.resize:
            fit_rows(loaded, self.tokenizer, checkpoint=self.checkpoint)
        loading.check_length(self.length, loaded, self.objective)
        try_sharing(loaded, self.objective)
        return loaded


def make_base(options: ModelOptions, corpora: Corpora, *, accelerator: str) -> Base:
    """The base of a model config, made if it is not in the cache. Where the domains are examples, their
    answers alone are scored.

    Raises ValueError for an objective that does not fit."""
    new = describe_base(options, corpora)
    if options.checkpoint is not None:
        return new
    folder = make_once(
        base_folder(options, new, corpora),
        make=lambda partial: pretrain(partial, options, new, corpora, accelerator=accelerator),
    )
    untrained = loading.AutoConfig.for_model(**options.config)
    return assemble_base(options, str(folder), new.tokenizer, untrained, **answering(corpora))


@dataclass(frozen=True)
class Untrained(Base):
    """A base that is not pre-trained yet: of its sizes, with weights that are drawn."""

    config: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        """The model at the beginning of its pre-training."""
        made = loading.build_model(self.config, self.tokenizer, self.objective_name, seed=0)
        loading.check_length(self.length, made, self.objective)
        try_sharing(made, self.objective)
        return made


def find_base(options: ModelOptions, corpora: Corpora, *, accelerator: str) -> Base:
    """The base of a model config if it is there, else an Untrained one: nothing is pre-trained."""
    new = describe_base(options, corpora)
    if options.checkpoint is not None or base_folder(options, new, corpora).exists():
        return make_base(options, corpora, accelerator=accelerator)
    untrained = loading.AutoConfig.for_model(**options.config)
    made = assemble_base(options, "", new.tokenizer, untrained, **answering(corpora))
    return Untrained(**vars(made), config=options.config)


def base_folder(options: ModelOptions, new: Base, corpora: Corpora) -> Path:
    """Where the cache has the base of a model config, or will have it."""
    decides = {name: getattr(options, name) for name in ("config", "objective", "mask_rate", "length")}
    decides |= {"mean_span": options.mean_span} if new.objective_name == "span" else {}
    settings = decides | {"base": asdict(options.base)}
    made_of = [FORMAT, corpora.general.facts["train_digest"], tokenizer_digest(new.tokenizer), settings]
    return corpora.cache / "base" / f"{options.name}-{digest(made_of)}"


def describe_base(options: ModelOptions, corpora: Corpora) -> Base:
    """The base of a model config as far as its tokenizer and options tell, without weights: whole of a
    checkpoint; of a new model what it is pre-trained as, on text."""
    if options.checkpoint is None:
        untrained = loading.AutoConfig.for_model(**options.config)
        name = loading.objective_name(options.objective, untrained)
        learned = learn_tokenizer(corpora.general, options.vocabulary, objective=name, cache=corpora.cache)
        return assemble_base(options, "", loading.load_tokenizer(learned), untrained)
    config = loading.configuration(options.checkpoint)
    tokenizer = loading.load_tokenizer(options.checkpoint)
    name, how = loading.objective_name(options.objective, config), answering(corpora)
    if name == "span" and not loading.sentinel_ids(tokenizer):
        loading.add_sentinels(tokenizer)
        log.info("the tokenizer of %s has no sentinels: it gets %d", options.checkpoint, loading.SENTINELS)
        return replace(
            assemble_base(options, options.checkpoint, tokenizer, config, **how),
            resize=options.resize or entries(tokenizer) > config.get_text_config().vocab_size,
        )
    return assemble_base(options, options.checkpoint, tokenizer, config, **how)


def try_sharing(model: PreTrainedModel, objective: Objective) -> None:
    """Raises ValueError where samples or documents share rows and a model mixes them."""
    if objective.sharing is not None:
        try_isolation(model, documents=False)
    if objective.isolated:
        try_isolation(model, documents=True, causal=objective.causal)


def answering(corpora: Corpora) -> dict[str, bool]:
    """Whether answers are learned, and whether their samples share rows."""
    return {"answers": corpora.encoding is not None, "isolated": corpora.isolated}


def assemble_base(
    options: ModelOptions,
    checkpoint: str,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    *,
    answers: bool = False,
    isolated: bool = False,
) -> Base:
    name = loading.objective_name(options.objective, config)
    objective = loading.text_objective(
        name,
        tokenizer,
        mask_rate=options.mask_rate,
        mean_span=options.mean_span,
        start=getattr(config, "decoder_start_token_id", None) if options.checkpoint else None,
    )
    if answers:
        objective = loading.answers_objective(name, objective, tokenizer, config, isolated=isolated)
    else:
        loading.check_packing(name, isolated=isolated, answers=False)
        objective.isolated = isolated
    return Base(checkpoint, tokenizer, name, objective, options.length, options.resize)


def learn_tokenizer(general: Corpus, vocabulary: int, *, objective: str, cache: Path) -> Path:
    """The folder of a tokenizer learned from the general text, for an objective."""

    def make(folder: Path) -> None:
        log.info("learning a vocabulary of %d from the general text", vocabulary)
        learned = loading.train_tokenizer(batches(general), vocabulary=vocabulary, objective=objective)
        learned.save_pretrained(folder)

    made_of = [TOKENIZER_FORMAT, general.facts["train_digest"], vocabulary, objective]
    return make_once(cache / "tokenizers" / digest(made_of), make=make)


def batches(general: Corpus) -> Iterator[list[str]]:
    documents = general.documents("train")
    return (documents[at : at + READ_AT_ONCE]["text"] for at in range(0, len(documents), READ_AT_ONCE))


def make_learner(options: ModelOptions, new: Base) -> NCL:
    """What pre-trains a new model, with the model in it."""
    how = options.base
    model = loading.build_model(options.config, new.tokenizer, new.objective_name, seed=how.seed)
    loading.check_length(options.length, model, new.objective)
    shared = Shared(
        model=model.train(),
        objective=new.objective,
        length=options.length,
        masks=(),
        replay=NOTHING,
        freeze=NOT_FROZEN,
        optimizer=instantiate(how.optim, _convert_="all"),
        schedule=Linear(warmup=how.warmup),
        seed=how.seed,
    )
    return NCL(Options(), shared)


def pretrain(folder: Path, options: ModelOptions, new: Base, corpora: Corpora, *, accelerator: str) -> None:
    """Pre-trains a new model on the general text in one process; a killed one goes on where it was."""
    how = options.base
    log.info("pre-training the base model %s on the general text: %d steps", options.name, how.steps)
    module, data = make_learner(options, new), general_only(options, new, corpora)
    checkpoint = folder / "base.ckpt"
    if checkpoint.exists():
        check_state(checkpoint, instead="delete it to pre-train the base from its beginning")
    alone: Mapping[str, Any] = {
        "accelerator": accelerator,
        "devices": 1,
        "log_every_n_steps": 10,
        "gradient_clip_val": how.gradient_clip_val,
    }
    guard = NanGuard(advice=ADVICE)
    callbacks = [guard, Checkpoint(checkpoint, every=CHECKPOINT_EVERY, guard=guard)]
    fitting = make_trainer(alone, label="base", steps=how.steps, callbacks=callbacks)
    path = str(checkpoint) if checkpoint.exists() else None
    with defer_signals():
        fitting.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    drop_optimizer(fitting)
    module.cpu()
    module.model.save_pretrained(folder)
    new.tokenizer.save_pretrained(folder)
    checkpoint.unlink(missing_ok=True)


def general_only(options: ModelOptions, new: Base, corpora: Corpora) -> DomainSequence:
    """The general text as the only domain."""
    domain = Domain(GENERAL, 0, (GENERAL,))
    how = {"tokenizer": new.tokenizer, "length": options.length}
    packed = corpora.packed(GENERAL, "train", **how, packing=CONCAT)
    budget = Budget(steps=options.base.steps, epochs=None, tokens=None, batch_size=options.base.batch_size)
    data = DomainSequence(
        [domain],
        train={GENERAL: packed},
        held_out={},
        objective=new.objective,
        budget=budget,
        replay=NOTHING,
        seed=options.base.seed,
        accumulate=1,
        eval_batch_size=options.base.batch_size,
        probe_samples=options.base.batch_size,
        workers=0,
    )
    data.enter(domain)
    return data
