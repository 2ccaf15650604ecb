"""The measured results of docs/methods.md, from the published scores of the studies.

`python docs/site/choosing.py` writes them into the page; tests/test_site.py fails where they differ."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[1]
PAGE, SCORES = DOCS / "methods.md", DOCS.parent / "benchmarks" / "results" / "studies"
BEGIN, END = "<!-- generated: measured -->", "<!-- end: measured -->"
Run = Mapping[str, Any]
FROM_BASE = ("one", "dga")  # without a final model of all domains
PRETRAINED = ("real", "computing", "decoder", "decoder_tasks")  # studies of pre-trained weights
# How an option begins that changes what a study trains on, and not the method.
SETTINGS = ("domains.", "freeze.", "loss=", "optim.", "trainable=", "trainer.")
KEEP_TEXT = ("replay", "derpp", "agem", "elle")  # methods that store text of earlier domains


class Study(NamedTuple):
    """Comparable runs, and the value by which they are compared."""

    title: str
    value: Callable[[Run], float]
    better: Callable[..., Any]
    digits: int
    files: tuple[str, ...]


STUDIES = {
    "real": Study("1. six domains, pre-trained, 67 M", lambda run: run["LC"], min, 3, ("das6_mpnet",)),
    "computing": Study(
        "2. news to computing, pre-trained, 67 M", lambda run: run["LC"], min, 3, ("linux_texts",)
    ),
    "decoder": Study(
        "3. news to computing, chat model, 135 M", lambda run: run["LC"], min, 3, ("real_decoder",)
    ),
    "decoder_tasks": Study(
        "4. four tasks, chat model, 135 M", lambda run: 100 * run["AP"], max, 1, ("standard_cl_decoder",)
    ),
    "default": Study("5. three domains, encoder 0.6 M", lambda run: run["LC"], min, 3, ("default_domains",)),
    "six": Study("6. six domains, encoder 0.8 M", lambda run: run["LC"], min, 3, ("das6_mini",)),
    "fields": Study("7. 120 fields, causal 0.7 M", lambda run: run["LC"], min, 3, ("m2d2_mini",)),
    "tasks": Study("8. four tasks, T5 0.9 M", lambda run: 100 * run["AP"], max, 1, ("standard_cl_mini",)),
}


def read() -> dict[str, list[dict[str, Any]]]:
    """The finished runs of each study, without masks, added replay and other settings."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, study in STUDIES.items():
        read_row = plain_run if name == "default" else scored_run
        found[name] = [
            read_row(json.loads(line))
            for file in study.files
            for line in gzip.decompress((SCORES / f"{file}.jsonl.gz").read_bytes()).splitlines()
        ]
    return {name: [run for run in runs if is_method_alone(run)] for name, runs in found.items()}


def is_method_alone(run: Run) -> bool:
    """Whether nothing was chosen for a run but a method and its options."""
    has_settings = any(option.startswith(SETTINGS) for option in run["variant"].split("; "))
    return run["mask"] == run["replay"] == "none" and run["method"] != "none" and not has_settings


def plain_run(run: Run) -> dict[str, Any]:
    """A run of the default domains, all in one order."""
    about = {name: run[name] for name in ("method", "mask", "replay", "seed", "variant")}
    return about | {"LC": run["LC"]["nats"], "order": (), "needs_domain": run.get("needs_domain")}


def scored_run(scores: Run) -> dict[str, Any]:
    """A run of published scores."""
    run = scores["run"]
    about = {name: run[name] for name in ("method", "mask", "replay", "seed", "variant")}
    about |= {"order": tuple(run["order"]), "needs_domain": scores.get("needs_domain")}
    answers = (scores.get("answers") or {}).get("metrics", {}).get("AP")
    return about | {"LC": scores["metrics"].get("LC", {}).get("nats"), "AP": answers}


def label(run: Run) -> str:
    """The method, and its options where they are not the defaults."""
    return f"{run['method']} {run['variant']}".strip()


def differences(runs: Iterable[Run], study: Study) -> dict[str, list[float]]:
    """By row, the differences from `ncl` of the same seed and order."""
    base = {(run["seed"], run["order"]): study.value(run) for run in runs if label(run) == "ncl"}
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        pair = run["seed"], run["order"]
        if pair in base and run["method"] not in FROM_BASE:
            found[label(run)].append(study.value(run) - base[pair])
    return dict(found)


def needs_domain(runs: Iterable[Run], method: str) -> bool:
    """Whether the domain of a text is given at test time; runs of early versions do not record it."""
    recorded = [run for run in runs if run["method"] == method and run["needs_domain"] is not None]
    plain = [run for run in recorded if run["variant"] == ""]
    return any(run["needs_domain"] for run in plain or recorded)


def signed(value: float, study: Study) -> str:
    return f"{value:+.{study.digits}f}".replace("-", "−")


def rows(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The table of some studies, the lowest loss in the first of them first."""
    measured = {name: differences(runs, STUDIES[name]) for name, runs in found.items()}
    everything = [run for runs in found.values() for run in runs]
    names = {row for name in measured for row in measured[name] if name != "default" or " " not in row}
    first = next(iter(measured))
    for row in sorted(names, key=lambda row: (fmean(measured[first].get(row, [9.0])), row)):
        method, _, variant = row.partition(" ")
        cells = []
        for name in found:
            study, values = STUDIES[name], measured[name].get(row)
            cells.append(f"{signed(fmean(values), study)} ({len(values)})" if values else "–")
        title = f"`{method}`" + (f" ({variant})" if variant else "")
        yield f"| {title} | {' | '.join(cells)} | {'yes' if needs_domain(everything, method) else 'no'} |"


def winners(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The best row of each of some studies by what may be stored and what is known at test time."""
    measured = {name: differences(runs, STUDIES[name]) for name, runs in found.items()}
    everything = [run for runs in found.values() for run in runs]
    names = {row for name in measured for row in measured[name] if name != "default" or " " not in row}
    given_domain = {row for row in names if needs_domain(everything, row.split(" ")[0])}
    storing_text = {row for row in names if row.split(" ")[0] in KEEP_TEXT}
    classes = {
        "all text at once": {"joint"},
        "text of earlier domains is stored": storing_text,
        "no text stored, domain unknown at test time": names - given_domain - storing_text - {"joint"},
        "no text stored, domain given at test time": given_domain - storing_text,
    }
    for title, allowed in classes.items():
        cells = []
        for name in found:
            means = {row: fmean(values) for row, values in measured[name].items() if row in allowed}
            cells.append(name_winner(means, STUDIES[name]))
        yield f"| {title} | {' | '.join(cells)} |"


def name_winner(means: Mapping[str, float], study: Study) -> str:
    """The best row by its mean difference from `ncl`, or that none is better than it."""
    if not means:
        return "–"
    best = study.better(means, key=means.__getitem__)
    value = signed(means[best], study)
    is_worse = study.better(means[best], 0.0) != means[best]
    return f"none better than `ncl` (`{best}` {value})" if is_worse else f"`{best}` {value}"


def page() -> str:
    """docs/methods.md with the results of the studies."""
    found, parts = read(), []
    tables = {"Pre-trained weights": PRETRAINED, "Models below one million parameters": [*found]}
    for title, names in tables.items():
        some = {name: found.pop(name) for name in names if name in found}
        titles = " | ".join(STUDIES[name].title for name in some)
        short = [f"| constraint | {titles} |", f"| :-- |{' :-- |' * len(some)}", *winners(some)]
        table = [f"| method | {titles} | needs domain |", f"| :-- |{' --: |' * len(some)} :-: |", *rows(some)]
        parts += [f"### {title}", "The best method by constraint:", "\n".join(short), "\n".join(table)]
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
