"""Modules in a frozen model, shared by all domains or one set per domain: bottleneck adapters, and tuners of
the peft library."""

from collections.abc import Iterable
from typing import get_args

from transformers import PreTrainedModel

from cpt.adapters.bottleneck import Bottleneck, attach_bottlenecks
from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.lora import attach_tuner, without_tuners
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import AdapterOptions, PeftOptions, Tuner

TUNERS = tuple(name for names in get_args(Tuner) for name in get_args(names))


class Peft(ContinualMethod):
    """Tuners of peft that change a model's layers: IA3 (Liu et al., NeurIPS 2022), VeRA (Kopiczko et al.,
    ICLR 2024), DoRA (Liu et al., ICML 2024), OFT (Qiu et al., NeurIPS 2023), tuning of norms, and others."""

    sharded = False
    options: PeftOptions

    def __init__(self, options: PeftOptions, context: MethodContext) -> None:
        targets, arguments = options.target_modules, options.arguments
        scope = attach_tuner(context.model, options.tuner, targets=targets, arguments=arguments)
        super().__init__(options, context, scope=scope)
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain_params is not None and self.options.start == "base":
            self.domain_params.load_into(self.model, BASE)

    def model_for(self, domain: int) -> PreTrainedModel:
        return without_tuners(super().model_for(domain))


class Adapter(ContinualMethod):
    """Adapters (Houlsby et al., ICML 2019, section 2.1; Pfeiffer et al., EACL 2021).

        A(h) = W_up act(W_down h + b_down) + b_up,    W_down of D / reduction rows

        houlsby    h <- h + A(h)         h: output of a sub-layer's out projection, before dropout and the sum
        pfeiffer   h <- norm(s + A(h))   h = norm(s), s: the last residual sum of a block
                   s <- s + A(s)         in pre-norm blocks, whose sum no norm follows

    Houlsby's follow attention and FFN, or the FFN alone (`ffn`). W_up starts at zero: the first model is the
    base."""

    options: AdapterOptions

    def __init__(self, options: AdapterOptions, context: MethodContext) -> None:
        scope = attach_bottlenecks(context.model, **options.bottleneck)
        super().__init__(options, context, scope=scope)
        self.attached = attach_bottlenecks, options.bottleneck
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.domain_params is not None and self.options.start == "base":
            generator = self.make_generator()
            for part in self.model.modules():
                if isinstance(part, Bottleneck):
                    part.reset(generator)
