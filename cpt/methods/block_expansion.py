"""Block expansion, LLaMA Pro (Wu et al., ACL 2024, arXiv 2401.02415): copies of blocks between the frozen
blocks of the base, and these copies alone are trained.

    x' = x + Attn(Norm(x)),    y = x' + FFN(Norm(x'))
    a copy starts with the output projections of Attn and FFN at 0: y = x, so that the model is the base

(equation 1 and section 3.2; the paper copies the last P = 1 block of each of N = 8 groups of M = 4 blocks).

The model has more blocks from the start of the run on, and is exported as a plain model of that depth.

With `blocks` it is the first stage of ADEPT (Zhang et al., ICLR 2026, arXiv 2510.10071): copies of the blocks
without which the loss on general text rises least, which docs/examples/block_importance.py measures. Its
second stage, rates by the importance of each matrix for general text, is not included: no hook of a step has
that text."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.adapters.domain_store import Scope
from cpt.core.exceptions import InvalidOptionError
from cpt.data.collate import label_batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import BlockExpansionOptions
from cpt.models import growth
from cpt.models.forward import set_mode
from cpt.models.loading import make_skeleton
from cpt.models.objectives import Objective
from cpt.models.trial import draw_row, make_stand_in
from cpt.models.units import find_projections

NUM_TOKENS = 8  # of the sequence on which the model is compared with the base
MAX_LOSS_CHANGE = 1e-4  # of a token (nats): rounding alone


class BlockExpansion(ContinualMethod):
    """Trains blocks that are inserted into the frozen base."""

    sharded = False  # copies of blocks that FSDP has sharded end in a segmentation fault of torch
    has_base_blocks = False  # the inserted blocks shift the names of those that follow
    options: BlockExpansionOptions

    def __init__(self, options: BlockExpansionOptions, context: MethodContext) -> None:
        model = context.model
        check_blocks(model, options.blocks)
        if model.device.type == "meta":  # before any text is read
            check_base_stays(model, context.objective, options)
        prefixes = tuple(f"{name}." for name in insert_blocks(model, options))
        names = tuple(name for name, _ in model.named_parameters() if name.startswith(prefixes))
        projections = tuple(layer for layer in find_projections(model) if layer.name.startswith(prefixes))
        super().__init__(options, context, scope=Scope(names, projections))


def check_blocks(model: PreTrainedModel, blocks: Sequence[int] | None) -> None:
    """Raises ValueError for the number of a block that a stack does not have."""
    depth = min(growth.count_depths(model).values(), default=0)
    missing = [number for number in blocks or () if number >= depth]
    if missing:
        raise InvalidOptionError(
            "method.blocks",
            list(blocks or ()),
            reason=f"there is no block {missing[0]}",
            allowed=f"0 to {depth - 1}",
        )


def insert_blocks(model: PreTrainedModel, options: BlockExpansionOptions) -> list[str]:
    """Inserts the new blocks; returns their names. Raises InvalidOptionError for a model that cannot have
    them, or whose linear layers are of unknown form."""
    try:
        find_projections(model)  # raises: masks have to know the layers
        return growth.insert_layers(model, options.share, blocks=options.blocks)
    except ValueError as error:
        raise InvalidOptionError(
            "method",
            "block_expansion",
            reason=str(error),
            allowed="a dense model with equal blocks, like llama or gpt2",
        ) from error


def check_base_stays(model: PreTrainedModel, objective: Objective, options: BlockExpansionOptions) -> None:
    """Raises ValueError for a model on the meta device that is another function with new blocks, as where a
    norm follows what a block adds to; tried with random weights."""
    skeleton = make_skeleton(model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        stand_in = make_stand_in(skeleton)
        nll_before = find_token_losses(stand_in, objective)
        insert_blocks(stand_in, options)
        largest_change = (find_token_losses(stand_in, objective) - nll_before).abs().max()
    if largest_change > MAX_LOSS_CHANGE:
        raise InvalidOptionError(
            "method",
            "block_expansion",
            context=f"for a {model.config.model_type}",
            reason=f"a block that adds nothing changes the loss of a token by {largest_change:.2g} nats",
            allowed="a model whose norms precede attention and feed-forward network, like llama or gpt2",
        )


@torch.no_grad()
def find_token_losses(model: PreTrainedModel, objective: Objective) -> Tensor:
    """The loss (nats) of each token of a drawn sequence, [NUM_TOKENS] or less: all are scored."""
    row = draw_row(model, tokens=NUM_TOKENS)
    decoder_ids = row if model.config.is_encoder_decoder else None
    is_token = torch.ones_like(row, dtype=torch.bool)
    batch = label_batch(row, row, is_token, decoder_input_ids=decoder_ids)
    with set_mode(model, training=False):
        return objective.nll(model, batch)
