"""The contents that a run is made of: texts in their order, base model, tokenizer and end tasks.

A run directory stores its contents (`identity.json`) at its first start. Later starts compare sizes and times
first, and hashes where those differ, or of every file with `verify_inputs=full`."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from cpt.core import files
from cpt.core.exceptions import DamagedFileError, format_value
from cpt.core.messages import count_noun
from cpt.core.naming import quote, quote_list
from cpt.core.processes import is_first_process
from cpt.core.schema import check_types
from cpt.data.sources.base import DocumentSource, make_stamp
from cpt.trainer.plan import Plan, why_not_extendable
from cpt.trainer.run_dir import WEIGHTS, RunDir, list_checkpoint_files, read_file_stat

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.trainer.base_model import Base
    from cpt.trainer.evaluator import FileEvaluator

log = logging.getLogger(__name__)
MAX_SHOWN = 8  # items that a message lists
REPLAY_SOURCES = "replay.sources/"  # before the names of sources: no domain has a slash in its name
# Before the names of files that are not the checkpoint's own.
TOKENIZER_FOLDER = "model.tokenizer/"
REFERENCE_FOLDER = "loss.reference/"


@dataclass
class Manifest:
    """What a run directory was made of."""

    order: list[str]
    texts: dict[str, dict[str, Any]]  # by name: digest, stamp (sizes and times), documents, bytes
    base: dict[str, list[Any]] = field(
        default_factory=dict
    )  # by file (see list_base_files): size, time, hash
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
            raise DamagedFileError(
                run.manifest, reason=str(error), remedy="restore it from a backup"
            ) from None

    def save(self, run: RunDir) -> None:
        files.write_atomically(run.manifest, json.dumps(asdict(self), indent=1))

    def find_touched(self, plan: Plan) -> tuple[list[str], list[str]]:
        """The texts, and the files of a checkpoint, whose sizes or modification times have changed."""
        texts = []
        for name, facts in self.texts.items():
            source, source_name = find_source(plan, name)
            if facts.get("stamp") != make_stamp(source, source_name):
                texts.append(name)
        return texts, self.find_touched_files(plan)

    def find_touched_files(self, plan: Plan) -> list[str]:
        """The files of the base that are missing, or have another size or time now."""
        if not self.base:
            return []
        stats = {name: read_file_stat(path) for name, path in list_base_files(plan).items()}
        return [name for name, (*stat, _) in self.base.items() if stats.get(name) != stat]

    def find_changes(self, plan: Plan) -> list[str]:
        """How texts and checkpoint differ now, as messages; updates sizes and times of the same contents."""
        touched_texts, touched_files = self.find_touched(plan)
        return [*self.compare_texts(plan, touched_texts), *self.compare_base(plan, touched_files)]

    def compare_texts(self, plan: Plan, touched_texts: Sequence[str]) -> Iterator[str]:
        """Yields how texts differ now. Only those that were touched are compared or, with
        `verify_inputs=full`, all, which the first process reads."""
        reads_all = plan.run.verify_inputs == "full" and is_first_process()
        names = list(self.texts) if reads_all else touched_texts
        for name in names:
            from cpt.data.corpus import make_corpus, read_documents  # seconds of imports, rarely needed

            log.info("Comparing the text of %s with that of the run's start", name)
            source, source_name = find_source(plan, name)
            stamp = make_stamp(source, source_name)
            facts: Mapping[str, Any]
            if reads_all:
                facts = read_documents(source, source_name).facts
            else:
                facts = make_corpus(source, source_name, cache=Path(plan.run.cache_dir)).facts
            if facts["digest"] == self.texts[name]["digest"]:
                self.texts[name]["stamp"] = stamp
            else:
                yield describe_text_change(name, self.texts[name], facts)

    def compare_base(self, plan: Plan, touched_files: Sequence[str]) -> Iterator[str]:
        """Yields how files of a checkpoint differ now. Only those that were touched are compared or, with
        `verify_inputs=full`, all. A base that the run has made is compared by `write_manifest`."""
        paths = list_base_files(plan)
        names = list(self.base) if plan.run.verify_inputs == "full" else touched_files
        for name in names:
            file_name = name
            option = f"model.name_or_path={plan.model.name_or_path}"
            if name.startswith(TOKENIZER_FOLDER):
                file_name = name.removeprefix(TOKENIZER_FOLDER)
                option = f"model.tokenizer={plan.model.tokenizer}"
            elif name.startswith(REFERENCE_FOLDER):
                file_name = name.removeprefix(REFERENCE_FOLDER)
                option = f"loss.reference={plan.reference_folder}"
            elif plan.model.name_or_path is None:
                continue

            if name not in paths:
                yield f"{option} has no {file_name} any more"
                continue
            entry = [*read_file_stat(paths[name]), files.hash_file(paths[name])]
            if has_other_hash(entry, self.base[name]):
                yield f"{file_name} of {option} changed"
            else:
                self.base[name] = entry


def find_source(plan: Plan, text: str) -> tuple[DocumentSource, str]:
    """What reads a text of a manifest, and the name by which it does; below REPLAY_SOURCES those of
    `replay.sources`."""
    name = text.removeprefix(REPLAY_SOURCES)
    if name == text:
        return plan.source, text
    return plan.mixture.readers[name], name


def list_base_files(plan: Plan) -> dict[str, Path]:
    """The files of a checkpoint by name; below TOKENIZER_FOLDER those of model.tokenizer, without the weights
    that its folder may have, and below REFERENCE_FOLDER those of loss.reference."""
    paths = list_checkpoint_files(plan.model.name_or_path)
    for name, path in list_checkpoint_files(plan.model.tokenizer).items():
        if path.suffix not in WEIGHTS:
            paths[f"{TOKENIZER_FOLDER}{name}"] = path
    for name, path in list_checkpoint_files(plan.reference_folder).items():
        paths[f"{REFERENCE_FOLDER}{name}"] = path
    return paths


def has_other_hash(entry: Sequence[Any], stored_entry: Sequence[Any]) -> bool:
    """Whether a file has other contents than the stored entry says; both are (size, time, hash)."""
    return entry[-1] != stored_entry[-1]


def check_manifest(plan: Plan, run: RunDir, *, update: bool = True) -> None:
    """Compares the contents that a run started with to the present ones; stores new sizes and times.
    Raises ValueError for other texts, domains, order or base, by their names."""
    manifest = Manifest.load(run)
    if manifest is None:
        return
    if manifest.order != list(plan.order):
        reject_order(plan, run, manifest.order)
    stored = deepcopy(manifest)
    reject_changes(run, manifest.find_changes(plan))
    if update and manifest != stored and is_first_process():
        manifest.save(run)


def reject_order(plan: Plan, run: RunDir, stored_order: Sequence[str]) -> None:
    """Raises ValueError for a run that was started with an order other than the plan's; says how further
    domains are added."""
    new_domains = [name for name in plan.order if name not in stored_order]
    gone_domains = [name for name in stored_order if name not in plan.order]
    difference = describe_order_difference(plan.order, stored_order)
    command = shlex.join([f"order={quote_list(stored_order)}", f"hydra.run.dir={quote(str(run.path))}"])
    resume_hint = f"{command} resumes with the domains it had"

    # Further domains may follow, unless the first ones would have been trained differently with them.
    is_longer = is_beginning(stored_order, plan.order)
    has_other_domains = bool(new_domains or gone_domains)
    if is_longer or (plan.is_ordered_by_texts and has_other_domains):
        reason = why_not_extendable(plan)
        if reason:
            raise ValueError(
                f"{run.path} has learned {join_first(stored_order)} ({difference}), and nothing can follow: "
                f"{reason}. Allowed: {resume_hint}; another name=… learns all from the beginning"
            )

    scores = run.load_scores()
    if is_longer and scores is not None and scores.run["finished"]:
        folder = run.path.with_name(f"{run.path.name}-{new_domains[-1]}")
        command = shlex.join([f"extend={quote(str(run.path))}", f"hydra.run.dir={quote(str(folder))}"])
        raise ValueError(
            f"{run.path} has learned {join_first(stored_order)} ({difference}) and stays as it is. "
            f"Allowed: {command} learns what is new; {resume_hint}"
        )

    remedy = "restore them" if gone_domains else resume_hint
    raise ValueError(
        f"order={format_value(plan.run.order)} means other domains than when {run.path} was started "
        f"({difference}); {remedy}, "
        "another name=… begins a new run, or delete the folder"
    )


def describe_order_difference(order: Sequence[str], stored_order: Sequence[str]) -> str:
    """Which domains are new or gone; of the same ones, both orders."""
    new_domains = [name for name in order if name not in stored_order]
    gone_domains = [name for name in stored_order if name not in order]
    differences = []
    if new_domains:
        differences.append(f"new: {join_first(new_domains)}")
    if gone_domains:
        differences.append(f"gone: {join_first(gone_domains)}")
    if not differences:
        return f"{join_first(stored_order)} -> {join_first(order)}"
    return ", ".join(differences)


def reject_changes(run: RunDir, changes: Sequence[str]) -> None:
    """Raises ValueError if there are changes."""
    if changes:
        raise ValueError(
            f"{run.path} was started with other contents ({join_first(changes, '; ')}); "
            f"restore what it had, choose another name=…, or delete {run.path}"
        )


def describe_text_change(name: str, stored_facts: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    return f"the text of {name} changed: {describe_contents(stored_facts)} -> {describe_contents(facts)}"


def describe_contents(facts: Mapping[str, Any]) -> str:
    num_documents = sum(facts["documents"].values())
    num_bytes = sum(facts["bytes"].values())
    return f"{count_noun(num_documents, 'document')}, {count_noun(num_bytes, 'byte')}, {facts['digest'][:8]}"


def is_beginning(order: Sequence[str], longer_order: Sequence[str]) -> bool:
    """Whether an order is the beginning of a longer one."""
    return 0 < len(order) < len(longer_order) and list(longer_order[: len(order)]) == list(order)


def join_first(items: Sequence[str], separator: str = " ") -> str:
    """The first items, and how many more there are.

    >>> join_first([f"a{number}" for number in range(10)])
    'a0 a1 a2 a3 a4 a5 a6 a7 and 2 more'
    """
    listed = list(items[:MAX_SHOWN])
    if len(items) > MAX_SHOWN:
        listed.append(f"and {len(items) - MAX_SHOWN} more")
    return separator.join(listed)


def write_manifest(
    plan: Plan, run: RunDir, corpora: Corpora, start: Base, evaluators: Iterable[FileEvaluator]
) -> None:
    """Compares what has been read and made to the stored manifest, and stores it. Raises ValueError for other
    texts, base or tokenizer; logs end tasks with other data."""
    if not is_first_process():
        return
    stored = Manifest.load(run) or Manifest(list(plan.order), {})
    endtasks: dict[str, str] = {}
    for evaluator in evaluators:
        endtasks.update(evaluator.contents)
    manifest = Manifest(
        order=list(plan.order),
        texts=describe_texts(corpora),
        base=hash_base(plan, start, stored.base),
        tokenizer=corpora.tokenizer_digest(start.tokenizer),
        endtasks=stored.endtasks | endtasks,
    )
    reject_changes(run, list(find_differences(stored, manifest)))

    for task, content in endtasks.items():
        if stored.endtasks.get(task, content) != content:
            log.info("Measuring end task %s again: its data changed", task)
    # The stored config has the order as it was given, which may mean other domains now. It is written before
    # the manifest: after a kill in between, the next start does it again.
    if run.stored_config().get("order") != plan.settings["order"]:
        run.write_config(plan.settings)
    manifest.save(run)


def describe_texts(corpora: Corpora) -> dict[str, dict[str, Any]]:
    """What the manifest stores of each text."""
    corpus_by_name = dict(corpora.by_name)
    for name, part in corpora.mixed.items():
        corpus_by_name[f"{REPLAY_SOURCES}{name}"] = part.corpus
    texts = {}
    for name, corpus in corpus_by_name.items():
        texts[name] = {
            "stamp": corpus.folder.name,
            "digest": corpus.facts["digest"],
            "documents": corpus.facts["documents"],
            "bytes": corpus.facts["bytes"],
        }
    return texts


def hash_base(plan: Plan, start: Base, stored_base: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Size, time and hash of the files of the base; hashes are stored ones where size and time are equal. For
    a model that the run has made only the weights count: its config is in the run's."""
    base = {}
    paths = list_base_files(plan)
    if plan.model.name_or_path is None:
        for name, path in list_checkpoint_files(start.checkpoint).items():
            if path.suffix in WEIGHTS:
                paths[name] = path
    for name, path in paths.items():
        stat = read_file_stat(path)
        entry = stored_base.get(name, [])
        if entry[:2] != stat:
            entry = [*stat, files.hash_file(path)]
        base[name] = entry
    return base


def find_differences(stored: Manifest, manifest: Manifest) -> Iterator[str]:
    """Yields how contents differ from the stored ones, as messages."""
    for name, facts in stored.texts.items():
        if facts["digest"] != manifest.texts[name]["digest"]:
            yield describe_text_change(name, facts, manifest.texts[name])
    for name, entry in stored.base.items():
        if name not in manifest.base or has_other_hash(manifest.base[name], entry):
            yield f"the base model changed: {name}"
    if stored.tokenizer not in ("", manifest.tokenizer):
        yield "the tokenizer of the base model changed"
