"""Options that several methods with parts of the model share."""

import math
import re
from typing import Annotated, Any, Literal

from annotated_types import MinLen, Predicate

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

    storage: Literal["memory", "disk"] = option(
        "where modules of trained domains are kept; disk: mapped from the stage file"
    )


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


SavedModules = Annotated[
    tuple[Text, ...], Allowed("a list of embeddings, head, and names of modules or ends of names")
]
Initialization = Annotated[
    bool | Annotated[str, Predicate(re.compile(r"gaussian|pissa(_niter_[1-9]\d*)?").fullmatch)],
    Allowed("true, gaussian, pissa, pissa_niter_N with a number of iterations N"),
]


@config
class SavedModulesOptions(Options):
    """Modules of the frozen model that are trained (cpt.adapters.saved_modules)."""

    modules_to_save: SavedModules = option(
        "modules that are trained fully in addition to the adapters: embeddings, head, or names of modules "
        "or their ends",
        default=(),
    )


@config
class LayerLoRAOptions(SavedModulesOptions):
    """LoRA adapters on linear layers (cpt.adapters.lora)."""

    r: Count = option("rank of an adapter")
    lora_alpha: Positive = option("alpha: the update is scaled by lora_alpha / r")
    lora_dropout: BelowOne = option("dropout on the input of the trained adapter")
    target_modules: Targets = option("adapted linear layers, by default all but the head")
    use_rslora: bool = option("scale the update by lora_alpha / sqrt(r) (rsLoRA)", default=False)
    use_dora: bool = option(
        "train the norm of each output's weights apart from its direction (DoRA)", default=False
    )
    init_lora_weights: Initialization = option(
        "start of an adapter: true (product 0, A uniform), gaussian (product 0, A normal), pissa (the "
        "largest singular values of the weights, which leave the frozen ones), pissa_niter_N (the same by "
        "N iterations, much faster)",
        default=True,
    )

    @property
    def alpha(self) -> float:
        """alpha of plain LoRA with the same scale: rsLoRA has alpha / sqrt(r) = (alpha sqrt(r)) / r."""
        return self.lora_alpha * math.sqrt(self.r) if self.use_rslora else self.lora_alpha

    @property
    def has_pissa(self) -> bool:
        return isinstance(self.init_lora_weights, str) and self.init_lora_weights.startswith("pissa")

    def __post_init__(self) -> None:
        if self.init_lora_weights is False:
            raise InvalidOptionError(
                "init_lora_weights",
                False,
                reason="the first model would not be the base",
                allowed="true, gaussian, pissa, pissa_niter_N",
            )

    def refuse_dora(self, *, reason: str) -> None:
        """Raises ValueError for DoRA, in a method of which it cannot be a part."""
        if self.use_dora:
            raise InvalidOptionError("use_dora", True, reason=reason, allowed="false")

    def refuse_pissa(self, *, reason: str) -> None:
        """Raises ValueError for PiSSA, in a method of which it cannot be a part."""
        if self.has_pissa:
            raise InvalidOptionError(
                "init_lora_weights", self.init_lora_weights, reason=reason, allowed="true, gaussian"
            )

    @property
    def targets(self) -> str | list[str]:
        """`target_modules` in types that JSON has."""
        return self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)


@config
class SummedLoRAOptions(LayerLoRAOptions):
    """LoRA adapters that are summed, whatever the text."""

    target_parameters: TargetParameters = option(
        "adapted weights of experts, which are parameters and no layers: auto (all), none, or a list of "
        "names or their ends",
        default="none",
    )
    embeddings: bool = option("adapt the input embedding as well; a tied head is untied and frozen")
    export_format: Literal["merged", "peft"] = option("export a merged model, or base and peft files")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_parameters != "none" and self.lora_dropout:
            raise InvalidOptionError(
                "lora_dropout",
                self.lora_dropout,
                context=f"with target_parameters={format_value(self.target_parameters)}",
                reason="adapters of parameters see no input",
                allowed="0",
            )
        if self.embeddings:
            self.refuse_dora(reason="with embeddings=true one adapter is of no linear layer")
            self.refuse_pissa(reason="with embeddings=true one adapter is of no linear layer")
        if self.target_parameters != "none":
            self.refuse_dora(reason="with target_parameters adapters are of parameters and no layers")
            self.refuse_pissa(reason="with target_parameters adapters are of parameters and no layers")


@config
class StoredLoRAOptions(SummedLoRAOptions):
    """LoRA adapters of which each domain has its own, and all are summed."""

    adapter_storage: Literal["merged", "separate"] = option(
        "earlier adapters: merged into the frozen weights, or kept separate"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_dora(reason="the products of all domains are summed, and a norm is of one of them")
        self.refuse_pissa(reason="the adapter of each further domain starts with product 0")


@config
class GateOptions(Options):
    """Gates on units, a set per domain (cpt.adapters.gates)."""

    s_max: Positive = option("steepness of the gates at the end of a domain")
    gate_limit: Positive = option("bound on |e| of a gate")


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

    @property
    def is_mixture(self) -> bool:
        """Whether several modules may score a text."""
        return not {self.learned, self.unlearned}.isdisjoint(("posterior", "nearest"))
