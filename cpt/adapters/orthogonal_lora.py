"""OPLoRA: LoRA that keeps the largest singular triples of each weight (Xiong and Xie, AAAI 2026, arXiv
2510.13003).

    W = U S V^T,    dW = alpha / r (I - U_k U_k^T) B A (I - V_k V_k^T)

so that (W + dW) v_i = s_i u_i and u_i^T (W + dW) = s_i v_i^T for the k largest singular values s_i
(proposition 2). Here A and B are always in their projected form, A = A (I - V_k V_k^T) and
B = (I - U_k U_k^T) B: their gradients are projected before a step, and they themselves after it. This makes
the steps of projections in the forward pass, by any optimizer that works number by number, and exports stay
plain LoRA."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.adapters.lora import find_lora_layers, get_adapted_weight, get_factors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.tensors import PreciseTensors
from cpt.models.quantization import QuantizedLinear
from cpt.optim.rounding import Rounding


class ProtectedDirections(PreciseTensors):
    """The k largest singular directions of each weight that has an adapter: U_k [d_out, k] and V_k [d_in, k]
    as `<layer>.out` and `<layer>.in`, computed at construction. Raises ValueError for a weight with fewer
    than k + 1 singular values."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, *, rank: int) -> None:
        directions: dict[str, Tensor] = {}
        for name, layer in find_lora_layers(model).items():
            base = layer.get_base_layer()
            if isinstance(base, QuantizedLinear):
                weight = base.plain_weight(torch.float32)
            else:
                weight = get_adapted_weight(layer).float()
            if rank >= min(weight.shape):
                raise InvalidOptionError(
                    "method.protected_rank",
                    rank,
                    reason=f"{name} has only {count_noun(min(weight.shape), 'singular value')}",
                    allowed=f"0 to {min(weight.shape) - 1}",
                )
            u, _, v_transposed = torch.linalg.svd(weight, full_matrices=False)
            v = v_transposed.T
            if isinstance(base, Conv1D) or getattr(base, "plain_class", None) is Conv1D:
                u, v = v, u  # its weight is [d_in, d_out]
            directions[f"{name}.out"] = u[:, :rank].contiguous()
            directions[f"{name}.in"] = v[:, :rank].contiguous()
        super().__init__(directions, persistent=False)

    @torch.no_grad()
    def project_adapters(self, model: PreTrainedModel, rounding: Rounding) -> None:
        """Takes the protected directions out of A and B of the newest adapters, in place."""
        directions = self.named()
        for name, layer in find_lora_layers(model).items():
            a, b = get_factors(layer)
            directions_in = self.on_module_device(directions[f"{name}.in"])
            directions_out = self.on_module_device(directions[f"{name}.out"])
            rounding.store(a, remove_from_rows(rounding.widen(a.detach()), directions_in))
            rounding.store(b, remove_from_columns(rounding.widen(b.detach()), directions_out))

    @torch.no_grad()
    def project_gradients(self, model: PreTrainedModel) -> None:
        """Takes the protected directions out of the gradients of A and B, in place."""
        directions = self.named()
        for name, layer in find_lora_layers(model).items():
            a, b = get_factors(layer)
            if a.grad is not None:
                directions_in = self.on_module_device(directions[f"{name}.in"])
                a.grad.copy_(remove_from_rows(a.grad, directions_in))
            if b.grad is not None:
                directions_out = self.on_module_device(directions[f"{name}.out"])
                b.grad.copy_(remove_from_columns(b.grad, directions_out))


def remove_from_rows(matrix: Tensor, directions: Tensor) -> Tensor:
    """M (I - V V^T) of a matrix M [r, d] and directions V [d, k], in the wider of their types."""
    wide_type = torch.promote_types(matrix.dtype, directions.dtype)
    wide_matrix = matrix.to(wide_type)
    v = directions.to(wide_type)
    return wide_matrix - (wide_matrix @ v) @ v.T


def remove_from_columns(matrix: Tensor, directions: Tensor) -> Tensor:
    """(I - U U^T) M of a matrix M [d, r] and directions U [d, k], in the wider of their types."""
    return remove_from_rows(matrix.T, directions).T
