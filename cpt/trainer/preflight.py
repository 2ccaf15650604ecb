"""Pre-flight: check a plan with torch, Lightning and transformers before texts are read; resolve `auto`.

The method is built once on the model's skeleton, on torch's meta device: units that the model lacks, targets
that match nothing, too few positions are reported at once."""

import datetime
import inspect
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from safetensors import safe_open
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from cpt.adapters.export import PARTS_INDEX
from cpt.core.errors import reason
from cpt.core.exceptions import format_value
from cpt.core.memory import keep_free
from cpt.core.processes import (
    cores,
    is_first_process,
    is_job_within_a_sweep,
    is_one_of_several,
    stray_ranks,
)
from cpt.core.schema import check_names, option_types
from cpt.core.sections import check_arguments, load_target
from cpt.core.slurm import check_task_count
from cpt.data.chats import ChatEncoder, prints_date
from cpt.data.options import share_batch
from cpt.data.separator import choose_separator
from cpt.data.sources.base import ASSISTANT, AUTO, NONE, USER, Example, Turn
from cpt.data.text_format import make_text_format
from cpt.data.tokenized_tasks import Encoder
from cpt.loggers.wandb_environment import WandbPlace
from cpt.models import loading
from cpt.models.block_attention import MASKABLE, check_isolation
from cpt.models.memory import drops_attention
from cpt.models.objectives import Causal, CausalAnswers, Masked, Objective, Span
from cpt.models.options import BYTES, ModelOptions
from cpt.models.stored_weights import (
    check_report,
    compare_weights,
    find_weight_files,
    format_names,
    log_unused,
    read_stored_weights,
    weight_names,
)
from cpt.models.trial import make_stand_in, try_model
from cpt.models.vocabulary import check_entries, check_head
from cpt.models.weights import find_frozen
from cpt.trainer.build import build_context
from cpt.trainer.callbacks import make_callbacks, make_loggers
from cpt.trainer.lightning import make_trainer, naming_cause, quiet
from cpt.trainer.options import BF16, FP16_MIXED, TrainerOptions
from cpt.trainer.plan import Plan, with_template_date
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
WIDE = 256  # features from which bf16 pays on a CPU
SHORT = 512  # tokens of a sequence up to which eager attention is faster in 16 bits (benchmarks/attention.py)
TRAINER_ARGUMENTS = inspect.signature(Trainer).parameters
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".onnx",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".npz",
)
SHARD = re.compile(r"-\d+-of-\d+\.")  # in the name of a file
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "merges.txt")


@dataclass(frozen=True)
class Preflight:
    """What a run has before its texts: the plan with `auto` resolved, loggers and callbacks, the number of
    `processes` on this machine and on all (`world`), the device of this one, and the tasks of
    lm-evaluation-harness."""

    plan: Plan
    loggers: dict[str, Logger]
    callbacks: dict[str, Callback]
    processes: int
    world: int
    device: torch.device
    harness: Any  # or None


def prepare(plan: Plan, run: RunDir) -> Preflight:
    """Prepares the process, and what needs no text. Raises ValueError for a plan that cannot be run."""
    quiet()
    keep_free()
    check_optimizer("optim", {"_target_": plan.optim.target, **plan.optim.arguments})
    check_target(run.model)
    config = check_model(plan)
    plan = resolve_chat_date(plan)
    plan = replace(plan, trainer=resolve_devices(plan.trainer))
    if plan.logger.wandb_place is not None:
        check_wandb(plan.logger.wandb_place)
    loggers = make_loggers(plan.logger.others, folder=run.path)
    callbacks = make_callbacks(plan.callbacks)
    check_names(plan.trainer.others, [*option_types(TrainerOptions), *TRAINER_ARGUMENTS], place="trainer")
    # A trainer on this machine, of 32 bits for `auto`, which Lightning may reject.
    tried_as = {name: getattr(plan.trainer, name) for name in ("accelerator", "devices", "strategy")}
    tried_as["precision"] = str(plan.trainer.precision).replace("auto", "32-true")
    arguments = plan.trainer.lightning | {"precision": tried_as["precision"]}
    with naming_cause(" ".join(f"trainer.{name}={value}" for name, value in tried_as.items())):
        tried = make_trainer(
            arguments,
            label="",
            steps=1,
            loggers=list(loggers.values()),
            callbacks=list(callbacks.values()),
        )
    check_task_count(tried.num_devices, plan.trainer.num_nodes)
    check_process_start(tried.world_size, format_value(plan.trainer.devices))
    parts = plan.trainer.accumulate_grad_batches
    share_batch(plan.trainer.batch_size, accumulate=parts, world=tried.world_size)
    prior = getattr(getattr(plan.method.options, "routing", None), "prior", "uniform")
    if tried.world_size > 1 and prior != "uniform":
        told = f"method.routing.prior={prior} is invalid with {tried.world_size} processes"
        raise ValueError(f"{told}: it follows all rows of a text in turn. Allowed: uniform, or one process")
    if tried.world_size == 1 and (stray := stray_ranks()):
        told = f"{stray} is invalid with one process, which would write nothing"
        raise ValueError(f"{told}. Allowed: unset, or trainer.devices and trainer.num_nodes of all processes")
    device, scores = tried.strategy.root_device, run.scores()
    stored = scores.numerics.get("precision") if scores else None
    plan = replace(plan, trainer=resolve_auto(plan, config, device, stored=stored))
    processes = tried.num_devices, tried.num_devices * plan.trainer.num_nodes
    return Preflight(plan, loggers, callbacks, *processes, device, make_harness(plan))


def check_process_start(num_processes: int, devices: str) -> None:
    """Raises ValueError if Lightning would start the other processes of a run in a job whose command line is
    not the run's: each of them would be the whole sweep, or a process of the launcher."""
    if num_processes > 1 and is_job_within_a_sweep() and not is_one_of_several():
        problem = f"trainer.devices={devices} is invalid: this hydra/launcher runs jobs of one process"
        raise ValueError(f"{problem}. Allowed: 1; hydra/launcher=processes or slurm for {num_processes}")


def check_wandb(place: WandbPlace) -> None:
    """Raises ValueError for options and variables that W&B refuses. An installation of W&B that cannot be
    imported is no reason to: the run will say so and continue."""
    try:
        from cpt.loggers.wandb_run import check_settings
    except Exception:  # not ImportError alone: W&B's parts may be of different versions
        return
    check_settings(place)


def resolve_chat_date(plan: Plan) -> Plan:
    """The plan with the day that the chat template prints: `domains.date`, or today at a run's first start.
    Without a day where the template prints none, so that caches do not depend on it."""
    given = plan.model.name_or_path
    if not plan.source.chats or plan.source.encoding is None or given is None:
        return plan
    date, today = plan.source.encoding.date, datetime.date.today().isoformat()
    if prints_date(loading.load_tokenizer(given)):
        if is_first_process():
            log.info("The chat template prints a date: %s (domains.date=YYYY-MM-DD sets it)", date or today)
        return with_template_date(plan, date or today)
    if date is not None and is_first_process():
        log.warning("Ignoring domains.date=%s: the chat template of %s prints no date", date, given)
    return with_template_date(plan, None)


def resolve_devices(options: TrainerOptions) -> TrainerOptions:
    """The options with a number of devices: of `strategy=auto` all GPUs of this machine over which a batch
    divides evenly, by DDP, else one; and of data loader processes."""
    gpus = torch.cuda.device_count() if options.accelerator in ("auto", "gpu", "cuda") else 0
    if (options.strategy, options.devices) == ("auto", "auto"):
        share = options.batch_size // options.accumulate_grad_batches
        devices = max((number for number in range(1, gpus + 1) if share % number == 0), default=1)
        if gpus > 1 and is_first_process():
            told = "Using %d of %d GPUs (strategy=auto, trainer.batch_size=%d)"
            log.info(told, devices, gpus, options.batch_size)
        options = replace(options, devices=devices, strategy="ddp" if devices > 1 else "auto")
    if options.num_workers == "auto":
        used = options.devices if isinstance(options.devices, int) and options.devices > 0 else max(1, gpus)
        options = replace(options, num_workers=min(2, max(0, cores() // used - 1)) if gpus else 0)
    return options


def resolve_auto(
    plan: Plan, config: PretrainedConfig, device: torch.device, *, stored: str | None
) -> TrainerOptions:
    """The trainer's options with a precision, and an attention implementation for the plan's rows.

    `trainer.precision=auto` is what a resumed run has `stored` in its scores.json; else bf16-mixed on a GPU
    with bf16, and 32-true elsewhere. `trainer.attn_implementation=auto` is eager on a CPU if faster."""
    options = plan.trainer
    if options.precision == "auto":
        able = device.type == "cuda" and torch.cuda.is_bf16_supported()
        precision: Any = stored or ("bf16-mixed" if able else "32-true")
        options = replace(options, precision=precision)
        multiplies = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # in bf16; not public
        slow = precision == "32-true" and device.type == "cpu" and not stored
        slow = slow and any(getattr(torch.cpu, name, bool)() for name in multiplies)
        offer = "; bf16-mixed was 1.9 times as fast on such a CPU (docs/studies/performance.md)"
        offer = offer if slow and config.get_text_config().hidden_size >= WIDE else ""
        log.info("Precision (trainer.precision=auto): %s%s", precision, offer)
    if options.precision in FP16_MIXED and device.type == "cpu":
        # Lightning would do the same, and scores.json would name another precision than that of the losses.
        log.warning("Precision: bf16-mixed in place of %s, which a CPU does not support", options.precision)
        options = replace(options, precision="bf16-mixed")
    if options.quick_dropout == "auto":
        options = replace(options, quick_dropout=device.type == "cpu" and not options.compile)
    is_fast = options.quick_dropout and drops_attention(config)
    is_fast = is_fast or (options.precision in BF16 and plan.model.max_seq_length <= SHORT)
    if options.attn_implementation == "auto" and device.type == "cpu" and is_fast:
        log.info("Attention (trainer.attn_implementation=auto): eager, which is faster on a CPU here")
        options = replace(options, attn_implementation="eager")
    return options


def make_harness(plan: Plan) -> Any:
    """The benchmark's tasks, read by the process that measures them: a Harness, or None."""
    if plan.benchmark is None or not is_first_process():
        return None
    log.info("Reading the benchmark's tasks")
    from cpt.evaluation.lm_eval import Harness

    return Harness(plan.benchmark, precision=plan.trainer.precision)


def check_optimizer(section: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for an optimizer that does not take its options: tried with one weight."""
    made_by = load_target(options["_target_"], place=section)
    if isinstance(made_by, type) and not issubclass(made_by, torch.optim.Optimizer):
        allowed = "an optimizer's class, like torch.optim.AdamW"
        raise ValueError(f"{section}._target_={options['_target_']} is invalid. Allowed: {allowed}")
    check_arguments(section, options, given_by_cpt=("params",))
    with naming_cause(section):
        make = instantiate({**options, "_partial_": True}, _convert_="all")
        make([{"params": [nn.Parameter(torch.zeros(1, 1))]}])


def check_model(plan: Plan) -> PretrainedConfig:
    """The model's transformers config. Raises ValueError for a model that cannot be built or loaded, or does
    not go with its options, the data or the method: tried on its skeleton."""
    options, source, checkpoint = plan.model, plan.source, plan.model.name_or_path
    if checkpoint is None:
        assert options.pretraining is not None and options.config is not None
        check_optimizer("model.pretraining.optim", options.pretraining.optim)
        with naming_cause("model.config"):
            config, tokenizer = loading.AutoConfig.for_model(**options.config), None
        num_sentinels = 0
    else:
        config, tokenizer = check_checkpoint(checkpoint, resize=options.resize)
        num_sentinels = len(loading.find_sentinel_ids(tokenizer))

    objective = loading.resolve_objective(options.objective, config)
    check_objective(plan, objective, tokenizer)
    if tokenizer is not None:
        check_tokenizer(plan, objective, tokenizer, config)
    else:
        check_untrained_format(plan, objective)
    stored_config = deepcopy(config)
    if options.layers is not None:
        config = loading.truncate_config(config, options.layers)
    if checkpoint is not None:
        head_steps = None if options.pretraining is None else options.pretraining.head_steps
        check_weights(checkpoint, stored_config, objective, head_steps=head_steps)

    source_key = "model.config" if checkpoint is None else f"model.name_or_path={checkpoint}"
    model = build_skeleton(config, objective, source=source_key)
    if plan.trainer.attn_implementation != "auto":
        with naming_cause(f"trainer.attn_implementation={plan.trainer.attn_implementation}"):
            model.set_attn_implementation(plan.trainer.attn_implementation)
    check_saving(model, checkpoint)

    stand_in = objective_without_tokenizer(options, objective, config, num_sentinels or loading.SENTINELS)
    if source.isolated:
        check_isolation(model, causal=objective == "causal")
    if source.isolated and source.encoding is None:
        stand_in.isolated = True
    elif source.isolated:
        stand_in = CausalAnswers(stand_in, pad=0, sharing=loading.make_sharing(config))
    loading.check_length(options.max_seq_length, model, stand_in)
    try_stand_in(plan, model, stand_in, objective, source=source_key)

    find_frozen(model, plan.freeze)
    if options.resize or (objective == "span" and checkpoint and not num_sentinels):
        check_head(model)
    check_method(plan, model, stand_in)
    return config


def build_skeleton(config: PretrainedConfig, objective: str, *, source: str) -> PreTrainedModel:
    """A model of a configuration on the meta device. Raises ValueError for one of which none can be built;
    `source` is KEY=VALUE."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return loading.AUTO_MODELS[objective].from_config(config)
    except Exception as error:  # whatever a class raises for sizes and names that it does not know
        cause = reason(error)
        for key, value in config.to_dict().items():
            if cause == repr(value):  # a KeyError says the value alone
                cause = f"{key}={value}"
        message = f"no {config.model_type} model can be built of its configuration ({cause})"
        raise ValueError(f"{source} is invalid: {message}. Allowed: what transformers knows") from error


def check_tokenizer(plan: Plan, objective: str, tokenizer: Any, config: PretrainedConfig) -> None:
    """Raises ValueError for a tokenizer that lacks what the objective or the data need."""
    options, source = plan.model, plan.source
    has_answers = source.encoding is not None
    loading.make_objective(options, tokenizer, config, answers=has_answers, isolated=source.isolated)
    check_text_format(plan, tokenizer, config, objective)
    if source.encoding is not None:
        Encoder(tokenizer, options.max_seq_length, source.encoding, objective in loading.SEQ2SEQ)


def objective_without_tokenizer(
    options: ModelOptions, objective: str, config: PretrainedConfig, num_sentinels: int
) -> Objective:
    """An objective of raw text for a skeleton: a tokenizer may not be trained yet."""
    if objective == "span":
        return Span(
            rate=options.mask_rate,
            mean=options.span_length,
            sentinels=range(num_sentinels),
            end=0,
            pad=0,
            start=0,
        )
    if objective == "masked":
        return Masked(DummyTokenizer(config.get_text_config().vocab_size), rate=options.mask_rate)
    return Causal()


def try_stand_in(
    plan: Plan, skeleton: PreTrainedModel, objective: Objective, name: str, *, source: str
) -> None:
    """Raises ValueError for a model that does not run with its objective, or attends to the wrong side: tried
    with random weights of little memory, before the weights of a checkpoint are loaded."""
    with torch.random.fork_rng(devices=[]):
        try:
            stand_in = make_stand_in(skeleton)
        except Exception as error:  # of a class that initializes weights in its own way; its base is tried
            log.debug("Skipping the stand-in of %s: %s", source, error)
            return
        kernel = plan.trainer.attn_implementation
        if kernel in MASKABLE:  # others run on GPUs only
            stand_in.set_attn_implementation(kernel)
        try_model(
            stand_in, objective, name, length=plan.model.max_seq_length, source=source, is_stand_in=True
        )


def check_method(plan: Plan, model: PreTrainedModel, objective: Objective) -> None:
    """Raises ValueError for a method that does not go with the model's skeleton or the order."""
    context, name, module = build_context(plan, model, objective), plan.names["method"], None
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            made = plan.method.make(context)
            made.stages(plan.order)
            module = made
        except ValueError:  # a refusal
            raise
        except Exception as error:  # of an operation that the meta device lacks
            log.debug("Skipping the skeleton of method %s: %s", name, error)
    if module is None:
        return
    if plan.trainer.compile and any(mask.limits for mask in module.masks):
        raise ValueError("trainer.compile=true is invalid with backend=backward. Allowed: backend=hooks")

    frozen, trainable = {id(parameter) for parameter in module.frozen}, plan.freeze.trainable
    is_chosen = trainable is not None or plan.freeze.layers
    if is_chosen and all(id(each) in frozen for each in module.model.parameters()):
        key, allowed = f"freeze.layers={plan.freeze.layers}", "fewer blocks"
        if trainable is not None:
            key, allowed = f"trainable={format_value(trainable)}", "null, or what finds some of it"
        message = f"{key} is invalid: it leaves nothing of what method={name} trains"
        raise ValueError(f"{message}. Allowed: {allowed}")


def check_target(folder: Path) -> None:
    """Raises ValueError where the exported model could not be written: found after all training otherwise."""
    is_taken = (folder.exists() or folder.is_symlink()) and not folder.is_dir()
    if is_taken:
        raise ValueError(f"{folder} is not a folder, but the exported model is written there; move it away")
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{folder} cannot be written, but the exported model belongs there; make it writable"
        )


def check_saving(model: PreTrainedModel, checkpoint: str | None) -> None:
    """Raises ValueError for configurations that transformers loads and would not write at the export."""
    section = "model.config" if checkpoint is None else f"model.name_or_path={checkpoint}"
    keys = [*model.config.to_dict()]
    with TemporaryDirectory() as folder:
        with naming_key(section, CONFIG_NAME, keys):
            model.config.save_pretrained(folder)
        if checkpoint is None or not model.can_generate():
            return
        # A checkpoint may have none, which is an OSError.
        with naming_key(section, GENERATION_CONFIG_NAME, [*vars(GenerationConfig())]), suppress(OSError):
            GenerationConfig.from_pretrained(checkpoint).save_pretrained(folder)


@contextmanager
def naming_key(section: str, file: str, keys: Sequence[str]) -> Iterator[None]:
    """Turns an exception into a one-line ValueError with the key of a file that its message names."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        named = [key for key in keys if re.search(rf"\b{re.escape(key)}\b", message)]
        key = max(named, key=len, default="an option")
        cause = (
            f"{file} has {key}, with which transformers does not save the model again ({message.rstrip('.')})"
        )
        raise ValueError(f"{section} is invalid: {cause}. Allowed: {file} without it") from error


def check_untrained_format(plan: Plan, objective: str) -> None:
    """Raises ValueError for options of raw text that the tokenizer which the run will train cannot have."""
    options = plan.source.text_options
    tokens = list(loading.SPECIAL_TOKENS.values())
    if options.separator not in (AUTO, NONE, *tokens):
        raise ValueError(
            f"domains.separator={options.separator} is invalid: the run trains its tokenizer. "
            f"Allowed: auto, none, {', '.join(tokens)}"
        )
    if options.bos_in_rows is True and objective != "causal":
        raise ValueError("domains.bos_in_rows=true is invalid: the model is not causal. Allowed: auto, false")


def check_text_format(plan: Plan, tokenizer: Any, config: PretrainedConfig, objective: str) -> None:
    """Raises ValueError for options of raw text that a checkpoint's tokenizer does not allow; logs what
    `auto` became."""
    options, given = plan.source.text_options, str(plan.model.name_or_path)
    model_ends = loading.find_end_ids(given, config)
    text_format = make_text_format(tokenizer, options, is_causal=objective == "causal", model_ends=model_ends)
    if not is_first_process():
        return
    separator = choose_separator(tokenizer, options.separator, model_ends=model_ends)
    if separator.is_doubtful:
        log.warning(
            "Separator of documents: %s. Set domains.separator=TOKEN if pre-training had another",
            separator.description,
        )
    else:
        log.info(
            "Separator of documents (domains.separator=%s): %s", options.separator, separator.description
        )
    if text_format.row_start is not None:
        start = text_format.name_of(text_format.row_start)
        log.info("All rows of raw text begin with %s (domains.bos_in_rows=%s)", start, options.bos_in_rows)


def check_checkpoint(checkpoint: str, *, resize: bool) -> tuple[PretrainedConfig, Any]:
    """The config and the tokenizer of a checkpoint. Raises ValueError for a damaged or incomplete one."""
    config, folder = loading.load_config(checkpoint), Path(checkpoint)
    if folder.is_dir():
        check_files(folder, config)
    if folder.is_dir() and not any(path for kind in TOKENIZERS for path in folder.glob(kind)):
        # transformers would make an empty one of the model's type
        allowed = f"a folder with the files of one, {', '.join(TOKENIZERS)}"
        raise ValueError(f"model.name_or_path={folder} is invalid: it has no tokenizer. Allowed: {allowed}")
    with naming_cause(f"the tokenizer of model.name_or_path={checkpoint}"):
        tokenizer = loading.load_tokenizer(checkpoint)
    if not resize:
        check_entries(config.get_text_config().vocab_size, tokenizer, checkpoint=checkpoint)

    adapter = loading.find_adapter(checkpoint)
    if not is_first_process():
        return config, tokenizer
    if ignored := loading.find_ignored_outputs(checkpoint):
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in ignored.items())
        log.info("Ignoring %s in the config.json of %s", settings, checkpoint)
    if adapter is not None:
        log.info("Merging the adapter %s into the model of %s", adapter.name, folder)
    if (folder / PARTS_INDEX).is_file():
        index = json.loads((folder / PARTS_INDEX).read_text(encoding="utf-8"))
        attached = f"with those of {index['parts'][-1]}"
        if index["attach"] is None:
            attached = "without any of them"
        names, advice = ", ".join(index["parts"]), "cpt.adapters.export.load gives others"
        log.warning("Modules of %s are for %s; it starts %s: %s", folder, names, attached, advice)
    return config, tokenizer


def check_files(folder: Path, config: PretrainedConfig) -> None:
    """Raises ValueError for a folder without weights that transformers loads, or with damaged files of
    them."""
    key = f"model.name_or_path={folder}"
    if getattr(config, "quantization_config", None):
        allowed = "*.safetensors or *.bin in 16 or 32 bits"
        raise ValueError(f"{key} is invalid: its weights are quantized. Allowed: {allowed}")
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except Exception as error:  # safetensors has its own exception, which is not an OSError
            message = f"{path} is truncated or damaged ({reason(error)})"
            raise ValueError(f"{message}; copy or download it again") from error
    for path in sorted(folder.glob("*.bin")):
        with path.open("rb") as file:
            begin = file.read(8)
        is_pointer = begin in (b"", b"version ")  # of Git LFS
        is_cut = begin[:2] == b"PK" and not zipfile.is_zipfile(path)
        if is_pointer or is_cut:
            raise ValueError(f"{path} is truncated or damaged; copy or download it again")
    for path in sorted(folder.glob("*.index.json")):
        try:
            shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} is truncated or damaged; copy or download it again") from error
        for name in sorted({*shards}):
            if not (folder / name).is_file():
                message = f"{folder / name} is missing, which {path.name} names"
                raise ValueError(f"{message}; copy or download it again")

    if not any((folder / name).is_file() for name in weight_names(config)):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
        shards = [name for name in others if SHARD.search(name)]
        message = "it has no weights"
        if shards:
            message = f"it has no index of its {len(shards)} shards, like {shards[0]}"
        elif others:
            message = f"it has no weights that transformers loads, only {format_names(others)}"
        allowed = f"a folder with {', '.join(weight_names(config))}"
        raise ValueError(f"{key} is invalid: {message}. Allowed: {allowed}")


def check_weights(
    checkpoint: str, config: PretrainedConfig, objective: str, *, head_steps: int | None
) -> None:
    """Raises ValueError for weights that differ from what config.json describes, and for a missing
    language-model head without `head_steps`; logs what is not used. Only names and shapes are read."""
    stored = read_stored_weights(find_weight_files(checkpoint, config))
    key = f"model.name_or_path={checkpoint}"
    model = build_skeleton(config, objective, source=key)
    report = compare_weights(type(model), config, stored, source=key)
    head = loading.find_head_parameters(model)
    check_report(report, stored, head=head, needs_head=head_steps is None, source=key)
    if not is_first_process():
        return
    log_unused(report, stored, checkpoint)
    if any(name in head for name in report.missing):
        treatment = f"is trained for {head_steps} steps" if head_steps else "starts with random weights"
        log.info("The language-model head, which %s lacks, %s", checkpoint, treatment)


def check_objective(plan: Plan, objective: str, tokenizer: Any) -> None:
    """Raises ValueError for a kind of model that does not go with its options or with what it is to do."""
    options, source, least = plan.model, plan.source, BYTES + loading.SENTINELS
    name, has_answers = f"model={options.name}", source.encoding is not None
    if objective == "causal" and options.mlm_probability is not None:
        told = f"model.mlm_probability={options.mlm_probability} is invalid: the model is causal"
        raise ValueError(f"{told}. Allowed: null")
    if objective != "span" and options.mean_span is not None:
        told = f"model.mean_span={options.mean_span} is invalid: no encoder-decoder corrupts spans"
        raise ValueError(f"{told}. Allowed: null")
    if objective == "span" and options.name_or_path is None and (options.vocab_size or 0) < least:
        needed = f"{least} or more, {loading.SENTINELS} of them sentinels"
        raise ValueError(f"model.vocab_size={options.vocab_size} is invalid. Allowed: {needed}")
    loading.check_packing(objective, isolated=source.isolated, answers=has_answers)
    if source.chats:
        why = "has no chat template" if tokenizer is None or not tokenizer.chat_template else ""
        if why := "is an encoder-decoder" if objective in loading.SEQ2SEQ else why:
            allowed = "an instruction-tuned checkpoint, or examples with a question and an answer"
            raise ValueError(f"model={name} is invalid for chats: it {why}. Allowed: {allowed}")
        turns = (Turn(USER, "a question"), Turn(ASSISTANT, "its answer"))
        example = Example("a question and its answer", "", "its answer", "chat", turns=turns)
        date = source.encoding.date if source.encoding else None
        ChatEncoder(tokenizer, date or datetime.date.today().isoformat()).answers(example)
    if objective == "masked" and plan.benchmark is not None:
        told = f"benchmark=lm_eval is invalid: {name} fills masks and continues no text"
        raise ValueError(f"{told}. Allowed: benchmark=none, or a causal model like model=tiny_gpt2")
    plan.mixture.check_objective(objective, model=name, examples=has_answers)


class DummyTokenizer:
    """Stands for a tokenizer of some size that is not trained yet."""

    mask_token_id = 0
    all_special_ids = (0,)

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return self.entries
