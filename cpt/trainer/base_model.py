"""The base model: a checkpoint, if asked with fewer blocks and a head trained on the general text, or a new
model pre-trained on it; what is made is cached for all runs."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.files import file_hash
from cpt.core.preemption import defer_signals
from cpt.core.processes import is_distributed
from cpt.core.schema import Options
from cpt.core.tensors import check_state
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Budget, Domain
from cpt.data.replay import NO_REPLAY
from cpt.data.sources.base import CONCAT, GENERAL
from cpt.data.text_format import TextFormat, make_text_format
from cpt.methods.base import MethodContext
from cpt.methods.ncl import NCL
from cpt.models import loading
from cpt.models.block_attention import try_isolation
from cpt.models.objectives import Objective
from cpt.models.options import NOT_FROZEN, Freeze, ModelOptions
from cpt.models.units import find_blocks
from cpt.models.vocabulary import count_entries, fit_rows, warn_of_stale_rows
from cpt.optim.nan_guard import NanGuard
from cpt.optim.schedulers import Linear
from cpt.trainer.base_files import save_tokenizer
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.preemption import Preemption
from cpt.trainer.run_dir import checkpoint_files
from cpt.trainer.step_checkpoint import StepCheckpoint

log = logging.getLogger(__name__)
FORMAT = 2
TOKENIZER_FORMAT = 2  # raise it when other tokenizers are made of the same text
CHECKPOINT_EVERY = 200
READ_AT_ONCE = 100
ADVICE = "this is the base model, not yet the run: lower model.pretraining.optim.lr or gradient_clip_val"


@dataclass(frozen=True)
class Base:
    """Where the sequence starts: a model's folder or name, its tokenizer, its objective, and how raw text
    becomes rows for it."""

    checkpoint: str
    tokenizer: PreTrainedTokenizerBase
    objective_name: str
    objective: Objective
    length: int
    text_format: TextFormat
    resize: bool = False
    untrained: Mapping[str, Any] | None = None  # the config of a model that is not pre-trained yet
    lacks: str = ""  # what a run still has to train before its first stage
    rebuild: Callable[[], object] | None = None  # makes a cached checkpoint again, unless it is there

    @property
    def seq2seq(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.objective_name in loading.SEQ2SEQ

    def restore_folder(self) -> None:
        """Makes a cached checkpoint again that was removed while the run used it: the export needs it. Raises
        ValueError where this process cannot make it; several processes cannot pre-train within a run."""
        if Path(self.checkpoint).is_dir():
            return
        advice = "restore it, and run the same command again to continue"
        if self.rebuild is not None and not is_distributed():
            log.warning("Making %s again, which was removed while the run used it", self.checkpoint)
            self.rebuild()
            return
        if self.rebuild is not None:
            advice = "run the same command again: it makes the base again and continues"
        raise ValueError(f"{self.checkpoint} was removed while the run used it; {advice}")

    def model(self) -> PreTrainedModel:
        """A fresh copy of the model. Raises ValueError where it does not fit the tokenizer or the length, or
        mixes samples or documents that share rows."""
        if self.untrained is not None:
            made = loading.build_model(self.untrained, self.tokenizer, self.objective_name, seed=0)
        else:
            made = loading.load_model(self.checkpoint, self.objective_name)
            if self.resize:
                fit_rows(made, self.tokenizer, checkpoint=self.checkpoint)
            else:
                warn_of_stale_rows(made, self.tokenizer, checkpoint=self.checkpoint)
        loading.check_length(self.length, made, self.objective)
        if self.objective.sharing is not None:
            try_isolation(made, documents=False)
        if self.objective.isolated:
            try_isolation(made, documents=True, causal=self.objective.causal)
        return made


def make_base(options: ModelOptions, corpora: Corpora, *, accelerator: str, trains: bool = True) -> Base:
    """The base of a model config; one that the cache lacks is pre-trained, or unless it `trains` left
    untrained. Raises ValueError for an objective that does not fit."""
    new = describe_base(options, corpora)
    if options.name_or_path is not None:
        return adapt_checkpoint(options, new, corpora, accelerator, trains)
    assert options.pretraining is not None and options.config is not None
    settings: dict[str, Any] = {"config": options.config, "objective": options.objective}
    settings |= {"mask_rate": options.mlm_probability, "length": options.max_seq_length}
    settings |= {"mean_span": options.span_length} if new.objective_name == "span" else {}
    facts, settings = corpora.general.facts, settings | {"pretraining": asdict(options.pretraining)}
    made_of = [FORMAT, facts["train_digest"], new.text_format.digest, settings]
    folder = corpora.cache / "base" / f"{options.name}-{digest(made_of)}"
    config = loading.AutoConfig.for_model(**options.config)
    base = assemble_base(options, new.tokenizer, config, new.text_format, corpora)
    if not trains and not folder.exists():
        return replace(base, untrained=options.config, lacks="the base model")

    def make(place: Path) -> None:
        assert options.pretraining is not None and options.config is not None
        steps, seed = options.pretraining.steps, options.pretraining.seed
        log.info("Pre-training the base model %s on the general text: %d steps", options.name, steps)
        model = loading.build_model(options.config, new.tokenizer, new.objective_name, seed=seed)
        pretrain(place, options, new, corpora, model, steps=steps, accelerator=accelerator)

    make_once(folder, make=make)
    return replace(base, checkpoint=str(folder), rebuild=partial(make_once, folder, make=make))


def adapt_checkpoint(
    options: ModelOptions, given: Base, corpora: Corpora, accelerator: str, trains: bool
) -> Base:
    """A checkpoint as it is; with fewer blocks or a trained head (unless it `trains` the cache's or none) one
    that is cached."""
    how, source = options.pretraining, str(options.name_or_path)
    steps = (how and how.head_steps) or 0
    if options.layers is None and not steps:
        return given
    files: Any = getattr(loading.load_config(source), "_commit_hash", None)  # of the Hub
    files = files or {name: file_hash(path) for name, path in checkpoint_files(source).items()}
    settings: dict[str, Any] = {"layers": options.layers, "resize": given.resize}
    if steps:
        assert how is not None
        text = corpora.general.facts["train_digest"]
        settings |= {"head": asdict(how), "text": text, "length": given.length}
        settings |= {"objective": given.objective_name}
        settings |= {"mask_rate": options.mask_rate, "mean_span": options.span_length}
        settings |= {"text_format": given.text_format.digest}
    folder = corpora.cache / "base" / f"{Path(source).name}-{digest([FORMAT, files, settings])}"

    def make(place: Path) -> None:
        model = loading.load_model(source, given.objective_name, layers=options.layers)
        if given.resize:
            fit_rows(model, given.tokenizer, checkpoint=source)
        if not steps:
            log.info("Keeping the first %d blocks of %s", options.layers, source)
            model.save_pretrained(place)
            save_tokenizer(given.tokenizer, base=source, folder=place)
            return
        assert how is not None
        trained = [*loading.find_head_parameters(model)]
        if how.head_layers:
            last = find_blocks(model)[-how.head_layers :]
            trained += [f"{name}.{each}" for name, block in last for each, _ in block.named_parameters()]
        told = "Training the head of the base model %s on the general text: %d steps, %d tensors"
        log.info(told, options.name, steps, len(trained))
        freeze = replace(NOT_FROZEN, trainable=tuple(f"^{re.escape(name)}$" for name in trained))
        # In pre-training, of raw text without samples that share rows.
        new = assemble_base(options, given.tokenizer, model.config, given.text_format)
        pretrain(place, options, new, corpora, model, steps=steps, freeze=freeze, accelerator=accelerator)

    if steps and not trains and not folder.exists():
        options, given = replace(options, pretraining=None), replace(given, lacks="the language-model head")
        return adapt_checkpoint(options, given, corpora, accelerator, trains)
    make_once(folder, make=make)
    rebuild = partial(make_once, folder, make=make)
    return replace(given, checkpoint=str(folder), resize=False, rebuild=rebuild)


def describe_base(options: ModelOptions, corpora: Corpora) -> Base:
    """The base of a checkpoint; of a new model its tokenizer and its objective in pre-training."""
    if options.name_or_path is None:
        assert options.config is not None and options.vocab_size is not None
        untrained = loading.AutoConfig.for_model(**options.config)
        name = loading.resolve_objective(options.objective, untrained)
        general, vocabulary = corpora.general, options.vocab_size

        def make(folder: Path) -> None:
            log.info("Training a tokenizer of %d entries on the general text", vocabulary)
            documents = general.documents("train")
            starts = range(0, len(documents), READ_AT_ONCE)
            batches = (documents[at : at + READ_AT_ONCE]["text"] for at in starts)
            learned = loading.train_tokenizer(batches, vocabulary=vocabulary, objective=name)
            learned.save_pretrained(folder)

        made_of = [TOKENIZER_FORMAT, general.facts["train_digest"], vocabulary, name]
        folder = make_once(corpora.cache / "tokenizers" / digest(made_of), make=make)
        tokenizer = loading.load_tokenizer(folder)
        text_format = make_text_format(
            tokenizer, corpora.text_options, is_causal=name == "causal", is_checkpoint=False
        )
        return assemble_base(options, tokenizer, untrained, text_format)
    config = loading.load_config(options.name_or_path)
    tokenizer = loading.load_tokenizer(options.name_or_path)
    resize, name = options.resize, loading.resolve_objective(options.objective, config)
    if name == "span" and not loading.find_sentinel_ids(tokenizer):
        loading.add_sentinels(tokenizer)
        log.info("Adding %d sentinels to the tokenizer of %s", loading.SENTINELS, options.name_or_path)
        resize = resize or count_entries(tokenizer) > config.get_text_config().vocab_size
    text_format = make_text_format(
        tokenizer,
        corpora.text_options,
        is_causal=name == "causal",
        model_ends=loading.find_end_ids(options.name_or_path, config),
    )
    return replace(assemble_base(options, tokenizer, config, text_format, corpora), resize=resize)


def assemble_base(
    options: ModelOptions,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    text_format: TextFormat,
    corpora: Corpora | None = None,
) -> Base:
    """A base with its objective on `corpora` (of examples the answers alone), or without in pre-training."""
    name = loading.resolve_objective(options.objective, config)
    answers = corpora is not None and corpora.encoding is not None
    isolated = corpora is not None and corpora.isolated
    objective = loading.make_objective(options, tokenizer, config, answers=answers, isolated=isolated)
    checkpoint = options.name_or_path or ""
    return Base(checkpoint, tokenizer, name, objective, options.max_seq_length, text_format)


def pretrain(
    folder: Path,
    options: ModelOptions,
    new: Base,
    corpora: Corpora,
    model: PreTrainedModel,
    *,
    steps: int,
    accelerator: str,
    freeze: Freeze = NOT_FROZEN,
) -> None:
    """Pre-trains what `freeze` leaves of a model on the general text in one process; resumable."""
    how = options.pretraining
    assert how is not None
    loading.check_length(options.max_seq_length, model, new.objective)
    context = MethodContext(
        model=model.train(),
        objective=new.objective,
        length=options.max_seq_length,
        masks=(),
        replay=NO_REPLAY,
        freeze=freeze,
        optimizer=instantiate(how.optim, _convert_="all"),
        schedule=Linear(warmup_ratio=how.warmup_ratio),
        seed=how.seed,
    )
    module, domain = NCL(Options(), context), Domain(GENERAL, 0, (GENERAL,))
    module.activate(domain.index)
    packed = corpora.packed(
        GENERAL, "train", format=new.text_format, length=options.max_seq_length, packing=CONCAT
    )
    data = DomainSequence(
        [domain],
        train={GENERAL: packed},
        held_out={},
        objective=new.objective,
        budget=Budget(steps=steps, epochs=None, tokens=None, batch_size=how.batch_size),
        replay=NO_REPLAY,
        seed=how.seed,
        accumulate=1,
        eval_batch_size=how.batch_size,
        importance_samples=how.batch_size,
        workers=0,
    )
    data.enter(domain)
    checkpoint = folder / "base.ckpt"
    path = str(checkpoint) if checkpoint.exists() else None
    if path is not None:
        check_state(checkpoint, instead="delete it to pre-train the base from its beginning")
    alone: dict[str, Any] = {"accelerator": accelerator, "devices": 1, "log_every_n_steps": 10}
    alone |= {"gradient_clip_val": how.gradient_clip_val, "precision": how.precision}
    guard = NanGuard(advice=ADVICE)
    saving = StepCheckpoint(checkpoint, every=CHECKPOINT_EVERY, guard=guard)
    fitting = make_trainer(
        alone, label="base", steps=steps, callbacks=[guard, saving], preemption=Preemption(saving)
    )
    with defer_signals():
        fitting.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    drop_optimizer(fitting)
    module.cpu()
    module.model.save_pretrained(folder)
    save_tokenizer(new.tokenizer, base=new.checkpoint, folder=folder)
    checkpoint.unlink(missing_ok=True)
