"""What a perplexity depends on beside the model: where all of it is equal, runs are comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpt.core.config import digest

if TYPE_CHECKING:
    from cpt.evaluation.scores import Scores

# As scores.json has them under `conditions`, and as config.yaml has those of older runs.
SETTINGS = {"score_on": "domains.score_on", "length": "model.length", "mask_rate": "model.mask_rate"}
NOTHING: Mapping[str, Any] = {}
NONE = "none"  # the mask rate of a causal model; the bound where all is scored
CONCAT = "concat"  # how text fills rows where nothing is said


def conditions(scores: Scores, settings: Mapping[str, Any] = NOTHING) -> dict[str, str]:
    """In words, by name: objective, domains, texts (a digest of all of them), score_on, tokenizer (a digest),
    length, mask_rate, packing, scored (how many tokens), cap (of each text at most, where that bounds one).

    What scores.json lacks is taken from the leaves of a config, `settings`; the rest is unknown. Two unknown
    values are equal where the texts have as many tokens, scored tokens and bytes.
    """
    there = {name: settings[key] for name, key in SETTINGS.items() if key in settings} | scores.conditions
    objective = scores.run["objective"]
    if objective == "causal":
        there["mask_rate"] = NONE
    if objective == "span":
        there["mask_rate"] = f"{there.get('mask_rate')} in spans of {there.get('mean_span')}"
    counted = {"tokenizer": scores.tokens, "score_on": scores.bytes}
    names = ("score_on", "tokenizer", "length", "mask_rate")
    return {
        "objective": objective,
        "domains": ", ".join(sorted(scores.domains)),
        "texts": digest([[name, text_digest(scores, name)] for name in sorted(scores.domains)])[:8],
        **{
            name: str(there[name]) if name in there else _unknown(scores, counted.get(name, scores.scored))
            for name in names
        },
        "packing": str(there.get("packing", CONCAT)),
        "scored": f"{sum(scores.scored)} tokens",  # of the same text fewer are a part of more
        "cap": str(there.get("cap", NONE)),
    }


def text_digest(scores: Scores, name: str) -> str:
    """What the text of a column is known by; where that is unknown, its size."""
    size = scores.bytes[scores.domains.index(name)]
    return str(scores.texts.get(name, {}).get("digest", f"unknown ({size} bytes)"))


def is_unknown(value: str) -> bool:
    return value.startswith("unknown")


def _unknown(scores: Scores, counts: list[int]) -> str:
    by_text = sorted(zip(scores.domains, counts, strict=True))
    return f"unknown ({digest(by_text)[:8]})"


def describe_conditions(given: Mapping[str, str]) -> str:
    """`masked, mask_rate 0.3, length 64, tokenizer 0123abcd, test text 4567cdef`: all but the domains, how
    rows are packed where documents do not stand one after another, and what bounds the scored tokens."""
    rate = f", mask_rate {given['mask_rate']}" * (given["mask_rate"] != NONE)
    rest = (
        f"length {given['length']}, tokenizer {given['tokenizer']}, {given['score_on']} text {given['texts']}"
    )
    packing = f", packing {given['packing']}" * (given["packing"] != CONCAT)
    cap = f", at most {given['cap']} tokens of each text scored" * (given["cap"] != NONE)
    return f"{given['objective']}{rate}, {rest}{packing}{cap}"
