"""Domains of equal size: each cut to the tokens of the smallest, or to a budget."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from cpt.core.randomness import key
from cpt.data.packing import Packed

log = logging.getLogger(__name__)


def balance(texts: Mapping[str, Packed], *, tokens: int | None = None) -> dict[str, Packed]:
    """Texts by name cut to so many tokens, or to those of the smallest, each to the row in which they end;
    what is smaller stays as it is. The rows are drawn by key. Says what was cut."""
    sizes = {name: int(text.row_lengths.sum()) for name, text in texts.items()}
    smallest = min(sizes, key=lambda name: (sizes[name], name))
    budget = sizes[smallest] if tokens is None else tokens
    larger = [name for name, size in sizes.items() if size > budget]
    log.info(
        "domains.balanced: %d of %d domains are cut to %d tokens%s",
        len(larger),
        len(texts),
        budget,
        "" if tokens is not None else f", those of {smallest}",
    )
    return {name: cut(text, budget, name=name) if name in larger else text for name, text in texts.items()}


def cut(text: Packed, tokens: int, *, name: str) -> Packed:
    """So many tokens of a text, to the row in which they end; `documents` and `bytes` are of the whole."""
    return replace(text, rows=text.rows.select(text.draw_rows(tokens, stream=key("balanced", name))))
