"""Where a text may be cut whose spaces become `▁`, as SentencePiece's do: read from what a tokenizer's
normaliser, pre-tokenizer and model are."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import normalizers

Step = Mapping[str, Any]
MARK = "\u2581"
LOST = " \t\n\r"  # blanks that part words
RUNS = (f"[ {MARK}]*[^ {MARK}]+", f"[ {MARK}]+")  # a run of them with the word behind it
BEFORE_EACH = (f"[ {MARK}]?[^ {MARK}]+", f"[ {MARK}]")  # only the last of them
# Characters that are no part of a space's grapheme, neither before nor behind it.
_BESIDE = (
    r"\x00-\x7f\xa1-\xac\xae-\u02ff\u0370-\u0482\u048a-\u0559\u2010-\u2027\u2030-\u205e\u2070-\u20cf"
    r"\u2100-\u2bff\u3001-\u3029\u3041-\u3096\u30a0-\ua48c\uac00-\ud7a3\uff01-\uff9d\U0001f300-\U0001f3fa"
    r"\U0001f400-\U0001faff"
)
# Words, and the spaces that may be part of a grapheme.
APART = rf"(?:[^{LOST}]++| (?=[^{_BESIDE}])|(?<=[^{_BESIDE}]) )++"
# Left and right of a space are characters of ASCII that are graphemes, each.
_LEFT, _RIGHT = r"(?:(?<=[\x00-\x7f][!-~])|(?<=\A[!-~]))", r"(?=[!-~](?:[\x00-\x7f]|\Z))"
_JOINED = rf"(?<! )(?!{_LEFT}) ++| ++(?!{_RIGHT})"
AT_RUNS = rf"(?:[^ ]++|\A ++|{_JOINED})++"
AT_SINGLE = rf"(?:[^ ]++|(?<! ) {{2,}}+|{_JOINED})++"


class Found(NamedTuple):
    """How to cut: the pattern of the parts, the characters before which a text that begins with them gets no
    space (None where none does), and what the tokenizer of the parts has of its own."""

    part: str
    unspaced: str | None
    own: dict[str, Any]


def at_spaces(told: Step, normalizing: Sequence[Step], steps: Sequence[Step]) -> Found | None:
    """How to cut for a tokenizer with these normalisers and pre-tokenizers; None where that is not known."""
    mark = steps[0] if len(steps) == 1 and is_metaspace(steps[0]) else None
    if mark is None and steps and not (len(steps) == 1 and splits_nothing(steps[0])):
        return None
    named = [each["type"] for each in normalizing]
    replaced = [each for each in normalizing if is_replacing(each)]
    prepends = [each["prepend"] for each in normalizing if each["type"] == "Prepend"]
    if len(replaced) + len(prepends) < len(named):
        return at_ascii(mark, normalizing) if mark else None
    if prepends not in ([], [MARK]) or not (mark or replaced):
        return None
    is_split = bool(mark and mark.get("split", True))
    if not is_split and not keeps_marks_first(told["model"]):
        return None
    scheme = scheme_of(mark) if mark else "never"
    unspaced = "" if prepends else None if scheme == "never" else " " + MARK
    own: dict[str, Any] = {"normalizer": {"type": "Sequence", "normalizers": replaced} if replaced else None}
    if mark:
        own["pre_tokenizer"] = metaspace(is_split)
    return Found("|".join(BEFORE_EACH if is_split else RUNS), unspaced, own)


def at_ascii(mark: Step, normalizing: Sequence[Step]) -> Found | None:
    """How to cut where characters are changed before their spaces are marked: beside those that are not."""
    charsmaps, others = charsmap_first(normalizing)
    runs = [each for each in others if is_run_replaced(each)]
    if len(runs) + sum(each["type"] == "Strip" for each in others) < len(others):
        return None
    if not mark.get("split", True) or scheme_of(mark) == "never":
        return None
    visible = " ".join(map(chr, range(ord("!"), ord("~") + 1)))
    if any(changed(each, visible) != visible for each in charsmaps):
        return None
    return Found(AT_RUNS if runs else AT_SINGLE, None, {})


def charsmap_first(normalizing: Sequence[Step]) -> tuple[Sequence[Step], Sequence[Step]]:
    """The charsmap that a normaliser begins with, if it does, and what follows."""
    at = int(bool(normalizing) and normalizing[0]["type"] == "Precompiled")
    return normalizing[:at], normalizing[at:]


def keeps_blanks(charsmap: Step) -> bool:
    """Whether blanks that part words stay such blanks."""
    return all(
        image and set(image) <= set(LOST) for image in (changed(charsmap, each) for each in (*LOST, "\r\n"))
    )


def changed(charsmap: Step, text: str) -> str:
    made = normalizers.Precompiled(base64.b64decode(charsmap["precompiled_charsmap"]))
    return str(made.normalize_str(text))


def keeps_marks_first(model: Step) -> bool:
    """Whether a model joins nothing across the place where a run of `▁` begins."""
    vocabulary = model.get("vocab", {})
    if model["type"] != "BPE" or MARK not in vocabulary or len(set(vocabulary.values())) < len(vocabulary):
        return False
    if any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")):
        return False
    if not keeps_unknown(model, vocabulary):
        return False
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    return all(left.endswith(MARK) or not right.startswith(MARK) for left, right in pairs)


def keeps_unknown(model: Step, vocabulary: Mapping[str, int]) -> bool:
    """Whether a character that a model does not know is something to it, and no `▁`: what is lost would leave
    those beside it to be joined."""
    unknown, falling = model.get("unk_token"), {f"<0x{byte:02X}>" for byte in range(256)}
    if unknown is None:
        return bool(model.get("byte_fallback")) and falling <= vocabulary.keys()
    return unknown in vocabulary and not unknown.endswith(MARK)


def is_metaspace(step: Step) -> bool:
    return step["type"] == "Metaspace" and step["replacement"] == MARK


def scheme_of(step: Step) -> str:
    """Where a Metaspace puts a `▁`: always, first or never."""
    return str(step.get("prepend_scheme", "always"))


def metaspace(is_split: bool) -> dict[str, Any]:
    """One that puts none."""
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "never", "split": is_split}


def is_replacing(step: Step) -> bool:
    """Whether a normaliser makes `▁` of each space, and does nothing else."""
    return step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, MARK)


def is_run_replaced(step: Step, by: Sequence[str] = (" ", MARK)) -> bool:
    """Whether a normaliser makes one space, or one `▁`, of each run of spaces, and does nothing else."""
    return step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"} and step["content"] in by


def splits_nothing(step: Step) -> bool:
    """Whether it splits at spaces, of which there are none where each has become a `▁`."""
    told = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return dict(step) == told
