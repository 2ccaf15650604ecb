"""What a run is made of, known by contents: its texts in their order, its base, its tokenizer, its end tasks.

The folder of a run remembers it from its first start. Later starts compare: sizes and times first, contents
where those differ, or of everything with `check=full`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt.core.files import file_hash, replace
from cpt.core.processes import is_first_process
from cpt.core.rules import show
from cpt.data.sources.base import GENERAL, stamp_of
from cpt.trainer.growth import SHOWN, is_beginning, join_names, say_why_not
from cpt.trainer.plan import Plan
from cpt.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.trainer.evaluators import Evaluator
    from cpt.trainer.pretraining import Base

log = logging.getLogger(__name__)
WEIGHTS = (".safetensors", ".bin")
OF_A_CHECKPOINT = (*WEIGHTS, ".json", ".model", ".txt", ".jinja")
FACTS = ("digest", "documents", "bytes")


@dataclass
class Identity:
    """What a run folder remembers."""

    order: list[str]
    texts: dict[str, dict[str, Any]]  # by name: digest, stamp (sizes and times), documents, bytes
    base: dict[str, list[Any]] = field(default_factory=dict)  # by file: size, time, checksum
    tokenizer: str = ""
    endtasks: dict[str, str] = field(default_factory=dict)  # by task, the digest of its examples

    @classmethod
    def load(cls, place: RunFolder) -> Identity | None:
        """The manifest of a run folder; without the file, what its scores say; None of a new run.

        Raises ValueError for a damaged file."""
        path = place.identity
        if not path.exists():
            scores = place.scores()
            known = {name: dict(facts) for name, facts in scores.texts.items()} if scores else {}
            return cls(list(scores.run["order"]), known) if scores else None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged ({error}); delete it: the run is then compared with its scores.json"
            ) from None

    def save(self, place: RunFolder) -> None:
        replace(place.identity, json.dumps(asdict(self), indent=1))


def check_identity(plan: Plan, place: RunFolder, *, remember: bool = True) -> None:
    """Compares what a run folder was begun with with what there is now, before anything else is done; what
    only looks changed is remembered as it is now.

    Raises ValueError for texts, domains or a base that are others now; the message names them."""
    then = Identity.load(place)
    if then is None:
        return
    before = deepcopy(then)
    compare_order(then, plan, place)
    if wrong := [*changed_texts(then, plan), *changed_checkpoint(then, plan)]:
        raise ValueError(changed_message(place, wrong))
    if not place.identity.exists():
        log.info("%s has no identity.json: its texts are compared with its scores.json", place.path)
    if remember and then != before and is_first_process():
        then.save(place)


def is_same(plan: Plan, place: RunFolder) -> bool:
    """Whether sizes and times say that nothing has changed; nothing is read, nothing told."""
    then = Identity.load(place)
    if then is None or then.order != plan.order or any(stamps_differ(then, plan)):
        return False
    given = plan.model.checkpoint
    return given is None or not any(others(then.base, checkpoint_files(given)))


def list_changed_contents(place: RunFolder, plan: Plan) -> list[str]:
    """What of the texts and of the base is not in a plan as a folder has learned it. Texts whose sizes and
    times say that they may have changed are read."""
    then = Identity.load(place)
    if then is None:
        return [f"{place.identity} is missing"]
    if gone := [name for name in then.texts if name not in (*plan.order, GENERAL)]:
        return [f"the text of {name} is not in the order" for name in gone]
    return [*changed_texts(then, plan), *changed_checkpoint(then, plan)]


def changed_message(place: RunFolder, wrong: list[str]) -> str:
    told = "; ".join(wrong[:SHOWN]) + f"; and {len(wrong) - SHOWN} more" * (len(wrong) > SHOWN)
    return (
        f"{place.path} was begun with other contents ({told}); bring back what it had, "
        f"choose another name=…, or delete {place.path}"
    )


def compare_order(then: Identity, plan: Plan, place: RunFolder) -> None:
    """Raises ValueError where other domains, or another order of them, would be learned."""
    if then.order == plan.order:
        return
    if plan.by_texts and set(then.order) != set(plan.order):
        refuse_growth(then, plan, place)
    if is_beginning(then.order, plan.order):
        if why := say_why_not(plan):
            raise ValueError(
                f"{place.path} has learned {join_names(then.order)}, and nothing can follow: {why}; "
                "another name=… learns all from the beginning"
            )
        return
    new = [name for name in plan.order if name not in then.order]
    gone = [name for name in then.order if name not in plan.order]
    kinds = [f"{kind}: {join_names(names)}" for kind, names in (("new", new), ("gone", gone)) if names]
    told = ", ".join(kinds) or f"{join_names(then.order)} -> {join_names(plan.order)}"
    going_on = f"'order=[{','.join(then.order)}]' 'hydra.run.dir={place.path}' goes on with what it had, "
    raise ValueError(
        f"order={show(plan.run.order)} means other domains than when {place.path} was begun ({told}); "
        f"{'bring them back, ' if gone else going_on}another name=… begins a new run, or delete the folder"
    )


def refuse_growth(then: Identity, plan: Plan, place: RunFolder) -> None:
    """Raises ValueError: what the texts decide is another order with other domains."""
    new = [name for name in plan.order if name not in then.order]
    gone = [name for name in then.order if name not in plan.order]
    kinds = [f"{kind}: {join_names(names)}" for kind, names in (("new", new), ("gone", gone)) if names]
    raise ValueError(
        f"{place.path} has learned other domains ({', '.join(kinds)}), and nothing can follow: "
        f"{say_why_not(plan)}; 'order=[…]' with what it has learned, {join_names(then.order)}, and then "
        f"what is new goes on in 'hydra.run.dir={place.path}'; another name=… learns all from the beginning"
    )


def changed_texts(then: Identity, plan: Plan) -> Iterator[str]:
    """The texts whose content is another, by name; takes over the stamps of those that only look so."""
    full = plan.run.check == "full" and is_first_process()
    for name in list(then.texts) if full else list(stamps_differ(then, plan)):
        stamp = stamp_of(plan.source, name)
        facts = read_now(plan, name, full=full)
        if facts["digest"] == then.texts[name]["digest"]:
            then.texts[name]["stamp"] = stamp
        else:
            yield difference(name, then.texts[name], facts)


def stamps_differ(then: Identity, plan: Plan) -> Iterator[str]:
    """The texts that look changed."""
    return (name for name, told in then.texts.items() if told.get("stamp") != stamp_of(plan.source, name))


def read_now(plan: Plan, name: str, *, full: bool) -> Mapping[str, Any]:
    """The facts of a text as it is now, for all runs or, if `full`, from its files again."""
    from cpt.data.corpus import facts_anew, make_corpus  # pyarrow and datasets: seconds, rarely needed

    log.info("comparing the text of %s with the one that the run was begun with", name)
    if full:
        return facts_anew(plan.source, name)
    return make_corpus(plan.source, name, cache=Path(plan.run.cache_dir)).facts


def difference(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"the text of {name} changed: {size(then)} -> {size(now)}"


def size(facts: Mapping[str, Any]) -> str:
    """A text's documents, bytes and digest, for people."""
    documents, count = sum(facts["documents"].values()), sum(facts["bytes"].values())
    return f"{documents} documents, {count} bytes, {facts['digest'][:8]}"


def changed_checkpoint(then: Identity, plan: Plan) -> Iterator[str]:
    """The files of a given checkpoint that are others now; takes over the times of those that only look
    so."""
    checkpoint = plan.model.checkpoint
    if checkpoint is None or not then.base:
        return
    found = checkpoint_files(checkpoint)
    for name in list(then.base) if plan.run.check == "full" else list(others(then.base, found)):
        if name not in found:
            yield f"model.checkpoint={checkpoint} has no {name} any more"
        elif (now := file_identity(found[name]))[2] != then.base[name][2]:
            yield f"{name} of model.checkpoint={checkpoint} changed"
        else:
            then.base[name] = now


def others(then: Mapping[str, list[Any]], found: Mapping[str, Path]) -> Iterator[str]:
    """The files that are gone, or have another size or time."""
    return (name for name, told in then.items() if name not in found or told[:2] != look(found[name]))


def look(path: Path) -> list[int]:
    """The size and time of a file."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def file_identity(path: Path) -> list[Any]:
    return [*look(path), file_hash(path)]


def checkpoint_files(checkpoint: str) -> dict[str, Path]:
    """What a model and its tokenizer are read from, by name: of a folder, or of a name on the hub what has
    been fetched."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = None
        with suppress(ValueError):  # a folder that is gone is no name of the hub
            config = try_to_load_from_cache(checkpoint, "config.json")
        if not isinstance(config, str):
            return {}
        folder = Path(config).parent
    paths = [*sorted(folder.iterdir()), *sorted(folder.glob("adapters/*/*"))]  # adapters are merged
    return {str(path.relative_to(folder)): path for path in paths if path.suffix in OF_A_CHECKPOINT}


def base_files(start: Base, *, given: bool) -> dict[str, Path]:
    """What the base is known by; the settings of one that is built here are the config's."""
    files = checkpoint_files(start.checkpoint)
    return {name: path for name, path in files.items() if given or path.suffix in WEIGHTS}


def settle_identity(
    plan: Plan, place: RunFolder, corpora: Corpora, start: Base, examinations: Sequence[Evaluator]
) -> None:
    """Compares what has been read and made with what the folder remembers, and remembers it.

    Raises ValueError for texts, a base or a tokenizer that are others now; the message names them. End tasks
    whose data are others are told."""
    if not is_first_process():
        return
    then = Identity.load(place)
    now = gather_identity(plan, corpora, start, examinations, then or Identity(plan.order, {}))
    if then is not None:
        if wrong := list(list_changes(then, now)):
            raise ValueError(changed_message(place, wrong))
        for task in now.endtasks:
            if then.endtasks.get(task, now.endtasks[task]) != now.endtasks[task]:
                log.info("end task %s: its data changed; it is measured again", task)
    now.save(place)
    place.renew(plan.settings)


def gather_identity(
    plan: Plan, corpora: Corpora, start: Base, examinations: Sequence[Evaluator], then: Identity
) -> Identity:
    """What a run is made of now; what of the base looks the same is not read again."""
    texts = {
        name: {"stamp": each.folder.name, **{fact: each.facts[fact] for fact in FACTS}}
        for name, each in corpora.by_name.items()
    }
    base = {
        name: then.base[name] if then.base.get(name, [])[:2] == look(path) else file_identity(path)
        for name, path in base_files(start, given=plan.model.checkpoint is not None).items()
    }
    contents = {name: content for each in examinations for name, content in each.contents.items()}
    endtasks = then.endtasks | contents
    if is_beginning(then.order, plan.order):
        log.info("%s are added to %s", ", ".join(plan.order[len(then.order) :]), ", ".join(then.order))
    return Identity(plan.order, texts, base, corpora.tokenizer_digest(start.tokenizer), endtasks)


def list_changes(then: Identity, now: Identity) -> Iterator[str]:
    """What of a run is not what it was begun with, for people."""
    for name, told in then.texts.items():
        if told["digest"] != now.texts[name]["digest"]:
            yield difference(name, told, now.texts[name])
    for name, (*_, value) in then.base.items():
        if name not in now.base or now.base[name][2] != value:
            yield f"the base model changed: {name}"
    if then.tokenizer not in ("", now.tokenizer):
        yield "the tokenizer of the base model changed"
