"""New tokens of a domain for the tokenizer of a checkpoint: learned from text, and added to its vocabulary.

Byte-pair encoding is continued: words of the text are cut by the tokenizer as it is, and further merges are
learned of these tokens. They come after all merges of the checkpoint, so that text without a new token keeps
its ids (AdaptBPE and related work, arXiv 2512.03989). A WordPiece or Unigram tokenizer gets whole words."""

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase

from cpt.core.exceptions import InvalidOptionError
from cpt.data.text_encoder import find_unknown_id, merge_entries

WHOLE_WORDS = ("WordPiece", "Unigram")  # models that get whole words; BPE gets merges
SPACES = "▁Ġ"  # signs that stand for a blank in vocabulary entries
MAX_WORDS = 4_000_000  # distinct words that are counted; then those seen once are dropped
MAX_REPEATS = 10_000  # of a word in one text of the BPE trainer
SURPLUS = 1.2  # merges learned per requested one: some give existing entries
WORDS = "ab, cd"  # three words, of a pre-tokenizer that splits punctuation
FIRST_SIGN = 0x10000  # characters from here on stand for tokens in the BPE trainer


@dataclass(frozen=True)
class WordRules:
    """Which tokens of a text are one word. `splits_words`: as the pre-tokenizer splits it. Where it splits
    nothing, or blanks only, a word is letters, with the sign of a blank before them. By token id [entries]:
    `is_separate` tokens are words of their own (control tokens, bytes, unknown text), `begins_word` those
    that begin with the sign of a blank."""

    splits_words: bool
    is_separate: np.ndarray
    begins_word: np.ndarray


@dataclass
class WordCounts:
    """How often the words of a text occur that are several tokens, by their ids as bytes of int32; `dropped`
    is how many were too rare to be kept in memory."""

    counts: Counter[bytes] = field(default_factory=Counter)
    num_tokens: int = 0
    dropped: int = 0

    def add(self, encoding: Encoding, rules: WordRules) -> None:
        """Adds the words of an encoded text."""
        ids = np.array(encoding.ids, np.int32)
        self.num_tokens += len(ids)
        words = find_word_bounds(ids, encoding, rules)
        self.counts.update(ids[begin:end].tobytes() for begin, end in words)
        if len(self.counts) > MAX_WORDS:
            self.drop_rare()

    def drop_rare(self) -> None:
        """Forgets the words that were seen once."""
        num_before = len(self.counts)
        self.counts = Counter({word: count for word, count in self.counts.items() if count > 1})
        self.dropped += num_before - len(self.counts)

    def select(self, tokenizer: PreTrainedTokenizerBase, min_count: int) -> dict[tuple[int, ...], int]:
        """The words with a letter that occur `min_count` times or more, in a fixed order: no indentation,
        rules or numbers."""
        selected = {}
        for word, count in sorted(self.counts.items()):
            if count < min_count:
                continue
            ids = np.frombuffer(word, np.int32).tolist()
            text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
            if any(map(str.isalpha, text)):
                selected[tuple(ids)] = count
        return selected


@dataclass(frozen=True)
class Extension:
    """Entries that a vocabulary gets, in the order of their ids, and for BPE the merges that make them. For
    whole words `scores` has the log-probability of each."""

    entries: list[str]
    merges: list[tuple[str, str]]
    scores: list[float]


def check_tokenizer_kind(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ValueError for a tokenizer whose vocabulary cannot be extended."""
    kind = "without a fast version"
    if tokenizer.is_fast:
        kind = type(tokenizer.backend_tokenizer.model).__name__
    if kind not in ("BPE", *WHOLE_WORDS):
        raise InvalidOptionError(
            "--base",
            name,
            reason=f"its tokenizer is {kind}",
            allowed=f"a checkpoint with a fast tokenizer of BPE, {', '.join(WHOLE_WORDS)}",
        )


def make_text_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of a fast tokenizer's backend that encodes whole texts and puts nothing around them; special
    tokens that a text spells are text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def make_word_rules(tokenizer: PreTrainedTokenizerBase) -> WordRules:
    """The rules of words for a fast tokenizer."""
    backend = tokenizer.backend_tokenizer
    splits_words = False
    if backend.pre_tokenizer is not None:
        text = WORDS if backend.normalizer is None else backend.normalizer.normalize_str(WORDS)
        splits_words = len(backend.pre_tokenizer.pre_tokenize_str(text)) > 2

    vocabulary = tokenizer.get_vocab()
    is_separate = np.zeros(max(vocabulary.values()) + 1, bool)
    begins_word = np.zeros_like(is_separate)
    for entry, token_id in vocabulary.items():
        is_byte = entry.startswith("<0x") and entry.endswith(">")
        is_separate[token_id] = is_byte or (not splits_words and not is_word_part(entry))
        begins_word[token_id] = entry[:1] in SPACES
    is_separate[list(tokenizer.added_tokens_decoder)] = True
    unknown = find_unknown_id(tokenizer)
    if unknown is not None:
        is_separate[unknown] = True
    return WordRules(splits_words, is_separate, begins_word)


def is_word_part(entry: str) -> bool:
    """Whether an entry is letters, perhaps with the sign of a blank before them."""
    letters = entry[1:] if entry[:1] in SPACES else entry
    return all(unicodedata.category(letter)[0] in "LM" for letter in letters)


def find_word_bounds(ids: np.ndarray, encoding: Encoding, rules: WordRules) -> Iterator[tuple[int, int]]:
    """Begin and end of each word of an encoded text that is several tokens."""
    if len(ids) == 0:
        return
    is_first = rules.is_separate[ids]
    is_first[1:] |= rules.is_separate[ids[:-1]]
    if rules.splits_words:
        words = np.array(encoding.word_ids, np.int32)
        is_first[1:] |= words[1:] != words[:-1]
    else:
        is_first |= rules.begins_word[ids]
    is_first[0] = True

    begins = np.flatnonzero(is_first)
    ends = np.append(begins[1:], len(ids))
    is_long = ends - begins > 1
    yield from zip(begins[is_long].tolist(), ends[is_long].tolist(), strict=True)


def learn_extension(
    tokenizer: PreTrainedTokenizerBase,
    words: WordCounts,
    *,
    num_tokens: int,
    min_count: int,
    shows_progress: bool,
) -> Extension:
    """Up to `num_tokens` new entries for a fast tokenizer, of words that occur `min_count` times or more."""
    selected = words.select(tokenizer, min_count)
    if type(tokenizer.backend_tokenizer.model).__name__ in WHOLE_WORDS:
        return choose_words(tokenizer, selected, num_tokens=num_tokens, total=words.num_tokens)
    merges = learn_merges(
        selected,
        num_merges=math.ceil(num_tokens * SURPLUS),
        min_count=min_count,
        shows_progress=shows_progress,
    )
    return name_merges(tokenizer, merges, num_tokens=num_tokens)


def learn_merges(
    words: Mapping[tuple[int, ...], int], *, num_merges: int, min_count: int, shows_progress: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Merges of byte-pair encoding over words (token ids, with counts), as pairs of sequences of ids.

    The trainer of `tokenizers` begins with characters: each token is one here."""
    ids_in_words: set[int] = set()
    for word in words:
        ids_in_words.update(word)
    signs = {token_id: chr(FIRST_SIGN + number) for number, token_id in enumerate(sorted(ids_in_words))}
    ids = {sign: token_id for token_id, sign in signs.items()}

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=len(signs) + num_merges,
        min_frequency=min_count,
        initial_alphabet=list(ids),
        show_progress=shows_progress,
    )
    bpe.train_from_iterator(repeat_words(words, signs), trainer)

    merges = []
    for first, second in json.loads(bpe.to_str())["model"]["merges"]:
        merges.append((tuple(ids[sign] for sign in first), tuple(ids[sign] for sign in second)))
    return merges


def repeat_words(words: Mapping[tuple[int, ...], int], signs: Mapping[int, str]) -> Iterator[str]:
    """Text with each word as often as it was counted, as one sign for each of its tokens."""
    for word, count in words.items():
        text = "".join(signs[token_id] for token_id in word) + " "
        while count > 0:
            yield text * min(count, MAX_REPEATS)
            count -= MAX_REPEATS


def name_merges(
    tokenizer: PreTrainedTokenizerBase,
    merges: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    num_tokens: int,
) -> Extension:
    """Merges of token ids as merges of entries, until they make `num_tokens` new ones.

    One that would make an entry of the vocabulary is left out, with those that build on it: it would change
    the ids of text without a new token."""
    vocabulary = tokenizer.get_vocab()
    prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None) or ""
    entry_of: dict[tuple[int, ...], str] = {(token_id,): entry for entry, token_id in vocabulary.items()}
    new_entries: dict[str, None] = {}  # in order
    new_merges: dict[tuple[str, str], None] = {}

    for first, second in merges:
        if first not in entry_of or second not in entry_of:
            continue
        first_entry, second_entry, joined = merge_entries((entry_of[first], entry_of[second]), prefix)
        if joined in vocabulary:
            continue
        if joined not in new_entries and len(new_entries) == num_tokens:
            break
        entry_of[first + second] = joined
        new_entries[joined] = None
        new_merges[first_entry, second_entry] = None
    return Extension(entries=list(new_entries), merges=list(new_merges), scores=[])


def choose_words(
    tokenizer: PreTrainedTokenizerBase,
    words: Mapping[tuple[int, ...], int],
    *,
    num_tokens: int,
    total: int,
) -> Extension:
    """The whole words (token ids, with counts) that save most of a text's `total` tokens. The score of a
    piece of Unigram is its log-probability."""
    vocabulary = tokenizer.get_vocab()
    entries = {token_id: entry for entry, token_id in vocabulary.items()}
    prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None) or ""
    savings: dict[str, int] = {}
    counts: dict[str, int] = {}
    for word, count in words.items():
        first, *continuations = (entries[token_id] for token_id in word)
        text = first + "".join(piece.removeprefix(prefix) for piece in continuations)
        if text not in vocabulary:
            savings[text] = count * (len(word) - 1)
            counts[text] = count

    chosen = sorted(savings, key=lambda text: (-savings[text], text))[:num_tokens]
    scores = [math.log(counts[text] / total) for text in chosen]
    return Extension(entries=chosen, merges=[], scores=scores)


def extend_definition(tokenizer: PreTrainedTokenizerBase, extension: Extension) -> dict[str, Any]:
    """A fast tokenizer serialized with further entries, whose ids follow all of its own. Raises ValueError
    for a Unigram vocabulary with unused ids."""
    definition: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    model = definition["model"]
    vocabulary = tokenizer.get_vocab()
    first_id = max(vocabulary.values()) + 1

    # Added tokens become entries of the model: others get their ids by its size when a file is loaded.
    added_tokens = sorted((token["id"], token["content"]) for token in definition["added_tokens"])
    if isinstance(model["vocab"], dict):
        for token_id, content in added_tokens:
            model["vocab"].setdefault(content, token_id)
        for number, entry in enumerate(extension.entries):
            model["vocab"][entry] = first_id + number
    else:
        lowest_score = min(score for _, score in model["vocab"])
        for token_id, content in added_tokens:
            if token_id == len(model["vocab"]):
                model["vocab"].append([content, lowest_score])
        if len(model["vocab"]) != first_id:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} has unused ids, and no entries can follow. "
                "Allowed: a Unigram tokenizer with an entry for each id"
            )
        model["vocab"] += map(list, zip(extension.entries, extension.scores, strict=True))
    if "merges" in model:
        model["merges"] += map(list, extension.merges)
    return definition


def encode_in_batches(backend: Tokenizer, texts: Iterable[str], *, size: int) -> Iterator[Encoding]:
    """The encodings of texts, of about `size` characters at once on all cores."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= size:
            yield from backend.encode_batch(batch, add_special_tokens=False)
            batch = []
            num_characters = 0
    yield from backend.encode_batch(batch, add_special_tokens=False)
