"""The files of a card: written beside the weights, and compared with what the folder says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cpt.core.files import replace
from cpt.evaluation.scores import Scores
from cpt.reporting.card.facts import Tree, gather_card
from cpt.reporting.card.markdown import format_card

PAGE, DATA = "CARD.md", "card.json"


def write_card(folder: Path, scores: Scores | None = None) -> tuple[Path, Path]:
    """Writes CARD.md and card.json into the exported model of a run folder, of these scores or those that
    stand there; gives their paths.

    Raises ValueError for a folder that has no card: see `gather_card`."""
    card = gather_card(folder, scores)
    page, data = (folder / "model" / name for name in (PAGE, DATA))
    replace(page, format_card(card))
    replace(data, json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return page, data


def remove_card(folder: Path) -> None:
    """Removes the card of a run folder, if it has one."""
    for name in (PAGE, DATA):
        (folder / "model" / name).unlink(missing_ok=True)


def find_difference(folder: Path) -> str:
    """The first figure of a run folder's card that is not what the folder says, in words; "" where there is
    none.

    Raises ValueError for a folder that has no card, or contradicts itself."""
    card = gather_card(folder)
    page, data = (folder / "model" / name for name in (PAGE, DATA))
    told = read_card(data)
    for place, written, found in compare_trees(told, card):
        return f"{DATA}: {place} is {show_value(written)}, the folder says {show_value(found)}"
    if not page.is_file():
        return f"{PAGE} is not there"
    return compare_pages(page.read_text(encoding="utf-8", errors="replace"), format_card(card))


def read_card(path: Path) -> Tree:
    """card.json as it stands; a ValueError of one line if it is gone or none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; python -m cpt.card RUN writes it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); python -m cpt.card RUN writes it again") from None
    return told


class Missing:
    """In the place of what one of two trees lacks."""


def compare_trees(told: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two trees of JSON differ: the place, what stands in the one and in the other."""
    if isinstance(told, dict) and isinstance(found, dict):
        for key in {**found, **told}:
            inner = f"{place}.{key}" if place else key
            yield from compare_trees(told.get(key, Missing), found.get(key, Missing), inner)
    elif isinstance(told, list) and isinstance(found, list):
        for number, pair in enumerate(zip_longest(told, found, fillvalue=Missing)):
            yield from compare_trees(*pair, f"{place}.{number}")
    elif type(told) is not type(found) or told != found:
        yield place or "all of it", told, found


def show_value(value: Any) -> str:
    return "missing" if value is Missing else json.dumps(value, ensure_ascii=False)


def compare_pages(told: str, found: str) -> str:
    """The first line in which a page is not what it should be, with the section that it stands in."""
    section = "the beginning"
    for number, (line, right) in enumerate(zip_longest(told.split("\n"), found.split("\n")), start=1):
        if line != right:
            return f"{PAGE}, line {number} ({section}): {show_line(line)}; the folder says {show_line(right)}"
        section = line.removeprefix("## ") if line.startswith("## ") else section
    return ""


def show_line(line: str | None) -> str:
    return "nothing" if line is None else f"`{line}`"


def count_figures(tree: Any) -> int:
    """How many leaves a tree of JSON has."""
    if isinstance(tree, (dict, list)):
        return sum(map(count_figures, tree.values() if isinstance(tree, dict) else tree))
    return 1
