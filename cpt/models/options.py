"""Options of the base model: a checkpoint as it is, or a new model and how it is pre-trained."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import (
    Allowed,
    Count,
    Folder,
    Int,
    Natural,
    NonNegative,
    Number,
    OpenShare,
    Options,
    Pattern,
    Positive,
    PositiveShare,
    Probability,
    Text,
    check_value,
    config,
    option,
    prefix_errors,
)
from cpt.optim.options import check_optimizer_arguments

BYTES = 261  # the least vocabulary: all bytes, and five special tokens
# Fields of a new model's configuration that are positive whole numbers.
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
)  # fmt: skip
IsPartial = Annotated[Literal[True], Allowed("true: what it optimises is given later")]
ModelType = Annotated[Text, Allowed("a kind of model that transformers has, like modernbert, gpt2, t5")]
Trainable = Annotated[
    Pattern | Annotated[tuple[Pattern, ...], MinLen(1)],
    Allowed("norms, biases, attention, a regular expression, or a list of such"),
]


@config
class Freeze(Options):
    """What of a model is not trained."""

    embeddings: bool = option("freeze the embeddings of tokens, positions and types, and a tied head")
    layers: Natural = option("number of frozen blocks, from the input on (those of an encoder first)")
    trainable: Trainable | None = None  # all but these are frozen; the root's option


NOT_FROZEN = Freeze(embeddings=False, layers=0)


@config
class PretrainingOptions(Options):
    """How a new model, or the head of a checkpoint, is pre-trained on the general text."""

    steps: Natural = option("optimizer steps of a new model", default=0)
    head_steps: Natural | None = option(
        "optimizer steps that train a checkpoint's language-model head alone; 0: a checkpoint without a head "
        "starts with a random one; null: it is refused",
        default=None,
    )
    head_layers: Natural = option("number of last blocks that are trained with the head", default=0)
    batch_size: Count = option("samples per step")
    seed: Natural = option("seed of weights, samples and masks")
    warmup_ratio: Probability = option("warm-up, as a share of the steps; then linear decay to 0")
    gradient_clip_val: NonNegative | None = option("maximum global gradient norm; null: no clipping")
    precision: Literal["32-true", "bf16-mixed"] = option("precision of the pre-training", default="32-true")
    optim: Mapping[str, Any] = option("optimizer, as in conf/optim")

    def __post_init__(self) -> None:
        with prefix_errors("optim"):
            check_value("_target_", self.optim.get("_target_"), Text)
            check_value("_partial_", self.optim.get("_partial_"), IsPartial)
            check_optimizer_arguments(self.optim)


Checkpoint = Annotated[Text, Allowed("a Hugging Face name or a folder")]
TokenizerName = Annotated[Text, Allowed("a folder or a name on the Hub, of a tokenizer with added tokens")]


@config
class ModelOptions(Options):
    """The base model."""

    name: Text = option("name of the model in reports")
    name_or_path: Checkpoint | None = option("name on the Hub or folder; null: a new, pre-trained model")
    num_hidden_layers: Count | None = option(
        "first blocks of the checkpoint that are kept; null: all", default=None
    )
    objective: Literal["masked", "causal", "span", "auto"] = option("auto: by architecture")
    mlm_probability: OpenShare | None = option("share of masked tokens; null: 0.15, none if causal")
    mean_span: Annotated[Number, Ge(1), Le(10_000)] | None = option(
        "mean masked span in tokens; null: 3 of an encoder-decoder, else none", default=None
    )
    max_seq_length: Annotated[Int, Ge(2)] = option("tokens per sequence")
    resize: bool = option(
        "set the rows of tokens that were added to the tokenizer to the mean of their sub-tokens' rows, and "
        "add rows where the embedding is too small",
        default=False,
    )
    tokenizer: TokenizerName | None = option(
        "folder or name on the Hub of the checkpoint's tokenizer with added tokens, whose rows begin as the "
        "mean of their sub-tokens' rows; null: the checkpoint's own",
        default=None,
    )
    quantization: Literal["none", "nf4", "int8"] = option(
        "store the frozen linear layers of a checkpoint in 4 bits (nf4) or 8 bits (int8), for adapters of "
        "LoRA; none: in full",
        default="none",
    )
    vocab_size: Annotated[Int, Ge(BYTES)] | None = option("vocabulary size of a new model's tokenizer")
    rope_parameters: Mapping[str, Any] | None = option(
        "RoPE of a checkpoint, as transformers' config.rope_parameters: rope_type (linear, dynamic, yarn, "
        "llama3, longrope), factor and others, or such a mapping for each type of layer; null: its own",
        default=None,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "type in which weights that no stage trains are kept, of methods with a frozen base; auto: 16 bits "
        "if the checkpoint has its matrices in them, which gives the same results",
        default="auto",
    )
    max_logits: Count | None = option(
        "logits that are computed at once, in training and evaluation: with fewer of them a loss takes less "
        "memory; null: 134,217,728",
        default=None,
    )
    router_aux_loss: Annotated[Literal["auto"] | NonNegative, Allowed("auto, or 0 or more")] = option(
        "weight of the load-balancing loss of a mixture of experts; auto: router_aux_loss_coef of its "
        "config; 0: neither this loss nor the z-loss of router_z_loss_coef",
        default="auto",
    )
    config: Mapping[str, Any] | None = option("config of a new model: model_type and its arguments")
    pretraining: PretrainingOptions | None = option("pre-training of a new model, or of a checkpoint's head")
    lr: NonNegative = option("peak learning rate; methods with modules multiply it")

    @property
    def mask_rate(self) -> float:
        """The share of masked tokens of a model that is not causal; by default BERT's."""
        return 0.15 if self.mlm_probability is None else self.mlm_probability

    @property
    def span_length(self) -> float:
        """The mean length of a corrupted span in tokens; by default T5's."""
        return 3 if self.mean_span is None else self.mean_span

    def __post_init__(self) -> None:
        if self.config is not None and self.name_or_path is None:
            check_value("config.model_type", self.config.get("model_type"), ModelType)
        if self.name_or_path is None and self.num_hidden_layers is not None:
            raise InvalidOptionError(
                "num_hidden_layers",
                self.num_hidden_layers,
                reason="a new model's blocks are in model.config",
                allowed="null",
            )
        if self.name_or_path is None and self.rope_parameters is not None:
            raise InvalidOptionError(
                "rope_parameters",
                self.rope_parameters,
                reason="those of a new model are in model.config",
                allowed="null, or model.config.rope_parameters",
            )
        for name in SIZES:
            if self.config is not None and name in self.config:
                check_value(f"config.{name}", self.config[name], Count)
        if self.name_or_path is None and None in (self.config, self.pretraining, self.vocab_size):
            raise InvalidOptionError(
                "name_or_path",
                None,
                reason=f"{self.name} has no model to build",
                allowed="a checkpoint, or model.config, model.pretraining and model.vocab_size",
            )


@config
class EntropyWeightsOptions(Options):
    """Options of EAFT."""

    alpha: NonNegative = option("exponent of a token's normalized entropy; 0: all tokens weigh 1")
    top_k: Annotated[Int, Ge(2)] = option("number of likeliest tokens over which the entropy is computed")


@config
class ExcessLossSelectionOptions(Options):
    """Options of Rho-1."""

    share: PositiveShare = option("share of tokens that are trained on; 1: all, without a reference")
    ranked: Literal["batch", "sequence"] = option(
        "tokens that are ranked together: those of a process's micro-batch, or of each sequence"
    )
    reference: Folder | None = option("folder of the reference model; null: the base model")


@config
class SampleWeightsOptions(Options):
    """Options of FLOW."""

    temperature: Annotated[Literal["median"] | Positive | None, Allowed("median, null or above 0")] = option(
        "tau, in nats; median: of the base's loss over samples of each domain; null: all weigh 1"
    )
