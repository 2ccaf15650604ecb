"""Texts of others as token ids, with or without the special tokens that they spell: documents, questions,
answers, turns of chats.

A corpus may contain `<|im_end|>` or `</s>` as text. By default (`domains.special_tokens=split`) these become
the tokens of their characters, so that text from elsewhere cannot inject control tokens; with `parse` they
become their ids. Added tokens that are not special are always used.

The frame of a tokenizer are the ids that it puts before and after each text, as [CLS] and [SEP]; the body is
what is between them."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_python import Trie

from cpt.data.sources.base import PARSE

PRIVATE = "\U000f0000"  # begins a vocabulary entry that no text should reach; a private-use character


class Frame(NamedTuple):
    """The ids that a tokenizer puts before and after a text; both empty for one that puts none."""

    begin: list[int]
    end: list[int]


def find_frame(tokenizer: PreTrainedTokenizerBase, *, is_target: bool = False) -> Frame:
    """The frame of a tokenizer: the ids that it puts before and after a text, or, with `is_target`, a
    decoder's text. Raises ValueError for a tokenizer that changes the text between them."""
    text, bare = find_encodable_text(tokenizer)
    if is_target:
        bare = tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]
        framed = tokenizer(text_target=text, verbose=False)["input_ids"]
    else:
        framed = tokenizer(text, verbose=False)["input_ids"]
    # The frame is what is around the ids of the bare text: tokenizers do not say reliably what they add.
    for begin in range(len(framed) - len(bare) + 1):
        end = begin + len(bare)
        if framed[begin:end] == bare:
            return Frame(framed[:begin], framed[end:])
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path} changes a text around which it puts tokens: "
        f"{bare} is not in {framed}. "
        "Allowed: one that gives the same ids with add_special_tokens=true and false"
    )


def find_encodable_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """A short text that the tokenizer has ids for, and these ids without the frame: `a`, or else the first
    entry of the vocabulary that gives ids. ("a", []) where none does."""
    ids = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    if ids:
        return "a", ids

    special = set(tokenizer.all_special_tokens)
    vocabulary = tokenizer.get_vocab()
    for text in sorted(vocabulary, key=vocabulary.__getitem__):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids and text not in special:
            return text, ids
    return "a", []


def list_special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens that a text may spell, with their ids."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token.content] = token_id
    return {token: token_id for token, token_id in special.items() if token}


def find_unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of text that a tokenizer does not know; None for one that knows every byte."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.unk_token_id
    kind = type(backend.model).__name__
    if kind != "Unigram":
        token = backend.model.unk_token
        return backend.token_to_id(token) if token else None
    if tokenizer.unk_token_id is not None:
        return tokenizer.unk_token_id
    return json.loads(backend.to_str())["model"]["unk_id"]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts. `special_tokens` is SPLIT or PARSE; the head of this file says what these, and a frame,
    are."""

    tokenizer: PreTrainedTokenizerBase
    special_tokens: str

    @cached_property
    def frame(self) -> Frame:
        """The ids that the tokenizer puts before and after a text."""
        return find_frame(self.tokenizer)

    @cached_property
    def target_frame(self) -> Frame:
        """The ids that the tokenizer puts before and after a decoder's text."""
        return find_frame(self.tokenizer, is_target=True)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens that a text may spell, with their ids."""
        return list_special_tokens(self.tokenizer)

    @cached_property
    def control_ids(self) -> set[int]:
        """The special ids that ordinary text must not have: all except the unknown token, which replaces text
        that the tokenizer does not know."""
        return {*self.special_ids.values()} - {find_unknown_id(self.tokenizer)}

    @cached_property
    def spelled_pattern(self) -> str:
        """A regular expression, of Python and RE2, for the special tokens that a text spells."""
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        return "|".join(re.escape(token) for token in longest_first)

    @cached_property
    def may_normalize(self) -> bool:
        """Whether a text may become a special token that it does not spell, as in lower case."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend is None or backend.normalizer is not None

    def parses_control(self, text: str) -> bool:
        """Whether a text has ids of special tokens where these are parsed."""
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)
        return not self.control_ids.isdisjoint(encoded["input_ids"])

    def count_spelled(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """How many special tokens each text spells."""
        if not self.special_ids:
            return pa.chunked_array([pa.nulls(len(texts), pa.int32()).fill_null(0)])
        # The pattern is compiled for each chunk, and a batch of short documents may have hundreds.
        joined = texts.combine_chunks()
        counts = pc.count_substring_regex(joined, pattern=self.spelled_pattern)
        return pa.chunked_array([counts.cast(pa.int32())])

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text within its frame."""
        if self.special_tokens == PARSE:
            encoded = self.run_tokenizer(self.tokenizer, texts, split_special_tokens=False)
            return self.remove_doubled_frames(encoded)

        # SPLIT. A slow tokenizer would also ignore added tokens that are not special.
        if not self.tokenizer.is_fast:
            return self.encode_without_backend(texts)
        # In spite of `split_special_tokens`, it would find special tokens in its model's own vocabulary.
        if self.backend_without_special is not None:
            return self.encode_framed(self.backend_without_special, texts, self.frame)
        return self.run_tokenizer(self.tokenizer, texts, split_special_tokens=True)

    def encode_target(self, text: str) -> list[int]:
        """The ids of a decoder's text within its frame, with special tokens split: the cases are those of
        `encode`. Tokenizers of several languages have another frame for it than for an encoder's text."""
        if not self.tokenizer.is_fast:
            return self.encode_without_backend([text], is_target=True)[0]
        if self.backend_without_special is not None:
            return self.encode_framed(self.backend_without_special, [text], self.target_frame)[0]
        return self.run_tokenizer(self.tokenizer, [text], split_special_tokens=True, is_target=True)[0]

    def encode_body(self, text: str) -> list[int]:
        """The ids of a text without a frame, as `encode` with SPLIT."""
        if self.tokenizer.is_fast and self.backend_without_special is None:
            encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            return list(encoded["input_ids"])
        begin, end = self.frame
        (ids,) = self.encode([text])
        return ids[len(begin) : len(ids) - len(end)]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters (begin, end) of each token that `encode` with SPLIT gives of a text, (0, 0) for the
        tokens of the frame. Only for fast tokenizers."""
        if self.backend_without_special is not None:
            begin, end = self.frame
            encoding = self.backend_without_special.encode(text, add_special_tokens=False)
            return [(0, 0)] * len(begin) + encoding.offsets + [(0, 0)] * len(end)
        encoded = self.tokenizer(text, split_special_tokens=True, return_offsets_mapping=True, verbose=False)
        return list(encoded["offset_mapping"])

    @staticmethod
    def encode_framed(backend: Tokenizer, texts: list[str], frame: Frame) -> list[list[int]]:
        """The ids that a backend gives for each text, within a frame: the backend itself adds none."""
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        return [[*frame.begin, *encoding.ids, *frame.end] for encoding in encodings]

    @staticmethod
    def run_tokenizer(
        tokenizer: PreTrainedTokenizerBase,
        texts: list[str],
        *,
        split_special_tokens: bool,
        is_target: bool = False,
    ) -> list[list[int]]:
        """The ids of each text with the special tokens around it; with `is_target` as text of the decoder."""
        encoded = tokenizer(
            None if is_target else texts,
            text_target=texts if is_target else None,
            split_special_tokens=split_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )
        return encoded["input_ids"]

    def remove_doubled_frames(self, documents: list[list[int]]) -> list[list[int]]:
        """Encoded documents, each with its frame once: a text that spells the frame itself has it twice."""
        begin, end = self.frame
        result = []
        for ids in documents:
            if begin and ids[len(begin) : 2 * len(begin)] == begin:
                ids = ids[len(begin) :]
            if end and ids[-2 * len(end) : -len(end)] == end:
                ids = ids[: -len(end)]
            result.append(ids)
        return result

    @cached_property
    def backend_without_special(self) -> Tokenizer | None:
        """A backend that never gives special tokens, for a fast tokenizer that would; None for others.

        With `split_special_tokens` a tokenizer looks for no added tokens in a text, but its model may still
        find special tokens in its own vocabulary: word-level and Unigram models (T5) have `</s>` there."""
        # Whether the model finds a special token can only be tried: alone, as a word and within one.
        samples: list[str] = []
        for token in self.special_ids:
            samples += [token, f"a {token} a", f"a{token}a"]
        if not samples:
            return None
        begin, end = self.frame
        encoded = self.run_tokenizer(self.tokenizer, samples, split_special_tokens=True)
        bodies = [ids[len(begin) : len(ids) - len(end)] for ids in encoded]
        if not any(self.control_ids.intersection(body) for body in bodies):
            return None
        return rename_tokens(self.tokenizer, set(self.special_ids))

    @cached_property
    def words_only(self) -> PreTrainedTokenizerBase:
        """A copy of a slow tokenizer that finds added tokens in a text, but no special ones."""
        words_only = copy.copy(self.tokenizer)
        words_only.tokens_trie = Trie()
        for token in self.tokenizer.added_tokens_decoder.values():
            if token.content not in self.special_ids:
                words_only.tokens_trie.add(token.content)
        return words_only

    def encode_without_backend(self, texts: list[str], *, is_target: bool = False) -> list[list[int]]:
        """As `encode` with SPLIT, for a slow tokenizer: its `split_special_tokens` would ignore all added
        tokens, special or not."""
        begin, end = self.target_frame if is_target else self.frame
        documents = self.run_tokenizer(
            self.words_only, texts, split_special_tokens=False, is_target=is_target
        )
        for number, ids in enumerate(documents):
            # The model's own vocabulary may have special tokens, which are then found in the body.
            if self.control_ids.intersection(ids[len(begin) : len(ids) - len(end)]):
                body = self.encode_by_character(self.words_only, texts[number])
                documents[number] = [*begin, *body, *end]
        return documents

    def encode_by_character(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """A text in which each special token that it spells is encoded character by character."""
        ids: list[int] = []
        for piece in re.split(f"({self.spelled_pattern})", text):
            units = list(piece) if piece in self.special_ids else [piece]
            for unit in units:
                encoded = tokenizer(unit, add_special_tokens=False, split_special_tokens=False, verbose=False)
                ids += [token_id for token_id in encoded["input_ids"] if token_id not in self.control_ids]
        return ids


def rename_tokens(tokenizer: Any, tokens: set[str]) -> Tokenizer:
    """A copy of a fast tokenizer's backend, with the same ids, that never gives the `tokens` and adds no
    frame: the tokens get names that no text has, and merges of a BPE do not make them. The unknown token
    keeps its name."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding", "post_processor"):
        definition[setting] = None
    # Entries are renamed and not removed: an id is a position in the vocabulary.
    model = definition["model"]
    hidden = tokens - {model.get("unk_token")}
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        merges = [merge for merge in model["merges"] if hidden.isdisjoint(merge_entries(merge, prefix))]
        model["merges"] = merges
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hide(token, hidden): token_id for token, token_id in model["vocab"].items()}
    else:  # of Unigram, whose unknown token is known by its index
        model["vocab"] = [[hide(token, hidden), score] for token, score in model["vocab"]]
    # Added tokens are renamed and not removed: the ids of later ones depend on how many there are.
    for token in definition["added_tokens"]:
        token["content"] = hide(token["content"], hidden)

    backend = Tokenizer.from_str(json.dumps(definition))
    backend.encode_special_tokens = True  # of those that keep their names
    return backend


def merge_entries(merge: str | Sequence[str], prefix: str) -> tuple[str, str, str]:
    """The three vocabulary entries of a merge of a BPE: the two that it joins and the one that it makes. The
    file has a merge as a pair, or as a text with a blank between. The `prefix` of entries within a word (##
    of BERT) is left out of the second entry."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first, second, first + second.removeprefix(prefix)


def hide(token: str, hidden: set[str]) -> str:
    """The name of a vocabulary entry: one that no text has for the `hidden` tokens, else its own."""
    return PRIVATE + token if token in hidden else token
