"""Scores of a run: `scores.json`, the losses by document, and what makes runs comparable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np

from cpt.core.config import digest
from cpt.core.files import check_archive, write_atomically
from cpt.core.messages import count_noun
from cpt.core.schema import check_types
from cpt.evaluation import score_schema as schema
from cpt.evaluation.metrics import (
    METRICS,
    Array,
    Arrays,
    Losses,
    MatrixLayout,
    find_intervals,
    summarise_matrix,
)
from cpt.evaluation.options import FULL_POLICY
from cpt.evaluation.row_files import read_row_files, remove_row_files, write_row_file
from cpt.evaluation.score_schema import (
    VERSION,
    ByColumn,
    ByRow,
    ByText,
    Key,
    Loss,
    closed,
    entry,
    find_file_key,
)
from cpt.evaluation.task_metrics import ENDTASK_METRICS, build_score_array

# What takes time in a run; "start" is what precedes the stages.
ACTIVITIES = (
    "start",
    "generate",
    "learn",
    "score",
    "endtasks",
    "answers",
    "chats",
    "divergence",
    "benchmarks",
)
FORMER_KEYS = ("spikes",)  # that snapshots wrote; they are not read
RUN_KEYS = tuple(schema.RunKeys.__annotations__)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What a stage has cost; each field is a column of `Scores`. The base costs nothing."""

    trained: int = 0  # parameters that the optimizer updates
    stored: int = 0  # bytes that the method keeps in addition to the model
    tokens_read: int = 0  # by the steps
    flops: int = 0  # without evaluation
    memory: int = 0  # bytes at the peak
    skipped_steps: int = 0  # left out for a loss or gradient that was not finite
    rates: Sequence[float] = ()  # learning rate: first step, highest, last step
    protected_movement: Sequence[float] = ()  # of the stage, of a random movement


COST_COLUMNS = tuple(column.name for column in fields(StageCosts))


@closed
@dataclass(kw_only=True)
class Scores(MatrixLayout):
    """What a run has measured so far: `scores.json`, in which a number that is not finite is null."""

    rows: ByRow[str] = entry("base, then the stages done", default=list)
    domains: ByColumn[str] = entry("domains in the order of training, then general")
    tokens: ByColumn[int] = entry("tokens of the test text that can be scored", "tokens")
    bytes: ByColumn[int] = entry("size of the test text", "UTF-8 bytes")
    scored: ByColumn[int] = entry("tokens that contribute to the loss", "tokens")
    run: Annotated[dict[str, Any], Key(kind=schema.RunKeys)] = entry("what was run")
    texts: ByText[Annotated[dict[str, Any], Key(kind=schema.TextKeys)]] = entry("facts of each text")
    config_hash: str = entry("hash of the options that decide the result")
    versions: dict[str, str] = entry("python, cpt and libraries", over="package")
    nll: ByRow[ByColumn[Loss]] = entry("the matrix of test losses; null: not measured", default=list)
    unquantized: ByText[Loss] = entry("losses of the base before it was quantized", default=dict)
    policy: Annotated[dict[str, str], Key(kind=schema.PolicyKeys)] = entry(
        "cells that a finished run has", default=FULL_POLICY.copy
    )
    metrics: dict[str, Annotated[dict[str, Any], Key(kind=schema.MetricKeys)]] = entry(
        "ZS, CPT, LC, FG, … ([glossary](glossary.md#metrics))", over="metric", default=dict
    )
    modules: ByRow[ByText[Annotated[dict[str, float], Key("", "0 to 1", over="module")]]] = entry(
        "weights of the heaviest modules that scored a text", default=list
    )
    trained: ByRow[int] = entry("trained in the stage", "parameters", default=list)
    stored: ByRow[int] = entry("kept by the method in addition to the model", "bytes", default=list)
    tokens_read: ByRow[int] = entry("read by the steps of the stage", "tokens", default=list, name="seen")
    flops: ByRow[int] = entry("of the stage, without evaluation", "operations", default=list)
    memory: ByRow[int] = entry("peak of the stage", "bytes", default=list)
    skipped_steps: ByRow[int] = entry(
        "steps left out: loss or gradient not finite", "steps", default=list, name="skipped"
    )
    rates: ByRow[Annotated[list[float], Key(over="3 or 0")]] = entry(
        "learning rate: first step, highest, last step", default=list
    )
    protected_movement: ByRow[Annotated[list[float], Key(over="2 or 0")]] = entry(
        "share of the squared movement in the protected subspace, of the stage and of a random movement",
        "0 to 1",
        default=list,
    )
    grown: list[int] = entry("finished stages at each extension of the run", default=list)
    endtasks: Annotated[dict[str, Any], Key(measured=schema.EndtaskKeys)] = entry(
        "downstream tasks", default=dict
    )
    answers: Annotated[dict[str, Any], Key(measured=schema.AnswerKeys)] = entry("task answers", default=dict)
    chats: Annotated[dict[str, Any], Key(measured=schema.ChatKeys)] = entry("held-out chats", default=dict)
    divergence: Annotated[dict[str, Any], Key(measured=schema.DivergenceKeys)] = entry(
        "KL divergence from the base model", default=dict
    )
    benchmarks: Annotated[dict[str, Any], Key(measured=schema.BenchmarkKeys)] = entry(
        "lm-evaluation-harness", default=dict
    )
    conditions: Annotated[dict[str, Any], Key(kind=schema.ConditionKeys)] = entry(
        "what makes losses comparable", default=dict
    )
    monitor: dict[str, Annotated[dict[str, Any], Key(kind=schema.MonitorKeys)]] = entry(
        "monitoring evaluations", over="stage", default=dict
    )
    mixture: dict[
        str, Annotated[dict[str, Annotated[dict[str, Any], Key(kind=schema.PartKeys)]], Key(over="part")]
    ] = entry(
        "what the stage read of new text, past domains, general text and each of `replay.sources`",
        over="stage",
        default=dict,
    )
    numerics: Annotated[dict[str, str], Key(kind=schema.NumericKeys)] = entry(
        "precision and attention kernels", default=dict
    )
    base: Annotated[dict[str, Any], Key(kind=schema.BaseKeys)] = entry("the base model", default=dict)
    moved: dict[str, Annotated[list[float], Key(over="2")]] = entry(
        "norm of the change over that of the base, share of changed numbers", over="weights", default=dict
    )
    similarity: Annotated[dict[str, Any], Key(measured=schema.SimilarityKeys)] = entry(
        "similarity of the domains' texts, if it decided the order", default=dict
    )
    needs_domain: bool = entry("whether the domain of a text must be known at test time", default=False)
    trains_from_base: bool = entry(
        "whether each domain was trained from the base", default=False, name="alone"
    )
    loading: str = entry("Python expression that loads the exported model", default="")
    exported: Annotated[dict[str, Any], Key(measured=schema.ExportedKeys)] = entry(
        "the exported model, as it was loaded again", default=dict
    )
    optimized_metric: float | list[float | None] | None = entry(
        "value of the config's `optimized_metric`", default=None
    )
    seconds: float = entry("sum of the phases", "s", default=0.0)
    activity_seconds: dict[str, Annotated[dict[str, float], Key(over="stage or step")]] = entry(
        ", ".join(ACTIVITIES), "s", over="phase", default=dict, name="phases"
    )
    version: Literal[1] = entry("version of this format", default=VERSION)

    def __post_init__(self) -> None:
        """Raises ValueError for fields of another type, shape or name, as a file may be damaged; adds the
        activities that have no seconds."""
        types = get_type_hints(type(self), include_extras=True)
        values_by_key = {find_file_key(column): getattr(self, column.name) for column in fields(self)}
        types_by_key = {find_file_key(column): types[column.name] for column in fields(self)}
        check_types(values_by_key, types_by_key)

        self.check_layout()
        if self.endtasks:
            self.check_endtasks()
        self.activity_seconds = {activity: self.activity_seconds.get(activity, {}) for activity in ACTIVITIES}

    def check_layout(self) -> None:
        """Raises ValueError where rows and columns are not those of the matrix, or a name is unknown."""
        num_rows = len(self.rows)
        num_columns = len(self.domains)
        for kind, names in (("rows", self.rows), ("domains", self.domains)):
            if len(set(names)) < len(names):
                raise ValueError(f"a name of {kind} occurs twice: {', '.join(names)}")
        if num_rows > 0 and self.rows[0] != "base":
            raise ValueError(f"the first row is {self.rows[0]}. Allowed: base")

        column_count = count_noun(num_columns, "domain")
        for key in ("tokens", "bytes", "scored"):
            length = len(getattr(self, key))
            if length != num_columns:
                values = count_noun(length, "value")
                raise ValueError(f"{key} has {values} for {column_count}")
        for number, losses in enumerate(self.nll):
            if len(losses) != num_columns:
                values = count_noun(len(losses), "loss", "losses")
                raise ValueError(f"nll[{number}] has {values} for {column_count}")

        # A file of a version without one of the columns has none of its rows.
        row_count = count_noun(num_rows, "row")
        if len(self.nll) != num_rows:
            raise ValueError(f"nll has {len(self.nll)} for {row_count}")
        for column in fields(self):
            if column.name not in ("modules", *COST_COLUMNS):
                continue
            length = len(getattr(self, column.name))
            if length not in (0, num_rows):
                values = count_noun(length, "value")
                raise ValueError(f"{find_file_key(column)} has {values} for {row_count}")

        unknown_activities = set(self.activity_seconds) - set(ACTIVITIES)
        unknown_metrics = set(self.metrics) - set(METRICS)
        for kind, unknown in (("phases", unknown_activities), ("metrics", unknown_metrics)):
            if unknown:
                raise ValueError(
                    f"{kind} has names that this cpt does not know: {', '.join(sorted(unknown))}"
                )

    def check_endtasks(self) -> None:
        """Raises ValueError where the results of end tasks are not of their tasks, or of more rows."""
        tasks = self.endtasks["tasks"]
        for key in ("metric", "classes", "examples"):
            if self.endtasks[key].keys() != set(tasks):
                names = ", ".join(self.endtasks[key]) or "no task"
                raise ValueError(f"endtasks.{key} is of {names}, and endtasks.tasks has {', '.join(tasks)}")
        for metric in (*ENDTASK_METRICS, *self.endtasks["metric"].values()):
            length = len(build_score_array(self.endtasks, metric))
            if length > len(self.rows):
                values = count_noun(length, "row")
                raise ValueError(f"endtasks.{metric} has {values}, and rows has {len(self.rows)}")

    @property
    def matrix(self) -> Array:
        """The losses as [row, column]; nan where one was not measured, or was not finite."""
        return np.array(self.nll or np.empty((0, len(self.domains))), dtype=float)

    def row_losses(self, number: int) -> Array:
        """A row of the matrix, [column]. `matrix` takes longer: in a long run it has many rows."""
        return np.array(self.nll[number], dtype=float)

    @property
    def cells(self) -> Array:
        """The matrix with infinity for what was measured and was not finite: no mean may leave it out."""
        cells = self.matrix
        for row in np.flatnonzero(np.isnan(cells).any(1)):
            cells[row] = [to_cell(loss) for loss in self.nll[row]]
        return cells

    @property
    def diagonal(self) -> dict[str, float]:
        """Loss (nats) on each learned domain in the row of its name."""
        matrix = self.matrix
        rows = {name: row for row, name in enumerate(self.rows)}
        columns = {name: column for column, name in enumerate(self.domains)}
        return {domain: float(matrix[rows[domain], columns[domain]]) for domain in self.learned}

    @property
    def state(self) -> str:
        """How far the run is, for people."""
        if self.run["finished"]:
            return "finished"
        if not self.rows:
            return "unfinished, nothing measured yet"
        return f"unfinished, last measured: {self.rows[-1]}"

    @property
    def growth(self) -> float | None:
        """Bytes that the method stores more with each domain, a mean; None before there are two."""
        if len(self.stored) <= 2:
            return None
        return (self.stored[-1] - self.stored[1]) / (len(self.stored) - 2)

    def append(
        self,
        row: str,
        *,
        nll: Sequence[float | None],
        modules: Mapping[str, Mapping[str, float]],
        costs: StageCosts,
    ) -> None:
        """Adds the row of the model after a stage ("base" first), without updating the metrics. `nll` is by
        column, None where it was not measured; `modules` are the weights of modules by text. Raises
        ValueError for a row that the scores have already, and for another number of losses."""
        if row in self.rows:
            raise ValueError(f"row {row} is one of {self.rows} already")
        if len(nll) != len(self.domains):
            loss_count = count_noun(len(nll), "loss", "losses")
            raise ValueError(f"row {row} has {loss_count}. Allowed: {len(self.domains)}, one for each column")
        self.rows.append(row)
        self.nll.append([to_loss(loss) for loss in nll])
        self.modules.append({text: dict(weights) for text, weights in modules.items() if weights})

        for name, cost in asdict(costs).items():
            self.append_cost(name, cost)

    def append_cost(self, name: str, cost: int | Sequence[float]) -> None:
        """Adds the last row's cost to one of COST_COLUMNS. In a file of a version without the column the rows
        before have no cost: they get 0, or an empty list."""
        column: list[Any] = getattr(self, name)
        num_missing = len(self.rows) - 1 - len(column)
        if isinstance(cost, int):
            column.extend([0] * num_missing)
            column.append(cost)
        else:
            column.extend([] for _ in range(num_missing))
            column.append(list(cost))

    def take_over(self, earlier: Scores) -> None:
        """Replaces the results by those of `earlier`, the scores of the same run before domains were added.
        Columns of texts that were added are None, not measured, in these rows.

        What evaluators measured is left out: they collect it from their files, with that of the new rows. A
        run without one of them has no last row of it."""
        results = ("rows", "modules", "activity_seconds")
        for name in (*results, "monitor", "mixture", "unquantized", *COST_COLUMNS):
            setattr(self, name, getattr(earlier, name))

        self.nll = []
        for losses in earlier.nll:
            loss_by_text = dict(zip(earlier.domains, losses, strict=True))
            self.nll.append([loss_by_text.get(text) for text in self.domains])

        # The number of stages that were done when these domains were added: the rows without the base.
        num_stages = len(self.rows) - 1
        self.grown = [*earlier.grown, num_stages]

    def fill(
        self, number: int, nll: Mapping[str, float | None], modules: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Adds the losses and the weights of modules of texts that had not been scored after stage `number`,
        without updating the metrics."""
        for text, loss in nll.items():
            self.nll[number][self.domains.index(text)] = to_loss(loss)
        for text, weights in modules.items():
            if weights:
                self.modules[number][text] = dict(weights)

    def set_results(self, kind: str, results: dict[str, Any]) -> None:
        """Replaces what an evaluator has measured so far: `endtasks`, `answers`, `chats`,
        `divergence` or `benchmarks`."""
        setattr(self, kind, results)

    def measured(self, number: int) -> list[str]:
        """The texts that were scored after a stage."""
        losses = zip(self.domains, self.nll[number], strict=True)
        return [text for text, loss in losses if loss is not None]

    def measure(self, *, nll_sums: Arrays | None = None, counts: Arrays = ()) -> None:
        """Sets the metrics from the matrix, and their intervals where the documents' losses are given."""
        self.metrics = summarise_matrix(self.cells, layout=self)
        if nll_sums is not None:
            for name, interval in find_intervals(nll_sums, counts=counts, layout=self).items():
                self.metrics[name]["interval"] = interval

    @classmethod
    def load(cls, path: Path) -> Scores:
        """The scores in a file, with the rows that are in row files next to it. Raises ValueError of one line
        for a file that is damaged, foreign or of a later version."""
        path = Path(path)
        content: Any = None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            scores = cls.from_data(content)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: damaged or foreign ({error}); {choose_remedy(content)}") from None

        num_rows = len(scores.rows)
        for row in read_row_files(path.parent, first=num_rows):
            scores.append_stored(row)
        if len(scores.rows) > num_rows:
            scores.measure()
            scores.seconds = scores.sum_seconds()
        return scores

    @classmethod
    def from_data(cls, data: Any) -> Scores:
        """The scores from the content of a file. Raises ValueError for missing and unknown keys."""
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        if has_later_version(data):
            raise ValueError(f"it is of version {data['version']}, and this cpt reads version {VERSION}")

        columns = {find_file_key(column): column for column in fields(cls)}
        required_keys = {key for key, column in columns.items() if is_required(column)}
        missing = {"version", *required_keys} - set(data)
        unknown = set(data) - set(columns) - set(FORMER_KEYS)
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        if unknown:
            raise ValueError(f"it has keys that this cpt does not know: {', '.join(sorted(unknown))}")

        values = {columns[key].name: value for key, value in data.items() if key in columns}
        return cls(**values)

    def save(self, path: Path) -> None:
        """Replaces the file atomically: a reader sees the old or the new scores, after a crash too. Then row
        files are removed, as this file has all rows."""
        self.seconds = self.sum_seconds()
        lines = [
            f'"{find_file_key(column)}": {encode(getattr(self, column.name))}' for column in fields(self)
        ]
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
        remove_row_files(path.parent)

    def sum_seconds(self) -> float:
        """Seconds of all activities in all stages."""
        return sum(sum(stages.values()) for stages in self.activity_seconds.values())

    def save_row(self, number: int, folder: Path) -> None:
        """Writes the row file of a stage into the run's folder, atomically, with the numbers that `save`
        would write. It lacks the results of evaluators, which have files of their own, and the times of the
        start: the next `save` writes them."""
        name = self.rows[number]
        costs = {column: getattr(self, column)[number] for column in COST_COLUMNS}
        losses = zip(self.domains, self.nll[number], strict=True)
        seconds = {}
        for activity, seconds_by_stage in self.activity_seconds.items():
            if name in seconds_by_stage:
                seconds[activity] = seconds_by_stage[name]

        row = {
            "row": name,
            "nll": {text: loss for text, loss in losses if loss is not None},
            "modules": self.modules[number],
            "costs": costs,
            "activity_seconds": seconds,
            "monitor": self.monitor.get(name),
            "mixture": self.mixture.get(name),
        }
        write_row_file(folder, number, json.loads(encode(row)))

    def append_stored(self, row: Mapping[str, Any]) -> None:
        """Adds a row that `save_row` has written, without updating the metrics."""
        name = row["row"]
        nll = [row["nll"].get(text) for text in self.domains]
        self.append(name, nll=nll, modules=row["modules"], costs=StageCosts(**row["costs"]))
        for activity, seconds in row["activity_seconds"].items():
            self.activity_seconds[activity][name] = seconds
        if row["monitor"] is not None:
            self.monitor[name] = row["monitor"]
        if row["mixture"] is not None:
            self.mixture[name] = row["mixture"]


def to_cell(loss: float | None) -> float:
    """A loss of the file for a mean: nan was not measured, infinity was measured and was not finite."""
    if loss is None:
        return np.nan
    return np.inf if np.isnan(loss) else loss


def to_loss(loss: float | None) -> float | None:
    """A loss as a Python number, which JSON needs; None: not measured."""
    return None if loss is None else float(loss)


def has_later_version(data: Any) -> bool:
    """Whether the content of a file says that a later cpt wrote it."""
    version = data.get("version") if isinstance(data, dict) else None
    return isinstance(version, int) and version > VERSION


def choose_remedy(data: Any) -> str:
    """What to do about a file with this content, which cannot be read."""
    if has_later_version(data):
        return "update cpt"
    return "restore it from a copy, or delete it to run again"


def is_required(column: Field[Any]) -> bool:
    return column.default is MISSING and column.default_factory is MISSING


def encode(value: Any) -> str:
    """JSON, in which nan and infinity are null."""
    text = json.dumps(value, default=lambda array: array.tolist())
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda constant: None))


def documents_file(folder: Path, row: int) -> Path:
    """The file of a row's losses by document: `documents/000.npz` for the base."""
    return folder / "documents" / f"{row:03d}.npz"


def load_documents(folder: Path, rows: Iterable[int]) -> list[dict[str, Array]]:
    """The losses of some rows, by text [2, documents]: nats, scored tokens. Raises ValueError for a damaged
    file."""
    losses = []
    for row in rows:
        path = documents_file(folder, row)
        check_archive(path, remedy="restore it from a backup")
        with np.load(path) as archive:
            losses.append(dict(archive))
    return losses


def gather_documents(rows: Sequence[Losses], scores: Scores) -> tuple[list[Array], list[Array]]:
    """By column, nats of each row and document, nan in a row without it, and scored tokens by document."""
    sums = []
    counts = []
    for column, text in enumerate(scores.domains):
        document_counts = next(losses[text][1] for losses in rows if text in losses)
        not_measured = np.full(len(document_counts), np.nan)

        document_sums = []
        for losses, row_means in zip(rows, scores.nll, strict=True):
            is_measured = row_means[column] is not None
            document_sums.append(losses[text][0] if is_measured else not_measured)
        sums.append(np.stack(document_sums))
        counts.append(document_counts)
    return sums, counts


def find_conditions(scores: Scores) -> dict[str, str]:
    """What a perplexity depends on besides the model, in words: runs with equal conditions are comparable.
    `texts` is a hash of all texts; `scored` and `cap` are in tokens."""
    recorded = scores.conditions
    objective = scores.run["objective"]
    is_causal = objective == "causal"
    mlm_probability = "none" if is_causal else str(recorded.get("mlm_probability", "unknown"))
    if objective == "span":
        mlm_probability += f" in spans of {recorded.get('mean_span')}"

    names = sorted(scores.domains)
    text_hashes = [[name, str(scores.texts.get(name, {}).get("hash", "unknown"))] for name in names]
    return {
        "objective": objective,
        "domains": ", ".join(names),
        "texts": digest(text_hashes)[:8],
        "score_on": str(recorded.get("score_on", "unknown")),
        "tokenizer": str(recorded.get("tokenizer", "unknown")),
        "max_seq_length": str(recorded.get("max_seq_length", "unknown")),
        "mlm_probability": mlm_probability,
        "packing": str(recorded.get("packing", "concat")),
        "text_format": describe_text_format(recorded),
        "scored": f"{sum(scores.scored)} tokens",
        "cap": str(recorded.get("cap", "none")),
    }


def describe_text_format(conditions: Mapping[str, Any]) -> str:
    """How the encoding of raw text differs from the default, in words; `default` where it does not.
    `conditions` is the field of Scores, which has these keys only where a value is not the default."""
    descriptions = []
    if "separator" in conditions:
        descriptions.append(f"separator {conditions['separator']}")
    if "row_start" in conditions:
        descriptions.append(f"sequences begin with {conditions['row_start']}")
    if "special_tokens" in conditions:  # always `parse`, as `split` is the default
        descriptions.append(f"special tokens {conditions['special_tokens']}d")
    return ", ".join(descriptions) or "default"


def describe_conditions(conditions: Mapping[str, str]) -> str:
    """The `conditions` of runs as a phrase: `masked, mlm_probability 0.3, max_seq_length 64, tokenizer
    0123abcd, test text 4567cdef`. The packing, the text format and the cap of scored tokens are added where
    they are not the default; the domains and the number of scored tokens are left out."""
    parts = [conditions["objective"]]
    if conditions["mlm_probability"] != "none":
        parts.append(f"mlm_probability {conditions['mlm_probability']}")
    parts.append(f"max_seq_length {conditions['max_seq_length']}")
    parts.append(f"tokenizer {conditions['tokenizer']}")
    parts.append(f"{conditions['score_on']} text {conditions['texts']}")

    if conditions["packing"] != "concat":
        parts.append(f"packing {conditions['packing']}")
    if conditions["text_format"] != "default":
        parts.append(conditions["text_format"])
    if conditions["cap"] != "none":
        parts.append(f"at most {conditions['cap']} tokens of each text scored")
    return ", ".join(parts)
