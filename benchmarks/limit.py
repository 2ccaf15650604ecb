"""How near a training step comes to what the processor can do: its operations over those that large matrix
products reach in the same time, in 32 and in 16 bits, of cpt, the Hugging Face Trainer and a bare loop.

    python benchmarks/limit.py

Beside it: what share of cpt's step each phase takes by the clock, each kind of operation by torch's
profiler, and the memory's bandwidth."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from ground import SHAPES, arguments
from lightning.pytorch.callbacks import Callback
from measuring import save
from stage import played, prepare, times
from subjects import SUBJECTS, Course, fit
from torch.profiler import ProfilerActivity, profile
from variants import QUICK

from cpt.trainer.costs import OperationCounter

SIDE, REPEATS, MEGABYTES = 2048, 7, 256
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
CPT = ("cpt", "cpt, quick dropout", "cpt, bf16", "cpt, bf16, quick dropout")
# What a subject computes in; the others in 32-true.
IN = {name: "bf16-mixed" for name in CPT if "bf16" in name}
COARSE = ("trainer.precision=bf16-mixed", "trainer.attn_implementation=eager")
WAYS: dict[str, tuple[str, ...]] = {
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
REST = "copies, sums, casts"


def median_of(work: Callable[[], Any]) -> float:
    """Seconds that some work takes; the first time is not counted."""
    durations = []
    for _ in range(REPEATS + 1):
        start_time = time.perf_counter()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start_time)
    return statistics.median(durations[1:])


def peak_of(dtype: torch.dtype, *, side: int = SIDE, device: str = "cpu") -> float:
    """Operations per second of a large matrix product."""
    first_matrix, second_matrix = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_of(lambda: first_matrix @ second_matrix)


def bandwidth(*, device: str = "cpu") -> float:
    """Bytes per second that are read and written when memory is copied."""
    source = torch.zeros(MEGABYTES * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_of(lambda: target.copy_(source))


def operations(course: Course) -> int:
    """Floating-point operations of a step, forward and backward."""
    workload = course.ground()
    batch = next(iter(workload.loader()))
    with OperationCounter() as counter:
        workload.module.losses(batch)["lm"].backward()
    return counter.total


class Profiled(Callback):
    """Has torch note what a step's time is spent on, behind some first steps."""

    def __init__(self, *, first: int) -> None:
        self.first, self.steps, self.began, self.wall = first, 0, 0.0, 0.0
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        if self.steps == self.first:
            self.profile.__enter__()
            self.began = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self.wall = time.perf_counter() - self.began
        self.profile.__exit__(None, None, None)


class Clocked(Callback):
    """Seconds that each part of a model takes forward, and what Lightning's profiler has at the end."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(FORWARD, 0.0)
        self.inside, self.since, self.loss, self.lightning = 0, 0.0, 0.0, {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for name, part in module.model.named_modules():
            phase = next(
                (forward_part for forward_part, names in FORWARD.items() if name.split(".")[-1] in names),
                None,
            )
            blocks = isinstance(part, torch.nn.ModuleList)  # they, and what has them, are called like parts
            blocks |= any(isinstance(child, torch.nn.ModuleList) for child in part.children())
            if phase is not None and not blocks:
                part.register_forward_pre_hook(self.enter)
                part.register_forward_hook(partial(self.leave, phase))

    def enter(self, *hook_arguments: Any) -> None:
        if not self.inside:
            self.since = time.perf_counter()
        self.inside += 1

    def leave(self, phase: str, *hook_arguments: Any) -> None:
        self.inside -= 1
        if not self.inside:
            current_time = time.perf_counter()
            self.seconds[phase] += current_time - self.since
            self.since = current_time

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.loss += time.perf_counter() - self.since  # the head was the last part

    def on_train_end(self, trainer: Any, module: Any) -> None:
        durations = trainer.profiler.recorded_durations
        for phase, key in LIGHTNING.items():
            self.lightning[phase] = sum(
                sum(seconds) for name, seconds in durations.items() if name.endswith(key)
            )


def phases(course: Course, *overrides: str) -> dict[str, float]:
    """The share of each phase in the time of cpt's steps, by the clock; `logging, loop` is what Lightning
    spends between them."""
    workload, clock = course.ground("+trainer.profiler=simple", *overrides), Clocked()
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[clock])
    data, forward, backward, stepping, total_seconds = (clock.lightning[name] for name in LIGHTNING)
    seconds = {"data": data, **clock.seconds, "loss": clock.loss}
    seconds["rest of the forward pass"] = forward - sum(clock.seconds.values()) - clock.loss
    seconds |= {"backward": backward, "optimizer, clipping": stepping - forward - backward}
    seconds["logging, loop"] = total_seconds - data - stepping
    return {phase: phase_seconds / total_seconds for phase, phase_seconds in seconds.items()}


def kinds(course: Course, *overrides: str) -> dict[str, float]:
    """The share of each kind of operation in the time of cpt's steps; what no operation of torch takes is
    Python's."""
    workload, profiled = course.ground(*overrides), Profiled(first=5)
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[profiled])
    seconds = dict.fromkeys([*OPERATIONS, REST], 0.0)
    for event in profiled.profile.key_averages():
        name = event.key
        if not name.startswith(("aten::", "enumerate(")):
            continue
        kind = next(
            (
                operation_kind
                for operation_kind, keys in OPERATIONS.items()
                if any(key in name for key in keys)
            ),
            REST,
        )
        seconds[kind] += event.self_cpu_time_total / 1e6
    seconds["Python, Lightning"] = max(0.0, profiled.wall - sum(seconds.values()))
    return {kind: kind_seconds / profiled.wall for kind, kind_seconds in seconds.items()}


def shown(results: Mapping[str, Any]) -> str:
    lines = [f"a step: {results['operations'] / 1e9:.1f} G operations"]
    lines.append(f"memory is copied at {results['bandwidth'] / 1e9:.1f} GB/s")
    lines += [f"matrix products, {name}: {each / 1e9:.0f} G/s" for name, each in results["peak"].items()]
    lines += [
        f"{name:26}{each['seconds'] * 1e3:8.1f} ms {each['share']:6.1%} of the limit in {each['precision']}"
        for name, each in results["subjects"].items()
    ]
    for split in ("phases", "operations_by_kind"):
        for precision, shares in results[split].items():
            lines.append(
                f"{precision}: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
            )
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = arguments(__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=7, help="chunks per subject")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    prepare(chosen.threads)
    shared = {name: getattr(chosen, name) for name in ("cache", "threads", "batch", "length", "shape")}
    course = Course(**shared, rounds=chosen.repeats, chunk=chosen.steps, fused=True, equal=False)
    count = operations(course)
    subjects = {name: partial(SUBJECTS[name], course) for name in (*CPT, "bare", "hf")}
    run = played(subjects, course, patience=chosen.patience)
    wall = times(run["chunks"], list(range(chosen.repeats)), "wall")
    torch.set_num_threads(chosen.threads)
    peaks = {name: peak_of(dtype) for name, dtype in DTYPES.items()}
    seconds = {name: statistics.median(each) / chosen.steps for name, each in wall.items()}
    results = {
        "options": {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")},
        "operations": count,
        "bandwidth": bandwidth(),
        "peak": peaks,
        "subjects": {
            name: {
                "seconds": each,
                "precision": IN.get(name, "32-true"),
                "share": count / each / peaks[IN.get(name, "32-true")],
            }
            for name, each in seconds.items()
        },
        "phases": {name: phases(course, *overrides) for name, overrides in WAYS.items()},
        "operations_by_kind": {name: kinds(course, *overrides) for name, overrides in WAYS.items()},
        "load": run["load"],
    }
    print(shown(results))
    save("limit", results, out=chosen.out)


if __name__ == "__main__":
    main()
