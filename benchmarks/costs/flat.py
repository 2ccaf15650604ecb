"""Does the hundredth domain cost what the tenth did? `python benchmarks/costs/flat.py --root FOLDER`

Learns `experiment=m2d2_mini` (120 domains, a part of the matrix) in a process of its own and looks at it from
outside: seconds from row to row, memory, open files, threads, bytes on disk. Then the same run again, killed
three times on its way: are the bits the same? Then the first run's policy is widened to the full matrix.

FOLDER holds a folder per domain with {train,valid,test}.txt, and general/. What is there in --runs is not
learned again, so that a part can be looked at anew."""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpt.evaluation.row_files import find_row_files
from cpt.status import read_rows_and_run

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, save

POLL_S = 0.05
NUM_END_DOMAINS = 10  # domains that stand for the beginning of the run, and for its end
KILL_SHARES = (0.2, 0.5, 0.8)  # of the domains, after which a run is killed
SUMS = ("seconds", "processor", "written_bytes")  # figures of a sight since the start: compared by row
BLOCK_BYTES = 512  # the unit of st_blocks
FULL_MATRIX = ("eval.when=each", "eval.columns=all")


@dataclass(frozen=True)
class Sight:
    """What a process looked like just after a row was written."""

    row: int
    seconds: float
    processor: float  # seconds of its threads: what else the machine does counts for less in them
    memory: int  # bytes of its own
    mapped: int  # bytes of files that it has mapped and looked at: the system takes them back as it needs
    files: int
    threads: int
    disk: int  # bytes of the run folder
    written_bytes: int  # that the process has handed to the system, to files and its log


def observe(process: int, folder: Path, *, row: int, start_time: float) -> Sight:
    proc_folder = Path("/proc") / str(process)
    facts = dict(line.split(":", 1) for line in (proc_folder / "status").read_text().splitlines())
    return Sight(
        row=row,
        seconds=time.monotonic() - start_time,
        processor=processor_seconds(proc_folder),
        memory=int(facts["RssAnon"].split()[0]) * 1024,
        mapped=int(facts["RssFile"].split()[0]) * 1024,
        files=len(list((proc_folder / "fd").iterdir())),
        threads=int(facts["Threads"]),
        disk=sum(disk_bytes(folder)),
        written_bytes=count_written_bytes(proc_folder),
    )


def disk_bytes(folder: Path) -> Iterator[int]:
    """Of each file that is there: the run removes some meanwhile."""
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield (Path(directory) / name).stat().st_blocks * BLOCK_BYTES


def processor_seconds(proc_folder: Path) -> float:
    user, system = (proc_folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def count_written_bytes(proc_folder: Path) -> int:
    facts = dict(line.split(": ") for line in (proc_folder / "io").read_text().splitlines())
    return int(facts["wchar"])


def count_rows(folder: Path) -> int:
    """The rows of scores.json, without its matrix, and those in files of their own."""
    try:
        rows, _ = read_rows_and_run(folder / "scores.json")
    except FileNotFoundError:
        return 0
    return len(rows) + len(list(find_row_files(folder, first=len(rows))))


def start_run(folder: Path, overrides: Sequence[str], *, log: Path) -> subprocess.Popen:
    line = [sys.executable, "run.py", *overrides, f"hydra.run.dir={folder}"]
    with log.open("ab") as file:
        return subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=file)


def observe_run(folder: Path, overrides: Sequence[str], *, kill_at_row: int | None = None) -> list[Sight]:
    """Starts a run, or resumes it, and waits for its end; returns its sights after each row. With
    `kill_at_row` the run is killed (SIGKILL) a second after it has written so many rows.

    Raises RuntimeError for a run that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    start_time = time.monotonic()
    sights = []
    process = start_run(folder, overrides, log=folder.with_suffix(".log"))
    rows = count_rows(folder)

    while process.poll() is None:
        time.sleep(POLL_S)
        num_rows = count_rows(folder)
        if num_rows > rows and process.poll() is None:
            rows = num_rows
            sights.append(observe(process.pid, folder, row=rows, start_time=start_time))
        if kill_at_row is not None and rows >= kill_at_row:
            time.sleep(1.0)  # into the next domain
            process.send_signal(signal.SIGKILL)
            process.wait()
            return sights

    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: see {folder.with_suffix('.log')}")
    return sights


def take_prints(folder: Path) -> dict[str, str]:
    """The fingerprints of a finished run: hashes of what it has measured, and of its last weights."""
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    (*_, last) = sorted((folder / "stages").glob("*.pt"))
    text = json.dumps([scores[name] for name in ("rows", "nll", "metrics", "modules", "stored", "flops")])
    return {
        "scores": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "weights": hashlib.blake2b(last.read_bytes(), digest_size=8).hexdigest(),
    }


def kill_and_resume(folder: Path, overrides: Sequence[str], *, num_domains: int) -> list[int]:
    """Makes a run that is killed at each of KILL_SHARES, resumed each time, and finished in the end. Returns
    the number of its rows at each kill."""
    shutil.rmtree(folder, ignore_errors=True)
    rows_when_killed = []
    for share in KILL_SHARES:
        observe_run(folder, overrides, kill_at_row=round(share * num_domains))
        rows_when_killed.append(count_rows(folder))
    observe_run(folder, overrides)
    return rows_when_killed


def compare_ends(sights: Sequence[Sight]) -> dict[str, Any]:
    """Medians over some domains at the beginning (from the 10th on) and at the end, and their ratio."""
    early_rows = range(NUM_END_DOMAINS + 1, 2 * NUM_END_DOMAINS + 1)
    late_rows = range(sights[-1].row - NUM_END_DOMAINS, sights[-1].row)
    ends = {}
    for name in (*SUMS, "memory", "mapped", "files", "threads"):
        early = statistics.median(list_figures(sights, name, early_rows))
        late = statistics.median(list_figures(sights, name, late_rows))
        ends[name] = {"early": early, "late": late, "ratio": late / early}
    return ends


def list_figures(sights: Sequence[Sight], name: str, rows: range) -> list[float]:
    """One figure of a run at some of its rows; of a sum, what was added per row since the sight before."""
    figures = []
    for previous, current in pairwise(sights):
        if current.row in rows:
            figure = getattr(current, name)
            if name in SUMS:
                figure = (figure - getattr(previous, name)) / (current.row - previous.row)
            figures.append(figure)
    return figures


def count_cells(folder: Path) -> tuple[int, int]:
    """The number of cells of a run's matrix that were measured, and the number of all cells."""
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    num_measured = 0
    for row in scores["nll"]:
        num_measured += sum(1 for cell in row if cell is not None)
    return num_measured, sum(map(len, scores["nll"]))


def widen(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds to fill the matrix of a finished run, and its cells before and after."""
    before = count_cells(folder)
    start_time = time.monotonic()
    observe_run(folder, [*overrides, *FULL_MATRIX])
    return {"before": before, "after": count_cells(folder), "seconds": time.monotonic() - start_time}


def format_lines(results: Mapping[str, Any]) -> Iterator[str]:
    for name, figures in results["ends"].items():
        yield f"{name:10}{figures['early']:>16,.2f}{figures['late']:>16,.2f}{figures['ratio']:>8.3f}"
    if "killed" in results:
        yield f"killed after rows {results['killed']['rows']}: same {results['killed']['same']}"
    if "widened" in results:
        yield f"cells {results['widened']['before']} -> {results['widened']['after']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the data; see above")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "flat", help="the run folders")
    parser.add_argument("--config", nargs="+", default=["method=ncl"], help="changes to the config")
    parser.add_argument("--parts", nargs="*", default=["killed", "widened"], help="beside the run itself")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    overrides = [
        "experiment=m2d2_mini",
        f"domains.root={options.root.absolute()}",
        "order=random",
        "save_all_stages=true",
        *options.config,
    ]

    straight = options.runs / "straight"
    record_file = straight.with_suffix(".json")
    if not record_file.exists():
        shutil.rmtree(straight, ignore_errors=True)
        sights = [asdict(sight) for sight in observe_run(straight, overrides)]
        record_file.write_text(
            json.dumps({"sights": sights, "prints": take_prints(straight)}), encoding="utf-8"
        )
    record = json.loads(record_file.read_text(encoding="utf-8"))
    sights = [Sight(**fields) for fields in record["sights"]]
    results = {"ends": compare_ends(sights), **record}

    if "killed" in options.parts:
        rows = kill_and_resume(options.runs / "killed", overrides, num_domains=len(sights) - 1)
        is_same = take_prints(options.runs / "killed") == record["prints"]
        results["killed"] = {"rows": rows, "same": is_same}
    if "widened" in options.parts:
        results["widened"] = widen(straight, overrides)
    print("\n".join(format_lines(results)))
    settings = {"config": options.config, "threads": options.threads}
    save("flat", {"options": settings, **results}, out=options.out)


if __name__ == "__main__":
    main()
