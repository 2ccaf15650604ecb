"""Modules in a frozen model, shared by all domains or one set per domain: bottleneck adapters, and tuners of
the peft library."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

from torch import nn
from transformers import PreTrainedModel

from cpt.adapters.bottleneck import Bottleneck, attach_bottlenecks
from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.lora import (
    attach_tuner,
    find_lora_layers,
    get_adapted_weight,
    rewrites_weights,
)
from cpt.adapters.plain_model import copy_without_tuners, save_without_tuners
from cpt.adapters.saved_modules import train_fully
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import AdapterOptions, PeftOptions, Tuner

# `Tuner` is a union of two `Literal`, as it takes two lines.
TUNERS = tuple(chain.from_iterable(map(get_args, get_args(Tuner))))


class Peft(ContinualMethod):
    """Tuners of peft that change a model's layers: IA3 (Liu et al., NeurIPS 2022), VeRA (Kopiczko et al.,
    ICLR 2024), DoRA (Liu et al., ICML 2024), OFT (Qiu et al., NeurIPS 2023), tuning of norms, and others."""

    keeps_base = True
    sharded = False
    takes_quantized = True
    options: PeftOptions

    def __init__(self, options: PeftOptions, context: MethodContext) -> None:
        scope = attach_tuner(
            context.model, options.tuner, targets=options.target_modules, arguments=options.arguments
        )
        saved_names = train_fully(context.model, options.modules_to_save)
        scope = replace(scope, names=(*scope.names, *saved_names))
        super().__init__(options, context, scope=scope)
        self.saved_names = saved_names
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    @property
    def rewritten(self) -> list[nn.Parameter]:
        if not rewrites_weights(self.options.arguments):
            return []
        return [get_adapted_weight(layer) for layer in find_lora_layers(self.model).values()]

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # With one set for all domains, or start=previous, training continues from the model as it is.
        if self.domain_params is not None and self.options.start == "base":
            self.domain_params.load_into(self.model, BASE)

    def model_for(self, domain: int) -> PreTrainedModel:
        return copy_without_tuners(self.copy_for(domain))

    def export(self, folder: Path, order: Sequence[str]) -> str:
        return save_without_tuners(folder, self.model, weights=self.exported_weights(order))


class Adapter(ContinualMethod):
    """Adapters (Houlsby et al., ICML 2019, section 2.1; Pfeiffer et al., EACL 2021).

        A(h) = W_up act(W_down h + b_down) + b_up,    W_down of D / reduction rows

        houlsby    h <- h + A(h)         h: output of a sub-layer's out projection, before dropout and the sum
        pfeiffer   h <- norm(s + A(h))   h = norm(s), s: the last residual sum of a block
                   s <- s + A(s)         in pre-norm blocks, whose sum no norm follows

    Houlsby's follow attention and FFN, or the FFN alone (`ffn`). W_up starts at zero: the first model is the
    base."""

    keeps_base = True
    options: AdapterOptions

    def __init__(self, options: AdapterOptions, context: MethodContext) -> None:
        scope = attach_bottlenecks(context.model, **options.bottleneck)
        super().__init__(options, context, scope=scope)
        self.attached = attach_bottlenecks, options.bottleneck
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        # Drawn again, not loaded as in Peft: each domain has a first layer of its own. All of them start as
        # the base, as the second layer is 0.
        if self.domain_params is not None and self.options.start == "base":
            generator = self.make_generator()
            for module in self.model.modules():
                if isinstance(module, Bottleneck):
                    module.reset(generator)
