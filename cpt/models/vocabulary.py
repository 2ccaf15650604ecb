"""Rows of embedding and head for tokens that were added to a checkpoint's tokenizer (`model.resize=true`).

The row of a new token is the mean of the rows of the tokens that its text had before it was added. Some new
tokens have ids beyond the embedding, which is enlarged; others fall into rows that the checkpoint has as
padding (Qwen: 271 of 151,936). Nothing in a checkpoint says which rows it has trained, so that these are
distinguished from its own added tokens by what the rows hold: see `find_new_tokens`."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.processes import is_first_process
from cpt.data.text_encoder import rename_tokens, special_tokens_of, unknown_id
from cpt.models.loading import is_tied

log = logging.getLogger(__name__)
CONTROL = re.compile(r"\s*[<\[{|].*[>\]}|]\s*", re.DOTALL)  # looks like a control token, as <tool_call>
SLACK = 1.1  # factor around the norms of unused rows within which a row looks unused
OVERLAP = (
    0.05  # share of the vocabulary's norms there, up to which unused rows are distinct from trained ones
)
LEARNED, LEARNED_ON_AVERAGE = 0.3, 0.1  # least cosines of trained rows with the means of their sub-tokens
SIGMAS = 4  # and the least in deviations of the cosine by chance
SHOWN = 3  # tokens that a line names


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that were added to a base vocabulary, by id: `new` ones whose rows are to be set, with the ids
    of their sub-tokens, and those whose rows may be trained and stay."""

    new: dict[int, list[int]]
    unclear: list[int]


def entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for all ids of a tokenizer; ids may have gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def check_entries(rows: int, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str) -> None:
    """Raises ValueError where a tokenizer has more entries than an embedding has rows."""
    if (needed := entries(tokenizer)) > rows:
        given = f"the tokenizer of {checkpoint} has {needed} entries, the embedding {rows} rows"
        allowed = "model.resize=true, which adds rows, or the tokenizer that the model was trained with"
        raise ValueError(f"model.resize=false is invalid: {given}. Allowed: {allowed}")


def check_head(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose head transformers would not resize with the embedding."""
    rows, head = model.get_input_embeddings().weight.shape[0], model.get_output_embeddings()
    if head is None or head.weight.shape[0] != rows:
        why = f"transformers finds no head of {type(model).__name__} with a row for each entry"
        allowed = "model.resize=false with a tokenizer that fits, and has sentinels for span"
        raise ValueError(f"model.resize=true is invalid: {why}. Allowed: {allowed}")


def fit_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str) -> None:
    """Gives new tokens of a tokenizer the mean of their sub-tokens' rows, in embedding and head, which are
    enlarged where they have too few rows."""
    rows, needed = model.get_input_embeddings().weight.shape[0], entries(tokenizer)
    added = find_new_tokens(model.get_input_embeddings().weight, tokenizer)
    if needed > rows:
        enlarge(model, needed)
    set_rows(model, added.new)
    if is_first_process():
        report_rows(added, tokenizer, checkpoint=checkpoint, rows=rows, needed=needed)


def enlarge(model: PreTrainedModel, needed: int) -> None:
    """Adds rows to embedding and head, as transformers draws them: around the mean of all."""
    check_head(model)
    config, tied = model.config, model.config.tie_word_embeddings
    config.tie_word_embeddings = is_tied(model)  # transformers would tie an untied head of a T5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # rows are part of the base, which does not depend on the run's seed
        model.resize_token_embeddings(needed)
    config.tie_word_embeddings = tied


@torch.no_grad()
def set_rows(model: PreTrainedModel, sub_tokens: dict[int, list[int]]) -> None:
    """Sets rows of embedding and head, and the head's bias, to the means over their sub-tokens."""
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight]
    if head is not None and not is_tied(model):
        tables.append(head.weight)
    bias = getattr(head, "bias", None)
    if bias is not None:
        tables.append(bias)
    for table in tables:
        for token_id, pieces in sub_tokens.items():
            if token_id < len(table):
                table[token_id] = table[pieces].mean(0)


def report_rows(
    added: AddedTokens, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str, rows: int, needed: int
) -> None:
    unclear = ""
    if added.unclear:
        names = ", ".join(name_tokens(tokenizer, added.unclear))
        unclear = f"; {len(added.unclear)} added tokens keep their rows, which may be trained: {names}"
    if needed <= rows and not added.new:
        log.info(
            "No effect of model.resize=true: %d rows, %d entries of the tokenizer%s", rows, needed, unclear
        )
        return
    in_padding = sum(token_id < rows for token_id in added.new)
    log.info(
        "Resizing the embedding of %s from %d to %d rows: %d new tokens begin as the mean of their "
        "sub-tokens, %d of them in rows that the checkpoint has as padding%s",
        *(checkpoint, rows, max(rows, needed), len(added.new), in_padding, unclear),
    )


def warn_of_stale_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str
) -> None:
    """Logs added tokens whose rows look untrained, where they are not to be set."""
    added = find_new_tokens(model.get_input_embeddings().weight, tokenizer)
    if added.new and is_first_process():
        log.warning(
            "%d tokens of the tokenizer of %s have rows that look untrained (%s); model.resize=true sets "
            "them to the mean of their sub-tokens",
            *(len(added.new), checkpoint, ", ".join(name_tokens(tokenizer, [*added.new]))),
        )


def name_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    names = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in ids[:SHOWN]]
    return [*names, "…"] if len(ids) > SHOWN else names


@torch.no_grad()
def find_new_tokens(weight: Tensor, tokenizer: PreTrainedTokenizerBase) -> AddedTokens:
    """The added tokens whose rows in an embedding [R, D] are missing or untrained.

    Ids beyond the embedding are new. Of those within it, special tokens and what looks like a control token
    or is in the chat template may be the checkpoint's own: they are new only where the rows that no token has
    look unlike trained ones, and theirs look like these. Other words are new where their rows look like
    unused ones, or, without unused rows, where further new tokens follow beyond the embedding. A row that
    resembles the mean of its sub-tokens has been trained from it, and stays."""
    base, added = split_vocabulary(tokenizer)
    if not added or not base:
        return AddedTokens({}, [])
    rows = len(weight)
    beyond = [token_id for token_id in added if token_id >= rows]
    within = [token_id for token_id in added if token_id < rows]
    special = set(special_tokens_of(tokenizer).values())
    own = special | control_tokens(tokenizer, added)
    stale, is_certain = find_stale_rows(weight, base, within, own=own, has_more=bool(beyond))

    added_now = {token_id: added[token_id] for token_id in (*stale, *beyond)}
    sub_tokens = split_new_tokens(tokenizer, added_now, rows=rows)
    learned = find_learned_rows(weight, {token_id: sub_tokens[token_id] for token_id in stale})
    new = {token_id: pieces for token_id, pieces in sub_tokens.items() if pieces and token_id not in learned}
    unclear = [token_id for token_id in within if token_id not in new and token_id not in special]
    return AddedTokens(new, [] if is_certain else unclear)


def split_vocabulary(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], dict[int, str]]:
    """The ids of a tokenizer's base vocabulary; the contents of the tokens that were added to it, by id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        base = set(backend.get_vocab(with_added_tokens=False).values())
    else:
        base = set(range(tokenizer.vocab_size))
    decoder = tokenizer.added_tokens_decoder
    added = {token_id: token.content for token_id, token in decoder.items() if token_id not in base}
    return sorted(base), added


def control_tokens(tokenizer: PreTrainedTokenizerBase, added: dict[int, str]) -> set[int]:
    """The added tokens that look like control tokens, or that the chat template writes."""
    template = str(tokenizer.chat_template or "")
    return {token_id for token_id, token in added.items() if CONTROL.fullmatch(token) or token in template}


def find_stale_rows(
    weight: Tensor, base: list[int], candidates: list[int], *, own: set[int], has_more: bool
) -> tuple[list[int], bool]:
    """Those of the candidates whose rows look untrained, and whether rows without a token show what untrained
    ones look like; `has_more`: new tokens follow beyond the rows."""
    if not candidates:
        return [], True
    norms = weight.float().norm(dim=1)
    base_norms = norms[[token_id for token_id in base if token_id < len(weight)]]
    is_used = torch.zeros(len(weight), dtype=torch.bool)
    is_used[[token_id for token_id in (*base, *candidates) if token_id < len(weight)]] = True
    unused_norms = norms[~is_used]
    if not len(unused_norms):
        return [token_id for token_id in candidates if has_more and token_id not in own], False

    low, high = unused_norms.min() / SLACK, unused_norms.max() * SLACK
    looks_unused = (norms >= low) & (norms <= high)
    in_base = (base_norms >= low) & (base_norms <= high)
    is_distinct = bool(in_base.float().mean() < OVERLAP)
    stale = [
        token_id for token_id in candidates if looks_unused[token_id] and (is_distinct or token_id not in own)
    ]
    return stale, is_distinct


def find_learned_rows(weight: Tensor, sub_tokens: dict[int, list[int]]) -> set[int]:
    """The tokens whose rows point where the mean of their sub-tokens does: the cosine of an untrained row is
    about 1 / sqrt(D) in size. All of them where it is larger on average."""
    cosines = {}
    for token_id, pieces in sub_tokens.items():
        if pieces:
            mean = weight[pieces].float().mean(0)
            cosines[token_id] = float(torch.cosine_similarity(weight[token_id].float(), mean, dim=0))
    if not cosines:
        return set()

    chance = 1 / math.sqrt(weight.shape[1])
    mean_cosine = sum(cosines.values()) / len(cosines)
    if mean_cosine > max(LEARNED_ON_AVERAGE, SIGMAS * chance / math.sqrt(len(cosines))):
        return {*cosines}
    least = max(LEARNED, SIGMAS * chance)
    return {token_id for token_id, cosine in cosines.items() if cosine > least}


def split_new_tokens(
    tokenizer: PreTrainedTokenizerBase, new: dict[int, str], *, rows: int
) -> dict[int, list[int]]:
    """The ids of the sub-tokens of new tokens, as the tokenizer would split them without these, among the
    first `rows`; [] for a token of which nothing is known."""
    if not new:
        return {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        earlier = rename_tokens(tokenizer, {*new.values()})
        encodings = earlier.encode_batch([*new.values()], add_special_tokens=False)
        encoded = [encoding.ids for encoding in encodings]
    else:
        pieces_by_token = [tokenizer._tokenize(token) for token in new.values()]  # without added tokens
        encoded = [tokenizer.convert_tokens_to_ids(pieces) for pieces in pieces_by_token]

    left_out = {*new, unknown_id(tokenizer)}
    return {
        token_id: [piece for piece in ids if piece not in left_out and piece < rows]
        for token_id, ids in zip(new, encoded, strict=True)
    }
