"""Self-distillation against supervised training on four small tasks:
`python benchmarks/studies/self_distillation.py` writes docs/studies/self-distillation.md.

The tasks are those of `domains=tasks` without a folder: summaries from the documentation of installed
packages, to be assigned to a package or a module. Rerun the same command to resume."""

from collections.abc import Iterator
from pathlib import Path

import study

from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.sections import RunSection

EXPERIMENT = "self_distillation"
INSTALLED = Path("null")  # domains.root of tasks that need no folder
SWEEPS = (
    ["seed=0,1,2", "method=ncl"],
    ["seed=0,1,2", "method=sdft", "method.max_new_tokens=16"],
)
MEASURES = {
    "answers/AP": ("final accuracy, %", 1),
    "CPT/nats": ("just trained, nats", 3),
    "LC/nats": ("final loss, nats", 3),
    "FG/nats": ("forgetting, nats", 3),
    "general_drift/nats": ("general-text forgetting, nats", 3),
}
CONTRASTS = {name: MEASURES[name] for name in ("answers/AP", "LC/nats", "general_drift/nats")}


def main() -> None:
    parser = study.make_parser(EXPERIMENT, str(__doc__))
    parser.set_defaults(root=INSTALLED)
    options = study.check_arguments(parser)
    study.make_study(options, EXPERIMENT, SWEEPS, page="self-distillation", parts=write_parts)


def write_parts(section: RunSection) -> Iterator[str]:
    """The generated part of the study's page: what was run, levels, differences and costs."""
    yield describe_runs(section)
    yield study.tabulate(section, MEASURES, title="Both methods")
    yield study.tabulate_contrasts(section, CONTRASTS, title="Differences from ncl")
    yield describe_costs(section)


def describe_runs(section: RunSection) -> str:
    """Number of the runs, the loss of the base, and the accuracy of an answer by chance."""
    scores = section.runs[0].scores
    losses = dict(zip(scores.domains, scores.nll[0], strict=True))
    levels = []
    for task, facts in scores.answers["tasks"].items():
        levels.append(f"{task} {losses[task]:.3f} nats, {100 * facts['chance']:.0f} %")
    return (
        f"{len(section.runs)} runs in one order. Loss of the base on the answers of each task, and accuracy "
        f"of chance: {'; '.join(levels)}."
    )


def describe_costs(section: RunSection) -> str:
    """Operations of each method as a multiple of those of `ncl`."""
    runs_by_method = {group.name: group.runs for group in section.groups}
    ncl_flops = mean_flops(runs_by_method["ncl"])
    ratios = []
    for name, runs in runs_by_method.items():
        ratios.append(f"`{name}` {mean_flops(runs) / ncl_flops:.2f}")
    return f"Operations over those of `ncl`: {', '.join(ratios)}."


def mean_flops(runs: list[MeasuredRun]) -> float:
    return sum(run.values["cost/flops"] for run in runs) / len(runs)


if __name__ == "__main__":
    main()
