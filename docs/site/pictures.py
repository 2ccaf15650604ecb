"""The pictures of the guides in docs/images, drawn by cpt's own functions from published results.

`python docs/site/pictures.py [NAME …]` draws them again. Chromium photographs the comparison page."""

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra.utils import instantiate
from matplotlib.axes import Axes
from omegaconf import OmegaConf
from PIL import Image

from cpt import report
from cpt.core.messages import count_noun
from cpt.data.mixture import MixedText, Mixture
from cpt.data.replay import Replay, ReplayPool
from cpt.data.sampler import TrainStream
from cpt.evaluation.scores import Scores
from cpt.models.objectives import Causal
from cpt.optim.schedulers import Progress, Schedule
from cpt.reporting.comparison_figures import draw_plane
from cpt.reporting.drawing import SERIES, make_figure, make_png
from cpt.reporting.run_figures import draw_chat_losses
from cpt.reporting.tuning import Trial, TunedMethod, draw_searches

DOCS = Path(__file__).resolve().parents[1]
SCHEDULES = DOCS.parent / "conf" / "lr_scheduler"
IMAGES = DOCS / "images"
RESULTS = DOCS.parent / "benchmarks" / "results"
STUDY = RESULTS / "studies" / "default_domains.jsonl.gz"
PLANS = RESULTS / "large_plans.json"
CHATS = RESULTS / "chats.json"
TUNING = RESULTS / "studies" / "das6_tuning.json"
SIX_DOMAINS = RESULTS / "studies" / "das6_mini.jsonl.gz"
ENCODER = RESULTS / "studies" / "das6_mpnet.jsonl.gz"
FOUR_TASKS = RESULTS / "studies" / "standard_cl_mini.jsonl.gz"
SIGNALS = RESULTS / "campaigns" / "preemption.json"
GUIDE_RUNS = RESULTS / "guide_runs.json"

DOMAINS = ["sympy", "networkx", "pandas"]  # of the study, in their order
METHODS = ["ncl", "ewc", "si", "kd", "replay", "lora", "merge", "das"]
METHODS_OF_SIX_DOMAINS = ["ncl", "das", "migu", "ewc", "kd", "replay", "derpp"]
PAPERS_DAS = "contrast_every=1; contrast_samples=1"  # the variant of `das` that the paper describes
NUM_TOKENS = 256_000  # of a stage
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGE_SIZE = (1366, 900)  # pixels
MEMORY_OF_A_GPU = 80  # GB, of an H100
DEVICES = {"h100": ("H100", 80), "4090": ("RTX 4090", 24)}  # name and GB of memory
CAPTION = {"loc": "left", "fontsize": 10}
GREEN, RED, ORANGE, GREY = "#009E73", "#D55E00", "#E69F00", "0.6"
SHOWN_GATE = ("--min-gain 0.05", "--max-forgetting 0.02")  # of the options of the recorded check
# Panels of the schedules, each with options that differ from those of conf/.
SCHEDULE_PANELS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear (default)": ("linear", {}),
    "cosine": ("cosine", {}),
    "constant": ("constant", {}),
    "rewarm peaks=[1,0.5]": ("rewarm", {"peaks": [1, 0.5]}),
    "once": ("once", {}),
    "decayed": ("decayed", {}),
    "infinite": ("infinite", {}),
    "infinite anneal=0.2": ("infinite", {"anneal": 0.2}),
    "wsd": ("wsd", {}),
    "rsqrt": ("rsqrt", {}),
    "rsqrt across=true": ("rsqrt", {"across": True}),
    "autoregressive": ("autoregressive", {}),
}
DRAWN_DOMAINS, DRAWN_STEPS = 3, 200
SETUPS = {  # of the campaign of signals
    "alone": "one process",
    "two": "two processes",
    "slurm": "SLURM, one task",
    "two slurm": "SLURM, two tasks",
}
PHASES = {  # that a signal was sent to, by the campaign's names
    "base": "pre-training of the base",
    "training": "training",
    "scoring": "scoring",
    "end tasks": "end tasks",
    "anywhere": "anywhere",
}
REPLAYED_STEPS, REPLAYED_BATCH = 30, 64
REPLAY_OVERRIDES = (
    "replay=past",
    "replay.past_ratio=0.2",
    "replay.general_ratio=0.05",
    "'replay.sources={chat: {…, ratio: 0.1}}'",
)
USES = {  # of the plan, in the order of the bars
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
    "copies of weights": "copies of weights in 16 bits",
    "gathered by FSDP": "gathered by FSDP",
    "activations and rest": "activations, logits",
}


def read_study() -> list[dict[str, Any]]:
    """The runs of the methods with default options, three seeds each."""
    runs = []
    for line in gzip.decompress(STUDY.read_bytes()).splitlines():
        run = json.loads(line)
        if run["method"] in METHODS and (run["mask"], run["replay"], run["variant"]) == ("none", "none", ""):
            runs.append(run)
    return runs


def make_scores(run: dict[str, Any], order: list[str], **fields: Any) -> Scores:
    """Scores over an order of domains, with the fields of Scores that were published."""
    texts = [*order, "general"]
    num_rows = len(order) + 1
    facts = {
        "name": "",
        "mask": "none",
        "replay": "none",
        "variant": "",
        "objective": "masked",
        "model": "",
        **run,
    }
    costs = ("trained", "stored", "tokens_read", "flops")
    defaults = {"nll": [[0.0] * len(texts)] * num_rows, **dict.fromkeys(costs, [0] * num_rows)}
    return Scores(
        rows=["base", *order],
        domains=texts,
        tokens=[1] * len(texts),
        bytes=[1] * len(texts),
        scored=[1] * len(texts),
        run={**facts, "order": order, "finished": True},
        texts={name: {"hash": name, "documents": {"test": 1}} for name in texts},
        config_hash="",
        versions={},
        modules=[{}] * num_rows,
        conditions={"score_on": "test"},
        **(defaults | fields),
    )


def make_study_scores(run: dict[str, Any]) -> Scores:
    """Scores with what the study has published of a run."""
    scores = make_scores(
        {"method": run["method"], "model": "tiny", "seed": run["seed"]},
        DOMAINS,
        nll=run["nll"],
        trained=run["trained"],
        stored=run["stored"],
        flops=run["flops"],
        tokens_read=[0] + [NUM_TOKENS] * len(DOMAINS),
        needs_domain=run["needs_domain"],
    )
    scores.measure()
    return scores


def draw_methods() -> bytes:
    """Forgetting against learning: what a sweep over methods shows."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    for run in read_study():
        learned, forgotten = points.setdefault(run["method"], ([], []))
        learned.append(run["CPT"]["nats"])
        forgotten.append(run["FG"]["nats"])
    return draw_plane(points, x_label="just learned CPT (nats)", y_label="forgetting FG (nats)")


def draw_encoder() -> bytes:
    """Forgetting against learning on six domains, of a pre-trained encoder."""
    return draw_six_domains(ENCODER)


def draw_tiny_encoder() -> bytes:
    """The same of a model of 0.8 M parameters."""
    return draw_six_domains(SIX_DOMAINS)


def draw_six_domains(published: Path) -> bytes:
    """Forgetting against learning of the published runs of a study, DAS in the form of its paper."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    for line in gzip.decompress(published.read_bytes()).splitlines():
        scores = json.loads(line)
        run = scores["run"]
        variant = PAPERS_DAS if run["method"] == "das" else ""
        is_shown = run["method"] in METHODS_OF_SIX_DOMAINS
        if not is_shown or (run["mask"], run["replay"], run["variant"]) != ("none", "none", variant):
            continue
        learned, forgotten = points.setdefault(run["method"], ([], []))
        learned.append(scores["metrics"]["CPT"]["nats"])
        forgotten.append(scores["metrics"]["FG"]["nats"])
    return draw_plane(points, x_label="just learned CPT (nats)", y_label="forgetting FG (nats)")


def photograph_comparison() -> bytes:
    """The top of the page of `python -m cpt.report` over the runs of the study."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ValueError(f"no browser found. Allowed: one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in read_study():
            run_folder = folder / f"{run['method']}-{run['seed']}"
            run_folder.mkdir()
            make_study_scores(run).save(run_folder / "scores.json")
        if report.main([name]) != 0:
            raise ValueError("the runs of the study could not be compared")
        width, height = PAGE_SIZE
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000"]
        options += [f"--window-size={width},{height}", f"--user-data-dir={name}/profile"]
        options += [f"--screenshot={name}/page.png", (folder / "comparison.html").as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=300)
        with Image.open(folder / "page.png") as image:
            image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
                folder / "small.png", optimize=True
            )
        return (folder / "small.png").read_bytes()


def draw_plan() -> bytes:
    """The memory of a GPU by use, for the numbers of GPUs of the printed plan, each as it fits."""
    plan = json.loads(PLANS.read_text(encoding="utf-8"))["plans"][0]["plan"]
    figure = make_figure((8.5, 2.8))
    axes = figure.add_subplot(axisbelow=True)
    axes.grid(axis="x", color="0.9")
    estimates = plan["estimates"]
    lefts = np.zeros(len(estimates))
    for index, (use, label) in enumerate(USES.items()):
        sizes = np.array([estimate["memory"]["step"].get(use, 0) / 1e9 for estimate in estimates])
        if use == "activations and rest":
            sizes += [estimate["memory"]["step"]["logits and loss"] / 1e9 for estimate in estimates]
        axes.barh(range(len(estimates)), sizes, left=lefts, color=SERIES[index], label=label)
        lefts += sizes
    axes.axvline(MEMORY_OF_A_GPU, color="black", linestyle="--", label="memory of an H100")
    axes.set_yticks(range(len(estimates)), [count_noun(estimate["devices"], "GPU") for estimate in estimates])
    axes.invert_yaxis()
    axes.set(xlabel="GB on each GPU, computed")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return make_png(figure, description="Memory of a GPU by use")


def draw_chats() -> bytes:
    """The losses on chats of a published run."""
    published = json.loads(CHATS.read_text(encoding="utf-8"))
    run = published["run"]
    return draw_chat_losses(make_scores(run, run["order"], chats=published["chats"]))


def draw_tuning() -> bytes:
    """The searches of two methods."""
    published = json.loads(TUNING.read_text(encoding="utf-8"))
    methods = []
    for method in published["methods"]:
        if method["name"] in ("ncl", "kd"):
            trials = [Trial(**trial) for trial in method["trials"]]
            methods.append(
                TunedMethod(
                    name=method["name"],
                    space=method["space"],
                    default=method["default"],
                    trials=trials,
                    runs=[],
                )
            )
    return draw_searches(methods, metric=published["metric"], sign=1)


def read_final_gains() -> dict[tuple[str, ...], list[list[float]]]:
    """What the final models of `ncl` gained on each domain since the base (nats), in the order of training:
    by order, for each seed."""
    gains: dict[tuple[str, ...], list[list[float]]] = {}
    for line in gzip.decompress(SIX_DOMAINS.read_bytes()).splitlines():
        scores = json.loads(line)
        run = scores["run"]
        if (run["method"], run["mask"], run["replay"], run["variant"]) != ("ncl", "none", "none", ""):
            continue
        columns = [scores["domains"].index(domain) for domain in run["order"]]
        base, final = scores["nll"][0], scores["nll"][-1]
        gains.setdefault(tuple(run["order"]), []).append([base[column] - final[column] for column in columns])
    return gains


def draw_orders() -> bytes:
    """The same domains in two orders: what the final model has gained on each, by its place in the order."""
    gains_by_order = read_final_gains()
    colours = dict(zip(next(iter(gains_by_order)), SERIES, strict=False))
    figure = make_figure((8.5, 3.4))
    panels = figure.subplots(1, len(gains_by_order), sharey=True)
    for axes, option, (order, gains) in zip(
        panels, ("order=0", "order=reverse"), gains_by_order.items(), strict=True
    ):
        means = np.mean(gains, axis=0)
        bars = axes.bar(range(len(order)), means, color=[colours[domain] for domain in order], width=0.75)
        axes.bar_label(bars, [f"{mean:+.2f}" for mean in means], fontsize=9, padding=2)
        labels = [f"{domain}\n{place}" for place, domain in enumerate(order, start=1)]
        axes.set_xticks(range(len(order)), labels, fontsize=9)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(option, **CAPTION, family="monospace")
        axes.set_xlabel("trained first → trained last")
        axes.margins(y=0.15)
    panels[0].set_ylabel("gain of the final model\nover the base (nats)")
    return make_png(figure, description="Gain of the final model by domain, in two orders")


def draw_gate() -> bytes:
    """What the release check says of a run: each text's change with its interval, and what is allowed."""
    runs = json.loads(GUIDE_RUNS.read_text(encoding="utf-8"))
    gate = runs["gate"]
    changes = gate["changes"]
    figure = make_figure((8.5, 2.7))
    axes = figure.add_subplot()
    ends = [change[key] for change in changes for key in ("low", "high", "most")]
    margin = 0.12 * (max(ends) - min(ends))
    left, right = min(ends) - margin, max(ends) + margin
    at_right = {"xycoords": ("axes fraction", "data"), "va": "center", "fontweight": "bold"}
    for row, change in enumerate(changes):
        answer, colour = judge_change(change)
        axes.barh(row, change["most"] - left, left=left, height=0.62, color=GREEN, alpha=0.14)
        axes.plot([change["most"]] * 2, [row - 0.31, row + 0.31], color=GREEN, linewidth=2)
        axes.plot([change["low"], change["high"]], [row, row], color=colour, linewidth=2.5)
        axes.plot(change["after"] - change["before"], row, "o", color=colour, markersize=8)
        axes.annotate(answer, (1.02, row), color=colour, **at_right)

    axes.set_yticks(range(len(changes)), [name_change(change) for change in changes])
    axes.text(left, -0.2, " allowed", color=GREEN, va="top", fontsize=9)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set(xlim=(left, right), ylim=(len(changes) - 0.5, -0.5))
    axes.set_xlabel("← better      change of the loss (nats), with its 95 % interval      worse →")
    axes.spines[["top", "right"]].set_visible(False)
    verdict = f"{gate['verdict']}, exit code {gate['exit_code']}"
    axes.set_title(f"cpt.gate RUN {' '.join(SHOWN_GATE)}", **CAPTION, family="monospace")
    colour = GREEN if gate["exit_code"] == 0 else RED
    axes.annotate(f"→ {verdict}", (1.02, -0.72), color=colour, annotation_clip=False, **at_right)
    return make_png(figure, description=f"Release check: {verdict}")


def judge_change(change: dict[str, Any]) -> tuple[str, str]:
    """Whether a text passes, and the colour of that."""
    if change["high"] <= change["most"]:
        return "✓ improved" if change["new"] else "✓ kept", GREEN
    if change["low"] > change["most"]:
        return "✗ too little" if change["new"] else "✗ forgotten", RED
    return "? inconclusive", ORANGE


def name_change(change: dict[str, Any]) -> str:
    role = "new" if change["new"] else "old"
    return f"{change['text']} ({role})"


def draw_resume() -> bytes:
    """The losses of a run that was killed and resumed, on those of the same run without an interruption."""
    runs = json.loads(GUIDE_RUNS.read_text(encoding="utf-8"))
    whole, killed, resumed = (
        {int(step): loss for step, loss in runs[name].items()} for name in ("whole", "killed", "resumed")
    )
    kill_step = max(killed)
    checkpoint_step = kill_step // runs["checkpoint_every"] * runs["checkpoint_every"]
    tail = {step: loss for step, loss in resumed.items() if step >= checkpoint_step}
    num_equal = sum(whole[step] == loss for step, loss in tail.items())

    figure = make_figure((8.5, 3.0))
    axes = figure.add_subplot()
    axes.plot(whole.keys(), whole.values(), color="0.82", linewidth=7, label="never interrupted")
    axes.plot(killed.keys(), killed.values(), color=SERIES[0], linewidth=2, label="until the kill")
    axes.plot(tail.keys(), tail.values(), "--", color=SERIES[1], linewidth=2, label="after the resume")
    axes.plot(kill_step, killed[kill_step], "X", color="black", markersize=12, zorder=5)
    axes.axvline(kill_step, color="black", linewidth=1)
    axes.axvline(checkpoint_step, color=GREY, linestyle="--", linewidth=1)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.18 * (top - bottom))
    axes.annotate(
        "killed",
        (kill_step, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        va="top",
        fontweight="bold",
    )
    axes.annotate(
        "resumes from the\nlast checkpoint",
        (checkpoint_step, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        va="top",
        ha="right",
        color="0.35",
    )
    axes.set(xlabel="step of the second domain, counted from 0", ylabel="training loss")
    axes.spines[["top", "right"]].set_visible(False)
    equal = f"{num_equal} of {len(tail)} losses after the resume are equal to the last bit"
    axes.set_title(equal, **CAPTION)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return make_png(figure, description="Training loss of a killed and resumed run")


def draw_large_models() -> bytes:
    """The memory of a GPU in each plan of an 8 B model, with the change by which it fits."""
    plans = json.loads(PLANS.read_text(encoding="utf-8"))["plans"]
    figure = make_figure((8.5, 4.2))
    panels = figure.subplots(len(plans), sharex=True)
    for axes, colour, entry in zip(panels, SERIES, plans, strict=False):
        device, gigabytes = DEVICES[entry["device"]]
        estimates = entry["plan"]["estimates"]
        changes = [estimate["change"] for estimate in estimates]
        axes.barh(range(len(changes)), [change["peak"] / 1e9 for change in changes], color=colour)
        axes.axvline(gigabytes, color="black", linestyle="--")
        has_long_bars = gigabytes == MEMORY_OF_A_GPU
        text_start, text_colour = (0.7, "white") if has_long_bars else (gigabytes + 1, "black")
        for row, change in enumerate(changes):
            tokens = entry["plan"]["tokens_per_step"] / change["seconds"]["step"]
            text = f"{name_overrides(change['overrides'])}; {tokens:,.0f} tokens/s"
            axes.annotate(text, (text_start, row), va="center", fontsize=8, color=text_colour)
        labels = [count_noun(estimate["devices"], "GPU") for estimate in estimates]
        axes.set_yticks(range(len(estimates)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{entry['model']}, {entry['run']}, {device} ({gigabytes} GB)", **CAPTION)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set(xlabel="GB on each GPU, computed", xlim=(0, MEMORY_OF_A_GPU + 2))
    return make_png(figure, description="Memory of a GPU in plans of an 8 B model")


def name_overrides(overrides: list[str]) -> str:
    """Options without their sections: `gradient_checkpointing=true`."""
    return ", ".join(override.rpartition(".")[2] for override in overrides)


def draw_four_tasks() -> bytes:
    """The accuracy of each method on four tasks, just after the training on each task and at the end."""
    just_trained: dict[str, list[float]] = {}
    final: dict[str, list[float]] = {}
    for line in gzip.decompress(FOUR_TASKS.read_bytes()).splitlines():
        scores = json.loads(line)
        run = scores["run"]
        if run["method"] == "joint":
            continue
        name = run["method"] if run["mask"] == "none" else f"{run['method']} + {run['mask']}"
        tasks = scores["answers"]["tasks"]
        matches = {task: tasks[task]["measures"]["exact_match"] for task in run["order"]}
        diagonal = [matches[task][stage] for stage, task in enumerate(run["order"], start=1)]
        just_trained.setdefault(name, []).append(100 * float(np.mean(diagonal)))
        final.setdefault(name, []).append(100 * float(np.mean([row[-1] for row in matches.values()])))

    names = sorted(final, key=lambda name: np.mean(final[name]))
    figure = make_figure((8.5, 3.8))
    axes = figure.add_subplot(axisbelow=True)
    axes.grid(axis="x", color="0.9")
    for row, name in enumerate(names):
        start, end = np.mean(just_trained[name]), np.mean(final[name])
        axes.plot([start, end], [row, row], color=GREY, linewidth=2, zorder=1)
        axes.plot(start, row, "o", color="white", markeredgecolor=SERIES[0], markersize=9)
        axes.plot(end, row, "o", color=SERIES[0], markersize=9)
    axes.plot([], [], "o", color="white", markeredgecolor=SERIES[0], markersize=9, label="just trained")
    axes.plot([], [], "o", color=SERIES[0], markersize=9, label="after all four tasks")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="accuracy, %, mean of nine runs", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return make_png(figure, description="Accuracy just after each task and after all four")


def draw_signals() -> bytes:
    """How long a run takes to leave after a signal, each trial of the campaign a point."""
    trials = json.loads(SIGNALS.read_text(encoding="utf-8"))["trials"]
    figure = make_figure((8.5, 2.8))
    axes = figure.add_subplot(axisbelow=True)
    axes.grid(axis="x", color="0.9")
    offsets = np.random.default_rng(0).uniform(-0.28, 0.28, len(trials))  # so that points do not hide others
    setups = list(SETUPS)
    for colour, (phase, label) in zip(SERIES, PHASES.items(), strict=False):
        chosen = [number for number, trial in enumerate(trials) if trial["loop"] == phase]
        seconds = [trials[number]["left_after_s"] for number in chosen]
        rows = [setups.index(trials[number]["setup"]) + offsets[number] for number in chosen]
        axes.plot(seconds, rows, "o", color=colour, markersize=5, alpha=0.8, label=label)
    axes.set_yticks(range(len(setups)), SETUPS.values())
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.minorticks_off()
    axes.set(xlabel="seconds from the signal to the exit")
    num_same = sum(trial["fine"] for trial in trials)
    title = f"{num_same} of {len(trials)}: exit code 75, no step lost, the same bits after the same command"
    axes.set_title(title, **CAPTION)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, title="signal during")
    return make_png(figure, description="Seconds from a signal to the exit of the run")


@dataclass(frozen=True)
class RowCount:
    """Stands in for a text of which samples are drawn and not read."""

    row_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.row_lengths)


def draw_replay() -> bytes:
    """What the batches of four stages are of, step by step, as the program draws their samples."""
    domains = ["law", "food", "space", "code"]
    names = [*domains, "general", "chat"]
    shares = np.concatenate([count_samples(domains[: number + 1], names) for number in range(len(domains))])
    figure = make_figure((8.5, 3.0))
    axes = figure.add_subplot()
    steps = np.arange(len(shares))
    axes.stackplot(
        steps, 100 * shares.T, labels=names, colors=[*SERIES[:4], "0.75", SERIES[5]], step="post", linewidth=0
    )
    for number in range(1, len(domains)):
        axes.axvline(number * REPLAYED_STEPS, color="white", linewidth=2)
    middles = [REPLAYED_STEPS * (number + 0.5) for number in range(len(domains))]
    axes.set_xticks(middles, [f"stage {number}: {name}" for number, name in enumerate(domains, start=1)])
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(0, len(shares) - 1), ylim=(0, 100), ylabel="samples of a batch, %")
    axes.set_title(" ".join(REPLAY_OVERRIDES), fontsize=8, family="monospace", loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return make_png(figure, description="What the batches of four stages are of, with replay")


def count_samples(domains: list[str], names: list[str]) -> np.ndarray:
    """The share of each text, by its name, in the batches of the stage of the last domain: [steps, names]."""
    replay = Replay(
        past_ratio=0.2,
        general_ratio=0.05,
        mode="replace",
        buffer_size=None,
        sources={"chat": {"path": "owner/chats", "format": "messages", "ratio": 0.1}},
    )
    texts: dict[str, Any] = {name: RowCount(np.full(1000, 128)) for name in names}
    *past, new = domains
    pools: list[ReplayPool] = replay.pools(
        {name: texts[name] for name in past}, {"general": texts["general"]}, stage=new, seed=0
    )
    mixture = Mixture({"chat": MixedText(replay.mixed_sources["chat"], texts["chat"])}, replay, seed=0)
    pools += mixture.pools([REPLAYED_STEPS * REPLAYED_BATCH] * len(domains))
    stream = TrainStream(
        {new: texts[new]},
        objective=Causal(),
        seed=0,
        batch_size=REPLAYED_BATCH,
        steps=[REPLAYED_STEPS],
        accumulate=1,
        rank=0,
        world=1,
        pools=pools,
    )
    drawn_names = [new]
    for pool in pools:
        drawn_names += pool.texts
    shares = np.zeros((REPLAYED_STEPS, len(names)))
    for step in range(REPLAYED_STEPS):
        counts = np.bincount(stream.locate_step(step).text_indices, minlength=len(drawn_names))
        for name, count in zip(drawn_names, counts, strict=True):
            shares[step, names.index(name)] += count / REPLAYED_BATCH
    return shares


def draw_schedules() -> bytes:
    """The factor of the peak rate at each step of three domains, for each schedule."""
    figure = make_figure((8.5, 5.2))
    panels = figure.subplots(3, 4, sharex=True, sharey=True)
    for axes, (title, (name, changes)) in zip(panels.flat, SCHEDULE_PANELS.items(), strict=True):
        config = OmegaConf.merge(OmegaConf.load(SCHEDULES / f"{name}.yaml"), changes)
        draw_schedule(axes, instantiate(config, _convert_="all"))
        axes.set_title(title, **CAPTION, family="monospace")

    for axes in panels[:, 0]:
        axes.set_ylabel("factor")
    middles = [DRAWN_STEPS * (domain + 0.5) for domain in range(DRAWN_DOMAINS)]
    for axes in panels[-1]:
        axes.set_xticks(middles, range(1, DRAWN_DOMAINS + 1))
        axes.set_xlabel("domain")
    return make_png(figure, description="Learning-rate schedules over three domains")


def draw_schedule(axes: Axes, schedule: Schedule) -> None:
    """The factors over three domains. A decay that the next domain does not continue is dashed."""
    for domain in range(DRAWN_DOMAINS):
        steps = list(range(DRAWN_STEPS))
        factors = [schedule(drawn_progress(domain, step)) for step in steps]
        positions = [domain * DRAWN_STEPS + step for step in steps]
        branch = schedule.branch_step(DRAWN_STEPS) if schedule.branches else DRAWN_STEPS
        axes.plot(positions[:branch], factors[:branch], color=SERIES[0], linewidth=1.8)
        axes.plot(positions[branch - 1 :], factors[branch - 1 :], ":", color=SERIES[1], linewidth=1.8)
        if domain > 0:
            axes.axvline(domain * DRAWN_STEPS, color="0.85", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(0, DRAWN_DOMAINS * DRAWN_STEPS), ylim=(0, 1.05), yticks=[0, 0.5, 1])


def drawn_progress(domain: int, step: int) -> Progress:
    return Progress(
        step=step,
        steps=DRAWN_STEPS,
        domain=domain,
        domains=DRAWN_DOMAINS,
        total_step=domain * DRAWN_STEPS + step,
        total_steps=DRAWN_DOMAINS * DRAWN_STEPS,
        first_domain_steps=DRAWN_STEPS,
    )


PICTURES: dict[str, Callable[[], bytes]] = {
    "methods-plane": draw_methods,
    "encoder-plane": draw_encoder,
    "das6-plane": draw_tiny_encoder,
    "comparison-page": photograph_comparison,
    "plan": draw_plan,
    "chats": draw_chats,
    "tuning": draw_tuning,
    "orders": draw_orders,
    "gate": draw_gate,
    "resume": draw_resume,
    "schedules": draw_schedules,
    "signals": draw_signals,
    "replay": draw_replay,
    "large-models": draw_large_models,
    "four-tasks": draw_four_tasks,
}


def main(names: list[str]) -> None:
    for name in names or PICTURES:
        (IMAGES / f"{name}.png").write_bytes(PICTURES[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
