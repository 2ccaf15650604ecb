"""`trainer.compile=auto`: whether the blocks of a model are compiled on a device, by rule.

Blocks are alike, so that one is compiled for all, whatever the depth. The whole model is not compiled: cpt
adds hooks to it in each pass, to compute its head at scored positions alone."""

import logging

import torch

from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.core.sections import Choice
from cpt.data.sources.base import NONE
from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)
AUTO = "auto"
BLOCKS = "blocks"  # what scores.json has of a run whose blocks are compiled, and of another one
NOTHING = "none"
MIN_CAPABILITY = (7, 0)  # of a GPU on which Triton, which torch.compile generates code for, runs
# Steps of all domains from which compilation pays: it takes a minute or so, and a step of 0.2 s is then 1.1
# to 1.5 times as fast on an H100 (docs/studies/performance.md). The minute is not measured.
MIN_STEPS = 1000


def choose_compilation(plan: Plan, device: torch.device, *, stored: str | None) -> bool:
    """Whether blocks are compiled; `auto` is as in the scores of a run that is resumed, else by rule."""
    if plan.trainer.compile != AUTO:
        return bool(plan.trainer.compile)
    if stored is not None:
        return stored == BLOCKS

    reason = why_not_compiled(plan, device)
    if is_first_process():
        log.info("Compilation (trainer.compile=auto): %s", f"none, {reason}" if reason else "each block")
    return not reason


def why_not_compiled(plan: Plan, device: torch.device) -> str:
    """Why compilation would not pay or not work on a device; "" if it would."""
    if device.type != "cuda":
        return f"the device is a {device.type}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than those that Triton supports"
    if limits_backward(plan):
        return "a mask with backend=backward works inside the backward pass of layers"
    if plan.source.encoding is not None or plan.source.packing == NONE:
        return "batches are as wide as their longest sample, and each width would be compiled"
    num_steps = count_run_steps(plan)
    if num_steps is not None and num_steps < MIN_STEPS:
        step_count = count_noun(round(num_steps), "step")
        return f"the domains have {step_count} together, and it pays from {MIN_STEPS:,} on"
    return ""


def limits_backward(plan: Plan) -> bool:
    """Whether a mask of the run, or of its method, computes the gradients of chosen rows only."""
    masks = [*plan.masks]
    mask_of_method = getattr(plan.method.options, "mask", None)
    if isinstance(mask_of_method, Choice):
        masks.append(mask_of_method)
    return any(getattr(mask.options, "backend", "") == "backward" for mask in masks)


def count_run_steps(plan: Plan) -> float | None:
    """The steps of all domains; None where they follow from the texts."""
    budget = plan.budget
    if budget.steps is not None:
        return budget.steps * len(plan.order)
    if budget.tokens is not None:
        return budget.tokens / (budget.batch_size * plan.model.max_seq_length) * len(plan.order)
    return None
