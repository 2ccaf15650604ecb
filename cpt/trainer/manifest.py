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
from cpt.core.rules import show
from cpt.data.sources.base import GENERAL, stamp_of
from cpt.evaluation.policy import AUTO
from cpt.trainer.plan import Plan, why_not_growable, with_cap
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.trainer.base_model import Base
    from cpt.trainer.examinations import Measured

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
        """The manifest of a run; without the file, as far as its scores have it; None of a new run.

        Raises ValueError for a damaged file."""
        if not run.manifest.exists():
            scores = run.scores()
            return (
                cls([*scores.run["order"]], {k: {**v} for k, v in scores.texts.items()}) if scores else None
            )
        try:
            return cls(**json.loads(run.manifest.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{run.manifest} is damaged ({error}); delete it: the run is then compared with its scores.json"
            ) from None

    def save(self, run: RunDir) -> None:
        files.replace(run.manifest, json.dumps(asdict(self), indent=1))

    def touched_texts(self, plan: Plan) -> list[str]:
        """The texts with other sizes or times."""
        return [name for name, each in self.texts.items() if each.get("stamp") != stamp_of(plan.source, name)]

    def touched_files(self, found: Mapping[str, Path]) -> list[str]:
        """The files of the base that are missing or have another size or time."""
        return [name for name, (*stat, _) in self.base.items()
                if name not in found or stat != file_stat(found[name])]  # fmt: skip

    def changes(self, plan: Plan) -> Iterator[str]:
        """How the texts and the given checkpoint differ now, as messages; updates the sizes and times of
        those with the same contents."""
        full = plan.run.check == "full"
        for name in list(self.texts) if full and is_first_process() else self.touched_texts(plan):
            from cpt.data.corpus import (  # pyarrow and datasets: seconds, rarely needed
                facts_anew,
                make_corpus,
            )

            stamp = stamp_of(plan.source, name)
            log.info("comparing the text of %s with the one that the run was begun with", name)
            if full and is_first_process():
                facts = facts_anew(plan.source, name)
            else:
                facts = make_corpus(plan.source, name, cache=Path(plan.run.cache_dir)).facts
            if facts["digest"] == self.texts[name]["digest"]:
                self.texts[name]["stamp"] = stamp
            else:
                yield describe_change(name, self.texts[name], facts)
        if (given := plan.model.checkpoint) is None or not self.base:
            return
        found = checkpoint_files(given)
        for name in list(self.base) if full else self.touched_files(found):
            if name not in found:
                yield f"model.checkpoint={given} has no {name} any more"
            elif (now := [*file_stat(found[name]), files.file_hash(found[name])])[2] != self.base[name][2]:
                yield f"{name} of model.checkpoint={given} changed"
            else:
                self.base[name] = now


def check_manifest(plan: Plan, run: RunDir, *, update: bool = True) -> None:
    """Compares the contents that a run was begun with to the present ones; stores new sizes and times.

    Raises ValueError for other texts, domains or base; the message names them."""
    then = Manifest.load(run)
    if then is None:
        return
    before = deepcopy(then)
    check_order(then.order, plan, run)
    reject_changes(run, then.changes(plan))
    if not run.manifest.exists():
        log.info("%s has no identity.json: its texts are compared with its scores.json", run.path)
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
    then = Manifest.load(run)
    if then is None:
        return [f"{run.manifest} is missing"]
    if gone := [name for name in then.texts if name not in (*plan.order, GENERAL)]:
        return [f"the text of {name} is not in the order" for name in gone]
    return list(then.changes(plan))


def check_order(then: Sequence[str], plan: Plan, run: RunDir) -> None:
    """Raises ValueError where other domains, or another order of them, would be trained."""
    is_longer = is_beginning(then, plan.order)
    if list(then) == list(plan.order) or (is_longer and not plan.by_texts and not why_not_growable(plan)):
        return
    new = [name for name in plan.order if name not in then]
    gone = [name for name in then if name not in plan.order]
    kinds = ", ".join(
        f"{kind}: {join_names(names)}" for kind, names in (("new", new), ("gone", gone)) if names
    )
    if plan.by_texts and (new or gone):
        raise ValueError(
            f"{run.path} has learned other domains ({kinds}), and nothing can follow: {why_not_growable(plan)}; "
            f"'order=[…]' with what it has learned, {join_names(then)}, and then what is new goes on in "
            f"'hydra.run.dir={run.path}'; another name=… learns all from the beginning"
        )
    if is_longer:
        raise ValueError(
            f"{run.path} has learned {join_names(then)}, and nothing can follow: {why_not_growable(plan)}; "
            "another name=… learns all from the beginning"
        )
    told = kinds or f"{join_names(then)} -> {join_names(plan.order)}"
    going_on = f"'order=[{','.join(then)}]' 'hydra.run.dir={run.path}' goes on with what it had, "
    raise ValueError(
        f"order={show(plan.run.order)} means other domains than when {run.path} was begun ({told}); "
        f"{'bring them back, ' if gone else going_on}another name=… begins a new run, or delete the folder"
    )


def reject_changes(run: RunDir, changes: Iterable[str]) -> None:
    """Raises ValueError if there are changes."""
    if wrong := list(changes):
        told = "; ".join(wrong[:SHOWN]) + f"; and {len(wrong) - SHOWN} more" * (len(wrong) > SHOWN)
        raise ValueError(
            f"{run.path} was begun with other contents ({told}); bring back what it had, "
            f"choose another name=…, or delete {run.path}"
        )


def describe_change(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    sizes = (
        f"{sum(each['documents'].values())} documents, {sum(each['bytes'].values())} bytes, {each['digest'][:8]}"
        for each in (then, now)
    )
    return f"the text of {name} changed: {' -> '.join(sizes)}"


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
    plan: Plan, run: RunDir, corpora: Corpora, start: Base, evaluators: Sequence[Measured]
) -> None:
    """Compares what has been read and made to the stored manifest, and stores it.

    Raises ValueError for other texts, base or tokenizer; logs end tasks with other data."""
    if not is_first_process():
        return
    then = Manifest.load(run)
    facts = ("digest", "documents", "bytes")
    texts = {
        name: {"stamp": each.folder.name, **{fact: each.facts[fact] for fact in facts}}
        for name, each in corpora.by_name.items()
    }
    base, is_built = dict(then.base) if then else {}, plan.model.checkpoint is None
    found = checkpoint_files(start.checkpoint)
    if is_built:  # the config has its settings
        found = {name: path for name, path in found.items() if path.suffix in WEIGHTS}
    base = {
        name: base[name]
        if base.get(name, [])[:2] == file_stat(path)
        else [*file_stat(path), files.file_hash(path)]
        for name, path in found.items()
    }
    endtasks = (then.endtasks if then else {}) | {
        name: content for each in evaluators for name, content in each.contents.items()
    }
    now = Manifest(list(plan.order), texts, base, corpora.tokenizer_digest(start.tokenizer), endtasks)
    if then is not None:
        reject_changes(
            run,
            [
                *(
                    describe_change(name, old, now.texts[name])
                    for name, old in then.texts.items()
                    if old["digest"] != now.texts[name]["digest"]
                ),
                *(
                    f"the base model changed: {name}"
                    for name, (*_, value) in then.base.items()
                    if name not in base or base[name][2] != value
                ),
                *["the tokenizer of the base model changed"] * (then.tokenizer not in ("", now.tokenizer)),
            ],
        )
        if is_beginning(then.order, plan.order):
            log.info("%s are added to %s", ", ".join(plan.order[len(then.order) :]), ", ".join(then.order))
        for task in endtasks:
            if then.endtasks.get(task, endtasks[task]) != endtasks[task]:
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
