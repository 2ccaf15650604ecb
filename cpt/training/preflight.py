"""A config checked by what torch, Lightning and transformers say of it, before any text is read."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cpt.adapters.export import INDEX
from cpt.core.config import made
from cpt.core.errors import reason
from cpt.core.files import check_archive
from cpt.core.processes import is_first_process
from cpt.methods.prompt import check_tokens
from cpt.models import loading as models
from cpt.models.freezing import Freeze
from cpt.models.resizing import check_head, check_rows
from cpt.training import callbacks as custom
from cpt.training.checks import check_arguments, is_own
from cpt.training.pretraining import check_buildable
from cpt.training.trainer import trainer

log = logging.getLogger(__name__)
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "merges.txt")
# What a run gives every method, beside its own options.
SHARED = (
    "model",
    "objective",
    "length",
    "masks",
    "replay",
    "freeze",
    "optimizer",
    "schedule",
    "seed",
    "scope",
)


def checked(cfg: DictConfig, folder: Path) -> tuple[list[Logger], dict[str, Callback]]:
    """The loggers and callbacks of a config that can be run. Raises ValueError for one that cannot."""
    check_arguments("method", cfg.method, given_by_cpt=SHARED)
    for section in ("mask", "method.mask", "method.mixture", "method.routing"):
        check_arguments(section, OmegaConf.select(cfg, section))
    check_optimizer("optim", cfg.optim)
    check_model(cfg)
    loggers = custom.loggers(cfg.logger, folder)
    logged = bool(loggers) or bool(cfg.logger.get("csv")) or bool(cfg.logger.get("wandb"))
    callbacks = custom.callbacks(cfg.callbacks, logged=logged)
    check_trainer(cfg.trainer, loggers, callbacks)
    return loggers, callbacks


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Whatever a library raises becomes a ValueError in one line that begins with the place."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{place}: {reason(error).removeprefix('trainer: ')}") from error


def check_optimizer(place: str, options: DictConfig) -> None:
    """The optimizer takes its options: tried with one weight."""
    check_arguments(place, options, given_by_cpt=("params",))
    with naming(place):
        made(options)([{"params": [nn.Parameter(torch.zeros(1, 1))]}])


def check_model(cfg: DictConfig) -> None:
    """The model can be built or loaded, and goes with the options: on its skeleton, which takes no memory."""
    options = cfg.model
    config = built(options) if options.checkpoint is None else given(options)
    objective = models.objective_name(options.objective, config)
    if objective == "masked" and options.mask_rate is None:
        raise ValueError("model.mask_rate=null; allowed: above 0 and below 1, as the model is masked")
    where = options.checkpoint or "model.config"
    with naming(where), torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = models.AUTO[objective].from_config(config)
    models.check_length(options.length, model)
    Freeze(**cfg.freeze).parameters(model)
    if options.get("resize"):
        check_head(model)
    check_width(cfg.method, model)
    if cfg.method.name == "prompt" and is_own(cfg.method):
        check_tokens(cfg.method.tokens, length=options.length, model=model)


def built(options: DictConfig) -> PretrainedConfig:
    """The configuration of a model that is built here."""
    check_buildable(options)
    check_optimizer("model.base.optim", options.base.optim)
    with naming("model.config"):
        return models.AutoConfig.for_model(**OmegaConf.to_container(options.config, resolve=True))


def given(options: DictConfig) -> PretrainedConfig:
    """The configuration of a checkpoint whose files are whole and whose tokenizer fits."""
    place = options.checkpoint
    config = models.configuration(place)
    check_files(Path(place))
    check_tokenizer(Path(place))
    with naming(f"the tokenizer of model.checkpoint={place}"):
        tokenizer = models.load_tokenizer(place)
    check_rows(
        config.get_text_config().vocab_size, tokenizer, checkpoint=place, resize=bool(options.get("resize"))
    )
    if is_first_process():
        tell_parts(Path(place))
    return config


def check_files(folder: Path) -> None:
    """The weights of a local checkpoint are not cut off."""
    instead = "bring the checkpoint here again"
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(path, "pt"):
                pass
        except Exception as error:  # safetensors has an exception of its own, which is no OSError
            raise ValueError(f"{path} is truncated or damaged ({reason(error)}); {instead}") from error
    for path in sorted(folder.glob("pytorch_model*.bin")) if folder.is_dir() else ():
        check_archive(path, instead=instead)


def check_tokenizer(folder: Path) -> None:
    """A local checkpoint has one: transformers would make an empty one of the model's type."""
    if folder.is_dir() and not any(path for kind in TOKENIZERS for path in folder.glob(kind)):
        raise ValueError(
            f"model.checkpoint={folder} has no tokenizer; allowed: a folder with the files of one, "
            f"{', '.join(TOKENIZERS)}"
        )


def tell_parts(folder: Path) -> None:
    """Says which part of an exported model with a part per domain is used: the files that transformers reads
    are one model."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        *others, last = index["parts"]
        used = f"with the part of {last} alone" if index["attach"] is None else "without any of them"
        advice = f"cpt.adapters.export.load({str(folder)!r}, domain=…)"
        advice += ".save_pretrained(…) makes another a checkpoint" if index["attach"] is None else " has them"
        log.warning("%s has parts for %s; it starts %s: %s", folder, ", ".join([*others, last]), used, advice)
    elif (folder / "adapters").is_dir():
        log.warning("%s has adapters, which are left out; merge them with peft to start with them", folder)


def check_width(method: DictConfig, model: PreTrainedModel) -> None:
    """A bottleneck of the method has one unit or more."""
    unused = method.get("experts") == "ffn" or method.get("form") == "full"
    reduction, width = method.get("reduction"), getattr(model.config.get_text_config(), "hidden_size", None)
    if isinstance(reduction, int) and width and not unused and reduction > width:
        raise ValueError(f"method.reduction={reduction}; allowed: 1 to {width}, the model's hidden size")


def check_trainer(options: DictConfig, loggers: Sequence[Logger], callbacks: Mapping[str, Callback]) -> None:
    """lightning.Trainer takes its options on this machine, with these callbacks."""
    names = ("accelerator", "devices", "strategy", "precision")
    place = " ".join(f"trainer.{name}={options[name]}" for name in names if name in options)
    with naming(place):
        trainer(options, label="", loggers=loggers, callbacks=[Callback(), *callbacks.values()])
