"""What a report shows of the texts that the model wrote to replay them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

from cpt.reporting.frames import perplexity
from cpt.reporting.page import Block

TOLD = (
    "Written by the model before the stage, and replayed in it in place of the text of past domains. Real: "
    "tokens of them that are kept beginnings. Perplexity: of what was written, to the model that wrote it. "
    "Left out: the highest perplexities, and what is no example of its task. All of it: "
    "generated/STAGE/TEXT.jsonl, a line for each text."
)


def build_generated_block(folder: Path) -> Block:
    """How much was generated before each stage, and how it begins; nothing where nothing was."""
    cells = list(_rows(folder))
    head = ["stage", "in place of", "begins", "tokens", "real", "texts", "perplexity", "left out", "theirs"]
    return Block(
        title="Generated text",
        lines=[TOLD] * bool(cells),
        head=head,
        cells=cells,
        words=3,
        folded=f"{len(cells)} texts of past domains",
    )


def _rows(folder: Path) -> Iterator[list[str]]:
    for path in sorted(folder.glob("generated/*/facts.json")):
        stage = path.parent.name.partition("-")[2]
        for text, facts in json.loads(path.read_text(encoding="utf-8")).items():
            yield [stage, text, *_cells(facts)]


def _cells(facts: dict[str, Any]) -> list[str]:
    theirs = facts["nll_left_out"]
    return [
        facts["excerpt"],
        f"{facts['tokens']:,}",
        f"{facts['real']:,}",
        f"{facts['texts']:,}",
        "–" if facts["nll"] is None else perplexity(exp(facts["nll"])),
        f"{facts['left_out']:,}",
        "–" if theirs is None else perplexity(exp(theirs)),
    ]
