"""`plan=true`: what a run will cost, from a few real steps of its first stages, multiplied out.

Texts are read and tokenized into the run's cache. The method's first stages are trained for a few steps and
evaluated on a few batches, in a module that is thrown away. Documents, tokens and steps are counted. A later
stage takes the seconds of the last profiled one, and its bytes plus, for each further domain, the difference
between the last two."""

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pandas as pd
import torch

from cpt.core.messages import count_noun
from cpt.core.tensors import load_tensors
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.evaluation.options import EvalOptions
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.reporting.formats import MISSING, format_bytes
from cpt.trainer.base_model import Base, make_base
from cpt.trainer.build import build_data, build_method, check_row_repeats, read_corpora
from cpt.trainer.chat_costs import estimate_chat_seconds
from cpt.trainer.chat_date import date_chats
from cpt.trainer.export_dtype import find_export_dtype
from cpt.trainer.log_settings import log_settings
from cpt.trainer.match_operations import match_operations
from cpt.trainer.micro_batch import choose_micro_batch
from cpt.trainer.plan import Plan
from cpt.trainer.preflight import prepare_run
from cpt.trainer.profiling import NUM_STAGES, Profile, estimate_memory, extend_profiles, profile_run
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
MAX_ROWS = 8  # of a table; of longer ones the first and the last half are shown
HIDDEN_COLUMNS = ("read_tokens", "left_read_tokens", "stored")


def estimate(plan: Plan, run: RunDir, extended: RunDir | None) -> dict[str, Any]:
    """What a run will do and cost, as plan=json prints it; `extended` is the run that a new one continues.
    Raises ValueError for one that cannot be run."""
    machine = prepare_run(plan, run).machine
    plan = date_chats(plan)
    corpora = read_corpora(plan)
    base = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator, trains=False)
    plan = choose_micro_batch(plan, machine, corpora, base, stored=run.micro_batch)
    plan = match_operations(plan, machine, corpora, base, stored=run.matched)
    module = build_method(plan, machine, base)
    data = build_data(plan, machine, corpora, base, module)
    started_run = run if extended is None else extended
    scores = started_run.load_scores()
    if scores is None:
        check_row_repeats(data)
    log_settings(plan, machine, module, data)

    state = "new" if scores is None else scores.state
    if extended is not None:
        state = f"continues {extended.path} ({state})"
    texts = count_texts_of_run(data)
    stages = count_stages(plan.evaluation, data, started_run, scores, texts)
    cost: dict[str, Any] = {
        "figures": "measured",
        "run": {"folder": str(run.path), **plan.names, "seed": plan.run.seed},
        "state": state,
        "device": str(machine.device),
        "processes": machine.world_size,
        "micro_batch": plan.budget.batch_size // (machine.world_size * plan.trainer.accumulate_grad_batches),
        "texts": list(texts.values()),
        "stages": stages,
    }
    if data.mixed:
        cost["sources"] = count_sources(data)
    if not any(stage["left_steps"] or stage["left_read_tokens"] for stage in stages):
        return cost | {"left": "nothing", "not_included": list_excluded_options(plan)}

    chat_seconds = estimate_chat_seconds(
        plan,
        corpora,
        base,
        module,
        data,
        run=run,
        stages=stages,
        device=machine.device,
        world_size=machine.world_size,
    )
    log.info(
        "Measuring steps of %s; plan_device=cpu, h100 or another computes a plan without any (docs/plan.md)",
        count_noun(min(NUM_STAGES, len(plan.order)), "stage"),
    )
    profiles = profile_run(plan, machine, corpora, base, module, data)
    has_growing_model = type(module).expand is not ContinualMethod.expand
    cost["lower_bound"] = has_growing_model and len(stages) > len(profiles)
    cost["not_included"] = list_excluded(plan, base)
    export_dtype = find_export_dtype(plan.export, plan.model.name_or_path, machine.precision)
    return cost | extrapolate_costs(
        plan,
        profiles,
        stages,
        chat_seconds=chat_seconds,
        world_size=machine.world_size,
        export_dtype=export_dtype,
    )


def list_excluded(plan: Plan, base: Base) -> list[str]:
    """What a run does and the estimate leaves out."""
    excluded = list_excluded_options(plan)
    if base.lacks:
        excluded.append(f"training of {base.lacks}")
    return excluded


def list_excluded_options(plan: Plan) -> list[str]:
    """What the options of a run ask for and no estimate includes."""
    excluded = []
    if plan.endtasks is not None:
        excluded.append("end tasks")
    if plan.answers is not None:
        excluded.append("answers")
    if plan.divergence is not None:
        excluded.append("time of the divergence, about two evaluations more")
    if plan.benchmark is not None:
        excluded.append("benchmark")
    if plan.has_monitor:
        excluded.append("monitoring")
    if plan.mixture.is_generated:
        excluded.append("generated text")
    return excluded


def count_texts_of_run(data: DomainSequence) -> dict[str, dict[str, Any]]:
    """Documents and tokens of the texts, by their names."""
    names: list[str] = []
    for domain in data:
        names.extend(domain.texts)
    names.extend(data.held_out)

    texts = {}
    for name in dict.fromkeys(names):
        train = data.train.get(name)
        held_out = data.held_out[name]
        scored_rows = data.scored_sizes(name)
        texts[name] = {
            "text": name,
            "train_documents": None if train is None else train.documents,
            "train_tokens": None if train is None else int(train.row_lengths.sum()),
            "held_out_documents": held_out.documents,
            "held_out_tokens": int(held_out.row_lengths.sum()),
            "read_tokens": int(scored_rows.all.sum()),  # to score it once
            "scored_tokens": int(data.objective.scoring.scored(scored_rows).sum()),
        }
    return texts


def count_sources(data: DomainSequence) -> list[dict[str, Any]]:
    """Documents and tokens of the sources of replay, what the stages read of each, and how often."""
    sources = []
    for name, mixed in data.mixed.items():
        uses = []
        for stage in data:
            uses += [use for use in data.find_uses(stage) if use.name == name]
        tokens_per_row = float(mixed.text.row_lengths.mean())
        sources.append(
            {
                "source": name,
                "train_documents": mixed.text.documents,
                "train_tokens": mixed.num_tokens,
                "tokens": int(sum(use.draws for use in uses) * tokens_per_row),
                "epochs": round(uses[-1].epochs, 2) if uses else 0.0,
            }
        )
    return sources


def count_stages(
    policy: EvalOptions,
    data: DomainSequence,
    run: RunDir,
    scores: Scores | None,
    texts: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Steps and tokens of the base and the stages, as plan=json prints them, and what of them a run folder
    lacks (`left_…`). `scores` are None of a new run; `texts` is from `count_texts_of_run`."""
    stages = []
    stage_texts = [domain.texts for domain in data]
    num_rows = 0 if scores is None else len(scores.rows)
    for number, stage in enumerate([Domain(name="base", index=-1, texts=()), *data]):
        scored_texts = policy.choose_columns(number, stages=stage_texts, texts=list(data.held_out))
        missing_texts: Collection[str] = scored_texts
        num_steps = 0
        num_tokens = 0.0
        if number > 0:  # not the base
            num_steps = data.steps(stage)
            num_tokens = count_stage_tokens(data, stage)

        # A stage with a row is trained. Its row may lack losses, as those of texts that only this start asks
        # for.
        if scores is not None and number < num_rows:
            steps_left = 0
            missing_texts = find_missing_texts(run, scores, number, scored_texts)
        else:
            steps_left = num_steps - count_saved_steps(run, number, stage)
        stages.append(
            {
                "stage": stage.name,
                "steps": num_steps,
                "left_steps": steps_left,
                "tokens": int(num_tokens),
                "scored_texts": len(scored_texts),
                "scored_tokens": sum(texts[text]["scored_tokens"] for text in scored_texts),
                "left_scored_tokens": sum(texts[text]["scored_tokens"] for text in missing_texts),
                "left_read_tokens": sum(texts[text]["read_tokens"] for text in missing_texts),
            }
        )
    return stages


def find_missing_texts(run: RunDir, scores: Scores, number: int, texts: Sequence[str]) -> list[str]:
    """The texts that a committed row lacks and that can still be scored: with the weights of its stage."""
    has_weights = number in (0, len(scores.rows) - 1) or run.stage_path(number).exists()
    if not has_weights:
        return []
    measured = scores.measured(number)
    return [text for text in texts if text not in measured]


def count_saved_steps(run: RunDir, number: int, stage: Domain) -> int:
    """The steps of a stage in the checkpoint within it; 0 without one, and of a damaged one, which the run
    reports."""
    path = run.checkpoint_path(number, stage.name)
    if path.exists():
        with contextlib.suppress(Exception):
            return int(load_tensors(path)["global_step"])
    return 0


def count_stage_tokens(data: DomainSequence, stage: Domain) -> float:
    """The tokens that the steps of a stage read, replayed ones included; by the mean length of the rows of
    each text."""
    batch_size = data.budget.batch_size
    past_texts = data.earlier_texts(stage)

    # The tokens of one sample of a batch, summed over steps: those on the stage's own texts, then recovery.
    own_tokens = 0.0
    for num_steps, text in zip(data.steps_by_text(stage), stage.texts, strict=False):
        own_tokens += num_steps * data.train[text].tokens_per_row
    past_sizes = [data.train[text].tokens_per_row for text in past_texts]
    recovery_tokens = data.recovery_steps(stage) * sum(past_sizes) / max(1, len(past_sizes))

    # Replay that displaces samples of the batch changes nothing: its rows count as those of own text.
    appended_share = 0.0
    if data.replay.is_appended:
        appended_share = data.replay.general_ratio
        if past_texts:
            appended_share = data.replay.past_ratio + data.replay.general_ratio
    num_tokens = batch_size * (own_tokens * (1 + appended_share) + recovery_tokens)

    # The rows of a source have a length of their own, that of the rows which they displace is subtracted.
    num_own_rows = batch_size * sum(data.steps_by_text(stage))
    tokens_per_row = own_tokens * batch_size / max(1, num_own_rows)
    for use in data.find_uses(stage):
        displaced_tokens = 0.0 if data.replay.is_appended else tokens_per_row
        num_tokens += use.draws * (data.mixed[use.name].text.row_lengths.mean() - displaced_tokens)
    return num_tokens


def extrapolate_costs(
    plan: Plan,
    profiles: Sequence[Profile],
    stages: Sequence[dict[str, Any]],
    *,
    chat_seconds: float,
    world_size: int,
    export_dtype: torch.dtype,
) -> dict[str, Any]:
    """Memory, disk and seconds of all stages."""
    # A few stages were run: what each further one adds is taken to be the same.
    last = len(stages) - 1
    trained = profiles[1:]
    extended = extend_profiles(profiles, last)
    first_memory = estimate_memory(plan, profiles, extended, min(1, last), world_size)
    last_memory = estimate_memory(plan, profiles, extended, last, world_size)
    stored_stages = []
    for stage, profile in zip(stages, extended, strict=True):
        stored_stages.append(stage | {"stored": profile.stored})

    seconds = estimate_seconds(plan, stages, extended, world_size)
    if chat_seconds:
        seconds["chats"] = chat_seconds
    optimizer_bytes = extended[-1].memory["optimizer state"]
    return {
        "stages": stored_stages,
        "trained_parameters": max((profile.trained for profile in trained), default=0),
        "memory": {"first": first_memory, "last": last_memory},
        "disk": {
            "stage file": extended[-1].file,
            "all stage files (save_all_stages=true)": sum(profile.file for profile in extended[1:]),
            "checkpoint": extended[-1].file + optimizer_bytes + last_memory["saved weights"],
            "exported model": extended[-1].weights * export_dtype.itemsize,
        },
        "seconds": seconds | {"total": sum(seconds.values())},
        "step_seconds": trained[-1].step_s if trained else None,
    }


def estimate_seconds(
    plan: Plan, stages: Sequence[dict[str, Any]], profiles: Sequence[Profile], world_size: int
) -> dict[str, float]:
    """Seconds that are left, by what they are spent on."""
    training = 0.0
    around_domains = 0.0
    checkpoints = 0.0
    evaluation = 0.0
    for stage, profile in zip(stages, profiles, strict=True):
        evaluation += stage["left_read_tokens"] * profile.token_s / world_size
        num_steps = stage["left_steps"]
        if num_steps == 0:
            continue
        training += num_steps * profile.step_s
        around_domains += profile.around_s

        # The stage file was timed. A checkpoint within the stage has the optimizer's state, too: it takes
        # longer by its bytes.
        checkpoint_s = profile.save_s * (1 + profile.memory["optimizer state"] / profile.file)
        num_checkpoints = 1 + num_steps // plan.trainer.checkpoint_every_n_steps
        checkpoints += profile.save_s + num_checkpoints * checkpoint_s
    return {
        "training": training,
        "around domains": around_domains,
        "checkpoints": checkpoints,
        "evaluation": evaluation,
    }


def format_table(cost: Mapping[str, Any]) -> str:
    """What plan=true prints; if there are many texts and stages, the first and last, and the sums of all."""
    run = cost["run"]
    has_cost = "seconds" in cost
    choices = " ".join(f"{group}={run[group]}" for group in ("method", "mask", "replay", "model", "seed"))
    state = cost["state"]
    if not has_cost:
        state += "; no step and no loss on a text is left"
    sections = [
        f"Plan of {run['folder']}: {choices}, {cost['processes']} x {cost['device']}, "
        f"{count_noun(cost['micro_batch'], 'sample')} at once",
        f"State: {state}",
        format_counts(cost["texts"]),
        *format_sources(cost.get("sources", ())),
        format_counts(cost["stages"]),
    ]
    if has_cost:
        sections.extend(format_run_cost(cost))
    elif cost["not_included"]:
        sections.append(f"Not looked for, done or left: {', '.join(cost['not_included'])}.")
    return "\n\n".join(sections)


def format_sources(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each source of replay."""
    lines = []
    for source in sources:
        lines.append(
            f"Source {source['source']}: {count_noun(source['train_documents'], 'document')}, "
            f"{count_noun(source['train_tokens'], 'token')}; the run reads {source['tokens']:,}, "
            f"epochs {source['epochs']:g}"
        )
    return ["\n".join(lines)] if lines else []


def format_counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of counts with their sums."""
    frame = pd.DataFrame(rows).drop(columns=list(HIDDEN_COLUMNS), errors="ignore")
    # Before rows are left out of a long table: the sums are of all.
    sums = pd.DataFrame([{frame.columns[0]: "all", **frame.iloc[:, 1:].sum(min_count=1)}])
    if len(frame) > MAX_ROWS:
        frame = pd.concat([frame.head(MAX_ROWS // 2), frame.tail(MAX_ROWS // 2)])
    return pd.concat([frame, sums]).map(format_cell).to_string(index=False)


def format_cell(cell: Any) -> str:
    """A name, or a count; a dash for a missing one, as method=none learns no text."""
    if isinstance(cell, str):
        return cell
    return MISSING if pd.isna(cell) else f"{cell:,.0f}"


def format_run_cost(cost: Mapping[str, Any]) -> list[str]:
    """The paragraphs of a dry run that say the memory, disk space and time of a run, how they were measured,
    and what they leave out."""
    memory = pd.DataFrame(cost["memory"])
    shown_memory = memory[memory.any(axis=1)].map(format_bytes).add_suffix(" stage").to_string()

    rows = {f"disk: {name}": format_bytes(num_bytes) for name, num_bytes in cost["disk"].items()}
    for name, seconds in cost["seconds"].items():
        rows[f"time left: {name}"] = str(timedelta(seconds=round(seconds)))
    rows["trained parameters"] = f"{cost['trained_parameters']:,}"

    sections = [
        shown_memory,
        pd.Series(rows).to_string(),
        f"Measured: a few steps and batches of up to {NUM_STAGES} stages, on this machine as it is now.",
    ]
    if cost["lower_bound"]:
        sections.append("The model grows with each domain: memory, disk and time are lower bounds.")
    if cost["not_included"]:
        sections.append(f"Time not included: {', '.join(cost['not_included'])}.")
    return sections
