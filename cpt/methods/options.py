"""Options of cpt.methods, without torch."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from cpt.adapters.options import (
    BottleneckOptions,
    GateOptions,
    LayerLoRAOptions,
    Routing,
    SavedModulesOptions,
    StoredLoRAOptions,
    SummedLoRAOptions,
    Targets,
)
from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import (
    Allowed,
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Number,
    OneOrMore,
    OpenShare,
    Options,
    PerDomain,
    Positive,
    PositiveShare,
    Probability,
    Subset,
    Text,
    config,
    option,
)
from cpt.core.sections import Choice
from cpt.data.replay import ReplayConfig
from cpt.gradient_masks.options import ActsOn, SoftMaskOptions


@config
class PerDomainOptions(Options):
    """Modules in a frozen model: one set for all domains, or one per domain."""

    per_domain: bool = option("use new modules for each domain")
    start: Literal["base", "previous"] = option(
        "start of a domain's module: base (a new one) or previous (a copy of the last)"
    )
    routing: Routing = option("routing (used with per_domain): one of conf/routing")


@config
class AdapterOptions(BottleneckOptions, PerDomainOptions):
    """Options of bottleneck adapters."""


@config
class AGEMOptions(Options):
    buffer_size: Count = option("stored samples of all domains")
    minibatch_size: Count = option("samples per reference gradient, over all processes")
    constraints: Literal["mean", "each"] = option("constraints: one, or one per earlier domain (GEM)")
    margin: NonNegative = option("GEM's memory strength: lower bound of the dual variables v")
    apply_to: Literal["gradient", "update"] = option("what is projected: the gradient, or the update")

    def __post_init__(self) -> None:
        # The margin is a multiple of gradients: added to a step, it would ignore the learning rate.
        if self.margin and self.apply_to == "update":
            raise InvalidOptionError(
                "margin", self.margin, context="with apply_to=update", allowed="0, or apply_to=gradient"
            )


@config
class ContrastOptions(Options):
    """The contrast of DAS and DGA (cpt.methods.das)."""

    contrast: NonNegative = option("lambda: the weight of the contrastive term; 0: none of its passes")
    contrast_text: Literal["uncorrupted", "corrupted"] = option("text of the contrastive passes")
    contrast_dropout: BelowOne | None = option("dropout of the contrastive passes; null: the model's own")
    contrast_samples: PositiveShare = option("share of each micro-batch in the contrastive term")
    contrast_every: Count = option("compute the contrastive loss in every k-th step, with k times its weight")
    temperature: Positive = option("tau: the temperature of the contrastive term")


@config
class ConsolidationOptions(Options):
    """How the importances of weights are measured and merged (cpt.methods.ewc)."""

    strength: NonNegative = option("lambda: the weight of the penalty")
    estimator: Literal["per_sample", "batch"] = option("Fisher estimator: from samples, or from batches")
    merge: Literal["mean", "decay"] = option("how importances of a domain are merged with earlier ones")
    gamma: Probability = option("factor on earlier importances (used with merge=decay)")


Rule = Literal["average", "task_arithmetic", "ties", "dare", "dare_ties", "slerp", "fisher"]


@config
class MergeOptions(Options):
    """How the final weights of domains become one model (cpt.methods.merge)."""

    rule: Rule = option("rule that merges the weights of the domains")
    start: Literal["merged", "base", "previous"] = option("weights that a domain starts from")
    scale: NonNegative = option("lambda (used with task_arithmetic, ties, dare); null: the rule's default")
    density: PositiveShare = option("share of the entries of tau to keep (used with rule=ties)")
    trimmed: Literal["tensor", "model"] = option("trim each tensor, or the model (used with rule=ties)")
    drop: BelowOne = option("p: the probability that an entry is dropped (used with rule=dare)")
    share: Probability = option("u: the share of the newest domain (used with rule=slerp)")
    base: bool = option("include the base model (used with rule=average and slerp)")
    epsilon: Positive = option("added to each entry of F (used with rule=fisher)")
    estimator: Literal["per_sample", "batch"] = option("Fisher estimator (used with rule=fisher)")

    @property
    def has_sign_election(self) -> bool:
        """Whether domains vote for the sign of each entry, as in TIES and in DARE with TIES."""
        return self.rule in ("ties", "dare_ties")


Width = Annotated[Number, Ge(0.001), Le(100)]


@config
class CPTPluginOptions(GateOptions):
    attention: Width = option("inner size of an attention plug-in, as a share of the hidden size")
    ffn: Width = option("inner size of an FFN plug-in, as a share of the hidden size")
    output_relu: bool = option("apply a ReLU after the second layer: the model does not start as the base")
    norms: Literal["per_domain", "frozen"] = option(
        "layer norms: one trained set per domain, or the base's, frozen"
    )
    sparsity: NonNegative = option("weight of the HAT regularizer")
    routing: Routing = option("routing: one of conf/routing")

    @property
    def plugin(self) -> dict[str, Any]:
        """The arguments of `attach_plugins`, which an export repeats."""
        return {"attention": self.attention, "ffn": self.ffn, "output_relu": self.output_relu}


@config
class DGAOptions(SoftMaskOptions, ContrastOptions):
    """Options of DGA, and of DAS except for its domains."""


@config
class BlockExpansionOptions(Options):
    share: PositiveShare = option("new blocks of each stack, as a share of its blocks; at least one")
    blocks: OneOrMore[Natural] | None = option(
        "numbers, from 0, of the blocks that are copied (ADEPT: the least important ones); null: evenly "
        "spread, as many as `share` says",
        default=None,
    )


@config
class DASOptions(DGAOptions):
    domain_importance: bool = option("estimate the importance of each domain after training on it")


@config
class DEMIXOptions(BottleneckOptions):
    experts: Literal["ffn", "adapter"] = option("what an expert is: the FFN of every block, or an adapter")
    start: Literal["nearest", "previous", "base"] = option("expert that a new one is a copy of")
    routing: Routing = option("routing: one of conf/routing")


@config
class DERPPOptions(Options):
    alpha: NonNegative = option("weight of the mean squared error to the stored outputs")
    beta: NonNegative = option("weight of the loss on the stored labels")
    buffer_size: Count = option("stored samples, over all processes")
    minibatch_size: Count | None = option(
        "samples of each of the two draws, over all processes and micro-batches; null: half of the batch"
    )
    matched: Literal["hidden", "logits"] = option("outputs that are matched: logits, or hidden states")
    precision: Literal["float16", "bfloat16", "float32"] = option("precision of the stored outputs")


EWCOptions = ConsolidationOptions
IncLoRAOptions = StoredLoRAOptions
NO_GROWTH: dict[str, float] = {"neurons": 1, "heads": 0, "layers": 0, "hidden": 1}


@config
class ELLEOptions(Options):
    neurons: PerDomain[Annotated[Number, Ge(1), Le(100)]] = option("factor on FFN widths before a domain")
    heads: PerDomain[Natural] = option("added key/value heads, with query heads, before further domains")
    layers: PerDomain[Natural] = option("blocks added to each stack before each further domain")
    hidden: PerDomain[Count] = option("factor on the hidden size before further domains")
    noise: NonNegative = option("noise on copies other than blocks, in standard deviations of the weights")
    recovery: NonNegative = option("recovery steps on earlier text before a domain, as a share of its steps")
    prompt: Natural = option("n: prompt vectors per domain after the first token, or before the encoder's")

    def growth(self, domain: int) -> dict[str, float]:
        """The values of the four growth options before the domain of an index; the first one trains the
        model as it is."""
        if domain == 0:
            return dict(NO_GROWTH)
        return {
            "neurons": select_value_before(domain, self.neurons),
            "heads": select_value_before(domain, self.heads),
            "layers": select_value_before(domain, self.layers),
            "hidden": select_value_before(domain, self.hidden),
        }


def select_value_before(domain: int, values: float | Sequence[float]) -> float:
    """An option's value before the domain of an index, 1 or more. The option is one value for all domains, or
    a list with one value per further domain, whose last one holds for all that follow.

    >>> [select_value_before(domain, (2, 4)) for domain in (1, 2, 3)]
    [2, 4, 4]
    """
    if isinstance(values, Sequence):
        return values[min(domain, len(values)) - 1]
    return values


@config
class EMAOptions(Options):
    decay: BelowOne = option("alpha: the decay of the average, over about 1 / (1 - decay) steps")


@config
class HATOptions(BottleneckOptions, GateOptions):
    form: Literal["full", "adapter"] = option("gates on the units of the model, or on adapters")
    units: Subset[Literal["heads", "neurons", "outputs"]] = option("gated units (used with form=full)")
    shared_parameters: Literal["frozen", "trained"] = option(
        "parameters that no unit owns (embeddings, norms, head), after the first domain"
    )
    apply_to: ActsOn = option("what factors scale: the gradient, the update, or the update and its moments")
    strength: NonNegative = option("c: the weight of the regularizer")
    gate_init: Literal["auto", "open", "normal"] = option(
        "first gate embeddings e: open U(0, 2 std), normal N(0, std^2); auto: open"
    )
    gate_std: Positive | None = option(
        "scale of the first gate embeddings e; null: 1 of open ones, 0.02 of normal"
    )
    gate_rate: Positive | None = option(
        "learning-rate multiplier of the gate embeddings e; null: 0.1 per step if open, 5 if normal"
    )
    routing: Routing = option("routing: one of conf/routing")

    def __post_init__(self) -> None:
        if self.form == "full" and not self.units and self.shared_parameters == "frozen":
            raise InvalidOptionError(
                "shared_parameters", "frozen", reason="without units nothing is trained", allowed="trained"
            )


@config
class KDOptions(Options):
    strength: NonNegative = option("lambda: the weight of the distillation loss")
    temperature: Positive = option("temperature of both distributions")
    distilled: Literal["logits", "hidden"] = option("distillation over the vocabulary, or hidden features")
    teacher: Literal["run", "bf16-mixed"] = option("precision of the teacher's pass: the run's, or faster")


@config
class L2Options(Options):
    strength: NonNegative = option("lambda: the weight of the penalty")
    towards: Literal["previous", "base"] = option("anchor: the weights before the domain, or the base's")


@config
class LifelongMoEOptions(Options):
    num_experts: Natural = option("new experts per mixture and domain; 0: no mixtures")
    moe_every_n_blocks: Count = option("blocks per mixture; the FFN of the last of them becomes a mixture")
    top_k: Count = option("k: experts per token")
    start: Literal["base", "previous", "nearest"] = option("experts that new ones are copies of")
    fade_in: Probability = option("share of the domain's steps over which new experts are faded in")
    dense: Literal["trained", "frozen"] = option("whether parameters outside the mixtures are trained")
    strength: NonNegative = option("lambda: the weight of the KL divergence from the previous model")
    balance: NonNegative = option("alpha: the weight of the load-balancing loss")

    def __post_init__(self) -> None:
        if self.num_experts == 0 and self.dense == "frozen":
            raise InvalidOptionError(
                "num_experts",
                0,
                context="with dense=frozen",
                reason="nothing is trained",
                allowed="1 or more, or dense=trained",
            )


@config
class LoRAOptions(SummedLoRAOptions, PerDomainOptions):
    """Options of LoRA."""

    protected_rank: Natural = option(
        "k: the largest singular values of each weight, with their vectors, that adapters leave as they are "
        "(OPLoRA); 0: none",
        default=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protected_rank == 0:
            return
        self.refuse_dora(reason="with protected_rank above 0 the norms of weights would change")
        self.refuse_pissa(reason="with protected_rank above 0 the largest singular values are not trained")
        reason = "singular directions are those of linear layers"
        if self.embeddings:
            raise InvalidOptionError("embeddings", True, reason=reason, allowed="false, or protected_rank=0")
        if self.target_parameters != "none":
            raise InvalidOptionError(
                "target_parameters",
                self.target_parameters,
                reason=reason,
                allowed="none, or protected_rank=0",
            )


@config
class MASOptions(ConsolidationOptions):
    output: Literal["logits", "hidden"] = option("f: the output whose sensitivity is measured")


@config
class MergeLoRAOptions(MergeOptions, SummedLoRAOptions):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_pissa(reason="the adapter of each further domain starts with product 0")
        if self.export_format == "peft":
            raise InvalidOptionError(
                "export_format", "peft", reason="the adapters are merged", allowed="merged"
            )


@config
class MIGUOptions(Options):
    mask: Choice = option("mask: one of conf/mask")


@config
class MoELoRAOptions(LayerLoRAOptions):
    num_experts: Count = option("number of experts of rank r per layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_dora(reason="a norm is of one product, and the router weights those of all experts")
        self.refuse_pissa(reason="the router weights the products, whose sum would not be the base")


@config
class SDFTOptions(Options):
    strength: Probability = option("lambda: the share of self-distillation in the loss; 0: none")
    divergence: Literal["forward", "reverse"] = option("KL(teacher || student), or KL(student || teacher)")
    teacher_update_rate: Probability = option(
        "alpha: the share of the student in the teacher after a step; 0: the model before the domain"
    )
    prompt: Text = option("what the teacher reads after a question; {demonstration}: the example's answer")
    max_new_tokens: Count = option("tokens of an answer that the student writes, at most")
    skipped_tokens: Natural = option("first tokens of each answer that are not distilled")
    temperature: Positive = option("sampling temperature of the student's answers")
    top_p: PositiveShare = option("nucleus sampling: cumulative probability of the likeliest tokens")

    def __post_init__(self) -> None:
        if self.prompt.count("{demonstration}") != 1:
            raise InvalidOptionError(
                "prompt",
                self.prompt,
                reason="it does not show the answer once",
                allowed="a text with {demonstration}",
            )
        if self.skipped_tokens >= self.max_new_tokens:
            raise InvalidOptionError(
                "skipped_tokens",
                self.skipped_tokens,
                context=f"with max_new_tokens={self.max_new_tokens}",
                reason="no token would be distilled",
                allowed=f"0 to {self.max_new_tokens - 1}",
            )


@config
class NLoRAOptions(StoredLoRAOptions):
    strength: NonNegative = option("lambda: the weight of the penalty")
    penalty: Literal["product", "factors"] = option("penalty on the newest B A, or on its bound from factors")


@config
class OLoRAOptions(StoredLoRAOptions):
    strength: NonNegative = option("lambda_1: the weight of the overlap with earlier adapters")
    penalty: Literal["l1", "squared"] = option("norm of the entries of A_k A_t^T")
    norm: NonNegative = option("lambda_2: the weight of the Frobenius norms of the new adapter")


@config
class OSFOptions(Options):
    protected_share: Probability = option("share of protected singular directions in the first domain")
    growth: Probability = option("additional share for each further domain")
    max_protected_share: Probability = option("upper bound of the protected share")
    min_protected_share: Probability | None = option(
        "protected share of a block that changes all its input; null: alike"
    )
    protected_layers: Literal["blocks", "all"] = option(
        "protect linear layers within the blocks, or all matrices"
    )
    sides: Literal["both", "block"] = option("protect movements in either subspace, or only in both")
    apply_to: Literal["gradient", "update"] = option("what is projected: the gradient, or the update")

    def __post_init__(self) -> None:
        lowest_share = self.min_protected_share
        if lowest_share is not None and lowest_share > self.protected_share:
            raise InvalidOptionError(
                "min_protected_share",
                lowest_share,
                allowed=f"null, or up to protected_share={self.protected_share}",
            )


Tuner = (
    Literal["boft", "delora", "dora", "fourierft", "gralora", "hira", "hra", "ia3"]
    | Literal["ln_tuning", "loha", "lokr", "miss", "oft", "randlora", "vera"]
)


@config
class PeftOptions(SavedModulesOptions, PerDomainOptions):
    tuner: Tuner = option("tuner of peft")
    target_modules: Targets = option("adapted layers: auto, or as method.target_modules of lora")
    arguments: Mapping[str, Any] = option(
        "arguments of the tuner's config, with the names of peft: 'method.arguments={r: 4}'"
    )


@config
class ProgPromptOptions(Options):
    num_virtual_tokens: Natural = option("n: prompt vectors that each domain adds; 0: the base model")
    residual: Count | None = option("bottleneck of the residual layers of the prompt; null: none")
    start: Literal["vocabulary", "previous"] = option("start of a new prompt: random tokens, or the last")
    routing: Routing = option("routing: one of conf/routing")


@config
class PromptOptions(PerDomainOptions):
    num_virtual_tokens: Natural = option("n: prompt vectors; 0: the base model")
    start: Literal["vocabulary", "previous"] = option(  # type: ignore[assignment]
        "start of a new prompt: random tokens, or the last"
    )


@config
class RecAdamOptions(Options):
    strength: NonNegative = option("gamma: the pull, relative to the learning rate")
    annealed: bool = option("anneal from the pull to the loss over the domain")
    middle: Probability = option("t_0: the step where lambda is 1/2, as a share of the domain's steps")
    slope: Positive = option("k: the slope of the sigmoid, times the domain's steps")
    towards: Literal["previous", "base"] = option("anchor: the weights before the domain, or the base's")


@config
class ExperienceReplayOptions(Options):
    mixture: ReplayConfig = option("replay: one of conf/replay")


Every = Annotated[Count | OpenShare, Allowed("above 0 and below 1, or a whole number, 1 or more")]


@config
class ReptileOptions(Options):
    interpolate_every: Every = option(
        "k: steps between interpolations, as a share of the domain's steps or a number"
    )
    share: Probability = option("epsilon: the share of the movement that is kept; 1 equals ncl")


@config
class SAPTOptions(LayerLoRAOptions):
    key: Literal["attention", "cosine"] = option("how a text is compared with an adapter's key")
    query: Literal["embeddings", "encoder"] = option("vectors whose mean represents a text")
    bottleneck: Count = option("rows of W_down (used with key=attention)")
    scale: Positive = option("factor on cosines (used with key=cosine)")
    key_rate: Positive = option("learning rate of the newest key and the query, relative to the adapters'")
    strength: NonNegative = option("lambda: weight of the KL term (key=attention) or 1 - cos (key=cosine)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_dora(reason="a norm is of one product, and attention weights those of all domains")
        self.refuse_pissa(reason="attention weights the products, whose sum would not be the base")


@config
class SIOptions(Options):
    strength: NonNegative = option("c: the weight of the penalty")
    damping: Positive = option("xi: added to the squared distance")


@config
class WiSEFTOptions(Options):
    previous: Probability = option("p: the share of the model before the domain; 0 equals ncl")
