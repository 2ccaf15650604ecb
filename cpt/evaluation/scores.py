"""Scores of a run: `scores.json`, the losses by document, and what makes runs comparable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
from annotated_types import Len

from cpt.core.config import digest
from cpt.core.files import check_archive, replace, sync
from cpt.core.renames import new_value, rename_variant
from cpt.core.schema import check_types
from cpt.evaluation.journal import MetricRecord, journal_file, read_journal
from cpt.evaluation.metrics import METRICS, UNITS, Array, Arrays, Layout, Losses, intervals, summarise_matrix
from cpt.evaluation.options import FULL
from cpt.evaluation.task_metrics import ENDTASK_METRICS, cube

VERSION = 3
COSTS = ("trained", "stored", "seen", "flops", "memory", "skipped")  # of a stage
NOTED = ("rates", "leak", "spikes")  # lists of a stage
# kinds of seconds; "start": what precedes the stages
PHASES = ("start", "generate", "learn", "score", "endtasks", "answers", "probes")
RUN: dict[str, Any] = {"name": str, "method": str, "mask": str, "replay": str, "variant": str, "model": str}
RUN |= {"objective": str, "order": list[str], "seed": int, "finished": bool}
RUN_KEYS = tuple(RUN)
BOUNDS = dict[Literal["nats", "perplexity", "bits_per_byte"], Annotated[list[float | None], Len(2, 2)]]
OF_METRIC: dict[str, Any] = {"interval": BOUNDS, "terms": list[int], "median": dict[str, float | None]}
OF_METRIC |= dict.fromkeys(UNITS, float | None)
OF_TASKS = {"when": str, "seconds": float, "tasks": list[str], "seeds": list[int], "metric": dict[str, str]}
OF_TASKS |= {"classes": dict[str, int], "examples": dict[str, int], "scores": dict[str, list[Any]]}


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
    stored: list[int] = field(
        default_factory=list
    )  # [row], bytes that the method keeps in addition to the model
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
        check_types(vars(self), get_type_hints(type(self)))
        check_types(self.run, RUN, of="run")
        for name, metric in self.metrics.items():
            its = {key: kind for key, kind in OF_METRIC.items() if key in (*UNITS, *metric)}
            check_types(metric, its, of=f"metrics.{name}")
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
        if given := self.endtasks:
            check_types(given, OF_TASKS, of="endtasks")
            kinds = (*ENDTASK_METRICS, *given["metric"].values())
            if any(given[key].keys() != {*given["tasks"]} for key in ("metric", "classes", "examples")):
                raise ValueError(f"endtasks are not of the tasks {given['tasks']}")
            if any(len(cube(given, kind)) > rows for kind in kinds):
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
        for row in np.flatnonzero(np.isnan(cells).any(1)):
            cells[row] = [np.nan if x is None else np.inf if np.isnan(x) else x for x in self.nll[row]]
        return cells

    @property
    def diagonal(self) -> dict[str, float]:
        """Loss (nats) on each learned domain in the row of its name."""
        return {d: float(self.matrix[self.rows.index(d), self.domains.index(d)]) for d in self.learned}

    @property
    def state(self) -> str:
        """How far the run is, for people."""
        done = f"{len(self.rows)} rows, last: {self.rows[-1]}" if self.rows else "no rows"
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
            raise TypeError(f"costs {unknown}. Allowed: {', '.join((*NOTED, *COSTS))}")
        self.rows.append(row)
        self.nll.append([None if x is None else float(x) for x in nll])
        self.parts.append({text: dict(weights) for text, weights in (parts or {}).items() if weights})
        for name in (*NOTED, *COSTS):
            noted: list[Any] = getattr(self, name)
            none: Any = [] if name in NOTED else 0
            noted += [none] * (len(self.rows) - 1 - len(noted))  # of rows that were made without
            noted.append([*costs.get(name, [])] if name in NOTED else int(costs.get(name, 0)))

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
        costs = {each: getattr(self, each) for each in (*NOTED, *COSTS)}
        return encode(record | {each: values[row] for each, values in costs.items() if values})

    def apply(self, record: MetricRecord) -> None:
        """Takes over a record of the next row or an earlier one. Raises ValueError for any other."""
        row, name, nll = record["row"], record["name"], record["nll"]
        if row not in range(len(self.rows) + 1) or self.rows[row : row + 1] not in ([], [name]):
            raise ValueError(f"a line is of row {row}, {name}, which is neither the next nor here already")
        if not (set(nll) <= set(self.domains) and set(record["phases"]) <= set(PHASES)):
            raise ValueError(f"the line of row {row}, {name}, has texts that are no column, or other phases")
        if row == len(self.rows):
            costs = {each: record[each] for each in (*NOTED, *COSTS) if each in record}
            self.append(name, nll=[nll.get(text) for text in self.domains], parts=record["parts"], **costs)
        else:
            self.fill(row, nll, record["parts"])
        for kind, seconds in record["phases"].items():
            self.phases[kind][name] = max(seconds, self.phases[kind].get(name, 0.0))
        self.monitor |= record["monitor"]

    def measure(self, *, nll_sums: Arrays | None = None, counts: Arrays = ()) -> None:
        """Sets the metrics from the matrix, and their intervals where the documents' losses are given."""
        self.metrics = summarise_matrix(self.cells, layout=self)
        if nll_sums is not None:
            for name, interval in intervals(nll_sums, counts=counts, layout=self).items():
                self.metrics[name]["interval"] = interval

    def sum_seconds(self) -> None:
        """Sets the seconds of the run from those of its phases."""
        self.seconds = sum(sum(stages.values()) for stages in self.phases.values())

    @classmethod
    def load(cls, path: Path) -> Scores:
        """The scores in a file and, of a run that is not finished, in its journal; a ValueError of
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
            scores.use_present_names()
            if records and not scores.run["finished"]:
                for record in records:
                    scores.apply(record)
                scores.measure()
                scores.sum_seconds()
            if len(scores.rows) > 1 and "learned" not in scores.metrics:  # of an earlier version
                scores.metrics = summarise_matrix(scores.cells, layout=scores) | scores.metrics
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            advice = "restore it from a copy, read it with the cpt that wrote it, or delete it to run again"
            raise ValueError(f"{path}: damaged, foreign or of another version ({error}); {advice}") from None
        return scores

    def use_present_names(self) -> None:
        """Renames what a file of an earlier version has under deprecated names."""
        self.run["variant"] = rename_variant(self.run["variant"], method=self.run["method"])
        if packing := self.conditions.get("packing"):
            self.conditions["packing"] = new_value("domains.packing", packing)

    def save(self, path: Path) -> None:
        """Replaces the file atomically: a reader sees the old or the new scores, after a crash too. The
        journal is removed then."""
        lines = [f'"{each.name}": {encode(getattr(self, each.name))}' for each in fields(self)]
        try:
            replace(path, "{\n" + ",\n".join(lines) + "\n}\n")
        finally:
            path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
        if (journal := journal_file(path)).exists():
            sync(path.parent)  # the disk holds its rows now
            journal.unlink()


def encode(value: Any) -> str:
    """JSON, in which nan and infinity are null."""
    text = json.dumps(value, default=lambda array: array.tolist())
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda constant: None))


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
    """What a perplexity depends on except the model, in words; runs in which all of it is equal are
    comparable. `texts` is a hash of all of them, `scored` and `cap` are tokens."""
    given, objective = scores.conditions, scores.run["objective"]
    rate = str(given.get("mask_rate", "unknown")) if objective != "causal" else "none"
    if objective == "span":
        rate += f" in spans of {given.get('mean_span')}"
    names = sorted(scores.domains)
    hashes = [[name, str(scores.texts.get(name, {}).get("digest", "unknown"))] for name in names]
    return {
        "objective": objective,
        "domains": ", ".join(names),
        "texts": digest(hashes)[:8],
        **{name: str(given.get(name, "unknown")) for name in ("score_on", "tokenizer", "length")},
        "mask_rate": rate,
        "packing": str(given.get("packing", "concat")),
        "scored": f"{sum(scores.scored)} tokens",
        "cap": str(given.get("cap", "none")),
    }


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
