"""ONE: each domain learned alone, from the base. theta_t = argmin L_lm(theta; D_t), started from theta_0.

Its diagonal is domain-adaptive pre-training (Gururangan et al., ACL 2020), the reference of intransigence."""

from collections.abc import Iterable

from cpt.core.schema import Options
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.models.weights import Snapshot


class One(ContinualMethod):
    """Restores the base before each domain."""

    alone = True

    def __init__(self, options: Options, context: MethodContext) -> None:
        super().__init__(options, context)
        self.base = Snapshot(self.model, persistent=False)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.base.restore(self.model)
