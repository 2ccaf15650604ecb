"""A run of very many domains: does the last one cost what the twentieth did?

    python benchmarks/long.py --domains 1000 --methods ncl

Each domain has a few lines of text and is learned for 3 steps; of the matrix the last rows and the
nearest columns are measured. The run is a process of its own that is looked at from outside
(benchmarks/flat.py, which does so for 120 domains of real text): seconds and seconds of the processor
from row to row, memory, open files, threads, and bytes on disk. It is flat where the medians of the last
ten domains are at most 10 % above those of the eleventh to the twentieth, and so is the mean processor time
of the second half of the domains over that of the first: some rows cost more, as `scores.json` is written."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from flat import FEW, Sight, compare_ends, watch  # noqa: E402

from tests.campaigns.frame import RESULTS  # noqa: E402
from tests.conftest import SMALL, VOCABULARIES, sentences  # noqa: E402

MOST = 1.10  # the last domains over the early ones
FLAT = ("processor", "mean", "memory", "files", "threads")
GIVEN = ("trainer.steps=3", "eval.rows=every:50", "eval.columns=near:4", "order=reverse", "domains=texts")


def write_domains(root: Path, count: int) -> None:
    """So many domains with texts of their own, and the general one."""
    words = list(VOCABULARIES.values())
    for number in range(count + 1):
        folder = root / (f"domain{number:04d}" if number < count else "general")
        folder.mkdir(parents=True)
        lines = sentences(words[number % len(words)], count=40, seed=number)
        (folder / "all.txt").write_text("\n".join(lines) + "\n")


def mean_costs(sights: list[Sight]) -> dict[str, float]:
    """Seconds of the processor by domain, a mean over the early and the late half of the domains; the first
    ten and the last, which the whole matrix is scored after, left out."""
    own = [each for each in sights if FEW < each.row < sights[-1].row]
    first, middle, last = own[0], own[len(own) // 2], own[-1]
    pairs = ((first, middle), (middle, last))
    early, late = ((end.processor - begin.processor) / max(1, end.row - begin.row) for begin, end in pairs)
    return {"early": early, "late": late, "ratio": late / early}


def measure(place: Path, method: str, domains: int) -> dict[str, Any]:
    """A run of one method."""
    write_domains(place / "texts", domains)
    places = [f"domains.root={place / 'texts'}", f"cache_dir={place / 'cache'}"]
    sights = watch(place / "run", [*places, *SMALL, *GIVEN, f"method={method}"])
    ends = compare_ends(sights) | {"mean": mean_costs(sights)}
    twentieth = min(sights, key=lambda each: abs(each.row - 2 * FEW))
    disk = (sights[-1].disk - twentieth.disk) / max(1, sights[-1].row - twentieth.row)
    found = {"method": method, "domains": domains, "ends": ends, "disk_per_domain": disk}
    return found | {"flat": all(ends[name]["ratio"] <= MOST for name in FLAT)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--domains", type=int, default=1000)
    parser.add_argument("--methods", nargs="+", default=["ncl"])
    parser.add_argument("--out", type=Path, default=RESULTS / "long.json")
    given = parser.parse_args()
    found = []
    for method in given.methods:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(folder), method, given.domains))
        for name, each in found[-1]["ends"].items():
            print(f"{method:10}{name:10}{each['early']:>16,.3f}{each['late']:>16,.3f}{each['ratio']:>8.3f}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"campaign": "long", "runs": found}, indent=1) + "\n")
    return 0 if all(each["flat"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
