"""What the fields of `scores.json` hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from cpt.core.schema import check_types
from cpt.evaluation.metrics import METRICS, UNITS

# kinds of seconds; "start": what precedes the stages
PHASES = ("start", "generate", "learn", "score", "endtasks", "answers", "probes")
METRIC = {"interval": dict[str, list[float | None]], "terms": list[int], **dict.fromkeys(UNITS, float | None)}
METRIC |= {"median": dict[str, float | None]}
SIMILARITY = {"names": list[str], "matrix": list[list[float]], "general": list[float], "embedding": str}


def check_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError for a metric that is unknown, lacks a unit, or whose interval has not two bounds."""
    for name, metric in metrics.items():
        if name not in METRICS:
            raise ValueError(f"metrics.{name} is unknown; allowed: {', '.join(METRICS)}")
        check_types({"interval": {}, "terms": [], "median": {}} | metric, METRIC, of=f"metrics.{name}")
        if not set(metric.get("median", {})) <= set(UNITS):
            raise ValueError(f"metrics.{name}.median: allowed are {', '.join(UNITS)}")
        for unit, bounds in metric.get("interval", {}).items():
            if unit not in UNITS or len(bounds) != 2:
                raise ValueError(
                    f"metrics.{name}.interval.{unit}: needed are two bounds in {', '.join(UNITS)}"
                )


def check_similarity(similarity: Mapping[str, Any], *, order: Sequence[str]) -> None:
    """Raises ValueError for a similarity that is not of the domains in their order."""
    if not similarity:
        return
    check_types(similarity, SIMILARITY, of="similarity")
    matrix = similarity["matrix"]
    sizes = {len(matrix), len(similarity["general"]), *map(len, matrix)}
    if similarity["names"] != list(order) or sizes != {len(order)}:
        raise ValueError(f"similarity is of {similarity['names'][:3]}, …, needed are {list(order)[:3]}, …")
