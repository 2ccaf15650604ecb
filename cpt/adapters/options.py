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

KEPT = ("memory", "disk")


@config
class PartsOptions(Options):
    """The parts of learned domains, of methods that keep one for each."""

    keep: Literal["memory", "disk"] = option("where they rest: in memory, or in the file of the last stage")


Targets = Annotated[
    Pattern | Annotated[tuple[Text, ...], MinLen(1)],
    Allowed("all-linear, a regular expression, or a list of names"),
]


@config
class BottleneckOptions(Options):
    """Bottlenecks beside a frozen model (cpt.adapters.bottleneck)."""

    placement: Literal["pfeiffer", "ffn", "houlsby"] = option(
        "behind each block's last residual sum, its FFN, or attention and FFN"
    )
    reduction: Count = option("the hidden size over this is the bottleneck's")
    activation: Literal["relu", "gelu", "silu"] = option("between the two maps")

    @property
    def bottleneck(self) -> dict[str, Any]:
        """What cpt.adapters.bottleneck.attach_bottlenecks is told."""
        return {name: getattr(self, name) for name in ("placement", "reduction", "activation")}


@config
class MapPairOptions(Options):
    """Low-rank pairs beside linear maps (cpt.adapters.lora)."""

    r: Count = option("rank of a pair")
    alpha: Positive = option("the pair's product counts alpha / r times")
    dropout: BelowOne = option("of the trained pair's input")
    targets: Targets = option(
        "which linear maps: all but the head, names or their ends, or a regular expression for whole names"
    )

    @property
    def pair(self) -> dict[str, Any]:
        """What a function that attaches pairs is told; it stands in JSON."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {"r": self.r, "alpha": self.alpha, "dropout": self.dropout, "targets": targets}


@config
class PairOptions(MapPairOptions):
    """Low-rank pairs that are summed, whatever the text."""

    embeddings: bool = option(
        "a pair on the input embedding too; a head tied to it becomes a matrix of its own, frozen"
    )
    exported: Literal["merged", "peft"] = option("a plain model, or the frozen weights and peft's files")

    @property
    def pair(self) -> dict[str, Any]:
        """What cpt.adapters.lora.attach_pairs is told."""
        return super().pair | {"embeddings": self.embeddings}


@config
class StoredPairOptions(PairOptions):
    """Low-rank pairs of which each domain has its own, and all are summed."""

    stored: Literal["merged", "pairs"] = option(
        "earlier pairs: merged into the frozen weights, or beside them"
    )


@config
class GateOptions(Options):
    """Gates on units, a set per domain (cpt.adapters.gates)."""

    s_max: Positive = option("the gates' steepness at a domain's end")
    limit: Positive = option("bound of a gate's |e|")


@config
class Routing(Options):
    """`learned` and `unlearned` say what scores text of domains with and without a part: `domain`, the own
    part; `base` and `last`; `posterior`, the mixture of all; `nearest`, of all the most probable so far, the
    first of equals.

    The prior is `uniform`, `updating`: p <- (1 - decay) p + decay * posterior, row by row, from uniform on,
    or `cached`: the mean posterior of a text's first `cached` rows, uniform until then. Each text begins
    anew, and with several processes each has the prior of its share. `top_k` parts are mixed at each
    position, None for all; `base` says whether the base is among them, as it is before anything is
    learned."""

    learned: Literal["domain", "posterior", "nearest"] = option("what scores text of a learned domain")
    unlearned: Literal["base", "last", "posterior", "nearest"] = option("what scores all other text")
    prior: Literal["uniform", "updating", "cached"] = option("of the posterior")
    decay: Probability = option("of prior=updating: the share of a row's posterior")
    cached: Count = option("of prior=cached: rows")
    top_k: Count | None = option("so many parts are mixed; null: all")
    base: bool = option("whether the base is one of the parts that are mixed")
