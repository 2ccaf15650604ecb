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
    """Options of adapters."""

    per_domain: bool = option("a new adapter for each domain")
    start: Literal["base", "previous"] = option("of a new domain's: drawn anew, or a copy of the one before")
    routing: Routing = option("of per_domain: which adapter scores a text: one of conf/routing")


@config
class AGEMOptions(Options):
    """Options of A-GEM and GEM."""

    memory: Count = option("samples of all domains so far that are kept")
    draw: Count = option("samples of a reference gradient, over all processes")
    constraints: Literal["mean", "each"] = option(
        "mean: one, of the loss on all earlier domains (A-GEM); each: one for each of them (GEM)"
    )
    margin: NonNegative = option("the least that v may be (GEM's memory strength)")
    acts_on: Literal["gradient", "update"] = option("what is projected: the gradient, or the step")

    def __post_init__(self) -> None:
        if self.margin and self.acts_on == "update":
            raise ValueError(
                f"margin={self.margin} with acts_on=update; allowed: 0 there, or acts_on=gradient: it is "
                "measured in gradients, and a step is as small as the learning rate"
            )


@config
class ContrastOptions(Options):
    """The contrast of DAS and DGA (cpt.methods.common.contrast)."""

    contrast: NonNegative = option("lambda, the term's weight; 0: none of its passes")
    contrast_text: Literal["uncorrupted", "corrupted"] = option("the text that is contrasted")
    contrast_dropout: BelowOne | None = option("rate of its passes; null: the model's own")
    contrast_samples: PositiveShare = option("share of each batch's samples that are contrasted")
    contrast_every: Count = option(
        "steps from one with the contrast to the next, in which its weight is as many times lambda"
    )
    contrast_negatives: Literal["trained", "fixed"] = option(
        "whether the passes of what was known have gradients"
    )
    temperature: Positive = option("tau")


@config
class ConsolidationOptions(Options):
    """How the importances of weights are measured and joined (cpt.methods.ewc)."""

    strength: NonNegative = option("the penalty's weight")
    estimator: Literal["per_sample", "batch"] = option("of the gradients of samples, or of batches")
    merge: Literal["mean", "decay"] = option("of a domain's importances with those before")
    gamma: Probability = option("of merge=decay: the factor on the importances so far")


@config
class MergingOptions(Options):
    """How the weights that domains end with become one model (cpt.methods.common.merging)."""

    rule: Literal["average", "task_arithmetic", "ties", "dare", "dare_ties", "slerp", "fisher"] = option(
        "how the weights of domains become one model"
    )
    start: Literal["merged", "base", "previous"] = option(
        "what a domain starts from: the merged model, the base, or what the one before has ended with; the "
        "default follows the rule"
    )
    scale: NonNegative = option("lambda, of task_arithmetic, ties and dare; the default follows the rule")
    density: PositiveShare = option("of ties: the share of tau's entries that is kept")
    trimmed: Literal["tensor", "model"] = option("of ties: the largest of each tensor, or of the model")
    drop: BelowOne = option("p of dare: how likely an entry is dropped")
    share: Probability = option("u of slerp: the share of the newest domain")
    base: bool = option("of average and slerp: the base is one of the models")
    epsilon: Positive = option("of fisher: added to each entry of F")
    estimator: Literal["per_sample", "batch"] = option(
        "of fisher: squares the gradients of samples, or of batches"
    )

    @property
    def signs(self) -> bool:
        """Whether domains vote for the sign of each entry."""
        return self.rule in ("ties", "dare_ties")


@config
class CPTPluginOptions(GateOptions):
    """Options of CPT."""

    attention: Annotated[Number, Ge(0.001), Le(100)] = option(
        "inner size of a plug-in beside an attention, as a share of the hidden size"
    )
    ffn: Annotated[Number, Ge(0.001), Le(100)] = option("of one beside an FFN, as a share of the hidden size")
    output_relu: bool = option("a ReLU behind the second map: the first model is then not the base")
    norms: Literal["per_domain", "frozen"] = option(
        "the norms of the blocks: each domain's own, or the base's"
    )
    sparsity: NonNegative = option("weight of HAT's regulariser")
    routing: Routing = option("which domain's gates score a text: one of conf/routing")

    @property
    def plugin(self) -> dict[str, Any]:
        """What cpt.adapters.bottleneck.attach_plugins is told."""
        return {name: getattr(self, name) for name in ("attention", "ffn", "output_relu")}


@config
class DASOptions(SoftMaskOptions, ContrastOptions):
    """Options of DAS."""

    domains: bool = option("importance of each domain learned, by its language-model loss")


@config
class DEMIXOptions(BottleneckOptions):
    """Options of DEMIX; those of bottlenecks count for experts=adapter."""

    experts: Literal["ffn", "adapter"] = option(
        "what a domain has of its own: every block's FFN, or an adapter"
    )
    start: Literal["nearest", "previous", "base"] = option("what a new expert is a copy of")
    routing: Routing = option("which experts score a text: one of conf/routing")


@config
class DERPPOptions(Options):
    """Options of DER++."""

    alpha: NonNegative = option("weight of the mean squared error to the stored outputs")
    beta: NonNegative = option("weight of the loss on the stored labels")
    memory: Count | None = option("samples that are kept, over all processes; null: memory_bytes says it")
    memory_bytes: Positive | None = option("bytes for all that is kept; null: memory says it")
    draw: Count | None = option("samples of each of the two draws in a forward pass; null: half of its batch")
    matched: Literal["hidden", "logits"] = option("the outputs that are held")
    precision: Literal["float16", "bfloat16", "float32"] = option("of the stored outputs")

    def __post_init__(self) -> None:
        if (self.memory is None) == (self.memory_bytes is None):
            told = f"memory={show(self.memory)} and memory_bytes={show(self.memory_bytes)}"
            raise ValueError(f"{told}; allowed: exactly one, the other null")


@config
class DGAOptions(SoftMaskOptions, ContrastOptions):
    """Options of DGA."""


# gained by a model that stays as it is
NOTHING: dict[str, float] = {"neurons": 1, "heads": 0, "layers": 0, "hidden": 1}


@config
class ELLEOptions(Options):
    """Options of ELLE."""

    neurons: PerDomain[Annotated[Number, Ge(1), Le(100)]] = option(
        "what the width of feed-forward networks is multiplied by before each domain after the first"
    )
    heads: PerDomain[Natural] = option(
        "key/value heads that each attention gains there, with the query heads that share them"
    )
    layers: PerDomain[Natural] = option("blocks that each stack gains there")
    hidden: PerDomain[Count] = option(
        "how many times as large the hidden size becomes there, with heads that have no size of their own"
    )
    noise: NonNegative = option(
        "of all but blocks: how far copies are apart, as a share of the weights' standard deviation"
    )
    recovery: NonNegative = option(
        "steps on the text before a domain, ahead of its own and as a share of them"
    )
    prompt: Natural = option("n, vectors of each domain behind the first token, in front with a decoder")

    def growth(self, domain: int) -> dict[str, float]:
        """What the model gains before a domain."""
        if domain < 1:
            return NOTHING
        given = {name: getattr(self, name) for name in NOTHING}
        return {
            name: value[min(domain, len(value)) - 1] if isinstance(value, Sequence) else value
            for name, value in given.items()
        }


@config
class EMAOptions(Options):
    """Options of EMA."""

    decay: BelowOne = option("alpha: about 1 / (1 - decay) steps count")


@config
class EWCOptions(ConsolidationOptions):
    """Options of EWC."""

    strength: NonNegative = option("lambda, the penalty's weight")


@config
class HATOptions(BottleneckOptions, GateOptions):
    """Options of HAT; those of bottlenecks count for form=adapter."""

    form: Literal["full", "adapter"] = option("gates on the model's own units, or on adapters beside it")
    units: Subset[Literal["heads", "neurons", "outputs"]] = option("what is gated in the form full")
    shared: Literal["frozen", "trained"] = option(
        "what no unit owns (embeddings, norms, head): frozen after the first domain, or trained, which "
        "changes what earlier domains compute"
    )
    acts_on: ActsOn = option("what is scaled: gradient, the step, or the step and its moments")
    strength: NonNegative = option("c, the regulariser's weight")
    std: Positive = option("of the e that a domain begins with")
    gate_rate: Positive = option("the learning rate of the gates' e over that of all")
    routing: Routing = option("which domain's gates score a text: one of conf/routing")

    def __post_init__(self) -> None:
        if self.form == "full" and not self.units and self.shared == "frozen":
            raise ValueError("shared=frozen leaves nothing to train without units; allowed: trained")


@config
class IncLoRAOptions(StoredPairOptions):
    """Options of IncLoRA."""


@config
class KDOptions(Options):
    """Options of KD."""

    strength: NonNegative = option("lambda, the weight of what the teacher says")
    temperature: Positive = option("of both distributions")
    distilled: Literal["logits", "hidden"] = option("over the vocabulary, or over the features")
    teacher: Literal["run", "bf16-mixed"] = option("precision of the teacher's pass: the run's, or faster")


@config
class L2Options(Options):
    """Options of L2."""

    strength: NonNegative = option("lambda, the penalty's weight")
    towards: Literal["previous", "base"] = option("the weights before this domain, or the base's")


@config
class LifelongMoEOptions(Options):
    """Options of Lifelong-MoE."""

    experts: Natural = option("new experts of each mixture for a domain; 0: no FFN becomes a mixture")
    every: Count = option("the FFN of the last of so many blocks each becomes a mixture")
    top_k: Count = option("k, experts that compute a token")
    start: Literal["base", "last", "nearest"] = option(
        "what new experts are copies of: the model's FFN, or the experts of the last domain or of that "
        "nearest by the probe's perplexity"
    )
    opening: Probability = option("over which share of a domain's steps new experts open")
    dense: Literal["trained", "frozen"] = option("what is in no mixture")
    strength: NonNegative = option("lambda, the weight of KL from the model before")
    balance: NonNegative = option("alpha, the weight of the balance of experts")

    def __post_init__(self) -> None:
        if self.experts == 0 and self.dense == "frozen":
            raise ValueError("experts=0 with dense=frozen leaves nothing to train; allowed: dense=trained")


@config
class LoRAOptions(PairOptions):
    """Options of LoRA."""

    per_domain: bool = option("a pair for each domain")
    start: Literal["base", "previous"] = option("of a new domain's: drawn anew, or a copy of the one before")
    routing: Routing = option("of per_domain: which pair scores a text: one of conf/routing")


@config
class MASOptions(ConsolidationOptions):
    """Options of MAS."""

    strength: NonNegative = option("lambda, the penalty's weight")
    output: Literal["logits", "hidden"] = option("f: what is to stay as it is")


@config
class MergeOptions(MergingOptions):
    """Options of merging."""


@config
class MergeLoRAOptions(MergingOptions, PairOptions):
    """Options of merging low-rank pairs."""

    truncated: Count | None = option("rank of what is added to the base; null: what it is")

    def __post_init__(self) -> None:
        if self.exported == "peft":
            raise ValueError("exported=peft has no pair to write once pairs are merged; allowed: merged")


@config
class MIGUOptions(Options):
    """Options of MIGU."""

    mask: Choice = option("the mask: one of conf/mask")


@config
class MoELoRAOptions(MapPairOptions):
    """Options of MoELoRA."""

    experts: Count = option("E, pairs of rank r beside each map")


@config
class NLoRAOptions(StoredPairOptions):
    """Options of N-LoRA."""

    strength: NonNegative = option("lambda, the penalty's weight")
    penalty: Literal["product", "factors"] = option("of the newest pair: B A, or a bound from its factors")


@config
class OLoRAOptions(StoredPairOptions):
    """Options of O-LoRA."""

    strength: NonNegative = option("lambda_1, of the overlap with earlier pairs")
    penalty: Literal["l1", "squared"] = option("on the entries of A_k A_t^T")
    norm: NonNegative = option("lambda_2, of the new pair's Frobenius norms")


@config
class OSFOptions(Options):
    """Options of OSF."""

    protected: Probability = option("share of each map's singular directions, in the first domain")
    growth: Probability = option("share that each further domain adds")
    most: Probability = option("share that there is at most")
    least: Probability | None = option(
        "share in a block that would change all it is given, where the others have it by how little they "
        "change; null: all alike"
    )
    protect: Literal["blocks", "all"] = option(
        "which weights: the linear maps within the blocks, or all matrices, embeddings and head too"
    )
    sides: Literal["both", "block"] = option(
        "what is protected: all in either subspace, or only what is in both"
    )
    acts_on: Literal["gradient", "update"] = option("what is projected: the gradient, or the step")

    def __post_init__(self) -> None:
        if self.least is not None and self.least > self.protected:
            told = f"least={self.least} with protected={self.protected}"
            raise ValueError(f"{told}; allowed: at most that, or null")


@config
class PeftOptions(Options):
    """Options of peft's tuners."""

    tuner: Literal[
        "boft",
        "delora",
        "dora",
        "fourierft",
        "gralora",
        "hira",
        "hra",
        "ia3",
        "ln_tuning",
        "loha",
        "lokr",
        "miss",
        "oft",
        "randlora",
        "vera",
    ] = option("which of peft's")
    targets: Targets = option("which layers: auto, or as method.targets of lora")
    arguments: Mapping[str, Any] = option("of the tuner's config, as peft names them")
    per_domain: bool = option("one for each domain")
    start: Literal["base", "previous"] = option("of a new domain's: as at first, or a copy of the one before")
    routing: Routing = option("of per_domain: which one scores a text: one of conf/routing")


@config
class ProgPromptOptions(Options):
    """Options of Progressive Prompts."""

    tokens: Natural = option("n, vectors that each domain adds; 0: the base")
    residual: Count | None = option(
        "rows of W_down of the maps that a prompt is learned through; null: it is learned itself"
    )
    start: Literal["vocabulary", "previous"] = option(
        "of a new domain's: embeddings of random tokens, or a copy"
    )
    routing: Routing = option("which chain scores a text: one of conf/routing")


@config
class PromptOptions(Options):
    """Options of prompt tuning."""

    tokens: Natural = option(
        "n, vectors behind the first token of each sample, in front with a decoder; 0: the base"
    )
    per_domain: bool = option("a prompt for each domain; false: one learns on through all domains")
    start: Literal["vocabulary", "previous"] = option(
        "of a new domain's: embeddings of random tokens, or a copy"
    )
    routing: Routing = option("of per_domain: which prompt scores a text: one of conf/routing")


@config
class RecAdamOptions(Options):
    """Options of RecAdam."""

    strength: NonNegative = option("gamma, the pull's share of the learning rate")
    annealed: bool = option("a step counts more and the pull less, the later in the domain")
    middle: Probability = option("t_0, where lambda is 1/2, as a share of a domain's steps")
    slope: Positive = option("k times the domain's steps")
    towards: Literal["previous", "base"] = option("the weights before this domain, or the base's")


@config
class ExperienceReplayOptions(Options):
    """Options of REPLAY."""

    mixture: ReplayConfig = option("how much earlier text is mixed in: one of conf/replay")


Every = Annotated[Count | OpenShare, Allowed("above 0 and below 1, or a whole number, 1 or more")]


@config
class ReptileOptions(Options):
    """Options of Reptile."""

    every: Every = option(
        "k, optimizer steps between two interpolations: a share of the domain's steps, or a whole number"
    )
    share: Probability = option("epsilon, of the way since the last one; 1: plain ncl")


@config
class SAPTOptions(MapPairOptions):
    """Options of SAPT and MoCL."""

    key: Literal["attention", "cosine"] = option("how a text is compared with a pair's key")
    query: Literal["embeddings", "encoder"] = option("what a text is taken as: the mean of which vectors")
    bottleneck: Count = option("of key=attention: rows of W_down")
    scale: Positive = option("of key=cosine: what cosines are multiplied by")
    key_rate: Positive = option(
        "learning rate of the newest key and the query, as a multiple of that of the pairs"
    )
    strength: NonNegative = option(
        "lambda: of KL on replayed rows with key=attention, of 1 - cos on new ones with key=cosine"
    )


@config
class SIOptions(Options):
    """Options of SI."""

    strength: NonNegative = option("c, the penalty's weight")
    damping: Positive = option("xi, added to the squared way")


@config
class WiSEFTOptions(Options):
    """Options of WiSE-FT."""

    previous: Probability = option("p, the share of the model before the domain; 0: plain ncl")
