"""Options that several methods with parts of the model share."""

from typing import Annotated, Any, Literal

from annotated_types import MinLen

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

    storage: Literal["memory", "disk"] = option(
        "where they rest: in memory, or in the file of the last stage"
    )


Targets = Annotated[
    Pattern | Annotated[tuple[Text, ...], MinLen(1)],
    Allowed("all-linear, a regular expression, or a list of names"),
]


@config
class BottleneckOptions(Options):
    """Bottleneck adapters in a frozen model (cpt.adapters.bottleneck)."""

    placement: Literal["pfeiffer", "ffn", "houlsby"] = option(
        "after each block's last residual sum, its FFN, or attention and FFN"
    )
    reduction_factor: Count = option("the hidden size over this is the bottleneck's")
    activation: Literal["relu", "gelu", "silu"] = option("between the two maps")

    @property
    def bottleneck(self) -> dict[str, Any]:
        """Arguments of cpt.adapters.bottleneck.attach_bottlenecks."""
        return {
            "placement": self.placement,
            "reduction": self.reduction_factor,
            "activation": self.activation,
        }


@config
class MapPairOptions(Options):
    """LoRA adapters on linear layers (cpt.adapters.lora)."""

    r: Count = option("rank of a pair")
    lora_alpha: Positive = option("the pair's product counts lora_alpha / r times")
    lora_dropout: BelowOne = option("of the trained pair's input")
    target_modules: Targets = option("linear layers: all but the head, names or their ends, or an expression")

    @property
    def pair(self) -> dict[str, Any]:
        """Arguments of a function that attaches adapters, as JSON values."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return {"r": self.r, "alpha": self.lora_alpha, "dropout": self.lora_dropout, "targets": targets}


@config
class PairOptions(MapPairOptions):
    """Low-rank pairs that are summed, whatever the text."""

    embeddings: bool = option("a pair on the input embedding too; a head tied to it is untied, frozen")
    exported: Literal["merged", "peft"] = option("a plain model, or the frozen weights and peft's files")

    @property
    def pair(self) -> dict[str, Any]:
        """Arguments of cpt.adapters.lora.attach_lora."""
        return super().pair | {"embeddings": self.embeddings}


@config
class StoredPairOptions(PairOptions):
    """Low-rank pairs of which each domain has its own, and all are summed."""

    stored: Literal["merged", "pairs"] = option("earlier pairs: merged into the frozen weights, or apart")


@config
class GateOptions(Options):
    """Gates on units, a set per domain (cpt.adapters.gates)."""

    s_max: Positive = option("the gates' steepness at a domain's end")
    limit: Positive = option("bound of a gate's |e|")


@config
class Routing(Options):
    """`learned` and `unlearned` say what scores text of domains with and without a part: the own part
    (`domain`); `base` and `last`; `posterior`, the mixture of all; `nearest`, the most probable so far.

    The prior is `uniform`, `updating`: p <- (1 - decay) p + decay * posterior, row by row, or `cached`: the
    mean posterior of a text's first `cached` rows, uniform until then."""

    learned: Literal["domain", "posterior", "nearest"] = option("what scores text of a learned domain")
    unlearned: Literal["base", "last", "posterior", "nearest"] = option("what scores all other text")
    prior: Literal["uniform", "updating", "cached"] = option("of the posterior")
    decay: Probability = option("of prior=updating: the share of a row's posterior")
    cached: Count = option("of prior=cached: rows")
    top_k: Count | None = option("number of modules in the mixture; null: all")
    base: bool = option("whether the base is one of the parts that are mixed")
