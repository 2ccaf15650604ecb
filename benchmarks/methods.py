"""Step time of every method over that of `ncl`, in a domain after the first: DAS has importances then, EWC a
Fisher, replay a past.

Every subject is a run of cpt in a process of its own: some untimed steps in a first domain, then the second
one, where the subjects take turns, chunk by chunk. A ratio is that of a method's chunk to `ncl`'s in the same
round. Where not all subjects fit into memory they are measured in groups, each with the references among
them. All groups are started anew `--casts` times: one start of a group is a session of stage.py."""

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.ground import Workload, build_workload, format_accelerator, make_labels, make_parser
from common.measuring import ROOT, compare_times, save
from common.stage import (
    Chunks,
    StepTimer,
    Subject,
    TimingOptions,
    collect_times,
    join_sessions,
    measure_rounds,
    prepare,
    select_quiet_rounds,
)
from common.subjects import StepCallback, fit
from common.variants import DENSE, TARGETS, VARIANTS
from lightning.pytorch.callbacks import Callback

from cpt.data.collate import select_inputs
from cpt.methods.base import ContinualMethod
from cpt.trainer.costs import count_stored_bytes, count_trained_parameters, find_original_names

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
class TwoDomainSetup(TimingOptions):
    """What the subjects run: `first` steps in the first domain, then the timed ones in the second. `shape`
    are the overrides of all subjects."""

    cache: str
    first: int
    shape: tuple[str, ...]
    model: str = "roberta"  # of ground.SHAPES

    def build_workload(self, overrides: list[str]) -> Workload:
        all_overrides = (
            format_accelerator(self.device),
            f"trainer.steps={self.steps}",
            *self.shape,
            *overrides,
        )
        return build_workload(self.cache, *all_overrides, shape=self.model)


class StepMemory(Callback):
    """The process's peak memory within the steps of a fit, without what its method does before and after."""

    def __init__(self) -> None:
        self.before = self.peak = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == 0:
            self.before = read_peak_memory()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.peak = read_peak_memory()


def measure_method(
    timer: StepTimer, *, setup: TwoDomainSetup, overrides: list[str], dense: bool
) -> dict[str, Any]:
    """Runs in the process of one subject: trains it on two domains, timed in the second. Returns what its
    method stores and the peak memory; `dense`: the model's own loss in place of the method's."""
    workload = setup.build_workload(overrides)
    if dense:
        workload.module.losses = partial(dense_losses, workload.module)
    first, second = workload.data
    timer.wait_for_warm_up()
    fit(workload, first, steps=setup.first)
    memory = StepMemory()
    fit(workload, second, steps=setup.steps, callbacks=[memory, StepCallback(timer)])
    peak_bytes = max(memory.before, memory.peak, read_peak_memory())
    return {**measure_needs(workload.module), "peak": peak_bytes, "peak_of_steps": memory.peak}


def dense_losses(module: ContinualMethod, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's own loss, whose head is computed at every position."""
    return {"lm": module.model(**select_inputs(batch), labels=make_labels(module, batch)).loss}


def measure_needs(module: ContinualMethod) -> dict[str, int]:
    """Bytes beyond the model that are saved, and that are held; trained parameters; peak bytes on a GPU."""
    buffers = size_extra_tensors(dict(module.named_buffers()))
    on_device = {"peak_device": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {}
    return {
        "state": count_stored_bytes(module.state_dict(), find_original_names(module.model)),
        "held": sum(buffers.values()),
        "trainable": count_trained_parameters(module),
        **on_device,
    }


def size_extra_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Bytes of the tensors that are not the model's, by their address: one with two names counts once."""
    return {
        tensor.data_ptr(): tensor.nbytes for name, tensor in tensors.items() if not name.startswith("model.")
    }


def read_peak_memory() -> int:
    """Bytes of this process's memory at its peak."""
    # Not ru_maxrss: a process inherits that from the one which started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def list_subjects() -> dict[str, list[str]]:
    """The overrides of every subject by its name: of each method in conf/, `ncl` first, and of VARIANTS."""
    names = sorted(path.stem for path in (CONF / "method").glob("*.yaml") if path.stem not in EXCLUDED)
    names.remove(NCL)
    subjects = {name: [f"method={name}"] for name in (NCL, *names)}
    for name, overrides in VARIANTS.items():
        if all(map(is_available, overrides)):
            subjects[name] = overrides
    return subjects


def is_available(override: str) -> bool:
    """Whether the file of conf/ exists that an override GROUP=CHOICE chooses; true for an option."""
    key, _, choice = override.partition("=")
    group = CONF / key.partition("@")[0]
    return not group.is_dir() or (group / f"{choice}.yaml").exists()


def divide_into_groups(names: list[str], *, together: int) -> Iterator[list[str]]:
    """The subjects in groups of at most `together` and of about equal size. The references, over which ratios
    are taken, are in every group."""
    references = [name for name in (NCL, DENSE) if name in names]
    compared_names = [name for name in names if name not in references]
    num_groups = max(1, math.ceil(len(compared_names) / (together - len(references))))
    for number in range(num_groups):
        yield [*references, *compared_names[number::num_groups]]


def compute_figures(run: Mapping[str, Any], *, chunk: int) -> dict[str, dict[str, Any]]:
    """The figures of every subject of a group, of the undisturbed rounds."""
    chunks = run["chunks"]
    quiet_rounds = select_quiet_rounds(chunks)
    all_rounds = list(range(len(run["load"])))
    wall = collect_times(chunks, quiet_rounds, "wall")

    figures = {}
    for name, report in run["reports"].items():
        facts = {fact: value for fact, value in report.items() if fact not in ("scored", "losses")}
        figures[name] = {
            "step_s": statistics.median(wall[name]) / chunk,
            **compute_ratios(chunks, quiet_rounds, name),
            "of_all_rounds": compute_ratios(chunks, all_rounds, name),
            "rounds": quiet_rounds,
            "scored_tokens": sum(report["scored"]),
            "mean_loss": statistics.mean(report["losses"]),
            **facts,
        }
    return figures


def compute_ratios(chunks: Chunks, rounds: list[int], name: str) -> dict[str, dict[str, float]]:
    """A subject's time over that of each reference, by wall and by CPU time."""
    wall = collect_times(chunks, rounds, "wall")
    cpu = collect_times(chunks, rounds, "cpu")
    ratios = {}
    if NCL in wall:
        ratios["over_ncl"] = compare_times(wall[NCL], wall[name])
    if DENSE in wall:
        ratios["over_dense"] = compare_times(wall[DENSE], wall[name])
    if NCL in cpu:
        ratios["over_ncl_by_cpu_time"] = compare_times(cpu[NCL], cpu[name])
    return ratios


def format_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The table; memory in MiB."""
    lines = [ROW.format("subject", "ms/step", "over ncl", "", "target", "", *HEADINGS)]
    return "\n".join(
        [*lines, *(format_row(name, subject_figures) for name, subject_figures in figures.items())]
    )


def format_row(name: str, figures: Mapping[str, Any]) -> str:
    ratio = figures["over_ncl"]
    target = TARGETS.get(name)
    mib = [f"{figures[fact] / 2**20:.2f}" for fact in ("peak", "peak_of_steps", "state", "held")]
    return ROW.format(
        name,
        f"{1000 * figures['step_s']:.1f}",
        f"{ratio['median']:.3f}",
        "[{low:.3f}, {high:.3f}]".format(**ratio),
        "" if target is None else f"{target:.2f}",
        "" if target is None else judge_ratio(ratio, target),
        f"{figures['over_dense']['median']:.3f}" if "over_dense" in figures else "",
        figures["scored_tokens"],
        *mib,
        figures["trainable"],
    )


def judge_ratio(ratio: Mapping[str, float], target: float) -> str:
    """What the interval says about a target: `open` where it lies on both sides of it."""
    if ratio["low"] <= target < ratio["high"]:
        return "open"
    return "met" if ratio["high"] <= target else "missed"


def parse_options(names: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n\n")[0])
    parser.add_argument("--methods", nargs="+", choices=names, default=names, help="subjects beside ncl")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=10, help="chunks per subject and cast")
    parser.add_argument("--casts", type=int, default=2, help="times that all subjects are started anew")
    parser.add_argument("--together", type=int, default=6, help="processes at once, 3 or more")
    parser.add_argument("--first", type=int, default=8, help="untimed steps in the first domain")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="a checkpoint instead of a small RoBERTa; a missing head is random")
    parser.add_argument("--config", nargs="+", default=[], help="changes to the config of all subjects")
    options = parser.parse_args()
    if options.together < 3:
        parser.error(f"--together={options.together}; allowed: 3 or more")
    return options


def make_subjects(setup: TwoDomainSetup, methods: list[str]) -> dict[str, Subject]:
    """What every chosen subject's process does. Each is tried as far as its first step: an error ends the
    benchmark here, and the cache is filled."""
    configs = {name: config for name, config in list_subjects().items() if name in (NCL, *methods)}
    for overrides in configs.values():
        setup.build_workload(overrides)
    return {
        name: partial(measure_method, setup=setup, overrides=config, dense=name == DENSE)
        for name, config in configs.items()
    }


def make_setup(options: argparse.Namespace) -> TwoDomainSetup:
    """What all subjects run: a small RoBERTa, or the checkpoint of --model."""
    model = "roberta"
    shape = (*SHAPE, *options.config)
    if options.model is not None:
        model = "given"
        checkpoint_overrides = [
            "model=hf",
            f"model.name_or_path={options.model}",
            "model.pretraining.head_steps=0",
        ]
        shape = (*checkpoint_overrides, *COMMON, *options.config)
    return TwoDomainSetup(
        threads=options.threads,
        rounds=options.repeats,
        chunk=options.steps,
        device=options.device,
        cache=options.cache,
        first=options.first,
        shape=shape,
        model=model,
    )


def measure_groups(
    subjects: Mapping[str, Subject], setup: TwoDomainSetup, *, together: int, sessions: int, patience: float
) -> list[dict[str, Any]]:
    """The results of each group of at most `together` subjects, over all its sessions. `patience`: the
    seconds that a session may wait for a quiet machine."""
    groups = list(divide_into_groups(list(subjects), together=together))
    sessions_by_group: list[list[dict[str, Any]]] = [[] for _ in groups]
    # Each group has its n-th session before any has its next: ratios drift with time.
    for _ in range(sessions):
        for group, group_sessions in zip(groups, sessions_by_group, strict=True):
            group_subjects = {name: subjects[name] for name in group}
            group_sessions.append(measure_rounds(group_subjects, setup, patience=patience))
    return [join_sessions(group_sessions) for group_sessions in sessions_by_group]


def select_figures(
    names: Iterable[str], by_group: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Mapping[str, Any]]:
    """The figures of every subject from the first group that has it: references are in all."""
    figures = {}
    for name in names:
        figures[name] = next(group_figures[name] for group_figures in by_group if name in group_figures)
    return figures


def save_results(
    options: argparse.Namespace,
    runs: Sequence[Mapping[str, Any]],
    *,
    figures: Mapping[str, Mapping[str, Any]],
    by_group: Sequence[Mapping[str, Mapping[str, Any]]],
) -> None:
    """Writes the figures and all chunks, without paths of this machine."""
    settings = {key: value for key, value in vars(options).items() if key not in ("cache", "out", "model")}
    settings["model"] = options.model and Path(options.model).name
    results = {
        "options": settings,
        "targets": TARGETS,
        "subjects": figures,
        "by_group": by_group,
        "load": [run["load"] for run in runs],
        "chunks": [run["chunks"] for run in runs],
    }
    save("methods", results, out=options.out)


def main() -> None:
    options = parse_options(list(list_subjects()))
    prepare(options.threads)
    setup = make_setup(options)
    subjects = make_subjects(setup, options.methods)

    runs = measure_groups(
        subjects, setup, together=options.together, sessions=options.casts, patience=options.patience
    )
    by_group = [compute_figures(run, chunk=options.steps) for run in runs]
    figures = select_figures(subjects, by_group)
    print(format_table(figures))
    save_results(options, runs, figures=figures, by_group=by_group)


if __name__ == "__main__":
    main()
