"""The contents that a run is made of: texts in their order, base model, tokenizer, end tasks.

A run directory stores them (`identity.json`) at its first start. Later starts compare sizes and times first,
and hashes where those differ, or of every file with `check=full`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt.core import files
from cpt.core.config import digest, identity
from cpt.core.processes import is_first_process
from cpt.core.schema import show
from cpt.data.sources.base import GENERAL, stamp_of
from cpt.evaluation.options import AUTO
from cpt.trainer.plan import Plan, why_not_growable, with_cap
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.trainer.base_model import Base
    from cpt.trainer.evaluators import Evaluator

log = logging.getLogger(__name__)
WEIGHTS = (".safetensors", ".bin")
OF_A_CHECKPOINT = (*WEIGHTS, ".json", ".model", ".txt", ".jinja")
SHOWN = 8  # items that a message lists


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
            return cls(**json.loads(run.manifest.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{run.manifest} is damaged ({error}); bring it back from a copy") from None

    def save(self, run: RunDir) -> None:
        files.replace(run.manifest, json.dumps(asdict(self), indent=1))

    def touched(self, plan: Plan, found: Mapping[str, Path]) -> tuple[list[str], list[str]]:
        """The texts with other sizes or times, and the files of the base that `found` lacks or has with
        others."""
        stamps = {name: stamp_of(plan.source, name) for name in self.texts}
        texts = [name for name, each in self.texts.items() if each.get("stamp") != stamps[name]]
        stats = {name: file_stat(path) for name, path in found.items()}
        return texts, [name for name, (*stat, _) in self.base.items() if stats.get(name) != stat]

    def changes(self, plan: Plan) -> Iterator[str]:
        """How the texts and the given checkpoint differ now, as messages; updates the sizes and times of
        those with the same contents."""
        full, given, cache = plan.run.check == "full", plan.model.checkpoint, Path(plan.run.cache_dir)
        found = checkpoint_files(given) if self.base else {}
        (texts, base), reads_all = self.touched(plan, found), full and is_first_process()
        for name in list(self.texts) if reads_all else texts:
            from cpt.data.corpus import make_corpus, read_documents  # seconds of imports, rarely needed

            log.info("comparing the text of %s with the one that the run was begun with", name)
            stamp, source = stamp_of(plan.source, name), plan.source
            facts = (
                make_corpus(source, name, cache=cache).facts
                if not reads_all
                else read_documents(source, name)[1]
            )
            if facts["digest"] == self.texts[name]["digest"]:
                self.texts[name]["stamp"] = stamp
            else:
                yield describe_change(name, self.texts[name], facts)
        for name in [] if given is None else list(self.base) if full else base:
            if name not in found:
                yield f"model.checkpoint={given} has no {name} any more"
            elif (now := [*file_stat(found[name]), files.file_hash(found[name])])[2] != self.base[name][2]:
                yield f"{name} of model.checkpoint={given} changed"
            else:
                self.base[name] = now


def check_manifest(plan: Plan, run: RunDir, *, update: bool = True) -> None:
    """Compares the contents that a run was begun with to the present ones; stores new sizes and times.
    Raises ValueError for other texts, domains, order or base, by their names."""
    if (then := Manifest.load(run)) is None:
        return
    before, old, is_longer = deepcopy(then), then.order, is_beginning(then.order, plan.order)
    new = [name for name in plan.order if name not in old]
    gone = [name for name in old if name not in plan.order]
    why = why_not_growable(plan) if is_longer or (plan.by_texts and (new or gone)) else ""
    if old != list(plan.order) and not (is_longer and not why):
        differences = [f"{kind}: {join_first(each)}" for kind, each in (("new", new), ("gone", gone)) if each]
        told = ", ".join(differences) or f"{join_first(old)} -> {join_first(plan.order)}"
        same = f"'order=[{','.join(old)}]' 'hydra.run.dir={run.path}' goes on with what it had"
        if why:
            told = f"{run.path} has learned {join_first(old)} ({told}), and nothing can follow: {why}"
            keep = f"{same}, new domains at the end of the order" if plan.by_texts else "that order"
            raise ValueError(f"{told}; allowed: {keep}; another name=… learns all from the beginning")
        told = f"order={show(plan.run.order)} means other domains than when {run.path} was begun ({told})"
        keep = "bring them back" if gone else same
        raise ValueError(f"{told}; {keep}, another name=… begins a new run, or delete the folder")
    reject_changes(run, then.changes(plan))
    if update and then != before and is_first_process():
        then.save(run)


def list_changed_contents(run: RunDir, plan: Plan) -> list[str]:
    """How a plan's texts and base differ from those of a run, whose domains it may add to."""
    if (then := Manifest.load(run)) is None:
        return [f"{run.manifest} is missing"]
    gone = [name for name in then.texts if name not in (*plan.order, GENERAL)]
    return [f"the text of {name} is not in the order" for name in gone] or list(then.changes(plan))


def reject_changes(run: RunDir, changes: Iterable[str]) -> None:
    """Raises ValueError if there are changes."""
    if wrong := list(changes):
        remedy = f"bring back what it had, choose another name=…, or delete {run.path}"
        raise ValueError(f"{run.path} was begun with other contents ({join_first(wrong, '; ')}); {remedy}")


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


def file_stat(path: Path) -> list[int]:
    """Size and modification time."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def checkpoint_files(checkpoint: str | None) -> dict[str, Path]:
    """The files of a model and its tokenizer by name: of a folder, or of the Hub what the cache has."""
    folder = Path(checkpoint or "")
    if checkpoint is not None and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = None
        with suppress(ValueError):  # a missing folder is not a valid name on the Hub
            config = try_to_load_from_cache(checkpoint, "config.json")
        checkpoint, folder = (config, Path(config).parent) if isinstance(config, str) else (None, folder)
    if checkpoint is None:
        return {}
    paths = [*sorted(folder.iterdir()), *sorted(folder.glob("adapters/*/*"))]  # adapters are merged
    return {str(path.relative_to(folder)): path for path in paths if path.suffix in OF_A_CHECKPOINT}


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
    for name, path in checkpoint_files(start.checkpoint).items():
        if plan.model.checkpoint is not None or path.suffix in WEIGHTS:  # a new one is in the config
            stored, stat = old.base.get(name, []), file_stat(path)
            base[name] = stored if stored[:2] == stat else [*stat, files.file_hash(path)]
    contents = {name: content for each in evaluators for name, content in each.contents.items()}
    tokenizer = corpora.tokenizer_digest(start.tokenizer)
    now = Manifest(list(plan.order), texts, base, tokenizer, old.endtasks | contents)
    changed = [
        describe_change(name, each, texts[name])
        for name, each in old.texts.items()
        if each["digest"] != texts[name]["digest"]
    ]
    others = (name for name, each in old.base.items() if base.get(name, [0])[-1] != each[-1])
    changed += [f"the base model changed: {name}" for name in others]
    changed += ["the tokenizer of the base model changed"] * (old.tokenizer not in ("", tokenizer))
    reject_changes(run, changed)
    if is_beginning(old.order, plan.order):
        log.info("%s are added to %s", ", ".join(plan.order[len(old.order) :]), ", ".join(old.order))
    for task in contents:
        if old.endtasks.get(task, contents[task]) != contents[task]:
            log.info("end task %s: its data changed; it is measured again", task)
    now.save(run)
    if run.stored("order") != plan.settings["order"]:
        run.write_config(plan.settings)


def resolve_eval_cap(plan: Plan, run: RunDir) -> Plan:
    """The plan with `eval.tokens` as a run stored it, where the config leaves it to cpt."""
    if plan.evaluation.tokens != AUTO or not run.config.exists():
        return plan
    settings = with_cap(plan.settings, run.stored("eval.tokens"))  # absent: no bound
    return replace(plan, settings=settings, config_digest=digest(identity(settings)))
