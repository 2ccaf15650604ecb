"""What was measured of each method, side by side over the studies of docs/: `docs/choosing.md`.

`python docs/site/choosing.py` writes the page from `docs/methods.json` and `docs/results/*.jsonl`;
`tests/test_site.py` says where it is not what they hold."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "choosing.md"
Run = Mapping[str, Any]
FROM_BASE = ("one", "dga")  # whose last models have not met
KEEP_TEXT = ("replay", "derpp")  # text of earlier domains goes with them
# Measured in a form that a method no longer has (docs/results.md, docs/methods.md); by study and method.
EARLIER = {("six", "hat"), ("six", "adapter")}
# What the YAML had when the runs of docs/results were made, where it has another value now.
MADE_WITH = {"ewc": "strength=5000"}


@dataclass(frozen=True)
class Study:
    """Runs that may be compared, and the figure by which they are: less is better, or more."""

    title: str
    unit: str
    value: Callable[[Run], float]
    better: Callable[..., Any]
    digits: int


STUDIES = {
    "default": Study("three domains, encoder of 0.6 M", "nats", lambda run: run["LC"], min, 3),
    "six": Study("six domains, encoder of 0.8 M", "nats", lambda run: run["LC"], min, 3),
    "fields": Study("120 fields, causal", "nats", lambda run: run["LC"], min, 3),
    "tasks": Study("four tasks, T5", "points", lambda run: 100 * run["AP"], max, 1),
}
PLACES = {
    "six": ("scores.jsonl", "das_present.jsonl"),
    "fields": ("m2d2.jsonl",),
    "tasks": ("standard_cl.jsonl",),
}


def read() -> dict[str, list[dict[str, Any]]]:
    """The finished runs of each study."""
    given = json.loads((DOCS / "methods.json").read_text(encoding="utf-8"))
    found = {"default": [plain_run(run) for run in given["runs"] if "earlier" not in run["variant"]]}
    for study, names in PLACES.items():
        rows = [line for name in names for line in (DOCS / "results" / name).read_text().splitlines()]
        found[study] = [scored_run(json.loads(row)) for row in rows]
    present = {run_key(run) for run in found["six"] if run["present"]}
    found["six"] = [run for run in found["six"] if run["method"] != "das" or run["present"]]
    assert present, "das_present.jsonl holds no run"
    return found


def plain_run(run: Run) -> dict[str, Any]:
    """A run of methods.json; its order is the same in all."""
    about = {name: run[name] for name in ("method", "mask", "replay", "variant", "seed")}
    measured = {"LC": run["LC"]["nats"], "FG": run["FG"]["nats"] if run.get("FG") else None}
    return (
        about | measured | {"order": (), "needs_domain": run.get("needs_domain"), "stored": run.get("stored")}
    )


def scored_run(scores: Run) -> dict[str, Any]:
    """A line of scores."""
    run, metrics = scores["run"], scores["metrics"]
    about = {name: run[name] for name in ("method", "mask", "replay", "variant", "seed")}
    about["variant"] = "; ".join(filter(None, (run["variant"], MADE_WITH.get(run["method"]))))
    nats = {name: metrics[name]["nats"] if name in metrics else None for name in ("LC", "FG")}
    kept = {"needs_domain": scores.get("needs_domain"), "stored": (scores.get("stored") or [None])[-1]}
    answers = (scores.get("answers") or {}).get("metrics", {}).get("AP")
    return (
        about
        | nats
        | kept
        | {"order": tuple(run["order"]), "AP": answers, "present": "version" not in scores}
    )


def run_key(run: Run) -> tuple[Any, ...]:
    return run["seed"], run["order"]


def label(run: Run) -> str:
    """A row's name: the method, and its options where they are not those of its YAML."""
    return f"{run['method']} {run['variant']}".strip()


def differences(runs: Iterable[Run], study: Study) -> dict[str, list[float]]:
    """By group the difference to `ncl` of the same seed and order, run by run; without masks and replays."""
    plain = [run for run in runs if run["mask"] == run["replay"] == "none" and run["method"] != "none"]
    base = {run_key(run): study.value(run) for run in plain if label(run) == "ncl"}
    found: dict[str, list[float]] = defaultdict(list)
    for run in plain:
        if run_key(run) in base and run["method"] not in FROM_BASE:
            found[label(run)].append(study.value(run) - base[run_key(run)])
    return dict(found)


def cell(values: list[float] | None, study: Study, *, mark: str) -> str:
    if not values:
        return "–"
    sign = f"{fmean(values):+.{study.digits}f}".replace("-", "−")
    return f"{sign} ({len(values)}){mark}"


def is_told(runs: Iterable[Run], method: str) -> bool:
    """Whether a text's domain must be told at test time; runs before there were parts do not say."""
    said = [run for run in runs if run["method"] == method and run["needs_domain"] is not None]
    plain = [run for run in said if run["variant"] == ""]
    return any(run["needs_domain"] for run in plain or said)


def listed(measured: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    """The rows, the least loss first; variants of the default study stand in docs/methods.md."""
    names = {row for name in PLACES for row in measured[name]}
    names |= {row for row in measured["default"] if " " not in row}
    return sorted(names, key=lambda row: (fmean(measured["default"].get(row, [9.0])), row))


def rows(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The table, the least loss first."""
    measured = {name: differences(runs, STUDIES[name]) for name, runs in found.items()}
    everything = [run for runs in found.values() for run in runs]
    for row in listed(measured):
        method, _, variant = row.partition(" ")
        cells = [
            cell(measured[name].get(row), STUDIES[name], mark=" †" if (name, method) in EARLIER else "")
            for name in STUDIES
        ]
        title = f"`{method}`" + (f", {variant}" if variant else "")
        told = "yes" if is_told(everything, method) else "no"
        yield f"| {title} | {' | '.join(cells)} | {told} |"


def winners(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """For what one can afford, the best group of each study."""
    everything = [run for runs in found.values() for run in runs]
    measured = {name: differences(runs, STUDIES[name]) for name, runs in found.items()}
    told = {row for row in listed(measured) if is_told(everything, row.split(" ")[0])}
    text = {row for row in listed(measured) if row.split(" ")[0] in KEEP_TEXT}
    classes = {
        "all text at once": {"joint"},
        "text of earlier domains is kept": text,
        "no text is kept, the domain of a text is unknown": {*listed(measured)} - told - text - {"joint"},
        "no text is kept, the domain of a text is told": told,
    }
    for title, names in classes.items():
        cells = [best(measured[name], study, names) for name, study in STUDIES.items()]
        yield f"| {title} | {' | '.join(cells)} |"


def best(measured: Mapping[str, list[float]], study: Study, names: set[str]) -> str:
    there = {row: fmean(values) for row, values in measured.items() if row in names}
    if not there:
        return "–"
    row = study.better(there, key=there.__getitem__)
    return f"`{row}` {there[row]:+.{study.digits}f}".replace("-", "−")


HEAD = """# Choosing a method

Made by `python docs/site/choosing.py` from `docs/methods.json` and `docs/results/`: what was measured,
no opinion. Each number is the mean difference to `ncl` (one domain after another, nothing else) over
runs of the same seed and order, in brackets their number: of the average loss at the end (LC) in nats,
where **below zero is better**; of tasks the accuracy at the end (AP) in points, where **above zero is
better**. A dash: not measured there.
"""
BETWEEN = """
The models are tiny and the texts short: what holds at other sizes, [your own comparison](walk.md) says.
How the runs were made, intervals and tests: [three domains](methods.md), [six domains, four tasks, 120
fields](results.md). †: measured in an earlier form of the method, and not again.

## By what you can keep

The best group of each study among those that were measured there.
"""
TAIL = """
`one` and `dga` learn each domain from the base, so that their end has no row here. Methods without a
row were tested against their equations ([fidelity](fidelity.md)) and not compared on text. Which method
runs on which model: [support](support.md). What one keeps, and what it costs in memory and time before
anything is learned: `plan=true` ([plan](plan.md)).
"""


def page() -> str:
    """`docs/choosing.md` as the results are now."""
    found = read()
    titles = " | ".join(f"{study.title} ({study.unit})" for study in STUDIES.values())
    heading = (
        f"| method | {titles} | domain told at test time |\n| :-- |" + " --: |" * len(STUDIES) + " :-: |\n"
    )
    short = f"| | {titles} |\n| :-- |" + " :-- |" * len(STUDIES) + "\n"
    table = "\n".join(rows(found)) + "\n"
    return HEAD + "\n" + heading + table + BETWEEN + "\n" + short + "\n".join(winners(found)) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
