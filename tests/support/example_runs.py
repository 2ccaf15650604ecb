"""Finished runs with scores written by hand, for the tests of comparisons."""

import json
import re
from pathlib import Path

import numpy as np

from cpt.evaluation.scores import Scores
from cpt.reporting.load_runs import MeasuredRun, measure_runs
from cpt.reporting.sections import build_sections

FROM_BASE = ("one", "dga")  # methods that train every domain from the base
DOMAINS = ["law", "food", "space"]
NLL = [[5.0, 5.2, 5.4, 4.9], [4.6, 5.1, 5.3, 5.0], [4.7, 4.2, 5.2, 5.1], [4.9, 4.5, 4.0, 5.2]]
CONDITIONS = {"score_on": "test", "tokenizer": "0123abcd", "max_seq_length": 64, "mlm_probability": 0.3}


def make_scores(
    *, nll=NLL, order=DOMAINS, rows=None, shift=0.0, content="d", endtasks=None, costs=True, **overrides
):
    """Finished scores over domains in the order of learning; `shift` is added to the last row.

    Overrides are of the fields of Scores or of its `run`."""
    run = {
        "name": "trial",
        "method": "ncl",
        "mask": "none",
        "replay": "none",
        "variant": "",
        "model": "tiny",
        "order": list(order),
        "seed": 0,
        "finished": True,
        "objective": "masked",
    }
    score_overrides = {key: overrides.pop(key) for key in list(overrides) if key not in run}
    run |= overrides

    nll = np.array(nll, float)
    nll[-1] += shift
    domains = [*order, "general"][: nll.shape[1]]
    row_names = ["base", *order][: len(nll)] if rows is None else rows
    num_stages = len(row_names) - 1

    fields = {
        "conditions": CONDITIONS,
        "activity_seconds": {"score": {"base": 2.0}, "learn": dict.fromkeys(row_names[1:], 4.0)},
    }
    if costs:
        fields["memory"] = [10**6] * (num_stages + 1)
        fields["stored"] = [number * 10**6 for number in range(num_stages + 1)]
        fields["tokens_read"] = [0] + [1000] * num_stages
        fields["flops"] = [0] + [2 * 10**9] * num_stages
        fields["trained"] = [0] + [5120] * num_stages
    fields.update(score_overrides)

    scores = Scores(
        domains=domains,
        rows=row_names,
        nll=nll.tolist(),
        tokens=fields.pop("tokens", [1000] * len(domains)),
        bytes=[4000] * len(domains),
        scored=[150] * len(domains),
        run=run,
        texts={name: {"hash": f"{content}-{name}", "documents": {"test": 7}} for name in domains},
        config_hash="0123abcd",
        versions={"python": "3.11"},
        seconds=20.0,
        modules=[{} for _ in row_names],
        endtasks=endtasks or {},
        trains_from_base=run["method"] in FROM_BASE,
        **fields,
    )
    scores.measure()
    return scores


def make_endtasks(values, *, tasks=DOMAINS, when="last"):
    """The `endtasks` of scores, with the same values [row][task] for both seeds and every metric."""
    cube = [[[value] * 2 for value in row] for row in values]
    return {
        "when": when,
        "tasks": list(tasks),
        "seeds": [7, 8],
        "hash": "e",
        "seconds": 1.0,
        "metric": dict.fromkeys(tasks, "macro_f1"),
        "classes": dict.fromkeys(tasks, 2),
        "examples": dict.fromkeys(tasks, 8),
        "scores": dict.fromkeys(("macro_f1", "micro_f1", "accuracy"), cube),
    }


def make_run(folder="x", **overrides):
    return MeasuredRun(folder=Path(folder), scores=make_scores(**overrides))


def save_scores(folder, *, config=None, **overrides):
    folder.mkdir(parents=True)
    scores = make_scores(**overrides)
    scores.save(folder / "scores.json")
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))
    return scores


def save_run(folder, *, config=None, **overrides):
    return MeasuredRun(folder=folder, scores=save_scores(folder, config=config, **overrides))


def make_section(runs, *, by_order=False, baseline="ncl"):
    (section,) = build_sections(measure_runs(runs), by_order=by_order, baseline=baseline)
    return section


def parse_table(output, heading):
    """The lines of a printed table by their first cell, from the table whose heading starts with `heading`."""
    lines = output[output.index(heading) :].split("\n\n")[0].splitlines()
    table = {}
    for line in lines[2:]:
        first_cell, *cells = re.split(r"\s{2,}", line)
        table[first_cell] = cells
    return table
