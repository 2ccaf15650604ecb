"""The model card of an exported model, `model/README.md`, as the Hugging Face Hub reads it. As it may be
published, keys that look secret are left out, and a value with a path or an address reads `<path>`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from pandas import DataFrame

from cpt.core.config import flatten, is_execution_key
from cpt.core.files import read_yaml, write_atomically
from cpt.core.run_command import find_config_folders, find_program_words
from cpt.core.secrets import is_secret
from cpt.data.sources.base import GENERAL
from cpt.evaluation.metrics import METRICS, TITLES
from cpt.evaluation.scores import Scores, describe_conditions, find_conditions
from cpt.evaluation.withdrawals import load_withdrawals
from cpt.reporting.chat_tables import describe_chats
from cpt.reporting.divergence_tables import describe_divergence
from cpt.reporting.formats import (
    MAX_LISTED,
    Format,
    format_bytes,
    format_decimals,
    format_interval,
    format_percent,
    format_perplexity,
    list_order,
    strip_controls,
)
from cpt.reporting.frames import ReportedValue, find_matrices, list_values
from cpt.reporting.license_choices import load_license_choices
from cpt.reporting.license_sources import find_licenses, group_licenses
from cpt.reporting.license_terms import LicenseDecision, StatedLicense, choose_license, decide_license
from cpt.reporting.page import IN_CELL, TEMPLATES, format_markdown_table, quote_markup
from cpt.reporting.run_tables import describe_quantization, format_cells, format_metric
from cpt.reporting.serving import describe_adapters

LICENSE_HEAD = ("of", "license", "stated in")
ALL_DOMAINS = "all domains"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PIPELINES = {"masked": "fill-mask", "causal": "text-generation"}  # by objective
SHOWN_SETTINGS = re.compile(
    r"(method|mask|replay|freeze|optim|lr_scheduler)\..+"
    r"|domains\.packing"
    r"|model\.(max_seq_length|mlm_probability|mean_span)"
    r"|seed"
    r"|trainer\.(steps|epochs|tokens|batch_size|accumulate_grad_batches|gradient_clip_val|strategy|devices)"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
PATH = re.compile(r"[/~]|[A-Za-z]:\\")


def write_model_card(folder: Path, scores: Scores, *, is_online: bool = False) -> Path:
    """Writes the card of a run from its scores, config and overrides, and from the licenses that the user has
    given. With `is_online` the cards of its base and data sets are downloaded where the cache of the Hub does
    not have them. Returns the card's path."""
    run = scores.run
    choices = load_license_choices(folder)
    settings = dict(flatten(read_yaml(folder / "config.yaml") or {}))
    base = {"name": run["model"], "origin": "unknown"} | scores.base
    is_on_hub = base["origin"] == "hub" and HUB_NAME.fullmatch(base["name"]) is not None
    data_sets = find_data_sets(settings)
    public_names = list(data_sets)
    if is_on_hub:
        public_names.append(base["name"])

    method = run["method"]
    for kind in ("mask", "replay"):
        if run[kind] != "none":
            method += f" + {run[kind]}"
    order = list_order(run["order"])
    title = strip_controls(f"{base['name']}, {method}: {order}")
    perplexities = find_matrices(scores)["perplexity"]
    pipeline = PIPELINES.get(run["objective"])
    stated = find_licenses(settings, scores, stated_for_texts=choices.texts, is_online=is_online)
    license = choose_license(stated, choices.model) if choices.model else decide_license(stated)

    card = ModelCard.from_template(
        ModelCardData(
            base_model=base["name"] if is_on_hub else None,
            pipeline_tag=pipeline,
            datasets=data_sets or None,
            eval_results=list_results(scores, perplexities, pipeline) or None,
            library_name="transformers",
            license=license.identifier or None,
            license_name=license.name or None,
            license_link=license.link or None,
            model_name=title,
            tags=["continual-pretraining", "continual-learning", "cpt", run["method"]],
        ),
        template_path=str(TEMPLATES / "model_card.md.j2"),
        quote=lambda text: quote_markup(str(text), IN_CELL),
        table=make_markdown_table,
        megabytes=format_bytes,
        scores=scores,
        pipeline=pipeline,
        title=title,
        method=method,
        order=order,
        base=base,
        loading=scores.loading if '"model"' in scores.loading else "",
        parts=read_parts(folder / "model"),
        serving=" ".join(describe_adapters(folder / "model")),
        has_chat_template=has_exported_chat_template(folder / "model"),
        license=format_license(license, stated),
        settings=list_card_settings(settings, scores, public_names),
        source=settings.get("domains.name", "unknown"),
        conditions=describe_conditions(find_conditions(scores)),
        matrix=format_card_matrix(perplexities),
        quantization=describe_quantization(scores),
        chats=" ".join(describe_chats(scores)),
        divergence=describe_divergence(scores),
        metrics=list_card_metrics(scores),
        tasks=list_tasks(scores),
        general=GENERAL in scores.domains,
        missing=count_missing(scores),
        withdrawals=load_withdrawals(folder),
        command=format_public_command(folder, public_names),
    )
    path = folder / "model" / "README.md"
    write_atomically(path, f"{card}\n")
    return path


def format_license(license: LicenseDecision, stated: Sequence[StatedLicense]) -> str:
    """The section of a card in Markdown: what is claimed and why, and what is stated of each part."""
    claim = "No license is claimed"
    if license.identifier:
        claim = f"`{license.identifier}`"
        name_and_link = ", ".join(quote_cell(text) for text in (license.name, license.link) if text)
        if name_and_link:
            claim += f" ({name_and_link})"
    lines = [
        f"{claim}: {quote_cell(license.reason)}.",
        "cpt compares what base model and data state, by identifiers. It gives no legal advice.",
    ]
    if stated:
        table = make_markdown_table(LICENSE_HEAD, group_licenses(stated, limit=MAX_LISTED))
        lines += ["", table]
    return "\n".join(lines)


def quote_cell(text: str) -> str:
    return quote_markup(strip_controls(text), IN_CELL)


def describe_license(card: Path) -> str:
    """What a card that was written says of the license, for the console: `license: mit: all stated …`."""
    _, _, section = card.read_text(encoding="utf-8").partition("\n## License\n\n")
    return f"license: {section.splitlines()[0]}"


def has_exported_chat_template(model: Path) -> bool:
    """Whether the tokenizer in a folder has a chat template, in a file of its own or in its config."""
    if (model / CHAT_TEMPLATE_FILE).is_file():
        return True
    path = model / TOKENIZER_CONFIG_FILE
    return path.is_file() and bool(json.loads(path.read_text(encoding="utf-8")).get("chat_template"))


def count_missing(scores: Scores) -> int:
    """The number of cells of the matrix that were not measured."""
    num_missing = 0
    for row in scores.nll:
        num_missing += sum(loss is None for loss in row)
    return num_missing


def find_data_sets(settings: Mapping[str, Any]) -> list[str]:
    """The data sets of the Hub in a catalogue of domains."""
    paths = set()
    for key, value in settings.items():
        if re.fullmatch(r"domains\.catalogue\..*\.path", key):
            paths.add(str(value))
    return sorted(path for path in paths if HUB_NAME.fullmatch(path) and not Path(path).exists())


def read_parts(model: Path) -> list[str]:
    """The domains of which an exported model has modules of their own."""
    path = model / "parts.json"
    return json.loads(path.read_text())["parts"] if path.exists() else []


def list_card_settings(
    settings: Mapping[str, Any], scores: Scores, public_names: Collection[str]
) -> list[list[str]]:
    """The settings that decide a result, and the numerics of the run, by key."""
    unused = {"name", "_partial_"}
    if scores.run["objective"] == "causal":
        unused.add("mlm_probability")  # a causal model has no mask rate

    rows = []
    for key, value in {**settings, **scores.numerics}.items():
        option = key.rpartition(".")[2]
        is_shown = key in scores.numerics or SHOWN_SETTINGS.fullmatch(key) is not None
        if not is_shown or option in unused or is_secret(key) or value in (None, {}):
            continue
        is_class = option == "_target_"
        text = str(value).rpartition(".")[2] if is_class else hide_paths(value, public_names)
        rows.append([key.removesuffix("._target_"), text])
    return rows


def format_public_command(folder: Path, public_names: Collection[str]) -> str:
    """The command that repeats the run, without paths and without what only says how it was executed."""
    words = [" ".join(find_program_words())]
    if find_config_folders(folder):
        words.append("'--config-dir=<path>'")
    for override in read_yaml(folder / ".hydra" / "overrides.yaml") or []:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~")
        if is_execution_key(name) or is_secret(name) or name.startswith(("callbacks", "hydra")):
            continue
        text = value if name == "order" else hide_paths(value, public_names)
        words.append(shlex.quote(strip_controls(f"{key}{equals}{text}")))
    return " ".join(words)


def format_card_matrix(perplexities: DataFrame) -> list[list[str]]:
    """The perplexities after each stage. If there are many texts, only those of the base and the last model,
    with a row for each text."""
    table = [["after", *perplexities.columns], *format_cells(perplexities, format_perplexity)]
    if len(perplexities.columns) <= MAX_LISTED:
        return table
    return [list(cells) for cells in zip(table[0], table[1], table[-1], strict=True)]


def list_results(scores: Scores, perplexities: DataFrame, pipeline: str | None) -> list[EvalResult]:
    """The results in the card's metadata: metrics over all domains, and of few texts the last perplexity. The
    type of a level is `perplexity`; a difference has its key in scores.json as its type, in nats."""
    results = []

    def add_result(text: str, *, name: str, kind: str, value: float | None) -> None:
        if value is None or not isfinite(value):
            return
        results.append(
            EvalResult(
                task_type=pipeline or "text2text-generation",
                dataset_type=text,
                dataset_name=text,
                dataset_split=scores.conditions.get("score_on", "test"),
                metric_name=name,
                metric_type=kind,
                metric_value=float(f"{value:.6g}"),
            )
        )

    for name, metric in scores.metrics.items():
        title = TITLES.get(name, name)
        if METRICS[name].is_level:
            add_result(
                ALL_DOMAINS, name=f"{title}, perplexity", kind="perplexity", value=metric["perplexity"]
            )
        else:
            texts = GENERAL if METRICS[name].needs_general else ALL_DOMAINS
            add_result(texts, name=f"{title}, nats per token", kind=name, value=metric["nats"])
    if len(scores.domains) <= MAX_LISTED:
        for text, perplexity in perplexities.iloc[-1].items():
            add_result(strip_controls(str(text)), name="last", kind="perplexity", value=perplexity)
    return results


def list_card_metrics(scores: Scores) -> list[list[str]]:
    """The metrics of the matrix: name, meaning with formula, and the value in each unit."""
    rows = []
    for metric in scores.metrics:
        name, meaning, formula, *cells = format_metric(scores, metric)
        rows.append([name, f"{meaning}: {formula}", *cells])
    return rows


def list_tasks(scores: Scores) -> list[list[str]]:
    """The results of end tasks, answers, chats and benchmarks: task, measure, row and value."""
    rows = []
    for kind in ("task", "score", "chat", "benchmark"):
        for reported in list_values(scores, kind):
            format_value = find_format(reported)
            if format_value is None or reported.value is None or not isfinite(reported.value):
                continue
            text = format_value(reported.value) + format_interval(reported.low, reported.high, format_value)
            rows.append([reported.text or "all tasks", reported.metric, reported.row or "–", text])
    return rows


def find_format(reported: ReportedValue) -> Format | None:
    """How a result of a task is written; None for one that the card leaves out."""
    if "/" in reported.metric:
        return None
    if reported.unit == "share":
        return format_percent
    return format_decimals if reported.unit == "" else None  # the harness has units of its own


def make_markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table of cells that may hold any text."""
    return format_markdown_table([head, ["---"] * len(head), *rows])


def hide_paths(value: Any, public_names: Collection[str]) -> str:
    """The value as text, without local paths and addresses."""
    return "<path>" if PATH.search(str(value)) and value not in public_names else str(value)
