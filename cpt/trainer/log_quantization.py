"""What the log says of a quantized base before training."""

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from cpt.core.messages import abbreviate
from cpt.core.processes import is_first_process
from cpt.models.loading import make_skeleton
from cpt.models.quantization import find_quantized_layers
from cpt.reporting.formats import format_bytes
from cpt.trainer.costs import restore_original_name

log = logging.getLogger(__name__)


def log_quantization(model: PreTrainedModel) -> None:
    """Logs how many of the weights are quantized, in how many bytes, and which are not."""
    layers = find_quantized_layers(model)
    if not layers or not is_first_process():
        return
    num_weights = sum(layer.num_weights for layer in layers.values())
    num_bytes = 0
    for layer in layers.values():
        num_bytes += layer.weight.nbytes + sum(tensor.nbytes for tensor in layer.buffers())
    in_full = list_plain_parameters(model)
    num_in_full = sum(parameter.numel() for parameter in in_full.values())
    largest_first = sorted(in_full, key=lambda name: -in_full[name].numel())
    log.info(
        "Quantized %.1f %% of the weights, in %s of memory in place of %s in 32 bits; in full are %s",
        100 * num_weights / (num_weights + num_in_full),
        format_bytes(num_bytes),
        format_bytes(num_weights * torch.float32.itemsize),
        abbreviate(largest_first),
    )


def list_plain_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of a plain model that are not quantized, by the names that they have there."""
    quantized_ids = {id(layer.weight) for layer in find_quantized_layers(model).values()}
    plain_names = {name for name, _ in make_skeleton(model).named_parameters()}
    parameters = {}
    for name, parameter in model.named_parameters():
        name = restore_original_name(name)
        if name in plain_names and id(parameter) not in quantized_ids:
            parameters[name] = parameter
    return parameters
