"""The colour and marker that a method has on every page: its own where that is free, else the next one.

A method's place is fixed here; of another name it follows from the name. So pages with other groups show a
method alike, unless it would have the colour of another of the first eight groups, or the place of any."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

PLACES = 72  # places whose colour and marker differ: see cpt.reporting.drawing.style
COLOURS = 8
# Neighbours differ in colour and marker; the most compared first.
METHODS = (  # fmt: skip
    "ncl",
    "das",
    "ewc",
    "kd",
    "derpp",
    "demix",
    "migu",
    "replay",
    "lora",
    "adapter",
    "joint",
    "one",
    "hat",
    "none",
    "prompt",
    "cpt_plugin",
    "agem",
    "dga",
    "elle",
    "ema",
    "inclora",
    "l2",
    "lifelong_moe",
    "mas",
    "merge",
    "merge_lora",
    "moelora",
    "nlora",
    "olora",
    "osf",
    "peft",
    "progprompt",
    "recadam",
    "reptile",
    "sapt",
    "si",
    "wise_ft",
)


def find_places(groups: Iterable[tuple[str, str]]) -> dict[str, int]:
    """By its name the place of each group, which is a name and what it is without the values given to it. The
    first COLOURS groups have a colour each. Of more, one with values has the colour of the one without, and a
    marker of its own, as long as there are any."""
    there = dict(groups)
    first = list(there)[:COLOURS]
    ordered = sorted(
        there, key=lambda name: (name not in first, name != there[name], own_place(there[name]), name)
    )
    owners: dict[int, str] = {}  # by colour, who keeps it
    for name in ordered:
        owners.setdefault(own_place(there[name]) % COLOURS, name)
    ordered.sort(key=lambda name: (name not in first, name not in owners.values()))
    places: dict[str, int] = {}
    for name in ordered:
        wanted = own_place(there[name])
        alike = [(wanted + COLOURS * step) % PLACES for step in range(PLACES // COLOURS)]
        others = [(wanted + step) % PLACES for step in range(PLACES)]
        shown = {place % COLOURS for place in places.values()}
        fresh = [place for place in others if place % COLOURS not in shown]
        free = [place for place in [*alike, *others] if place not in places.values()]
        places[name] = next(iter([*fresh, *free]), wanted)
    return {name: places[name] for name in there}


def own_place(plain: str) -> int:
    """The place of a method, or of one with what is laid over it."""
    known = plain in METHODS
    return (
        METHODS.index(plain) if known else len(METHODS) + zlib.crc32(plain.encode()) % (PLACES - len(METHODS))
    )
