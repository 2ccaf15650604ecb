"""How near a training step comes to what the processor can do: its operations over those that large matrix
products reach in the same time, in 32 and in 16 bits, of cpt, the Hugging Face Trainer and a bare loop.

    python benchmarks/limit.py

Beside it: what share of cpt's step is spent on what, and the memory's bandwidth."""

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

from cpt.training.costs import count_operations

SIDE, REPEATS, MEGABYTES = 2048, 7, 256
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
IN = {"cpt, bf16": "bf16-mixed"}  # what a subject computes in; the others in 32-true
COARSE = ("trainer.precision=bf16-mixed", "trainer.attention=eager")
PHASES = {  # by the operations of torch; the first that fits
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
    taken = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def peak_of(dtype: torch.dtype, *, side: int = SIDE, device: str = "cpu") -> float:
    """Operations per second of a large matrix product."""
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_of(lambda: one @ other)


def bandwidth(*, device: str = "cpu") -> float:
    """Bytes per second that are read and written when memory is copied."""
    source = torch.zeros(MEGABYTES * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_of(lambda: target.copy_(source))


def operations(course: Course) -> int:
    """Floating-point operations of a step, forward and backward."""
    place = course.ground()
    batch = next(iter(place.loader()))
    with count_operations() as counter:
        place.module.losses(batch)["lm"].backward()
    return int(counter.get_total_flops())


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


def phases(course: Course, *overrides: str) -> dict[str, float]:
    """The share of each phase in the time of cpt's steps; what no operation of torch takes is Python's."""
    place, watched = course.ground(*overrides), Profiled(first=5)
    fit(place, place.data.domain, steps=place.steps, callbacks=[watched])
    seconds = dict.fromkeys([*PHASES, REST], 0.0)
    for event in watched.profile.key_averages():
        name = event.key
        if not name.startswith(("aten::", "enumerate(")):
            continue
        phase = next((each for each, keys in PHASES.items() if any(key in name for key in keys)), REST)
        seconds[phase] += event.self_cpu_time_total / 1e6
    seconds["Python, Lightning"] = max(0.0, watched.wall - sum(seconds.values()))
    return {phase: taken / watched.wall for phase, taken in seconds.items()}


def shown(results: Mapping[str, Any]) -> str:
    lines = [f"a step: {results['operations'] / 1e9:.1f} G operations"]
    lines.append(f"memory is copied at {results['bandwidth'] / 1e9:.1f} GB/s")
    lines += [f"matrix products, {name}: {each / 1e9:.0f} G/s" for name, each in results["peak"].items()]
    lines += [
        f"{name:10}{each['seconds'] * 1e3:8.1f} ms {each['share']:6.1%} of the limit in {each['precision']}"
        for name, each in results["subjects"].items()
    ]
    for precision, found in results["phases"].items():
        lines.append(f"{precision}: " + ", ".join(f"{phase} {share:.1%}" for phase, share in found.items()))
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
    subjects = {name: partial(SUBJECTS[name], course) for name in ("cpt", "cpt, bf16", "bare", "hf")}
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
        "phases": {"32-true": phases(course), "bf16-mixed": phases(course, *COARSE)},
        "load": run["load"],
    }
    print(shown(results))
    save("limit", results, out=chosen.out)


if __name__ == "__main__":
    main()
