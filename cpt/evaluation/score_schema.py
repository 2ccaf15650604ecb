"""The format of `scores.json`, version 1: the keys below its own, with shapes and units.

`python docs/site/scores.py` writes docs/files.md and `scores.schema.json` from these types and from `Scores`.
R: rows of the matrix, the base and the stages. C: columns, the test texts. N: domains. T: tasks. S: seeds
of fine-tuning. K: evaluations of a stage by the monitor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from annotated_types import Len
from pydantic import with_config
from pydantic_core import core_schema
from typing_extensions import TypedDict  # of typing: pydantic needs Python 3.12

T = TypeVar("T")
VERSION = 1
UNITS = ("nats", "perplexity", "bits_per_byte")
closed = with_config({"strict": True, "extra": "forbid"})


@dataclass(frozen=True)
class Key:
    """In `Annotated`: what a value is, its unit, what it runs over; `measured`: as `kind`, or empty."""

    description: str = ""
    unit: str = ""
    over: str = ""
    kind: Any = None
    measured: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        inner = handler(self.kind or self.measured or source)
        if self.measured is None:
            return inner
        return core_schema.no_info_wrap_validator_function(accept_empty, inner)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        json_schema = handler(schema)
        if self.measured is not None:
            json_schema = {"anyOf": [json_schema, {"type": "object", "maxProperties": 0}]}
        return json_schema | self.annotations

    @property
    def annotations(self) -> dict[str, str]:
        """What the JSON schema says of it."""
        texts = {"description": self.description, "unit": self.unit, "over": self.over}
        return {name: text for name, text in texts.items() if text}


def accept_empty(value: Any, validate: Callable[[Any], Any]) -> Any:
    """An empty object as it is: nothing was measured."""
    return value if value == {} else validate(value)


def entry(description: str, unit: str = "", *, over: str = "", default: Any = MISSING, name: str = "") -> Any:
    """A field of a dataclass; a default that is called gives the value. `name`: its key in the file, if that
    is not the field's name."""
    metadata = {"key": Key(description, unit, over), "name": name}
    if callable(default):
        return field(metadata=metadata, default_factory=default)
    return field(metadata=metadata, default=default)


def find_file_key(field: Field[Any]) -> str:
    """The key in the file of a field that `entry` made, or of one with that name."""
    return field.metadata.get("name") or field.name


Loss = Annotated[float | None, Key(unit="nats per scored token")]
Share = Annotated[float | None, Key(unit="0 to 1")]
Seconds = Annotated[float, Key("time of all measurements", "s")]
Interval = Annotated[list[float | None], Len(2, 2)]
Change = Annotated[
    list[float | None], Len(3, 3), Key("mean and 95 % interval (Student's t): mean, low, high")
]
ByRow = Annotated[list[T], Key(over="R")]
ByColumn = Annotated[list[T], Key(over="C")]
ByEvaluation = Annotated[list[T], Key(over="K")]
ByTask = Annotated[dict[str, T], Key(over="task")]
ByText = Annotated[dict[str, T], Key(over="text")]
Hash = Annotated[str, Key("hash of the options and data it depends on")]
Examples = Annotated[int, Key("test examples")]


@closed
class RunKeys(TypedDict):
    name: Annotated[str, Key("`name` of the config")]
    method: Annotated[str, Key("`method` of the config")]
    mask: Annotated[str, Key("`mask`, or none")]
    replay: Annotated[str, Key("`replay`, or none")]
    variant: Annotated[str, Key("other options of the command, `key=value; key=value`")]
    model: Annotated[str, Key("`model`, or name of the checkpoint")]
    order: Annotated[list[str], Key("domains in the order of training", over="N")]
    seed: Annotated[int, Key("`seed`")]
    finished: Annotated[bool, Key("false: a later start resumes the run")]
    objective: Annotated[str, Key("training objective: masked, causal, span, …")]


@closed
class NearDuplicateKeys(TypedDict):
    found: Annotated[int, Key("held-out documents with a near-duplicate", "documents")]
    compared: Annotated[int, Key("held-out documents that were compared: a sample", "documents")]
    train_share: Annotated[float, Key("share of the training documents that they were compared to")]


@closed
class TextKeys(TypedDict):
    hash: NotRequired[Annotated[str, Key("hash of the documents and their split")]]
    train_hash: NotRequired[Annotated[str, Key("hash of the training documents")]]
    documents: NotRequired[Annotated[dict[str, int], Key("documents", over="split")]]
    bytes: NotRequired[Annotated[dict[str, int], Key("size", "UTF-8 bytes", over="split")]]
    duplicates: NotRequired[Annotated[int, Key("documents left out as duplicates")]]
    held_out_copies: NotRequired[
        Annotated[int, Key("held-out documents removed, as they are also in the training text")]
    ]
    skipped: NotRequired[Annotated[dict[str, int], Key("bad examples left out", over="reason")]]
    near_duplicates: NotRequired[
        Annotated[NearDuplicateKeys, Key("held-out documents like training documents of the same text")]
    ]
    unknown: NotRequired[
        Annotated[dict[str, float], Key("tokens that the tokenizer does not know", "0 to 1", over="split")]
    ]
    special_tokens: NotRequired[
        Annotated[dict[str, int], Key("special tokens that the text spells", over="split")]
    ]


@closed
class MetricKeys(TypedDict):
    nats: Annotated[Loss, Key("mean of the terms")]
    perplexity: Annotated[float | None, Key("mean of exp(loss) over the same terms")]
    bits_per_byte: Annotated[float | None, Key("the same of the loss per byte", "bits per UTF-8 byte")]
    median: NotRequired[Annotated[dict[str, float | None], Key("median of the terms", over="unit")]]
    interval: NotRequired[
        Annotated[
            dict[Literal["nats", "perplexity", "bits_per_byte"], Interval],
            Key("95 % bootstrap interval over documents; finished runs", over="unit"),
        ]
    ]
    terms: NotRequired[Annotated[list[int], Len(2, 2), Key("measured terms and all, where some are missing")]]


@closed
class PolicyKeys(TypedDict):
    when: Annotated[str, Key("`eval.when`")]
    columns: Annotated[str, Key("`eval.columns`")]


@closed
class EndtaskKeys(TypedDict):
    when: Annotated[str, Key("`endtask.when`")]
    tasks: Annotated[list[str], Key("names of the tasks", over="T")]
    seeds: Annotated[list[int], Key("seeds of fine-tuning", over="S")]
    metric: Annotated[ByTask[str], Key("the task's own metric: macro_f1, micro_f1, accuracy")]
    classes: Annotated[ByTask[int], Key("number of classes")]
    examples: ByTask[Examples]
    scores: Annotated[
        dict[str, ByRow[Annotated[list[Annotated[list[Share], Key(over="S")]], Key(over="T")]]],
        Key("test scores; null: not measured", over="metric"),
    ]
    seconds: Seconds
    hash: NotRequired[Hash]


@closed
class AnswerTask(TypedDict):
    examples: Examples
    chance: Annotated[Share, Key("score of a guess among the choices; null: open answers")]
    majority: Annotated[Share, Key("score of the most frequent answer")]
    measures: Annotated[
        dict[str, ByRow[Share]], Key("the first measure is the task's own; null: not asked", over="measure")
    ]


@closed
class AnswerKeys(TypedDict):
    when: Annotated[str, Key("`answers.when`")]
    tasks: Annotated[ByTask[AnswerTask], Key("results of each task")]
    metrics: Annotated[dict[str, Share], Key("AP, LA, BWT, F, FWT", over="metric")]
    intervals: Annotated[dict[str, Interval], Key("95 % bootstrap interval over examples", over="metric")]
    seconds: Seconds
    hash: NotRequired[Hash]


@closed
class ChatAnswerKeys(TypedDict):
    chats: Annotated[int, Key("chats that were answered")]
    measures: Annotated[
        dict[str, float | None],
        Key(
            "means over answers: complete, repeated, other_language, right, broken, 0 to 1; tokens",
            over="measure",
        ),
    ]
    changes: Annotated[dict[str, Change], Key("change since the base, paired by chat", over="measure")]
    newly_broken: Annotated[int | None, Key("broken answers of chats that the base does not answer so")]


@closed
class ChatKeys(TypedDict):
    set: Annotated[str, Key("hash of the chats, how they are read and answered")]
    chats: Annotated[int, Key("held-out chats whose loss is measured")]
    tokens: Annotated[int, Key("of the assistant's turns, which are scored", "tokens")]
    nll: Annotated[
        ByRow[Loss], Key("mean over chats of the loss on the assistant's turns; null: not measured")
    ]
    rise: Annotated[
        ByRow[Change | None], Key("rise of that loss since the base, paired by chat", "nats per scored token")
    ]
    base_answer_nll: Annotated[
        ByRow[Loss], Key("loss on the answers that the base has written, mean over chats; null: not measured")
    ]
    base_answer_rise: Annotated[
        ByRow[Change | None], Key("rise of that loss since the base, paired by chat", "nats per scored token")
    ]
    answers: Annotated[ByRow[ChatAnswerKeys | None], Key("answers of the model; null: it was not asked")]
    seconds: Seconds
    hash: NotRequired[Hash]


Estimate = Annotated[list[float | None], Len(3, 3), Key("mean and 95 % interval: mean, low, high")]


@closed
class DivergenceKeys(TypedDict):
    kl: Annotated[
        ByRow[ByText[Estimate]],
        Key("KL(base || model), with the bootstrap interval over documents", "nats per scored token"),
    ]
    just_trained: Annotated[
        Estimate | None,
        Key("mean over stages of KL after a stage on its own text; null: none", "nats per scored token"),
    ]
    hash: NotRequired[Hash]


@closed
class BenchmarkTask(TypedDict):
    metric: Annotated[str, Key("name of the metric in the harness")]
    values: Annotated[ByRow[float | None], Key("value of the metric; null: not measured", "the harness's")]
    errors: Annotated[ByRow[float | None], Key("standard error over examples", "the harness's")]
    higher: Annotated[bool, Key("whether a higher value is better")]
    chance: Annotated[float | None, Key("value of a guess, where it is known")]
    shots: Annotated[int | None, Key("examples before each question")]
    limit: Annotated[float | None, Key("`benchmark.max_documents`")]
    examples: Examples
    version: Annotated[str, Key("version of the task")]
    truncated: Annotated[int, Key("requests longer than the model reads")]


@closed
class BenchmarkKeys(TypedDict):
    harness: Annotated[str, Key("version of the lm-evaluation-harness")]
    when: Annotated[str, Key("`benchmark.when`")]
    tasks: Annotated[ByTask[BenchmarkTask], Key("results of each task")]
    seconds: Seconds
    hash: NotRequired[Hash]


@closed
class ConditionKeys(TypedDict, total=False):
    score_on: Annotated[str, Key("split of the test texts: test or valid")]
    tokenizer: Annotated[str, Key("hash of the tokenizer")]
    max_seq_length: Annotated[int, Key("tokens per sequence", "tokens")]
    mlm_probability: Annotated[float | None, Key("share of masked tokens; null: causal")]
    mean_span: Annotated[float | None, Key("mean length of masked spans", "tokens")]
    packing: Annotated[str, Key("`domains.packing`, where it is not concat")]
    separator: Annotated[str, Key("token between documents, where it is not the tokenizer's eos")]
    row_start: Annotated[str, Key("token that each sequence begins with, where `domains.bos_in_rows`")]
    special_tokens: Annotated[str, Key("`domains.special_tokens`, where it is not split")]
    scored: Annotated[str, Key("which tokens are scored")]
    cap: Annotated[int, Key("maximum number of scored tokens per text", "tokens")]


@closed
class MonitorKeys(TypedDict):
    steps: Annotated[list[int], Key("step of each evaluation", over="K")]
    nll: Annotated[ByText[ByEvaluation[Loss]], Key("validation loss")]
    rise: Annotated[
        ByText[ByEvaluation[Interval]],
        Key("95 % interval of the change since the first evaluation", "nats per scored token"),
    ]
    ended: Annotated[str, Key("why the stage ended early; empty: it did not")]
    kept: Annotated[
        int | None, Key("step whose weights were kept (`monitor.keep=best`, `budget=divergence`)")
    ]
    divergence: NotRequired[
        Annotated[
            ByText[ByEvaluation[Estimate]],
            Key("KL(base || model) on the domain's text", "nats per scored token"),
        ]
    ]
    budget: NotRequired[
        Annotated[dict[str, Any], Key("record of the observer (`budget`); `report`: columns of the run page")]
    ]


@closed
class PartKeys(TypedDict):
    asked_share: Annotated[float, Key("share of the rows that the options ask for", "0 to 1")]
    rows: Annotated[int, Key("rows that were read, each as often as it was")]
    tokens: Annotated[int, Key("read by the steps", "tokens")]
    scored: Annotated[int, Key("tokens that contributed to the loss", "tokens")]
    epochs: Annotated[
        float | None, Key("how often the source was read since the beginning of the run; null: no source")
    ]


@closed
class NumericKeys(TypedDict, total=False):
    precision: Annotated[str, Key("`trainer.precision`")]
    attention: Annotated[str, Key("`trainer.attn_implementation`")]
    quantization: Annotated[str, Key("of the linear layers of the base: nf4, fp4, int8")]
    compile: Annotated[str, Key("`blocks` or `none`, with `trainer.compile=auto`")]
    micro_batch: Annotated[str, Key("samples of a forward pass at the start, with `trainer.micro_batch`")]
    device: Annotated[str, Key("that the run began on: the names of GPUs, or the number of CPU cores")]


@closed
class BaseKeys(TypedDict, total=False):
    name: Annotated[str, Key("name of the model or checkpoint")]
    origin: Annotated[str, Key("built, folder or hub")]
    revision: Annotated[str, Key("commit on the Hub")]
    adapted: Annotated[str, Key("how the checkpoint was changed before training")]
    learned: Annotated[list[str], Key("domains that the run of `init_from`, and those before it, learned")]


@closed
class ExportedKeys(TypedDict):
    requested: Annotated[str, Key("`export.dtype`")]
    dtype: Annotated[str, Key("type of the weights: float32, bfloat16, float16, float64")]
    text: Annotated[str, Key("held-out text of which a sample was scored")]
    tokens: Annotated[int, Key("scored tokens of the sample", "tokens")]
    nll: Annotated[Loss, Key("of the exported model, loaded as the card says")]
    run_nll: Annotated[Loss, Key("of the run's weights on the same tokens")]


@closed
class SimilarityKeys(TypedDict, total=False):
    names: Annotated[list[str], Key("domains", over="N")]
    matrix: Annotated[
        list[Annotated[list[float], Key(over="N")]], Key("cosines of mean embeddings", "-1 to 1", over="N")
    ]
    general: Annotated[list[float], Key("cosines with the general text", "-1 to 1", over="N")]
    embedding: Annotated[str, Key("of the documents")]
