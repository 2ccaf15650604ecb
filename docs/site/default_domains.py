"""The tables and the figure of docs/studies/default-domains.md, from the published scores.

`python docs/site/default_domains.py` writes them. `python docs/site/default_domains.py FOLDER` first makes
the scores anew from the finished runs below FOLDER, those of the page's commands; with `--added FOLDER` those
of the methods that were added later, which have another base and their own `ncl`: published runs that are not
below FOLDER stay."""

import gzip
import json
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

DOCS = Path(__file__).resolve().parents[1]
PAGE, FIGURE = DOCS / "studies" / "default-domains.md", DOCS / "images" / "default-domains.png"
SCORES = DOCS.parent / "benchmarks" / "results" / "studies" / "default_domains.jsonl.gz"
ADDED_SCORES = SCORES.with_name("default_domains_added.jsonl.gz")
METRICS = ("LC", "CPT", "FG", "general_drift")
KNOWN, UNKNOWN = "#d55e00", "#0072b2"
LABEL_DISTANCES = (7, 14, 22, 32, 45, 60)  # points between a point of the figure and its name
LABEL_ANGLES = (0, 45, -45, 180, 135, -135, 70, -70, 110, -110)  # degrees, the best places first


def read_run(path: Path) -> dict[str, Any]:
    """A finished run as a line of the scores."""
    scores = json.loads(path.read_text(encoding="utf-8"))
    entry = {name: scores["run"][name] for name in ("method", "mask", "replay", "seed", "variant")}
    for name in METRICS:
        if name in scores["metrics"]:
            values = scores["metrics"][name]
            entry[name] = {unit: round(values[unit], 4) for unit in ("nats", "perplexity")}
    entry["nll"] = [[round(value, 4) for value in row] for row in scores["nll"]]
    return entry | {name: scores[name] for name in ("trained", "stored", "flops", "needs_domain")}


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The finished runs below a folder, those of one choice of method and options together."""
    runs = [read_run(path) for path in sorted(folder.glob("*/scores.json"))]
    return sorted(runs, key=identify)


def identify(run: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the runs of the study apart."""
    return tuple(run[name] for name in ("method", "mask", "replay", "variant", "seed"))


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard deviation; a dash without values."""
    if not values:
        return "–"
    shown = f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
    return shown.replace("-", "−")


def values(runs: list[dict[str, Any]], metric: str, unit: str) -> list[float]:
    return [run[metric][unit] for run in runs if metric in run]


def group_runs(runs: list[dict[str, Any]], *, mask: str) -> dict[str, list[dict[str, Any]]]:
    """The runs with default options by method, the lowest LC first."""
    found = defaultdict(list)
    for run in runs:
        if (run["mask"], run["replay"], run["variant"]) == (mask, "none", ""):
            found[run["method"]].append(run)
    return dict(sorted(found.items(), key=lambda item: mean(values(item[1], "LC", "nats"))))


def group_variants(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of other options, by how a command asks for them."""
    found = defaultdict(list)
    for run in runs:
        if run["mask"] == "none" and (run["replay"] != "none" or run["variant"]):
            asked = [f"method={run['method']}", *run["variant"].split("; ")]
            asked += [f"replay={run['replay']}"] * (run["replay"] != "none")
            found[" ".join(filter(None, asked))].append(run)
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    plain, masked = group_runs(runs, mask="none"), group_runs(runs, mask="migu")
    flops = sum(plain["ncl"][0]["flops"])
    main, cost, mask = [], [], []
    for method, few in plain.items():
        nats = [spread(values(few, name, "nats"), 3) for name in ("CPT", "FG", "general_drift")]
        main.append([f"`{method}`", spread(values(few, "LC", "perplexity"), 1), *nats])
        one = few[0]
        size, stored = f"{max(one['trained']):,}", f"{one['stored'][-1] / 1e3:,.0f}"
        known = "yes" if one["needs_domain"] else "no"
        cost.append([f"`{method}`", f"{sum(one['flops']) / flops:.2f}", size, stored, known])
    variants = []
    for asked, few in group_variants(runs).items():
        nats = [spread(values(few, name, "nats"), 3) for name in ("CPT", "FG", "general_drift")]
        known = "yes" if few[0]["needs_domain"] else "no"
        variants.append([f"`{asked}`", spread(values(few, "LC", "perplexity"), 1), *nats, known])
    for method, few in masked.items():
        both = (plain[method], few)
        perplexities = [spread(values(each, "LC", "perplexity"), 1) for each in both]
        mask.append([f"`{method}`", *perplexities, *(spread(values(each, "FG", "nats"), 3) for each in both)])
    head = [
        "method",
        "final perplexity",
        "just trained, nats",
        "forgetting, nats",
        "general-text forgetting, nats",
    ]
    costs = ["method", "FLOPs over `ncl`", "trained parameters", "stored, kB", "needs domain"]
    masks = ["method", "final perplexity", "with `mask=migu`", "forgetting, nats", "with `mask=migu`"]
    made = {"main": table(head, main), "cost": table(costs, cost), "mask": table(masks, mask)}
    return made | {"variants": table([*head, "needs domain"], variants)}


def added_table(runs: list[dict[str, Any]]) -> str:
    """The methods that were added later, compared with `ncl` of the same seed."""
    plain = {run["seed"]: run for run in runs if (run["method"], run["variant"]) == ("ncl", "")}
    ncl_flops = sum(next(iter(plain.values()))["flops"])
    groups = defaultdict(list)
    for run in runs:
        label = " ".join(filter(None, [f"method={run['method']}", *run["variant"].split("; ")]))
        groups[label].append(run)

    rows = []
    for label, few in sorted(groups.items(), key=lambda item: mean(values(item[1], "LC", "nats"))):
        paired = [run for run in few if run["seed"] in plain]
        differences = [run["LC"]["nats"] - plain[run["seed"]]["LC"]["nats"] for run in paired]
        nats = [spread(values(few, name, "nats"), 3) for name in ("CPT", "FG", "general_drift")]
        perplexity = spread(values(few, "LC", "perplexity"), 1)
        flops = f"{sum(few[0]['flops']) / ncl_flops:.2f}"
        rows.append([f"`{label}`", str(len(few)), perplexity, spread(differences, 3), *nats, flops])
    head = ["option", "seeds", "final perplexity", "final over `ncl`, nats", "just trained, nats"]
    return table([*head, "forgetting, nats", "general-text forgetting, nats", "FLOPs over `ncl`"], rows)


def draw(groups: dict[str, list[dict[str, Any]]]) -> None:
    """Forgetting against the final perplexity, a point per method."""
    figure, axes = plt.subplots(figsize=(9, 6))
    points: dict[str, tuple[float, float]] = {}
    for method, runs in groups.items():
        if forgetting := values(runs, "FG", "nats"):
            points[method] = mean(forgetting), mean(values(runs, "LC", "perplexity"))
            color = KNOWN if runs[0]["needs_domain"] else UNKNOWN
            axes.plot(*points[method], "o", color=color, markersize=5)
    axes.set(xlabel="forgetting (FG, nats)", ylabel="final perplexity (LC)")
    axes.set_title("Blue: domain unknown at test time. Orange: domain given.", fontsize=10)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    label_points(axes, points)
    figure.savefig(FIGURE, dpi=110)


def label_points(axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Writes the name of each point beside it, where it covers no point and no name written before.

    A name that has to stand further away is joined to its point by a line."""
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    pixels = {name: axes.transData.transform(point) for name, point in points.items()}
    covered = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in pixels.values()]
    for name, point in points.items():
        for distance, angle in product(LABEL_DISTANCES, LABEL_ANGLES):
            shift = distance * np.cos(np.radians(angle)), distance * np.sin(np.radians(angle))
            label = axes.annotate(
                name,
                point,
                xytext=shift,
                textcoords="offset points",
                fontsize=8,
                ha="left" if shift[0] > 0 else "right",
                va="center",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.5"} if distance > 10 else None,
            )
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)
            is_inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
            if is_inside and not any(box.overlaps(other) for other in covered):
                break
            label.remove()
        else:
            raise ValueError(f"{name} has no free place. Allowed: larger LABEL_DISTANCES, a larger figure")
        covered.append(box)


def write_scores(path: Path, runs: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(run) + "\n" for run in runs)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def read_scores(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] == "--added":
        added = {identify(run): run for run in [*read_scores(ADDED_SCORES), *read_runs(Path(arguments[-1]))]}
        write_scores(ADDED_SCORES, [added[key] for key in sorted(added)])
    elif arguments:
        write_scores(SCORES, read_runs(Path(arguments[-1])))
    runs = read_scores(SCORES)
    page = PAGE.read_text(encoding="utf-8")
    for name, made in (tables(runs) | {"added": added_table(read_scores(ADDED_SCORES))}).items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page, encoding="utf-8")
    draw(group_runs(runs, mask="none"))


if __name__ == "__main__":
    main(sys.argv[1:])
