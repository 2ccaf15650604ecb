"""Pre-flight: check a plan with torch, Lightning and transformers before any text is read, resolve `auto`, and
build what needs no text.

The method is built once on the model's skeleton, on torch's meta device: units that the model lacks, targets that
match nothing, too few positions are reported at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cpt.adapters.export import INDEX
from cpt.core.errors import reason
from cpt.core.files import check_archive
from cpt.core.memory import keep_free
from cpt.core.processes import is_first_process
from cpt.core.rules import show
from cpt.core.signatures import check_arguments, target
from cpt.data.chats import check_template
from cpt.models import loading, tokenizers
from cpt.models.answers import CausalAnswers
from cpt.models.freezing import frozen_parameters
from cpt.models.growth import check_head, check_rows
from cpt.models.isolation import check_isolation
from cpt.models.objectives import Causal, Masked, Objective
from cpt.models.options import BYTES
from cpt.models.span import Span
from cpt.trainer.build import build_shared
from cpt.trainer.callbacks import make_callbacks, make_loggers
from cpt.trainer.lightning import find_device, naming_cause, quiet, try_trainer
from cpt.trainer.plan import Plan
from cpt.trainer.precision import resolve_precision
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from cpt.evaluation.probes.harness import Harness

log = logging.getLogger(__name__)
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "merges.txt")


@dataclass(frozen=True)
class Ready:
    """What a run has before its texts: the plan with `auto` resolved, loggers and callbacks, the number of
    `processes` on this machine, the device of this one, and the tasks of lm-evaluation-harness."""

    plan: Plan
    loggers: list[Logger]
    callbacks: dict[str, Callback]
    processes: int
    device: torch.device
    harness: Harness | None


def prepare(plan: Plan, run: RunDir) -> Ready:
    """Prepares the process, and what needs no text. Raises ValueError for a plan that cannot be run."""
    quiet()
    keep_free()
    check_optimizer("optim", {"_target_": plan.optim.target, **plan.optim.arguments})
    config = check_model(plan)
    loggers = make_loggers(plan.logger.others, run.path)
    logged = bool(loggers) or plan.logger.csv or plan.logger.wandb
    callbacks = make_callbacks(plan.callbacks, logged=logged)
    device, scores = find_device(plan.trainer.lightning), run.scores()
    stored = scores.numerics.get("precision") if scores else None
    options = resolve_precision(plan.trainer, config, device, length=plan.model.length, stored=stored)
    tried = try_trainer(options.lightning, loggers=loggers, callbacks=list(callbacks.values()))
    plan = replace(plan, trainer=options)
    return Ready(plan, loggers, callbacks, tried.num_devices, device, make_harness(plan))


def make_harness(plan: Plan) -> Harness | None:
    """The benchmark's tasks, read by the process that measures them."""
    if plan.probe is None or not is_first_process():
        return None
    log.info("reading the tasks of the probe")
    from cpt.evaluation.probes.harness import Harness  # 8 seconds, and an optional package

    return Harness(plan.probe, precision=plan.trainer.precision)


def check_optimizer(section: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an optimizer that does not take its options: tried with one weight."""
    made_by = target(section, options)
    if isinstance(made_by, type) and not issubclass(made_by, torch.optim.Optimizer):
        raise ValueError(
            f"{section}._target_={options['_target_']}; allowed: an optimizer's class, like torch.optim.AdamW"
        )
    check_arguments(section, options, given_by_cpt=("params",))
    with naming_cause(section):
        instantiate({**options, "_partial_": True}, _convert_="all")(
            [{"params": [nn.Parameter(torch.zeros(1, 1))]}]
        )


def check_model(plan: Plan) -> PretrainedConfig:
    """The model's transformers config. Raises ValueError for a model that cannot be built or loaded, or does
    not go with its options, the data or the method: tried on its skeleton."""
    options, source, given = plan.model, plan.source, plan.model.checkpoint
    sentinels = 0
    if given is None:
        check_optimizer("model.base.optim", options.base.optim)
        with naming_cause("model.config"):
            config = loading.AutoConfig.for_model(**options.config)
    else:
        config, tokenizer = loading.configuration(given), load_tokenizer(given)
        check_rows(config.get_text_config().vocab_size, tokenizer, checkpoint=given, resize=options.resize)
        loading.find_adapter(given)
        if is_first_process():
            log_parts(Path(given))
        sentinels = len(tokenizers.sentinels(tokenizer))
    objective = loading.objective_name(options.objective, config)
    check_objective(plan, objective)
    with naming_cause(given or "model.config"), torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = loading.AUTO[objective].from_config(config)
    if plan.trainer.attention != "auto":
        with naming_cause(f"trainer.attention={plan.trainer.attention}"):
            model.set_attn_implementation(plan.trainer.attention)
    stand_in: Objective = Causal()  # without a tokenizer, which may not be trained yet
    if objective == "span":
        ids = range(sentinels or tokenizers.SENTINELS)
        stand_in = Span(rate=options.mask_rate, mean=options.mean_span, sentinels=ids, end=0, pad=0, start=0)
    elif objective == "masked":
        stand_in = Masked(DummyTokenizer(config.get_text_config().vocab_size), rate=options.mask_rate)
    if source.isolated:
        check_isolation(model, causal=objective == "causal")
        if source.encoding is None:
            stand_in.isolated = True
        else:
            stand_in = CausalAnswers(stand_in, pad=0, sharing=loading.sharing_of(config))
    loading.check_length(options.length, model, stand_in)
    frozen_parameters(model, plan.freeze)
    if options.resize or (objective == "span" and given and not sentinels):
        check_head(model)
    check_method(plan, model, stand_in)
    return config


def load_tokenizer(checkpoint: str) -> Any:
    """The tokenizer of a checkpoint. Raises ValueError for one that is missing or damaged, and for truncated
    weights of a local folder."""
    folder, instead = Path(checkpoint), "bring the checkpoint here again"
    if folder.is_dir():
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, "pt"):
                    pass
            except Exception as error:  # safetensors has its own exception, which is not an OSError
                raise ValueError(f"{path} is truncated or damaged ({reason(error)}); {instead}") from error
        for path in sorted(folder.glob("pytorch_model*.bin")):
            check_archive(path, instead=instead)
        if not any(path for kind in TOKENIZERS for path in folder.glob(kind)):
            # transformers would make an empty one of the model's type
            raise ValueError(
                f"model.checkpoint={folder} has no tokenizer; allowed: a folder with the files of one, "
                f"{', '.join(TOKENIZERS)}"
            )
    with naming_cause(f"the tokenizer of model.checkpoint={checkpoint}"):
        return loading.load_tokenizer(checkpoint)


def log_parts(folder: Path) -> None:
    """Warns which modules of an exported model with modules per domain are used: transformers reads one
    model."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        *others, last = index["parts"]
        used = f"with the part of {last} alone" if index["attach"] is None else "without any of them"
        advice = f"cpt.adapters.export.load({str(folder)!r}, domain=…)"
        advice += ".save_pretrained(…) makes another a checkpoint" if index["attach"] is None else " has them"
        log.warning("%s has parts for %s; it starts %s: %s", folder, ", ".join([*others, last]), used, advice)
    elif adapter := loading.find_adapter(folder):
        log.info("Merging the adapter %s into the model of %s", adapter.name, folder)


def check_objective(plan: Plan, objective: str) -> None:
    """Raises ValueError for a kind of model that does not go with its options or with what it is to do."""
    options, source = plan.model, plan.source
    name, least = f"model={options.name}", BYTES + tokenizers.SENTINELS
    if objective in ("masked", "span") and options.mask_rate is None:
        kind = "is masked" if objective == "masked" else "learns by span corruption"
        raise ValueError(f"model.mask_rate=null; allowed: above 0 and below 1, as the model {kind}")
    if objective == "span" and options.mean_span is None:
        raise ValueError("model.mean_span=null; allowed: 1 or more, as the model learns by span corruption")
    if objective == "span" and options.checkpoint is None and options.vocabulary < least:
        raise ValueError(
            f"model.vocabulary={options.vocabulary}; allowed: {least} or more, {tokenizers.SENTINELS} of "
            "them sentinels"
        )
    if source.encoding is not None:
        loading.check_answers(objective, isolated=source.isolated)
    else:
        loading.check_text(objective, isolated=source.isolated)
    if source.chats:
        question = "examples with a question and an answer (domains.format=…)"
        if objective in loading.SEQ2SEQ:
            raise ValueError(
                f"{name} does not go with chats, as it has two stacks; allowed: a causal model, or {question}"
            )
        tokenizer = loading.load_tokenizer(options.checkpoint) if options.checkpoint else None
        if tokenizer is None or not tokenizer.chat_template:
            which = (
                "a tokenizer that is learned here" if tokenizer is None else f"that of {options.checkpoint}"
            )
            raise ValueError(
                f"{name} does not go with chats: {which} has no chat template; allowed: "
                f"model=checkpoint of an instruction-tuned model, or {question}"
            )
        check_template(tokenizer)
    if objective == "masked" and plan.probe is not None:
        raise ValueError(
            f"probe=lm_eval asks a model to continue a text, and {name} fills masks; "
            "allowed: probe=none, or a causal model like model=tiny_gpt2"
        )
    if objective != "causal" and plan.mixture.generates and source.encoding is None:
        fills = "masks" if objective == "masked" else "spans"
        raise ValueError(
            f"replay=generated asks a model to write text, and {name} fills {fills}; allowed: "
            "replay=past, or a causal model like model=tiny_gpt2"
        )


def check_method(plan: Plan, model: PreTrainedModel, objective: Objective) -> None:
    """Raises ValueError for a method that cannot be built on a skeleton, does not take the order, or has
    nothing to train."""
    shared, name = build_shared(plan, model, objective), plan.names["method"]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            (module := plan.method.make(shared)).stages(plan.order)
        except ValueError:  # a refusal
            raise
        except Exception as error:  # of an operation that the meta device lacks
            log.debug("method %s was not tried on a skeleton: %s", name, error)
            return
    if plan.trainer.compile and any(mask.limits for mask in module.masks):
        raise ValueError(
            "trainer.compile=true does not go with backend=backward of a mask, which takes maps apart; "
            "allowed: backend=hooks"
        )
    frozen = {id(parameter) for parameter in module.frozen}
    if plan.freeze.only is not None and all(id(each) in frozen for each in module.model.parameters()):
        raise ValueError(
            f"freeze.only={show(plan.freeze.only)} leaves nothing of what method={name} "
            "trains; allowed: null, or what finds some of it"
        )


class DummyTokenizer:
    """Stands for a tokenizer of some size that is not trained yet."""

    mask_token_id = 0
    all_special_ids = (0,)

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return self.entries
