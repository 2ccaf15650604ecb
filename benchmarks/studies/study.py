"""Common code of the studies in docs/studies/: resumable sweeps, published scores, tables.

A study is an experiment of conf/ run with several methods. Finished runs are not repeated. The scores of
every run are in benchmarks/results/studies/NAME.jsonl.gz, one line per run."""

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from cpt import report
from cpt.core import naming  # also registers the resolvers
from cpt.core.config import CONF, digest, make_plain_config
from cpt.reporting.contrasts import find_contrasts, find_spreads
from cpt.reporting.load_runs import MeasuredRun, find_runs, measure_runs
from cpt.reporting.page import Block, format_markdown
from cpt.reporting.sections import RunSection, build_sections
from cpt.trainer.plan import choose_names

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT

SCORES = ROOT / "benchmarks" / "results" / "studies"
PAGES = ROOT / "docs" / "studies"
IMAGES = ROOT / "docs" / "images"
FEW = 10  # domains of which a folder can have the names
# Of scores.json: no result, or with a path in it; of similarities, which decided the order, N² numbers.
LEFT_OUT = ("loading", "versions", "similarity")
# Options of a variant are without their section where it is the method's. A method may have an option with
# the name of a section: alone, only these are not the method's.
SECTIONS = {*OmegaConf.load(CONF / "config.yaml"), *(folder.name for folder in CONF.iterdir())}
WHOLE_CHOICES = ("loss", "trainable")


def read_arguments(name: str, description: str) -> argparse.Namespace:
    return check_arguments(make_parser(name, description))


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=Path, help="the data; see above")
    parser.add_argument("--model", help="a Hugging Face name or folder, for studies that take one")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / name, help="the run folders")
    parser.add_argument("--jobs", type=int, help="parallel runs (default: by the machine's cores)")
    parser.add_argument("--report-only", action="store_true", help="start no runs, only write the pages")
    parser.add_argument(
        "--published", action="store_true", help="start no runs, write the pages from the published scores"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep the published runs, and start only those that are missing"
    )
    return parser


def check_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    options.report_only |= options.published
    if options.root is None and not options.report_only:
        parser.error("--root is needed, or --report-only, or --published")
    return options


def make_study(
    options: argparse.Namespace,
    experiment: str,
    sweeps: Iterable[Sequence[str]],
    *,
    page: str,
    parts: Callable[[RunSection], Iterable[str]] | None = None,
    parts_of_runs: Callable[[Sequence[MeasuredRun]], Iterable[str]] | None = None,
    scores: str = "",
    name_orders: Callable[[Sequence[Sequence[str]]], Sequence[Any]] = list,
) -> None:
    """Runs what is missing of an experiment's sweeps, then writes the comparison into the folder of the runs,
    the scores (by default under the experiment's name) and the generated tables of docs/studies/PAGE.md.
    `parts` writes them from the runs as one section of a comparison, `parts_of_runs` also where some runs are
    scored on other text than most.
    `name_orders` gives the config's `order` of published runs whose orders are not numbered."""

    scores = scores or experiment
    check_page(PAGES / f"{page}.md", scores)
    published = SCORES / f"{scores}.jsonl.gz"
    if options.add and published.exists():
        existing_runs = {identify(run.scores.run) for run in find_finished(options.runs)}
        rows = [row for row in read_scores(published) if identify(row["run"]) not in existing_runs]
        restore_runs(rows, options.runs / "published", experiment, name_orders)
        sweeps = list_missing(sweeps, experiment, existing_runs | {identify(row["run"]) for row in rows})
    if options.published:
        restore_runs(read_scores(published), options.runs, experiment, name_orders)
    if not options.report_only:
        run_sweeps(options, experiment, sweeps)

    loaded = find_runs([options.runs])
    runs = measure_runs([run for run in loaded.runs if run.scores.run["finished"]])
    if not runs or (not options.add and len(runs) < sum(map(len, loaded))):
        sys.exit(f"{options.runs} has no runs, or unfinished or damaged ones; nothing is written")
    report.main([os.path.relpath(options.runs), "--out", str(options.runs), "--name", "comparison"])
    if not options.published:
        write_scores(published, runs)
    if parts_of_runs is not None:
        written_parts = parts_of_runs(runs)
    else:
        assert parts is not None
        (section,) = build_sections(runs)
        written_parts = parts(section)
    write_section(PAGES / f"{page}.md", scores, written_parts)


def run_sweeps(options: argparse.Namespace, experiment: str, sweeps: Iterable[Sequence[str]]) -> None:
    """Every sweep, also after one with a job that failed; exits if one did."""
    overrides = [f"name={options.runs.name}", f"domains.root={options.root}"]
    if options.model is not None:
        overrides.append(f"model.name_or_path={options.model}")
    if options.jobs is not None:
        overrides.append(f"hydra.launcher.jobs={options.jobs}")

    num_failed = 0
    for sweep in sweeps:
        command = [sys.executable, "run.py", "-m", f"experiment={experiment}", *overrides, *sweep]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            num_failed += 1
    if num_failed:
        sys.exit(f"{num_failed} sweeps have failed jobs; run the same command again to retry them")


def identify(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the runs of a study apart, from the `run` of their scores."""
    return (
        run["method"],
        run["mask"],
        run["replay"],
        run["seed"],
        drop_checkpoint(run["variant"]),
        tuple(run["order"]),
    )


def drop_checkpoint(variant: str) -> str:
    """A run's options without the folder of its checkpoint, which is another on each machine."""
    return "; ".join(option for option in variant.split("; ") if not option.startswith("model.name_or_path="))


def list_missing(
    sweeps: Iterable[Sequence[str]], experiment: str, existing_runs: Collection[tuple[Any, ...]]
) -> Iterator[Sequence[str]]:
    """The jobs of sweeps over methods, their options, seeds and orders that are not among the existing runs,
    one a sweep."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for sweep in sweeps:
            for job in product(*map(expand_sweep, sweep)):
                cfg = compose("config", [f"experiment={experiment}", "domains.root=FOLDER", *job])
                if describe_job(job, cfg) not in existing_runs:
                    yield job


def expand_sweep(override: str) -> list[str]:
    """An override for each of the values of a sweep's override, as Hydra reads it: a list or a mapping is one
    value, whatever commas are in it."""
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return [override]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


def describe_job(job: Sequence[str], cfg: DictConfig) -> tuple[Any, ...]:
    """What `identify` gives for the run of a job."""
    names = choose_names(cfg)  # also of what the experiment chooses

    run = {
        "method": names["method"],
        "mask": names["mask"],
        "replay": names["replay"],
        "variant": naming.describe_variant(job),
        "seed": cfg.seed,
        "order": cfg.domains.orders[cfg.order] if isinstance(cfg.order, int) else cfg.order,
    }
    return identify(run)


def read_scores(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_scores(path: Path, runs: Sequence[MeasuredRun]) -> None:
    """One line per run, without what is no result or holds a path; the same runs give the same bytes."""
    lines = []
    for run in sorted(runs, key=lambda run: run.folder.name):
        data = json.loads((run.folder / "scores.json").read_text(encoding="utf-8"))
        data["run"]["variant"] = drop_checkpoint(data["run"]["variant"])
        lines.append(json.dumps({key: value for key, value in data.items() if key not in LEFT_OUT}))
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def restore_runs(
    published: Sequence[Mapping[str, Any]],
    into: Path,
    experiment: str,
    name_orders: Callable[[Sequence[Sequence[str]]], Sequence[Any]],
) -> None:
    """Writes run folders of published scores, each with the config that gives such a run today."""
    order_names = name_orders([scores["run"]["order"] for scores in published])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for published_scores, order_name in zip(published, order_names, strict=True):
            scores = dict(published_scores) | {"versions": {}, "loading": ""}
            run = scores["run"]
            overrides = list_overrides(run)
            cfg = compose(
                "config",
                [f"experiment={experiment}", f"name={into.name}", "domains.root=FOLDER", *overrides],
            )
            if OmegaConf.is_missing(cfg.model, "name_or_path"):
                cfg.model.name_or_path = "MODEL"
            cfg.order = number_order(run["order"], cfg.domains.orders or (), default=order_name)

            folder_order = "-".join(run["order"]) if len(run["order"]) <= FEW else digest(run["order"])
            folder = into / "_".join((*overrides, folder_order)).replace("=", "-")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
            OmegaConf.save(OmegaConf.create(make_plain_config(cfg)), folder / "config.yaml")


def list_overrides(run: Mapping[str, Any]) -> list[str]:
    """The overrides that choose the method of a run and its options."""
    overrides = [f"{name}={run[name]}" for name in ("method", "mask", "replay", "seed")]
    for option in run["variant"].split("; "):
        key = option.partition("=")[0]
        section = key.partition(".")[0]
        # A variant leaves out "method.": without a mask of the run, mask.threshold is that of method=migu.
        is_of_method = section == "mask" and run["mask"] == "none"
        if section in SECTIONS and ("." in key or key in WHOLE_CHOICES) and not is_of_method:
            overrides.append(option)
        elif option:
            overrides.append(f"method.{option}")
    return overrides


def number_order(order: Sequence[str], orders: Any, *, default: Any) -> Any:
    """The number or name of an order among those of a config, else the default."""
    numbered = orders.items() if isinstance(orders, Mapping | DictConfig) else enumerate(orders)
    return next((number for number, domains in numbered if list(domains) == order), default)


def find_finished(folder: Path) -> list[MeasuredRun]:
    return measure_runs([run for run in find_runs([folder]).runs if run.scores.run["finished"]])


def check_page(page: Path, name: str) -> None:
    """Exits with a line for a page without a study's marks, which `write_section` needs: to be called before
    the hours of a study."""
    begin, end = make_marks(name)
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, _, remainder = text.partition(begin)
    if begin in before + remainder or end not in remainder or end in before:
        sys.exit(f"{page} needs the lines {begin} and {end}, once and in this order, around generated tables")


def make_marks(name: str) -> tuple[str, str]:
    """The lines of a page between which a study writes."""
    return f"<!-- generated: {name} -->", f"<!-- end: {name} -->"


def write_section(page: Path, name: str, parts: Iterable[str]) -> None:
    """Replaces what is between a study's marks in a page; the prose around them is written by hand."""
    check_page(page, name)
    begin, end = make_marks(name)
    before, remainder = page.read_text(encoding="utf-8").split(begin)
    after = remainder.split(end)[1]
    wrapped = "\n\n".join(part if part[:1] in "|#<" or "\n" in part else fill(part, 100) for part in parts)
    page.write_text(f"{before}{begin}\n\n{wrapped}\n\n{end}{after}", encoding="utf-8")


def tabulate(section: RunSection, measures: Mapping[str, tuple[str, int]], *, title: str = "") -> str:
    """A table of groups by measure: mean ± standard deviation over the runs. `measures`: title and decimals
    by key; shares (AP, LA, MF1, Acc) are shown in percent."""
    cells = []
    for group in section.groups:
        row = [group.name, str(len(group.runs))]
        for key, (_, digits) in measures.items():
            spread = find_spreads(section, key).get(group.name)
            if spread is None:
                row.append("–")
                continue
            cell = f"{scale(key) * spread.mean:.{digits}f}"
            if not math.isnan(spread.sd):
                cell += f" ± {scale(key) * spread.sd:.{digits}f}"
            row.append(cell)
        cells.append(row)
    head = ["method", "runs", *(name for name, _ in measures.values())]
    return format_markdown(Block(title=title, head=head, cells=cells), picture="")


def tabulate_contrasts(
    section: RunSection, measures: Mapping[str, tuple[str, int]], *, title: str = ""
) -> str:
    """A table of paired differences from the baseline with 95 % intervals, and the p-value of the paired
    t test after Holm's correction."""
    cells = []
    for group in section.groups:
        row = []
        for key, (_, digits) in measures.items():
            contrast = find_contrasts(section, key).get(group.name)
            if contrast is None:
                row += ["–", "–"]
                continue
            mean = f"{scale(key) * contrast.mean:+.{digits}f}"
            low = f"{scale(key) * contrast.low:+.{digits}f}"
            high = f"{scale(key) * contrast.high:+.{digits}f}"
            row.append(f"{mean} [{low}, {high}]" if math.isfinite(contrast.low) else mean)
            row.append("–" if math.isnan(contrast.p_t_holm) else f"{contrast.p_t_holm:.2g}")
        if any(cell != "–" for cell in row):
            cells.append([group.name, *row])

    head = ["method"]
    for name, _ in measures.values():
        head += [f"Δ {name}", "p (t, Holm)"]
    return format_markdown(Block(title=title, head=head, cells=cells), picture="")


def scale(key: str) -> int:
    """Shares are shown in percent."""
    return 100 if key.startswith(("answers", "endtask")) else 1


def list_orders(runs: Sequence[MeasuredRun]) -> str:
    """The orders of the runs, one line each."""
    orders = {tuple(run.scores.run["order"]) for run in runs}
    return "\n".join(f"* {' → '.join(order)}" for order in sorted(orders, reverse=True))
