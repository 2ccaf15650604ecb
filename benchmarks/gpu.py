"""One GPU, in 8 minutes: how near to it a step comes, rung by rung, beside the Hugging Face Trainer; and
every method's step over that of `ncl`.

    python benchmarks/gpu.py            # --dry: the same on a processor, at toy size, to see that it runs

Weights are random, of the published sizes; nothing is fetched. Subjects are processes that take turns. A part
that fails, or for which no time is left, is told, and the others stand."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ground import Ground, accelerator, arguments, ground
from limit import bandwidth, peak_of
from measuring import machine, paired, save
from memory import CHOICES, OBJECTIVES, make_model
from methods import NCL, Sequel, dense_losses, group_figures, groups, perform, subjects
from stage import Beat, Rhythm, Subject, played, prepare
from subjects import Pulse, fit, hf

from cpt.training.costs import count_operations

COARSE, PLAIN = "trainer.precision=bf16-mixed", "trainer.precision=32-true"
LOOSE, FUSED, COMPILED = "optim.fused=false", "optim.fused=true", "trainer.compile=true"
FIRST, FULL = "32-true", "+ fused AdamW"
RUNGS = {FIRST: [PLAIN, LOOSE], "bf16-mixed": [COARSE, LOOSE], "+ compile": [COARSE, COMPILED, LOOSE],
         FULL: [COARSE, COMPILED, FUSED]}  # fmt: skip
SPARSE = "+ head at the scored places"
HF = {"Trainer": False, "Trainer, bf16": True}
PACKINGS = ("none", "isolated")
TOY = {  # of --dry
    "masked": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "causal": {"n_embd": 64, "n_layer": 2, "n_head": 2},
}
UNITS = {"cuda": {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}, "cpu": {"32-true": torch.float32}}
SIDE = {"cuda": 8192, "cpu": 256}
AT_LEAST = 45.0  # seconds that a part is begun with
ROW = "{:30}{:>9}{:>9}{:>9}{:>11}{:>8}{:>8}{:>9}  {}"


@dataclass(frozen=True)
class Size:
    """A model of memory.SIZES, and what it reads in a step; both subjects of the Trainer where there is
    memory for them."""

    model: str
    length: int
    batch: int
    trainers: Sequence[str] = tuple(HF)


SIZES = {
    "RoBERTa-base, 128": Size("roberta", 128, 128),
    "RoBERTa-base, 512": Size("roberta", 512, 32),
    "GPT-2 124M, 1024": Size("gpt2", 1024, 16),
    "GPT-2 355M, 1024": Size("gpt2_medium", 1024, 8, trainers=("Trainer, bf16",)),
}
METHODS, PACKED = "methods, RoBERTa-base, 128", "packing, GPT-2 124M"


@dataclass(frozen=True)
class Lane(Rhythm):
    """What the subjects of one size run."""

    cache: str
    size: Size
    folder: str
    equal: bool = False  # as of the courses that subjects.hf knows
    shape: str = "given"

    @property
    def batch(self) -> int:
        return self.size.batch

    def ground(self, *overrides: str) -> Ground:
        return ground(self.cache, *self.given(), *overrides, shape="given")

    def given(self) -> Iterator[str]:
        yield from (f"model={CHOICES[self.size.model]}", f"model.checkpoint={self.folder}")
        yield from (f"model.length={self.size.length}", f"trainer.batch_size={self.size.batch}")
        yield from (f"trainer.steps={self.steps}", accelerator(self.device))


def climb(beat: Beat, *, lane: Lane, overrides: Sequence[str], dense: bool) -> dict[str, int]:
    """A rung: the training of `python run.py method=ncl`; gives the bytes that it needs on the device."""
    place = lane.ground(*overrides)
    if dense:
        place.module.losses = partial(dense_losses, place.module)
    beat.enter()
    fit(place, place.data.domain, steps=place.steps, callbacks=[Pulse(beat)])
    return held()


def ride(beat: Beat, *, lane: Lane, bf16: bool) -> dict[str, int]:
    """The same by the Hugging Face Trainer."""
    hf(lane, beat, bf16=bf16)
    return held()


def held() -> dict[str, int]:
    return {"peak_device": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0}


def rungs(lane: Lane) -> dict[str, Subject]:
    """The subjects of a size."""
    masked = OBJECTIVES[lane.size.model] == "masked"
    ladder = {name: partial(climb, lane=lane, overrides=each, dense=masked) for name, each in RUNGS.items()}
    if masked:  # of a causal model every place is scored
        ladder[SPARSE] = partial(climb, lane=lane, overrides=RUNGS[FULL], dense=False)
    return ladder | {name: partial(ride, lane=lane, bf16=HF[name]) for name in lane.size.trainers}


def operations(lane: Lane, *, dense: bool) -> int:
    """Operations of a step, forward and backward, counted on one sample."""
    place = lane.ground("trainer.batch_size=1", "trainer.accelerator=cpu")
    batch = next(iter(place.loader()))
    losses = partial(dense_losses, place.module) if dense else place.module.losses
    with count_operations() as counter:
        losses(batch)["lm"].backward()
    return int(counter.get_total_flops()) * lane.batch


def measure_ladder(name: str, stage: "Stage") -> dict[str, Any]:
    """Every rung of a size: tokens/s, shares of the peak, memory, seconds of a step."""
    lane = stage.lane(SIZES[name])
    counts = {"executed": operations(lane, dense=False), "dense": operations(lane, dense=True)}
    run = played(rungs(lane), lane, patience=0.0)
    return {
        "operations": counts,
        "subjects": {
            each: describe(each, run, lane=lane, counts=counts, peaks=stage.peaks) for each in run["chunks"]
        },
        "chunks": run["chunks"],
    }


def describe(
    name: str, run: Mapping[str, Any], *, lane: Lane, counts: Mapping[str, int], peaks: Mapping[str, float]
) -> dict[str, Any]:
    chunks, report = run["chunks"], run["reports"][name]
    steps = [step for chunk in chunks[name] for step in chunk["steps"]]
    wall = statistics.median(chunk["wall"] for chunk in chunks[name]) / lane.chunk
    done = counts["executed" if name == SPARSE or OBJECTIVES[lane.size.model] == "causal" else "dense"]
    best = peaks.get("bf16-mixed", peaks["32-true"])
    firsts, ours = ([chunk["wall"] for chunk in chunks[each]] for each in (FIRST, name))
    return {
        "step_s": wall,
        "p50_s": float(np.percentile(steps, 50)),
        "p95_s": float(np.percentile(steps, 95)),
        "tokens_per_s": lane.batch * lane.size.length / wall,
        "mfu_executed": done / wall / best,
        "mfu_dense_equivalent": counts["dense"] / wall / best,
        "faster_than_first": paired(ours, firsts),
        "peak_device": report["peak_device"],
        "scored_tokens": sum(report["scored"]),
        "mean_loss": statistics.mean(report["losses"]),
    }


def measure_packing(stage: "Stage") -> dict[str, Any]:
    """Steps of the same examples, padded to the longest and sharing rows."""
    lane = stage.lane(Size("gpt2", 512, 64))
    how = ("domains=tasks", "domains/template=o_lora", "method=joint", COARSE)
    work = {
        name: partial(climb, lane=lane, overrides=[*how, f"domains.packing={name}"], dense=False)
        for name in PACKINGS
    }
    run = played(work, lane, patience=0.0)
    walls = [[chunk["wall"] for chunk in run["chunks"][name]] for name in PACKINGS]
    return {
        "isolated_over_none": paired(*reversed(walls)),
        "reports": {
            name: report | {"losses": report["losses"][-1]} for name, report in run["reports"].items()
        },
        "chunks": run["chunks"],
    }


def measure_methods(stage: "Stage", names: Sequence[str]) -> dict[str, Any]:
    """Every method's step over that of ncl, in groups of processes."""
    lane = stage.lane(Size("roberta", 128, 32))
    shape = (*lane.given(), "order=[sympy,networkx]", f"trainer.probe_samples={lane.batch}", COARSE)
    course = Sequel(**stage.rhythm, cache=lane.cache, first=4, shape=shape, model="given")
    work = {
        name: partial(perform, course=course, overrides=subjects()[name], dense=False)
        for name in [NCL, *(each for each in names if each != NCL)]
    }
    found: dict[str, Any] = {"subjects": {}, "failed": {}}
    for group in groups(list(work), together=stage.together):
        stage.check_time()
        try:
            run = played({name: work[name] for name in group}, course, patience=0.0)
        except RuntimeError as error:
            found["failed"][", ".join(group)] = str(error)[-2000:]
            continue
        figures = group_figures(run, chunk=course.chunk)
        found["subjects"] |= {name: each for name, each in figures.items() if name not in found["subjects"]}
    return found


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
        if (left := self.until - time.monotonic()) < AT_LEAST:
            raise TimeoutError(
                f"{left:.0f} s were left; a part begins with {AT_LEAST:.0f} or more (--minutes)"
            )


def perform_parts(stage: Stage, chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of every part, or why there are none."""
    parts = {name: partial(measure_ladder, name) for name in SIZES}
    parts |= {METHODS: partial(measure_methods, names=chosen.methods), PACKED: measure_packing}
    for name in chosen.parts:
        began = time.monotonic()
        try:
            stage.check_time()
            found = parts[name](stage)
        except (RuntimeError, TimeoutError, ValueError) as error:
            found = {"failed": str(error)[-3000:]}
        yield name, found | {"seconds": time.monotonic() - began}


def shown(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}: {found['seconds']:.0f} s"
    if found.get("failed"):
        yield f"failed: {found['failed']}"
    if "isolated_over_none" in found:
        yield "isolated over none: {median:.3f} [{low:.3f}, {high:.3f}]".format(**found["isolated_over_none"])
    for subject, each in found.get("subjects", {}).items():
        ratio = each.get("faster_than_first") or each["over_ncl"]
        numbers = [
            f"{1000 * each['step_s']:.1f}",
            *(f"{1000 * each[key]:.1f}" if key in each else "" for key in ("p50_s", "p95_s")),
            f"{each['tokens_per_s']:,.0f}" if "tokens_per_s" in each else "",
            *(f"{each[key]:.3f}" if key in each else "" for key in ("mfu_executed", "mfu_dense_equivalent")),
            f"{each.get('peak_device', 0) / 2**30:.2f}",
        ]
        yield ROW.format(subject, *numbers, "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio))


def options() -> argparse.Namespace:
    parser = arguments(__doc__.split("\n\n")[0])
    parts, methods = (
        [*SIZES, METHODS, PACKED],
        [each for each in subjects() if "," not in each and "+" not in each],
    )
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
    began = time.monotonic()
    if not chosen.dry and not torch.cuda.is_available():
        sys.exit("there is no GPU; allowed: --dry, which tries the same on a processor at toy size")
    device = "cpu" if chosen.dry else "cuda"
    prepare(chosen.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    peaks = {name: peak_of(dtype, side=SIDE[device], device=device) for name, dtype in UNITS[device].items()}
    rhythm = {"threads": chosen.threads, "rounds": chosen.repeats, "chunk": chosen.steps, "device": device}
    stage = Stage(
        device, chosen.cache, rhythm, chosen.together, began + 60 * chosen.minutes, chosen.dry, peaks
    )
    results: dict[str, Any] = {
        "options": {"steps": chosen.steps, "repeats": chosen.repeats, "dry": chosen.dry}
    }
    results |= {"gpu": name_device(device), "peak": peaks, "bandwidth": bandwidth(device=device), "parts": {}}
    print({name: each for name, each in results.items() if name != "parts"}, machine()["versions"])
    for name, found in perform_parts(stage, chosen):
        print("\n".join(shown(name, found)), flush=True)
        results["parts"][name] = found
        if chosen.out or not chosen.dry:
            save("gpu", results, out=chosen.out)


def name_device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "none: a dry run"


if __name__ == "__main__":
    main()
