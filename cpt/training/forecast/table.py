"""A forecast as one reads it in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpt.reporting.formatting import megabytes, shorten

ENDS = 3  # texts and stages that are listed at both ends of many
LEAST = {"others": 100_000}  # bytes below which they are some scalars
WIDEST = 28  # characters of a name
MEMORY = {
    "weights": "weights",
    "companions": "companions",
    "state": "the method's own state",
    "others": "the method's, in no buffer",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "kept": "weights to go back to",
    "gathered": "a block while it computes",
    "buckets": "gradients as they are exchanged",
    "weights and scoring": "weights, and scoring",
    "rest": "activations and temporary copies",
    "program": "Python and its libraries",
    "allocator": "freed, and not given back",
    "peak": "peak of a process",
}


def format_forecast(data: Mapping[str, Any]) -> str:
    """The tables of a forecast."""
    run = data["run"]
    laid = "".join(f" + {kind} {run[kind]}" for kind in ("mask", "replay") if run[kind] != "none")
    head = [
        f"plan of {run['folder']}",
        f"method {run['method']}{laid}, model {run['model']}, seed {run['seed']}; on {data['device']}, "
        f"{data['processes']} process{'es' * (data['processes'] > 1)}",
        f"state: {data['state']}",
    ]
    if "texts" not in data:
        return "\n".join([*head, "nothing is left to learn or to score; nothing was tried"])
    parts = [texts(data), stages(data), memory(data), disk(data), seconds(data)]
    return "\n\n".join(["\n".join(head), *("\n".join(part) for part in parts)])


def texts(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        [each["text"], count(each["train_tokens"]), count(each["held_out_tokens"])] for each in data["texts"]
    ]
    sums = [sum(each[name] or 0 for each in data["texts"]) for name in ("train_tokens", "held_out_tokens")]
    whole = ["all", *map(count, sums)]
    yield from aligned([["text", "tokens to learn from", "held out"], *few(rows), whole])


def stages(data: Mapping[str, Any]) -> Iterator[str]:
    names = ("steps", "tokens", "scored_texts", "scored_tokens")
    generates = any("generated_tokens" in each for each in data["stages"])
    left = any(each["steps"] != each["left_steps"] for each in data["stages"])
    left |= data["scored_tokens"]["scored_tokens"] != data["scored_tokens"]["left_scored_tokens"]
    names += ("generated_tokens",) * generates + ("left_steps", "left_scored_tokens") * left
    rows = [[each["stage"], *(count(each[name]) for name in names)] for each in data["stages"]]
    whole = ["all", *(count(sum(each[name] for each in data["stages"])) for name in names)]
    heads = ["stage", "steps", "tokens read", "texts scored", "tokens scored"]
    heads += ["tokens generated"] * generates + ["steps left", "scored left"] * left
    yield from aligned([heads, *few(rows), whole])
    if budget := data["budget"]:
        bounds = ", ".join(f"{name} {value:g}" for name, value in budget["nats"].items())
        yield f"budget, nats per token: {bounds}; steered by {budget['steer']}, looked at {budget['looks']}"
    scored = data["scored_tokens"]
    policy = " ".join(f"eval.{name}={value}" for name, value in data["policy"].items() if value is not None)
    share = scored["scored_tokens"] / max(1, scored["full_matrix"])
    yield f"a full matrix would score {count(scored['full_matrix'])} tokens; {policy}: {share:.0%} of them"


def memory(data: Mapping[str, Any]) -> Iterator[str]:
    first, last = data["memory"]["first"], data["memory"]["last"]
    rows = [
        [MEMORY[name], megabytes(first[name]), megabytes(last[name])]
        for name in last
        if max(first[name], last[name]) >= LEAST.get(name, 1)
    ]
    yield from aligned([["memory of a process", "first stage", "last stage"], *rows])
    grown = {kind: megabytes(size) if size else "nothing" for kind, size in data["grows_by_domain"].items()}
    yield (
        f"{count(data['trained_parameters'])} parameters are trained; each further domain adds "
        f"{grown['memory']} in memory, {grown['stored']} to the stage's file"
    )
    if host := data["host"]["last"]:
        yield f"beside it {megabytes(host)} of what rests lie in the host's memory at the last stage"
    if mapped := data["mapped"]["last"]:
        yield (
            f"beside it {megabytes(mapped)} of parts lie in the file of the stage before the last; what of "
            "them is read stays in memory as long as the system has room"
        )


def disk(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [[name, megabytes(size)] for name, size in data["disk"].items() if size]
    yield from aligned([["disk", "bytes"], *rows])


def seconds(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [[name, duration(value)] for name, value in data["seconds"].items() if value]
    yield from aligned([["time that is left", ""], *rows])
    step = data["step_seconds"]
    told = f"from {data['timed_steps']} steps ({1000 * step:.0f} ms each) and " if step else "from "
    yield f"an estimate: {told}one scored batch of a stage, on the machine as it is now"
    if data["not_timed"]:
        yield f"not in it: {', '.join(data['not_timed'])}"


def few(rows: Sequence[list[str]]) -> list[list[str]]:
    """The rows, of many the first and last."""
    if len(rows) <= 2 * ENDS + 1:
        return [*rows]
    return [*rows[:ENDS], [f"… {len(rows) - 2 * ENDS} more", *[""] * (len(rows[0]) - 1)], *rows[-ENDS:]]


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, the first to the left and the others to the right; a rule below the heads."""
    rows = [[shorten(row[0], width=WIDEST + 12), *row[1:]] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        yield "  ".join(cells).rstrip()
        if number == 0:
            yield "─" * (sum(widths) + 2 * (len(widths) - 1))


def count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def duration(value: float) -> str:
    """Seconds as one reads them."""
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"
