"""How near a training step comes to what the CPU can do: its operations over those that large matrix products
reach in the same time, in 32 and in 16 bits, of cpt, the Hugging Face Trainer and a bare loop.

    python benchmarks/costs/limit.py

Beside it: what share of cpt's step each phase takes by the clock, each kind of operation by torch's
profiler, and the memory's bandwidth."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile

from cpt.trainer.costs import OperationCounter

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import SHAPES, make_parser
from common.measuring import save
from common.stage import collect_times, measure_rounds, prepare
from common.subjects import SUBJECTS, TrainingSetup, fit
from common.variants import QUICK

MATRIX_SIDE = 2048  # of the square matrices whose product measures the peak
REPEATS = 7
MEGABYTES = 256
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
CPT_SUBJECTS = ("cpt", "cpt, quick dropout", "cpt, bf16", "cpt, bf16, quick dropout")
# What a subject computes in; the others in 32-true.
PRECISIONS = {name: "bf16-mixed" for name in CPT_SUBJECTS if "bf16" in name}
COARSE = ("trainer.precision=bf16-mixed", "trainer.attn_implementation=eager")
CPT_OVERRIDES: dict[str, tuple[str, ...]] = {
    "32-true": (),
    "32-true, quick dropout": QUICK,
    "bf16-mixed": COARSE,
    "bf16-mixed, quick dropout": (*COARSE, *QUICK),
}
FORWARD = {  # parts of a model, by the last of their names; the outermost counts
    "embedding": ("embeddings", "embed_tokens", "wte", "wpe", "shared"),
    "attention": ("attention", "attn", "SelfAttention", "EncDecAttention"),
    "FFN": ("intermediate", "output", "mlp", "DenseReluDense"),
    "head": ("lm_head", "head", "decoder"),
}
LIGHTNING = {  # what Lightning's profiler calls them
    "data": "train_dataloader_next",
    "forward": ".training_step",
    "backward": ".backward",
    "optimizer": "optimizer_step",
    "all": "run_training_epoch",
}
OPERATIONS = {  # of torch; the first that fits
    "data": ("enumerate(DataLoader)",),
    "attention": ("_scaled_dot_product", "aten::bmm", "aten::baddbmm", "softmax", "aten::masked_fill"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy"),
    "linear maps": ("aten::mm", "aten::addmm", "mkldnn", "aten::linear"),
    "norms, activations, dropout": ("layer_norm", "gelu", "relu", "dropout", "bernoulli", "native_batch"),
    "embedding": ("embedding", "index_select", "aten::index", "aten::gather"),
    "optimizer, clipping": ("fused_adam", "aten::sqrt", "addcdiv", "addcmul", "lerp", "norm"),
}
OTHER_KINDS = "copies, sums, casts"


def time_median(work: Callable[[], Any]) -> float:
    """Seconds that some work takes; the first time is not counted."""
    durations = []
    for _ in range(REPEATS + 1):
        start_time = time.perf_counter()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start_time)
    return statistics.median(durations[1:])


def measure_peak(dtype: torch.dtype, *, side: int = MATRIX_SIDE, device: str = "cpu") -> float:
    """Operations per second of a large matrix product."""
    left_matrix = torch.randn(side, side, device=device).to(dtype)
    right_matrix = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / time_median(lambda: left_matrix @ right_matrix)


def measure_bandwidth(*, device: str = "cpu") -> float:
    """Bytes per second that are read and written when memory is copied."""
    source = torch.zeros(MEGABYTES * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_median(lambda: target.copy_(source))


def count_operations(setup: TrainingSetup) -> int:
    """Floating-point operations of a step, forward and backward."""
    workload = setup.build_workload()
    batch = next(iter(workload.loader()))
    with OperationCounter() as counter:
        workload.module.losses(batch)["lm"].backward()
    return counter.total


class Profiled(Callback):
    """Has torch note what a step's time is spent on, behind some first steps."""

    def __init__(self, *, first: int) -> None:
        self.first = first
        self.steps = 0
        self.start_time = 0.0
        self.wall = 0.0
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        if self.steps == self.first:
            self.profile.__enter__()
            self.start_time = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self.wall = time.perf_counter() - self.start_time
        self.profile.__exit__(None, None, None)


class Clocked(Callback):
    """Seconds that each part of a model takes forward, and what Lightning's profiler has at the end."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(FORWARD, 0.0)
        self.loss = 0.0
        self.lightning: dict[str, float] = {}
        self.depth = 0  # parts whose forward pass is under way, one inside the other
        self.last_time = 0.0  # when the outermost of them began, or the last one ended

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for name, part in module.model.named_modules():
            phase = find_phase(name.split(".")[-1])
            # A list of blocks, and what has one, are called like parts.
            holds_blocks = isinstance(part, torch.nn.ModuleList) or any(
                isinstance(child, torch.nn.ModuleList) for child in part.children()
            )
            if phase is not None and not holds_blocks:
                part.register_forward_pre_hook(self.enter)
                part.register_forward_hook(partial(self.leave, phase))

    def enter(self, *hook_arguments: Any) -> None:
        if self.depth == 0:
            self.last_time = time.perf_counter()
        self.depth += 1

    def leave(self, phase: str, *hook_arguments: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            current_time = time.perf_counter()
            self.seconds[phase] += current_time - self.last_time
            self.last_time = current_time

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.loss += time.perf_counter() - self.last_time  # the head was the last part

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for phase, key in LIGHTNING.items():
            self.lightning[phase] = sum(
                sum(durations)
                for name, durations in trainer.profiler.recorded_durations.items()
                if name.endswith(key)
            )


def find_phase(name: str) -> str | None:
    """The phase of the forward pass that a part with this name is."""
    for phase, names in FORWARD.items():
        if name in names:
            return phase
    return None


def measure_phases(setup: TrainingSetup, *overrides: str) -> dict[str, float]:
    """The share of each phase in the time of cpt's steps, by the clock; `logging, loop` is what Lightning
    spends between them."""
    workload = setup.build_workload("+trainer.profiler=simple", *overrides)
    clock = Clocked()
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[clock])
    times = clock.lightning
    phase_seconds = {
        "data": times["data"],
        **clock.seconds,
        "loss": clock.loss,
        "rest of the forward pass": times["forward"] - sum(clock.seconds.values()) - clock.loss,
        "backward": times["backward"],
        "optimizer, clipping": times["optimizer"] - times["forward"] - times["backward"],
        "logging, loop": times["all"] - times["data"] - times["optimizer"],
    }
    return {phase: seconds / times["all"] for phase, seconds in phase_seconds.items()}


def measure_kinds(setup: TrainingSetup, *overrides: str) -> dict[str, float]:
    """The share of each kind of operation in the time of cpt's steps; what no operation of torch takes is
    Python's."""
    workload = setup.build_workload(*overrides)
    profiled = Profiled(first=5)
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[profiled])
    kind_seconds = dict.fromkeys([*OPERATIONS, OTHER_KINDS], 0.0)
    for event in profiled.profile.key_averages():
        if event.key.startswith(("aten::", "enumerate(")):
            kind_seconds[classify_operation(event.key)] += event.self_cpu_time_total / 1e6
    kind_seconds["Python, Lightning"] = max(0.0, profiled.wall - sum(kind_seconds.values()))
    return {kind: seconds / profiled.wall for kind, seconds in kind_seconds.items()}


def classify_operation(name: str) -> str:
    """The kind of an operation of torch: the first that fits."""
    for kind, keys in OPERATIONS.items():
        if any(key in name for key in keys):
            return kind
    return OTHER_KINDS


def format_results(results: Mapping[str, Any]) -> str:
    lines = [f"a step: {results['operations'] / 1e9:.1f} G operations"]
    lines.append(f"memory is copied at {results['bandwidth'] / 1e9:.1f} GB/s")
    for name, peak in results["peak"].items():
        lines.append(f"matrix products, {name}: {peak / 1e9:.0f} G/s")
    for name, figures in results["subjects"].items():
        lines.append(
            f"{name:26}{figures['seconds'] * 1e3:8.1f} ms "
            f"{figures['share']:6.1%} of the limit in {figures['precision']}"
        )
    for split in ("phases", "operations_by_kind"):
        for precision, shares in results[split].items():
            lines.append(
                f"{precision}: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
            )
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=7, help="chunks per subject")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    prepare(options.threads)
    setup = TrainingSetup(
        threads=options.threads,
        rounds=options.repeats,
        chunk=options.steps,
        cache=options.cache,
        batch=options.batch,
        length=options.length,
        fused=True,
        equal=False,
        shape=options.shape,
    )
    num_operations = count_operations(setup)
    subjects = {name: partial(SUBJECTS[name], setup) for name in (*CPT_SUBJECTS, "bare", "hf")}
    run = measure_rounds(subjects, setup, patience=options.patience)
    wall = collect_times(run["chunks"], list(range(options.repeats)), "wall")

    torch.set_num_threads(options.threads)
    peaks = {name: measure_peak(dtype) for name, dtype in DTYPES.items()}
    figures = {}
    for name, durations in wall.items():
        seconds = statistics.median(durations) / options.steps
        precision = PRECISIONS.get(name, "32-true")
        figures[name] = {
            "seconds": seconds,
            "precision": precision,
            "share": num_operations / seconds / peaks[precision],
        }
    results = {
        "options": {name: value for name, value in vars(options).items() if name not in ("cache", "out")},
        "operations": num_operations,
        "bandwidth": measure_bandwidth(),
        "peak": peaks,
        "subjects": figures,
        "phases": {name: measure_phases(setup, *overrides) for name, overrides in CPT_OVERRIDES.items()},
        "operations_by_kind": {
            name: measure_kinds(setup, *overrides) for name, overrides in CPT_OVERRIDES.items()
        },
        "load": run["load"],
    }
    print(format_results(results))
    save("limit", results, out=options.out)


if __name__ == "__main__":
    main()
