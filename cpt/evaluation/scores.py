"""Scores of a run: `scores.json`, the losses by document beside it, and what makes runs comparable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from cpt.core.config import digest
from cpt.core.files import check_archive
from cpt.core.schema import check_types
from cpt.evaluation.change import Losses
from cpt.evaluation.journal import MetricRecord, read_journal, remove_journal
from cpt.evaluation.metrics import (
    METRICS,
    UNITS,
    Array,
    Arrays,
    Layout,
    compute_medians,
    compute_values,
    count_terms,
    intervals,
)
from cpt.evaluation.options import FULL
from cpt.evaluation.task_metrics import ENDTASK_METRICS, cube

VERSION = 3
COSTS = ("trained", "stored", "seen", "flops", "memory", "skipped")  # of a stage
NOTED = ("rates", "leak", "spikes")  # lists of a stage
# kinds of seconds; "start": what precedes the stages
PHASES = ("start", "generate", "learn", "score", "endtasks", "answers", "probes")
RUN = dict.fromkeys(("name", "method", "mask", "replay", "variant", "model", "objective"), str)
RUN |= {"order": list[str], "seed": int, "finished": bool}
RUN_KEYS = tuple(RUN)
NUMBER, TEXTS, SERIES = float | None, dict[str, str], list[float | None]
# The fields of what scores.json holds in mappings: "*" stands for every key, a key with "?" may be missing.
RESULTS: dict[str, Any] = {
    "run": RUN,
    "metrics": {
        "*": {
            **dict.fromkeys(UNITS, NUMBER),
            **{"interval?": {"*": SERIES}, "terms?": list[int], "median?": dict[str, NUMBER]},
        }
    },
    "endtasks": {
        **{"when": str, "seconds": float, "tasks": list[str], "seeds": list[int], "metric": TEXTS},
        **{"classes": dict[str, int], "examples": dict[str, int]},
        "scores": dict.fromkeys(ENDTASK_METRICS, list[Any]),
    },
    "answers": {
        **{"when": str, "seconds": float, "metrics": dict[str, float], "intervals": dict[str, list[float]]},
        "tasks": {
            "*": {"examples": int, "chance": NUMBER, "majority": NUMBER, "measures": dict[str, SERIES]}
        },
    },
    "probes": {
        **{"when": str, "seconds": float, "harness": str},
        "tasks": {
            "*": {
                **{"shots": int | None, "limit": NUMBER, "examples": int, "version": str, "truncated": int},
                **{"chance": NUMBER, "metric": str, "higher": bool, "values": SERIES, "errors": SERIES},
            }
        },
    },
    "similarity": {
        **{"names": list[str], "matrix": list[list[float]], "general": list[float], "embedding": str}
    },
}


@dataclass(kw_only=True)
class Scores(Layout):
    """What a run has measured so far: `scores.json`, in which a number that is not finite is null."""

    scored: list[int]  # per column, positions that are scored
    run: dict[str, Any]  # RUN_KEYS
    texts: dict[str, dict[str, Any]]  # per column, digest, documents, ...
    config_digest: str
    versions: dict[str, str]
    # [row][column], nats per scored token; None: not measured
    nll: list[list[float | None]] = field(default_factory=list)
    policy: dict[str, str] = field(default_factory=FULL.copy)  # which cells a finished run was to have
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: list[dict[str, dict[str, float]]] = field(default_factory=list)  # [row]{text: {part: weight}}
    trained: list[int] = field(default_factory=list)  # [row], parameters that the stage trained
    stored: list[int] = field(default_factory=list)  # [row], bytes that the method keeps beside the model
    seen: list[int] = field(default_factory=list)  # [row], tokens that the stage's steps read
    flops: list[int] = field(default_factory=list)  # [row], floating-point operations of the stage
    memory: list[int] = field(default_factory=list)  # [row], peak bytes of the stage
    skipped: list[int] = field(default_factory=list)  # [row], steps left out: loss or gradient not finite
    rates: list[list[float]] = field(default_factory=list)  # [row], of the first step, highest, of the last
    leak: list[list[float]] = field(default_factory=list)  # [row], see cpt.trainer.callbacks
    spikes: list[list[float]] = field(default_factory=list)  # [row], see cpt.optim.spikes
    grown: list[int] = field(default_factory=list)  # stages that had been learned when domains were added
    endtasks: dict[str, Any] = field(default_factory=dict)  # these three: see cpt.trainer.evaluators
    answers: dict[str, Any] = field(default_factory=dict)
    probes: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)  # see the function conditions
    monitor: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stage, cpt.evaluation.monitor
    numerics: dict[str, str] = field(default_factory=dict)  # the precision, and how attention was computed
    # name; origin: built, folder or hub; of a hub its revision
    base: dict[str, str] = field(default_factory=dict)
    moved: dict[str, list[float]] = field(default_factory=dict)  # see cpt.models.weights
    similarity: dict[str, Any] = field(default_factory=dict)  # SIMILARITY, where it decided the order
    needs_domain: bool = False  # whether a text's domain must be known at test time
    alone: bool = False  # whether each domain was learned from the base, so that no model has met them all
    loading: str = ""  # a Python expression that loads the exported model
    objective: float | list[float | None] | None = None  # what a sweeper minimises
    seconds: float = 0.0
    phases: dict[str, dict[str, float]] = field(default_factory=dict)  # {one of PHASES: {stage: seconds}}
    version: int = VERSION

    def __post_init__(self) -> None:
        """Raises ValueError for fields of another type, shape or name: a file may be damaged."""
        check_types(vars(self), get_field_types(type(self)))
        for name, declared in RESULTS.items():
            if getattr(self, name) or name == "run":
                check_fields(getattr(self, name), declared, name)
        rows, columns = len(self.rows), len(self.domains)
        if len({*self.rows}) < rows or len({*self.domains}) < columns or self.rows[:1] not in ([], ["base"]):
            raise ValueError(f"rows {self.rows} or columns {self.domains} occur twice, or base is not first")
        if {len(self.tokens), len(self.bytes), len(self.scored), *map(len, self.nll)} - {columns}:
            raise ValueError(f"tokens, bytes, scored or a row of nll are not of the columns {self.domains}")
        lengths = {len(getattr(self, name)) for name in ("parts", *NOTED, *COSTS)}
        if len(self.nll) != rows or not lengths <= {0, rows}:
            raise ValueError(f"nll, parts or costs ({', '.join(COSTS)}) are not of the rows {self.rows}")
        if unknown := (set(self.phases) - {*PHASES}) | (set(self.metrics) - {*METRICS}):
            raise ValueError(f"phases or metrics are unknown: {', '.join(sorted(unknown))}")
        given, bounds = self.endtasks, [*self.answers.get("intervals", {}).values()]
        lists = [[*task["measures"].values()] for task in self.answers.get("tasks", {}).values()]
        lists += [[task["values"], task["errors"]] for task in self.probes.get("tasks", {}).values()]
        for name, metric in self.metrics.items():
            bounds += metric.get("interval", {}).values()
            if not {*metric.get("interval", {}), *metric.get("median", {})} <= {*UNITS}:
                raise ValueError(f"metrics.{name} is in other units; allowed: {', '.join(UNITS)}")
        if any(len(each) != 2 for each in bounds):
            raise ValueError("metrics or answers have an interval of other than two bounds")
        if any(len({*map(len, each)}) != 1 or len(each[0]) > rows for each in lists):
            raise ValueError(f"answers or probes have other than one value in at most {rows} rows")
        if given and any({*given[key]} != {*given["tasks"]} for key in ("metric", "classes", "examples")):
            raise ValueError(f"endtasks are not of the tasks {given['tasks']}")
        if given and any(
            len(cube(given, kind)) > rows for kind in (*ENDTASK_METRICS, *given["metric"].values())
        ):
            raise ValueError(f"endtasks have more than {rows} rows")
        self.phases = {kind: self.phases.get(kind, {}) for kind in PHASES}

    @property
    def matrix(self) -> Array:
        """The losses as [row, column]; nan where one was not measured, or was not finite."""
        return np.array(self.nll or np.empty((0, len(self.domains))), dtype=float)

    @property
    def cells(self) -> Array:
        """The same with infinity for what was measured and was not finite: no mean may leave it out."""
        cells = self.matrix
        missing = np.isnan(cells).sum(1)
        for number, row in enumerate(self.nll):
            if row.count(None) < missing[number]:
                cells[number] = [np.nan if x is None else np.inf if np.isnan(x) else x for x in row]
        return cells

    @property
    def diagonal(self) -> dict[str, float]:
        """Loss (nats) on each learned domain in the row of its name."""
        return {d: float(self.matrix[self.rows.index(d), self.domains.index(d)]) for d in self.learned}

    @property
    def state(self) -> str:
        """How far the run is, for people."""
        done = f"{len(self.rows)} rows done, the last: {self.rows[-1]}" if self.rows else "no row done"
        return f"{'finished' if self.run['finished'] else 'unfinished'}, {done}"

    @property
    def growth(self) -> float | None:
        """Bytes that the method stores more with each domain, a mean; None before there are two."""
        return (self.stored[-1] - self.stored[1]) / (len(self.stored) - 2) if len(self.stored) > 2 else None

    def append(
        self,
        row: str,
        *,
        nll: Sequence[float | None],
        parts: Mapping[str, Mapping[str, float]] | None = None,
        **costs: Any,
    ) -> None:
        """Adds the row of the model after a stage ("base" first), without updating the metrics; what of COSTS
        is not given is 0, what of NOTED nothing."""
        if row in self.rows or len(nll) != len(self.domains):
            raise ValueError(f"row {row}: {len(nll)} losses; needed: {len(self.domains)}, not in {self.rows}")
        if unknown := sorted(set(costs) - {*NOTED, *COSTS}):
            raise TypeError(f"costs {unknown}; allowed: {', '.join((*NOTED, *COSTS))}")
        self.rows.append(row)
        self.nll.append([None if x is None else float(x) for x in nll])
        self.parts.append({text: dict(weights) for text, weights in (parts or {}).items() if weights})
        for name in (*NOTED, *COSTS):
            noted: list[Any] = getattr(self, name)
            none = [] if name in NOTED else 0
            noted += [none] * (len(self.rows) - 1 - len(noted))  # of rows that were made without
            given = costs.get(name, none)
            noted.append([*given] if name in NOTED else int(given))

    def take_over(self, earlier: Scores) -> Scores:
        """These scores with what a run of fewer domains has measured; cells of further texts are missing."""
        for name in ("rows", "parts", *NOTED, "phases", "endtasks", "answers", "probes", "monitor", *COSTS):
            setattr(self, name, getattr(earlier, name))
        cells = [dict(zip(earlier.domains, row, strict=True)) for row in earlier.nll]
        self.nll = [[row.get(text) for text in self.domains] for row in cells]
        self.grown = [*earlier.grown, len(self.rows) - 1]
        return self

    def fill(
        self, row: int, nll: Mapping[str, float | None], parts: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Adds cells that were missing in a row, by text, without updating the metrics."""
        for text, value in nll.items():
            self.nll[row][self.domains.index(text)] = None if value is None else float(value)
        self.parts[row] |= {text: dict(weights) for text, weights in parts.items() if weights}

    def measured(self, row: int) -> list[str]:
        """The texts that were scored in a row."""
        return [text for text, value in zip(self.domains, self.nll[row], strict=True) if value is not None]

    def record(self, row: int) -> str:
        """All that was measured of a row, as a line of the journal."""
        name, cells = self.rows[row], zip(self.domains, self.nll[row], strict=True)
        record: MetricRecord = {"row": row, "name": name, "parts": self.parts[row]}
        record["nll"] = {text: value for text, value in cells if value is not None}
        record["phases"] = {kind: stages[name] for kind, stages in self.phases.items() if name in stages}
        record["monitor"] = {name: self.monitor[name]} if name in self.monitor else {}
        noted = {each: getattr(self, each)[row : row + 1] for each in (*NOTED, *COSTS)}
        return encode(record | {each: values[0] for each, values in noted.items() if values})

    def apply(self, record: MetricRecord) -> None:
        """Takes over a record of the next row or an earlier one. Raises ValueError for any other."""
        row, name, nll = record["row"], record["name"], record["nll"]
        if row not in range(len(self.rows) + 1) or self.rows[row : row + 1] not in ([], [name]):
            raise ValueError(f"a line is of row {row}, {name}, which is neither the next nor here already")
        if not (set(nll) <= set(self.domains) and set(record["phases"]) <= set(PHASES)):
            raise ValueError(f"the line of row {row}, {name}, has texts that are no column, or other phases")
        costs = {each: record[each] for each in (*NOTED, *COSTS) if each in record}
        kinds = get_field_types(type(self))
        check_types({each: [cost] for each, cost in costs.items()}, {each: kinds[each] for each in costs})
        if row == len(self.rows):
            self.append(name, nll=[nll.get(text) for text in self.domains], parts=record["parts"], **costs)
        else:
            self.fill(row, nll, record["parts"])
        for kind, seconds in record["phases"].items():
            self.phases[kind][name] = max(seconds, self.phases[kind].get(name, 0.0))
        self.monitor |= record["monitor"]

    def measure(self, *, nll_sums: Arrays | None = None, counts: Arrays = ()) -> None:
        """Sets the metrics from the matrix, and their intervals where the documents' losses are given."""
        cells = self.cells  # once: of 1,000 domains they are a million
        medians, numbers = compute_medians(cells, layout=self), count_terms(cells, layout=self)
        self.metrics = {}
        for name, units in compute_values(cells, layout=self).items():
            seen, whole = numbers[name]
            terms = {"terms": [seen, whole]} if seen < whole else {}
            self.metrics[name] = {u: float(x) for u, x in units.items()} | terms | {"median": medians[name]}
        if nll_sums is not None:
            for name, interval in intervals(nll_sums, counts=counts, layout=self).items():
                self.metrics[name]["interval"] = interval

    def sum_seconds(self) -> None:
        """Sets the seconds of the run from those of its phases."""
        self.seconds = sum(sum(stages.values()) for stages in self.phases.values())

    @classmethod
    def load(cls, path: Path) -> Scores:
        """The scores in a file and, of a run that is not finished, in the journal beside it; a ValueError of
        one line if these are damaged, foreign or of another version."""
        try:
            records = read_journal(path)  # first: see cpt.evaluation.journal
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("version") != VERSION:
                raise ValueError(f"needed is cpt's format, version {VERSION}")
            needed = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
            if differing := (needed - set(data)) | (set(data) - {f.name for f in fields(cls)}):
                raise ValueError(f"missing or unknown: {', '.join(sorted(differing))}")
            scores = cls(**data)
            if records and not scores.run["finished"]:
                for record in records:
                    scores.apply(record)
                scores.measure()
                scores.sum_seconds()
        except (ValueError, RecursionError) as error:
            advice = "restore it from a copy, read it with the cpt that wrote it, or delete it to run anew"
            raise ValueError(f"{path}: damaged, foreign or of another version ({error}); {advice}") from None
        return scores

    def save(self, path: Path) -> None:
        """Replaces the file atomically: a reader sees the old or the new scores, after a crash too. The
        journal is removed then."""
        lines = [f'"{each.name}": {encode(getattr(self, each.name))}' for each in fields(self)]
        temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write("{\n" + ",\n".join(lines) + "\n}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        remove_journal(path)


def encode(value: Any) -> str:
    """JSON, in which nan and infinity are null."""
    text = json.dumps(value, default=lambda array: array.tolist())
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda constant: None))


@cache
def get_field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def check_fields(value: Any, declared: Any, place: str) -> None:
    """Raises ValueError, which names the place, for a value that is not as RESULTS declares it."""
    if not isinstance(declared, dict):
        check_types({place: value}, {place: declared})
        return
    check_types({place: value}, {place: dict[str, Any]})
    for key in value if "*" in declared else declared:
        name = key.removesuffix("?")
        if name in value:
            check_fields(value[name], declared.get("*", declared.get(key)), f"{place}.{name}")
        elif name == key:
            raise ValueError(f"{place}.{key} is missing")


def documents_file(folder: Path, row: int) -> Path:
    """The losses by document of a row: `documents/000.npz` for the base."""
    return folder / "documents" / f"{row:03d}.npz"


def load_documents(folder: Path, rows: Iterable[int]) -> list[dict[str, Array]]:
    """The losses of some rows of a run folder, by text [2, documents]: nats and scored tokens. Raises
    ValueError for a missing or damaged file."""
    loaded = []
    for path in (documents_file(folder, row) for row in rows):
        check_archive(path, instead="bring it back from a copy")
        with np.load(path) as file:
            loaded.append(dict(file))
    return loaded


def gather_documents(rows: Sequence[Losses], scores: Scores) -> tuple[list[Array], list[Array]]:
    """By column, nats of each row and document, nan in a row without it, and scored tokens by document."""
    sums, counts = [], []
    for column, name in enumerate(scores.domains):
        counts.append(next(row[name][1] for row in rows if name in row))
        blank = np.full(len(counts[-1]), np.nan)
        there = [losses[column] is not None for losses in scores.nll]
        sums.append(np.stack([row[name][0] if own else blank for row, own in zip(rows, there, strict=True)]))
    return sums, counts


def conditions(scores: Scores) -> dict[str, str]:
    """What a perplexity depends on beside the model, in words; runs in which all of it is equal are
    comparable. By name: objective, domains, texts (a hash of all of them), score_on, tokenizer (a hash),
    length, mask_rate, packing, scored (how many tokens), cap (of each text at most)."""
    given, objective = scores.conditions, scores.run["objective"]
    rate = str(given.get("mask_rate", "unknown"))
    if objective == "span":
        rate += f" in spans of {given.get('mean_span')}"
    hashes = [[name, text_digest(scores, name)] for name in sorted(scores.domains)]
    return {
        "objective": objective,
        "domains": ", ".join(sorted(scores.domains)),
        "texts": digest(hashes)[:8],
        **{name: str(given.get(name, "unknown")) for name in ("score_on", "tokenizer", "length")},
        "mask_rate": "none" if objective == "causal" else rate,
        "packing": str(given.get("packing", "concat")),
        "scored": f"{sum(scores.scored)} tokens",
        "cap": str(given.get("cap", "none")),
    }


def text_digest(scores: Scores, name: str) -> str:
    """The hash of a column's text."""
    return str(scores.texts.get(name, {}).get("digest", "unknown"))


def describe_conditions(given: Mapping[str, str]) -> str:
    """`masked, mask_rate 0.3, length 64, tokenizer 0123abcd, test text 4567cdef`: all but the domains, the
    packing where documents do not stand one after another, and the cap of scored tokens."""
    rate = f", mask_rate {given['mask_rate']}" * (given["mask_rate"] != "none")
    packing = f", packing {given['packing']}" * (given["packing"] != "concat")
    cap = f", at most {given['cap']} tokens of each text scored" * (given["cap"] != "none")
    return (
        f"{given['objective']}{rate}, length {given['length']}, tokenizer {given['tokenizer']}, "
        f"{given['score_on']} text {given['texts']}{packing}{cap}"
    )
