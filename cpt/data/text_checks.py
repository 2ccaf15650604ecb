"""What a run logs of its raw text as token ids: unknown tokens, special tokens that the text spells, and rows
without the token that begins a text."""

import logging
from collections.abc import Mapping, Sequence

from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.packing import Packed
from cpt.data.sources.base import SPLIT
from cpt.data.text_encoder import find_frame
from cpt.data.text_format import TextFormat

log = logging.getLogger(__name__)
HARMFUL_SHARE = 0.01  # of unknown tokens: above it the log warns
SHOWN = 3  # texts that a line names


def compute_unknown_share(text: Packed) -> float:
    """Which share of the tokens of a text the tokenizer does not know, 0 to 1; 0 of examples."""
    return text.facts.get("unknown", 0) / max(1, text.facts.get("body", 0))


def report_texts(texts: Mapping[str, Packed], text_format: TextFormat, *, is_causal: bool) -> None:
    """Logs unknown and spelled special tokens of texts, and how many rows lack the BOS token that the
    tokenizer puts before a text. `texts` are raw, by `NAME SPLIT`."""
    if not is_first_process():
        return
    report_unknown(texts, text_format)
    report_spelled(texts, text_format)
    if is_causal and text_format.row_start is None:
        report_row_starts(texts, text_format)


def report_unknown(texts: Mapping[str, Packed], text_format: TextFormat) -> None:
    """Logs which texts have unknown tokens, beginning with the text that has the largest share of them."""
    shares = {name: compute_unknown_share(text) for name, text in texts.items()}
    affected = [name for name, share in shares.items() if share > 0]
    affected.sort(key=lambda name: -shares[name])
    if not affected:
        return
    level = logging.WARNING if shares[affected[0]] > HARMFUL_SHARE else logging.INFO
    log.log(
        level,
        "Unknown tokens, which are trained on and scored as one token, in %d of %s: %s (tokenizer %s)",
        len(affected),
        count_noun(len(texts), "text"),
        list_first([f"{shares[name]:.2%} of {name}" for name in affected]),
        text_format.tokenizer.name_or_path,
    )


def report_spelled(texts: Mapping[str, Packed], text_format: TextFormat) -> None:
    """Logs how many special tokens the texts spell, beginning with the text that spells most."""
    counts = {name: text.facts.get("spelled", 0) for name, text in texts.items()}
    affected = [name for name, count in counts.items() if count > 0]
    affected.sort(key=lambda name: -counts[name])
    if not affected:
        return
    treatment = "parsed as their ids (domains.special_tokens=parse)"
    if text_format.special_tokens == SPLIT:
        treatment = "split into ordinary tokens (domains.special_tokens=split; parse gives their ids)"
    log.info(
        "Special tokens that the text spells: %s; %s",
        list_first([f"{counts[name]:,} in {name}" for name in affected]),
        treatment,
    )


def report_row_starts(texts: Mapping[str, Packed], text_format: TextFormat) -> None:
    """Logs how many rows begin with the BOS token, of a tokenizer that puts it before a text."""
    bos = text_format.tokenizer.bos_token_id
    if bos is None or find_frame(text_format.tokenizer).begin[:1] != [bos]:
        return
    rows = sum(len(text) for text in texts.values())
    starts = sum(text.facts.get("rows_with_bos", 0) for text in texts.values())
    log.info(
        "%.0f %% of rows begin with %s (domains.bos_in_rows; true begins each with it)",
        100 * starts / max(1, rows),
        text_format.name_of(bos),
    )


def check_training_text(name: str, text: Packed, text_format: TextFormat) -> None:
    """Raises ValueError for training text of which the tokenizer knows nothing."""
    if text.facts.get("unknown", 0) and not text.text_tokens.any():
        tokenizer_name = text_format.tokenizer.name_or_path
        raise ValueError(
            f"the training text of {name} has no token that the tokenizer {tokenizer_name} knows: "
            f"{compute_unknown_share(text):.0%} of its tokens are unknown. "
            "Allowed: text in a script of its vocabulary, or a model with another tokenizer"
        )


def list_first(items: Sequence[str]) -> str:
    """The first items, and how many more there are."""
    listed = ", ".join(items[:SHOWN])
    num_remaining = len(items) - SHOWN
    return f"{listed} and {num_remaining} more" if num_remaining > 0 else listed
