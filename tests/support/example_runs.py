"""Runs made by hand, for the tests of comparisons."""

import json
import re
from pathlib import Path

import numpy as np

from cpt.evaluation.scores import Scores
from cpt.reporting.load_runs import MeasuredRun, build_sections, measure_runs

FROM_BASE = ("one", "dga")  # methods that train every domain from the base
DOMAINS = ["law", "food", "space"]
NLL = [[5.0, 5.2, 5.4, 4.9], [4.6, 5.1, 5.3, 5.0], [4.7, 4.2, 5.2, 5.1], [4.9, 4.5, 4.0, 5.2]]
CONDITIONS = {"score_on": "test", "tokenizer": "0123abcd", "length": 64, "mask_rate": 0.3}


def make_scores(
    *, nll=NLL, order=DOMAINS, rows=None, shift=0.0, content="d", endtasks=None, costs=True, **given
):
    """Finished scores over domains in the order of learning; `shift` is added to the last row."""
    nll = np.array(nll, float)
    nll[-1] += shift
    run = {"name": "trial", "method": "ncl", "mask": "none", "replay": "none", "variant": "", "model": "tiny"}
    run |= {"order": list(order), "seed": 0, "finished": True, "objective": "masked"}
    own = {key: given.pop(key) for key in list(given) if key not in run}
    domains = [*order, "general"][: nll.shape[1]]
    names = ["base", *order][: len(nll)] if rows is None else rows
    stages = len(names)
    about = {"conditions": CONDITIONS}
    about |= {"activity_seconds": {"score": {"base": 2.0}, "learn": dict.fromkeys(names[1:], 4.0)}}
    if costs:
        about |= {"memory": [10**6] * stages, "stored": [0, *range(10**6, stages * 10**6, 10**6)]}
        for name, each in {"tokens_read": 1000, "flops": 2 * 10**9, "trained": 5120}.items():
            about[name] = [0, *[each] * (stages - 1)]
    scores = Scores(
        domains=domains,
        rows=names,
        nll=nll.tolist(),
        tokens=[1000] * len(domains),
        bytes=[4000] * len(domains),
        scored=[150] * len(domains),
        run=run | given,
        texts={name: {"hash": f"{content}-{name}", "documents": {"test": 7}} for name in domains},
        config_hash="0123abcd",
        versions={"python": "3.11"},
        seconds=20.0,
        modules=[{} for _ in names],
        endtasks=endtasks or {},
        alone=(run | given)["method"] in FROM_BASE,
        **about | own,
    )
    scores.measure()
    return scores


def make_endtasks(scores, *, tasks=DOMAINS, when="last"):
    cube = [[[value] * 2 for value in row] for row in scores]
    about = {"when": when, "tasks": list(tasks), "seeds": [7, 8], "hash": "e", "seconds": 1.0}
    for name, value in {"metric": "macro_f1", "classes": 2, "examples": 8}.items():
        about[name] = dict.fromkeys(tasks, value)
    return about | {"scores": dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), cube)}


def make_run(folder="x", **given):
    return MeasuredRun(folder=Path(folder), scores=make_scores(**given))


def save_scores(folder, *, config=None, **given):
    folder.mkdir(parents=True)
    scores = make_scores(**given)
    scores.save(folder / "scores.json")
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))
    return scores


def save_run(folder, *, config=None, **given):
    return MeasuredRun(folder=folder, scores=save_scores(folder, config=config, **given))


def make_section(runs, *, by_order=False, baseline="ncl"):
    (found,) = build_sections(measure_runs(runs), by_order=by_order, baseline=baseline)
    return found


def parse_table(output, first):
    """The lines of a printed table by their first cell, from the table whose heading starts with `first`."""
    lines = output[output.index(first) :].split("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in lines[2:])}
