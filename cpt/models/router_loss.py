"""The auxiliary losses of the routers of a mixture of experts, from the router logits of the pass that trains
a micro-batch.

    L_balance = E sum_e f_e P_e    (Fedus et al., JMLR 2022, eq. 4 to 6, by the code of the model's class)
    L_z       = mean of (log sum_e exp z_e)^2                                (Zoph et al., 2022, eq. 5)

f_e is the share of tokens that go to expert e, P_e the mean of its probability, z_e its logit, over all
tokens of all routers but padding. The logits are those that transformers returns for
`output_router_logits`."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from cpt.core.exceptions import InvalidOptionError
from cpt.models.block_attention import find_text_masks
from cpt.models.forward import SOURCE_TOKENS, find_body

AUTO = "auto"
# Names of the weight of the load-balancing loss in configurations.
BALANCE_KEYS = ("router_aux_loss_coef", "aux_loss_coef")
Z_KEY = "router_z_loss_coef"
BALANCE_FUNCTION = "load_balancing_loss_func"  # in the modules of transformers' mixtures
BALANCE_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
LOGITS_ARGUMENT = "output_router_logits"


@dataclass(frozen=True)
class RouterWeights:
    """The weights of the two losses in the objective."""

    balance: float = 0
    z: float = 0

    def __bool__(self) -> bool:
        return bool(self.balance or self.z)


NO_ROUTER_LOSS = RouterWeights()


def find_router_weights(setting: float | str, config: PretrainedConfig) -> RouterWeights:
    """The weights for `model.router_aux_loss`: `auto`, those of a configuration; a number, for the
    load-balancing loss; 0, none of either loss."""
    text_config = config.get_text_config()
    configured_balance = 0.0
    for key in BALANCE_KEYS:
        weight = getattr(text_config, key, None)
        if weight:
            configured_balance = weight
            break
    configured_z = getattr(text_config, Z_KEY, None) or 0.0

    if setting == AUTO:
        return RouterWeights(configured_balance, configured_z)
    if setting == 0:
        return NO_ROUTER_LOSS
    return RouterWeights(float(setting), configured_z)


class RouterLoss:
    """Records the router logits of the first pass with gradients of a micro-batch, that on its own text, and
    computes the losses of them. A repeated forward pass in the backward pass is not recorded."""

    def __init__(
        self,
        weights: RouterWeights,
        *,
        balance: Callable[..., Tensor],
        num_experts: int,
        experts_per_token: int,
    ) -> None:
        self.weights = weights
        self.balance = balance
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        # Of the current micro-batch:
        self.logits: tuple[Tensor, ...] | None = None  # by router, [tokens, experts]
        self.text_mask: Tensor | None = None  # [B, T], 0 at padding
        self.is_open = False  # within the recorded pass

    @contextmanager
    def recording(self, model: PreTrainedModel) -> Iterator[None]:
        """The next forward pass with gradients is recorded inside the context."""
        self.logits = None
        self.text_mask = None
        body = find_body(model)
        handles = [
            body.register_forward_pre_hook(self.ask_for_logits, with_kwargs=True),
            body.register_forward_hook(self.take_logits),
        ]
        try:
            yield
        finally:
            self.is_open = False
            for handle in handles:
                handle.remove()

    def ask_for_logits(
        self, body: PreTrainedModel, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The pre-hook of a model's body, which has it return the logits of its routers in training. None:
        the arguments stay as they are."""
        if self.logits is not None or not torch.is_grad_enabled():
            return None
        self.is_open = True
        self.text_mask = find_text_masks(body, inputs)[SOURCE_TOKENS]
        return args, {**inputs, LOGITS_ARGUMENT: True}

    def take_logits(self, body: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook of a model's body: takes the logits out of the output, of which the model would
        compute the loss itself, with an attention mask that may have other axes."""
        if self.is_open:
            self.is_open = False
            self.logits = output.router_logits or ()
            output.router_logits = None
        return output

    def terms(self, share: float | Tensor) -> dict[str, Tensor]:
        """The losses of the recorded pass by name, scalars; empty without a recorded router. Each is
        multiplied by its weight and by `share`: the rows of the micro-batch, relative to the mean over the
        step's micro-batches. The recorded logits are given up."""
        if not self.logits:
            return {}
        terms = {}
        if self.weights.balance:
            loss = self.balance(
                self.logits,
                self.num_experts,
                top_k=self.experts_per_token,
                attention_mask=self.text_mask,
            )
            terms["router_balance"] = self.weights.balance * share * loss
        if self.weights.z:
            terms["router_z"] = self.weights.z * share * mean_squared_log_sum(self.logits, self.text_mask)
        self.logits = None
        return terms


def mean_squared_log_sum(logits: tuple[Tensor, ...], text_mask: Tensor | None) -> Tensor:
    """L_z of the logits of routers [tokens, experts], a scalar, over the tokens where a mask is 1."""
    squares = torch.stack([layer.float().logsumexp(-1).square().flatten() for layer in logits])
    if text_mask is None:
        return squares.mean()
    token_weights = text_mask.flatten().to(squares)
    return (squares @ token_weights).sum() / (len(logits) * token_weights.sum())


def make_router_loss(model: PreTrainedModel, weights: RouterWeights) -> RouterLoss | None:
    """What computes the losses of a model's routers; None without weights, and for a model whose class has
    no load-balancing loss, or has it for encoder and decoder apart."""
    if not weights or not has_router_loss(model):
        return None
    return RouterLoss(
        weights,
        balance=getattr(sys.modules[type(model).__module__], BALANCE_FUNCTION),
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
    )


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether the class of a model computes a load-balancing loss of the router logits of its body."""
    function = getattr(sys.modules[type(model).__module__], BALANCE_FUNCTION, None)
    if function is None or list(inspect.signature(function).parameters) != BALANCE_ARGUMENTS:
        return False
    has_sizes = hasattr(model, "num_experts") and hasattr(model, "num_experts_per_tok")
    return has_sizes and not model.config.is_encoder_decoder


def check_router_loss(model: PreTrainedModel, setting: float | str) -> None:
    """Raises ValueError for a number as `model.router_aux_loss` of a model without such a loss."""
    if setting in (AUTO, 0) or has_router_loss(model):
        return
    raise InvalidOptionError(
        "model.router_aux_loss",
        setting,
        reason=f"a {model.config.model_type} has no load-balancing loss of router logits",
        allowed="auto, 0",
    )
