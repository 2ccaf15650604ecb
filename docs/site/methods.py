"""The tables of `docs/methods.md` and its picture, from `docs/methods.json`.

`python docs/site/methods.py` writes them. `python docs/site/methods.py FOLDER` first puts the finished runs
below FOLDER (`experiment=methods_table`, YAML values, no mask) into that file."""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1]
PAGE, DATA, PICTURE = DOCS / "methods.md", DOCS / "methods.json", DOCS / "methods.png"
METRICS = ("LC", "CPT", "FG", "general_drift")
VALIDATION = "validation text, one seed"
RATE = f"rate: {VALIDATION} (1, 3, 10)"
# How the values of each method's YAML were chosen; of those that are absent nothing was tuned here.
CHOSEN = {
    "das": "paper, released code",
    "dga": "paper, released code",
    "ewc": f"{VALIDATION} (50, 500, 5000)",
    "si": "paper, of image classifiers",
    "mas": "not tuned (paper 1, of image classifiers)",
    "recadam": "paper's γη at a rate of 1e-3",
    "osf": f"{VALIDATION} (what is protected, its share)",
    "derpp": "not tuned (no published value for text)",
    "kd": "paper",
    "ema": "paper",
    "wise_ft": "paper",
    "merge": f"{VALIDATION} (start and scale by rule)",
    "reptile": f"{VALIDATION} (two values of k)",
    "hat": VALIDATION,
    **dict.fromkeys(("adapter", "lora", "inclora", "olora", "demix", "cpt_plugin"), RATE),
    "nlora": "rate as lora's; λ not tuned (released 0.4: nothing is learned)",
    "moelora": "rate as lora's",
    "merge_lora": "rate as lora's",
    "sapt": f"rate as lora's; key_rate: {VALIDATION} (0.1, 1)",
    "peft": f"ia3; rate: {VALIDATION}, one domain (30, 100)",
    "prompt": "paper; no rate tried beats the base",
    "progprompt": "paper; no rate tried beats the base",
    **dict.fromkeys(("ncl", "one", "joint"), "no value to choose"),
}


def read_run(path: Path) -> dict[str, Any]:
    """A finished run as an entry of methods.json."""
    scores = json.loads(path.read_text(encoding="utf-8"))
    entry = {name: scores["run"][name] for name in ("method", "mask", "replay", "seed")} | {"variant": ""}
    for name in METRICS:
        if name in scores["metrics"]:
            values = scores["metrics"][name]
            entry[name] = {unit: round(values[unit], 4) for unit in ("nats", "perplexity")}
    entry["nll"] = [[round(value, 4) for value in row] for row in scores["nll"]]
    return entry | {name: scores[name] for name in ("trained", "stored", "flops", "needs_domain")}


def add_runs(data: dict[str, Any], folder: Path) -> None:
    """Replaces the entries at YAML values without a mask by the runs below a folder, for their methods."""
    entries = [read_run(path) for path in sorted(folder.glob("*/scores.json"))]
    methods = {entry["method"] for entry in entries}
    kept = [
        run
        for run in data["runs"]
        if run["method"] not in methods
        or run["variant"] not in ("", "earlier form")
        or (run["mask"], run["replay"]) != ("none", "none")
    ]
    data["runs"] = kept + sorted(entries, key=lambda run: (run["method"], run["seed"]))


def spread(values: list[float], digits: int, *, signed: bool = False) -> str:
    """Mean ± standard deviation."""
    mean = f"{statistics.mean(values):{'+' if signed else ''}.{digits}f}".replace("-", "−")
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def group_runs(data: dict[str, Any], *, mask: str) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for run in data["runs"]:
        if (run["mask"], run["replay"], run["variant"]) == (mask, "none", ""):
            found[run["method"]].append(run)
    return dict(sorted(found.items(), key=lambda item: statistics.mean(run["LC"]["nats"] for run in item[1])))


def main_table(groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A row for each method, the lowest LC first."""
    flops = sum(groups["ncl"][0]["flops"])
    head = [
        "method",
        "LC, perplexity",
        "CPT, nats",
        "FG, nats",
        "general drift, nats",
        "trained",
        "stored, kB",
    ]
    head += ["FLOPs over `ncl`", "domain at test time"]
    lines = [f"| {' | '.join(head)} |", f"| :-- |{' --: |' * 7} :-: |"]
    for method, runs in groups.items():
        nats = {name: [run[name]["nats"] for run in runs if name in run] for name in METRICS}
        cells = [
            f"`{method}`",
            spread([run["LC"]["perplexity"] for run in runs], 1),
            *(spread(nats[name], 3) if nats[name] else "–" for name in ("CPT", "FG")),
            spread(nats["general_drift"], 3, signed=True),
            f"{max(runs[0]['trained']):,}",
            f"{runs[0]['stored'][-1] / 1e3:,.0f}",
            f"{sum(runs[0]['flops']) / flops:.2f}",
            "needed" if runs[0]["needs_domain"] else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mask_table(plain: dict[str, Any], masked: dict[str, Any]) -> list[str]:
    lines = ["| method | LC, perplexity | with `mask=migu` | FG, nats | with `mask=migu` |"]
    lines.append("| :-- | --: | --: | --: | --: |")
    for method, runs in masked.items():
        both = [(runs_of, unit) for unit in ("perplexity", "nats") for runs_of in (plain[method], runs)]
        cells = [
            spread(
                [run["LC" if unit == "perplexity" else "FG"][unit] for run in few],
                1 if unit == "perplexity" else 3,
            )
            if unit == "perplexity" or all("FG" in run for run in few)
            else "–"
            for few, unit in both
        ]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return lines


def chosen_table(groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    found = defaultdict(list)
    for method in sorted(groups):
        found[CHOSEN.get(method, "not tuned")].append(f"`{method}`")
    return [
        "| values | methods |",
        "| :-- | :-- |",
        *(f"| {how} | {', '.join(names)} |" for how, names in found.items()),
    ]


def draw(groups: dict[str, list[dict[str, Any]]]) -> None:
    """Forgetting against the perplexity at the end, a point for each method."""
    figure, axes = plt.subplots(figsize=(9, 6))
    for method, runs in groups.items():
        if all("FG" in run for run in runs):
            x, y = (
                statistics.mean(run[name][unit] for run in runs)
                for name, unit in (("FG", "nats"), ("LC", "perplexity"))
            )
            axes.plot(x, y, "o", color="#0072b2" if not runs[0]["needs_domain"] else "#d55e00", markersize=5)
            axes.annotate(method, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
    axes.set(xlabel="forgetting (FG, nats)", ylabel="perplexity at the end (LC)")
    axes.set_title("Blue: the domain of a text is unknown. Orange: it is given at test time.", fontsize=10)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main(arguments: list[str]) -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    if arguments:
        add_runs(data, Path(arguments[0]))
        DATA.write_text(json.dumps(data), encoding="utf-8")
    groups = group_runs(data, mask="none")
    tables = {
        "main": main_table(groups),
        "mask": mask_table(groups, group_runs(data, mask="migu")),
        "chosen": chosen_table(groups),
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    PAGE.write_text(page, encoding="utf-8")
    draw(groups)


if __name__ == "__main__":
    main(sys.argv[1:])
