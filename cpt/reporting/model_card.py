"""The model card of an exported model, `model/README.md`, as the Hugging Face Hub reads it. As it may be
published, keys that look secret are left out, and a value with a path or an address reads `<path>`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from cpt.core.config import executes, flatten
from cpt.core.files import replace
from cpt.core.secrets import is_secret
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from cpt.reporting import frames
from cpt.reporting.frames import FEW, decimals, few, find_matrices, percent, perplexity, strip_controls
from cpt.reporting.page import IN_CELL, TEMPLATES, quote_markup
from cpt.reporting.run_page import format_cells, format_metric

PIPELINES = {"masked": "fill-mask", "causal": "text-generation"}  # by objective
SHOWN = re.compile(
    r"(method|mask|replay|freeze|optim|lr_scheduler)\..+|domains\.packing|model\.(max_seq_length|mlm_probability|mean_span)|seed"
    r"|trainer\.(steps|epochs|tokens|batch_size|accumulate_grad_batches|gradient_clip_val|strategy|devices)"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
PATH = re.compile(r"[/~]|[A-Za-z]:\\")


def write_model_card(folder: Path, scores: Scores) -> Path:
    """Writes the card of a run from its scores, config and overrides. Returns the card's path."""
    run, model = scores.run, folder / "model"
    settings = dict(flatten(read_yaml(folder / "config.yaml") or {}))
    base = {"name": run["model"], "origin": "unknown"} | scores.base
    from_hub = base["origin"] == "hub" and HUB_NAME.fullmatch(base["name"]) is not None
    paths = {str(x) for key, x in settings.items() if re.fullmatch(r"domains\.catalogue\..*\.path", key)}
    data_sets = sorted(path for path in paths if HUB_NAME.fullmatch(path) and not Path(path).exists())
    public = [*data_sets, *[base["name"]] * from_hub]
    method = run["method"] + "".join(f" + {run[kind]}" for kind in ("mask", "replay") if run[kind] != "none")
    title = strip_controls(f"{base['name']}, {method}: {few(run['order'])}")

    # A causal model has no mask rate.
    unused = {"name", "_partial_"} | ({"mlm_probability"} if run["objective"] == "causal" else set())
    shown = []
    for key, value in (settings | scores.numerics).items():
        last = key.rpartition(".")[2]
        if (SHOWN.fullmatch(key) or key in scores.numerics) and last not in unused and not is_secret(key):
            text = str(value).rpartition(".")[2] if last == "_target_" else hide_paths(value, public)
            shown += [[key.removesuffix("._target_"), text]] if value not in (None, {}) else []
    command = ["python run.py"]
    for override in read_yaml(folder / ".hydra" / "overrides.yaml") or []:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~")
        if not (executes(name) or is_secret(name) or name.startswith(("callbacks", "hydra"))):
            text = value if name == "order" else hide_paths(value, public)
            command.append(shlex.quote(strip_controls(f"{key}{equals}{text}")))

    found = [("all domains", name, metric["perplexity"]) for name, metric in scores.metrics.items()]
    perplexities = find_matrices(scores)["perplexity"]
    matrix = [["after", *scores.domains], *format_cells(perplexities, perplexity)]
    if len(scores.domains) > FEW:
        matrix = [*map(list, zip(matrix[0], matrix[1], matrix[-1], strict=True))]
    else:
        found += [(strip_controls(text), "last", ppl) for text, ppl in perplexities.iloc[-1].items()]
    pipeline, split = PIPELINES.get(run["objective"]), scores.conditions.get("score_on", "test")
    measured = {"dataset_split": split, "task_type": pipeline or "text2text-generation"}
    results = []
    for text, name, value in found:
        if value is not None and isfinite(value):
            of = measured | {"dataset_type": text, "dataset_name": text, "metric_name": name}
            results.append(EvalResult(**of, metric_type="perplexity", metric_value=float(f"{value:.6g}")))
    metrics = [format_metric(scores, name) for name in scores.metrics]
    tasks = []
    for each in (each for kind in ("task", "score", "benchmark") for each in frames.KINDS[kind](scores)):
        show = {"share": percent, "": decimals}.get(each.unit)  # the harness has units of its own
        if show and "/" not in each.metric and each.value is not None and isfinite(each.value):
            text = show(each.value) + frames.format_interval(each.low, each.high, show)
            tasks.append([each.text or "all tasks", each.metric, each.row or "–", text])
    data: dict[str, Any] = {"base_model": base["name"] if from_hub else None, "pipeline_tag": pipeline}
    data |= {"datasets": data_sets or None, "eval_results": results or None, "library_name": "transformers"}
    tags = ["continual-pretraining", "continual-learning", "cpt", run["method"]]
    card = ModelCard.from_template(
        ModelCardData(**data, model_name=title, tags=tags),
        template_path=str(TEMPLATES / "model_card.md.j2"),
        quote=lambda text: quote_markup(str(text), IN_CELL),
        table=make_table,
        megabytes=frames.megabytes,
        scores=scores,
        title=title,
        method=method,
        order=few(run["order"]),
        base=base,
        loading=scores.loading if '"model"' in scores.loading else "",
        parts=json.loads(path.read_text())["parts"] if (path := model / "parts.json").exists() else [],
        settings=shown,
        source=settings.get("domains.name", "unknown"),
        conditions=describe_conditions(conditions(scores)),
        matrix=matrix,
        metrics=[[name, f"{meaning}: {formula}", *cells[:3]] for name, meaning, formula, *cells in metrics],
        tasks=tasks,
        general=GENERAL in scores.domains,
        missing=sum(value is None for row in scores.nll for value in row),
        command=" ".join(command),
    )
    replace(model / "README.md", f"{card}\n")
    return model / "README.md"


def make_table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table of cells that may hold any text."""
    lines = [[quote_markup(str(cell), IN_CELL) for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def hide_paths(value: Any, public: Iterable[str]) -> str:
    return "<path>" if PATH.search(str(value)) and value not in public else str(value)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
