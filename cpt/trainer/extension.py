"""`extend=FOLDER`: a new run that continues a finished run with further domains.

What the finished run has learned is copied into the folder of the new run; its own folder stays as it is."""

import logging
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cpt.core.cache import PARTIAL, discard
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.naming import quote
from cpt.evaluation.run_folders import suggest_runs
from cpt.evaluation.withdrawals import WITHDRAWN_FILE
from cpt.trainer.manifest import Manifest, is_beginning, join_first
from cpt.trainer.plan import Plan, why_not_extendable
from cpt.trainer.run_dir import MICRO_BATCH_FILE, RunDir

log = logging.getLogger(__name__)
COPIED_PATHS = ("scores.json", "metrics.csv", "threads", MICRO_BATCH_FILE, "callbacks", WITHDRAWN_FILE)
# Folders whose files are replaced, never written into: a copy may share them by hard links.
LINKED_FOLDERS = (
    "answers",
    "benchmarks",
    "chats",
    "diagnostics",
    "divergence",
    "documents",
    "endtasks",
    "generated",
    "stages",
)


def find_extended(plan: Plan, run: RunDir) -> RunDir | None:
    """The folder of the run that a new run continues; None without `extend`, and once the run has started.
    Raises ValueError for the folder of the run itself, and for a run that was started without `extend`."""
    if plan.run.extend is None:
        return None
    source = RunDir(Path(plan.run.extend))
    if source.path.resolve() == run.path.resolve():
        raise InvalidOptionError(
            "extend",
            source.path,
            reason="it is the folder of this run",
            allowed="another hydra.run.dir for the new run, or null to resume this one",
        )
    if not run.is_started():
        return source
    if not was_extended(plan, run):
        raise InvalidOptionError(
            "extend",
            source.path,
            reason=f"{run.path} was started without it",
            allowed="null to resume this run, or another hydra.run.dir",
        )
    return None


def was_extended(plan: Plan, run: RunDir) -> bool:
    """Whether a started run has learned the domains of another run, or is finished and needs none."""
    scores = run.load_scores()
    if scores is None:
        return False
    has_order_of_source = list(scores.run["order"]) != list(plan.order)  # until its first row is committed
    return scores.run["finished"] or bool(scores.grown) or has_order_of_source


def check_extension(plan: Plan, source: RunDir) -> Manifest:
    """The contents of the run that a plan continues, with the present sizes and times. Raises ValueError
    for a folder without a finished run, one with other options or contents, and an order that does not begin
    with the domains that it has learned."""
    manifest = Manifest.load(source)
    scores = source.load_scores()
    if manifest is None or scores is None or not source.config.exists():
        raise InvalidOptionError(
            "extend",
            source.path,
            reason="no run",
            allowed=f"null, or the folder of a finished run{suggest_runs(source.path)}",
        )
    if not scores.run["finished"]:
        raise InvalidOptionError(
            "extend",
            source.path,
            reason="its run is not finished",
            allowed="a finished run; the command of that run finishes it",
        )

    # What the config says is compared before contents, which may have to be read to be compared.
    check_longer_order(plan, source, manifest)
    further_entries = list_further_entries(plan, manifest.order)
    changed_options = source.find_config_changes(plan.settings, further_entries=further_entries)
    if changed_options:
        raise InvalidOptionError(
            "extend",
            source.path,
            reason=f"it was made with another config ({join_first(changed_options, '; ')})",
            allowed="these values, or a run that was made with the same ones",
        )

    changed_contents = manifest.find_changes(plan)
    if changed_contents:
        raise InvalidOptionError(
            "extend",
            source.path,
            reason=f"it was started with other contents ({join_first(changed_contents, '; ')})",
            allowed="the contents that it had, or a run with the present ones",
        )

    last_stage = len(scores.rows) - 1
    is_trained = last_stage > 0  # method=none has no stages
    if is_trained and not source.stage_path(last_stage).exists():
        raise InvalidOptionError(
            "extend",
            source.path,
            reason="the file of its last stage was removed",
            allowed="a run that has it, or null, which learns all domains from the beginning",
        )
    return manifest


def list_further_entries(plan: Plan, learned_domains: Sequence[str]) -> list[str]:
    """The keys of entries that options have of domains that the run to be extended has not learned, like
    `domains.packages.torch`: nothing that it has learned depends on them."""
    further_domains = [domain for domain in plan.source.domains if domain not in learned_domains]
    learned_entries = list_entries(plan, learned_domains)
    return [entry for entry in list_entries(plan, further_domains) if entry not in learned_entries]


def list_entries(plan: Plan, domains: Sequence[str]) -> list[str]:
    """The keys of entries that options have of domains."""
    entries: list[str] = []
    for domain in domains:
        for name in plan.source.members(domain):
            entries.extend(f"domains.{entry}" for entry in plan.source.entries_of(name))
    return entries


def check_longer_order(plan: Plan, source: RunDir, manifest: Manifest) -> None:
    """Raises ValueError for an order that is not the learned one with further domains, and for options with
    which the learned domains depend on those that follow."""
    reason = why_not_extendable(plan)
    if reason:
        raise InvalidOptionError(
            "extend",
            source.path,
            reason=f"nothing can follow: {reason}",
            allowed="null, which learns all domains from the beginning",
        )
    if not is_beginning(manifest.order, plan.order):
        order = f"order={format_value(plan.run.order)} ({join_first(plan.order)})"
        learned = ",".join(map(quote, manifest.order))
        raise InvalidOptionError(
            "extend",
            source.path,
            reason=f"it has learned {join_first(manifest.order)}, after which {order} adds nothing",
            allowed=f"an order that begins with these: {shlex.quote(f'order=[{learned},…]')}",
        )


def extend_run(plan: Plan, run: RunDir, source: RunDir) -> None:
    """Copies what a finished run has learned into the folder of a new run, which the caller has locked, all
    at once: a kill leaves a folder `*.partial`, which the next start replaces. Raises ValueError as
    `check_extension`."""
    manifest = check_extension(plan, source)
    scores = source.load_scores()
    assert scores is not None
    partial = RunDir(run.path.with_name(f"{run.path.name}{PARTIAL}"))
    discard(partial.path)
    partial.path.mkdir()
    for name in COPIED_PATHS:
        copy_entry(source.path / name, partial.path / name)
    for name in LINKED_FOLDERS:
        link_entry(source.path / name, partial.path / name)

    partial.write_config(plan.settings)
    replace(manifest, order=list(plan.order)).save(partial)
    scores.run["finished"] = False  # until what is new has been learned
    scores.save(partial.scores_file)

    for path in run.path.iterdir():  # the lock, and Hydra's files
        os.replace(path, partial.path / path.name)
    run.path.rmdir()
    os.replace(partial.path, run.path)
    new_domains = ", ".join(plan.order[len(manifest.order) :])
    log.info("Adding %s after %s, from a copy of %s", new_domains, ", ".join(manifest.order), source.path)


def copy_entry(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copy2(source, target)


def link_entry(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link_file)


def link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)
