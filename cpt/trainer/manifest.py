"""The contents that a run is made of: texts in their order, base model, tokenizer, end tasks; and how a
finished run is extended by further domains or more steps, in its directory or in a copy of a sibling.

A run directory stores its contents (`identity.json`) at its first start. Later starts compare sizes and times
first, and hashes where those differ, or of every file with `verify_inputs=full`. `trainer.steps` is raised
where the result is bitwise the same as training that long from scratch."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt.core import files
from cpt.core.cache import discard
from cpt.core.config import digest, identity
from cpt.core.processes import is_first_process, is_one_of_several
from cpt.core.schema import Steps, fits, show
from cpt.data.sources.base import GENERAL, Source, stamp_of
from cpt.evaluation.options import AUTO
from cpt.evaluation.scores import COSTS, NOTED, Scores
from cpt.optim.schedulers import Progress
from cpt.trainer.domain_order import order_domains
from cpt.trainer.plan import OWN_CODE, Plan, why_not_growable, with_cap
from cpt.trainer.run_dir import WEIGHTS, RunDir, checkpoint_files, file_stat

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.trainer.base_model import Base
    from cpt.trainer.evaluators import Evaluator

log = logging.getLogger(__name__)
SHOWN = 8  # items that a message lists
COPIED = ("config.yaml", "identity.json", "scores.json", "metrics.csv", "threads", "callbacks")
# Folders whose files are replaced, never written into: a copy may share them by hard links.
LINKED = (
    *("answers", "benchmarks", "checkpoints", "diagnostics", "documents", "endtasks", "generated"),
    "stages",
)
MEASURED = ("endtasks", "answers", "benchmarks")  # of a stage, in addition to the losses


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

    def touched(self, source: Source, found: Mapping[str, Path]) -> tuple[list[str], list[str]]:
        """The texts with other sizes or times, and the files of the base that `found` lacks or has with
        others."""
        texts = [name for name, each in self.texts.items() if each.get("stamp") != stamp_of(source, name)]
        stats = {name: file_stat(path) for name, path in found.items()}
        return texts, [name for name, (*stat, _) in self.base.items() if stats.get(name) != stat]

    def changes(self, plan: Plan) -> Iterator[str]:
        """How the texts and the given checkpoint differ now, as messages; updates the sizes and times of
        those with the same contents."""
        full, given, cache = (
            plan.run.verify_inputs == "full",
            plan.model.name_or_path,
            Path(plan.run.cache_dir),
        )
        found = checkpoint_files(given) if self.base else {}
        (texts, base), reads_all = self.touched(plan.source, found), full and is_first_process()
        for name in list(self.texts) if reads_all else texts:
            from cpt.data.corpus import make_corpus, read_documents  # seconds of imports, rarely needed

            log.info("Comparing the text of %s with that of the run's start", name)
            stamp, source = stamp_of(plan.source, name), plan.source
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
    new = [name for name in plan.order if name not in old]
    gone = [name for name in old if name not in plan.order]
    why = why_not_growable(plan) if is_longer or (plan.by_texts and (new or gone)) else ""
    if old != list(plan.order) and not (is_longer and not why):
        differences = [f"{kind}: {join_first(each)}" for kind, each in (("new", new), ("gone", gone)) if each]
        told = ", ".join(differences) or f"{join_first(old)} -> {join_first(plan.order)}"
        same = f"'order=[{','.join(old)}]' 'hydra.run.dir={run.path}' resumes with the domains it had"
        if why:
            told = f"{run.path} has learned {join_first(old)} ({told}), and nothing can follow: {why}"
            keep = f"{same}, new domains at the end of the order" if plan.by_texts else "that order"
            raise ValueError(f"{told}. Allowed: {keep}; another name=… learns all from the beginning")
        told = f"order={show(plan.run.order)} means other domains than when {run.path} was started ({told})"
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
    if is_beginning(old.order, plan.order):
        log.info("Adding %s after %s", ", ".join(plan.order[len(old.order) :]), ", ".join(old.order))
    for task in contents:
        if old.endtasks.get(task, contents[task]) != contents[task]:
            log.info("Measuring end task %s again: its data changed", task)
    now.save(run)
    if run.stored("order") != plan.settings["order"]:
        run.write_config(plan.settings)


def resolve_eval_cap(plan: Plan, run: RunDir) -> Plan:
    """The plan with `eval.max_tokens` as a run stored it, where the config leaves it to cpt."""
    if plan.evaluation.max_tokens != AUTO or not run.config.exists():
        return plan
    settings = with_cap(plan.settings, run.stored("eval.max_tokens"))  # absent: no bound
    return replace(plan, settings=settings, config_hash=digest(identity(settings)))


def resume_from_sibling(run: RunDir, plan: Plan) -> None:
    """Copies the sibling that `find_source` finds into a new directory, atomically, and logs what it found.
    Raises ValueError where another process is at work in the directory, and as `find_source`."""
    if run.config.exists():
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
            discard(partial)
            partial.mkdir()
            manifest = Manifest.load(source)
            has_all = manifest is not None and len(manifest.order) == len(plan.order)  # fewer steps
            for path in (source.path / name for name in (*COPIED, *LINKED)):
                if path.is_dir() and (has_all or path.name != "checkpoints"):
                    how = link if path.name in LINKED else shutil.copy2
                    shutil.copytree(path, partial / path.name, copy_function=how)
                elif path.is_file():
                    shutil.copy2(path, partial / path.name)
            for path in run.path.iterdir():  # Hydra's files are there by now
                os.replace(path, partial / path.name)
            run.path.rmdir()
            os.replace(partial, run.path)
    if line:
        log.info(line)


def find_started(plan: Plan, run: RunDir) -> RunDir:
    """The directory whose rows a run continues from: its own, or a sibling."""
    return run if run.config.exists() else find_source(run, plan)[0] or run


def find_source(run: RunDir, plan: Plan) -> tuple[RunDir | None, str]:
    """The longest finished sibling that trained the beginning of the order, and a log line: its name, or how
    the nearest one differs. Raises ValueError for a sibling that a budget alone keeps from being continued,
    and with grow=require without any."""
    if plan.run.grow == "never":
        return None, ""
    near: list[tuple[int, int, Path, list[str], list[str]]] = []
    shorter: dict[int, RunDir] = {}  # by their steps
    for path in sorted(run.path.parent.glob("*/identity.json")):
        sibling = RunDir(path.parent)
        try:
            manifest, scores = Manifest.load(sibling), sibling.scores()
        except ValueError:  # damaged
            continue
        if manifest is None or scores is None or not (scores.run["finished"] and sibling.config.exists()):
            continue
        if scores.run["method"] != plan.names["method"]:
            continue
        order, own = manifest.order, resolve_eval_cap(plan, sibling)
        # Where texts decide the order, it is not known yet.
        if set() < set(order) < set(plan.order) if plan.by_texts else is_beginning(order, plan.order):
            differences = sibling.changes(own.settings) or list_changed_contents(sibling, plan)
            near.append((-len(order), len(differences), sibling.path, order, differences))
        elif sibling.last_checkpoint() is not None:
            with suppress(ValueError):  # it cannot be extended
                if (before := check_extension(own, sibling)) and not list_changed_contents(sibling, plan):
                    shorter[before] = sibling
    line, why = "", why_not_growable(plan)
    nearest = min(near, key=lambda each: (bool(each[-1]), *each), default=None)
    if shorter and (nearest is None or nearest[-1]):
        source = shorter[max(shorter)]
        return source, f"Continuing from a copy of {source.path}, which has made fewer steps"
    if nearest is not None:
        _, _, folder, order, differences = nearest
        if not differences and not why:
            return RunDir(folder), f"Continuing from a copy of {folder} ({join_first(order)})"
        differences = differences or [why]
        if plan.observer.given and all(each.startswith(("budget.", "monitor.")) for each in differences):
            given = ", ".join(f"budget.{name}={value}" for name, value in plan.observer.given.items())
            told = f"{folder} has learned {join_first(order)}, and a run with a budget does not grow"
            unset = " and ".join(f"budget.{name}=null" for name in plan.observer.given)
            allowed = f"{unset}, or grow=never, which trains all domains"
            raise ValueError(f"{given} is invalid: {told}. Allowed: {allowed} from the base")
        line = f"Not continuing from {folder}: {join_first(differences, '; ')}"
    if plan.run.grow == "require":
        which = f"no finished run of method={plan.names['method']} in {run.path.parent}"
        told = line or f"{which} has learned the beginning of the order {join_first(plan.order)}"
        raise ValueError(f"grow=require is invalid: {told}. Allowed: auto, never, or such a run")
    return None, line


def extend_steps(plan: Plan, run: RunDir) -> None:
    """Reopens a run for more `trainer.steps`; a start that was killed in it does the same again. The caller
    holds the lock. Raises ValueError as `check_extension`."""
    before = check_extension(plan, run)
    if before is None:
        return
    # Before anything is removed.
    check_manifest(order_domains(plan) if plan.by_texts else plan, run, update=False)
    scores, done = run.scores(), 0
    if (path := run.last_checkpoint()) is not None:
        from cpt.core.tensors import save_state

        state = load_last(path)
        done = int(state["global_step"])
        state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False  # more follow
        save_state(state, path)
    if scores is not None:
        scores.config_hash = plan.config_hash
        scores.run |= {"name": str(plan.run.name), "variant": str(plan.run.variant)}
        keep_base_row(scores).save(run.scores_file)
    for left in (left for kind in MEASURED for left in run.path.glob(f"{kind}/001-*")):
        shutil.rmtree(left)
    run.write_config(plan.settings)
    log.info("Resuming at step %d: trainer.steps %d -> %d", done, before, plan.trainer.steps)


def check_extension(plan: Plan, run: RunDir) -> int | None:
    """The steps that a run stored, if the plan has more and is the same in all else; else None. Raises
    ValueError where the run cannot continue as if it had started with more."""
    stored: Any = run.stored("trainer.steps") if run.config.exists() else None
    if plan.trainer.steps is None or not fits(stored, Steps) or stored >= plan.trainer.steps:
        return None
    if [each.partition(":")[0] for each in run.changes(plan.settings)] != ["trainer.steps"]:
        return None
    before, scores, path = int(stored), run.scores(), run.last_checkpoint()
    rows, why = [] if scores is None else scores.rows[1:], ""
    if is_one_of_several():
        why = "several processes would open it again at once (start it once without torchrun or srun)"
    elif len(plan.order) > 1 and rows:
        why = f"{rows[0]} was learned with {before} steps, and later stages started from it"
    elif path is not None or plan.mixture.generates:
        done = 0 if path is None else int(load_last(path)["global_step"])
        why = why_steps_differ(plan, before, plan.trainer.steps, done=done)
    elif rows:
        why = "what the optimizer had at its end was not kept (save_trainer_state=true keeps it)"
    if why:
        told = f"{run.path} was made with trainer.steps={before}, and cannot continue to {plan.trainer.steps}"
        remedy = f"take {before} back, choose another name=…, or delete the folder"
        raise ValueError(f"{told}: {why}; {remedy}")
    return before


def why_end_is_final(plan: Plan) -> str:
    """Why no steps can be added to the end of a plan's run; empty where they can."""
    if (steps := plan.trainer.steps) is None:
        return "trainer.steps=null: how much is learned is said by trainer.epochs or trainer.tokens"
    if len(plan.order) > 1:
        return "of several domains the first keep their steps, and others build on them"
    return why_steps_differ(plan, steps, 2 * steps, done=steps)


def why_steps_differ(plan: Plan, before: int, now: int, *, done: int) -> str:
    """Why the steps that were made would have been others if `now` steps were made, not `before`, by their
    learning rates and by what else counts steps; empty where they would not."""
    method, schedule, name = plan.method.load(), plan.lr_scheduler, f"method={plan.names['method']}"
    foreign = [each.target for each in plan.masks if not each.target.startswith(OWN_CODE)]
    theirs = [vars(each) for each in method.__mro__ if not each.__module__.startswith(OWN_CODE)]
    declares = any("depends_on_total_steps" in each for each in theirs)
    reasons = {
        "what the model writes before a domain depends on how many steps follow": plan.mixture.generates,
        f"{name} divides its steps among the domains": method.requires_all_domains,
        f"what {name} does in a step depends on how many there are": (
            getattr(method, "depends_on_total_steps", False)
        ),
        f"{name} does not say (depends_on_total_steps = False in its class) that no step asks for it": not (
            declares or plan.method.target.startswith(OWN_CODE)
        ),
        f"mask {', '.join(foreign)} may depend on how many steps there are": foreign,
        "callbacks may depend on how many steps there are": plan.callbacks,
        "other text is evaluated after the last step (monitor, budget)": plan.watches,
        "strategy=fsdp keeps the trainer's state in shards": plan.trainer.strategy == "fsdp",
    }
    if found := next((reason for reason, holds in reasons.items() if holds), ""):
        return found
    count = len(plan.order)
    for step in range(done + 1):
        at = [Progress(step, steps, 0, count, step, steps * count, steps) for steps in (before, now)]
        then, wanted = (schedule(each.joined if plan.carry == "all" else each) for each in at)
        if then != wanted:
            rates = f"{then:.4g} of optim.lr where {before} steps are made, {wanted:.4g} where {now} are"
            advice = "(lr_scheduler=constant lr_scheduler.warmup_ratio=0 does not ask how many follow)"
            return f"lr_scheduler={type(schedule).__name__} gives step {step} {rates} {advice}"
    return ""


def load_last(path: Path) -> dict[str, Any]:
    """The trainer's state in a run's last checkpoint. Raises ValueError for a damaged file."""
    from cpt.core.tensors import check_state, load_tensors  # torch, which other starts need not wait for

    check_state(path, instead="delete it, and take trainer.steps back")
    return load_tensors(path, mapped=False)


def keep_base_row(scores: Scores) -> Scores:
    """The scores as they were when only the base was measured; seconds stay."""
    for name in ("rows", "nll", "modules", *NOTED, *COSTS):
        setattr(scores, name, getattr(scores, name)[:1])
    for name in (*MEASURED, "monitor", "moved"):
        setattr(scores, name, {})
    scores.run["finished"], scores.optimized_metric, scores.loading = False, None, ""
    scores.measure()
    return scores
