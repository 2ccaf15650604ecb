"""MAS, memory aware synapses (Aljundi et al., ECCV 2018, eq. 2 to 4): EWC's penalty with importances that
need no label.

    L(theta)  = L_lm(theta) + lambda/2 sum_i Omega_i (theta_i - theta*_i)^2
    Omega_i   = E_x | d mean_k ||f(x)_k||^2 / d theta_i |      at theta*, in eval mode

f(x)_k are the logits, or the last hidden states, at the k-th scored place of a sample. The mean over its
places keeps a sample's length out of Omega. As in EWC, Omega is joined to that of the domains before
(`merge`); the paper's sum is decay at gamma 1."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from cpt.core.options import option
from cpt.core.rules import number, one_of
from cpt.data.batch import Batch
from cpt.methods.common.options import ConsolidationOptions
from cpt.methods.ewc import EWC
from cpt.models.forward import at
from cpt.models.sensitivity import sensitivity

OUTPUTS = ("logits", "hidden")


@dataclass(frozen=True, kw_only=True)
class MASOptions(ConsolidationOptions):
    """Options of MAS."""

    strength: float = option("lambda, the penalty's weight", number("0 or more"))
    output: str = option("f: what is to stay as it is", one_of(*OUTPUTS))


class MAS(EWC):
    """Pulls each weight back to where the previous domain left it, by how much the outputs depend on it."""

    term = "mas"
    options: MASOptions

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        how = {"estimator": self.options.estimator, "power": 1, "label": "MAS"}
        return sensitivity(self.model, probe, self.squared_norms, **how)

    def squared_norms(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """||f||^2 at each scored position, [K]."""
        logits, hidden = self.objective.outputs(model, batch)
        output = logits if self.options.output == "logits" else at(hidden, batch["positions"])
        return output.float().square().sum(-1)
