"""The colour and marker that a method has on every page: its own where that is free, else the next one.

A method's place is fixed here; of another name it follows from the name. So pages with other groups show a
method alike, unless two of them would get the same place."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

PLACES = 54  # places whose colour and marker differ: see cpt.reporting.drawing.style
COLOURS = 6
# Neighbours differ in colour and marker; the most compared first.
METHODS = (  # fmt: skip
    "ncl",
    "das",
    "ewc",
    "kd",
    "derpp",
    "demix",
    "migu",
    "hat",
    "lora",
    "adapter",
    "joint",
    "one",
    "replay",
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
    """By its name the place of each group, which is a name and what it is without the values given to it. A
    group with values has the colour of the one without, and a marker of its own, as long as there are any."""
    there = dict(groups)
    ordered = sorted(there, key=lambda name: (name != there[name], own_place(there[name]), name))
    places: dict[str, int] = {}
    for name in ordered:
        wanted = own_place(there[name])
        alike = [(wanted + COLOURS * step) % PLACES for step in range(PLACES // COLOURS)]
        others = [(wanted + step) % PLACES for step in range(PLACES)]
        free = [place for place in [*alike, *others] if place not in places.values()]
        places[name] = free[0] if free else wanted
    return {name: places[name] for name in there}


def own_place(plain: str) -> int:
    """The place of a method, or of one with what is laid over it."""
    known = plain in METHODS
    return (
        METHODS.index(plain) if known else len(METHODS) + zlib.crc32(plain.encode()) % (PLACES - len(METHODS))
    )
