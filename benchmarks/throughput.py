"""Training tokens/s of cpt (NCL, masked language model) against the Hugging Face Trainer and bare PyTorch.

Every subject is a process of its own that waits between chunks of steps, so that the subjects take turns on
the same cores: A B C D, B C D A, ... The whole cast is started anew several times, because ratios drift
by a percent or two within and between runs. All have the same weights, rows, optimizer,
schedule and clipping; a first, untimed pass without dropout on identical batches shows that they do the same
work."""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from ground import SHAPES, arguments
from measuring import paired, save, spread
from stage import Chunks, joined, played, prepare, times, undisturbed
from subjects import SUBJECTS, USUAL, Course


def play(course: Course, names: list[str], *, patience: float) -> dict[str, Any]:
    """One cast of subjects on a course."""
    return played({name: partial(SUBJECTS[name], course) for name in names}, course, patience=patience)


def equality(steps: dict[str, Any]) -> dict[str, Any]:
    """How far each subject's losses are from cpt's, at the first step and at most; scored tokens."""
    ours = steps["cpt"]["losses"]

    def distance(name: str) -> dict[str, Any]:
        differences = [abs(a - b) for a, b in zip(ours, steps[name]["losses"], strict=True)]
        has_same_scored = steps[name]["scored"] == steps["cpt"]["scored"]
        return {
            "first": differences[0],
            "most": max(differences),
            "scored": sum(steps[name]["scored"]),
            "same_scored": has_same_scored,
        }

    return {"loss": [ours[0], ours[-1]], "distance": {name: distance(name) for name in steps}}


def timed(chunks: Chunks, rounds: list[int], *, tokens: int, ours: str) -> dict[str, Any]:
    """Tokens/s, and how much faster cpt is by wall and by processor time, over some of the rounds."""
    wall, cpu = (times(chunks, rounds, kind) for kind in ("wall", "cpu"))
    compared_names = [name for name in chunks if name != ours]
    return {
        "rounds": rounds,
        "tokens_per_s": {name: tokens / statistics.median(durations) for name, durations in wall.items()},
        "cpt_over": {name: paired(wall[ours], wall[name]) for name in compared_names},
        "cpt_over_by_cpu_time": {name: paired(cpu[ours], cpu[name]) for name in compared_names},
        "foreign_cores": spread(sum(times(chunks, rounds, "foreign_cores").values(), [])),
    }


def medians(chunks: Chunks, rounds: list[int], *, ours: str) -> dict[str, float]:
    """Median ratios of one cast's rounds."""
    wall = times(chunks, rounds, "wall")
    return {name: paired(wall[ours], durations)["median"] for name, durations in wall.items() if name != ours}


def summary(run: dict[str, Any], course: Course, *, ours: str = "cpt") -> dict[str, Any]:
    """The figures of the undisturbed rounds and of all, losses and scored tokens; ratios to `ours`."""
    chunks = run["chunks"]
    how: dict[str, Any] = {"tokens": course.chunk * course.batch * course.length, "ours": ours}
    return {
        **timed(chunks, undisturbed(chunks), **how),
        "of_all_rounds": timed(chunks, list(range(len(run["load"]))), **how),
        "by_cast": [
            medians(chunks, list(range(start, start + course.rounds)), ours=ours)
            for start in range(0, len(run["load"]), course.rounds)
        ],
        "scored_tokens": {name: sum(steps["scored"]) for name, steps in run["reports"].items()},
        "mean_loss": {name: statistics.mean(steps["losses"]) for name, steps in run["reports"].items()},
        "load": run["load"],
    }


def shown(results: dict[str, Any]) -> str:
    lines = [f"{'subject':22}{'tokens/s':>10}{'scored':>9}{'mean loss':>11}   cpt is faster by"]
    for name, speed in results["tokens_per_s"].items():
        ratio = results["cpt_over"].get(name)
        times = "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio) if ratio else ""
        work = f"{results['scored_tokens'][name]:9}{results['mean_loss'][name]:11.4f}"
        lines.append(f"{name:22}{speed:10.0f}{work}   {times}")
    for name, distance in results["equal_work"]["distance"].items():
        lines.append(f"equal work, {name}: {distance}")
    num_rounds, load = len(results["rounds"]), spread(results["load"])
    lines.append(f"of {num_rounds} of {len(results['load'])} rounds; load average {load}")
    lines += [
        f"cast {number}: {cast_ratios}" for number, cast_ratios in enumerate(results["by_cast"], start=1)
    ]
    lines.append(f"cores that others used meanwhile {results['foreign_cores']}")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = arguments("Training tokens/s of cpt, the Hugging Face Trainer and bare PyTorch loops.")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=8, help="chunks per subject and cast")
    parser.add_argument("--casts", type=int, default=3, help="times that all subjects are started anew")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--check-steps", type=int, default=25, help="steps of the equal-work check")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="roberta", help="masked, spans of T5, causal"
    )
    parser.add_argument("--model", help="a checkpoint instead of --shape; a missing head is random")
    parser.add_argument("--config", nargs="+", default=[], help="changes to the config of all subjects")
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=USUAL)
    parser.add_argument("--fused", action="store_true", help="fused AdamW on all sides")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    prepare(chosen.threads)
    names = ["cpt", *(name for name in chosen.subjects if name != "cpt")]
    shared = {name: getattr(chosen, name) for name in ("cache", "threads", "batch", "length", "fused")}
    shared |= {"shape": chosen.shape, "config": tuple(chosen.config)}
    if chosen.model is not None:
        overrides = ("model=hf", f"model.name_or_path={chosen.model}", "model.pretraining.head_steps=0")
        shared |= {"shape": "given", "config": (*overrides, *chosen.config)}
        chosen.model = Path(chosen.model).name
    course = Course(**shared, rounds=chosen.repeats, chunk=chosen.steps, equal=False)
    check = Course(**shared, rounds=1, chunk=chosen.check_steps, equal=True)
    for prepared_course in (course, check):
        prepared_course.ground()  # fills the cache
    compared_names = [name for name in names if name in USUAL]
    equal = equality(play(check, compared_names, patience=0.0)["reports"])
    run = joined([play(course, names, patience=chosen.patience) for _ in range(chosen.casts)])
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")}
    results = {"options": settings, "equal_work": equal, **summary(run, course), "chunks": run["chunks"]}
    print(shown(results))
    save("throughput" if chosen.shape == "roberta" else f"throughput_{chosen.shape}", results, out=chosen.out)


if __name__ == "__main__":
    main()
