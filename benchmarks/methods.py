"""Step time of every method over that of `ncl`, in a domain after the first: DAS has importances then, EWC a
Fisher, replay a past.

Every subject is a run of cpt in a process of its own: some untimed steps in a first domain, then the second
one, where the subjects take turns, chunk by chunk. A ratio is that of a method's chunk to `ncl`'s in the same
round. Where not all subjects fit into memory they play in groups, each with the references among them."""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ground import Ground, accelerator, arguments, ground, labels_for
from lightning.pytorch.callbacks import Callback
from measuring import ROOT, paired, save
from stage import Beat, Chunks, Rhythm, Subject, joined, played, prepare, times, undisturbed
from subjects import Pulse, fit
from variants import DENSE, TARGETS, VARIANTS

from cpt.data.collate import inputs_of
from cpt.methods.base import ContinualMethod
from cpt.trainer.costs import own_names, stored_bytes, trained_parameters

CONF = ROOT / "conf"
NCL = "ncl"
EXCLUDED = ("none", "joint")  # they have no second domain
COMMON = ["order=[sympy,networkx]", "trainer.batch_size=16", "trainer.importance_samples=32"]
SHAPE = [
    *COMMON,
    "model.vocab_size=5000",
    "model.max_seq_length=164",
    "model.config.num_hidden_layers=6",
    "model.config.hidden_dropout_prob=0.1",
    "model.config.attention_probs_dropout_prob=0.1",
]  # the rest is ground.ALWAYS
HEADINGS = ("over dense", "scored", "peak", "in steps", "state", "held", "trained")
ROW = "{:22}{:>9}{:>10} {:16}{:>7} {:7}{:>10}{:>8}{:>9}{:>9}{:>8}{:>8}  {}"


@dataclass(frozen=True)
class Sequel(Rhythm):
    """What the subjects run: `first` steps in the first domain, then the timed ones in the second."""

    cache: str
    first: int
    shape: tuple[str, ...]
    model: str = "roberta"  # of ground.SHAPES

    def ground(self, overrides: list[str]) -> Ground:
        all_overrides = (accelerator(self.device), f"trainer.steps={self.steps}", *self.shape, *overrides)
        return ground(self.cache, *all_overrides, shape=self.model)


class StepMemory(Callback):
    """The process's peak memory within the steps of a fit, without what its method does before and after."""

    def __init__(self) -> None:
        self.before = self.peak = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == 0:
            self.before = peak()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.peak = peak()


def perform(beat: Beat, *, course: Sequel, overrides: list[str], dense: bool) -> dict[str, Any]:
    """The part of one subject; gives what its method keeps and needs."""
    workload = course.ground(overrides)
    if dense:
        workload.module.losses = partial(dense_losses, workload.module)
    first, second = workload.data
    beat.enter()
    fit(workload, first, steps=course.first)
    memory = StepMemory()
    fit(workload, second, steps=course.steps, callbacks=[memory, Pulse(beat)])
    peak_bytes = max(memory.before, memory.peak, peak())
    return {**needs(workload.module), "peak": peak_bytes, "peak_of_steps": memory.peak}


def dense_losses(module: ContinualMethod, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's own loss, whose head is computed at every position."""
    return {"lm": module.model(**inputs_of(batch), labels=labels_for(module, batch)).loss}


def needs(module: ContinualMethod) -> dict[str, int]:
    """Bytes beyond the model that are saved, and that are held; trained parameters; peak bytes on a GPU."""
    buffers = extra(dict(module.named_buffers()))
    on_device = {"peak_device": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {}
    return {
        "state": stored_bytes(module.state_dict(), own_names(module.model)),
        "held": sum(buffers.values()),
        "trainable": trained_parameters(module),
        **on_device,
    }


def extra(tensors: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Bytes of what is not the model's by where they are: what has two names is kept once."""
    return {
        tensor.data_ptr(): tensor.nbytes for name, tensor in tensors.items() if not name.startswith("model.")
    }


def peak() -> int:
    """Bytes of this process's memory at its peak."""
    # Not ru_maxrss: a process inherits that from the one which started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def subjects() -> dict[str, list[str]]:
    """The config of every subject by its name: each method there is, and the variants of these."""
    names = sorted(path.stem for path in (CONF / "method").glob("*.yaml") if path.stem not in EXCLUDED)
    methods = {name: [f"method={name}"] for name in (NCL, *(name for name in names if name != NCL))}
    return methods | {name: overrides for name, overrides in VARIANTS.items() if all(map(exists, overrides))}


def exists(override: str) -> bool:
    """Whether there is what an override chooses; true for one that chooses no file."""
    key, _, choice = override.partition("=")
    group = CONF / key.partition("@")[0]
    return not group.is_dir() or (group / f"{choice}.yaml").exists()


def groups(names: list[str], *, together: int) -> Iterator[list[str]]:
    """The subjects in groups of at most so many and much the same size, the references in each."""
    references = [name for name in (NCL, DENSE) if name in names]
    compared_names = [name for name in names if name not in references]
    count = max(1, math.ceil(len(compared_names) / (together - len(references))))
    return ([*references, *compared_names[start::count]] for start in range(count))


def group_figures(run: Mapping[str, Any], *, chunk: int) -> dict[str, dict[str, Any]]:
    """The figures of every subject of a group, of the undisturbed rounds."""
    chunks, reports = run["chunks"], run["reports"]
    rounds = undisturbed(chunks)
    seconds = {
        name: statistics.median(durations) / chunk
        for name, durations in times(chunks, rounds, "wall").items()
    }
    return {
        name: {
            "step_s": seconds[name],
            **ratios(chunks, rounds, name),
            "of_all_rounds": ratios(chunks, list(range(len(run["load"]))), name),
            "rounds": rounds,
            "scored_tokens": sum(report["scored"]),
            "mean_loss": statistics.mean(report["losses"]),
            **{fact: value for fact, value in report.items() if fact not in ("scored", "losses")},
        }
        for name, report in reports.items()
    }


def ratios(chunks: Chunks, rounds: list[int], name: str) -> dict[str, dict[str, float]]:
    """A subject's time over that of each reference, by wall and by processor time."""
    wall, cpu = (times(chunks, rounds, kind) for kind in ("wall", "cpu"))
    over = {"over_ncl": (wall, NCL), "over_dense": (wall, DENSE), "over_ncl_by_cpu_time": (cpu, NCL)}
    return {
        key: paired(subject_times[ref], subject_times[name])
        for key, (subject_times, ref) in over.items()
        if ref in subject_times
    }


def shown(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The table; memory in MiB."""
    lines = [ROW.format("subject", "ms/step", "over ncl", "", "target", "", *HEADINGS)]
    return "\n".join([*lines, *(row(name, subject_figures) for name, subject_figures in figures.items())])


def row(name: str, figures: Mapping[str, Any]) -> str:
    ratio, target = figures["over_ncl"], TARGETS.get(name)
    mib = [f"{figures[fact] / 2**20:.2f}" for fact in ("peak", "peak_of_steps", "state", "held")]
    return ROW.format(
        name,
        f"{1000 * figures['step_s']:.1f}",
        f"{ratio['median']:.3f}",
        "[{low:.3f}, {high:.3f}]".format(**ratio),
        "" if target is None else f"{target:.2f}",
        "" if target is None else verdict(ratio, target),
        f"{figures['over_dense']['median']:.3f}" if "over_dense" in figures else "",
        figures["scored_tokens"],
        *mib,
        figures["trainable"],
    )


def verdict(ratio: Mapping[str, float], target: float) -> str:
    """What the interval says about a target: `open` where it lies on both sides of it."""
    if ratio["low"] <= target < ratio["high"]:
        return "open"
    return "met" if ratio["high"] <= target else "missed"


def options(names: list[str]) -> argparse.Namespace:
    parser = arguments(__doc__.split("\n\n")[0])
    parser.add_argument("--methods", nargs="+", choices=names, default=names, help="subjects beside ncl")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=10, help="chunks per subject and cast")
    parser.add_argument("--casts", type=int, default=2, help="times that all subjects are started anew")
    parser.add_argument("--together", type=int, default=6, help="processes at once, 3 or more")
    parser.add_argument("--first", type=int, default=8, help="untimed steps in the first domain")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="a checkpoint instead of a small RoBERTa; a missing head is random")
    parser.add_argument("--config", nargs="+", default=[], help="changes to the config of all subjects")
    chosen = parser.parse_args()
    if chosen.together < 3:
        parser.error(f"--together={chosen.together}; allowed: 3 or more")
    return chosen


def parts(course: Sequel, chosen: list[str]) -> dict[str, Subject]:
    """What every chosen subject's process does. Each is tried as far as its first step: an error ends the
    benchmark here, and the cache is filled."""
    configs = {name: config for name, config in subjects().items() if name in (NCL, *chosen)}
    for overrides in configs.values():
        course.ground(overrides)
    return {
        name: partial(perform, course=course, overrides=config, dense=name == DENSE)
        for name, config in configs.items()
    }


def main() -> None:
    chosen = options(list(subjects()))
    prepare(chosen.threads)
    shared = {name: getattr(chosen, name) for name in ("cache", "threads", "first", "device")}
    checkpoint_overrides = [
        "model=hf",
        f"model.name_or_path={chosen.model}",
        "model.pretraining.head_steps=0",
    ]
    shape = (
        (*SHAPE, *chosen.config) if chosen.model is None else (*checkpoint_overrides, *COMMON, *chosen.config)
    )
    model = "roberta" if chosen.model is None else "given"
    course = Sequel(**shared, rounds=chosen.repeats, chunk=chosen.steps, shape=shape, model=model)
    work = parts(course, chosen.methods)
    casts = [list(groups(list(work), together=chosen.together)) for _ in range(chosen.casts)]
    runs = [
        [played({name: work[name] for name in group}, course, patience=chosen.patience) for group in cast]
        for cast in casts
    ]
    wholes = [joined(list(each)) for each in zip(*runs, strict=True)]
    by_group = [group_figures(each, chunk=chosen.steps) for each in wholes]
    figures = {name: next(each[name] for each in by_group if name in each) for name in work}
    print(shown(figures))
    settings = {k: value for k, value in vars(chosen).items() if k not in ("cache", "out", "model")}
    settings["model"] = chosen.model and Path(chosen.model).name
    raw = {"load": [each["load"] for each in wholes], "chunks": [each["chunks"] for each in wholes]}
    results = {"options": settings, "targets": TARGETS, "subjects": figures, "by_group": by_group, **raw}
    save("methods", results, out=chosen.out)


if __name__ == "__main__":
    main()
