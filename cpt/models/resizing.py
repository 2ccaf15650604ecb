"""As many rows in a model's embedding as its tokenizer has ids."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
SEED = 0  # of new rows: they are part of the base, which is the same whatever the run's seed


def entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for all ids of a tokenizer; ids may have gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def check_rows(rows: int, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str, resize: bool) -> None:
    """Raises ValueError where a tokenizer has more entries than the embedding has rows, and is not to be
    resized."""
    if not resize and entries(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer of {checkpoint} has {entries(tokenizer)} entries, its embedding {rows} rows; "
            "allowed: model.resize=true (adds rows for the others), or the tokenizer that the model was "
            "trained with"
        )


def check_head(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose head transformers would not resize with the embedding (in 5.23
    DeBERTa-v2 with legacy=false, whose head is not where it says)."""
    rows, head = model.get_input_embeddings().weight.shape[0], model.get_output_embeddings()
    if head is None or head.weight.shape[0] != rows:
        raise ValueError(
            f"model.resize=true: transformers finds no head of {type(model).__name__} with a row for each "
            "entry; allowed: model.resize=false with a tokenizer that fits the embedding, which has "
            "sentinels where model.objective=span"
        )


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's weight is the embedding's: of a T5, transformers 5 says so in any case."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie_head(model: PreTrainedModel) -> None:
    """Gives a head that is tied to the embedding a weight of its own, drawn as the embedding of a model of
    width D would be that has logits of size 1, N(0, 1 / D)."""
    if is_tied(model):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn_like(head.weight) * head.weight.shape[1] ** -0.5)


@contextmanager
def as_it_is_tied(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, the configuration says of the head what is true of it: transformers would tie it."""
    said = model.config.tie_word_embeddings
    model.config.tie_word_embeddings = is_tied(model)
    try:
        yield
    finally:
        model.config.tie_word_embeddings = said


def fit_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str, resize: bool
) -> None:
    """Adds rows to the embedding, and to a head, where the tokenizer has more entries, as transformers draws
    them: about the mean of the rows that there are; each time the same ones. Takes none away. Raises
    ValueError as `check_rows` and `check_head`."""
    rows, needed = model.get_input_embeddings().weight.shape[0], entries(tokenizer)
    check_rows(rows, tokenizer, checkpoint=checkpoint, resize=resize)
    if not resize:
        return
    if needed <= rows:
        log.info("model.resize=true changes nothing: %d rows, %d entries of the tokenizer", rows, needed)
        return
    check_head(model)
    with torch.random.fork_rng(devices=[]), as_it_is_tied(model):
        torch.manual_seed(SEED)
        model.resize_token_embeddings(needed)
    log.info("resized the embedding of %s from %d to %d rows", checkpoint, rows, needed)
