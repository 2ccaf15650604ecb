"""Adapters (Houlsby et al., ICML 2019, section 2.1; Pfeiffer et al., EACL 2021).

    A(h) = W_up act(W_down h + b_down) + b_up,    W_down of D / reduction rows

    houlsby    h <- h + A(h)           h: output of a sub-layer's out projection, before dropout and the sum
    pfeiffer   h <- norm(s + A(h))     h = norm(s), s: the last residual sum of a block
               s <- s + A(s)           in pre-norm blocks, whose sum no norm follows

Houlsby's follow attention and FFN, or the FFN alone (`ffn`). Everything else is frozen. W_up starts at zero,
so that the first model is the base."""

from collections.abc import Iterable

from cpt.adapters.bottleneck import Bottleneck, attach_bottlenecks
from cpt.adapters.domain_store import DomainParams
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import AdapterOptions


class Adapter(ContinualMethod):
    """Trains bottleneck adapters: one set for all domains, or one `per_domain`, new or a copy of the last."""

    options: AdapterOptions

    def __init__(self, options: AdapterOptions, context: MethodContext) -> None:
        scope = attach_bottlenecks(context.model, **options.bottleneck)
        super().__init__(options, context, scope=scope)
        self.attached = attach_bottlenecks, options.bottleneck
        if options.per_domain:
            self.use_domain_params(DomainParams(self.model, scope.names), options.routing)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.bank is not None and self.options.start == "base":
            generator = self.drawing()
            for part in self.model.modules():
                if isinstance(part, Bottleneck):
                    part.reset(generator)
