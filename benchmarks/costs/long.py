"""A run of very many domains: does the last one cost what the twentieth did?

    python benchmarks/costs/long.py --domains 1000 --methods ncl

Each domain has a few lines of text and is trained for 3 steps; of the matrix the last rows and the
nearest columns are evaluated. The run is a process of its own that is observed from outside
(flat.py, which does so for 120 domains of real text): seconds and CPU seconds from row to row,
bytes written, memory, open files, threads, and bytes on disk. A run is flat where the medians of the last
ten domains are at most 10 % above those of the eleventh to the twentieth, and so are the means of CPU
seconds and of bytes written by the second half of the domains over those of the first: some rows cost more,
as `scores.json` is written after them."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from flat import NUM_END_DOMAINS, Sight, compare_ends, observe_run  # noqa: E402

from tests.campaigns.frame import RESULTS  # noqa: E402
from tests.conftest import SMALL, VOCABULARIES, sentences  # noqa: E402

MAX_RATIO = 1.10  # of the last domains to the early ones
FLAT_FIGURES = ("processor", "written_bytes", "memory", "files", "threads")
FLAT_MEANS = ("processor", "written_bytes")
NUM_DOMAINS_OF_MEANS = 100  # at the beginning and at the end, of which the results have means
OVERRIDES = ("trainer.steps=3", "eval.when=every:50", "eval.columns=near:4", "order=reverse", "domains=texts")


def write_domains(root: Path, num_domains: int) -> None:
    """Domains with texts of their own, and the general one."""
    words = list(VOCABULARIES.values())
    for number in range(num_domains + 1):
        folder = root / (f"domain{number:04d}" if number < num_domains else "general")
        folder.mkdir(parents=True)
        lines = sentences(words[number % len(words)], count=40, seed=number)
        (folder / "all.txt").write_text("\n".join(lines) + "\n")


def compare_halves(sights: Sequence[Sight], name: str) -> dict[str, float]:
    """One of SUMS by domain, its mean over the early and the late half of the domains; without the first ten,
    and without the last, after which the whole matrix is evaluated."""
    counted_sights = [sight for sight in sights if NUM_END_DOMAINS < sight.row < sights[-1].row]
    middle = counted_sights[len(counted_sights) // 2]
    early = mean_by_domain(counted_sights[0], middle, name)
    late = mean_by_domain(middle, counted_sights[-1], name)
    return {"early": early, "late": late, "ratio": late / early}


def mean_by_domain(start: Sight, end: Sight, name: str) -> float:
    """One of SUMS by domain between two sights."""
    return (getattr(end, name) - getattr(start, name)) / max(1, end.row - start.row)


def summarize_domains(sights: Sequence[Sight]) -> dict[str, float]:
    """What each of some domains took, by mean, and the bytes of memory after the last of them."""
    first = sights[0]
    last = sights[-1]
    return {
        "first_domain": first.row,
        "last_domain": last.row - 1,
        "seconds": mean_by_domain(first, last, "seconds"),
        "processor": mean_by_domain(first, last, "processor"),
        "written_bytes": mean_by_domain(first, last, "written_bytes"),
        "memory": last.memory,
    }


def measure(folder: Path, method: str, num_domains: int) -> dict[str, Any]:
    """A run of one method."""
    write_domains(folder / "texts", num_domains)
    paths = [f"domains.root={folder / 'texts'}", f"cache_dir={folder / 'cache'}"]
    sights = observe_run(folder / "run", [*paths, *SMALL, *OVERRIDES, f"method={method}"])
    ends = compare_ends(sights)
    halves = {name: compare_halves(sights, name) for name in FLAT_MEANS}

    # Row 1 is the base. After the last domain the whole matrix is evaluated, which is left out.
    last_row = sights[-1].row - 1
    num_rows = min(NUM_DOMAINS_OF_MEANS, last_row - 1)
    first_sights = [sight for sight in sights if sight.row <= 1 + num_rows]
    last_sights = [sight for sight in sights if last_row - num_rows <= sight.row <= last_row]

    twentieth = min(sights, key=lambda sight: abs(sight.row - 2 * NUM_END_DOMAINS))
    disk = (sights[-1].disk - twentieth.disk) / max(1, sights[-1].row - twentieth.row)
    ratios = [ends[name]["ratio"] for name in FLAT_FIGURES]
    ratios += [half["ratio"] for half in halves.values()]
    return {
        "method": method,
        "domains": num_domains,
        "ends": ends,
        "halves": halves,
        "first": summarize_domains(first_sights),
        "last": summarize_domains(last_sights),
        "disk_per_domain": disk,
        "flat": max(ratios) <= MAX_RATIO,
    }


def print_result(result: dict[str, Any]) -> None:
    comparisons = dict(result["ends"])
    comparisons.update({f"mean {name}": figures for name, figures in result["halves"].items()})
    for name, figures in comparisons.items():
        values = f"{figures['early']:>16,.3f}{figures['late']:>16,.3f}{figures['ratio']:>8.3f}"
        print(f"{result['method']:10}{name:20}{values}")
    for name in ("first", "last"):
        print(name, result[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--domains", type=int, default=1000)
    parser.add_argument("--methods", nargs="+", default=["ncl"])
    parser.add_argument("--out", type=Path, default=RESULTS / "long.json")
    options = parser.parse_args()
    results = []
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(Path(folder), method, options.domains))
        print_result(results[-1])

    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"campaign": "long", "day": str(date.today()), "runs": results}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(result["flat"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
