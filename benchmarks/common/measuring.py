"""How the benchmarks measure: paired rounds on a quiet machine, medians, intervals, and what it ran on."""

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "lightning", "transformers", "accelerate", "datasets", "hydra-core", "numpy")
TICKS = os.sysconf("SC_CLK_TCK")
RESAMPLES = 10_000
QUIET_CORES = 0.1  # what all other processes may use together


def read_busy_seconds() -> float:
    """Seconds of CPU time that all processes of the machine have used since it was started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft, stolen = fields
    return (user + nice + system + interrupts + soft + stolen) / TICKS


def measure_foreign_cores(*, seconds: float = 1.0) -> float:
    """Cores that other processes use while this one sleeps."""
    before = read_busy_seconds()
    time.sleep(seconds)
    return (read_busy_seconds() - before) / seconds


def wait_until_quiet(patience: float) -> float:
    """Waits until other processes leave the machine alone, at most `patience` seconds; gives the seconds
    waited."""
    start_time = time.monotonic()
    while time.monotonic() - start_time < patience and measure_foreign_cores() > QUIET_CORES:
        time.sleep(1.0)
    return time.monotonic() - start_time


def compare_times(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median of the ratios `theirs / ours` of paired times, with its bootstrap 95 % interval: above 1, ours
    is faster."""
    ratios = np.asarray(theirs) / np.asarray(ours)
    draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high), "pairs": len(ratios)}


def summarize_times(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def rotate(items: Sequence[Any], turn: int) -> list[Any]:
    """The items in an order that begins elsewhere each turn, so that no subject is always first."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory and versions; no name of the host."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        versions[name] = metadata.version(name)
    return {
        "processor": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(num_bytes / 2**30),
        "versions": versions,
        "cpt_digest": hash_program(),
    }


def hash_program() -> str:
    """A hash of the program and config that were measured."""
    files = sorted([*(ROOT / "cpt").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")])
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()


def save(name: str, results: Mapping[str, Any], *, out: str | None) -> Path:
    """Writes results with the day and the machine; by default where the README quotes them from."""
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "day": date.today().isoformat(), "machine": describe_machine(), **results}
    path.write_text(json.dumps(round_numbers(document), indent=1) + "\n")
    return path


def round_numbers(value: Any) -> Any:
    """Numbers to seven digits, at any depth."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {name: round_numbers(element) for name, element in value.items()}
    return [round_numbers(element) for element in value] if isinstance(value, list | tuple) else value
