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

    def touched_texts(self, plan: Plan) -> list[str]:
        """The texts with other sizes or times."""
        return [name for name, each in self.texts.items() if each.get("stamp") != stamp_of(plan.source, name)]

    def touched_files(self, found: Mapping[str, Path]) -> list[str]:
        """The files of the base that are missing or have another size or time."""
        stats = {name: file_stat(path) for name, path in found.items()}
        return [name for name, (*stat, _) in self.base.items() if stats.get(name) != stat]

    def changes(self, plan: Plan) -> Iterator[str]:
        """How the texts and the given checkpoint differ now, as messages; updates the sizes and times of
        those with the same contents."""
        full, given, cache = plan.run.check == "full", plan.model.checkpoint, Path(plan.run.cache_dir)
        reads_all = full and is_first_process()
        for name in list(self.texts) if reads_all else self.touched_texts(plan):
            from cpt.data.corpus import facts_anew, make_corpus  # seconds of imports, rarely needed

            log.info("comparing the text of %s with the one that the run was begun with", name)
            stamp, source = stamp_of(plan.source, name), plan.source
            facts = facts_anew(source, name) if reads_all else make_corpus(source, name, cache=cache).facts
            if facts["digest"] == self.texts[name]["digest"]:
                self.texts[name]["stamp"] = stamp
            else:
                yield describe_change(name, self.texts[name], facts)
        found = checkpoint_files(given) if given is not None and self.base else {}
        for name in [] if given is None else list(self.base) if full else self.touched_files(found):
            if name not in found:
                yield f"model.checkpoint={given} has no {name} any more"
            elif (now := [*file_stat(found[name]), files.file_hash(found[name])])[2] != self.base[name][2]:
                yield f"{name} of model.checkpoint={given} changed"
            else:
                self.base[name] = now


def check_manifest(plan: Plan, run: RunDir, *, update: bool = True) -> None:
    """Compares the contents that a run was begun with to the present ones; stores new sizes and times.

    Raises ValueError for other texts, domains or base; the message names them."""
    if (then := Manifest.load(run)) is None:
        return
    before = deepcopy(then)
    check_order(then.order, plan, run)
    reject_changes(run, then.changes(plan))
    if update and then != before and is_first_process():
        then.save(run)


def is_unchanged(plan: Plan, run: RunDir) -> bool:
    """Whether order, sizes and times are those of a run; nothing is read."""
    then, given = Manifest.load(run), plan.model.checkpoint
    if then is None or then.order != plan.order or then.touched_texts(plan):
        return False
    return given is None or not then.touched_files(checkpoint_files(given))


def list_changed_contents(run: RunDir, plan: Plan) -> list[str]:
    """How a plan's texts and base differ from those of a run, whose domains it may add to."""
    if (then := Manifest.load(run)) is None:
        return [f"{run.manifest} is missing"]
    gone = [name for name in then.texts if name not in (*plan.order, GENERAL)]
    return [f"the text of {name} is not in the order" for name in gone] or list(then.changes(plan))


def check_order(then: Sequence[str], plan: Plan, run: RunDir) -> None:
    """Raises ValueError where other domains, or another order of them, would be trained."""
    new = [name for name in plan.order if name not in then]
    gone = [name for name in then if name not in plan.order]
    is_longer, by_texts = is_beginning(then, plan.order), plan.by_texts and bool(new or gone)
    why = why_not_growable(plan) if is_longer or by_texts else ""
    if list(then) == list(plan.order) or (is_longer and not why):
        return
    differences = [f"{kind}: {join_names(each)}" for kind, each in (("new", new), ("gone", gone)) if each]
    told = ", ".join(differences) or f"{join_names(then)} -> {join_names(plan.order)}"
    same = f"'order=[{','.join(then)}]' 'hydra.run.dir={run.path}'"
    if why:
        told = f"{run.path} has learned {join_names(then)} ({told}), and nothing can follow: {why}"
        keep = (
            f"{same} goes on with what it had, new domains at the end of the order"
            if by_texts
            else "that order"
        )
        raise ValueError(f"{told}; allowed: {keep}; another name=… learns all from the beginning")
    told = f"order={show(plan.run.order)} means other domains than when {run.path} was begun ({told})"
    keep = "bring them back" if gone else f"{same} goes on with what it had"
    raise ValueError(f"{told}; {keep}, another name=… begins a new run, or delete the folder")


def reject_changes(run: RunDir, changes: Iterable[str]) -> None:
    """Raises ValueError if there are changes."""
    if wrong := list(changes):
        told = "; ".join(wrong[:SHOWN]) + f"; and {len(wrong) - SHOWN} more" * (len(wrong) > SHOWN)
        remedy = f"bring back what it had, choose another name=…, or delete {run.path}"
        raise ValueError(f"{run.path} was begun with other contents ({told}); {remedy}")


def describe_change(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    sizes = [[sum(each[kind].values()) for kind in ("documents", "bytes")] for each in (then, now)]
    facts = zip(sizes, (then, now), strict=True)
    told = [f"{count} documents, {size} bytes, {each['digest'][:8]}" for (count, size), each in facts]
    return f"the text of {name} changed: {' -> '.join(told)}"


def is_beginning(then: Sequence[str], now: Sequence[str]) -> bool:
    """Whether an order is a longer one's beginning."""
    return 0 < len(then) < len(now) and list(now[: len(then)]) == list(then)


def join_names(names: Sequence[str]) -> str:
    return " ".join(names[:SHOWN]) + f" … ({len(names)})" * (len(names) > SHOWN)


def file_stat(path: Path) -> list[int]:
    """Size and modification time."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def checkpoint_files(checkpoint: str) -> dict[str, Path]:
    """The files of a model and its tokenizer by name: of a folder, or of the Hub what the cache has."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = None
        with suppress(ValueError):  # a missing folder is not a valid name on the Hub
            config = try_to_load_from_cache(checkpoint, "config.json")
        if not isinstance(config, str):
            return {}
        folder = Path(config).parent
    paths = [*sorted(folder.iterdir()), *sorted(folder.glob("adapters/*/*"))]  # adapters are merged
    return {str(path.relative_to(folder)): path for path in paths if path.suffix in OF_A_CHECKPOINT}


def write_manifest(
    plan: Plan, run: RunDir, corpora: Corpora, start: Base, evaluators: Sequence[Evaluator]
) -> None:
    """Compares what has been read and made to the stored manifest, and stores it.

    Raises ValueError for other texts, base or tokenizer; logs end tasks with other data."""
    if not is_first_process():
        return
    facts, then = ("digest", "documents", "bytes"), Manifest.load(run)
    old = then or Manifest(list(plan.order), {})
    texts = {
        name: {"stamp": each.folder.name, **{fact: each.facts[fact] for fact in facts}}
        for name, each in corpora.by_name.items()
    }
    base = {}
    for name, path in checkpoint_files(start.checkpoint).items():
        if (
            plan.model.checkpoint is not None or path.suffix in WEIGHTS
        ):  # the config has the rest of a new one
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
    cap = run.stored("eval.tokens")  # absent: no bound
    if cap == plan.cap:
        return plan
    settings = with_cap(plan.settings, cap)
    return replace(plan, settings=settings, config_digest=digest(identity(settings)))
