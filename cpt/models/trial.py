"""Trials of a model before it is trained: whether it runs with its objective, and which tokens a token sees.

A next-token loss of a model whose tokens see those that follow measures nothing, and training on it ruins
the model. Neither the name of a class nor its configuration says reliably what a model attends to, so one
token is changed and the outputs of those before it are compared."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.core.distributed import gather_objects
from cpt.core.errors import find_reason
from cpt.core.exceptions import format_value
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.collate import Batch
from cpt.models.forward import set_mode
from cpt.models.loading import find_objectives, make_skeleton
from cpt.models.objectives import Objective

log = logging.getLogger(__name__)
NUM_TOKENS = 8  # of the row that is tried
MIN_LARGE_TENSOR = 2**26  # numbers in a tensor, from which one expert stands for all
# Parameters of one shape are parts of one tensor; each place in a block begins at another.
SHIFT, NUM_SHIFTS = 16, 64
# Settings of a configuration that a message on the direction of attention names.
ATTENTION_SETTINGS = ("is_causal", "is_decoder", "use_bidirectional_attention")
# The largest difference of outputs, relative to the largest output, that is rounding.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def make_stand_in(skeleton: PreTrainedModel, *, rounded_to: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model like a `skeleton` on the meta device that can be run: parameters of one shape are parts of one
    tensor of random numbers, so that the memory is that of one block and the embedding. They are 32 bits
    wide, with values that the type `rounded_to` has."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict[torch.Size, Tensor]()
    names_by_shape = dict[torch.Size, list[str]]()  # without the numbers of blocks
    state = dict[str, Tensor]()
    for name, parameter in skeleton.named_parameters():
        shape = parameter.shape
        # A block may have many experts, along the first axis of three: only one is drawn.
        has_experts = len(shape) > 2 and shape.numel() > MIN_LARGE_TENSOR
        drawn_shape = torch.Size([1, *shape[1:]]) if has_experts else shape
        if shape not in tensors:
            numbers = torch.randn(drawn_shape.numel() + SHIFT * NUM_SHIFTS, generator=generator)
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            tensors[shape] = (scale * numbers).to(rounded_to).float()
            names_by_shape[shape] = []

        # A query that equals its key attends to itself alone, where T5 does not scale their product.
        names = names_by_shape[shape]
        plain_name = remove_numbers(name)
        if plain_name not in names:
            names.append(plain_name)
        begin = SHIFT * (names.index(plain_name) % NUM_SHIFTS)
        numbers = tensors[shape][begin : begin + drawn_shape.numel()]
        state[name] = numbers.view(drawn_shape).expand(shape)

    with torch.random.fork_rng(devices=[]):
        return type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=state, dtype=torch.float32, trust_remote_code=False
        )


def remove_numbers(name: str) -> str:
    """The name of a parameter without the numbers of blocks and experts: alike in all of them."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def try_shards(model: PreTrainedModel, trial: Callable[[PreTrainedModel], None]) -> None:
    """Has the first process run a trial of a sharded model on a stand-in: each pass of the model itself would
    need all processes. Raises the ValueError of the trial in all of them."""
    fault = find_fault(make_skeleton(model), trial) if is_first_process() else None
    first_fault, *_ = gather_objects(fault)
    if first_fault is not None:
        raise first_fault


def find_fault(skeleton: PreTrainedModel, trial: Callable[[PreTrainedModel], None]) -> ValueError | None:
    """The error of a trial on a stand-in for a skeleton; None also where there can be no stand-in."""
    try:
        stand_in = make_stand_in(skeleton)
    except Exception as error:  # of a class that initializes weights in its own way
        log.debug("Skipping the stand-in of a %s: %s", type(skeleton).__name__, error)
        return None
    try:
        trial(stand_in)
    except ValueError as error:
        return error
    return None


def try_model(
    model: PreTrainedModel,
    objective: Objective,
    objective_name: str,
    *,
    length: int,
    source: str,
    is_stand_in: bool = False,
) -> None:
    """Raises ValueError for a model that does not run with an objective, which is called masked, causal or
    span, or whose tokens see what this objective hides or do not see what it needs. `source` names the model
    in messages, as KEY=VALUE; rows of at most `length` tokens are tried. Outputs of a stand-in may be
    non-finite: its random weights are not those of the model."""
    try:
        row = draw_row(model, tokens=min(length, NUM_TOKENS))
        with torch.random.fork_rng(devices=[]):
            run_in_training(model, objective, row, objective_name, length=length)
        with torch.no_grad(), set_mode(model, training=False):
            fault = compare_attention(model, objective, row, objective_name)
    except Exception as error:  # whatever a class raises for arguments that it does not take
        log.debug("The trial of %s failed", source, exc_info=error)
        if is_stand_in and isinstance(error, FloatingPointError):
            return
        raise ValueError(
            f"{source} is invalid: {type(model).__name__} does not run with "
            f"model.objective={objective_name} ({find_reason(error)}). Allowed: another model"
        ) from error
    if fault:
        raise ValueError(f"{source} is invalid: {fault}")


def draw_row(model: PreTrainedModel, *, tokens: int) -> Tensor:
    """A row [1, T] of different tokens from the middle of the vocabulary, where no special ones are."""
    entries = count_usable_tokens(model)
    return (entries // 3 + torch.arange(tokens, device=model.device)[None]) % entries


def count_usable_tokens(model: PreTrainedModel) -> int:
    """The tokens that both the input and the output of a model have."""
    entries = model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings()
    return entries if head is None else min(entries, head.weight.shape[0])


def change_token(row: Tensor, position: int, model: PreTrainedModel) -> Tensor:
    """The row [1, T] with another token at a position, which it has nowhere else."""
    changed = row.clone()
    changed[0, position] = (row[0, position] + row.shape[1]) % count_usable_tokens(model)
    return changed


def make_batch(
    objective: Objective, rows: Tensor, objective_name: str, *, target: Tensor | None = None
) -> Batch:
    """A batch of rows [B, T] in which all positions are scored. `target` is a decoder's input, by default the
    rows. Where the objective isolates documents, each row is one document."""
    batch: Batch = {"input_ids": rows, "positions": torch.arange(rows.numel(), device=rows.device)}
    if objective_name == "span":
        batch["decoder_input_ids"] = rows if target is None else target
    if objective.isolated:
        batch["segments"] = torch.zeros_like(rows)
    return batch


def run_in_training(
    model: PreTrainedModel, objective: Objective, row: Tensor, objective_name: str, *, length: int
) -> None:
    """Raises an error for a model whose outputs in train mode are not logits and hidden states of a row
    [1, T]. A class that is trained on rows of `length` tokens only, as Reformer, is tried on them."""
    try:
        run_once(model, objective, row, objective_name)
    except Exception:  # whatever a class raises
        if row.shape[1] == length:
            raise
        run_once(model, objective, draw_row(model, tokens=length), objective_name)


def run_once(model: PreTrainedModel, objective: Objective, row: Tensor, objective_name: str) -> None:
    """Raises an error for a model whose outputs in train mode, of the row twice in a batch and every third
    token scored, have other shapes than logits [K, V] and hidden states [2, T, D]."""
    rows = row.repeat(2, 1)  # contiguous, as batches are
    batch = make_batch(objective, rows, objective_name)
    batch["positions"] = torch.arange(0, rows.numel(), 3, device=row.device)
    with torch.no_grad(), set_mode(model, training=True):
        logits, hidden = objective.outputs(model, batch)

    num_scored = len(batch["positions"])
    if logits.ndim != 2 or len(logits) != num_scored:
        position_count = count_noun(num_scored, "position")
        raise ValueError(f"its logits at {position_count} have the shape {tuple(logits.shape)}")
    if hidden.ndim != 3 or hidden.shape[:2] != rows.shape:
        raise ValueError(
            f"its hidden states of 2 rows of {row.shape[1]} tokens have the shape {tuple(hidden.shape)}"
        )


def compare_attention(model: PreTrainedModel, objective: Objective, row: Tensor, objective_name: str) -> str:
    """What is wrong with the tokens that each token of a row [1, T] sees, with what is allowed instead; "" if
    nothing is."""
    kind = f"a {model.config.model_type}"
    declared_keys = [key for key in ATTENTION_SETTINGS if hasattr(model.config, key)]
    settings = [f"{key}={format_value(getattr(model.config, key))}" for key in declared_keys]
    if settings:
        kind += f" with {', '.join(settings)}"
    possible = find_objectives(model.config)

    # Each is [T, …] of one side, by the ids [1, T] that this side reads.
    def outputs(tokens: Tensor) -> Tensor:
        return objective.outputs(model, make_batch(objective, tokens, objective_name))[0]

    def decoder_outputs(tokens: Tensor) -> Tensor:
        return objective.outputs(model, make_batch(objective, row, objective_name, target=tokens))[0]

    def encoder_outputs(tokens: Tensor) -> Tensor:
        return objective.encode(model, make_batch(objective, tokens, objective_name))[0]

    # A config says how a model attends, but not all models do what theirs says: so it is tried.
    if objective_name == "causal" and sees_ahead(outputs, row, model):
        alternative = "model.objective=masked, or " if "masked" in possible else ""
        return (
            f"the tokens of {kind} see those that follow, which model.objective=causal predicts. "
            f"Allowed: {alternative}a causal decoder"
        )
    if objective_name == "masked" and not sees_ahead(outputs, row, model):
        alternative = "model.objective=causal, or " if "causal" in possible else ""
        return (
            f"the tokens of {kind} do not see those that follow, as model.objective=masked needs. "
            f"Allowed: {alternative}an encoder"
        )
    if objective_name == "span" and sees_ahead(decoder_outputs, row, model):
        return (
            f"the tokens of the decoder of {kind} see those that follow. "
            "Allowed: an encoder-decoder with a causal decoder"
        )
    if objective_name == "span" and not sees_ahead(encoder_outputs, row, model):
        return (
            f"the tokens of the encoder of {kind} do not see those that follow. "
            "Allowed: an encoder-decoder whose encoder attends to both sides"
        )
    return ""


def sees_ahead(outputs: Callable[[Tensor], Tensor], row: Tensor, model: PreTrainedModel) -> bool:
    """Whether outputs [T, …] of a row [1, T] change before a changed token: in the middle, and at the end."""
    before = outputs(row)
    if not before.isfinite().all():
        raise FloatingPointError("its outputs are not finite")
    rounding = ROUNDING[before.dtype] * before.abs().max()
    tokens = row.shape[1]
    for position in {tokens // 2, tokens - 1}:
        after = outputs(change_token(row, position, model))
        if (after - before)[:position].abs().max() > rounding:
            return True
    return False
