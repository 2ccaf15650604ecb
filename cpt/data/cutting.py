"""Where a text may be cut so that its tokens are those of the parts, one after another: read from what a
tokenizer's normaliser, pre-tokenizer, model and post-processor are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpt.data.spaces import (
    APART,
    Found,
    Step,
    at_spaces,
    charsmap_first,
    is_metaspace,
    is_run_replaced,
    keeps_blanks,
    scheme_of,
)

# Unicode's White_Space, which is what \s of the library's patterns means; Python's has U+001C to U+001F too.
BLANK = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_OTHER = r"\x00-\x08\x0e-\x1f!-@\[-`{-\x7f"  # of ASCII neither a letter nor a blank
_WORD = (  # to where a letter of ASCII ends and an _OTHER begins: no pattern goes across
    rf"(?:[A-Za-z]++(?![^\x00-\x7f])|[{_OTHER}]++[A-Za-z]*+(?![^\x00-\x7f])|[^{BLANK}]+)"
)
# The last blank of a run stands with the word behind it, the others for themselves.
BLANK_FIRST = rf"[{BLANK}]?{_WORD}|[{BLANK}]+(?![^{BLANK}])"
# The same, but a run stands with the word before it, whole where it ends in the end of a line.
_RUN = rf"[{BLANK}]+(?:(?<=[\r\n])|(?![^{BLANK}]))"
LINE_END_LAST = rf"[{BLANK}]?{_WORD}(?:{_RUN})?|{_RUN}"
BLANKS_LOST = r"[^ \t\n\r]+"  # blanks that every normaliser leaves in place, and that end a word
_SIGNS = r"!-/:-@\[-`{-~"
SIGNS_ALONE = (  # the same, and each sign of ASCII is a word
    rf"[A-Za-z0-9]++(?=[{_SIGNS} \t\n\r]|\Z)|[{_SIGNS}]++(?=[A-Za-z0-9 \t\n\r]|\Z)|{BLANKS_LOST}"
)

_CONTRACTIONS, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {  # of GPT-2, Llama 3 and Qwen 2: how to cut where they do
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": BLANK_FIRST,
    _CONTRACTIONS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST: LINE_END_LAST,
    _CONTRACTIONS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST: LINE_END_LAST,
}
MODELS = {  # that make the tokens of a word from the word alone, and what they may say of themselves
    "WordPiece": None,
    "WordLevel": None,
    "BPE": {
        *("type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
        *("fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"),
    },
    "Unigram": {"type", "unk_id", "vocab", "byte_fallback"},
}
SPLITTING = {"WhitespaceSplit", "Whitespace", "BertPreTokenizer"}  # lose blanks, and cut there
WITHIN = SPLITTING | {"Punctuation", "Digits", "ByteLevel"}  # look at what was split before, alone
COMPOSING = {"NFC", "NFD"}  # make no blank of another character, and lose none
CHANGING = COMPOSING | {"NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
COMPOSED_ASCII = set(";`K")  # all of ASCII that NFC makes of other characters


@dataclass(frozen=True)
class Cuts:
    """How to cut: the pattern of the parts, the characters before which a text that begins with them gets no
    space (None where none does), what makes a text one that has to stay whole where it stands in it, the ids
    before and behind, and a tokenizer of the parts, as `tokenizers` writes it."""

    part: str
    unspaced: str | None
    whole: tuple[str, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    written: str


def cuts_of(written: str) -> Cuts | None:
    """How to cut for a tokenizer; None where nothing is known that is safe."""
    told = json.loads(written)
    normalizers = flat(told["normalizer"], "normalizers")
    steps = flat(told["pre_tokenizer"], "pretokenizers")
    frame = frame_told(told["post_processor"])
    whole = staying_whole(told["added_tokens"], {each["type"] for each in normalizers})
    if frame is None or whole is None or not is_plain(told["model"]):
        return None
    found = at_spaces(told, normalizers, steps) or cut_at(told, normalizers, steps)
    if found is None:
        return None
    alone = told | {"post_processor": None, "added_tokens": [], "truncation": None, "padding": None}
    return Cuts(found.part, found.unspaced, whole, *frame, json.dumps(alone | found.own))


def flat(told: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """A part of a tokenizer, or those that it is a sequence of."""
    if told is None:
        return []
    if told["type"] != "Sequence":
        return [told]
    return [each for one in told[inner] for each in flat(one, inner)]


def cut_at(told: Mapping[str, Any], normalizers: Sequence[Step], steps: Sequence[Step]) -> Found | None:
    """How to cut for a tokenizer with these normalisers and pre-tokenizers, whose spaces stay spaces until
    words are parted; None where that is not known."""
    kinds = [each["type"] for each in steps]
    names = {each["type"] for each in normalizers}
    if kinds and kinds[0] in SPLITTING:
        is_lost = kinds[0] != "BertPreTokenizer"
        part = lost_at(normalizers) if is_lost else SIGNS_ALONE if names <= CHANGING else None
        return Found(part, None, {}) if part and all(map(is_within, steps)) else None
    if not names <= COMPOSING:
        return None
    if kinds == ["ByteLevel"] and told["pre_tokenizer"]["type"] == "ByteLevel":
        if not steps[0].get("use_regex", True):
            return None
        own = {"pre_tokenizer": told["pre_tokenizer"] | {"add_prefix_space": False}}
        return Found(BLANK_FIRST, " " if steps[0]["add_prefix_space"] else None, own)
    if kinds == ["Split", "ByteLevel"]:
        split, level = steps
        kept = split["behavior"] == "Isolated" and not split["invert"]
        pattern = PATTERNS.get(split["pattern"].get("Regex", ""))
        if not kept or pattern is None or level["add_prefix_space"] or level.get("use_regex", True):
            return None
        return Found(pattern, None, {})
    return None


def lost_at(normalizers: Sequence[Step]) -> str | None:
    """The pattern of the parts where words are parted by blanks that are lost. Graphemes are changed as such,
    so that where they are no space is cut off that may be in one."""
    charsmaps, others = charsmap_first(normalizers)
    known = [each["type"] in CHANGING | {"Strip"} or is_run_replaced(each, by=[" "]) for each in others]
    if not all(known) or not all(map(keeps_blanks, charsmaps)):
        return None
    return APART if charsmaps else BLANKS_LOST


def is_within(step: Step) -> bool:
    """Whether a pre-tokenizer looks at what was split before, alone."""
    return step["type"] in WITHIN or (is_metaspace(step) and scheme_of(step) != "first")


def is_plain(model: Mapping[str, Any]) -> bool:
    """Whether a model makes the same tokens of a word each time."""
    if model.get("type") not in MODELS or model.get("dropout") is not None:
        return False
    known = MODELS[model["type"]]
    return known is None or known.issuperset(model)


def staying_whole(added: Sequence[Mapping[str, Any]], normalizers: set[str]) -> tuple[str, ...] | None:
    """The added tokens that are found in a text, unlike special ones; None where a normalised text may have
    one that the text has not."""
    found = [each for each in added if not each["special"]]
    changed = [each["content"] for each in found if each["normalized"]] if normalizers else []
    if changed and not normalizers <= {"NFC"}:
        return None
    if any(not text.isascii() or COMPOSED_ASCII.intersection(text) for text in changed):
        return None
    return tuple(each["content"] for each in found)


def frame_told(told: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that a post-processor puts before and behind a text; None where it does anything else."""
    steps = [each for each in flat(told, "processors") if each["type"] != "ByteLevel"]
    if not steps:
        return (), ()
    step = steps[0]
    if len(steps) > 1:
        return None
    if step["type"] in ("RobertaProcessing", "BertProcessing"):
        return (step["cls"][1],), (step["sep"][1],)
    if step["type"] != "TemplateProcessing":
        return None
    pieces = [next(iter(each.items())) for each in step["single"]]
    texts = [at for at, (kind, _) in enumerate(pieces) if kind == "Sequence"]
    if len(texts) != 1 or pieces[texts[0]][1]["id"] != "A":
        return None
    ids = [
        step["special_tokens"][each["id"]]["ids"] if kind == "SpecialToken" else [] for kind, each in pieces
    ]
    return tuple(sum(ids[: texts[0]], [])), tuple(sum(ids[texts[0] :], []))
