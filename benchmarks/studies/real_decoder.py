"""What continual pre-training does to a chat model of 135 M parameters, and which method keeps its chat:
`python benchmarks/studies/real_decoder.py --corpora FOLDER --root NEW_FOLDER --model FOLDER` writes
docs/studies/real-decoder.md.

FOLDER of --corpora has news-articles (with their site as `label`), debian-descriptions, kernel-docs and
foldoc as JSON lines; --model is an instruct decoder with a chat template. The text is split into NEW_FOLDER
once, and the model answers 200 prompts into NEW_FOLDER-chats.jsonl, for the replay of chats. NEW_FOLDER-tasks
has a task of the lm-evaluation-harness (`pip install -e '.[lm-eval]'`): which term of the last domain has a
given definition. One seed of all comparisons first, then further seeds of the most important ones. It may be
stopped at any time: rerun the same command to resume; `--report-only` writes the page of what is there."""

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import study
from claims import format_p
from divergence import draw_interval, r_squared, spearman
from hydra import compose, initialize_config_dir
from linux_texts import split_documents, write_lines
from omegaconf import OmegaConf

from cpt.core.config import CONF
from cpt.evaluation.statistics import compare_pairs
from cpt.reporting.chat_tables import count_broken, find_chat_change
from cpt.reporting.contrasts import correct_differences, read_contrasts
from cpt.reporting.drawing import choose_series_style, escape_label, make_figure, make_png
from cpt.reporting.formats import MISSING, format_interval, format_signed
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown

SOURCES = {"debian": "debian-descriptions", "kernel": "kernel-docs", "foldoc": "foldoc"}
GENERAL_SITES = ("bbc.co.uk", "cnn.com")  # general text; the other sites' news are the first domain

EXPERIMENT = "real_decoder"
CHATS = "${domains.root}-chats.jsonl"


def replay_chats(ratio: float) -> str:
    """The override that fills this share of each batch with the model's own chats; chats that are longer than
    a sequence are skipped."""
    source = f"{{path: {CHATS}, format: messages, ratio: {ratio}, on_bad_example: skip}}"
    return f"replay.sources={{chat: {source}}}"


# Question 1: which method keeps chat, general text and earlier domains.
METHODS = {
    "base": ["method=none"],
    "ncl": ["method=ncl"],
    "10 % general text": ["replay=general", "replay.general_ratio=0.1"],
    "10 % chats": ["replay=sources", replay_chats(0.1)],
    "25 % past domains": ["replay=past"],
    "10 % each of past, general, chats": [
        "replay=past",
        "replay.past_ratio=0.1",
        "replay.general_ratio=0.1",
        replay_chats(0.1),
    ],
    "lora": ["method=lora"],
    "lora, embeddings trained": ["method=lora", "method.modules_to_save=[embeddings,head]"],
    "first 20 of 30 blocks frozen": ["freeze.layers=20"],
    "kd": ["method=kd"],
    "ewc": ["method=ewc"],
    "l2": ["method=l2"],
    "wise_ft": ["method=wise_ft"],
    "merge": ["method=merge"],
    "eaft": ["loss=eaft"],
    "migu": ["method=migu"],
    "das": ["method=das"],
    "osf": ["method=osf"],
    "block_expansion": ["method=block_expansion"],
}
# Its losses on text have another token between documents, and are not compared with those of others.
OTHER_TEXT = "separator: end of a turn"
# Question 2: what breaks chat. Each differs in one thing from ncl, or from lora.
FACTORS = {
    "rate 3e-5": ["optim.lr=3e-5"],
    "rate 3e-4": ["optim.lr=3e-4"],
    OTHER_TEXT: ["domains.separator='<|im_end|>'"],
    "a third of the tokens": ["trainer.steps=4"],
    "two thirds of the tokens": ["trainer.steps=8"],
    "three times the tokens": ["trainer.steps=36"],
    "1 % chats": ["replay=sources", replay_chats(0.01)],
    "5 % chats": ["replay=sources", replay_chats(0.05)],
    "only attention trained": ["trainable=attention"],
    "only norms trained": ["trainable=norms"],
    "lora, rank 2": ["method=lora", "method.r=2"],
    "lora, rank 64": ["method=lora", "method.r=64"],
}
# A method is compared with plain training at the rate at which that learns as much.
RATES = {
    "ncl, rate 1e-5": ["optim.lr=1e-5"],
    "ncl, rate 5e-5": ["optim.lr=5e-5"],
    "ncl, rate 2e-4": ["optim.lr=2e-4"],
    "lora, rate 3e-4 again": ["method=lora", "optim.lr=3e-4"],  # its default: another machine's run
    "lora, rate 1e-3": ["method=lora", "optim.lr=1e-3"],
    "10 % chats, rate 3e-5": [*METHODS["10 % chats"], "optim.lr=3e-5"],
    "10 % chats, rate 3e-4": [*METHODS["10 % chats"], "optim.lr=3e-4"],
    "migu, rate 3e-4": ["method=migu", "optim.lr=3e-4"],
    "wise_ft, rate 3e-4": ["method=wise_ft", "optim.lr=3e-4"],
    "wise_ft, 10 % chats, rate 3e-4": [*METHODS["10 % chats"], "method=wise_ft", "optim.lr=3e-4"],
}
# The rows of one method over its rates, for the picture. Learning and change are 0 at a rate of 0.
RATE_CURVES = {
    "ncl": ("ncl, rate 1e-5", "rate 3e-5", "ncl, rate 5e-5", "ncl", "ncl, rate 2e-4", "rate 3e-4"),
    "10 % chats": ("10 % chats, rate 3e-5", "10 % chats", "10 % chats, rate 3e-4"),
    "lora": ("lora", "lora, rate 1e-3"),
    "wise_ft": ("wise_ft", "wise_ft, rate 3e-4"),
    "migu": ("migu", "migu, rate 3e-4"),
}
ROWS = METHODS | RATES
WISE_FT_WITH_CHATS = "wise_ft, 10 % chats, rate 3e-4"
# Further seeds, and the opposite order, of the rows that the findings rest on.
REPEATED = (
    "ncl",
    "10 % chats",
    "10 % each of past, general, chats",
    "lora",
    "kd",
    WISE_FT_WITH_CHATS,
)
OPPOSITE_ORDER = "order=[foldoc,kernel,debian,news]"
REPEATS = {
    "seed 0": ["seed=0"],
    "seed 1": ["seed=1"],
    "seed 2": ["seed=2"],
    "the opposite order": ["seed=0", OPPOSITE_ORDER],
}

# A held-out document of FOLDOC: `8250 <hardware> A {UART} that can operate at ...`.
DICTIONARY_ENTRY = re.compile(r"(?P<term>[^<>.]{1,40}) <[^>]+> (?P<definition>.+)", re.DOTALL)
TERM_TASK = "foldoc_terms"
NO_BRACES = str.maketrans("", "", "{}")  # of links
NUM_CHOICES = 4
MAX_DEFINITION_WORDS = 40
MAX_QUESTIONS = 200
# It is asked of the further seeds: of one seed its interval is wider than what methods differ by.
TERM_BENCHMARK = (
    "benchmark=lm_eval",
    f"benchmark.tasks=[{TERM_TASK}]",
    "benchmark.include='${domains.root}-tasks'",
)


def main() -> None:
    parser = study.make_parser(EXPERIMENT, str(__doc__))
    parser.add_argument("--corpora", type=Path, help="the JSON lines; see above")
    options = study.check_arguments(parser)
    if not options.report_only and options.model is None:
        parser.error("--model is needed, or --report-only, or --published")
    if options.corpora is not None:
        prepare_data(options.corpora, options.root, options.model)
    study.make_study(options, EXPERIMENT, list_sweeps(), page="real-decoder", parts_of_runs=write_parts)


def list_sweeps() -> Iterator[list[str]]:
    """One sweep for each row of the methods, for the further seeds of REPEATED, for each rate and factor, and
    for REPEATED in the opposite order: a stopped study has what matters first."""
    for overrides in METHODS.values():
        yield ["seed=0", *overrides]
    for name in REPEATED:
        yield ["seed=1,2", *ROWS[name], *TERM_BENCHMARK]
    for overrides in [*RATES.values(), *FACTORS.values()]:
        yield ["seed=0", *overrides]
    for name in REPEATED:
        yield ["seed=0", OPPOSITE_ORDER, *ROWS[name], *TERM_BENCHMARK]


def prepare_data(corpora: Path, root: Path, model: str) -> None:
    """Writes root/<domain>/{train,valid,test}.jsonl, root-tasks/ and root-chats.jsonl, where they are
    missing."""
    if not root.exists():
        split_corpora(corpora, root)
    task_folder = root.with_name(f"{root.name}-tasks")
    if not task_folder.exists():
        write_term_task(root / "foldoc" / "test.jsonl", task_folder)
    chat_file = root.with_name(f"{root.name}-chats.jsonl")
    if not chat_file.exists():
        answer_prompts(model, chat_file)


def split_corpora(corpora: Path, root: Path) -> None:
    """Writes root/<domain>/{train,valid,test}.jsonl. News of two sites are general text, those of the others
    the first domain. Documents whose second line repeats are left out, as `split_documents` says."""
    news = read_lines(corpora / "news-articles.jsonl")
    documents_by_domain = {
        "general": [document for document in news if document["label"] in GENERAL_SITES],
        "news": [document for document in news if document["label"] not in GENERAL_SITES],
    }
    for domain, name in SOURCES.items():
        documents_by_domain[domain] = read_lines(corpora / f"{name}.jsonl")

    # A split that is killed leaves no root, which would count as complete.
    unfinished_root = root.with_name(f"{root.name}.partial")
    for domain, documents in documents_by_domain.items():
        for part, rows in split_documents(documents).items():
            write_lines(unfinished_root / domain / f"{part}.jsonl", [{"text": row["text"]} for row in rows])
    unfinished_root.rename(root)


def read_lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_term_task(document_file: Path, folder: Path) -> None:
    """Writes questions of held-out entries of the dictionary, each with four of their terms, as a task of the
    lm-evaluation-harness."""
    entries = []
    for document in read_lines(document_file):
        entry = DICTIONARY_ENTRY.fullmatch(document["text"])
        if entry is not None and entry["term"].lower() not in entry["definition"].lower():
            entries.append(entry)

    generator = random.Random(0)
    generator.shuffle(entries)
    questions = []
    for right_entry in entries[:MAX_QUESTIONS]:
        other_entries = [entry for entry in entries if entry["term"] != right_entry["term"]]
        choices = [entry["term"] for entry in generator.sample(other_entries, NUM_CHOICES - 1)]
        answer = generator.randrange(NUM_CHOICES)
        choices.insert(answer, right_entry["term"])
        words = right_entry["definition"].translate(NO_BRACES).split()[:MAX_DEFINITION_WORDS]
        questions.append({"definition": " ".join(words), "choices": choices, "answer": answer})

    folder.mkdir()
    question_file = folder / f"{TERM_TASK}.jsonl"
    write_lines(question_file, questions)
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    task = {
        "task": TERM_TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(question_file.absolute())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Definition: {{definition}}\nTerm:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "num_fewshot": 0,
        "metric_list": [accuracy],
        "metadata": {"version": 1.0},
    }
    OmegaConf.save(OmegaConf.create(task), folder / f"{TERM_TASK}.yaml")


def answer_prompts(model: str, chat_file: Path) -> None:
    """Writes the model's own answers to the prompts that cpt ships: about five minutes of CPU time."""
    program = [sys.executable, "-m", "cpt.write_chats"]
    subprocess.run([*program, model, "--output", chat_file], check=True)


HEAD = (
    "run",
    "learned",
    "forgot",
    "general text",
    "chat",
    "broken answers",
    "operations",
    "memory, GB",
)
PICTURE = "real-decoder.png"
RATE_PICTURE = "real-decoder-rates.png"
MIN_RUNS = 12  # of which R² is shown
# Runs by what tells them apart: `study.identify` of their scores, or `study.describe_job` of their overrides.
Runs = Mapping[tuple[object, ...], MeasuredRun]


def write_parts(all_runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """The parts of the study's page: what was run, a table for each question, and the repeated rows."""
    runs = {study.identify(run.scores.run): run for run in all_runs}
    yield (
        f"{len(all_runs)} runs. Differences from the base in "
        "nats per token, except for forgotten: from the stage of the domain. In brackets: 95 % intervals "
        "over documents or chats, not over seeds. Operations are relative to `ncl`. Runs shared their "
        "machine, so times are not shown."
    )
    ncl_and_lora = {name: METHODS[name] for name in ("ncl", "lora")}
    methods = select_runs(runs, METHODS)
    factors = select_runs(runs, ncl_and_lora | FACTORS)
    trained = {name: run for name, run in (methods | factors).items() if name != "base"}
    (study.IMAGES / PICTURE).write_bytes(draw_changes(trained))

    ncl_run = methods.get("ncl")
    yield tabulate_runs(methods, ncl_run=ncl_run, title="Methods and replay, seed 0")
    yield tabulate_runs(factors, ncl_run=ncl_run, title="One factor at a time, seed 0")

    rates = select_runs(runs, RATES)
    compared = methods | factors | rates
    compared.pop(OTHER_TEXT, None)
    yield tabulate_runs(rates, ncl_run=ncl_run, title="Other rates, seed 0")
    yield tabulate_at_equal_learning(compared)
    (study.IMAGES / RATE_PICTURE).write_bytes(draw_rates(compared))

    repeats = collect_repeats(runs)
    if "ncl" in repeats:
        yield tabulate_repeats(repeats)
        yield tabulate_contrasts(repeats)
    yield from tabulate_predictors(all_runs)


def select_runs(runs: Runs, overrides_by_row: Mapping[str, Sequence[str]]) -> dict[str, MeasuredRun]:
    """The runs with seed 0 that are there, by the names of their rows."""
    selected = {}
    for name, overrides in overrides_by_row.items():
        run = find_run(runs, overrides)
        if run is not None:
            selected[name] = run
    return selected


def find_run(
    runs: Runs, overrides: Sequence[str], *, repeat: Sequence[str] = ("seed=0",)
) -> MeasuredRun | None:
    """The run of a row with the seed, and the order, of a repeat."""
    job = [*repeat, *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={EXPERIMENT}", "domains.root=FOLDER", *job])
    return runs.get(study.describe_job(job, cfg))


def tabulate_runs(runs_by_row: Mapping[str, MeasuredRun], *, ncl_run: MeasuredRun | None, title: str) -> str:
    """A row of HEAD for each run."""
    cells = [[name, *format_run(run, ncl_run)] for name, run in runs_by_row.items()]
    return format_markdown(Block(title=title, head=list(HEAD), cells=cells), picture="")


def format_run(run: MeasuredRun, ncl_run: MeasuredRun | None) -> list[str]:
    """The cells of HEAD after the name: changes in nats per token, broken answers, operations as a multiple
    of those of `ncl_run`, memory in GB."""
    cells = [format_change(measure(run)) for measure in CHANGES.values()]
    chat_change = find_chat_change(run.scores)
    if chat_change is None or chat_change.last is None:
        cells.append(MISSING)
    else:
        cells.append(f"{count_broken(chat_change.last)} of {chat_change.last['chats']}")

    flops = run.values.get("cost/flops")
    if flops is None or ncl_run is None:
        cells.append(MISSING)
    else:
        cells.append(f"{flops / ncl_run.values['cost/flops']:.2f}")
    memory = run.values.get("cost/memory")
    cells.append(MISSING if memory is None else f"{memory / 1e9:.1f}")
    return cells


class LossChange(NamedTuple):
    """A change of a loss with its 95 % interval, in nats per token."""

    mean: float
    low: float | None  # None for too few documents or chats
    high: float | None


def measure_metric(run: MeasuredRun, name: str) -> LossChange | None:
    """A metric of a run; None where it was not measured."""
    metric = run.scores.metrics.get(name, {})
    value = metric.get("nats")
    if value is None or math.isnan(value):
        return None
    low, high = metric.get("interval", {}).get("nats", (None, None))
    return LossChange(value, low, high)


def measure_chat(run: MeasuredRun) -> LossChange | None:
    """The rise of the loss on the base's own answers."""
    chat_change = find_chat_change(run.scores)
    if chat_change is None or chat_change.base_answers is None:
        return None
    loss = chat_change.base_answers
    return LossChange(loss.rise, loss.low, loss.high)


Measure = Callable[[MeasuredRun], LossChange | None]
CHANGES: Mapping[str, Measure] = {
    "learned": lambda run: measure_metric(run, "learned"),
    "forgot": lambda run: measure_metric(run, "FG"),
    "general text": lambda run: measure_metric(run, "general_drift"),
    "chat": measure_chat,
}


def format_change(change: LossChange | None) -> str:
    """`+0.012 [+0.002, +0.022]`."""
    if change is None:
        return MISSING
    return format_signed(change.mean) + format_interval(change.low, change.high, format_signed)


def measure_movement(run: MeasuredRun) -> LossChange | None:
    """The distance of the last weights from those of the base, relative to their size; not a loss."""
    if "all" not in run.scores.moved:
        return None
    distance, _ = run.scores.moved["all"]
    return LossChange(distance, None, None)


def measure_broken(run: MeasuredRun) -> LossChange | None:
    """How many of the last model's answers are broken; not a loss."""
    chat_change = find_chat_change(run.scores)
    if chat_change is None or chat_change.last is None:
        return None
    return LossChange(count_broken(chat_change.last), None, None)


def measure_terms(run: MeasuredRun) -> LossChange | None:
    """The change of the accuracy on TERM_TASK since the base, in points; not a loss."""
    task = run.scores.benchmarks.get("tasks", {}).get(TERM_TASK)
    if task is None:
        return None
    return LossChange(100 * (task["values"][-1] - task["values"][0]), None, None)


REPEAT_MEASURES: Mapping[str, Measure] = {
    **CHANGES,
    "broken answers": measure_broken,
    "terms, points": measure_terms,
}


def measure_divergence(run: MeasuredRun, text: str) -> LossChange | None:
    """KL(base || last model) on a text; None where it was not measured."""
    if not run.scores.divergence:
        return None
    estimate = run.scores.divergence["kl"][-1].get(text)
    if estimate is None or estimate[0] is None:
        return None
    return LossChange(*estimate)


def tabulate_predictors(all_runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """What chat and earlier domains lost over all runs of the study, by what can be known without them."""
    all_runs = [run for run in all_runs if "domains.separator" not in run.scores.run["variant"]]
    runs_without_chats = [run for run in all_runs if "chats.jsonl" not in run.scores.run["variant"]]
    outcomes = {
        "chat": (all_runs, CHANGES["chat"]),
        "chat, none in the batch": (runs_without_chats, CHANGES["chat"]),
        "forgot": (all_runs, CHANGES["forgot"]),
    }
    predictors = {
        "movement of the weights": measure_movement,
        "learned": CHANGES["learned"],
        "general text": CHANGES["general text"],
        "divergence on the last domain": lambda run: measure_divergence(run, run.scores.run["order"][-1]),
        "divergence on general text": lambda run: measure_divergence(run, "general"),
    }
    cells = []
    for (outcome, (runs, measure)), (name, predictor) in product(outcomes.items(), predictors.items()):
        points = collect_points(runs, predictor, measure)
        if len(points) >= MIN_RUNS:
            cells.append([outcome, name, str(len(points)), *format_fit(points)])
    yield format_markdown(
        Block(
            title="What predicts the loss on chat, and on earlier domains?",
            lines=[
                "Over all runs that trained, those of one result once. R² of a parabola, Spearman's rank "
                "correlation, and their 95 % bootstrap intervals over runs."
            ],
            head=["outcome", "predictor", "runs", "R²", "rank correlation"],
            cells=cells,
        ),
        picture="",
    )


def collect_points(runs: Sequence[MeasuredRun], predictor: Measure, outcome: Measure) -> np.ndarray:
    """[runs, 2]: predictor and outcome of the runs that have both; runs with equal bits count once. Sorted,
    as the draws of the intervals depend on the order, which folders of runs and published scores give
    differently."""
    points = []
    for run in runs:
        cause = predictor(run)
        loss = outcome(run)
        if cause is not None and loss is not None and run.scores.run["method"] != "none":
            points.append((cause.mean, loss.mean))
    return np.array(sorted(set(points)))


def format_fit(points: np.ndarray) -> list[str]:
    """The cells of R² and of the rank correlation, each with its interval."""
    causes, losses = points.T
    cells = []
    for measure in (r_squared, spearman):
        low, high = draw_interval(measure, causes, losses)
        cells.append(f"{measure(causes, losses):.2f} [{low:.2f}, {high:.2f}]".replace("-", "−"))
    return cells


def draw_changes(runs_by_row: Mapping[str, MeasuredRun]) -> bytes:
    """A panel for each of CHANGES, a line for each run with its interval, the smallest rise of chat first."""
    chat_changes = {name: measure_chat(run) for name, run in runs_by_row.items()}
    measured = {name: change.mean for name, change in chat_changes.items() if change is not None}
    names = sorted(measured, key=lambda name: measured[name], reverse=True)  # an axis counts from below

    figure = make_figure((11, 1.2 + 0.28 * len(names)))
    panels = figure.subplots(1, len(CHANGES), sharey=True)
    for axes, (title, measure) in zip(panels, CHANGES.items(), strict=True):
        for position, name in enumerate(names):
            change = measure(runs_by_row[name])
            if change is None:
                continue
            colour = choose_series_style(1 if name == "ncl" else 0).colour
            axes.plot(change.mean, position, marker="o", markersize=5, color=colour)
            if change.low is not None and change.high is not None:
                axes.plot([change.low, change.high], [position, position], color=colour, linewidth=1.5)
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set(title=title, xlabel="nats per token")
    panels[0].set_yticks(range(len(names)), labels=[escape_label(name, width=40) for name in names])
    means = "; ".join(f"{name}: {measured[name]:+.3f}" for name in reversed(names))
    return make_png(figure, description=f"Changes of each run; rise of the loss on chat, in nats: {means}")


def trace_curve(runs_by_row: Mapping[str, MeasuredRun], curve: str, outcome: str) -> np.ndarray:
    """[runs, 2]: what was learned and the outcome, one of CHANGES, of the rows of a curve that are there, in
    the order of what was learned; the first is no training."""
    points = [(0.0, 0.0)]
    for row in RATE_CURVES[curve]:
        if row in runs_by_row:
            learned = CHANGES["learned"](runs_by_row[row])
            change = CHANGES[outcome](runs_by_row[row])
            if learned is not None and change is not None:
                points.append((learned.mean, change.mean))
    return np.array(sorted(points))


def tabulate_at_equal_learning(runs_by_row: Mapping[str, MeasuredRun]) -> str:
    """Each run beside plain training at the rate at which that would have learned as much."""
    curves = {outcome: trace_curve(runs_by_row, "ncl", outcome) for outcome in ("chat", "forgot")}
    most_learned = curves["chat"][-1, 0]
    rows = []
    for name, run in runs_by_row.items():
        learned = CHANGES["learned"](run)
        if name in ("base", *RATE_CURVES["ncl"]) or learned is None or learned.mean > most_learned:
            continue
        numbers = [learned.mean]
        for outcome, curve in curves.items():
            change = CHANGES[outcome](run)
            assert change is not None  # of every run that learned
            plain_change = float(np.interp(learned.mean, *curve.T))
            numbers += [change.mean, change.mean - plain_change]
        rows.append((name, numbers))

    rows.sort(key=lambda row: row[1][2])
    cells = [[name, *map(format_signed, numbers)] for name, numbers in rows]
    return format_markdown(
        Block(
            title="At equal learning",
            lines=[
                "The differences are from plain training at the rate at which it learns as much: "
                "interpolated between the rates of `ncl` that were run, and no training. Single runs, "
                "so no intervals."
            ],
            head=["run", "learned", "chat", "chat, difference", "forgot", "forgot, difference"],
            cells=cells,
        ),
        picture="",
    )


def draw_rates(runs_by_row: Mapping[str, MeasuredRun]) -> bytes:
    """Two panels over what was learned, chat and earlier domains: a line for each of RATE_CURVES, a point for
    each of the other METHODS and for WISE_FT_WITH_CHATS."""
    figure = make_figure((13, 5.5))
    panels = figure.subplots(1, 2)
    points_shown = {*METHODS, WISE_FT_WITH_CHATS} - set(chain.from_iterable(RATE_CURVES.values()))
    for axes, outcome in zip(panels, ("chat", "forgot"), strict=True):
        for number, curve in enumerate(RATE_CURVES):
            points = trace_curve(runs_by_row, curve, outcome)
            colour = choose_series_style(number).colour
            axes.plot(*points.T, marker="o", markersize=5, color=colour, label=f"{curve}, by rate")

        for number, (name, run) in enumerate(runs_by_row.items()):
            learned = CHANGES["learned"](run)
            change = CHANGES[outcome](run)
            if name in points_shown and learned is not None and change is not None:
                style = choose_series_style(number)
                axes.plot(
                    learned.mean,
                    change.mean,
                    marker=style.marker,
                    color=style.colour,
                    linestyle="",
                    label=escape_label(name, width=40),
                )
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set(title=outcome, xlabel="learned, nats per token")
    panels[0].set_ylabel("nats per token")
    panels[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return make_png(
        figure, description="What chat and earlier domains lost over what was learned, by rate and method"
    )


Repeats = Mapping[str, Mapping[str, MeasuredRun]]  # by row, then by the name of the repeat


def collect_repeats(runs: Runs) -> Repeats:
    """The runs of REPEATED that are there, of the rows with several."""
    repeats = {}
    for name in REPEATED:
        runs_of_row = {}
        for repeat_name, repeat in REPEATS.items():
            run = find_run(runs, ROWS[name], repeat=repeat)
            if run is not None:
                runs_of_row[repeat_name] = run
        if len(runs_of_row) > 1:
            repeats[name] = runs_of_row
    return repeats


def tabulate_repeats(repeats: Repeats) -> str:
    """Mean and standard deviation of each change over the repeats of a row."""
    cells = []
    for name, runs in repeats.items():
        row = [name, str(len(runs))]
        for measure_name, measure in REPEAT_MEASURES.items():
            changes = [change.mean for change in map(measure, runs.values()) if change is not None]
            show = format_signed if measure_name in CHANGES else format_tenths
            row.append(format_spread(changes, show))
        cells.append(row)
    head = ["run", "runs", *REPEAT_MEASURES]
    lines = [
        f"Mean ± standard deviation over {', '.join(REPEATS)}, of those that were run. Terms: the change of "
        "the accuracy on the definitions of the last domain, in points."
    ]
    return format_markdown(Block(title="Seeds and orders", lines=lines, head=head, cells=cells), picture="")


def format_tenths(value: float) -> str:
    """`−1.6`."""
    return f"{value:.1f}".replace("-", "−")


def format_spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """`+0.317 ± 0.002`, the mean alone of one value. `show` formats a number, with its sign if it has one."""
    if not values:
        return MISSING
    mean = show(float(np.mean(values)))
    if len(values) == 1:
        return mean
    return f"{mean} ± {show(float(np.std(values, ddof=1))).removeprefix('+')}"


def tabulate_contrasts(repeats: Repeats) -> str:
    """Differences of the rows from ncl, paired by seed and order, all corrected together by Holm."""
    differences = {}
    for name, runs in repeats.items():
        for measure_name, measure in REPEAT_MEASURES.items():
            values = {repeat: get_mean(measure(run)) for repeat, run in runs.items()}
            ncl_values = {repeat: get_mean(measure(run)) for repeat, run in repeats["ncl"].items()}
            difference = compare_pairs(values, ncl_values)
            if name != "ncl" and difference.n > 1:
                differences[f"{name}\n{measure_name}"] = difference

    cells = []
    for key, contrast in read_contrasts(correct_differences(differences)).items():
        interval = format_interval(contrast.low, contrast.high, format_signed)
        p_value = MISSING if math.isnan(contrast.p_t_holm) else format_p(contrast.p_t_holm)
        cells.append([*key.split("\n"), str(contrast.n), format_signed(contrast.mean) + interval, p_value])
    head = ["run", "measure", "pairs", "difference from ncl [95 % interval]", "p (t, Holm)"]
    return format_markdown(
        Block(title="Differences from ncl over seeds and orders", head=head, cells=cells, num_word_columns=2),
        picture="",
    )


def get_mean(change: LossChange | None) -> float | None:
    return None if change is None else change.mean


if __name__ == "__main__":
    main()
