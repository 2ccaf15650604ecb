"""One more domain after a run's end: training continues from the finished run.

A run folder grows in place where its order is the beginning of the plan's. A new folder starts from a copy of
the longest finished sibling that learned the beginning of its order with the same config and texts."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpt.core.cache import discard
from cpt.trainer.capping import hold_cap
from cpt.trainer.plan import Plan
from cpt.trainer.raising import find_shorter
from cpt.trainer.run_folder import RunFolder

log = logging.getLogger(__name__)
KEPT = ("config.yaml", "identity.json", "scores.json", "metrics.csv", "threads")
# Whose files are replaced as a whole and never written into, so that they may have a second name.
SHOWN = 8  # things that a line lists
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
    """Copies into a new folder what the longest finished sibling has learned of its order; logs from which,
    or why from none.

    Raises ValueError where another process is at work in the folder, and as find_source."""
    if place.config.exists():
        return
    source, line = find_source(place, plan)
    if source is not None:
        place.path.mkdir(parents=True, exist_ok=True)
        with place.locked():  # two starts at once would take each other's copy apart
            copy_run(source.path, place.path, also=("checkpoints",) if is_shorter(source, plan) else ())
    if line:
        log.info(line)


def is_shorter(source: RunFolder, plan: Plan) -> bool:
    """Whether it is the run of the same order with fewer steps."""
    return len(order_in(source.identity)) == len(plan.order)


def find_begun(plan: Plan, place: RunFolder) -> RunFolder:
    """The folder whose rows a run continues from: its own, or a sibling."""
    return place if place.config.exists() else find_source(place, plan)[0] or place


def find_source(place: RunFolder, plan: Plan) -> tuple[RunFolder | None, str]:
    """The finished sibling that a new folder continues from, and the line for the log: its name, or what
    differs in the nearest one.

    Raises ValueError for a sibling that would be continued but for a budget, and with grow=require if there
    is none to continue from."""
    if plan.run.grow == "never":
        return None, ""
    found = max(find_beginnings(place, plan), key=lambda run: len(run[1]), default=None)
    if found is not None and not (why := say_why_not(plan)):
        return RunFolder(found[0]), f"Continuing from a copy of {found[0]} ({join_names(found[1])})"
    if found is None and (shorter := find_shorter(plan, place)) is not None:
        return shorter, f"Continuing from a copy of {shorter.path}, which has made fewer steps"
    near = find_nearest(place, plan) if found is None else (*found, [why])
    line = ""
    if near is not None:
        folder, order, differ = near
        if plan.drift.given and all(each.startswith(("budget.", "monitor.")) for each in differ):
            given = ", ".join(f"budget.{name}={nats}" for name, nats in plan.drift.given.items())
            raise ValueError(
                f"{given} is invalid: {folder} has learned {join_names(order)}, and a run with a budget does "
                "not grow. Allowed: budget.general=null and budget.past=null, or grow=never, which trains "
                "all domains from the base"
            )
        rest = f"; and {len(differ) - SHOWN} more" * (len(differ) > SHOWN)
        line = f"Not continuing from {folder}: {'; '.join(differ[:SHOWN])}{rest}"
    if plan.run.grow == "require":
        none = f"no finished run of method={plan.names['method']} in {place.path.parent} has learned the "
        reason = line or f"{none}beginning of the order {join_names(plan.order)}"
        raise ValueError(f"grow=require is invalid: {reason}. Allowed: auto, never, or such a run")
    return None, line


def find_nearest(place: RunFolder, plan: Plan) -> tuple[Path, list[str], list[str]] | None:
    """The finished sibling that comes nearest to being continued, its order, and what differs: options, texts
    and the base. None where no finished run of the method has learned the beginning of the order."""
    from cpt.trainer.identity import list_changed_contents

    near: list[tuple[int, int, Path, list[str], list[str]]] = []
    for path in sorted(place.path.parent.glob("*/identity.json")):
        folder, order = RunFolder(path.parent), order_in(path)
        if not may_follow(order, plan) or (scores := folder.scores()) is None or not scores.run["finished"]:
            continue
        if scores.run["method"] == plan.names["method"]:
            differ = folder.changes(hold_cap(plan, folder).settings) or list_changed_contents(folder, plan)
            near.append((-len(order), len(differ), folder.path, order, differ))
    return min(near)[2:] if near else None


def find_beginnings(place: RunFolder, plan: Plan) -> Iterator[tuple[Path, list[str]]]:
    """The finished runs beside a folder that have learned the beginning of a plan, with their orders."""
    from cpt.trainer.identity import list_changed_contents

    for path in sorted(place.path.parent.glob("*/identity.json")):
        folder = RunFolder(path.parent)
        order = order_in(path)
        if not may_follow(order, plan) or not folder.is_of(hold_cap(plan, folder).settings):
            continue
        scores = folder.scores()
        if scores is not None and scores.run["finished"] and not list_changed_contents(folder, plan):
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


def join_names(names: Sequence[str]) -> str:
    return " ".join(names[:SHOWN]) + f" … ({len(names)})" * (len(names) > SHOWN)


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
