"""PEFT: tuners of the peft library that change a model's layers, over the sequence of domains: IA3 (Liu et
al., NeurIPS 2022), VeRA (Kopiczko et al., ICLR 2024), DoRA (Liu et al., ICML 2024), OFT (Qiu et al., NeurIPS
2023), tuning of norms, and others; shared by all domains, or one per domain."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.lora import attach_tuner, without_tuners
from cpt.adapters.options import TARGETS, Routing
from cpt.core.options import Options, option
from cpt.core.rules import MAPPING, YES_NO, one_of
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared

TUNERS = (
    *("boft", "delora", "dora", "fourierft", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr"),
    *("miss", "oft", "randlora", "vera"),
)


@dataclass(frozen=True, kw_only=True)
class PeftOptions(Options):
    """Options of peft's tuners."""

    tuner: str = option("which of peft's", one_of(*TUNERS))
    targets: Any = option("which layers: auto, or as method.targets of lora", TARGETS)
    arguments: Mapping[str, Any] = option("of the tuner's config, as peft names them", MAPPING)
    per_domain: bool = option("one for each domain", YES_NO)
    start: str = option(
        "of a new domain's: as at first, or a copy of the one before", one_of("base", "previous")
    )
    routing: Routing = option("of per_domain: which one scores a text: one of conf/routing")


class Peft(ContinualModule):
    """Trains the parameters that a tuner adds to a frozen model."""

    sharded = False
    options: PeftOptions

    def __init__(self, options: PeftOptions, shared: Shared) -> None:
        how = {"targets": options.targets, "arguments": options.arguments}
        scope = attach_tuner(shared.model, options.tuner, **how)
        super().__init__(options, shared, scope=scope)
        if options.per_domain:
            self.keep_parts(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.bank is not None and self.options.start == "base":
            self.bank.put(self.model, BASE)

    def backbone(self, domain: int) -> PreTrainedModel:
        return without_tuners(super().backbone(domain))
