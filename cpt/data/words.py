"""What gives the ids of documents: a tokenizer as transformers calls it, one without transformers, or one
that remembers the ids of words."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter
from sys import getsizeof
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer

from cpt.data.cutting import Cuts, cuts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM = 64 << 20  # bytes of words, with their ids, that a process remembers
SLOT = 100  # bytes of an entry beside the word and its ids
LONGEST = 64  # characters of a word that is remembered
LONG = 1 << 20  # characters of a document that is not cut at once
AT_ONCE = 1 << 16  # parts of such a document that are looked up at once


class Encode(Protocol):
    """What gives the ids of each of some documents, as bytes of int32."""

    def __call__(self, texts: list[str], /) -> list[bytes]: ...


def as_bytes(ids: Iterable[int]) -> bytes:
    """Ids as int32."""
    return array("i", ids).tobytes()


@dataclass(frozen=True)
class Called:
    """A tokenizer as transformers calls it."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, texts: list[str]) -> list[bytes]:
        options = {"return_attention_mask": False, "verbose": False}
        found = self.tokenizer(texts, split_special_tokens=True, **options)["input_ids"]
        return list(map(as_bytes, found))


@dataclass(frozen=True)
class Quick:
    """A fast tokenizer without transformers, as `tokenizers` writes it: the same ids, without the places and
    the words of the tokens, which nobody asks for."""

    written: str

    @cached_property
    def backend(self) -> Tokenizer:
        made = Tokenizer.from_str(self.written)
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True  # those that are spelled out in a text stay text
        return made

    def __call__(self, texts: list[str]) -> list[bytes]:
        return [as_bytes(each.ids) for each in self.backend.encode_batch_fast(texts)]


class Words:
    """The same ids, those of a text's parts that were met before from memory. What it remembers stays behind
    where it is sent to another process."""

    def __init__(self, written: str, cuts: Cuts) -> None:
        self.made_of = (written, cuts)
        self.whole, self.alone = Quick(written), Quick(cuts.written)
        self.part, self.unspaced = re.compile(cuts.part), cuts.unspaced
        self.spelled = re.compile("|".join(map(re.escape, cuts.whole))) if cuts.whole else None
        self.before, self.after = as_bytes(cuts.before), as_bytes(cuts.after)
        self.known: dict[str, bytes] = {}
        self.held = 0  # bytes of what is known

    def __reduce__(self) -> tuple[type[Words], tuple[str, Cuts]]:
        return Words, self.made_of

    def __call__(self, texts: list[str]) -> list[bytes]:
        ways = list(map(self.way, texts))
        own = {
            way: [text for text, each in zip(texts, ways, strict=True) if each == way] for way in set(ways)
        }
        made = {way: iter(way(few)) for way, few in own.items()}
        return [next(made[way]) for way in ways]

    def way(self, text: str) -> Encode:
        """What makes the ids of a text."""
        if self.spelled is not None and self.spelled.search(text):
            return self.whole
        return self.at_once if len(text) <= LONG else self.in_turn

    def at_once(self, texts: list[str]) -> list[bytes]:
        """The ids of texts that are cut together."""
        return self.framed(self.look_up([self.part.findall(self.spaced(text)) for text in texts]))

    def in_turn(self, texts: list[str]) -> list[bytes]:
        """The same of long texts, without all their parts in memory."""
        parts = (map(itemgetter(0), self.part.finditer(self.spaced(text))) for text in texts)
        return self.framed(b"".join(self.look_up([few])[0] for few in lists(each)) for each in parts)

    def spaced(self, text: str) -> str:
        if not text or self.unspaced is None or text[0] in self.unspaced:
            return text
        return " " + text

    def framed(self, ids: Iterable[bytes]) -> list[bytes]:
        return [self.before + each + self.after for each in ids]

    def look_up(self, texts: list[list[str]]) -> list[bytes]:
        """The ids of the parts of texts, joined; those that are not known are made together."""
        missing = list(set().union(*texts).difference(self.known))
        self.known.update(zip(missing, self.alone(missing), strict=True))
        found = [b"".join(map(self.known.__getitem__, parts)) for parts in texts]
        self.settle(missing)
        return found

    def settle(self, new: list[str]) -> None:
        """Forgets long parts, and all of them where they have become too many."""
        for part in new:
            if len(part) > LONGEST:
                del self.known[part]
            else:
                self.held += getsizeof(part) + getsizeof(self.known[part]) + SLOT
        if self.held > ROOM:
            self.known, self.held = {}, 0


def lists(parts: Iterable[str]) -> Iterator[list[str]]:
    """Parts in lists of AT_ONCE."""
    left = iter(parts)
    while few := list(islice(left, AT_ONCE)):
        yield few


def quick(tokenizer: PreTrainedTokenizerBase) -> Quick | Words | None:
    """A tokenizer without transformers, which remembers words where it is known how a text may be cut; None
    where a class of its own does more than its backend, or that cannot be written."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = getattr(kind, "_encode_plus", None), kind.__call__
    if own != (PreTrainedTokenizerFast._encode_plus, PreTrainedTokenizerBase.__call__):
        return None
    try:
        written = tokenizer.backend_tokenizer.to_str()
    except Exception:  # of Rust: a part that is written in Python
        return None
    cuts = cuts_of(written)
    return Words(written, cuts) if cuts else Quick(written)
