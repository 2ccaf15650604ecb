"""Options that several methods with parts of the model share."""

from typing import Annotated, Any, Literal

from annotated_types import MinLen

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.schema import (
    Allowed,
    BelowOne,
    Count,
    Options,
    Pattern,
    Positive,
    Probability,
    Text,
    config,
    option,
)


@config
class ModulesOptions(Options):
    """The parts of learned domains, of methods that keep one for each."""

    storage: Literal["memory", "disk"] = option("where modules of learned domains are; disk: in its file")


Targets = Annotated[
    Pattern | Annotated[tuple[Text, ...], MinLen(1)],
    Allowed("all-linear, a regular expression, or a list of names"),
]


TargetParameters = Annotated[
    Literal["auto", "none"] | Annotated[tuple[Text, ...], MinLen(1)],
    Allowed("auto, none, or a list of names of parameters"),
]


@config
class BottleneckOptions(Options):
    """Bottleneck adapters in a frozen model (cpt.adapters.bottleneck)."""

    placement: Literal["pfeiffer", "ffn", "houlsby"] = option("after a block, its FFN, or attention and FFN")
    reduction_factor: Count = option("ratio of the hidden size to the size of the bottleneck")
    activation: Literal["relu", "gelu", "silu"] = option("activation between the two layers")

    @property
    def bottleneck(self) -> dict[str, Any]:
        return {
            "placement": self.placement,
            "reduction": self.reduction_factor,
            "activation": self.activation,
        }


@config
class MapPairOptions(Options):
    """LoRA adapters on linear layers (cpt.adapters.lora)."""

    r: Count = option("rank of an adapter")
    lora_alpha: Positive = option("alpha: the update is scaled by lora_alpha / r")
    lora_dropout: BelowOne = option("dropout on the input of the trained adapter")
    target_modules: Targets = option("adapted linear layers, by default all but the head")

    @property
    def targets(self) -> str | list[str]:
        """`target_modules` in types that JSON has."""
        return self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)


@config
class PairOptions(MapPairOptions):
    """Low-rank pairs that are summed, whatever the text."""

    target_parameters: TargetParameters = option(
        "adapted weights of experts, which are parameters and no layers: auto (all), none, or a list of "
        "names or their ends",
        default="none",
    )
    embeddings: bool = option("adapt the input embedding as well; a tied head is untied and frozen")
    exported: Literal["merged", "peft"] = option("export a merged model, or base and peft files")

    def __post_init__(self) -> None:
        if self.target_parameters != "none" and self.lora_dropout:
            raise InvalidOptionError(
                "lora_dropout",
                self.lora_dropout,
                context=f"with target_parameters={format_value(self.target_parameters)}",
                reason="adapters of parameters see no input",
                allowed="0",
            )


@config
class StoredPairOptions(PairOptions):
    """Low-rank pairs of which each domain has its own, and all are summed."""

    stored: Literal["merged", "pairs"] = option("earlier adapters: merged into frozen weights, or kept apart")


@config
class GateOptions(Options):
    """Gates on units, a set per domain (cpt.adapters.gates)."""

    s_max: Positive = option("steepness of the gates at the end of a domain")
    limit: Positive = option("bound on |e| of a gate")


@config
class Routing(Options):
    """`learned` and `unlearned` say what scores text of domains with and without a part: the own part
    (`domain`); `base` and `last`; `posterior`, the mixture of all; `nearest`, the most probable so far.

    The prior is `uniform`, `updating`: p <- (1 - decay) p + decay * posterior, row by row, or `cached`: the
    mean posterior of a text's first `cached` rows, uniform until then."""

    learned: Literal["domain", "posterior", "nearest"] = option("module that evaluates trained domains")
    unlearned: Literal["base", "last", "posterior", "nearest"] = option("module that evaluates other text")
    prior: Literal["uniform", "updating", "cached"] = option("prior of the posterior over modules")
    decay: Probability = option("EMA coefficient of the prior (used with prior=updating)")
    cached: Count = option("sequences that estimate the prior (used with prior=cached)")
    top_k: Count | None = option("number of modules in the mixture; null: all")
    base: bool = option("include the base model in the mixture")
