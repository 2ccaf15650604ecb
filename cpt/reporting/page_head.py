"""What stands below the title of a page: what was run and where, the command, and links to its data."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import yaml
from safetensors import SafetensorError, safe_open

from cpt.core.heartbeat import PROGRESS_FILE
from cpt.core.messages import count_noun
from cpt.core.run_command import find_config_folders, find_given_folder, find_program_words
from cpt.evaluation.scores import Scores
from cpt.reporting.formats import label_single_run, list_order
from cpt.reporting.page import PageHead
from cpt.reporting.sections import RunSection

RUN_DATA = ("scores.json", "metrics.csv", "config.yaml", "run.log", "model")
COMPARISON_PAGE = "../comparison.html"  # of the sweep that a run belongs to


def describe_run_head(folder: Path, scores: Scores) -> PageHead:
    """The head of a run page; facts that the folder does not hold are left out."""
    run = scores.run
    model = f"{scores.base.get('name', run['model'])} ({run['objective']}"
    num_parameters = count_exported_parameters(folder / "model")
    if num_parameters:
        model += f", {format_parameters(num_parameters)} parameters"
    model += ")"
    facts = [
        model,
        label_single_run(run),
        list_order(run["order"]),
        f"seed {run['seed']}",
        read_start(folder),
        scores.numerics.get("device", ""),
        f"cpt {scores.versions['cpt']}" if "cpt" in scores.versions else "",
    ]
    links = [name for name in (*RUN_DATA, COMPARISON_PAGE) if (folder / name).exists()]
    return PageHead(facts=[fact for fact in facts if fact], command=read_command(folder), links=links)


def describe_comparison_head(sections: Sequence[RunSection], *, stem: str) -> PageHead:
    """The head of a comparison: how many runs it is over, and its data in the files that `stem` begins."""
    num_groups = sum(len(section.groups) for section in sections)
    num_runs = sum(len(section.runs) for section in sections)
    if num_runs == 0:
        return PageHead()
    facts = [count_noun(num_runs, "run"), count_noun(num_groups, "group")]
    return PageHead(facts=facts, links=[f"{stem}.csv", f"{stem}.md"])


def format_parameters(count: int) -> str:
    """`0.56 M`, `7.24 B`."""
    if count >= 999.5e6:  # what three digits round to a thousand millions
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.3g} M"


def count_exported_parameters(folder: Path) -> int:
    """The parameters in the files of an exported model, of which only the headers are read; 0 without a
    model, and where a file cannot be read."""
    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                    count += math.prod(tensors.get_slice(name).get_shape())
        except (OSError, SafetensorError):
            return 0
    return count


def read_start(folder: Path) -> str:
    """The day on which the run was started last, in UTC: `30 Nov 2026`; empty without a heartbeat."""
    try:
        heartbeat = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        started = datetime.fromisoformat(heartbeat["began"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"{started.day} {started:%b %Y}"


def read_command(folder: Path) -> str:
    """The command of the last start, from what Hydra stores; empty without it."""
    try:
        overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ""
    if not isinstance(overrides, list):
        return ""
    words = [
        *find_program_words(),
        *find_config_folders(folder),
        *map(str, overrides),
        *find_given_folder(folder),
    ]
    return shlex.join(words)
