"""A plan checked by what torch, Lightning and transformers say of it, before any text is read.

The method is made once on the model's skeleton, which takes no memory: units that there are not, targets that
nothing matches, positions that do not suffice are told at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cpt.adapters.export import PARTS_INDEX
from cpt.core.errors import reason
from cpt.core.files import check_archive
from cpt.core.processes import is_first_process
from cpt.core.rules import show
from cpt.core.signatures import check_arguments, target
from cpt.methods.base import ContinualModule
from cpt.models import loading
from cpt.models.block_attention import check_isolation
from cpt.models.growth import check_entries, check_head
from cpt.models.objectives import Causal, CausalAnswers, Masked, Objective, Span
from cpt.models.options import BYTES, ModelOptions
from cpt.models.weights import frozen_parameters
from cpt.trainer.assembly import make_shared
from cpt.trainer.kinds import check_kind
from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "merges.txt")


@contextmanager
def naming_cause(place: str) -> Iterator[None]:
    """Whatever a library raises becomes a ValueError in one line that begins with the place."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{place}: {reason(error).removeprefix('trainer: ')}") from error


def check_optimizer(place: str, options: Mapping[str, Any]) -> None:
    """The optimizer takes its options: tried with one weight."""
    made_by = target(place, options)
    if isinstance(made_by, type) and not issubclass(made_by, torch.optim.Optimizer):
        raise ValueError(
            f"{place}._target_={options['_target_']}; allowed: an optimizer's class, like torch.optim.AdamW"
        )
    check_arguments(place, options, given_by_cpt=("params",))
    with naming_cause(place):
        instantiate({**options, "_partial_": True}, _convert_="all")(
            [{"params": [nn.Parameter(torch.zeros(1, 1))]}]
        )


def check_model(plan: Plan) -> None:
    """The model can be built or loaded, and goes with the options and the method: on its skeleton."""
    options = plan.model
    config = configure_new(options) if options.checkpoint is None else configure_given(options)
    objective = loading.objective_name(options.objective, config)
    check_corruption(options, objective)
    check_kind(plan, objective)
    where = options.checkpoint or "model.config"
    with naming_cause(where), torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = loading.AUTO[objective].from_config(config)
    if plan.trainer.attention != "auto":
        with naming_cause(f"trainer.attention={plan.trainer.attention}"):
            model.set_attn_implementation(plan.trainer.attention)
    stand_in = stand_for(options, objective, vocabulary=config.get_text_config().vocab_size)
    if plan.source.isolated:
        check_isolation(model, causal=objective == "causal")
    if plan.source.isolated and plan.source.encoding is None:
        stand_in.isolated = True
    elif plan.source.isolated:
        stand_in = CausalAnswers(stand_in, pad=0, sharing=loading.sharing_of(config))
    loading.check_length(options.length, model, stand_in)
    frozen_parameters(model, plan.freeze)
    if options.resize or (objective == "span" and options.checkpoint and not sentinels_of(options)):
        check_head(model)
    check_method(plan, model, stand_in)


def check_corruption(options: ModelOptions, objective: str) -> None:
    """Raises ValueError where it is not said what is masked or hidden, or sentinels have no room."""
    if objective in ("masked", "span") and options.mask_rate is None:
        kind = "is masked" if objective == "masked" else "learns by span corruption"
        raise ValueError(f"model.mask_rate=null; allowed: above 0 and below 1, as the model {kind}")
    if objective == "span" and options.mean_span is None:
        raise ValueError("model.mean_span=null; allowed: 1 or more, as the model learns by span corruption")
    least = BYTES + loading.SENTINELS
    if objective == "span" and options.checkpoint is None and options.vocabulary < least:
        raise ValueError(
            f"model.vocabulary={options.vocabulary}; allowed: {least} or more, {loading.SENTINELS} of "
            "them sentinels"
        )


def sentinels_of(options: ModelOptions) -> int:
    """How many sentinels the tokenizer of a checkpoint has."""
    return len(loading.sentinel_ids(loading.load_tokenizer(options.checkpoint)))


def stand_for(options: ModelOptions, objective: str, *, vocabulary: int) -> Objective:
    """An objective of that kind without a tokenizer, which may not be learned yet."""
    if objective == "span":
        count = (sentinels_of(options) if options.checkpoint else 0) or loading.SENTINELS
        how = {"rate": options.mask_rate, "mean": options.mean_span}
        return Span(**how, sentinels=range(count), end=0, pad=0, start=0)
    return Masked(Unmade(vocabulary), rate=options.mask_rate) if objective == "masked" else Causal()


def check_method(plan: Plan, model: PreTrainedModel, objective: Objective) -> None:
    """The method can be made of the model and takes the order: tried on the model's skeleton."""
    shared = make_shared(plan, model, objective)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            (module := plan.method.make(shared)).stages(plan.order)
        except ValueError:  # a refusal
            raise
        except Exception as error:  # whatever an operation raises that a skeleton can not do
            log.debug("method %s was not tried on a skeleton: %s", plan.names["method"], error)
            return
    if plan.trainer.compile and any(mask.limits for mask in module.masks):
        raise ValueError(
            "trainer.compile=true does not go with backend=backward of a mask, which takes maps apart; "
            "allowed: backend=hooks"
        )
    check_frozen(plan, module)


def check_frozen(plan: Plan, module: ContinualModule) -> None:
    """Raises ValueError where nothing is left to train."""
    frozen = {id(parameter) for parameter in module.frozen}
    if plan.freeze.only is not None and all(id(each) in frozen for each in module.model.parameters()):
        raise ValueError(
            f"freeze.only={show(plan.freeze.only)} leaves nothing of what method={plan.names['method']} "
            "trains; allowed: null, or what finds some of it"
        )


class Unmade:
    """Stands for a tokenizer of so many entries that is not learned yet."""

    mask_token_id = 0
    all_special_ids = (0,)

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return self.entries


def configure_new(options: ModelOptions) -> PretrainedConfig:
    """The configuration of a model that is built here."""
    check_optimizer("model.base.optim", options.base.optim)
    with naming_cause("model.config"):
        return loading.AutoConfig.for_model(**options.config)


def configure_given(options: ModelOptions) -> PretrainedConfig:
    """The configuration of a checkpoint whose files are whole and whose tokenizer fits."""
    place = options.checkpoint
    config = loading.configuration(place)
    check_files(Path(place))
    check_tokenizer(Path(place))
    with naming_cause(f"the tokenizer of model.checkpoint={place}"):
        tokenizer = loading.load_tokenizer(place)
    rows = config.get_text_config().vocab_size
    if not options.resize:
        check_entries(rows, tokenizer, checkpoint=place)
    loading.find_adapter(place)
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
    if (folder / PARTS_INDEX).is_file():
        index = json.loads((folder / PARTS_INDEX).read_text(encoding="utf-8"))
        *others, last = index["parts"]
        used = f"with the part of {last} alone" if index["attach"] is None else "without any of them"
        advice = f"cpt.adapters.export.load({str(folder)!r}, domain=…)"
        advice += ".save_pretrained(…) makes another a checkpoint" if index["attach"] is None else " has them"
        log.warning("%s has parts for %s; it starts %s: %s", folder, ", ".join([*others, last]), used, advice)
    elif adapter := loading.find_adapter(folder):
        log.info("Merging the adapter %s into the model of %s", adapter.name, folder)
