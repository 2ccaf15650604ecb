"""Reports made of `scores.json` alone: of one run, and over runs (`python -m cpt.report FOLDER [FOLDER...]`).

A report is a list of blocks, shown as Markdown with pictures beside it and as one self-contained HTML page.
"""

from __future__ import annotations

import base64
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from cpt import figures
from cpt.figures import FEW, decimals, perplexity, shortened
from cpt.labels import label, shared_values
from cpt.scores import GENERAL, METRICS, UNITS, Scores, described, intransigence

COLUMNS = ("group", "n", "LC (perplexity)", "CPT", "FG", "general drift", "intransigence", "seconds")
FORMULAS = (
    "L[i][j]: loss on test text j after i stages (0: the base), N domains, n stages learned, g general text. "
    "A metric in a unit is that of the matrix in this unit. In brackets: 95 % bootstrap over documents."
)
SPREAD = "Mean ± standard deviation over n runs, in nats where not said; (k): over k runs of n."
ONE = "`one` learns every domain from the base: its CPT counts; its LC and FG compare models that never met."


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a report, without what is empty; `folded` is the line that unfolds its table and code."""

    title: str = ""
    lines: Sequence[str] = ()
    picture: bytes = b""
    head: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    words: int = 1  # so many columns hold words, the others numbers
    code: str = ""
    folded: str = ""


def write(folder: Path) -> Path:
    """Writes report.md and report.html into a run folder; gives the path of the latter."""
    scores, config = Scores.load(Path(folder) / "scores.json"), Path(folder) / "config.yaml"
    matrix = Block(
        title="Perplexity on each test text (column) after each stage (row)",
        lines=["Framed: a domain's own stage. Colour: change against the base model."],
        picture=figures.heatmap(scores) if scores.rows else b"",
        head=["after", *scores.domains],
        cells=_matrix(scores),
        folded=f"{len(scores.rows)} x {len(scores.domains)} perplexities",
    )
    stages = Block(title="Perplexity over the stages", picture=figures.stages(scores) if scores.rows else b"")
    code = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    settings = Block(title="Config", code=code, folded=f"config.yaml, digest {scores.config_digest}")
    blocks = [_summary(scores), matrix, stages, _metrics(scores), _texts(scores), _seconds(scores), settings]
    return _written(blocks, title=f"{scores.run['name']}: {label(scores.run)}", stem=Path(folder) / "report")


def table(scores: Scores) -> str:
    """For a console of 100 characters: perplexities and headlines; of many domains the first and last."""
    columns, rows = _ends(len(scores.domains)), _ends(len(scores.rows))
    names = [shortened(scores.domains[column], width=min(24, 86 // len(columns) - 2)) for column in columns]
    matrix = [
        [shortened(row[0], width=12), *(row[1:][column] for column in columns)] for row in _matrix(scores)
    ]
    losses = Block(head=["after", *names], cells=[matrix[row] for row in rows])
    shown = [name for name in ("LC", "FG", "general_drift") if name in scores.metrics]
    metrics = Block(head=["", *UNITS], cells=[[name, *_in_units(scores.metrics[name])] for name in shown])
    texts = f"perplexity on {len(columns)} of {len(scores.domains)} test texts:"
    title = f"{label(scores.run)}, seed {scores.run['seed']}, {_state(scores)}; {texts}"
    return "\n\n".join([title, _plain(losses), _plain(metrics)])


def _ends(size: int) -> list[int]:
    """The places of the first and last few; all if they are few."""
    return list(range(size)) if size <= 9 else [*range(4), *range(size - 4, size)]


def _matrix(scores: Scores) -> list[list[str]]:
    """The name and the perplexities of each row."""
    losses = figures.perplexities(scores).tolist()
    return [[row, *map(perplexity, values)] for row, values in zip(scores.rows, losses, strict=True)]


def _summary(scores: Scores) -> Block:
    run = scores.run
    cells = [
        ["method", label(scores.run)],
        ["model", f"{run['model']} ({run['objective']})"],
        ["order", _few(run["order"])],
        ["seed", str(run["seed"])],
        ["state", f"{_state(scores)}; {scores.seconds:,.1f} seconds"],
        ["versions", ", ".join(f"{name} {version}" for name, version in scores.versions.items())],
    ]
    return Block(head=["run", run["name"]], cells=cells, words=2)


def _few(names: Sequence[str], *, between: str = " → ") -> str:
    return between.join(
        names if len(names) <= FEW else [*names[:3], f"… {len(names) - 6} more …", *names[-3:]]
    )


def _state(scores: Scores) -> str:
    done = f"{len(scores.rows)} rows done, the last: {scores.rows[-1]}" if scores.rows else "no row done"
    return f"{'finished' if scores.run['finished'] else 'unfinished'}, {done}"


def _metrics(scores: Scores) -> Block:
    head = ["metric", "meaning", "formula", "nats", "perplexity", "bits per byte"]
    cells = [[m, *described(METRICS[m].compute), *_in_units(units)] for m, units in scores.metrics.items()]
    return Block(title="Metrics", lines=[FORMULAS], head=head, cells=cells, words=3)


def _in_units(metric: Mapping) -> list[str]:
    """A metric in nats, as perplexity and in bits per byte, each with its interval if it has one."""
    bounds, cells = metric.get("interval", {}), []
    for unit, show in zip(UNITS, (decimals, perplexity, decimals), strict=True):
        interval = f" [{', '.join(map(show, bounds[unit]))}]" if unit in bounds else ""
        cells.append(show(metric[unit]) + interval)
    return cells


def _texts(scores: Scores) -> Block:
    cells = []
    for name, *sizes in zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True):
        facts = [scores.texts.get(name, {}).get(fact, "–") for fact in ("documents", "digest")]
        told = [
            ", ".join(f"{k} {v}" for k, v in f.items()) if isinstance(f, Mapping) else str(f) for f in facts
        ]
        cells.append([name, *(f"{size:,}" for size in sizes), *told])
    head = ["text", "tokens", "scored", "bytes", "documents", "digest"]
    return Block(title="Test texts", head=head, cells=cells, folded=f"{len(cells)} texts")


def _seconds(scores: Scores) -> Block:
    cells = [[phase, f"{seconds:,.1f}"] for phase, seconds in scores.phases.items()]
    return Block(title="Seconds", head=["phase", "seconds"], cells=cells, folded=f"{len(cells)} phases")


def found(folders: Sequence[Path]) -> tuple[dict[Path, Scores], list[str]]:
    """The runs below the folders by their own folder, and a line for each that cannot be read."""
    runs, damaged = {}, []
    paths = {path.resolve(): path for folder in folders for path in folder.rglob("scores.json")}
    for path in sorted(paths.values()):
        try:
            runs[path.parent] = Scores.load(path)
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return runs, damaged


def compared(runs: Mapping[Path, Scores], *, damaged: Sequence[str]) -> list[Block]:
    """A block per set of domains and objective, then the runs that are unfinished or could not be read."""
    alike, unfinished = defaultdict(list), []
    for path, scores in runs.items():
        run = scores.run
        if run["finished"]:
            alike[run["objective"], *sorted(set(scores.domains) - {GENERAL})].append(scores)
        else:
            unfinished.append([str(path), label(scores.run), str(run["seed"]), _state(scores)])
    return [
        *(_comparison(each, title=f"{key[0]}: {_few(key[1:], between=', ')}") for key, each in alike.items()),
        Block(title="Unfinished runs", head=("folder", "method", "seed", "state"), cells=unfinished, words=4),
        Block(title="Runs that could not be read", lines=damaged),
    ]


def _comparison(runs: Sequence[Scores], *, title: str) -> Block:
    """Groups of runs that differ in their seed alone, the best average perplexity first."""
    groups, points = _groups(runs), {}
    for name, group in groups.items():
        if group[0].run["method"] != "one":
            points[name] = _values(group, "FG"), _values(group, "LC", unit="perplexity")
    cells = [[name, str(len(group)), *_row(group, runs=runs)] for name, group in groups.items()]
    lines, picture = [SPREAD, *_notes(groups)], figures.trade_off(points) if points else b""
    return Block(title=title, lines=lines, head=COLUMNS, cells=cells, picture=picture)


def _groups(runs: Sequence[Scores]) -> dict[str, list[Scores]]:
    """The runs by what was chosen: the method and what is laid over it, model and order where they differ."""
    models, orders = ([*dict.fromkeys(str(s.run[key]) for s in runs)] for key in ("model", "order"))
    shared, groups = shared_values(scores.run for scores in runs), defaultdict(list)
    for scores in sorted(runs, key=lambda scores: _values([scores], "LC")[0] or float("inf")):
        model = [scores.run["model"]] if len(models) > 1 else []
        order = [f"order {orders.index(str(scores.run['order'])) + 1}"] if len(orders) > 1 else []
        groups[", ".join([label(scores.run, shared=shared), *model, *order])].append(scores)
    return groups


def _notes(groups: Mapping[str, Sequence[Scores]]) -> list[str]:
    """What the names of groups stand for, and what keeps runs from being compared."""
    runs = [scores for group in groups.values() for scores in group]
    digests = {tuple(text.get("digest") for _, text in sorted(scores.texts.items())) for scores in runs}
    notes = [f"{name}: {_few(group[0].run['order'])}" for name, group in groups.items() if ", order " in name]
    for name, group in groups.items():
        if len({scores.run["seed"] for scores in group}) < len(group):
            notes.append(f"{name}: runs with one seed; they are copies, or differ in more than their seed.")
    notes += ["The test texts differ between the runs."] if len(digests) > 1 else []
    return notes + ([ONE] if any(scores.run["method"] == "one" for scores in runs) else [])


def _row(group: Sequence[Scores], *, runs: Sequence[Scores]) -> list[str]:
    nats = [_values(group, name) for name in ("CPT", "FG", "general_drift")]
    against_one = [_against_one(scores, runs=runs) for scores in group]
    perplexities = _spread(_values(group, "LC", unit="perplexity"), show=perplexity)
    seconds = _spread([scores.seconds for scores in group], show="{:,.0f}".format)
    return [perplexities, *(_spread(values, show=decimals) for values in [*nats, against_one]), seconds]


def _values(group: Sequence[Scores], metric: str, *, unit: str = "nats") -> list[float | None]:
    return [scores.metrics.get(metric, {}).get(unit) for scores in group]


def _against_one(scores: Scores, *, runs: Sequence[Scores]) -> float | None:
    """Intransigence, against the run of `one` alone with this model and order, and this seed if there is
    one."""
    plain = {"method": "one", "mask": "none", "replay": "none"}
    sought, diagonal = {key: scores.run[key] for key in ("model", "order")} | plain, scores.diagonal
    alone = [other for other in runs if all(other.run[key] == value for key, value in sought.items())]
    if not diagonal or not alone or scores in alone:
        return None
    one = min(alone, key=lambda other: other.run["seed"] != scores.run["seed"]).diagonal
    return float(intransigence([*diagonal.values()], one=[one[name] for name in diagonal]))


def _spread(values: Sequence[float | None], *, show: Callable[[float], str]) -> str:
    """Mean ± standard deviation of the values there are, and how many of all if some are not."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    deviation = f" ± {show(statistics.stdev(known))}" if len(known) > 1 else ""
    return show(statistics.fmean(known)) + deviation + f" ({len(known)})" * (len(known) < len(values))


def _written(blocks: Sequence[Block], *, title: str, stem: Path) -> Path:
    """Writes STEM.md, its pictures STEM-1.png, ... and STEM.html; gives the path of the latter."""
    shown = [block for block in blocks if block.lines or block.picture or block.cells or block.code]
    template = jinja2.Template(Path(__file__).with_name("report.html.j2").read_text(), autoescape=True)
    html = template.render(title=title, blocks=shown, base64=base64.b64encode)
    markdown = [f"# {title}"]
    for number, block in enumerate(shown, start=1):
        picture = stem.with_name(f"{stem.name}-{number}.png")
        if block.picture:
            picture.write_bytes(block.picture)
        markdown.append(_markdown(block, picture=picture.name))
    stem.with_suffix(".md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
    stem.with_suffix(".html").write_text(html, encoding="utf-8")
    return stem.with_suffix(".html")


def _markdown(block: Block, *, picture: str) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/').replace('<', '&lt;') for cell in cells)} |"

    bar = [":--" if column < block.words else "--:" for column in range(len(block.head))]
    parts = [
        f"## {block.title}" if block.title else "",
        *block.lines,
        f"![{block.title}]({picture})" if block.picture else "",
        f"<details><summary>{block.folded}</summary>" if block.folded else "",
        "\n".join(map(row, [block.head, bar, *block.cells])) if block.cells else "",
        f"~~~~yaml\n{block.code}\n~~~~" if block.code else "",
        "</details>" if block.folded else "",
    ]
    return "\n\n".join(filter(None, parts))


def _plain(block: Block) -> str:
    """The table with its columns aligned: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(block.head, *block.cells, strict=True)]
    align = [str.ljust if place < block.words else str.rjust for place in range(len(widths))]
    rows = [map(lambda put, *cell: put(*cell), align, row, widths) for row in (block.head, *block.cells)]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def main(folders: Sequence[str]) -> int:
    """Compares the runs below the folders; exit code 1 if one could not be read, 2 if there is none."""
    runs, damaged = found([Path(folder) for folder in folders])
    if not runs and not damaged or not Path(folders[0]).is_dir():
        print(f"no scores.json below {', '.join(folders) or '(give a folder)'}", file=sys.stderr)
        return 2
    blocks = compared(runs, damaged=damaged)
    _written(blocks, title="Comparison of runs", stem=Path(folders[0]) / "comparison")
    shown = [block for block in blocks if block.cells]
    print("\n\n".join("\n".join([block.title, _plain(block), *block.lines]) for block in shown))
    print(*damaged, sep="\n", end="\n" * bool(damaged), file=sys.stderr)
    return int(bool(damaged))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
