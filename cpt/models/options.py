"""Options of the base model: a checkpoint as it is, or a new model and how it is pre-trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpt.core.options import Options, option, prefix_errors
from cpt.core.rules import (
    MAPPING,
    TEXT,
    YES_NO,
    Rule,
    between,
    is_list,
    is_pattern,
    is_text,
    number,
    one_of,
    or_null,
    whole,
)
from cpt.optim.options import check_optimizer_arguments

BYTES = 261  # the least vocabulary: all bytes, and five special tokens
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
    *("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
)
PARTIAL = Rule(lambda value: value is True, "true: what it optimises is given later")
TYPE = Rule(is_text, "a kind of model that transformers has, like modernbert, gpt2, t5")


def is_only(value: Any) -> bool:
    return is_pattern(value) or (is_list(value, is_pattern) and len(value) > 0)


@dataclass(frozen=True, kw_only=True)
class Freeze(Options):
    """What of a model is not trained."""

    embeddings: bool = option("tokens, positions and types, with a head that is tied to them", YES_NO)
    layers: int = option("the first so many blocks; an encoder's come before its decoder's", whole(0))
    only: Any = option(
        "all but these: norms, biases, attention (its linear maps), a regular expression for names of "
        "parameters, or a list of such; null: nothing more",
        or_null(Rule(is_only, "norms, biases, attention, a regular expression, or a list of such")),
        default=None,
    )


NOT_FROZEN = Freeze(embeddings=False, layers=0)


@dataclass(frozen=True, kw_only=True)
class BaseOptions(Options):
    """How a new model is pre-trained on the general text."""

    steps: int = option("optimizer steps", whole(0))
    batch_size: int = option("samples per step", whole(1))
    seed: int = option("of weights, samples and masks", whole(0))
    warmup: float = option("share of the steps; then linear decay to 0", number("0 to 1"))
    gradient_clip_val: float | None = option("global norm; null: none", or_null(number("0 or more")))
    optim: Mapping[str, Any] = option("the optimizer, as in conf/optim", MAPPING)

    def check_together(self) -> None:
        with prefix_errors("optim"):
            TEXT.check("_target_", self.optim.get("_target_"))
            PARTIAL.check("_partial_", self.optim.get("_partial_"))
            check_optimizer_arguments(self.optim)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The base model."""

    name: str = option("what the model is called", TEXT)
    checkpoint: str | None = option(
        "a Hugging Face name or a folder; null: built from config, pre-trained as base says",
        or_null(Rule(is_text, "a Hugging Face name or a folder")),
    )
    objective: str = option("auto: what the architecture is for", one_of("masked", "causal", "span", "auto"))
    mask_rate: float | None = option(
        "share of tokens that are masked, or hidden in spans; null: for causal models",
        or_null(number("above 0 and below 1")),
    )
    mean_span: float | None = option(
        "mean tokens of a hidden span; null: for other models", or_null(between(1, 10_000)), default=None
    )
    length: int = option("tokens per sample", whole(2))
    resize: bool = option(
        "rows are added to an embedding that is too small for the tokenizer", YES_NO, default=False
    )
    vocabulary: int | None = option("of a new model: entries of its tokenizer", or_null(whole(BYTES)))
    config: Mapping[str, Any] | None = option(
        "of a new model: model_type and its arguments, as transformers takes them", or_null(MAPPING)
    )
    base: BaseOptions | None = option(
        "of a new model: its pre-training; ignored with a checkpoint", or_null(MAPPING), options=BaseOptions
    )
    lr: float = option("peak learning rate; methods that train parts multiply it", number("0 or more"))

    def check_together(self) -> None:
        if self.config is not None and self.checkpoint is None:
            TYPE.check("config.model_type", self.config.get("model_type"))
        for name in SIZES:
            if name in (self.config or {}):
                whole(1).check(f"config.{name}", self.config[name])
        if self.checkpoint is None and (self.config is None or self.base is None or self.vocabulary is None):
            raise ValueError(
                f"checkpoint=null of {self.name} is nothing to start from; allowed: a Hugging Face name or a "
                "folder, or model.config, model.base and model.vocabulary"
            )
