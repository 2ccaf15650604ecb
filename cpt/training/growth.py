"""One more domain after a run's end: what has been learned is gone on with, and not learned again.

A run folder grows in place where its order is the beginning of the plan's. A new folder takes over a copy of
the longest finished run beside it that learned the beginning of its order with the same config and texts."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpt.core.cache import discard
from cpt.training.capping import hold_cap
from cpt.training.plan import Plan
from cpt.training.raising import find_shorter
from cpt.training.run_folder import RunFolder

log = logging.getLogger(__name__)
KEPT = ("config.yaml", "identity.json", "scores.json", "metrics.csv", "threads")
# Whose files are replaced as a whole and never written into, so that they may have a second name.
REPLACED = ("answers", "diagnostics", "documents", "endtasks", "generated", "probes", "stages")


def is_beginning(then: Sequence[str], now: Sequence[str]) -> bool:
    """Whether an order goes on from another."""
    return 0 < len(then) < len(now) and list(now[: len(then)]) == list(then)


def say_why_not(plan: Plan) -> str:
    """Why the first domains of a plan would have been learned otherwise without those that follow; nothing
    where they would not."""
    if plan.by_texts:
        return f"order={plan.run.order} gives a further domain its place among those that are learned"
    if plan.source.balanced is True:
        return "domains.balanced=true cuts all domains to the smallest of them"
    if plan.method.load().needs_all:
        return f"method={plan.names['method']} needs all domains before the first is learned"
    if plan.carry == "all":
        return "optim.carry=all lets the rate decay over all domains"
    if getattr(plan.schedule, "needs_end", False):
        return f"schedule={type(plan.schedule).__name__} has rates that depend on how many domains follow"
    if plan.drift.given:
        return "budget.general and budget.past are shared out among the domains of the order"
    return ""


def adopt(place: RunFolder, plan: Plan) -> None:
    """Gives a folder that is new what the longest run beside it has learned of its order; says so.

    Raises ValueError where another process is at work in the folder."""
    if place.config.exists():
        return
    found = max(find_beginnings(place, plan), key=lambda run: len(run[1]), default=None)
    if found is None:
        adopt_shorter(place, plan)
        return
    folder, order = found
    if why := say_why_not(plan):
        log.info("nothing of %s is gone on with: %s", folder, why)
        return
    place.path.mkdir(parents=True, exist_ok=True)
    with place.locked():  # two starts at once would take each other's copy apart
        copy_run(folder, place.path)
    log.info("what %s has learned (%s) is gone on with, in a copy", folder, ", ".join(order))


def adopt_shorter(place: RunFolder, plan: Plan) -> None:
    """Gives a folder that is new a copy of the longest run beside it that its plan makes more steps of."""
    if (shorter := find_shorter(plan, place)) is None:
        return
    place.path.mkdir(parents=True, exist_ok=True)
    with place.locked():
        copy_run(shorter.path, place.path, also=("checkpoints",))
    log.info("what %s has learned is gone on with, in a copy", shorter.path)


def find_begun(plan: Plan, place: RunFolder) -> RunFolder:
    """The folder whose rows a run goes on from: its own, or one beside it."""
    if place.config.exists() or say_why_not(plan):
        return place
    found = max(find_beginnings(place, plan), key=lambda run: len(run[1]), default=None)
    return (find_shorter(plan, place) or place) if found is None else RunFolder(found[0])


def find_beginnings(place: RunFolder, plan: Plan) -> Iterator[tuple[Path, list[str]]]:
    """The finished runs beside a folder that have learned the beginning of a plan, with their orders."""
    from cpt.training.identity import has_same_texts

    for path in sorted(place.path.parent.glob("*/identity.json")):
        folder = RunFolder(path.parent)
        order = order_in(path)
        if not may_follow(order, plan) or not folder.is_of(hold_cap(plan, folder).settings):
            continue
        scores = folder.scores()
        if scores is not None and scores.run["finished"] and has_same_texts(folder, plan):
            yield folder.path, order


def may_follow(order: Sequence[str], plan: Plan) -> bool:
    """Whether a plan goes on from an order; of one that the texts decide, as far as names tell."""
    return set() < set(order) < set(plan.order) if plan.by_texts else is_beginning(order, plan.order)


def order_in(path: Path) -> list[str]:
    """The order that an identity.json tells; none where it cannot be read."""
    try:
        order = json.loads(path.read_text(encoding="utf-8"))["order"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return list(order) if isinstance(order, list) else []


def copy_run(folder: Path, into: Path, *, also: Sequence[str] = ()) -> None:
    """What a run needs to go on, and further folders of it, under a name of its own that is there as a whole
    or not at all."""
    partial = into.with_name(f"{into.name}.partial")
    discard(partial)
    partial.mkdir(parents=True)
    for name in KEPT:
        if (folder / name).exists():
            shutil.copy2(folder / name, partial / name)
    for name in (*REPLACED, *also, "callbacks"):
        if (folder / name).is_dir():
            how = link if name in (*REPLACED, *also) else shutil.copy2
            shutil.copytree(folder / name, partial / name, copy_function=how)
    if into.exists():  # Hydra's files are there by now
        for path in into.iterdir():
            os.replace(path, partial / path.name)
        into.rmdir()
    os.replace(partial, into)


def link(source: str, target: str) -> str:
    """A second name for a file, where the file system has that; else a copy."""
    try:
        os.link(source, target)
        return target
    except OSError:
        return shutil.copy2(source, target)
