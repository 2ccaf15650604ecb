"""Options of cpt.methods, without torch."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from cpt.adapters.options import (
    BottleneckOptions,
    GateOptions,
    MapPairOptions,
    PairOptions,
    Routing,
    StoredPairOptions,
    Targets,
)
from cpt.core.schema import (
    Allowed,
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Number,
    OpenShare,
    Options,
    PerDomain,
    Positive,
    PositiveShare,
    Probability,
    Subset,
    config,
    option,
    show,
)
from cpt.core.sections import Choice
from cpt.data.replay import ReplayConfig
from cpt.gradient_masks.options import ActsOn, SoftMaskOptions


@config
class AdapterOptions(BottleneckOptions):
    per_domain: bool = option("a new adapter for each domain")
    start: Literal["base", "previous"] = option("of a new domain's: newly drawn, or a copy of the last")
    routing: Routing = option("with per_domain: which adapter scores a text, one of conf/routing")


@config
class AGEMOptions(Options):
    buffer_size: Count = option("samples of all domains so far that are kept")
    minibatch_size: Count = option("samples of a reference gradient, over all processes")
    constraints: Literal["mean", "each"] = option("one on all earlier domains (A-GEM), or one on each (GEM)")
    margin: NonNegative = option("lower bound of v (GEM's memory strength)")
    apply_to: Literal["gradient", "update"] = option("what is projected: the gradient, or the step")

    def __post_init__(self) -> None:
        if self.margin and self.apply_to == "update":
            raise ValueError(
                f"margin={self.margin} is invalid with apply_to=update. Allowed: 0, or apply_to=gradient"
            )


@config
class ContrastOptions(Options):
    """The contrast of DAS and DGA (cpt.methods.das)."""

    contrast: NonNegative = option("lambda, the term's weight; 0: none of its passes")
    contrast_text: Literal["uncorrupted", "corrupted"] = option("the text that is contrasted")
    contrast_dropout: BelowOne | None = option("rate of its passes; null: the model's own")
    contrast_samples: PositiveShare = option("share of each batch's samples that are contrasted")
    contrast_every: Count = option("steps between two contrasts, whose weight is as many times lambda")
    contrast_negatives: Literal["trained", "fixed"] = option("whether the negatives' pass has gradients")
    temperature: Positive = option("tau")


@config
class ConsolidationOptions(Options):
    """How the importances of weights are measured and merged (cpt.methods.ewc)."""

    strength: NonNegative = option("lambda, the penalty's weight")
    estimator: Literal["per_sample", "batch"] = option("of the gradients of samples, or of batches")
    merge: Literal["mean", "decay"] = option("of a domain's importances with those before")
    gamma: Probability = option("of merge=decay: the factor on the importances so far")


Rule = Literal["average", "task_arithmetic", "ties", "dare", "dare_ties", "slerp", "fisher"]


@config
class MergeOptions(Options):
    """How the final weights of domains become one model (cpt.methods.merge)."""

    rule: Rule = option("how the weights of domains become one model")
    start: Literal["merged", "base", "previous"] = option(
        "where a domain starts; previous: the last domain's end"
    )
    scale: NonNegative = option("lambda, of task_arithmetic, ties and dare; the default follows the rule")
    density: PositiveShare = option("of ties: the share of tau's entries that is kept")
    trimmed: Literal["tensor", "model"] = option("of ties: the largest of each tensor, or of the model")
    drop: BelowOne = option("p of dare: how likely an entry is dropped")
    share: Probability = option("u of slerp: the share of the newest domain")
    base: bool = option("of average and slerp: the base is one of the models")
    epsilon: Positive = option("of fisher: added to each entry of F")
    estimator: Literal["per_sample", "batch"] = option("of fisher: gradients of samples, or of batches")

    @property
    def signs(self) -> bool:
        """Whether domains vote for the sign of each entry."""
        return self.rule in ("ties", "dare_ties")


Width = Annotated[Number, Ge(0.001), Le(100)]


@config
class CPTPluginOptions(GateOptions):
    attention: Width = option("inner size of an attention's plug-in, as a share of the hidden size")
    ffn: Width = option("inner size of an FFN's plug-in, as a share of the hidden size")
    output_relu: bool = option("a ReLU after the second layer: the first model is then not the base")
    norms: Literal["per_domain", "frozen"] = option("norms of the blocks: each domain's own, or the base's")
    sparsity: NonNegative = option("weight of HAT's regulariser")
    routing: Routing = option("which domain's gates score a text: one of conf/routing")

    @property
    def plugin(self) -> dict[str, Any]:
        """Arguments of cpt.adapters.bottleneck.attach_plugins."""
        return {name: getattr(self, name) for name in ("attention", "ffn", "output_relu")}


@config
class DASOptions(SoftMaskOptions, ContrastOptions):
    domains: bool = option("importance of each domain learned, by its language-model loss")


@config
class DEMIXOptions(BottleneckOptions):
    experts: Literal["ffn", "adapter"] = option("of a domain: the FFN of every block, or an adapter")
    start: Literal["nearest", "previous", "base"] = option("what a new expert is a copy of")
    routing: Routing = option("which experts score a text: one of conf/routing")


@config
class DERPPOptions(Options):
    alpha: NonNegative = option("weight of the mean squared error to the stored outputs")
    beta: NonNegative = option("weight of the loss on the stored labels")
    buffer_size: Count | None = option(
        "samples that are kept, over all processes; null: buffer_bytes says it"
    )
    buffer_bytes: Positive | None = option("bytes for all that is kept; null: buffer_size says it")
    minibatch_size: Count | None = option(
        "samples of each of the two draws in a forward pass; null: half of its batch"
    )
    matched: Literal["hidden", "logits"] = option("the outputs that are held")
    precision: Literal["float16", "bfloat16", "float32"] = option("of the stored outputs")

    def __post_init__(self) -> None:
        if (self.buffer_size is None) == (self.buffer_bytes is None):
            raise ValueError(
                f"buffer_size={show(self.buffer_size)} with buffer_bytes={show(self.buffer_bytes)} is "
                f"invalid. "
                "Allowed: exactly one, the other null"
            )


@config
class DGAOptions(SoftMaskOptions, ContrastOptions):
    """Options of DGA."""


NOTHING: dict[str, float] = {"neurons": 1, "heads": 0, "layers": 0, "hidden": 1}  # no growth


@config
class ELLEOptions(Options):
    neurons: PerDomain[Annotated[Number, Ge(1), Le(100)]] = option(
        "factor on FFN widths before each further domain"
    )
    heads: PerDomain[Natural] = option("key/value heads, with their query heads, added to each attention")
    layers: PerDomain[Natural] = option("blocks added to each stack there")
    hidden: PerDomain[Count] = option("factor on the hidden size there; heads need a size of their own")
    noise: NonNegative = option("noise on copies but for blocks, in standard deviations of the weights")
    recovery: NonNegative = option("steps on earlier text ahead of a domain, as a share of its own")
    prompt: Natural = option("n, prompt vectors per domain after the first token; in front with a decoder")

    def growth(self, domain: int) -> dict[str, float]:
        """The model's growth before a domain."""
        given = {name: getattr(self, name) for name in NOTHING} if domain else NOTHING
        grown = given.items()
        return {name: v[min(domain, len(v)) - 1] if isinstance(v, Sequence) else v for name, v in grown}


@config
class EMAOptions(Options):
    decay: BelowOne = option("alpha: about 1 / (1 - decay) steps count")


@config
class EWCOptions(ConsolidationOptions):
    """Options of EWC."""


@config
class HATOptions(BottleneckOptions, GateOptions):
    form: Literal["full", "adapter"] = option("gates on the model's own units, or on adapters")
    units: Subset[Literal["heads", "neurons", "outputs"]] = option("what is gated in the form full")
    shared: Literal["frozen", "trained"] = option(
        "embeddings, norms and head after the first domain; trained: earlier domains change"
    )
    apply_to: ActsOn = option("what is scaled: gradient, the step, or the step and its moments")
    strength: NonNegative = option("c, the regulariser's weight")
    std: Positive = option("of the e that a domain begins with")
    gate_rate: Positive = option("the learning rate of the gates' e over that of all")
    routing: Routing = option("which domain's gates score a text: one of conf/routing")

    def __post_init__(self) -> None:
        if self.form == "full" and not self.units and self.shared == "frozen":
            raise ValueError("shared=frozen is invalid: without units nothing is trained. Allowed: trained")


@config
class IncLoRAOptions(StoredPairOptions):
    """Options of IncLoRA."""


@config
class KDOptions(Options):
    strength: NonNegative = option("lambda, the weight of the distillation")
    temperature: Positive = option("of both distributions")
    distilled: Literal["logits", "hidden"] = option("over the vocabulary, or over the features")
    teacher: Literal["run", "bf16-mixed"] = option("precision of the teacher's pass: the run's, or faster")


@config
class L2Options(Options):
    strength: NonNegative = option("lambda, the penalty's weight")
    towards: Literal["previous", "base"] = option("the weights before this domain, or the base's")


@config
class LifelongMoEOptions(Options):
    num_experts: Natural = option("new experts of each mixture per domain; 0: no mixtures")
    every: Count = option("blocks per mixture, in the last of which the FFN becomes one")
    top_k: Count = option("k, experts that compute a token")
    start: Literal["base", "last", "nearest"] = option(
        "new experts copy the FFN, or the last or (by perplexity) nearest domain's experts"
    )
    opening: Probability = option("share of a domain's steps over which new experts open")
    dense: Literal["trained", "frozen"] = option("all outside of mixtures")
    strength: NonNegative = option("lambda, the weight of KL from the model before")
    balance: NonNegative = option("alpha, the weight of the balance of experts")

    def __post_init__(self) -> None:
        if self.num_experts == 0 and self.dense == "frozen":
            raise ValueError(
                "num_experts=0 is invalid: with dense=frozen nothing is trained. Allowed: dense=trained"
            )


@config
class LoRAOptions(PairOptions):
    per_domain: bool = option("a pair for each domain")
    start: Literal["base", "previous"] = option("of a new domain's pair: newly drawn, or a copy of the last")
    routing: Routing = option("of per_domain: which pair scores a text: one of conf/routing")


@config
class MASOptions(ConsolidationOptions):
    output: Literal["logits", "hidden"] = option("f: what is to stay as it is")


@config
class MergeLoRAOptions(MergeOptions, PairOptions):
    truncated: Count | None = option("rank of what is added to the base; null: what it is")

    def __post_init__(self) -> None:
        if self.exported == "peft":
            raise ValueError("exported=peft is invalid: the adapters are merged. Allowed: merged")


@config
class MIGUOptions(Options):
    mask: Choice = option("the mask: one of conf/mask")


@config
class MoELoRAOptions(MapPairOptions):
    num_experts: Count = option("number of experts of rank r per layer")


@config
class NLoRAOptions(StoredPairOptions):
    strength: NonNegative = option("lambda, the penalty's weight")
    penalty: Literal["product", "factors"] = option("of the newest pair: B A, or a bound from its factors")


@config
class OLoRAOptions(StoredPairOptions):
    strength: NonNegative = option("lambda_1, of the overlap with earlier pairs")
    penalty: Literal["l1", "squared"] = option("on the entries of A_k A_t^T")
    norm: NonNegative = option("lambda_2, of the new pair's Frobenius norms")


@config
class OSFOptions(Options):
    protected: Probability = option("share of each layer's singular directions in the first domain")
    growth: Probability = option("share that each further domain adds")
    most: Probability = option("upper bound of the share")
    least: Probability | None = option("share in a block that changes all of its input; null: alike")
    protect: Literal["blocks", "all"] = option("linear layers within the blocks, or embeddings and head too")
    sides: Literal["both", "block"] = option("protects movements in either subspace, or only in both")
    apply_to: Literal["gradient", "update"] = option("what is projected: the gradient, or the step")

    def __post_init__(self) -> None:
        if self.least is not None and self.least > self.protected:
            raise ValueError(
                f"least={self.least} is invalid. Allowed: at most protected={self.protected}, or null"
            )


Tuner = (
    Literal["boft", "delora", "dora", "fourierft", "gralora", "hira", "hra", "ia3"]
    | Literal["ln_tuning", "loha", "lokr", "miss", "oft", "randlora", "vera"]
)


@config
class PeftOptions(Options):
    tuner: Tuner = option("one of peft's tuners")
    target_modules: Targets = option("which layers: auto, or as method.target_modules of lora")
    arguments: Mapping[str, Any] = option("of the tuner's config, as peft names them")
    per_domain: bool = option("one for each domain")
    start: Literal["base", "previous"] = option("of a new domain's: the initial one, or a copy of the last")
    routing: Routing = option("of per_domain: which one scores a text: one of conf/routing")


@config
class ProgPromptOptions(Options):
    num_virtual_tokens: Natural = option("n, vectors that each domain adds; 0: the base")
    residual: Count | None = option("rows of W_down of the prompt's residual layers; null: none")
    start: Literal["vocabulary", "previous"] = option("a new prompt: embeddings of random tokens, or a copy")
    routing: Routing = option("which chain scores a text: one of conf/routing")


@config
class PromptOptions(Options):
    num_virtual_tokens: Natural = option(
        "n, vectors after the first token, in front with a decoder; 0: the base"
    )
    per_domain: bool = option("a prompt for each domain; false: one for all")
    start: Literal["vocabulary", "previous"] = option("a new prompt: embeddings of random tokens, or a copy")
    routing: Routing = option("of per_domain: which prompt scores a text: one of conf/routing")


@config
class RecAdamOptions(Options):
    strength: NonNegative = option("gamma, the pull's share of the learning rate")
    annealed: bool = option("a step counts more and the pull less, the later in the domain")
    middle: Probability = option("t_0, where lambda is 1/2, as a share of a domain's steps")
    slope: Positive = option("k times the domain's steps")
    towards: Literal["previous", "base"] = option("the weights before this domain, or the base's")


@config
class ExperienceReplayOptions(Options):
    mixture: ReplayConfig = option("how much earlier text is mixed in: one of conf/replay")


Every = Annotated[Count | OpenShare, Allowed("above 0 and below 1, or a whole number, 1 or more")]


@config
class ReptileOptions(Options):
    every: Every = option("k, steps between interpolations: a share of the domain's, or a number")
    share: Probability = option("epsilon of the way since the last one; 1: ncl")


@config
class SAPTOptions(MapPairOptions):
    key: Literal["attention", "cosine"] = option("comparison of a text with a pair's key")
    query: Literal["embeddings", "encoder"] = option("the vectors whose mean represents a text")
    bottleneck: Count = option("of key=attention: rows of W_down")
    scale: Positive = option("of key=cosine: what cosines are multiplied by")
    key_rate: Positive = option("learning rate of the newest key and the query, times that of the pairs")
    strength: NonNegative = option("lambda: of the KL with key=attention, of 1 - cos with key=cosine")


@config
class SIOptions(Options):
    strength: NonNegative = option("c, the penalty's weight")
    damping: Positive = option("xi, added to the squared way")


@config
class WiSEFTOptions(Options):
    previous: Probability = option("p, the share of the model before the domain; 0: plain ncl")
