"""One GPU, in 8 minutes: how near to it a step comes, rung by rung, beside the Hugging Face Trainer; and
every method's step over that of `ncl`.

    python benchmarks/gpu.py            # --dry: the same on a CPU, at toy size, to see that it runs

Weights are random, of the published sizes; nothing is fetched. Subjects are processes that take turns. A part
that fails, or for which no time is left, is told, and the others stand."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.ground import make_parser
from common.ladder import (
    BF16,
    DECODER_RUNGS,
    LORA_RUNGS,
    Size,
    SizeSetup,
    count_operations,
    describe_subject,
    list_rungs,
    train_rung,
)
from common.measuring import compare_times, describe_machine, save
from common.stage import TimingOptions, measure_rounds, prepare
from costs.limit import measure_bandwidth, measure_peak
from memory import make_model
from methods import NCL, TwoDomainSetup, compute_figures, divide_into_groups, list_subjects, measure_method

PACKINGS = ("none", "document_mask")
TOY_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TOY_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2}
TOY_DECODER = {**TOY_LAYERS, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 9000}
TOY = {  # of --dry, by the model
    "roberta": TOY_LAYERS,
    "gpt2": TOY_GPT2,
    "gpt2_medium": TOY_GPT2,
    "qwen3_0.6b": TOY_DECODER,
    "llama3_1b": TOY_DECODER,
    "llama3_8b": TOY_DECODER,
}
PEAK_DTYPES = {
    "cuda": {"32-true": torch.float32, "bf16-mixed": torch.bfloat16},
    "cpu": {"32-true": torch.float32},
}
MATRIX_SIDES = {"cuda": 8192, "cpu": 256}
MIN_PART_SECONDS = 45.0  # a part is only begun with so many seconds left
ROW = "{:30}{:>9}{:>9}{:>9}{:>11}{:>8}{:>8}{:>9}  {}"


TRAINERS = ("Trainer, bf16", "Trainer, bf16, compiled")  # with its best options, for larger models
LORA = ("method=lora", "trainer.gradient_checkpointing=true")
# What is asked first is measured first, as time may run out.
SIZES = {
    "GPT-2 124M, 1024": Size(
        model="gpt2", length=1024, batch=32, rungs=DECODER_RUNGS, trainers=TRAINERS, target=300_000
    ),
    "GPT-2 355M, 1024": Size(
        model="gpt2_medium", length=1024, batch=16, rungs=DECODER_RUNGS, trainers=TRAINERS, target=130_000
    ),
    "Qwen3 0.6B, 2048": Size(
        model="qwen3_0.6b", length=2048, batch=8, rungs=DECODER_RUNGS, trainers=TRAINERS, target=60_000
    ),
    "Llama 3.2 1B, 2048": Size(
        model="llama3_1b", length=2048, batch=8, rungs=DECODER_RUNGS, trainers=TRAINERS, target=35_000
    ),
    "Llama 3.1 8B, LoRA, 2048": Size(
        model="llama3_8b",
        length=2048,
        batch=4,
        overrides=LORA,
        rungs=LORA_RUNGS,
        trainers=("Trainer, bf16",),
        target=10_000,
    ),
    "RoBERTa-base, 128": Size(model="roberta", length=128, batch=128),
    "RoBERTa-base, 512": Size(model="roberta", length=512, batch=32),
}
METHODS = "methods, RoBERTa-base, 128"
PACKED = "packing, GPT-2 124M"


def measure_ladder(name: str, shared: "SharedSetup") -> Iterator[dict[str, Any]]:
    """Every rung of a size: tokens/s, shares of the peak, memory, seconds of a step."""
    setup = shared.make_setup(SIZES[name])
    counts = {"executed": count_operations(setup, dense=False), "dense": count_operations(setup, dense=True)}
    run = measure_rounds(list_rungs(setup), setup, patience=0.0)
    yield {
        "target_tokens_per_s": SIZES[name].target,
        "operations": counts,
        "subjects": {
            subject: describe_subject(subject, run, setup=setup, counts=counts, peaks=shared.peaks)
            for subject in run["chunks"]
        },
        "chunks": run["chunks"],
    }


def measure_packing(shared: "SharedSetup") -> Iterator[dict[str, Any]]:
    """Steps of the same examples, padded to the longest and sharing rows."""
    setup = shared.make_setup(Size(model="gpt2", length=512, batch=64))
    subjects = {}
    for name in PACKINGS:
        overrides = [
            "domains=tasks",
            "domains/template=o_lora",
            "method=joint",
            BF16,
            f"domains.packing={name}",
        ]
        subjects[name] = partial(train_rung, setup=setup, overrides=overrides, dense=False)
    run = measure_rounds(subjects, setup, patience=0.0)

    padded = [chunk["wall"] for chunk in run["chunks"]["none"]]
    isolated = [chunk["wall"] for chunk in run["chunks"]["document_mask"]]
    reports = {}
    for name, report in run["reports"].items():
        reports[name] = report | {"losses": report["losses"][-1]}
    yield {
        "isolated_over_none": compare_times(isolated, padded),
        "reports": reports,
        "chunks": run["chunks"],
    }


def measure_methods(shared: "SharedSetup", names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every method's step over that of ncl, in groups of processes: the results after each of them."""
    size_setup = shared.make_setup(Size(model="roberta", length=128, batch=32))
    setup = TwoDomainSetup(
        threads=shared.timing.threads,
        rounds=shared.timing.rounds,
        chunk=shared.timing.chunk,
        device=shared.timing.device,
        cache=size_setup.cache,
        first=4,
        shape=(
            *size_setup.overrides(),
            "trainer.num_workers=2",
            "order=[sympy,networkx]",
            f"trainer.importance_samples={size_setup.batch}",
            BF16,
        ),
        model="given",
    )
    overrides = list_subjects()
    subjects = {}
    for name in (NCL, *names):
        subjects[name] = partial(measure_method, setup=setup, overrides=overrides[name], dense=False)

    results: dict[str, Any] = {"subjects": {}, "failed": {}}
    for group in divide_into_groups(list(subjects), together=shared.together):
        shared.check_time()
        try:
            run = measure_rounds({name: subjects[name] for name in group}, setup, patience=0.0)
        except RuntimeError as error:
            results["failed"][", ".join(group)] = str(error)[-2000:]
        else:
            figures = compute_figures(run, chunk=setup.chunk)
            results["subjects"] = figures | results["subjects"]
        yield results


@dataclass(frozen=True)
class SharedSetup:
    """What all parts share: the chunks on the device, its peaks, the time that there is."""

    cache: str
    timing: TimingOptions
    together: int
    until: float
    dry: bool
    peaks: Mapping[str, float]

    def make_setup(self, size: Size) -> SizeSetup:
        """What the subjects of a size run; `dry`: a toy model of the same kind, on short rows."""
        if self.dry:
            folder = make_model(size.model, Path(self.cache), **TOY[size.model])
            size = replace(size, length=128, batch=4)
        else:
            folder = make_model(size.model, Path(self.cache))
        return SizeSetup(
            threads=self.timing.threads,
            rounds=self.timing.rounds,
            chunk=self.timing.chunk,
            device=self.timing.device,
            cache=self.cache,
            size=size,
            folder=str(folder),
        )

    def check_time(self) -> None:
        """Raises TimeoutError where too little is left."""
        remaining_seconds = self.until - time.monotonic()
        if remaining_seconds < MIN_PART_SECONDS:
            raise TimeoutError(
                f"{remaining_seconds:.0f} s were left; a part begins with {MIN_PART_SECONDS:.0f} or more "
                "(--minutes)"
            )


def perform_parts(shared: SharedSetup, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of every part as far as they are there, and why there are no more."""
    parts: dict[str, Any] = {name: partial(measure_ladder, name) for name in SIZES}
    parts[METHODS] = partial(measure_methods, names=options.methods)
    parts[PACKED] = measure_packing
    for name in options.parts:
        start_time = time.monotonic()
        results: dict[str, Any] = {}
        try:
            shared.check_time()
            for results in parts[name](shared):
                yield name, results | {"seconds": time.monotonic() - start_time}
        except (RuntimeError, TimeoutError, ValueError) as error:
            failure = {"failed": str(error)[-3000:], "seconds": time.monotonic() - start_time}
            yield name, results | failure


def format_part(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}: {results['seconds']:.0f} s"
    if results.get("failed"):
        yield f"failed: {results['failed']}"
    if results.get("target_tokens_per_s"):
        yield f"target: {results['target_tokens_per_s']:,} tokens/s"
    if "isolated_over_none" in results:
        yield "isolated over none: {median:.3f} [{low:.3f}, {high:.3f}]".format(
            **results["isolated_over_none"]
        )
    for subject, figures in results.get("subjects", {}).items():
        ratio = figures.get("faster_than_first") or figures["over_ncl"]
        yield ROW.format(
            subject,
            f"{1000 * figures['step_s']:.1f}",
            f"{1000 * figures['p50_s']:.1f}" if "p50_s" in figures else "",
            f"{1000 * figures['p95_s']:.1f}" if "p95_s" in figures else "",
            f"{figures['tokens_per_s']:,.0f}" if "tokens_per_s" in figures else "",
            f"{figures['mfu_executed']:.3f}" if "mfu_executed" in figures else "",
            f"{figures['mfu_dense_equivalent']:.3f}" if "mfu_dense_equivalent" in figures else "",
            f"{figures.get('peak_device', 0) / 2**30:.2f}",
            "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio),
        )


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__.split("\n\n")[0])
    parts = [*SIZES, METHODS, PACKED]
    methods = [
        method for method in list_subjects() if "," not in method and "+" not in method
    ]  # no variants of them
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no part is begun")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=3, help="chunks per subject")
    parser.add_argument("--together", type=int, default=13, help="processes at once, 3 or more")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at toy size; writes to --out alone")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    start_time = time.monotonic()
    if not options.dry and not torch.cuda.is_available():
        sys.exit("there is no GPU; allowed: --dry, which tries the same on a CPU at toy size")
    device = "cpu" if options.dry else "cuda"
    prepare(options.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    peaks = {}
    for name, dtype in PEAK_DTYPES[device].items():
        peaks[name] = measure_peak(dtype, side=MATRIX_SIDES[device], device=device)
    timing = TimingOptions(
        threads=options.threads, rounds=options.repeats, chunk=options.steps, device=device
    )
    shared = SharedSetup(
        cache=options.cache,
        timing=timing,
        together=options.together,
        until=start_time + 60 * options.minutes,
        dry=options.dry,
        peaks=peaks,
    )
    results: dict[str, Any] = {
        "options": {"steps": options.steps, "repeats": options.repeats, "dry": options.dry},
        "gpu": name_device(device),
        "peak": peaks,
        "bandwidth": measure_bandwidth(device=device),
    }
    print(results, describe_machine()["versions"])

    results["parts"] = {}
    for name, part_results in perform_parts(shared, options):
        print("\n".join(format_part(name, part_results)), flush=True)
        results["parts"][name] = part_results
        if options.out or not options.dry:
            save("gpu", results, out=options.out)


def name_device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "none: a dry run"


if __name__ == "__main__":
    main()
