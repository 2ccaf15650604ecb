"""The type in which frozen weights are kept (`model.dtype`). It changes no result: layers widen their weights
when they use them (cpt.models.narrow_layers)."""

import logging
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from cpt.core.exceptions import InvalidOptionError
from cpt.core.processes import is_first_process
from cpt.methods.base import ContinualMethod
from cpt.models import loading
from cpt.models.forward import cache_arguments, set_mode
from cpt.models.narrow_layers import make_narrow
from cpt.models.options import ModelOptions
from cpt.models.stored_weights import find_matrix_dtypes, find_weight_files, read_stored_weights
from cpt.models.trial import draw_row, make_stand_in
from cpt.models.units import find_blocks
from cpt.trainer.plan import Plan
from cpt.trainer.skeleton import build_skeleton

log = logging.getLogger(__name__)
NARROW_DTYPES = (torch.bfloat16, torch.float16)
OPTION = "model.dtype"
NUM_TOKENS = 8  # of the row that is tried


def choose_base_dtype(plan: Plan, config: PretrainedConfig) -> torch.dtype:
    """The type of the weights that no stage of a plan changes: 16 bits where they are stored so, or where
    model.dtype asks for it. Raises ValueError where it asks and the model would compute something else."""
    options = plan.model
    if options.dtype == "float32" or not plan.method.load().keeps_base:
        return torch.float32
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else find_stored_dtype(options, config)
    if dtype not in NARROW_DTYPES:
        if options.name_or_path is not None:
            log_wide("the base's files do not have all matrices in one type of 16 bits")
        return torch.float32

    objective = loading.resolve_objective(options.objective, config)
    if computes_the_same(config, objective, dtype):
        return dtype
    reason = f"a {config.model_type} computes something else with weights in 16 bits"
    if options.dtype != "auto":
        raise InvalidOptionError(OPTION, options.dtype, reason=reason, allowed="auto, float32")
    log_wide(reason)
    return torch.float32


def log_wide(reason: str) -> None:
    if is_first_process():
        log.info("Frozen weights (model.dtype=auto): float32, as %s", reason)


def find_stored_dtype(options: ModelOptions, config: PretrainedConfig) -> torch.dtype:
    """The one type in which all matrices of a checkpoint are stored; 32 bits for others, and for a base that
    the run makes of a checkpoint."""
    checkpoint = options.name_or_path
    is_made = options.num_hidden_layers is not None or options.pretraining is not None
    if checkpoint is None or is_made or loading.find_adapter(checkpoint) is not None:
        return torch.float32
    dtypes = find_matrix_dtypes(read_stored_weights(find_weight_files(checkpoint, config)))
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


@torch.no_grad()
def computes_the_same(config: PretrainedConfig, objective: str, dtype: torch.dtype) -> bool:
    """Whether a model of a configuration has the same logits with narrow layers, bit for bit: some classes
    read the type of a weight. Tried with random weights, and with as few blocks as have all kinds between
    them: each block has a copy of its own in 16 bits."""
    skeleton = build_small_skeleton(config, objective)
    with torch.random.fork_rng(devices=[]):
        try:
            # Its numbers are rounded to 16 bits before, so that narrowing them changes none.
            stand_in = make_stand_in(skeleton, rounded_to=dtype)
        except Exception as error:  # of a class that initializes weights in its own way
            log.debug("No stand-in of a %s: %s", config.model_type, error)
            return False

    with set_mode(stand_in, training=False):
        expected = find_logits(stand_in, objective)
        make_narrow(stand_in, dtype)
        try:
            logits = find_logits(stand_in, objective)
        except Exception as error:  # of tensors of two types
            log.debug("A narrow %s does not run: %s", config.model_type, error)
            return False
    return torch.equal(expected, logits)


def build_small_skeleton(config: PretrainedConfig, objective: str) -> PreTrainedModel:
    """A model without storage of as few first blocks as have all kinds between them; of all blocks where
    these are not known, or where no model of a configuration can have fewer."""
    skeleton = build_skeleton(config, objective, source="model.config")
    num_blocks = count_first_blocks(skeleton)
    if num_blocks is None:
        return skeleton
    try:
        small_config = loading.truncate_config(deepcopy(config), num_blocks)
        return build_skeleton(small_config, objective, source="model.config")
    except ValueError as error:
        log.debug("Trying all blocks of a %s: %s", config.model_type, error)
        return skeleton


def count_first_blocks(model: PreTrainedModel) -> int | None:
    """The number of first blocks that have a block of each kind, so 1 where all are alike; None for a model
    whose blocks are not known."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return None
    first_positions = dict[tuple[type[nn.Module], ...], int]()
    for name, block in blocks:
        kind = tuple(type(module) for module in block.modules())
        position = int(name.rpartition(".")[2])
        first_positions.setdefault(kind, position)
    return max(first_positions.values()) + 1


def find_logits(model: PreTrainedModel, objective: str) -> Tensor:
    """The logits [1, NUM_TOKENS, V] of a drawn row."""
    row = draw_row(model, tokens=NUM_TOKENS)
    inputs = {"input_ids": row}
    if objective in loading.SEQ2SEQ:
        inputs["decoder_input_ids"] = row
    logits: Tensor = model(**inputs, **cache_arguments(model)).logits
    return logits


def check_base_dtype(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError for model.dtype=bfloat16 with a method that has no frozen weights, or rewrites
    them."""
    if plan.model.dtype != "bfloat16":
        return
    reason = ""
    if method.rewritten:
        reason = "it changes the weights that it does not train, which 16 bits would round"
    elif method.scope is None or not method.constant_weights:
        reason = "it leaves no weights frozen, and others are in 32 bits"
    if reason:
        raise InvalidOptionError(
            OPTION,
            plan.model.dtype,
            context=f"with method={plan.names['method']}",
            reason=reason,
            allowed="auto, float32",
        )
