"""The contents that a run is made of: texts in their order, base model, tokenizer, end tasks; and how a
finished run is extended by further domains, in its directory or in a copy of a sibling.

A run directory stores its contents (`identity.json`) at its first start. Later starts compare sizes and times
first, and hashes where those differ, or of every file with `verify_inputs=full`."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from yaml import YAMLError

from cpt.core import files
from cpt.core.cache import PARTIAL, discard
from cpt.core.config import digest, identity
from cpt.core.errors import reason
from cpt.core.exceptions import format_value
from cpt.core.processes import is_first_process
from cpt.core.schema import check_types
from cpt.data.sources.base import GENERAL, Source, stamp_of
from cpt.evaluation.options import AUTO
from cpt.evaluation.scores import Scores
from cpt.trainer.plan import Plan, why_not_growable, with_cap, with_template_date
from cpt.trainer.run_dir import WEIGHTS, RunDir, checkpoint_files, file_stat

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.trainer.base_model import Base
    from cpt.trainer.evaluators import Evaluator

log = logging.getLogger(__name__)
SHOWN = 8  # items that a message lists
COPIED = ("config.yaml", "identity.json", "scores.json", "metrics.csv", "threads", "callbacks")
# Folders whose files are replaced, never written into: a copy may share them by hard links.
LINKED = ("answers", "benchmarks", "diagnostics", "documents", "endtasks", "generated", "stages")


@dataclass
class Manifest:
    """What a run directory was made of."""

    order: list[str]
    texts: dict[str, dict[str, Any]]  # by name: digest, stamp (sizes and times), documents, bytes
    base: dict[str, list[Any]] = field(default_factory=dict)  # by file: size, time, hash
    tokenizer: str = ""
    endtasks: dict[str, str] = field(default_factory=dict)  # by task, the hash of its examples

    @classmethod
    def load(cls, run: RunDir) -> Manifest | None:
        """The manifest of a run; None of a new one. Raises ValueError for a damaged file."""
        if not run.manifest.exists():
            return None
        try:
            values = json.loads(run.manifest.read_text(encoding="utf-8"))
            check_types(values, get_type_hints(cls))
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{run.manifest} is damaged ({error}); restore it from a backup") from None

    def save(self, run: RunDir) -> None:
        files.replace(run.manifest, json.dumps(asdict(self), indent=1))

    def touched(self, source: Source, found: Mapping[str, Path]) -> tuple[list[str], list[str]]:
        """The texts, and the files of the base among `found`, that have other sizes or times now."""
        texts = [name for name, each in self.texts.items() if each.get("stamp") != stamp_of(source, name)]
        stats = {name: file_stat(path) for name, path in found.items()}
        return texts, [name for name, (*stat, _) in self.base.items() if stats.get(name) != stat]

    def changes(self, plan: Plan) -> Iterator[str]:
        """How texts and checkpoint differ now, as messages; updates sizes and times of the same contents."""
        full, given, source = plan.run.verify_inputs == "full", plan.model.name_or_path, plan.source
        found, reads_all = checkpoint_files(given) if self.base else {}, full and is_first_process()
        texts, base = self.touched(source, found)
        for name in list(self.texts) if reads_all else texts:
            from cpt.data.corpus import make_corpus, read_documents  # seconds of imports, rarely needed

            log.info("Comparing the text of %s with that of the run's start", name)
            stamp, cache = stamp_of(source, name), Path(plan.run.cache_dir)
            known = None if reads_all else make_corpus(source, name, cache=cache).facts
            facts = known or read_documents(source, name)[1]
            if facts["digest"] == self.texts[name]["digest"]:
                self.texts[name]["stamp"] = stamp
            else:
                yield describe_change(name, self.texts[name], facts)
        for name in [] if given is None else list(self.base) if full else base:
            if name not in found:
                yield f"model.name_or_path={given} has no {name} any more"
            elif (now := [*file_stat(found[name]), files.file_hash(found[name])])[2] != self.base[name][2]:
                yield f"{name} of model.name_or_path={given} changed"
            else:
                self.base[name] = now


def check_manifest(plan: Plan, run: RunDir, *, update: bool = True) -> None:
    """Compares the contents that a run started with to the present ones; stores new sizes and times.
    Raises ValueError for other texts, domains, order or base, by their names."""
    if (then := Manifest.load(run)) is None:
        return
    before, old, is_longer = deepcopy(then), then.order, is_beginning(then.order, plan.order)
    new, gone = ([name for name in a if name not in b] for a, b in ((plan.order, old), (old, plan.order)))
    why = why_not_growable(plan) if is_longer or (plan.is_ordered_by_texts and (new or gone)) else ""
    if old != list(plan.order) and (why or not is_longer):
        differences = [f"{kind}: {join_first(each)}" for kind, each in (("new", new), ("gone", gone)) if each]
        told = ", ".join(differences) or f"{join_first(old)} -> {join_first(plan.order)}"
        same = f"'order=[{','.join(old)}]' 'hydra.run.dir={run.path}' resumes with the domains it had"
        if why:
            told = f"{run.path} has learned {join_first(old)} ({told}), and nothing can follow: {why}"
            raise ValueError(f"{told}. Allowed: {same}; another name=… learns all from the beginning")
        order = format_value(plan.run.order)
        told = f"order={order} means other domains than when {run.path} was started ({told})"
        keep = "restore them" if gone else same
        raise ValueError(f"{told}; {keep}, another name=… begins a new run, or delete the folder")
    reject_changes(run, then.changes(plan))
    if update and then != before and is_first_process():
        then.save(run)


def reject_changes(run: RunDir, changes: Iterable[str]) -> None:
    """Raises ValueError if there are changes."""
    if wrong := list(changes):
        remedy = f"restore what it had, choose another name=…, or delete {run.path}"
        raise ValueError(f"{run.path} was started with other contents ({join_first(wrong, '; ')}); {remedy}")


def describe_change(name: str, *facts: Mapping[str, Any]) -> str:
    told = []
    for each in facts:
        count, size = (sum(each[kind].values()) for kind in ("documents", "bytes"))
        told.append(f"{count} documents, {size} bytes, {each['digest'][:8]}")
    return f"the text of {name} changed: {' -> '.join(told)}"


def is_beginning(then: Sequence[str], now: Sequence[str]) -> bool:
    """Whether an order is a longer one's beginning."""
    return 0 < len(then) < len(now) and list(now[: len(then)]) == list(then)


def join_first(items: Sequence[str], separator: str = " ") -> str:
    """The first items, and how many more there are."""
    left = [f"and {len(items) - SHOWN} more"] * (len(items) > SHOWN)
    return separator.join([*items[:SHOWN], *left])


def write_manifest(
    plan: Plan, run: RunDir, corpora: Corpora, start: Base, evaluators: Sequence[Evaluator]
) -> None:
    """Compares what has been read and made to the stored manifest, and stores it. Raises ValueError for other
    texts, base or tokenizer; logs end tasks with other data."""
    if not is_first_process():
        return
    old = Manifest.load(run) or Manifest(list(plan.order), {})
    facts = ("digest", "documents", "bytes")
    texts = {
        name: {"stamp": each.folder.name, **{fact: each.facts[fact] for fact in facts}}
        for name, each in corpora.by_name.items()
    }
    base = {}
    for name, path in checkpoint_files(plan.model.name_or_path or start.checkpoint).items():
        if plan.model.name_or_path is not None or path.suffix in WEIGHTS:  # a new one is in the config
            stored, stat = old.base.get(name, []), file_stat(path)
            base[name] = stored if stored[:2] == stat else [*stat, files.file_hash(path)]
    contents = {name: content for each in evaluators for name, content in each.contents.items()}
    tokenizer = corpora.tokenizer_digest(start.tokenizer)
    now = Manifest(list(plan.order), texts, base, tokenizer, old.endtasks | contents)
    pairs = [(name, each, texts[name]) for name, each in old.texts.items()]
    changed = [describe_change(*pair) for pair in pairs if pair[1]["digest"] != pair[2]["digest"]]
    others = (name for name, each in old.base.items() if base.get(name, [0])[-1] != each[-1])
    changed += [f"the base model changed: {name}" for name in others]
    changed += ["the tokenizer of the base model changed"] * (old.tokenizer not in ("", tokenizer))
    reject_changes(run, changed)
    if is_longer := is_beginning(old.order, plan.order):
        log.info("Adding %s after %s", ", ".join(plan.order[len(old.order) :]), ", ".join(old.order))
    for task in contents:
        if old.endtasks.get(task, contents[task]) != contents[task]:
            log.info("Measuring end task %s again: its data changed", task)
    # Of other domains, as by domains.only, too; before the manifest, so that a kill leaves it to be done.
    if is_longer or run.stored_config().get("order") != plan.settings["order"]:
        run.write_config(plan.settings)
    now.save(run)


def resolve_eval_cap(plan: Plan, run: RunDir) -> Plan:
    """The plan with `eval.max_tokens` as a run stored it, where the config leaves it to cpt."""
    if plan.evaluation.max_tokens != AUTO or not run.config.exists():
        return plan
    cap = run.stored_config().get("eval.max_tokens")  # absent: no bound
    resolved = with_cap(plan.resolved, cap)
    return replace(
        plan,
        settings=with_cap(plan.settings, cap),
        resolved=resolved,
        config_hash=digest(identity(resolved)),
    )


def resolve_date(plan: Plan, run: RunDir) -> Plan:
    """The plan with the day that the chat template of a run prints, where the config leaves it to cpt."""
    encoding = plan.source.encoding
    if not plan.source.chats or encoding is None or encoding.date is not None or not run.config.exists():
        return plan
    stored = run.stored_config().get("domains.date")
    return plan if stored is None else with_template_date(plan, stored)


def resolve_stored(plan: Plan, run: RunDir) -> Plan:
    """The plan with what a run stored of the values that the config leaves to cpt."""
    return resolve_date(resolve_eval_cap(plan, run), run)


def resume_from_sibling(run: RunDir, plan: Plan) -> None:
    """Copies the sibling that `find_source` finds into a new directory, atomically, and logs what it found.
    Raises ValueError where another process is using the directory, and as `find_source`."""
    if run.is_started():
        return
    source, line = find_source(run, plan)
    if source is not None:
        partial = run.path.with_name(f"{run.path.name}.partial")

        def link(old: str, new: str) -> None:
            try:
                os.link(old, new)
            except OSError:  # the file system has no hard links
                shutil.copy2(old, new)

        run.path.mkdir(parents=True, exist_ok=True)
        with run.locked():  # two starts at once would mix their copies
            if run.is_started():  # another has copied it meanwhile
                return
            discard(partial)
            partial.mkdir()
            for path in (source.path / name for name in (*COPIED, *LINKED)):
                if path.is_dir():
                    how = link if path.name in LINKED else shutil.copy2
                    shutil.copytree(path, partial / path.name, copy_function=how)
                elif path.is_file():
                    shutil.copy2(path, partial / path.name)
            scores = Scores.load(partial / "scores.json")
            scores.run["finished"] = False  # until what is new has been learned
            scores.save(partial / "scores.json")
            for path in run.path.iterdir():  # Hydra's files are there by now
                os.replace(path, partial / path.name)
            run.path.rmdir()
            os.replace(partial, run.path)
    if line:
        log.info(line)


def find_started(plan: Plan, run: RunDir) -> RunDir:
    """The directory whose rows a run continues from: its own, or a sibling."""
    return run if run.is_started() else find_source(run, plan)[0] or run


def find_source(run: RunDir, plan: Plan) -> tuple[RunDir | None, str]:
    """The longest finished sibling that trained the beginning of the order, and a log line: its name, or how
    the nearest one differs. Raises ValueError with grow=require without any."""
    if plan.run.grow == "never":
        return None, ""
    near: list[tuple[bool, int, int, Path, list[str], list[str]]] = []
    for folder in sorted(path.parent for path in run.path.parent.glob("*/identity.json")):
        if folder.name.endswith(PARTIAL):  # a copy that is being made, or that a kill has left
            continue
        try:
            sibling, manifest = RunDir(folder), Manifest.load(RunDir(folder))
            order = manifest.order if manifest else []
            # Where texts decide the order, it is not known yet.
            begins = (
                set() < {*order} < {*plan.order}
                if plan.is_ordered_by_texts
                else is_beginning(order, plan.order)
            )
            scores = sibling.load_scores() if begins and sibling.config.exists() else None
            if manifest is None or scores is None or not scores.run["finished"]:
                continue
            if scores.run["method"] != plan.names["method"]:
                continue
            gone = [name for name in manifest.texts if name not in (*plan.order, GENERAL)]
            differences = sibling.find_config_changes(resolve_stored(plan, sibling).settings)
            differences = differences or [f"the text of {name} is not in the order" for name in gone]
            differences = differences or list(manifest.changes(plan))
            trained = len(scores.rows) > 1  # method=none has no stages
            if not differences and trained and not sibling.stage_path(len(scores.rows) - 1).exists():
                differences = ["the file of its last stage was removed"]
            near.append((bool(differences), -len(order), len(differences), folder, order, differences))
        except (ValueError, OSError, YAMLError) as error:
            log.info("Not continuing from %s, which cannot be read: %s", folder, reason(error))
    line = ""
    if near:
        _, _, _, folder, order, differences = min(near)
        if not differences and not (why := why_not_growable(plan)):
            return RunDir(folder), f"Continuing from a copy of {folder} ({join_first(order)})"
        line = f"Not continuing from {folder}: {join_first(differences or [why], '; ')}"
    if plan.run.grow == "require":
        which = f"no finished run of method={plan.names['method']} in {run.path.parent}"
        told = line or f"{which} has learned the beginning of the order {join_first(plan.order)}"
        raise ValueError(f"grow=require is invalid: {told}. Allowed: auto, never, or such a run")
    return None, line
