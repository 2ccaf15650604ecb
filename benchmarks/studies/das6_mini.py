"""Methods on six real domains: `python benchmarks/studies/das6_mini.py --root FOLDER` writes
docs/studies/das6.md.

With `--model FOLDER` (all-mpnet-base-v2) the base is its first six blocks, and its part of
docs/studies/real-encoder.md is written; give `--runs outputs/das6_mpnet` then. The FOLDER of --root holds
corpora/<domain>, endtasks/<domain> and general, each with {train,valid,test}.jsonl.gz (dev for end tasks).
Rerun the same command to resume."""

import json
from collections.abc import Iterator, Mapping
from statistics import fmean

import bag_of_words
import claims
import study

from cpt.evaluation.task_metrics import pick_final, select_headline_scores
from cpt.reporting.page import Block, format_markdown
from cpt.reporting.sections import RunGroup, RunSection

SEEDS = "seed=0,1,2"
DAS = ["method=das", "method.contrast_every=1", "method.contrast_samples=1"]  # the paper's form
SWEEPS = (
    ["order=0", "seed=0", "method=none"],
    ["order=0", SEEDS, "method=ncl,das,migu"],
    ["order=0", SEEDS, *DAS],
    ["order=1", SEEDS, "method=ncl,das,migu"],
    ["order=1", SEEDS, *DAS],
    ["order=0", SEEDS, "method=kd,ewc,replay,derpp"],
    ["order=0", SEEDS, *DAS, "method.apply_to=gradient"],
    ["order=0", SEEDS, "method=das", "method.contrast=0", "method.apply_to=gradient"],
    ["order=0", SEEDS, "method=one,joint,adapter,lora,demix,hat"],
    ["order=0", SEEDS, "method=kd,replay", "mask=migu"],
)
# The seeds and the order that the claims rest on first; `none` is the same for every seed.
MPNET_SWEEPS = (
    ["order=0", "seed=0", "method=none"],
    ["order=0", SEEDS, "method=ncl,das,migu"],
    ["order=0", SEEDS, *DAS],
    ["order=0", SEEDS, "method=kd,ewc,replay"],
    ["order=0", "seed=0", "method=one,joint,derpp,adapter,hat,demix"],
    ["order=1", SEEDS, "method=ncl,migu"],
    ["order=1", SEEDS, *DAS],
)


def main() -> None:
    options = study.read_arguments("das6_mini", str(__doc__))
    if options.model is not None:
        study.make_study(options, "das6_mpnet", MPNET_SWEEPS, page="real-encoder", parts=write_parts)
        return
    study.make_study(options, "das6_mini", SWEEPS, page="das6", parts=write_parts)


def write_parts(section: RunSection) -> Iterator[str]:
    """The parts of the study's page, as Markdown: its runs, the tasks beside a bag of words where that was
    measured, the published claims, all methods, and their differences from ncl."""
    yield describe_runs(section)
    bag_scores = json.loads(bag_of_words.FILE.read_text(encoding="utf-8"))  # by experiment and task
    experiment = section.runs[0].scores.run["name"]
    if bag_scores.get(experiment):
        yield tabulate_tasks(section, bag_scores[experiment])

    cells = claims.tabulate_claims(section, claims.ON_TEXT)
    yield format_markdown(
        Block(title="Published claims", head=claims.HEAD, cells=cells, num_word_columns=2), picture=""
    )
    measures = {
        "LC/perplexity": ("final perplexity (LC)", 2),
        "FG/nats": ("forgetting (FG), nats", 3),
        "general_drift/nats": ("general-text forgetting, nats", 3),
        "endtask/MF1": ("macro-F1, %", 1),
    }
    yield study.tabulate(section, measures, title="All methods")
    measures = {"LC/perplexity": ("final perplexity", 2), "FG/nats": ("forgetting, nats", 3)}
    yield study.tabulate_contrasts(section, measures, title="Differences from ncl")


def tabulate_tasks(section: RunSection, bag_scores: Mapping[str, float]) -> str:
    """The table of each task's own metric in percent: of a classifier on a bag of words (`bag_scores`, by
    task), and of the final models of the methods that the claims are about."""
    columns = {"bag of words": bag_scores}
    groups = {group.name: group for group in section.groups}
    for name in ("none", "ncl", "das", "migu"):
        if name in groups:
            columns[name] = mean_final_scores(groups[name])

    cells = []
    for task in bag_scores:
        cells.append([task, *(f"{100 * column[task]:.1f}" for column in columns.values())])
    title = "Downstream tasks: each task's own metric, %"
    return format_markdown(Block(title=title, head=["task", *columns], cells=cells), picture="")


def mean_final_scores(group: RunGroup) -> dict[str, float]:
    """The last models' mean score on each task, over the seeds of fine-tuning and the runs."""
    by_task: dict[str, list[float]] = {}
    for run in group.runs:
        endtasks = run.scores.endtasks
        finals = pick_final(select_headline_scores(endtasks)).mean(-1)
        for task, final in zip(endtasks["tasks"], finals, strict=True):
            by_task.setdefault(task, []).append(final)
    return {task: fmean(finals) for task, finals in by_task.items()}


def describe_runs(section: RunSection) -> str:
    """Number and size of the runs."""
    runs = [run.scores for run in section.runs]
    first = next(scores for scores in runs if len(scores.tokens_read) > 2)  # not joint
    tokens = (
        f"{first.tokens_read[1]:,} tokens per domain, {sum(first.scored):,} scored tokens in the test sets"
    )
    orders = study.list_orders(section.runs)
    return f"{len(runs)} runs in {len(section.groups)} groups; {tokens}. Orders:\n\n{orders}"


if __name__ == "__main__":
    main()
