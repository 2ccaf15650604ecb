"""The KL divergence of a model's predictions from those that it makes with the weights of the base.

    KL(base || model) = sum over tokens v of p_base(v) log(p_base(v) / p_model(v))     (nats, by position)

Shenfeld et al. (RL's Razor, arXiv 2509.04259, section 4) measure it in this direction, on the inputs of the
new task, as a predictor of what fine-tuning forgets. Distributions are not stored: both are computed for each
batch, and where there are many logits, for one chunk of positions after another."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.core.distributed import is_sharded
from cpt.data.collate import Batch
from cpt.models.chunked_head import divide
from cpt.models.forward import kl_divergence, token_nll
from cpt.models.fsdp import named_weights
from cpt.models.objectives import Objective
from cpt.models.weights import Snapshot, swap_weights

MAX_ENTRIES = 2**24  # log-probabilities of each model at once: five tensors of 64 MB in 32 bits


@dataclass(frozen=True)
class PositionDivergence:
    """At each scored position, [K] nats: the divergence, and the losses of both models on the target."""

    kl: Tensor
    base_nll: Tensor
    nll: Tensor


@torch.no_grad()
def compare_with_base(
    model: PreTrainedModel,
    batch: Batch,
    *,
    objective: Objective,
    base_weights: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> PositionDivergence:
    """The divergence of a model from itself with the weights of the base, in the mode (training or
    evaluation) that it has. `weights` are those that the model is to have instead of its own. Both are by the
    names of parameters."""
    with swap_weights(model, base_weights):
        base_logits, _ = objective.keep_logits(model, batch)

    def compare(logits: Tensor, positions: slice) -> Tensor:
        base = base_logits.select(positions)
        kl = divergence_by_position(base, logits)
        base_nll = token_nll(base, batch, positions)
        nll = token_nll(logits, batch, positions)
        return torch.stack([kl, base_nll, nll], dim=1)  # [k, 3]

    with swap_weights(model, weights):
        values, _ = objective.run(model, batch, lambda logits: logits.values(compare))  # [K, 3]
    kl, base_nll, nll = values.unbind(1)
    return PositionDivergence(kl=kl, base_nll=base_nll, nll=nll)


def divergence_by_position(base: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(base) || softmax(logits)) in nats, [K] from [K, V]. Where both are nearly equal it is as
    small as the rounding of 32 bits, which may make it negative: it is 0 then.

    >>> divergence_by_position(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([0.])
    """
    if len(base) == 0:  # of a process that only takes part in the passes of others
        return base.new_zeros(0, dtype=torch.float32)
    values = []
    for positions in divide(len(base), MAX_ENTRIES // base.shape[-1]):
        values.append(kl_divergence(base[positions], logits[positions]))
    return torch.cat(values).clamp(min=0)


class BaseWeights(Snapshot):
    """The weights that a model had when its method was constructed, but for `constant_names`, which no stage
    changes: with them the model is the base. They are on the CPU, and in no file: each start makes them
    again."""

    def __init__(self, model: nn.Module, *, constant_names: Collection[str]) -> None:
        super().__init__(model, persistent=False, excluded=constant_names)
        self.first_names = frozenset(name for name, _ in model.named_parameters())
        self.offload()

    def complete(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights by name, on the device of the model. Those of adapters that a method has added since
        are 0, so that the adapters change nothing. Rows of a sharded model stay on the CPU."""
        weights = {}
        for name, tensor in self.named().items():
            weights[name] = tensor if is_sharded(tensor) else self.on_module_device(tensor)
        for name, parameter in named_weights(model).items():
            if name not in self.first_names:
                weights[name] = torch.zeros_like(parameter)
        return weights
