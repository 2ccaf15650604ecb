"""The base model: a checkpoint, if asked with fewer blocks and a head trained on the general text, or a new
model pre-trained on it; what is made is cached for all runs."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hydra.utils import instantiate
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.files import hash_file
from cpt.core.messages import count_noun
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
from cpt.data.tokenizer_hash import hash_tokenizer
from cpt.methods.base import MethodContext
from cpt.methods.ncl import NCL
from cpt.models import loading
from cpt.models.block_attention import try_isolation
from cpt.models.fsdp import Sharding
from cpt.models.narrow_layers import widen
from cpt.models.objectives import Objective
from cpt.models.options import NOT_FROZEN, Freeze, ModelOptions
from cpt.models.parameter_groups import bind_blocks
from cpt.models.quantization import OF_BITSANDBYTES, describe_stored
from cpt.models.rope import forget_lengths, scale_rope, set_max_length
from cpt.models.router_loss import find_router_weights
from cpt.models.sharded_loading import VocabularyRows
from cpt.models.stored_weights import find_weight_files
from cpt.models.trial import try_shards
from cpt.models.units import find_blocks
from cpt.models.vocabulary import (
    count_entries,
    extend_rows,
    find_vocabulary_tables,
    fit_rows,
    warn_of_stale_rows,
)
from cpt.optim.nan_guard import NanGuard
from cpt.optim.schedulers import Linear
from cpt.trainer.base_files import load_of_model_type, save_tokenizer
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.preemption import Preemption
from cpt.trainer.run_dir import list_checkpoint_files
from cpt.trainer.step_checkpoint import StepCheckpoint

log = logging.getLogger(__name__)
FORMAT = 2
TOKENIZER_FORMAT = 2  # raise it when other tokenizers are made of the same text
CHECKPOINT_EVERY = 200  # steps of the pre-training
DOCUMENTS_PER_BATCH = 100  # of the text that a tokenizer is trained on
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
    own_tokenizer: PreTrainedTokenizerBase | None = None  # of the checkpoint, where `tokenizer` adds to it
    tokenizer_source: str = ""  # model.tokenizer: a folder, or a name on the Hub
    rope: Mapping[str, Any] | None = None  # parameters that replace those of the checkpoint
    quantization: str = "none"  # nf4 or int8: what the linear layers of the checkpoint are quantized to
    untrained: Mapping[str, Any] | None = None  # the config of a model that is not pre-trained yet
    lacks: str = ""  # what a run still has to train before its first stage
    rebuild: Callable[[], object] | None = None  # makes a cached checkpoint again, unless it is there

    @property
    def seq2seq(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.objective_name in loading.SEQ2SEQ

    @property
    def tokenizer_files(self) -> str:
        """The folder, or the name on the Hub, whose files of the tokenizer are copied."""
        return self.tokenizer_source or self.checkpoint

    def restore_folder(self) -> None:
        """Makes a cached checkpoint again that was removed while the run used it: the export needs it. Raises
        ValueError where this process cannot make it; several processes cannot pre-train within a run."""
        if Path(self.checkpoint).is_dir():
            return
        if self.rebuild is None:
            raise ValueError(
                f"{self.checkpoint} was removed while the run used it; "
                "restore it, and run the same command again to continue"
            )
        if is_distributed():
            raise ValueError(
                f"{self.checkpoint} was removed while the run used it; "
                "run the same command again: it makes the base again and continues"
            )
        log.warning("Rebuilding %s, which was removed while the run used it", self.checkpoint)
        self.rebuild()

    def find_quantization(self) -> str:
        """What the linear layers are quantized to: by `model.quantization`, or in the files; else none."""
        if self.quantization != "none" or not self.checkpoint:
            return self.quantization
        stored = describe_stored(loading.load_config(self.checkpoint))
        return stored if stored in OF_BITSANDBYTES else "none"

    def find_original_files(self) -> list[Path]:
        """The files that have the weights before they are quantized; none of a base that is not quantized, or
        that is stored so."""
        if self.quantization == "none":
            return []
        return find_weight_files(self.checkpoint, loading.load_config(self.checkpoint))

    def model(
        self, dtype: torch.dtype = torch.float32, *, sharding: Sharding | None = None
    ) -> PreTrainedModel:
        """A fresh copy of the model, whose layers are narrow with a `dtype` of 16 bits; with a `sharding`, of
        which all processes ask for it, each has its rows. Raises ValueError where it does not fit the
        tokenizer or the length, or mixes samples or documents that share rows."""
        if self.untrained is not None:
            model = loading.build_model(self.untrained, self.tokenizer, self.objective_name, seed=0)
        else:
            model = loading.load_model(
                self.checkpoint,
                self.objective_name,
                rope=self.rope,
                quantization=self.quantization,
                dtype=dtype,
                rows=VocabularyRows(self.set_rows, are_new=self.resize or self.own_tokenizer is not None),
                sharding=sharding,
            )

        forget_lengths(model)
        loading.check_length(self.length, model, self.objective)
        if isinstance(model, FSDPModule):
            try_shards(model, self.check_isolation)
        else:
            self.check_isolation(model)
        return model

    def check_isolation(self, model: PreTrainedModel) -> None:
        """Raises ValueError where a model mixes samples or documents that share rows."""
        if self.objective.sharing is not None:
            try_isolation(model, are_documents=False)
        if self.objective.isolated:
            try_isolation(model, are_documents=True, causal=self.objective.causal)

    def set_rows(self, model: PreTrainedModel) -> None:
        """Sets the rows of new tokens, and warns of those that look untrained and are not to be set."""
        if not self.resize:
            stored_tokenizer = self.own_tokenizer or self.tokenizer
            warn_of_stale_rows(model, stored_tokenizer, checkpoint=self.checkpoint)
        self.set_new_rows(model)

    def set_new_rows(self, model: PreTrainedModel) -> None:
        """Sets the rows of tokens that the weights of the checkpoint do not have: tokens of its own tokenizer
        with model.resize=true, and those that model.tokenizer adds."""
        if self.resize or self.own_tokenizer is not None:
            widen(model, find_vocabulary_tables(model))  # means over rows are rounded to 32 bits
        if self.resize:
            fit_rows(model, self.own_tokenizer or self.tokenizer, checkpoint=self.checkpoint)
        if self.own_tokenizer is not None:
            extend_rows(model, self.tokenizer, self.own_tokenizer)


def make_base(options: ModelOptions, corpora: Corpora, *, accelerator: str, trains: bool = True) -> Base:
    """The base of a model config; one that the cache lacks is pre-trained, or unless it `trains` left
    untrained. Raises ValueError for an objective that does not fit."""
    pretraining_base = describe_base(options, corpora)
    if options.name_or_path is not None:
        return adapt_checkpoint(options, pretraining_base, corpora, accelerator=accelerator, trains=trains)

    assert options.pretraining is not None and options.config is not None
    settings: dict[str, Any] = {
        "config": options.config,
        "objective": options.objective,
        "mlm_probability": options.mlm_probability,
        "max_seq_length": options.max_seq_length,
    }
    if pretraining_base.objective_name == "span":
        settings["mean_span"] = options.span_length
    settings["pretraining"] = asdict(options.pretraining)
    config = loading.AutoConfig.for_model(**options.config)
    router_weights = find_router_weights(options.router_aux_loss, config)
    if router_weights:
        settings["router_weights"] = asdict(router_weights)
    train_digest = corpora.general.facts["train_digest"]
    base_hash = digest([FORMAT, train_digest, pretraining_base.text_format.digest, settings])
    folder = corpora.cache / "base" / f"{options.name}-{base_hash}"

    # In the run, the objective is that of the domains' texts.
    base = assemble_base(options, pretraining_base.tokenizer, config, pretraining_base.text_format, corpora)
    if not trains and not folder.exists():
        return replace(base, untrained=options.config, lacks="the base model")

    make = partial(
        make_new_model, options=options, base=pretraining_base, corpora=corpora, accelerator=accelerator
    )
    make_once(folder, make=make)
    return replace(base, checkpoint=str(folder), rebuild=partial(make_once, folder, make=make))


def make_new_model(
    folder: Path, *, options: ModelOptions, base: Base, corpora: Corpora, accelerator: str
) -> None:
    """Builds a model of a config and pre-trains it on the general text."""
    assert options.pretraining is not None and options.config is not None
    steps = options.pretraining.steps
    step_count = count_noun(steps, "step")
    log.info("Pre-training the base model %s on the general text: %s", options.name, step_count)
    model = loading.build_model(
        options.config, base.tokenizer, base.objective_name, seed=options.pretraining.seed
    )
    pretrain(folder, options, base, corpora, model, steps=steps, accelerator=accelerator)


def adapt_checkpoint(
    options: ModelOptions, base: Base, corpora: Corpora, *, accelerator: str, trains: bool
) -> Base:
    """A checkpoint as it is, or one that is cached: with fewer blocks, a trained head, or an adapter merged
    into weights that will be quantized. Unless it `trains`, a head that the cache lacks is left as it is."""
    pretraining = options.pretraining
    checkpoint = str(options.name_or_path)
    head_steps = 0
    if pretraining is not None and pretraining.head_steps:
        head_steps = pretraining.head_steps
    has_adapter = options.quantization != "none" and loading.find_adapter(checkpoint) is not None
    if options.num_hidden_layers is None and head_steps == 0 and not has_adapter:
        return base

    # The key of the cache: what the checkpoint holds, and all options that the adapted model depends on. A
    # commit of the Hub says its contents, files on disk are hashed.
    config = loading.load_config(checkpoint)
    contents: Any = getattr(config, "_commit_hash", None)
    if not contents:
        contents = {name: hash_file(path) for name, path in list_checkpoint_files(checkpoint).items()}
    settings: dict[str, Any] = {"num_hidden_layers": options.num_hidden_layers, "resize": base.resize}
    if base.own_tokenizer is not None:
        settings["tokenizer"] = hash_tokenizer(base.tokenizer)
    if base.rope is not None:
        settings["rope"] = base.rope
    if head_steps:
        assert pretraining is not None
        settings["head"] = asdict(pretraining)
        settings["text"] = corpora.general.facts["train_digest"]
        settings["max_seq_length"] = base.length
        settings["objective"] = base.objective_name
        settings["mlm_probability"] = options.mask_rate
        settings["mean_span"] = options.span_length
        settings["text_format"] = base.text_format.digest
        router_weights = find_router_weights(options.router_aux_loss, config)
        if router_weights:
            settings["router_weights"] = asdict(router_weights)
    base_hash = digest([FORMAT, contents, settings])
    folder = corpora.cache / "base" / f"{Path(checkpoint).name}-{base_hash}"

    # An estimate of costs does not need a trained head, which takes minutes: the same model without it.
    if head_steps and not trains and not folder.exists():
        untrained_options = replace(options, pretraining=None)
        untrained_base = replace(base, lacks="the language-model head")
        return adapt_checkpoint(
            untrained_options, untrained_base, corpora, accelerator=accelerator, trains=trains
        )

    make = partial(
        make_adapted_model,
        options=options,
        base=base,
        corpora=corpora,
        head_steps=head_steps,
        accelerator=accelerator,
    )
    make_once(folder, make=make)
    rebuild = partial(make_once, folder, make=make)
    # Its rows are added, and its config.json has the RoPE parameters.
    return replace(base, checkpoint=str(folder), resize=False, own_tokenizer=None, rope=None, rebuild=rebuild)


def make_adapted_model(
    folder: Path, *, options: ModelOptions, base: Base, corpora: Corpora, head_steps: int, accelerator: str
) -> None:
    """Writes a checkpoint, or its first blocks, with an adapter of its folder merged and a head trained for
    `head_steps` on the general text."""
    checkpoint = str(options.name_or_path)
    model = loading.load_model(
        checkpoint,
        base.objective_name,
        num_hidden_layers=options.num_hidden_layers,
        rope=options.rope_parameters,
    )
    base.set_new_rows(model)
    if head_steps == 0:
        if options.num_hidden_layers is not None:
            block_count = count_noun(options.num_hidden_layers, "block")
            log.info("Keeping the first %s of %s", block_count, checkpoint)
        model.save_pretrained(folder)
        save_tokenizer(base.tokenizer, base=base.tokenizer_files, folder=folder)
        return

    assert options.pretraining is not None
    trained_names = [*loading.find_head_parameters(model)]
    num_blocks = options.pretraining.head_layers
    if num_blocks > 0:
        for block_name, block in find_blocks(model)[-num_blocks:]:
            trained_names.extend(f"{block_name}.{name}" for name, _ in block.named_parameters())
    log.info(
        "Training the head of the base model %s on the general text: %s, %s",
        options.name,
        count_noun(head_steps, "step"),
        count_noun(len(trained_names), "tensor"),
    )
    freeze = replace(NOT_FROZEN, trainable=tuple(f"^{re.escape(name)}$" for name in trained_names))

    # In pre-training, of raw text without samples that share rows.
    pretraining_base = assemble_base(options, base.tokenizer, model.config, base.text_format)
    pretrain(
        folder,
        options,
        pretraining_base,
        corpora,
        model,
        steps=head_steps,
        freeze=freeze,
        accelerator=accelerator,
    )


def describe_base(options: ModelOptions, corpora: Corpora) -> Base:
    """The base of a checkpoint; for a new model the tokenizer and the objective of its pre-training."""
    if options.name_or_path is None:
        return describe_new_base(options, corpora)

    config = loading.load_config(options.name_or_path)
    tokenizer = loading.load_tokenizer(options.tokenizer or options.name_or_path)
    if options.rope_parameters is not None:
        config = scale_rope(config, options.rope_parameters)
        set_max_length(tokenizer, config)
    own_tokenizer = None
    if options.tokenizer is not None:
        own_tokenizer = loading.load_tokenizer(options.name_or_path)

    # An encoder-decoder that corrupts spans marks them with sentinels, for which its embedding may lack rows.
    needs_rows = options.resize
    objective_name = loading.resolve_objective(options.objective, config)
    if objective_name == "span" and not loading.find_sentinel_ids(tokenizer):
        loading.add_sentinels(tokenizer)
        sentinel_count = count_noun(loading.SENTINELS, "sentinel")
        log.info("Adding %s to the tokenizer of %s", sentinel_count, options.name_or_path)
        has_more_entries = count_entries(tokenizer) > config.get_text_config().vocab_size
        if own_tokenizer is None:  # else extend_rows adds them with the tokens of model.tokenizer
            needs_rows = needs_rows or has_more_entries

    text_format = make_text_format(
        tokenizer,
        corpora.text_options,
        is_causal=objective_name == "causal",
        model_ends=loading.find_end_ids(options.name_or_path, config),
    )
    base = assemble_base(options, tokenizer, config, text_format, corpora)
    return replace(
        base,
        resize=needs_rows,
        own_tokenizer=own_tokenizer,
        rope=options.rope_parameters,
        quantization=options.quantization,
    )


def describe_new_base(options: ModelOptions, corpora: Corpora) -> Base:
    """The tokenizer of a new model, trained on the general text, and its objective in pre-training."""
    vocab_size = options.vocab_size
    assert options.config is not None and vocab_size is not None
    config = loading.AutoConfig.for_model(**options.config)
    objective_name = loading.resolve_objective(options.objective, config)
    general = corpora.general
    tokenizer_hash = digest([TOKENIZER_FORMAT, general.facts["train_digest"], vocab_size, objective_name])

    def make(folder: Path) -> None:
        entry_count = count_noun(vocab_size, "entry", "entries")
        log.info("Training a tokenizer of %s on the general text", entry_count)
        batches = read_in_batches(general.documents("train"))
        tokenizer = loading.train_tokenizer(batches, vocabulary=vocab_size, objective=objective_name)
        tokenizer.save_pretrained(folder)

    tokenizer_folder = make_once(corpora.cache / "tokenizers" / tokenizer_hash, make=make)
    tokenizer = load_of_model_type(tokenizer_folder, config.model_type)
    text_format = make_text_format(
        tokenizer, corpora.text_options, is_causal=objective_name == "causal", is_checkpoint=False
    )
    return assemble_base(options, tokenizer, config, text_format)


def read_in_batches(documents: Dataset) -> Iterator[Any]:
    """Lists of the documents' texts, DOCUMENTS_PER_BATCH in each."""
    for start in range(0, len(documents), DOCUMENTS_PER_BATCH):
        yield documents[start : start + DOCUMENTS_PER_BATCH]["text"]


def assemble_base(
    options: ModelOptions,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    text_format: TextFormat,
    corpora: Corpora | None = None,
) -> Base:
    """A base with its objective on `corpora` (of examples the answers alone), or without in pre-training."""
    objective_name = loading.resolve_objective(options.objective, config)
    objective = loading.make_objective(
        options,
        tokenizer,
        config,
        has_answers=corpora is not None and corpora.encoding is not None,
        is_isolated=corpora is not None and corpora.isolated,
        mixes_chats=corpora is not None and corpora.mixes_chats,
    )
    return Base(
        checkpoint=options.name_or_path or "",
        tokenizer=tokenizer,
        objective_name=objective_name,
        objective=objective,
        length=options.max_seq_length,
        text_format=text_format,
        tokenizer_source=options.tokenizer or "",
    )


def pretrain(
    folder: Path,
    options: ModelOptions,
    base: Base,
    corpora: Corpora,
    model: PreTrainedModel,
    *,
    steps: int,
    accelerator: str,
    freeze: Freeze = NOT_FROZEN,
) -> None:
    """Pre-trains what `freeze` leaves of a model on the general text in one process, and saves it.

    A killed pre-training resumes from its checkpoint in the folder."""
    pretraining = options.pretraining
    assert pretraining is not None
    loading.check_length(options.max_seq_length, model, base.objective)

    # A run in small: plain training on one domain, the general text.
    context = MethodContext(
        model=model.train(),
        objective=base.objective,
        length=options.max_seq_length,
        masks=(),
        replay=NO_REPLAY,
        freeze=freeze,
        optimizer=bind_blocks(instantiate(pretraining.optim, _convert_="all"), model),
        schedule=Linear(warmup_ratio=pretraining.warmup_ratio),
        seed=pretraining.seed,
        router_weights=find_router_weights(options.router_aux_loss, model.config),
    )
    method = NCL(Options(), context)
    domain = Domain(name=GENERAL, index=0, texts=(GENERAL,))
    method.activate(domain.index)

    packed = corpora.packed(
        GENERAL, "train", format=base.text_format, length=options.max_seq_length, packing=CONCAT
    )
    data = DomainSequence(
        [domain],
        train={GENERAL: packed},
        held_out={},
        objective=base.objective,
        budget=Budget(steps=steps, epochs=None, tokens=None, batch_size=pretraining.batch_size),
        replay=NO_REPLAY,
        seed=pretraining.seed,
        accumulate=1,
        eval_batch_size=pretraining.batch_size,
        importance_samples=pretraining.batch_size,
        workers=0,
    )
    data.enter(domain)

    checkpoint_path = folder / "base.ckpt"
    resume_from = str(checkpoint_path) if checkpoint_path.exists() else None
    if resume_from is not None:
        check_state(checkpoint_path, remedy="delete it to pre-train the base from its beginning")
    guard = NanGuard(advice=ADVICE)
    step_checkpoint = StepCheckpoint(checkpoint_path, interval=CHECKPOINT_EVERY, guard=guard)
    trainer = make_trainer(
        {
            "accelerator": accelerator,
            "devices": 1,
            "log_every_n_steps": 10,
            "gradient_clip_val": pretraining.gradient_clip_val,
            "precision": pretraining.precision,
        },
        label="base",
        steps=steps,
        callbacks=[guard, step_checkpoint],
        preemption=Preemption(step_checkpoint),
    )
    with defer_signals():
        trainer.fit(method, datamodule=data, ckpt_path=resume_from, weights_only=True)
    drop_optimizer(trainer)

    # The checkpoint is removed last: if the process is killed before, the next start only has to save again.
    method.cpu()
    method.model.save_pretrained(folder)
    save_tokenizer(base.tokenizer, base=base.tokenizer_files, folder=folder)
    checkpoint_path.unlink(missing_ok=True)
