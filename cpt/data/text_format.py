"""How raw text becomes rows for a tokenizer: see TextFormat."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.core.exceptions import InvalidOptionError
from cpt.data.separator import choose_separator, find_default_end
from cpt.data.sources.base import SPLIT, TextOptions
from cpt.data.text_encoder import TextEncoder, find_frame
from cpt.data.tokenizer_hash import hash_row_format


@dataclass(frozen=True)
class TextFormat:
    """A tokenizer, and what of raw text is encoded how: the `separator` after each document, the id that each
    row begins with (`row_start`, or None), and `special_tokens` that the text spells (SPLIT or PARSE)."""

    tokenizer: PreTrainedTokenizerBase
    separator: tuple[int, ...]
    row_start: int | None = None
    special_tokens: str = SPLIT

    @cached_property
    def encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, self.special_tokens)

    @cached_property
    def digest(self) -> str:
        """The key of rows in this format."""
        return digest([self.tokenizer_digest, self.separator, self.row_start, self.special_tokens])

    @cached_property
    def tokens_digest(self) -> str:
        """The key of the ids of documents in this format, whatever rows begin with."""
        return digest([self.tokenizer_digest, self.separator, self.special_tokens])

    @cached_property
    def tokenizer_digest(self) -> str:
        return hash_row_format(self.tokenizer)

    @property
    def conditions(self) -> dict[str, str]:
        """What of the format makes losses incomparable with those of the usual one, for scores.json."""
        conditions = {}
        if self.separator and self.separator[0] != find_default_end(self.tokenizer):
            conditions["separator"] = self.name_of(self.separator[0])
        if not self.separator and not find_frame(self.tokenizer).end:
            conditions["separator"] = "none"
        if self.row_start is not None:
            conditions["row_start"] = self.name_of(self.row_start)
        if self.special_tokens != SPLIT:
            conditions["special_tokens"] = self.special_tokens
        return conditions

    def name_of(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token_id))


def make_text_format(
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    *,
    is_causal: bool = False,
    is_checkpoint: bool = True,
    model_ends: Sequence[int] = (),
) -> TextFormat:
    """The format of raw text for a model, with `auto` resolved; `model_ends` are the eos ids in its
    configurations. Raises ValueError for options that the tokenizer or the model does not allow."""
    separator = choose_separator(tokenizer, options.separator, model_ends=model_ends)
    row_start = choose_row_start(
        tokenizer, options.bos_in_rows, is_causal=is_causal, is_checkpoint=is_checkpoint
    )
    return TextFormat(
        tokenizer=tokenizer,
        separator=separator.ids,
        row_start=row_start,
        special_tokens=options.special_tokens,
    )


def choose_row_start(
    tokenizer: PreTrainedTokenizerBase, requested: bool | str, *, is_causal: bool, is_checkpoint: bool
) -> int | None:
    """The BOS id that each row begins with, or None. `auto` adds it for a causal checkpoint whose tokenizer
    begins each text with it: such a model has hardly seen text without (Gemma, attention sinks). A model that
    the run itself pre-trains has, as its rows were cut the same way. Raises ValueError for `true` where there
    is no BOS or the model is not causal."""
    bos = tokenizer.bos_token_id
    if requested is True:
        if not is_causal:
            raise InvalidOptionError(
                "domains.bos_in_rows", True, reason="the model is not causal", allowed="auto, false"
            )
        if bos is None:
            raise InvalidOptionError(
                "domains.bos_in_rows",
                True,
                reason=f"the tokenizer {tokenizer.name_or_path} has no BOS token",
                allowed="auto, false",
            )
        return bos
    if requested is False or not (is_causal and is_checkpoint) or bos is None:
        return None
    return bos if find_frame(tokenizer).begin[:1] == [bos] else None
