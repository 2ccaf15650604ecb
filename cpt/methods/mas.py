"""MAS, memory aware synapses (Aljundi et al., ECCV 2018, eq. 2 to 4): EWC's penalty with importances that
need no label.

    L(theta)  = L_lm(theta) + lambda sum_i Omega_i (theta_i - theta*_i)^2
    Omega_i   = E_x | d mean_k ||f(x)_k||^2 / d theta_i |      at theta*, in eval mode

f(x)_k are the logits, or the last hidden states, at the k-th scored position of a sample; the mean over
positions makes Omega independent of its length. Omega is merged over domains as in EWC (`merge`); the paper's
sum is decay at gamma 1."""

from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.methods.base import MethodContext
from cpt.methods.ewc import Consolidation
from cpt.methods.options import MASOptions
from cpt.models.fisher import sensitivity
from cpt.models.forward import at

OUTPUTS = ("logits", "hidden")


class MAS(Consolidation):
    """Pulls each weight to its value after the previous domain, by how much the outputs depend on it."""

    options: MASOptions

    def __init__(self, options: MASOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.importance = NamedTensors(self.zeros())

    @property
    def importances(self) -> NamedTensors:
        return self.importance

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        penalty = self.weighted_distance(2 * self.options.strength)  # first: the order of sums of gradients
        return super().losses(batch) | {"mas": penalty}

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        estimator = self.options.estimator
        return sensitivity(self.model, probe, self.squared_norms, estimator=estimator, power=1, label="MAS")

    def squared_norms(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """||f||^2 at each scored position, [K]."""
        logits, hidden = self.objective.outputs(model, batch)
        output = logits if self.options.output == "logits" else at(hidden, batch["positions"])
        return output.float().square().sum(-1)
