"""One GPU, in 8 minutes: how near to it a step comes, rung by rung, beside the Hugging Face Trainer; and
every method's step over that of `ncl`.

    python benchmarks/gpu.py            # --dry: the same on a processor, at toy size, to see that it runs

Weights are random, of the published sizes; nothing is fetched. Subjects are processes that take turns. A part
that fails, or for which no time is left, is told, and the others stand."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ground import arguments
from ladder import COARSE, Lane, Size, climb, describe, operations, rungs
from limit import bandwidth, peak_of
from measuring import machine, paired, save
from memory import OBJECTIVES, make_model
from methods import NCL, Sequel, group_figures, groups, perform, subjects
from stage import played, prepare

PACKINGS = ("none", "document_mask")
TOY = {  # of --dry
    "masked": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "causal": {"n_embd": 64, "n_layer": 2, "n_head": 2},
}
UNITS = {"cuda": {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}, "cpu": {"32-true": torch.float32}}
SIDE = {"cuda": 8192, "cpu": 256}
AT_LEAST = 45.0  # seconds that a part is begun with
ROW = "{:30}{:>9}{:>9}{:>9}{:>11}{:>8}{:>8}{:>9}  {}"


SIZES = {
    "RoBERTa-base, 128": Size("roberta", 128, 128),
    "RoBERTa-base, 512": Size("roberta", 512, 32),
    "GPT-2 124M, 1024": Size("gpt2", 1024, 16),
    "GPT-2 355M, 1024": Size("gpt2_medium", 1024, 8, trainers=("Trainer, bf16",)),
}
METHODS, PACKED = "methods, RoBERTa-base, 128", "packing, GPT-2 124M"


def measure_ladder(name: str, stage: "Stage") -> Iterator[dict[str, Any]]:
    """Every rung of a size: tokens/s, shares of the peak, memory, seconds of a step."""
    lane = stage.lane(SIZES[name])
    counts = {"executed": operations(lane, dense=False), "dense": operations(lane, dense=True)}
    run = played(rungs(lane), lane, patience=0.0)
    yield {
        "operations": counts,
        "subjects": {
            subject: describe(subject, run, lane=lane, counts=counts, peaks=stage.peaks)
            for subject in run["chunks"]
        },
        "chunks": run["chunks"],
    }


def measure_packing(stage: "Stage") -> Iterator[dict[str, Any]]:
    """Steps of the same examples, padded to the longest and sharing rows."""
    lane = stage.lane(Size("gpt2", 512, 64))
    common_overrides = ("domains=tasks", "domains/template=o_lora", "method=joint", COARSE)
    work = {
        name: partial(climb, lane=lane, overrides=[*common_overrides, f"domains.packing={name}"], dense=False)
        for name in PACKINGS
    }
    run = played(work, lane, patience=0.0)
    walls = [[chunk["wall"] for chunk in run["chunks"][name]] for name in PACKINGS]
    yield {
        "isolated_over_none": paired(*reversed(walls)),
        "reports": {
            name: report | {"losses": report["losses"][-1]} for name, report in run["reports"].items()
        },
        "chunks": run["chunks"],
    }


def measure_methods(stage: "Stage", names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every method's step over that of ncl, in groups of processes: what is found after each of them."""
    lane = stage.lane(Size("roberta", 128, 32))
    shape = (
        *lane.given(),
        "trainer.num_workers=2",
        "order=[sympy,networkx]",
        f"trainer.importance_samples={lane.batch}",
        COARSE,
    )
    course = Sequel(**stage.rhythm, cache=lane.cache, first=4, shape=shape, model="given")
    work = {
        name: partial(perform, course=course, overrides=subjects()[name], dense=False)
        for name in [NCL, *(method for method in names if method != NCL)]
    }
    results: dict[str, Any] = {"subjects": {}, "failed": {}}
    for group in groups(list(work), together=stage.together):
        stage.check_time()
        try:
            run = played({name: work[name] for name in group}, course, patience=0.0)
        except RuntimeError as error:
            results["failed"][", ".join(group)] = str(error)[-2000:]
        else:
            figures = group_figures(run, chunk=course.chunk)
            results["subjects"] = figures | results["subjects"]
        yield results


@dataclass(frozen=True)
class Stage:
    """What all parts share: the device, its peaks, the chunks, the time that there is."""

    device: str
    cache: str
    rhythm: Mapping[str, Any]
    together: int
    until: float
    dry: bool
    peaks: Mapping[str, float]

    def lane(self, size: Size) -> Lane:
        changes = TOY[OBJECTIVES[size.model]] if self.dry else {}
        size = Size(size.model, 128, 4, size.trainers) if self.dry else size
        folder = str(make_model(size.model, Path(self.cache), **changes))
        return Lane(**self.rhythm, cache=self.cache, size=size, folder=folder)

    def check_time(self) -> None:
        """Raises TimeoutError where too little is left."""
        if (remaining_seconds := self.until - time.monotonic()) < AT_LEAST:
            raise TimeoutError(
                f"{remaining_seconds:.0f} s were left; a part begins with {AT_LEAST:.0f} or more (--minutes)"
            )


def perform_parts(stage: Stage, chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of every part as far as they are there, and why there are no more."""
    parts = {name: partial(measure_ladder, name) for name in SIZES}
    parts |= {METHODS: partial(measure_methods, names=chosen.methods), PACKED: measure_packing}
    for name in chosen.parts:
        start_time, results = time.monotonic(), {}
        try:
            stage.check_time()
            for results in parts[name](stage):
                yield name, results | {"seconds": time.monotonic() - start_time}
        except (RuntimeError, TimeoutError, ValueError) as error:
            yield name, results | {"failed": str(error)[-3000:], "seconds": time.monotonic() - start_time}


def shown(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}: {results['seconds']:.0f} s"
    if results.get("failed"):
        yield f"failed: {results['failed']}"
    if "isolated_over_none" in results:
        yield "isolated over none: {median:.3f} [{low:.3f}, {high:.3f}]".format(
            **results["isolated_over_none"]
        )
    for subject, figures in results.get("subjects", {}).items():
        ratio = figures.get("faster_than_first") or figures["over_ncl"]
        numbers = [
            f"{1000 * figures['step_s']:.1f}",
            *(f"{1000 * figures[key]:.1f}" if key in figures else "" for key in ("p50_s", "p95_s")),
            f"{figures['tokens_per_s']:,.0f}" if "tokens_per_s" in figures else "",
            *(
                f"{figures[key]:.3f}" if key in figures else ""
                for key in ("mfu_executed", "mfu_dense_equivalent")
            ),
            f"{figures.get('peak_device', 0) / 2**30:.2f}",
        ]
        yield ROW.format(subject, *numbers, "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio))


def options() -> argparse.Namespace:
    parser = arguments(__doc__.split("\n\n")[0])
    parts = [*SIZES, METHODS, PACKED]
    methods = [
        method for method in subjects() if "," not in method and "+" not in method
    ]  # no variants of them
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no part is begun")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=3, help="chunks per subject")
    parser.add_argument("--together", type=int, default=13, help="processes at once, 3 or more")
    parser.add_argument(
        "--dry", action="store_true", help="on a processor, at toy size; writes to --out alone"
    )
    return parser.parse_args()


def main() -> None:
    chosen = options()
    start_time = time.monotonic()
    if not chosen.dry and not torch.cuda.is_available():
        sys.exit("there is no GPU; allowed: --dry, which tries the same on a processor at toy size")
    device = "cpu" if chosen.dry else "cuda"
    prepare(chosen.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    peaks = {name: peak_of(dtype, side=SIDE[device], device=device) for name, dtype in UNITS[device].items()}
    rhythm = {"threads": chosen.threads, "rounds": chosen.repeats, "chunk": chosen.steps, "device": device}
    stage = Stage(
        device, chosen.cache, rhythm, chosen.together, start_time + 60 * chosen.minutes, chosen.dry, peaks
    )
    results: dict[str, Any] = {
        "options": {"steps": chosen.steps, "repeats": chosen.repeats, "dry": chosen.dry}
    }
    results |= {"gpu": name_device(device), "peak": peaks, "bandwidth": bandwidth(device=device), "parts": {}}
    print({name: value for name, value in results.items() if name != "parts"}, machine()["versions"])
    for name, part_results in perform_parts(stage, chosen):
        print("\n".join(shown(name, part_results)), flush=True)
        results["parts"][name] = part_results
        if chosen.out or not chosen.dry:
            save("gpu", results, out=chosen.out)


def name_device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "none: a dry run"


if __name__ == "__main__":
    main()
