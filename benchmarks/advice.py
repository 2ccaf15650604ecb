"""How far an advice lies from the front of more runs.

`python benchmarks/advice.py SMALL FULL`: two advice.json of the same texts, the second made with more hours
(and another --out); the share of the best worth that the recommended arm misses in the larger sweep.

`python benchmarks/advice.py`: the same for the runs of docs/studies/das6.md that are candidates of an advice,
chosen on one seed and measured on the others."""

import argparse
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from cpt.contrib.advise.advice import QUANTITIES, Point, Wish, choose, find_front, trade, worth
from cpt.evaluation.metrics import Layout

PUBLISHED = Path(__file__).parent / "results/studies/das6_mini.jsonl.gz"
WISHES = [*(Wish(None, weight) for weight in (0.5, 1.0, 2.0)), *(Wish(bound, 1.0) for bound in (0.1, 0.2))]


def shortfall(points: Mapping[str, Point], arm: str, wish: Wish) -> float:
    """The share of the best allowed worth that an arm misses: 0 on the front, nan where it breaks the bound
    or the best is worth nothing."""
    bound = math.inf if wish.bound is None else wish.bound
    weight = wish.weight if wish.bound is None else 0.0
    allowed = {name: worth(point, weight) for name, point in points.items() if point.forgotten <= bound}
    best = max(allowed.values(), default=0.0)
    return (best - allowed[arm]) / best if arm in allowed and best > 0 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="SMALL FULL")
    files = parser.parse_args().files
    if len(files) not in (0, 2):
        raise SystemExit(f"{len(files)} files; allowed: none, or two advice.json")
    print(*(compare(*files) if files else hold_out(read_published())), sep="\n")


def compare(small: Path, full: Path) -> Iterable[str]:
    """What the recommended arm of one advice misses in another."""
    one, other = (json.loads(path.read_text(encoding="utf-8")) for path in (small, full))
    wish, arm = Wish(one["wish"]["bound"], one["wish"]["weight"] or 0.0), one["recommended"]["arm"]
    points = {each["arm"]: Point(each["learned"], each["forgotten"]) for each in other["arms"]}
    if arm not in points:
        raise SystemExit(f"{arm} is not in {full}; there is: {', '.join(points)}")
    yield f"recommended: {arm}; front of the larger sweep: {', '.join(find_front(points))}"
    yield f"missed of the best worth there: {100 * shortfall(points, arm, wish):.1f} %"


def read_published() -> Mapping[str, Mapping[int, Point]]:
    """By arm and seed, of the runs in the paper's order with default options."""
    found: dict[str, dict[int, Point]] = defaultdict(dict)
    for line in gzip.decompress(PUBLISHED.read_bytes()).splitlines():
        scores = json.loads(line)
        run = scores["run"]
        named = run["method"] in ("ncl", "ewc", "kd", "lora", "replay") and not run["variant"]
        if not named or run["mask"] != "none" or run["order"][0] != "restaurant":
            continue
        layout = Layout(**{name: scores[name] for name in ("rows", "domains", "tokens", "bytes")})
        values = trade(np.array(scores["nll"], float), layout)
        found[run["method"]][run["seed"]] = Point(*(float(values[name]) for name in QUANTITIES[:2]))
    return found


def hold_out(arms: Mapping[str, Mapping[int, Point]]) -> Iterable[str]:
    """What the choice by one seed misses of the best worth on the other seeds."""
    seeds = sorted(set.intersection(*(set(points) for points in arms.values())))
    yield f"{len(arms)} arms, {len(seeds)} seeds; front of all: {', '.join(find_front(mean(arms, seeds)))}"
    for wish in WISHES:
        for seed in seeds:
            own, others = mean(arms, [seed]), mean(arms, [each for each in seeds if each != seed])
            arm, _ = choose(own, {name: point.forgotten for name, point in own.items()}, wish)
            asked = f"weight {wish.weight:g}" if wish.bound is None else f"at most {wish.bound:g} forgotten"
            yield f"{asked}, seed {seed}: {arm}, missed {100 * shortfall(others, arm, wish):.1f} %"


def mean(arms: Mapping[str, Mapping[int, Point]], seeds: Iterable[int]) -> dict[str, Point]:
    return {
        name: Point(*np.mean([points[seed] for seed in seeds], axis=0).tolist())
        for name, points in arms.items()
    }


if __name__ == "__main__":
    main()
