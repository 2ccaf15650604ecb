"""What a plan is computed for in place of a model with weights: its configuration, its objective, and the
choices that `auto` becomes on a kind of device."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from cpt.core.exceptions import InvalidOptionError
from cpt.models import loading
from cpt.models.block_attention import MASKABLE
from cpt.models.objectives import Objective
from cpt.models.quantization import OF_BITSANDBYTES, describe_stored, drop_quantization
from cpt.trainer.auto import Machine, choose_attention, choose_precision
from cpt.trainer.base_dtype import NARROW_DTYPES
from cpt.trainer.check_model import change_config, check_objective, make_stand_in_objective
from cpt.trainer.lightning import naming_cause
from cpt.trainer.options import Precision
from cpt.trainer.plan import Plan
from cpt.trainer.skeleton import build_skeleton

TOKEN_IDS = ("bos_token_id", "pad_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
# Fields of a configuration that transformers would otherwise take from another model.
REQUIRED_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_computed_config(plan: Plan) -> PretrainedConfig:
    """The configuration of a model without its weights. Raises ValueError for one that cannot be read or
    lacks sizes."""
    options = plan.model
    if options.name_or_path is not None:
        config = drop_quantization(loading.load_config(options.name_or_path))
        stored, _ = PretrainedConfig.get_config_dict(options.name_or_path)
        check_sizes(config, stored, key="model.name_or_path", value=options.name_or_path)
    else:
        assert options.config is not None
        settings = {"vocab_size": options.vocab_size, **options.config}
        # Any ids within the vocabulary: those of a class may be beyond it.
        token_ids = {name: 0 for name in TOKEN_IDS if name not in settings}
        with naming_cause("model.config"):
            config = loading.AutoConfig.for_model(**settings, **token_ids)
        check_sizes(config, settings, key="model.config", value=dict(options.config))
    return change_config(plan, config)


def check_sizes(config: PretrainedConfig, settings: Mapping[str, Any], *, key: str, value: Any) -> None:
    """Raises ValueError for a configuration that lacks a size: a class has those of one of its models as
    defaults."""
    text_config = config.get_text_config()
    names_in_class = text_config.attribute_map
    set_names = set(settings)
    for part in settings.values():
        if isinstance(part, Mapping):  # of text, where a model has several modalities
            set_names.update(part)
    missing = []
    for name in REQUIRED_SIZES:
        own_name = names_in_class.get(name, name)
        if hasattr(text_config, name) and not {name, own_name} & set_names:
            missing.append(own_name)
    if missing:
        raise InvalidOptionError(
            key,
            value,
            reason=f"the configuration of a {config.model_type} lacks {', '.join(missing)}",
            allowed="a configuration with the sizes of the model",
        )


def find_quantization(plan: Plan) -> str:
    """How the linear layers of the base are stored: by `model.quantization`, or as in the checkpoint; else
    none."""
    options = plan.model
    if options.quantization != "none" or options.name_or_path is None:
        return options.quantization
    stored = describe_stored(loading.load_config(options.name_or_path))
    return stored if stored in OF_BITSANDBYTES else "none"


def choose_computed_dtype(plan: Plan, config: PretrainedConfig) -> torch.dtype:
    """The type of the weights that no stage changes, as choose_base_dtype of a checkpoint that is stored as
    its configuration says. Whether the class computes the same with them is not tried."""
    options = plan.model
    if options.dtype == "float32" or not plan.method.load().keeps_base:
        return torch.float32
    if options.dtype == "bfloat16":
        return torch.bfloat16
    is_made = (
        options.name_or_path is None
        or options.num_hidden_layers is not None
        or options.pretraining is not None
    )
    return config.dtype if config.dtype in NARROW_DTYPES and not is_made else torch.float32


def make_computed_objective(plan: Plan, config: PretrainedConfig) -> tuple[str, Objective]:
    """The name of the objective, and one that makes batches without a tokenizer. Raises ValueError where the
    model does not go with its options or the data."""
    name = loading.resolve_objective(plan.model.objective, config)
    check_objective(plan, name)
    source = "model.config"
    if plan.model.name_or_path is not None:
        source = f"model.name_or_path={plan.model.name_or_path}"
    skeleton = build_skeleton(config, name, source=source)
    objective = make_stand_in_objective(plan, skeleton, name, num_sentinels=loading.SENTINELS)
    loading.check_length(plan.model.max_seq_length, skeleton, objective)
    return name, objective


def make_computed_machine(plan: Plan, config: PretrainedConfig, *, is_gpu: bool) -> Machine:
    """The machine of one process on a GPU or a CPU; its tensors are those of a CPU, without storage."""
    options = plan.trainer
    device = torch.device("cpu")
    if is_gpu:
        precision: Precision = "bf16-mixed" if options.precision == "auto" else options.precision
        quick_dropout = False
        # Others are installed on the machine of the run, and take as much memory as torch's.
        is_simulated = options.attn_implementation in ("auto", *MASKABLE)
        attention = options.attn_implementation if is_simulated else "sdpa"
    else:
        precision = choose_precision(options, config, device, stored_precision=None)
        is_uncompiled = options.compile is not True
        quick_dropout = is_uncompiled if options.quick_dropout == "auto" else options.quick_dropout
        attention = choose_attention(
            options,
            config,
            device,
            precision=precision,
            quick_dropout=quick_dropout,
            max_seq_length=plan.model.max_seq_length,
        )
    return Machine(
        device=device,
        num_processes=1,
        world_size=1,
        devices=1,
        strategy="auto",
        num_workers=0,
        precision=precision,
        attn_implementation=attention,
        quick_dropout=quick_dropout,
        base_dtype=choose_computed_dtype(plan, config),
    )
