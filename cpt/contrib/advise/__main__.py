"""Recommends a method for a corpus: `python -m cpt.contrib.advise my_corpora --hours 2`.

Runs a small sweep that fits the time, on a tiny model or a small checkpoint, over replay, learning rates,
frozen blocks, LoRA, distillation and EWC. Prints a command with its expected learning and forgetting."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path

from omegaconf import OmegaConf

from cpt.contrib.advise import runs
from cpt.contrib.advise.advice import Measured, Subject, Wish, make_advice, make_blocks, read_arm_run, tell
from cpt.contrib.advise.runs import SEEDS, Costs, Round, Setting, Sweep, SweepPlan
from cpt.core.config import CONF
from cpt.core.errors import readable
from cpt.core.output import run_program
from cpt.models.loading import load_config
from cpt.reporting.page import write_page
from cpt.status import format_time

log = logging.getLogger("cpt.contrib.advise")
CAP = "eval.max_tokens=5000"
MOST_STEPS = 2000
SPARED = 0.9  # of the time that is left, what is planned for: a pilot's steps say not all that others take
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def main(arguments: Sequence[str]) -> int:
    given = make_parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    with readable():
        check(given)
        began, arms = time.monotonic(), runs.choose_arms(given.arms)
        model = runs.find_model(given.model)
        texts = runs.find_texts(given.folder, given.overrides)
        cap = [CAP] * (not any(each.startswith("eval.max_tokens=") for each in given.overrides))
        shared = [*texts, *model.tried, "name=advice", "logger=none", *cap, *given.overrides]
        how = {"folder": given.out / "runs", "jobs": given.jobs}
        with runs.open_sweep(shared, **how) as sweep:
            whole = sweep.plan()
        only = runs.choose_domains(order := whole.order)
        if left_out := len(order) - len(only):
            names, patterns = (json.dumps(each, ensure_ascii=False) for each in (only, [*map(escape, only)]))
            shared.append(f"++domains.only={patterns}")  # domains of examples have no such key
            shared += [f"order={names}"] * (not isinstance(whole.run.order, int | str))
            log.info("Choosing %d of %d domains: %s", len(only), len(order), ", ".join(only))
        with runs.open_sweep(shared, **how) as sweep:
            asked = sweep.plan()
            built = asked.model.config or {"num_hidden_layers": load_config(given.model).num_hidden_layers}
            blocks = next((int(built[name]) for name in LAYERS if name in built), 1)
            tried = Setting(rate=asked.model.lr, blocks=blocks, domains=len(asked.order))
            checkpoint_rate = float(OmegaConf.load(CONF / "model/hf.yaml").lr)
            real = tried if model.is_itself else replace(tried, rate=checkpoint_rate, blocks=model.blocks)
            per_step = asked.trainer.batch_size * asked.model.max_seq_length
            plan, costs, epoch = settle(given, sweep, arms, tried, per_step, began)
            measured, lost = carry_out(given, sweep, plan, costs, tried, began)
        subject = Subject(tuple(texts), tuple(given.overrides), model, real, epoch, per_step, left_out)
        found = make_advice(measured, subject, plan, Wish(given.forget, given.weight), lost=lost)
        advice = json.loads(json.dumps(found), parse_constant=lambda constant: None)  # NaN is null in JSON
        (given.out / "advice.json").write_text(json.dumps(advice, indent=1) + "\n", encoding="utf-8")
        page = write_page(make_blocks(advice), title=f"Advice for {given.folder}", stem=given.out / "advice")
        print("\n".join([*tell(advice), *(f"not known: {line}" for line in advice["unknown"]), str(page)]))
        print(advice["recommended"]["command"])
    return 0


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cpt.contrib.advise", description=__doc__.split("\n\n")[1])
    add, few = made.add_argument, f"maximum number of seeds (default: {SEEDS})"
    add("folder", type=Path, metavar="FOLDER", help="folders of text, as domains.root")
    add("--hours", type=float, default=1.0, help="time limit (default: 1)")
    meant = "tiny (default), tiny_gpt2, …, or a checkpoint"
    add("--model", default="tiny", metavar="CHECKPOINT", help=meant)
    wish, weight = made.add_mutually_exclusive_group(), "weight of forgetting against learning"
    wish.add_argument("--forget", type=float, metavar="NATS", help="allowed forgetting in nats per token")
    wish.add_argument("--weight", type=float, default=1.0, help=f"{weight} (default: 1)")
    add("--arms", metavar="A,B", help="candidates (default: all that fit)")
    add("--seeds", type=int, default=SEEDS, metavar="N", help=few)
    add("--jobs", type=int, metavar="N", help="parallel runs (default: one per core or GPU)")
    add("--out", type=Path, default=Path("outputs/advice"), metavar="FOLDER", help="output folder")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="options of python run.py for all runs")
    return made


def check(given: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be asked."""
    valid = {
        f"--hours {given.hours:g} is invalid. Allowed: more than 0": 0 < given.hours < math.inf,
        f"--weight {given.weight:g} is invalid. Allowed: 0 or more": 0 <= given.weight < math.inf,
        f"--forget {given.forget} is invalid. Allowed: nats per token, a finite number": (
            math.isfinite(given.forget or 0)
        ),
        f"--jobs {given.jobs} is invalid. Allowed: 1, 2, …": given.jobs is None or given.jobs >= 1,
        f"--seeds {given.seeds} is invalid. Allowed: 1 to {SEEDS}": 1 <= given.seeds <= SEEDS,
    }
    for message in (message for message, holds in valid.items() if not holds):
        raise ValueError(message)
    runs.check_overrides(given.overrides)


def settle(
    given: argparse.Namespace, sweep: Sweep, arms: Sequence[str], tried: Setting, per_step: int, began: float
) -> tuple[SweepPlan, Costs, float]:
    """What is settled before the sweep: the plan of OUT, or a new one by the steps of a pilot, and the steps
    of an epoch of a domain; says it. Raises ValueError where OUT is damaged or that of another question."""
    file, question = given.out / "plan.json", {"shared": list(sweep.shared), "arms": list(arms)}
    if given.seeds != SEEDS:
        question["seeds"] = given.seeds
    if file.exists():
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            plan = SweepPlan(**{**kept["plan"], "arms": tuple(kept["plan"]["arms"])})
            costs, epoch, asked = Costs(**kept["costs"]), float(kept["epoch"]), kept["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); delete it to plan again") from error
        if asked != question:
            told = f"--out {given.out} is invalid: it has the advice on another question"
            raise ValueError(f"{told}. Allowed: another folder")
    else:
        log.info("Timing a first run, which also reads the texts and pre-trains the base model")
        costs, pilot = runs.measure_costs(sweep, tried)
        # Mean steps of an epoch, about: bytes of training text by those of a token of held-out text.
        tokens = []
        for at, name in [(pilot.domains.index(name), name) for name in pilot.run["order"]]:
            train = pilot.texts[name].get("bytes", {}).get("train", 0)
            tokens.append(train * pilot.tokens[at] / pilot.bytes[at])
        epoch = math.fsum(tokens) / len(tokens) / per_step
        seconds, most = 3600 * given.hours - (time.monotonic() - began), max(1, min(MOST_STEPS, int(epoch)))
        limits = {"jobs": sweep.at_once(len(arms)), "most": most, "seeds": given.seeds}
        plan = runs.plan_sweep(arms, costs, seconds=SPARED * seconds, **limits)
        ready = {"question": question, "plan": asdict(plan), "costs": asdict(costs), "epoch": epoch}
        file.write_text(json.dumps(ready, indent=1) + "\n", encoding="utf-8")
    left_out = len(arms) - len(plan.arms)
    seeds = f"{plan.seeds} seed{'s' * (plan.seeds > 1)}"
    shorter = f", and {plan.rounds[1].steps} steps with the first seed" if plan.short else ""
    log.info("Planning %d arms x %s x %d steps a domain%s", len(plan.arms), seeds, plan.steps, shorter)
    log.info("Arms: %s%s", ", ".join(plan.arms), f"; {left_out} more do not fit" * bool(left_out))
    each = f"a step {costs.step:.3f} s, {costs.fixed:.1f} s of each run in addition to its steps"
    count, takes = len(plan.arms) * len(plan.rounds), format_time(plan.seconds)
    log.info("Running %d jobs, about %s: %s", count, takes, each)
    return plan, costs, epoch


def carry_out(
    given: argparse.Namespace, sweep: Sweep, plan: SweepPlan, costs: Costs, setting: Setting, began: float
) -> tuple[Measured, list[str]]:
    """Makes the rounds that fit into the budget, those of the first seed whatever they take: the advice needs
    both of its lengths. What was measured, and a line for each arm or round that was not. Raises
    ValueError where fewer than two arms were."""
    deadline = began + 3600 * given.hours
    took, foreseen, lost, failed = 0.0, 0.0, list[str](), dict[str, str]()
    done: list[Round] = []
    for number, each in enumerate(plan.rounds, 1):
        arms = [arm for arm in plan.arms if arm not in failed]
        batch = sweep.compose(arms, each, setting)
        waiting = [arm for arm, job in zip(arms, batch, strict=True) if not job.before]
        expected = runs.time_round(waiting, each.steps, costs, jobs=sweep.at_once(len(arms)))
        left = (took / foreseen if foreseen else 1.0) * expected  # by what the earlier ones really took
        about = f"seed {each.seed}, {each.steps} steps"
        if each.seed > 0 and waiting and time.monotonic() + left > deadline:
            lost.append(f"{about}: not within --hours {given.hours:g}; the same command runs it")
            continue
        told = f"{len(waiting)} runs, about {format_time(left)}" if waiting else "finished before"
        log.info("Round %d of %d: %s, %s", number, len(plan.rounds), about, told)
        took, foreseen = took + sweep.run(batch), foreseen + expected
        failed |= {arm: job.failure() for arm, job in zip(arms, batch, strict=True) if not job.whole}
        done.append(each)
    lost += [f"{arm}: {why}" for arm, why in failed.items()]
    arms = [arm for arm in plan.arms if arm not in failed]
    if len(arms) < 2:
        raise ValueError(f"fewer than two arms were measured: {'; '.join(lost)}")
    found = {}
    for each, arm in itertools.product(done, arms):
        found[arm, each.steps, each.seed] = read_arm_run(runs.find_folder(sweep.folder, arm, each))
    return Measured(found), lost


if __name__ == "__main__":
    run_program(main)
