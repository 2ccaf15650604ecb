"""What the log says before training of the losses of a router, and of what adapters and masks do not reach:
mixtures of experts, and the mixers of hybrids."""

import logging
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from cpt.adapters.lora import find_adapter_reach, find_kernel_layers
from cpt.core.exceptions import format_value
from cpt.core.messages import abbreviate
from cpt.core.processes import is_first_process
from cpt.methods.base import ContinualMethod
from cpt.methods.options import HATOptions
from cpt.models.router_loss import find_router_weights
from cpt.models.units import find_mixer_weights, find_mixture_weights, has_experts
from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)


def log_experts(plan: Plan, module: ContinualMethod) -> None:
    """Logs the losses of the router, the share of weights that adapters reach and the share that masks do
    not."""
    if not is_first_process():
        return
    has_router = has_experts(module.model)
    if has_router and plan.names["method"] != "none":
        num_micro_batches = plan.trainer.accumulate_grad_batches
        log_router_loss(plan.model.router_aux_loss, module, num_micro_batches=num_micro_batches)
    if has_router:
        log_adapter_reach(module.model)
    log_kernel_layers(module.model)
    log_mask_reach(module, find_mixture_weights(module.model), kind="mixtures of experts")
    log_mask_reach(module, find_mixer_weights(module.model), kind="mixers with a convolution")


def log_router_loss(setting: float | str, module: ContinualMethod, *, num_micro_batches: int) -> None:
    """Logs the weights of the losses of a router (`model.router_aux_loss`), or why there are none."""
    model_type = module.model.config.model_type
    weights = find_router_weights(setting, module.model.config)
    if setting == 0:
        log.info("Training without losses of the router (model.router_aux_loss=0)")
    elif not weights:
        log.info("Training without losses of the router: the config of this %s weights none", model_type)
    elif module.router_loss is None:
        log.warning(
            "Training without the load-balancing loss of the router, which the config of this %s weights "
            "with %s: transformers has no function for it",
            model_type,
            format_value(weights.balance),
        )
    else:
        parts = []
        if weights.balance:
            parts.append(f"its load-balancing loss times {format_value(weights.balance)}")
        if weights.z:
            parts.append(f"its z-loss times {format_value(weights.z)}")
        scope = ", of each micro-batch" if num_micro_batches > 1 else ""
        log.info(
            "Training with losses of the router (model.router_aux_loss=%s): %s%s",
            setting,
            " and ".join(parts),
            scope,
        )


def log_adapter_reach(model: PreTrainedModel) -> None:
    """Logs the share of weights that adapters reach, if not the experts."""
    reach = find_adapter_reach(model)
    if reach is None or not reach.unreached_experts:
        return
    log.warning(
        "The adapters reach %.1f %% of the weights without embeddings: not the experts (%s), which "
        "method.target_parameters=auto of lora and the methods like it adapts",
        100 * reach.adapted / reach.total,
        abbreviate([*reach.unreached_experts]),
    )


def log_kernel_layers(model: PreTrainedModel) -> None:
    """Logs the layers that adapters leave out as kernels read their weights."""
    names = find_kernel_layers(model)
    if names and find_adapter_reach(model) is not None:
        log.info("No adapters in layers whose weights are read by kernels of Mamba (%s)", abbreviate(names))


def log_mask_reach(module: ContinualMethod, weights: Mapping[str, nn.Parameter], *, kind: str) -> None:
    """Logs the share of the blocks' trained weights that masks leave out, if they leave out weights of this
    `kind` of module."""
    masked_ids = set[int]()
    for mask in module.masks:
        masked_ids.update(id(weight) for weight in mask.masked_weights())
    if not masked_ids:
        return

    frozen_ids = {id(parameter) for parameter in module.frozen}
    unmasked = {}
    for name, parameter in weights.items():
        is_trained = parameter.requires_grad and id(parameter) not in frozen_ids
        if is_trained and id(parameter) not in masked_ids:
            unmasked[name] = parameter
    if not unmasked:
        return

    num_masked = 0
    for parameter in module.model.parameters():
        if id(parameter) in masked_ids:
            num_masked += parameter.numel()
    num_unmasked = sum(parameter.numel() for parameter in unmasked.values())
    is_frozen_later = isinstance(module.options, HATOptions) and module.options.shared_parameters == "frozen"
    log.warning(
        "Masks reach %.1f %% of the trained weights of the blocks: not the %s (%s), %s",
        100 * num_masked / (num_masked + num_unmasked),
        kind,
        abbreviate([*unmasked]),
        "which are frozen after the first domain" if is_frozen_later else "which are trained without a mask",
    )
