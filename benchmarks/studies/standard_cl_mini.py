"""The methods on four supervised tasks, text to text:
`python benchmarks/studies/standard_cl_mini.py --root FOLDER` writes docs/studies/standard-cl.md.

FOLDER holds {agnews,amazon,dbpedia,yahoo}/{train,test}.jsonl with `text` and `label`, and general/ with the
pre-training text of the base model. Rerun the same command to resume."""

import json
from collections.abc import Iterator, Sequence

import bag_of_words
import claims
import study

from cpt.evaluation.task_metrics import build_answer_matrix
from cpt.reporting.load_runs import MeasuredRun
from cpt.reporting.page import Block, format_markdown
from cpt.reporting.sections import RunSection

ORDERS_AND_SEEDS = ["order=1,2,3", "seed=0,1,2"]
SWEEPS = (
    ["method=ncl,joint,migu,replay,lora,olora,inclora,ewc,derpp,kd"],
    ["method=olora,lora", "mask=migu"],
)


def main() -> None:
    options = study.read_arguments("standard_cl_mini", str(__doc__))
    study.make_study(
        options,
        "standard_cl_mini",
        [[*ORDERS_AND_SEEDS, *sweep] for sweep in SWEEPS],
        page="standard-cl",
        parts=parts,
    )


MEASURES = {
    "answers/AP": ("final accuracy (AP), %", 1),
    "answers/LA": ("just trained (LA), %", 1),
    "FG/nats": ("forgetting (FG), nats", 2),
    "general_drift/nats": ("general-text forgetting, nats", 2),
}
CONTRASTS = {"answers/AP": ("final accuracy, points", 1), "FG/nats": ("forgetting, nats", 2)}


def parts(section: RunSection) -> Iterator[str]:
    yield describe_runs(section)
    cells = claims.tabulate_claims(section, claims.ON_TASKS)
    yield format_markdown(
        Block(title="Published claims", head=claims.HEAD, cells=cells, num_word_columns=2), picture=""
    )
    yield study.tabulate(section, MEASURES, title="All methods")
    yield study.tabulate_contrasts(section, CONTRASTS, title="Differences from ncl")
    yield format_markdown(tabulate_levels(section), picture="")


def describe_runs(section: RunSection) -> str:
    """Number of the runs and of their test examples."""
    first = section.runs[0].scores
    examples = {task: facts["examples"] for task, facts in first.answers["tasks"].items()}
    counts = ", ".join(f"{task} {count}" for task, count in examples.items())
    runs = f"{len(section.runs)} runs in {len(section.groups)} groups; test examples: {counts}. Orders:"
    return f"{runs}\n\n{study.list_orders(section.runs)}"


def tabulate_levels(section: RunSection) -> Block:
    """The accuracy per task of chance, the majority class, a bag of words and two methods."""
    first = section.runs[0].scores.answers["tasks"]
    groups = {group.name: group.runs for group in section.groups if group.name in ("ncl", "joint")}
    bags = json.loads(bag_of_words.FILE.read_text(encoding="utf-8"))["standard_cl_mini"]
    cells = []
    for task, facts in first.items():
        chance = f"{100 * facts['chance']:.1f} ({100 * facts['majority']:.1f})"
        just_trained = mean_of(groups["ncl"], task, just_trained=True)
        last = [mean_of(runs, task, just_trained=False) for runs in groups.values()]
        levels = (bags[task], just_trained, *last)
        cells.append([task, chance, *(f"{100 * level:.1f}" for level in levels)])
    head = ["task", "chance (majority)", "bag of words", "ncl, just trained"]
    head += [f"{name}, final" for name in groups]
    return Block(title="Accuracy by task, %", head=head, cells=cells)


def mean_of(runs: Sequence[MeasuredRun], task: str, *, just_trained: bool) -> float:
    """The mean over runs of a task's score in its own row or in the last."""
    scores = []
    for run in runs:
        column = list(run.scores.answers["tasks"]).index(task)
        row = run.scores.rows.index(task) if just_trained else -1
        scores.append(build_answer_matrix(run.scores.answers)[row, column])
    return float(sum(scores) / len(scores))


if __name__ == "__main__":
    main()
