"""What makes runs comparable as runs of methods: their base model, and the settings that decide a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cpt.core.config import digest, identity
from cpt.evaluation.scores import Scores

MANIFEST = "identity.json"  # of a run folder: the hashes of what the run was made of
WEIGHTS = (".safetensors", ".bin")
SAME_WEIGHTS = 1e-5  # nats: the same weights in other files, measured again
OTHER_NUMERICS = 0.02  # nats: the same weights in another precision, or on another device
HASH_DIGITS = 8
# Settings that a comparison has something better for than their values.
REPRESENTED = (
    # the seed and the order of a run
    "seed",
    "order",
    "domains.orders",
    "domains.embedding_samples",
    # the hash of the texts
    "domains.root",
    "domains.folder",
    "domains.catalogue",
    "domains.only",
    "domains.by",
    "domains.name",
    "domains._target_",
    # the number of scored tokens
    "eval.max_tokens",
    # the hash of the tokenizer
    "model.tokenizer",
    # the base
    "model.name",
    "model.name_or_path",
    "init_from",
)


def select_result_settings(config: Mapping[str, Any], scores: Scores) -> dict[str, Any]:
    """The leaves of a run's config that decide its result, with the precision and the attention
    implementation that it used in place of `auto`; empty without a config."""
    settings = identity(config)
    if not settings:
        return settings
    if "precision" in scores.numerics:
        settings["trainer.precision"] = scores.numerics["precision"]
    if "attention" in scores.numerics:
        settings["trainer.attn_implementation"] = scores.numerics["attention"]
    return settings


def is_compared(key: str) -> bool:
    """Whether runs that differ in a setting are runs of different groups."""
    return not any(key == name or key.startswith(f"{name}.") for name in REPRESENTED)


def read_base_hash(folder: Path) -> str:
    """A hash of the weights that a run began with; empty where its folder does not say."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["base"]
        hashes = [str(facts[-1]) for name, facts in sorted(files.items()) if name.endswith(WEIGHTS)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return ""
    return digest(hashes)[:HASH_DIGITS] if hashes else ""


def find_base_losses(scores: Scores) -> dict[str, float]:
    """The losses of the base model by text, in nats per scored token: row 0 of the matrix."""
    if scores.rows[:1] != ["base"]:
        return {}
    losses = zip(scores.domains, scores.nll[0], strict=True)
    return {text: loss for text, loss in losses if loss is not None and np.isfinite(loss)}


def have_same_base(first: Scores, second: Scores, *, hashes: tuple[str, str]) -> bool:
    """Whether two runs over the same texts began with the same model, judged by their losses before training
    and by the `hashes` of their weight files ("": unknown). Other files may hold the same weights: then the
    losses decide. True if neither is known."""
    gap = find_largest_gap(find_base_losses(first), find_base_losses(second))
    if all(hashes) and hashes[0] != hashes[1]:
        return gap is not None and gap <= SAME_WEIGHTS
    return gap is None or gap <= OTHER_NUMERICS


def find_largest_gap(first: Mapping[str, float], second: Mapping[str, float]) -> float | None:
    """The largest difference in nats between two models on the same texts; None without a text of both."""
    # The same texts may have other names in the other run. Of as many texts the losses are compared in
    # ascending order, which is the same for one model.
    if len(first) == len(second):
        pairs = list(zip(sorted(first.values()), sorted(second.values()), strict=True))
    else:
        pairs = [(loss, second[text]) for text, loss in first.items() if text in second]
    return max((abs(first_loss - second_loss) for first_loss, second_loss in pairs), default=None)
