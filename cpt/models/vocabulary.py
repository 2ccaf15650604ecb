"""Rows of embedding and head for tokens that were added to a checkpoint's tokenizer.

The row of a new token is the mean of the rows of the tokens that its text had before it was added. Some new
tokens have ids beyond the embedding, which is enlarged; others fall into rows that the checkpoint has as
padding (Qwen: 271 of 151,936).

With `model.tokenizer` new tokens are those that the checkpoint's own tokenizer lacks. With
`model.resize=true` that tokenizer has them already, and nothing in a checkpoint says which rows it has
trained: new tokens are distinguished from its own added ones by what the rows hold, see `find_new_tokens`."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import abbreviate, count_noun, log_once
from cpt.core.processes import is_first_process
from cpt.data.text_encoder import find_unknown_id, list_special_tokens, rename_tokens
from cpt.models.extended_tokenizer import describe_other_roles, find_sub_tokens
from cpt.models.loading import is_tied

log = logging.getLogger(__name__)
CONTROL = re.compile(r"\s*[<\[{|].*[>\]}|]\s*", re.DOTALL)  # looks like a control token, as <tool_call>
ROWS_AT_ONCE = 8192  # of an embedding, whose norms are computed together
SLACK = 1.1  # factor around the norms of unused rows within which a row looks unused
# Share of the vocabulary's norms there, up to which unused rows are distinct from trained ones.
OVERLAP = 0.05
# Least cosines of trained rows with the means of their sub-tokens: of one row, and on average over all.
LEARNED = 0.3
LEARNED_ON_AVERAGE = 0.1
SIGMAS = 4  # the least of both in standard deviations of a cosine by chance
SHOWN = 3  # tokens that a line names


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that were added to a base vocabulary, by id: `new` ones whose rows are to be set, with the ids
    of their sub-tokens, and those whose rows may be trained and stay."""

    new: dict[int, list[int]]
    unclear: list[int]


def count_entries(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for all ids of a tokenizer; ids may have gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)


def check_entries(rows: int, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str) -> None:
    """Raises ValueError where a tokenizer has more entries than an embedding has rows."""
    num_entries = count_entries(tokenizer)
    if num_entries > rows:
        entry_count = count_noun(num_entries, "entry", "entries")
        row_count = count_noun(rows, "row")
        vocabulary = tokenizer.get_vocab()
        last_tokens = sorted(vocabulary, key=lambda token: -vocabulary[token])
        raise InvalidOptionError(
            "model.resize",
            False,
            reason=f"the tokenizer of {checkpoint} has {entry_count} (the last {abbreviate(last_tokens)}), "
            f"the embedding {row_count}",
            allowed="model.resize=true, which adds rows, or the tokenizer that the model was trained with",
        )


def check_head(model: PreTrainedModel, *, extended_by: str | None = None) -> None:
    """Raises ValueError for a model whose head transformers would not resize with the embedding, for
    model.resize or for new tokens of the tokenizer `extended_by`."""
    rows = model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings()
    if head is not None and head.weight.shape[0] == rows:
        return
    reason = f"transformers finds no head of {type(model).__name__} with a row for each entry"
    if extended_by is not None:
        raise InvalidOptionError("model.tokenizer", extended_by, reason=reason, allowed="null")
    raise InvalidOptionError(
        "model.resize",
        True,
        reason=reason,
        allowed="model.resize=false with a tokenizer that fits, and has sentinels for span",
    )


def fit_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str) -> None:
    """Gives new tokens of a tokenizer the mean of their sub-tokens' rows, in embedding and head, which are
    enlarged where they have too few rows."""
    embedding = model.get_input_embeddings().weight
    rows = len(embedding)
    num_entries = count_entries(tokenizer)
    added_tokens = find_new_tokens(embedding, tokenizer)
    if num_entries > rows:
        enlarge_embeddings(model, num_entries)
    set_rows(model, added_tokens.new)
    if is_first_process():
        report_rows(added_tokens, tokenizer, checkpoint=checkpoint, rows=rows, num_entries=num_entries)


def extend_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, own_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Gives the tokens that a checkpoint's own tokenizer lacks the mean of their sub-tokens' rows, in
    embedding and head, which are enlarged where they have too few rows. Tokens of text that the own
    tokenizer does not know get the mean over all of its tokens."""
    sub_tokens = find_sub_tokens(tokenizer, own_tokenizer)
    if not sub_tokens:
        return
    rows = len(model.get_input_embeddings().weight)
    if count_entries(tokenizer) > rows:
        enlarge_embeddings(model, count_entries(tokenizer), is_around_mean=False)
    set_rows(model, {token_id: pieces for token_id, pieces in sub_tokens.items() if pieces})

    unknown_text = [token_id for token_id, pieces in sub_tokens.items() if not pieces]
    if unknown_text:
        own_ids = sorted(own_tokenizer.get_vocab().values())
        set_mean_rows(model, unknown_text, own_ids)


def log_extension(
    tokenizer: PreTrainedTokenizerBase,
    own_tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    checkpoint: str,
    rows: int,
) -> None:
    """Logs what `model.tokenizer=name` adds to a checkpoint whose embedding has `rows`, and how it differs
    from the checkpoint's own tokenizer."""
    roles = describe_other_roles(tokenizer, own_tokenizer)
    if roles:
        log.warning("Using model.tokenizer=%s with other settings than the checkpoint's: %s", name, roles)
    sub_tokens = find_sub_tokens(tokenizer, own_tokenizer)
    if not sub_tokens:
        log.info("model.tokenizer=%s adds no token to the %d of %s", name, len(own_tokenizer), checkpoint)
        return

    num_in_padding = sum(token_id < rows for token_id in sub_tokens)
    num_unknown = sum(not pieces for pieces in sub_tokens.values())
    unknown = ""
    if num_unknown:
        unknown = f"; {num_unknown} of text that the checkpoint does not know: the mean of all rows"
    log.info(
        "Adding %s of model.tokenizer=%s to %s: each begins as the mean of its sub-tokens, %d in rows that "
        "the checkpoint has as padding; rows of embedding and head: %d, before %d%s",
        count_noun(len(sub_tokens), "token"),
        name,
        checkpoint,
        num_in_padding,
        max(rows, count_entries(tokenizer)),
        rows,
        unknown,
    )


def enlarge_embeddings(model: PreTrainedModel, num_entries: int, *, is_around_mean: bool = True) -> None:
    """Adds rows to embedding and head, as transformers draws them: around the mean of all, which takes a
    while, or as a new model's, where the caller sets all of them."""
    check_head(model)
    config = model.config
    stored_setting = config.tie_word_embeddings
    config.tie_word_embeddings = is_tied(model)  # transformers would tie an untied head of a T5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # rows are part of the base, which does not depend on the run's seed
        model.resize_token_embeddings(num_entries, mean_resizing=is_around_mean)
    config.tie_word_embeddings = stored_setting


@torch.no_grad()
def set_rows(model: PreTrainedModel, sub_tokens: dict[int, list[int]]) -> None:
    """Sets rows of embedding and head, and the head's bias, to the means over their sub-tokens."""
    for table in find_vocabulary_tables(model):
        for token_id, pieces in sub_tokens.items():
            if token_id < len(table):
                table[token_id] = table[pieces].mean(0)


@torch.no_grad()
def set_mean_rows(model: PreTrainedModel, token_ids: list[int], own_ids: list[int]) -> None:
    """Sets rows of embedding and head, and the head's bias, to the mean over the checkpoint's own tokens."""
    for table in find_vocabulary_tables(model):
        table[token_ids] = table[own_ids].mean(0)


def find_vocabulary_tables(model: PreTrainedModel) -> list[nn.Parameter]:
    """The tensors of a model with a row for each entry: the embedding, and of the head the weight, unless it
    is tied, and the bias."""
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight]
    if head is not None and not is_tied(model):
        tables.append(head.weight)
    bias = getattr(head, "bias", None)
    if bias is not None:
        tables.append(bias)
    return tables


def report_rows(
    added_tokens: AddedTokens,
    tokenizer: PreTrainedTokenizerBase,
    *,
    checkpoint: str,
    rows: int,
    num_entries: int,
) -> None:
    """Logs which rows were added and set; `rows` of the embedding as the checkpoint has it."""
    unclear = ""
    if added_tokens.unclear:
        names = ", ".join(name_tokens(tokenizer, added_tokens.unclear))
        count = count_noun(len(added_tokens.unclear), "added token")
        unclear = f"; the rows of {count} stay, since they may be trained: {names}"

    # Once: the base is loaded again at the end of a run, to measure how far it was moved.
    if num_entries <= rows and not added_tokens.new:
        row_count = count_noun(rows, "row")
        entry_count = count_noun(num_entries, "entry", "entries")
        log_once(log, f"No effect of model.resize=true: {row_count}, {entry_count} of the tokenizer{unclear}")
        return

    # Embeddings are often padded to a multiple of 64: new tokens take these rows before the table grows.
    num_in_padding = sum(token_id < rows for token_id in added_tokens.new)
    new_count = count_noun(len(added_tokens.new), "new token")
    log_once(
        log,
        f"Resizing the embedding of {checkpoint} from {rows} to "
        f"{count_noun(max(rows, num_entries), 'row')} for {new_count}: each begins as the mean of its "
        f"sub-tokens, {num_in_padding} in rows that the checkpoint has as padding{unclear}",
    )


def warn_of_stale_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, checkpoint: str
) -> None:
    """Logs added tokens whose rows look untrained, where they are not to be set."""
    added_tokens = find_new_tokens(model.get_input_embeddings().weight, tokenizer)
    if added_tokens.new and is_first_process():
        token_count = count_noun(len(added_tokens.new), "token")
        names = ", ".join(name_tokens(tokenizer, list(added_tokens.new)))
        log_once(
            log,
            f"The rows of {token_count} of the tokenizer of {checkpoint} look untrained ({names}); "
            "model.resize=true sets each to the mean of its sub-tokens",
            level=logging.WARNING,
        )


def name_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    names = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in ids[:SHOWN]]
    return [*names, "…"] if len(ids) > SHOWN else names


@torch.no_grad()
def find_new_tokens(weight: Tensor, tokenizer: PreTrainedTokenizerBase) -> AddedTokens:
    """The added tokens whose rows in an embedding [R, D] are missing or untrained.

    Ids beyond the embedding are new. Within it, special tokens and what looks like a control token or is in
    the chat template may be the checkpoint's own: they are new only where the rows that no token has look
    unlike trained ones, and theirs look like these. Other words are new where their rows look like unused
    ones, or, without unused rows, where further new tokens follow beyond the embedding. A row that resembles
    the mean of its sub-tokens has been trained from it, and stays."""
    base_ids, added_contents = split_vocabulary(tokenizer)
    if not added_contents or not base_ids:
        return AddedTokens({}, [])
    rows = len(weight)
    ids_without_row = [token_id for token_id in added_contents if token_id >= rows]
    ids_with_row = [token_id for token_id in added_contents if token_id < rows]
    special_ids = set(list_special_tokens(tokenizer).values())

    control_ids = special_ids | find_control_tokens(tokenizer, added_contents)

    # The added tokens that have a row which looks untrained.
    stale_ids, is_certain = find_stale_rows(
        weight, base_ids, ids_with_row, control_ids=control_ids, is_enlarged=bool(ids_without_row)
    )

    # A row that is like the mean of its sub-tokens was trained, and one without sub-tokens cannot be set.
    candidates = {token_id: added_contents[token_id] for token_id in [*stale_ids, *ids_without_row]}
    sub_tokens = split_new_tokens(tokenizer, candidates, rows=rows)
    learned_ids = find_learned_rows(weight, {token_id: sub_tokens[token_id] for token_id in stale_ids})
    new: dict[int, list[int]] = {}
    for token_id, pieces in sub_tokens.items():
        if pieces and token_id not in learned_ids:
            new[token_id] = pieces

    if is_certain:
        return AddedTokens(new, [])
    settled_ids = special_ids.union(new)
    return AddedTokens(new, [token_id for token_id in ids_with_row if token_id not in settled_ids])


def split_vocabulary(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], dict[int, str]]:
    """The ids of a tokenizer's base vocabulary; the contents of the tokens that were added to it, by id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        base_ids = set(backend.get_vocab(with_added_tokens=False).values())
    else:
        base_ids = set(range(tokenizer.vocab_size))
    decoder = tokenizer.added_tokens_decoder
    contents = {token_id: token.content for token_id, token in decoder.items() if token_id not in base_ids}
    return sorted(base_ids), contents


def find_control_tokens(tokenizer: PreTrainedTokenizerBase, contents: dict[int, str]) -> set[int]:
    """The ids of added tokens that look like control tokens, or that the chat template writes."""
    template = str(tokenizer.chat_template or "")
    return {token_id for token_id, token in contents.items() if CONTROL.fullmatch(token) or token in template}


def find_stale_rows(
    weight: Tensor,
    base_ids: list[int],
    candidates: list[int],
    *,
    control_ids: set[int],
    is_enlarged: bool,
) -> tuple[list[int], bool]:
    """The candidates (ids with a row in the embedding [R, D]) whose rows look untrained, and whether rows
    without a token show what untrained ones look like. `control_ids` may be the checkpoint's own;
    `is_enlarged`: further new tokens have no row yet."""
    if not candidates:
        return [], True
    ordinary = [token_id for token_id in candidates if token_id not in control_ids]
    # by parts: a copy in 32 bits of 128,000 rows of 4,096 takes 2 GB
    norms = torch.cat([rows.float().norm(dim=1) for rows in weight.split(ROWS_AT_ONCE)])
    base_with_row = [token_id for token_id in base_ids if token_id < len(weight)]
    base_norms = norms[base_with_row]
    is_used = torch.zeros(len(weight), dtype=torch.bool)
    is_used[base_with_row] = True
    is_used[candidates] = True
    unused_norms = norms[~is_used]

    # Without unused rows, there is nothing to compare with. Where other new tokens lie beyond the embedding,
    # ordinary words before them are taken to have been added with them, after training.
    if not len(unused_norms):
        return (ordinary if is_enlarged else []), False

    low = unused_norms.min() / SLACK
    high = unused_norms.max() * SLACK
    looks_unused = (norms >= low) & (norms <= high)
    overlaps = (base_norms >= low) & (base_norms <= high)
    is_distinct = bool(overlaps.float().mean() < OVERLAP)
    # Where trained rows look like unused ones, a control token may be a trained one.
    compared = candidates if is_distinct else ordinary
    return [token_id for token_id in compared if looks_unused[token_id]], is_distinct


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
        return set(cosines)
    threshold = max(LEARNED, SIGMAS * chance)
    return {token_id for token_id, cosine in cosines.items() if cosine > threshold}


def split_new_tokens(
    tokenizer: PreTrainedTokenizerBase, contents: dict[int, str], *, rows: int
) -> dict[int, list[int]]:
    """By the id of each new token, the ids of the sub-tokens into which a tokenizer without the new tokens
    would split its content. Only sub-tokens with a row, below `rows`, are returned; [] for a token without
    any. `contents`: the contents of the new tokens by id."""
    if not contents:
        return {}
    texts = list(contents.values())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend_without_tokens = rename_tokens(tokenizer, set(texts))
        encodings = backend_without_tokens.encode_batch(texts, add_special_tokens=False)
        encoded = [encoding.ids for encoding in encodings]
    else:
        pieces_by_token = [tokenizer._tokenize(token) for token in texts]  # without added tokens
        encoded = [tokenizer.convert_tokens_to_ids(pieces) for pieces in pieces_by_token]

    # A mean over new tokens, or over the unknown one, would say nothing of the text.
    excluded_ids = {*contents, find_unknown_id(tokenizer)}
    sub_tokens: dict[int, list[int]] = {}
    for token_id, ids in zip(contents, encoded, strict=True):
        sub_tokens[token_id] = [piece for piece in ids if piece not in excluded_ids and piece < rows]
    return sub_tokens
