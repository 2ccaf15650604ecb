"""A card for people: Markdown that begins with what the Hugging Face Hub reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any

import yaml

from cpt.evaluation.metrics import METRICS, UNITS, describe_metric
from cpt.reporting.drawing import FEW
from cpt.reporting.formatting import decimals, megabytes, percent, perplexity
from cpt.reporting.page import IN_CELL, Block, few, markdown, quote_markup

PIPELINES = {"masked": "fill-mask", "causal": "text-generation"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
TAG = re.compile(r"[\w.-]+", re.ASCII)
DIGEST = 12  # digits of a sha256 that a table shows; card.json has all
Card = Mapping[str, Any]


def format_card(card: Card) -> str:
    """CARD.md of what card.json has."""
    blocks = [
        show_model(card["model"], card["training"]),
        show_base(card["base"]),
        show_texts(card),
        show_training(card["training"]),
        show_stages(card["stages"]),
        show_movement(card.get("moved", {})),
        *show_results(card["results"]),
        *show_tasks(card["results"]),
        show_limits(card["limits"]),
    ]
    title = f"# {quote_markup(name_model(card), IN_CELL)}"
    shown = [markdown(block, picture="") for block in blocks if block.lines or block.cells]
    return "\n\n".join([format_front_matter(card), title, INTRODUCTION, *shown, tell_commands(card)]) + "\n"


INTRODUCTION = (
    "A model that was trained further on one domain of text after another. Every figure below comes from the "
    "folder of the run that made it, RUN, where this card lies in RUN/model; `card.json` beside it has them "
    "for programs. Losses are nats per scored token; in brackets, 95 % bootstrap over documents."
)


def format_front_matter(card: Card) -> str:
    """What the Hub reads: a name of a base only where the run knows it as one of the hub."""
    base, model = card["base"], card["model"]
    told: dict[str, Any] = {"library_name": "transformers"}
    if base["origin"] == "hub" and HUB_NAME.fullmatch(base["name"]):
        told["base_model"] = base["name"]
    if model["objective"] in PIPELINES:
        told["pipeline_tag"] = PIPELINES[model["objective"]]
    tags = ["continual-pretraining", "continual-learning", "cpt"]
    told["tags"] = tags + [model["method"]] * bool(TAG.fullmatch(model["method"]))
    return f"---\n{yaml.safe_dump(told, sort_keys=False, allow_unicode=True)}---"


def name_model(card: Card) -> str:
    model = card["model"]
    return f"{card['base']['name']}, {label_method(model)}: {few(model['order'])}"


def label_method(model: Card) -> str:
    laid = "".join(f" + {kind} {model[kind]}" for kind in ("mask", "replay") if model[kind] != "none")
    return model["method"] + laid


def show_model(model: Card, training: Card) -> Block:
    cells = [
        ["method", label_method(model)],
        ["given for this run", tell_pairs(model["given"]) or "nothing: the defaults"],
        ["options of the method", tell_pairs(model["options"]) or "none"],
        ["order", few(model["order"])],
        ["seed", str(model["seed"])],
        ["exported", tell_exported(model)],
        ["domain at test time", "must be known" if model["needs_domain"] else "need not be known"],
        *([["load (from RUN)", model["loading"]]] if model["loading"] else []),
        *(
            [name, f"{megabytes(each['bytes'])}, sha256 {each['sha256']}"]
            for name, each in model["weights"].items()
        ),
        ["config", f"digest {model['config_digest']}"],
        ["versions", tell_pairs(model["versions"])],
    ]
    return Block(title="What it is", head=["", ""], cells=cells, words=2)


def tell_exported(model: Card) -> str:
    """Which of a run's models this is."""
    after = f"the model after {model['after']}"
    if model["alone"]:
        after += ", which was learned from the base alone: of the other domains it knows nothing"
    if model["parts"]:
        after += (
            f"; a plain model, and beside it in parts/ what belongs to {few(model['parts'], between=', ')}"
        )
    return after


def tell_pairs(pairs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in pairs.items())


def show_base(base: Card) -> Block:
    origins = {
        "hub": "from the Hugging Face Hub" + f", revision {base['revision']}" * bool(base["revision"]),
        "folder": "from a folder, of which the last part is told",
        "built": "built for the run and trained on its general text",
    }
    cells = [
        ["name", base["name"]],
        ["where from", origins.get(base["origin"], "not remembered")],
        *([name, f"xxh3 {digest}"] for name, digest in base["files"].items()),
        *([["tokenizer", f"digest {base['tokenizer']}"]] if base["tokenizer"] else []),
    ]
    return Block(title="Base", head=["", ""], cells=cells, words=2)


def show_texts(card: Card) -> Block:
    cells = [
        [
            each["text"],
            each["role"],
            tell_documents(each["documents"]),
            tell_count(each["learned_tokens"]),
            tell_count(each["held_out"]["scored"]),
            each["digest"] or "–",
        ]
        for each in card["data"]
    ]
    return Block(
        title="Data",
        lines=[
            f"Source: {card['source']}. Tokens learned: what the steps of a domain's stage have read, "
            "replayed text too. Scored: tokens of the held-out text that a loss is the mean of."
        ],
        head=["text", "role", "documents", "tokens learned", "scored", "digest"],
        cells=cells,
        words=3,
    )


def tell_documents(documents: Any) -> str:
    if isinstance(documents, Mapping):
        return ", ".join(f"{split} {count}" for split, count in documents.items())
    return "–" if documents is None else str(documents)


def tell_count(value: float | None, show: str = "{:,}") -> str:
    return "–" if value is None else show.format(value)


def show_training(training: Card) -> Block:
    inner = {name: training[name] for name in ("numerics", "conditions")}
    cells = [[name, str(value)] for name, value in training.items() if name not in (*inner, "seconds")]
    cells += [[name, str(value)] for name, value in inner["numerics"].items()]
    cells += [
        [f"scored with {name}", str(inner["conditions"][name])]
        for name in ("length", "tokenizer", "texts", "cap")
    ]
    cells.append(["seconds of learning", f"{training['seconds']:,.1f}"])
    return Block(title="Training", head=["", "each stage"], cells=cells, words=2)


def show_stages(stages: Sequence[Card]) -> Block:
    """What each stage took and moved."""
    cells = [
        [
            each["stage"],
            tell_count(each["seen"]),
            ", ".join(f"{rate:.3g}" for rate in each["rates"] or []) or "–",
            tell_count(each["trained"]),
            megabytes(each["stored"]) if each["stored"] != 0 else "nothing",
            tell_leak(each["leak"]),
            tell_count(each["skipped"]),
            tell_count(each["flops"], "{:.3g}"),
        ]
        for each in stages
    ]
    lines = [
        "Rates: the learning rate of the first step, the highest, that of the last, as the optimizer had "
        "them. Moved inside: the share of the stage's squared movement inside what the method protects, and "
        "that of a random movement."
    ]
    named = "stage, tokens, rates, parameters trained, stored beside, moved inside, steps left out, FLOPs"
    return Block(title="What moved", lines=lines, head=named.split(", "), cells=cells)


def show_movement(moved: Mapping[str, Sequence[float]]) -> Block:
    """How far the exported weights lie from the base's, by kind."""
    cells = [[kind, f"{distance:.4f}", percent(share)] for kind, (distance, share) in moved.items()]
    told = (
        "Distance: the length of what was added to the base's weights, over the length of those. Changed: "
        "how many of 100 numbers are others. What lies beside the plain model is not in it, nor are kinds of "
        "which some have no counterpart in the base."
    )
    head = ["weights", "distance", "changed, %"]
    lines = [told] if cells else []
    return Block(title="How far the weights moved", lines=lines, head=head, cells=cells)


def tell_leak(leak: Sequence[float] | None) -> str:
    return "{:.2g} ({:.2g})".format(*leak) if leak else "–"


def show_results(results: Card) -> Iterator[Block]:
    """The matrix as perplexities and the metrics. Of many texts a row each, with the base, its own stage and
    the last."""
    rows, texts = results["rows"], results["texts"]
    if len(texts) <= FEW:
        cells = [
            [name, *(tell_cell(results, row, column) for column in range(len(texts)))]
            for row, name in enumerate(rows)
        ]
        yield Block(
            title="Results: perplexity on each text (column) after each stage (row)",
            head=["after", *texts],
            cells=cells,
        )
    else:
        places = [(0, rows.index(text) if text in rows else None, len(rows) - 1) for text in texts]
        cells = [
            [text, *("–" if row is None else tell_cell(results, row, column) for row in found)]
            for column, (text, found) in enumerate(zip(texts, places, strict=True))
        ]
        title = "Results: perplexity on each text; the whole matrix is in card.json"
        yield Block(
            title=title, head=["text", "base", "after its own stage", f"after {rows[-1]}"], cells=cells
        )
    shown = [
        [name, describe_metric(METRICS[name].compute)[0], *map(tell_metric, [metric] * len(UNITS), UNITS)]
        for name, metric in results["metrics"].items()
    ]
    head = ["metric", "meaning", *(unit.replace("_", " ") for unit in UNITS)]
    yield Block(title="Results: learned, kept, transferred", head=head, cells=shown, words=2)


def tell_cell(results: Card, row: int, column: int) -> str:
    """A perplexity with its interval; a dash where it was not measured."""
    if results["nats"][row][column] is None:
        return "–"
    bounds = results["nats_interval"] and results["nats_interval"][row][column]
    interval = f" [{', '.join(perplexity(exp(bound)) for bound in bounds)}]" if bounds else ""
    return perplexity(results["perplexity"][row][column]) + interval


def tell_metric(metric: Card, unit: str) -> str:
    show = perplexity if unit == "perplexity" else decimals
    bounds = metric.get("interval", {}).get(unit)
    interval = f" [{', '.join(map(show, bounds))}]" if bounds else ""
    terms = " ({:,} of {:,})".format(*metric["terms"]) if "terms" in metric and unit == UNITS[0] else ""
    return show(metric[unit]) + interval + terms


def show_tasks(results: Card) -> Iterator[Block]:
    """End tasks, answers and probes, of those that were measured."""
    for name, title in (("endtasks", "end tasks"), ("answers", "answers to tasks"), ("probes", "probes")):
        cells = [
            [each["on"] or "all tasks", each["name"], each["after"] or "–", tell_share(each)]
            for each in results[name]
        ]
        yield Block(
            title=f"Results: {title}, in %", head=["task", "measure", "after", "%"], cells=cells, words=3
        )


def tell_share(line: Card) -> str:
    if line["value"] is None:
        return "–"
    bounds = line["interval"]
    return percent(line["value"]) + (f" [{', '.join(map(percent, bounds))}]" if bounds else "")


def show_limits(limits: Sequence[str]) -> Block:
    return Block(title="Limits", head=["what this card does not show"], cells=[[each] for each in limits])


def tell_commands(card: Card) -> str:
    """The commands that derive each figure again: nothing of them is a name that a user chose."""
    lines = [f"{command:44} # {what}" for command, what in list_commands(card["model"])]
    text = "Without a network, with this version of cpt and the whole folder of the run, RUN:"
    return "\n".join(["## How to check this", "", text, "", "```bash", *lines, "```"])


def list_commands(model: Card) -> Iterator[tuple[str, str]]:
    yield "python -m cpt.card RUN --check", "all figures again; exit code 1 names the first that differs"
    yield "python -m cpt.card RUN", "writes CARD.md and card.json again"
    yield "python -m cpt.verify RUN", "reads every file through: damage to data, weights, report, card"
    yield "python -m cpt.report RUN", "matrix, metrics, rates, costs, tasks as pages"
    if not model["alone"]:
        yield "python -m cpt.gate RUN --since base", "change of each text since the base, with intervals"
    yield "cd RUN/model && sha256sum *.safetensors", "the digests of the weights"
