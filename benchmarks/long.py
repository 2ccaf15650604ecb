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

from flat import FEW, Sight, compare_ends, observe_run  # noqa: E402

from tests.campaigns.frame import RESULTS  # noqa: E402
from tests.conftest import SMALL, VOCABULARIES, sentences  # noqa: E402

MOST = 1.10  # the last domains over the early ones
FLAT = ("processor", "mean", "memory", "files", "threads")
GIVEN = ("trainer.steps=3", "eval.when=every:50", "eval.columns=near:4", "order=reverse", "domains=texts")


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
    counted_sights = [sight for sight in sights if FEW < sight.row < sights[-1].row]
    middle = counted_sights[len(counted_sights) // 2]
    early = mean_cost(counted_sights[0], middle)
    late = mean_cost(middle, counted_sights[-1])
    return {"early": early, "late": late, "ratio": late / early}


def mean_cost(start: Sight, end: Sight) -> float:
    """Seconds of the processor by domain between two sights."""
    return (end.processor - start.processor) / max(1, end.row - start.row)


def measure(folder: Path, method: str, domains: int) -> dict[str, Any]:
    """A run of one method."""
    write_domains(folder / "texts", domains)
    paths = [f"domains.root={folder / 'texts'}", f"cache_dir={folder / 'cache'}"]
    sights = observe_run(folder / "run", [*paths, *SMALL, *GIVEN, f"method={method}"])
    ends = compare_ends(sights) | {"mean": mean_costs(sights)}
    twentieth = min(sights, key=lambda sight: abs(sight.row - 2 * FEW))
    disk = (sights[-1].disk - twentieth.disk) / max(1, sights[-1].row - twentieth.row)
    results = {"method": method, "domains": domains, "ends": ends, "disk_per_domain": disk}
    return results | {"flat": all(ends[name]["ratio"] <= MOST for name in FLAT)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--domains", type=int, default=1000)
    parser.add_argument("--methods", nargs="+", default=["ncl"])
    parser.add_argument("--out", type=Path, default=RESULTS / "long.json")
    options = parser.parse_args()
    results = []
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(Path(folder), method, options.domains)
        results.append(result)
        for name, end in result["ends"].items():
            print(f"{method:10}{name:10}{end['early']:>16,.3f}{end['late']:>16,.3f}{end['ratio']:>8.3f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"campaign": "long", "runs": results}, indent=1) + "\n")
    return 0 if all(result["flat"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
