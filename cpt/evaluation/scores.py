"""What a run has measured: `scores.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from cpt.core.schema import check_types
from cpt.data.sources.base import GENERAL
from cpt.evaluation.answers.results import check_answers
from cpt.evaluation.endtasks.metrics import check_endtasks
from cpt.evaluation.lines import read_lines, remove_lines
from cpt.evaluation.metrics import (
    Array,
    Arrays,
    Layout,
    compute_medians,
    compute_values,
    count_terms,
    intervals,
)
from cpt.evaluation.policy import FULL
from cpt.evaluation.probes.results import check_probes
from cpt.evaluation.score_fields import PHASES, check_metrics, check_similarity

VERSION = 3
COSTS = ("trained", "stored", "seen", "flops", "memory", "skipped")  # of a stage
NOTED = ("rates", "leak", "spikes")  # lists of a stage
RUN = dict.fromkeys(("name", "method", "mask", "replay", "variant", "model", "objective"), str)
RUN |= {"order": list[str], "seed": int, "finished": bool}
RUN_KEYS = tuple(RUN)


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
    endtasks: dict[str, Any] = field(default_factory=dict)  # see cpt.evaluation.endtasks.suite
    answers: dict[str, Any] = field(default_factory=dict)  # see cpt.evaluation.answers.results
    probes: dict[str, Any] = field(default_factory=dict)  # see cpt.evaluation.probes.results
    conditions: dict[str, Any] = field(default_factory=dict)  # see cpt.evaluation.conditions
    monitor: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stage, cpt.evaluation.monitor
    numerics: dict[str, str] = field(default_factory=dict)  # the precision, and how attention was computed
    # name; origin: built, folder or hub; of a hub its revision
    base: dict[str, str] = field(default_factory=dict)
    moved: dict[str, list[float]] = field(default_factory=dict)  # see cpt.models.movement
    similarity: dict[str, Any] = field(default_factory=dict)  # SIMILARITY, where it decided the order
    needs_domain: bool = False  # whether a text's domain must be known at test time
    alone: bool = False  # whether each domain was learned from the base, so that no model has met them all
    loading: str = ""  # a Python expression that loads the exported model
    objective: float | list[float | None] | None = None  # what a sweeper minimises
    seconds: float = 0.0
    phases: dict[str, dict[str, float]] = field(default_factory=dict)  # {one of PHASES: {stage: seconds}}
    version: int = VERSION

    def __post_init__(self) -> None:
        check_types(vars(self), get_field_types(type(self)))
        check_types(self.run, RUN, of="run")
        for names in (self.rows, self.domains):
            if not isinstance(names, list) or len(set(names)) != len(names):
                raise ValueError(f"rows or domains are {names}, allowed is a list of different names")
        if self.rows[:1] not in ([], ["base"]) or GENERAL in [*self.domains[:1], *self.domains[:-1]]:
            raise ValueError(f"rows {self.rows[:2]}, columns {self.domains}: base is first, general last")
        sizes = [len(given) for given in (self.tokens, self.bytes, self.scored)]
        if sizes != [len(self.domains)] * 3 or not all(size > 0 for size in self.bytes):
            raise ValueError(f"tokens, bytes, scored are {sizes} numbers, bytes > 0; columns {self.domains}")
        if self.matrix.shape != (len(self.rows), len(self.domains)):
            raise ValueError(f"nll is {self.matrix.shape}, needed is {(len(self.rows), len(self.domains))}")
        for name in ("parts", *NOTED, *COSTS):
            if (given := len(getattr(self, name))) not in (0, len(self.rows)):
                raise ValueError(
                    f"{name} has {given} entries, needed is none or one for each row {self.rows}"
                )
        if unknown := sorted(set(self.phases) - set(PHASES)):
            raise ValueError(f"phases are of {', '.join(unknown)}; allowed: {', '.join(PHASES)}")
        self.phases = {kind: self.phases.get(kind, {}) for kind in PHASES}
        check_metrics(self.metrics)
        check_similarity(self.similarity, order=self.run["order"])
        check_endtasks(self.endtasks, rows=self.rows)
        check_answers(self.answers, rows=self.rows)
        check_probes(self.probes, rows=self.rows)

    @property
    def matrix(self) -> Array:
        """The losses as [row, column]; nan where one was not measured, or was not finite."""
        return np.array(self.nll or np.empty((0, len(self.domains))), dtype=float)

    @property
    def cells(self) -> Array:
        """The same with infinity for what was measured and was no number: no mean may leave it out."""
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
        """Adds the row of the model after a stage ("base" first), without measuring anew; what of COSTS is
        not given is 0, what of NOTED nothing."""
        if row in self.rows or len(nll) != len(self.domains):
            raise ValueError(f"row {row}: {len(nll)} losses; needed: {len(self.domains)}, not in {self.rows}")
        self.rows.append(row)
        self.nll.append([None if x is None else float(x) for x in nll])
        self.parts.append({text: dict(weights) for text, weights in (parts or {}).items() if weights})
        for name in (*NOTED, *COSTS):
            noted: list[Any] = getattr(self, name)
            none = [] if name in NOTED else 0
            noted += [none] * (len(self.rows) - 1 - len(noted))  # of rows that an earlier version added
            given = costs.pop(name, none)
            noted.append([*given] if name in NOTED else int(given))
        if costs:
            raise TypeError(f"costs {sorted(costs)}; allowed: {', '.join((*NOTED, *COSTS))}")

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
        """Adds cells that were missing in a row, by text, without measuring anew."""
        for text, value in nll.items():
            self.nll[row][self.domains.index(text)] = None if value is None else float(value)
        self.parts[row] |= {text: dict(weights) for text, weights in parts.items() if weights}

    def line(self, row: int) -> str:
        """All that was noted of a row, in a line of cpt.evaluation.lines."""
        name = self.rows[row]
        cells = zip(self.domains, self.nll[row], strict=True)
        told: dict[str, Any] = {"row": row, "name": name, "parts": self.parts[row]}
        told["nll"] = {text: value for text, value in cells if value is not None}
        told["phases"] = {kind: stages[name] for kind, stages in self.phases.items() if name in stages}
        told["monitor"] = {name: self.monitor[name]} if name in self.monitor else {}
        noted = {each: getattr(self, each)[row : row + 1] for each in (*NOTED, *COSTS)}
        return encode(told | {each: values[0] for each, values in noted.items() if values})

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes over what a line says of a row, be it here already. Raises ValueError for a line that is not
        of the next row or an earlier one."""
        row, name, nll = line["row"], line["name"], line["nll"]
        if row not in range(len(self.rows) + 1) or self.rows[row : row + 1] not in ([], [name]):
            raise ValueError(f"a line is of row {row}, {name}, which is neither the next nor here already")
        if not (set(nll) <= set(self.domains) and set(line["phases"]) <= set(PHASES)):
            raise ValueError(f"the line of row {row}, {name}, has texts that are no column, or other phases")
        noted = {each: [line[each]] for each in (*NOTED, *COSTS) if each in line}
        check_types(noted, {each: get_field_types(type(self))[each] for each in noted}, of=f"row {row}")
        if row == len(self.rows):
            costs = {each: value for each, (value,) in noted.items()}
            self.append(name, nll=[nll.get(text) for text in self.domains], parts=line["parts"], **costs)
        else:
            self.fill(row, nll, line["parts"])
        for kind, seconds in line["phases"].items():
            self.phases[kind][name] = max(seconds, self.phases[kind].get(name, 0.0))
        self.monitor |= line["monitor"]

    def measured(self, row: int) -> list[str]:
        """The texts that were scored in a row."""
        return [text for text, value in zip(self.domains, self.nll[row], strict=True) if value is not None]

    def measure(self, *, nll_sums: Arrays | None = None, counts: Arrays = ()) -> None:
        """Sets the metrics from the matrix, and their intervals where the documents' losses are given."""
        cells = self.cells  # once: of 1,000 domains they are a million
        measured = compute_values(cells, layout=self)
        self.metrics = {name: {u: float(x) for u, x in units.items()} for name, units in measured.items()}
        for name, (seen, whole) in count_terms(cells, layout=self).items():
            self.metrics[name] |= {"terms": [seen, whole]} if seen < whole else {}
        for name, median in compute_medians(cells, layout=self).items():
            self.metrics[name]["median"] = median
        if nll_sums is not None:
            for name, interval in intervals(nll_sums, counts=counts, layout=self).items():
                self.metrics[name]["interval"] = interval

    @classmethod
    def load(cls, path: Path) -> Scores:
        """The scores in a file and, of a run that is not finished, in the lines beside it; a ValueError of
        one line if these are damaged, foreign or of another version."""
        try:
            lines = read_lines(path)  # first: see cpt.evaluation.lines
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("version") != VERSION:
                raise ValueError(f"needed is cpt's format, version {VERSION}")
            needed = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
            if differing := (needed - set(data)) | (set(data) - {f.name for f in fields(cls)}):
                raise ValueError(f"missing or unknown: {', '.join(sorted(differing))}")
            return cls(**data).complete(lines)
        except (ValueError, RecursionError) as error:
            advice = "restore it from a copy, read it with the cpt that wrote it, or delete it to run anew"
            raise ValueError(f"{path}: damaged, foreign or of another version ({error}); {advice}") from None

    def complete(self, lines: Sequence[Mapping[str, Any]]) -> Scores:
        """These scores with what lines add to them, measured anew."""
        if lines and not self.run["finished"]:
            for line in lines:
                self.take(line)
            self.measure()
            self.sum_seconds()
        return self

    def sum_seconds(self) -> None:
        """Sets the seconds of the run from those of its phases."""
        self.seconds = sum(sum(stages.values()) for stages in self.phases.values())

    def save(self, path: Path) -> None:
        """Replaces the file atomically: a reader sees the old or the new scores, after a crash too. No line
        beside it is needed then."""
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
        remove_lines(path)


def encode(value: Any) -> str:
    """JSON, in which what is nan or infinite is null."""
    text = json.dumps(value, default=lambda array: array.tolist())
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda constant: None))


@cache
def get_field_types(kind: type) -> dict[str, Any]:
    """The types of a class's fields."""
    return get_type_hints(kind)
