"""The figures of a model's card, all from the run folder: what `card.json` has and `CARD.md` shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cpt.core.config import flatten
from cpt.core.files import check_archive
from cpt.data.sources.base import GENERAL
from cpt.evaluation.conditions import conditions
from cpt.evaluation.documents import Losses, documents_file, load_documents
from cpt.evaluation.metrics import bootstrap, in_units
from cpt.evaluation.scores import Scores
from cpt.reporting.card.agreement import check_agreement
from cpt.reporting.card.limits import list_limits
from cpt.reporting.card.privacy import pick_given, pick_options, without_folders
from cpt.reporting.run_table import KINDS

FORMAT = 1
DIGITS = 6  # of a figure: what is left differs between machines
REPLICATES = 2000  # as many as the gate draws
WEIGHTS = (".safetensors", ".bin")
UNKNOWN = "unknown"
TRAINING = {
    **{name: f"trainer.{name}" for name in ("steps", "epochs", "tokens", "batch_size", "gradient_clip_val")},
    **{"length": "model.length", "mask_rate": "model.mask_rate", "optimizer": "optim._target_"},
    **{name: f"optim.{name}" for name in ("lr", "betas", "weight_decay", "carry")},
    **{"schedule": "schedule._target_", "warmup": "schedule.warmup"},
    **{name: f"trainer.{name}" for name in ("strategy", "devices", "deterministic")},
}
Tree = dict[str, Any]


def gather_card(folder: Path, scores: Scores | None = None) -> Tree:
    """The card of a finished run: of these scores, or of scores.json, which is then compared with the losses
    by document.

    Raises ValueError where the run has not ended, has learned nothing or exported no model, where a file is
    damaged, and where the folder contradicts itself; the message names the first such figure."""
    given = scores is not None
    scores = scores or read_learned(folder)
    if not (folder / "model" / "config.json").is_file():
        raise ValueError(f"{folder}/model holds no exported model; the command of the run makes it again")
    rows = read_documents(folder, scores)
    if rows is not None and not given:
        check_agreement(scores, rows)
    settings, identity = read_settings(folder), read_identity(folder)
    base = tell_base(scores, settings, identity)
    card = {
        "format": FORMAT,
        "model": tell_model(folder, scores, settings),
        "base": base,
        "data": list(tell_texts(scores)),
        "source": without_folders(settings.get("domains.name", UNKNOWN)),
        "training": tell_training(scores, settings),
        "stages": list(tell_stages(scores)),
        **({"moved": scores.moved} if scores.moved else {}),
        "results": tell_results(scores, rows),
        "limits": list_limits(scores, documents=rows is not None, base=base["origin"] != UNKNOWN),
    }
    return plain(card)


def read_learned(folder: Path) -> Scores:
    """The scores of a run that has ended and learned something."""
    if not (folder / "scores.json").is_file():
        raise ValueError(f"{folder} holds no scores.json; needed: the folder of a finished run")
    scores = Scores.load(folder / "scores.json")
    if not scores.run["finished"]:
        raise ValueError(f"{folder} is {scores.state}; needed: a finished run")
    if len(scores.rows) < 2:
        raise ValueError(
            f"{folder}: method={scores.run['method']} has learned nothing that a card could tell"
        )
    return scores


def read_documents(folder: Path, scores: Scores) -> list[dict[str, Any]] | None:
    """The losses by document of every row; None where the folder has none of any. Raises ValueError for
    some that are missing or damaged."""
    rows = range(len(scores.rows))
    if not any(documents_file(folder, row).exists() for row in rows):
        return None
    for row in rows:
        check_archive(documents_file(folder, row), instead="bring it back from a copy")
    loaded = load_documents(folder, rows)
    for row, there in enumerate(loaded):
        if missing := [text for text in scores.measured(row) if text not in there]:
            raise ValueError(f"{documents_file(folder, row)} has no losses of {missing[0]}")
    return loaded


def read_settings(folder: Path) -> Tree:
    """The leaves of the run's config; nothing where there is none that can be read."""
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return dict(flatten(tree)) if isinstance(tree, dict) else {}


def read_identity(folder: Path) -> Tree:
    """What the run was begun with; nothing where an older cpt remembered nothing."""
    try:
        told = json.loads((folder / "identity.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def tell_model(folder: Path, scores: Scores, settings: Mapping[str, Any]) -> Tree:
    """What the exported model is: how it was made, and the digests of its weights."""
    run, model = scores.run, folder / "model"
    files = [path for path in sorted(model.rglob("*")) if path.suffix in WEIGHTS and path.is_file()]
    return {
        **{name: run[name] for name in ("method", "mask", "replay", "objective", "order", "seed")},
        "given": pick_given(run["variant"]),
        "options": pick_options(settings),
        "after": scores.rows[-1],
        "alone": scores.alone,
        "parts": read_parts(model),
        "needs_domain": scores.needs_domain,
        "loading": scores.loading if '"model"' in scores.loading else "",
        "weights": {path.relative_to(model).as_posix(): weigh(path) for path in files},
        "config_digest": scores.config_digest,
        "versions": dict(scores.versions),
    }


def read_parts(model: Path) -> list[str]:
    """The domains of which a part stands beside the plain model."""
    try:
        told = json.loads((model / "parts.json").read_text(encoding="utf-8"))
        return [str(name) for name in told["parts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{model}/parts.json is damaged ({error})") from error


def weigh(path: Path) -> Tree:
    """The bytes of a file, and the digest that `sha256sum` and the Hub show of it."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def tell_base(scores: Scores, settings: Mapping[str, Any], identity: Mapping[str, Any]) -> Tree:
    """Where the run began. Of a checkpoint that an older cpt was given, it is not known whether its name is
    one of the hub: the last part is told alone."""
    checkpoint = settings.get("model.checkpoint", UNKNOWN)
    older = {"name": without_folders(checkpoint), "origin": UNKNOWN}
    if checkpoint in (None, UNKNOWN):
        older = {"name": scores.run["model"], "origin": UNKNOWN if checkpoint else "built"}
    told = scores.base or older
    files = {name: each[-1] for name, each in identity.get("base", {}).items()}
    digests = {"files": files, "tokenizer": identity.get("tokenizer", "")}
    return {"choice": scores.run["model"], "revision": ""} | told | digests


def tell_texts(scores: Scores) -> Iterator[Tree]:
    """Each text with what is known of it, and the tokens that the stage of its name has read."""
    seen = dict(zip(scores.rows, scores.seen, strict=False))
    sizes = zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True)
    for name, tokens, scored, size in sizes:
        facts = scores.texts.get(name, {})
        yield {
            "text": name,
            "role": "general" if name == GENERAL else "domain",
            "documents": facts.get("documents"),
            "digest": facts.get("digest"),
            "train_digest": facts.get("train_digest"),
            "learned_tokens": seen.get(name),
            "held_out": {"tokens": tokens, "scored": scored, "bytes": size},
        }


def tell_training(scores: Scores, settings: Mapping[str, Any]) -> Tree:
    """How the stages were learned, as far as scores and config tell."""
    told = {name: settings.get(key) for name, key in TRAINING.items()}
    for name in ("optimizer", "schedule"):
        told[name] = None if told[name] is None else str(told[name]).rpartition(".")[2]
    known = {name: without_folders(value) for name, value in told.items() if value is not None}
    return {
        **known,
        "numerics": dict(scores.numerics),
        "conditions": conditions(scores, settings),
        "seconds": sum(scores.phases["learn"].values()),
    }


def tell_stages(scores: Scores) -> Iterator[Tree]:
    """What each stage took and moved; what was not noted is None."""
    for row, name in enumerate(scores.rows):
        noted = {
            key: (getattr(scores, key) or [None] * len(scores.rows))[row]
            for key in ("seen", "rates", "trained", "stored", "skipped", "flops", "leak")
        }
        if row:
            yield {"stage": name} | noted


def tell_results(scores: Scores, rows: Sequence[Losses] | None) -> Tree:
    """The matrix with its intervals, the metrics, and what was measured of tasks."""
    losses = in_units(scores.cells, layout=scores)
    bounds = bound_cells(scores, rows) if rows is not None else None
    return {
        "rows": list(scores.rows),
        "texts": list(scores.domains),
        "nats": losses["nats"].tolist(),
        "perplexity": losses["perplexity"].tolist(),
        "nats_interval": bounds,
        "metrics": scores.metrics,
        **{
            name: list(tell_lines(scores, kind))
            for name, kind in (("endtasks", "task"), ("answers", "score"))
        },
        "probes": list(tell_lines(scores, "probe")),
    }


def bound_cells(scores: Scores, rows: Sequence[Losses]) -> list[list[list[float] | None]]:
    """The 95 % interval of each cell over its documents [row][column], drawn as the gate draws them; None for
    one that was not measured, and of one document."""
    found: list[list[list[float] | None]] = [[None] * len(scores.domains) for _ in scores.rows]
    for column, text in enumerate(scores.domains):
        there = [row for row, losses in enumerate(scores.nll) if losses[column] is not None]
        if not there:
            continue
        counts = rows[there[0]][text][1].astype(float)
        scored = counts > 0
        if scored.sum() < 2:
            continue
        sums = [rows[row][text][0].astype(float)[scored] for row in there]
        bounds = bootstrap([[np.stack(sums), counts[scored]]], divide_rows, replicates=REPLICATES)
        for place, row in enumerate(there):
            found[row][column] = bounds[str(place)]["nats"]
    return found


def divide_rows(means: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """By row, of means [draw, row, column] of one column."""
    return {str(row): {"nats": means[..., row, 0]} for row in range(means.shape[-2])}


def tell_lines(scores: Scores, kind: str) -> Iterator[Tree]:
    """The numbers of a kind that are scores, each of a whole run or of its last row."""
    for line in KINDS[kind](scores):
        if line.unit in ("share", "") and "/" not in line.name:
            bounds = None if line.low is None else [line.low, line.high]
            yield {
                "name": line.name,
                "on": line.on,
                "after": line.after,
                "value": line.value,
                "interval": bounds,
            }


def plain(value: Any) -> Any:
    """A value as JSON gives it back: figures of so many digits, null for what is no number."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    return value
