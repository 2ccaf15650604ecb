"""PEFT: tuners of the peft library that change a model's layers, over the sequence of domains: IA3 (Liu et
al., NeurIPS 2022), VeRA (Kopiczko et al., ICLR 2024), DoRA (Liu et al., ICML 2024), OFT (Qiu et al., NeurIPS
2023), tuning of norms, and others; shared by all domains, or one per domain."""

from collections.abc import Iterable
from typing import get_args

from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.lora import attach_tuner, without_tuners
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import PeftOptions, Tuner

TUNERS = tuple(name for names in get_args(Tuner) for name in get_args(names))


class Peft(ContinualMethod):
    """Trains the parameters that a tuner adds to a frozen model."""

    sharded = False
    options: PeftOptions

    def __init__(self, options: PeftOptions, context: MethodContext) -> None:
        targets, arguments = options.target_modules, options.arguments
        scope = attach_tuner(context.model, options.tuner, targets=targets, arguments=arguments)
        super().__init__(options, context, scope=scope)
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.bank is not None and self.options.start == "base":
            self.bank.put(self.model, BASE)

    def model_for(self, domain: int) -> PreTrainedModel:
        return without_tuners(super().model_for(domain))
