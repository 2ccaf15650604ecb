"""How far an advice lies from the front of a larger sweep: `python benchmarks/advice.py SMALL FULL`, two
advice.json of the same texts, the second made with more hours (and another --out).

Prints the share of the best worth that the recommended arm misses in the larger sweep, by its own wish."""

import argparse
import json
from pathlib import Path

from cpt.advising.choice import Point, Wish, find_front, shortfall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("small", type=Path, metavar="SMALL")
    parser.add_argument("full", type=Path, metavar="FULL")
    given = parser.parse_args()
    small, full = (json.loads(path.read_text(encoding="utf-8")) for path in (given.small, given.full))
    wish, arm = Wish(small["wish"]["bound"], small["wish"]["weight"] or 0.0), small["recommended"]["arm"]
    points = {each["arm"]: Point(each["learned"], each["forgotten"]) for each in full["arms"]}
    if arm not in points:
        raise SystemExit(f"{arm} is not in {given.full}; there is: {', '.join(points)}")
    missed = shortfall(points, arm, wish)
    print(f"recommended: {arm}; front of the larger sweep: {', '.join(find_front(points))}")
    print(f"missed of the best worth there: {100 * missed:.1f} %")


if __name__ == "__main__":
    main()
