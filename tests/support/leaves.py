"""Every option of the config and of each choice of its groups, and values that nobody can mean."""

import contextlib
import io
import random
import re
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from omegaconf import DictConfig

from cpt.cli import check_choices
from cpt.core.errors import readable
from cpt.train import train
from cpt.trainer.domain_order import order_domains
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.conftest import ROOT, SMALL, SMALL_GPT2, SMALL_T5, with_values

WRONG = """null is null|a list is [1,a]|an empty list is []|a mapping is {a: 1}|a word is abc
an empty word is ''|negative is -1|nothing is 0|a fraction is 0.5|nan is nan|inf is inf|huge is 1e30
a bool is true|a missing path is /proc/no/such/place|a class that there is not is nowhere.Class
a date is 2020-01-01|a class of another kind is collections.OrderedDict|a made value is ${no.such}"""
WRONG = dict(each.rsplit(" is ", 1) for each in WRONG.replace("\n", "|").split("|"))
WRONG["many digits"] = "1" + "0" * 30
ELSEWHERE = ("experiment", "hydra", "method/parts", "domains/template", "endtask/protocol", "routing")
NEEDED = {
    "model=checkpoint": "model.checkpoint=/no/such/model",
    "domains=hub": "+domains.catalogue.news={{path: ag_news}}",
    "domains=installed_docs": "",
    "endtask=hub": "+endtask.tasks.news={{path: ag_news}}",
    "endtask=das6": "endtask.root={texts}",
    "endtask=texts": "endtask.root={texts}",
    "probe=lm_eval": "probe.tasks=[hellaswag]",
    "replay=generated": "model=tiny_gpt2",
}
TRIED = 3  # values that the config takes which are tried on the model
PLANNED = 0.1  # share of the options of which a value that is taken is planned
LONGEST_S = 30  # a refusal of what is known without texts takes none of it
TOLD = re.compile(
    r"allowed: |needed: |needs |did you mean|; give |is missing|there is no |there are: |is not a multiple"
    r"|must |should |Should contain one of|may help|is neither |installed package|Available names are"
    r"|only possible arguments are|has to be between|expected (str|int|float|bool)"
)


class TooLongError(BaseException):
    """A trial has taken longer than anybody waits."""


def small(texts: Path, cache_dir: Path, group: str, choice: str) -> list[str]:
    """Overrides of a small run in which a choice of a group is made, with what it cannot be without."""
    sizes = {"tiny_gpt2": SMALL_GPT2, "tiny_t5": SMALL_T5, "generated": SMALL_GPT2}.get(choice, SMALL)
    own = {"logger": "logger="} | ({} if choice.startswith("tiny_") else {"model": "model."})
    sizes = [each for each in sizes if group not in own or not each.startswith(own[group])]
    root = f"domains.root={texts}"
    chosen = [] if not group or f"{group}={choice}" in sizes else [f"{group}={choice}"]
    needed = NEEDED.get(f"{group}={choice}", root if group == "domains" else "").format(texts=texts)
    domains = [] if group == "domains" else ["domains=texts", root]
    return [*domains, f"cache_dir={cache_dir}", *sizes, *chosen, *filter(None, [needed])]


def choices() -> list[tuple[str, str]]:
    """The choices of the groups, ("", "") for the top of the config first."""
    found = [(str(path.parent.relative_to(ROOT / "conf")), path.stem) for path in ROOT.glob("conf/**/*.yaml")]
    return [("", ""), *sorted(each for each in found if each[0] != "." and not each[0].startswith(ELSEWHERE))]


def keys_of(node: DictConfig, at: str = "") -> Iterator[str]:
    for name in node:
        key = f"{at}.{name}" if at else str(name)
        yield key
        inner = node._get_node(name)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from keys_of(inner, key)


@cache
def options_of(texts: Path, group: str, choice: str) -> list[tuple[str, str, str]]:
    """Group, choice and key: those of the plain config, or of a choice its own group's."""
    groups = {group for group, _ in choices()}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = with_values(*small(texts, texts.parent / "nowhere", group, choice))
    place = "trainer" if group == "strategy" else group
    keys = [key for key in keys_of(cfg) if not group or key.startswith(f"{place}.")]
    return [(group, choice, key) for key in keys if group or key.partition(".")[0] not in groups]


def options(texts: Path) -> Iterator[tuple[str, str, str]]:
    """The options of the plain config and of each choice, which is composed when its first is asked for."""
    for group, choice in choices():
        yield from options_of(texts, group, choice)


def go(arguments: list[str], folder: Path, depth: str) -> None:
    """A start, as far as is known without torch (config), on the model's skeleton (model), or as `plan=json`
    goes (run)."""
    check_choices(arguments)
    if depth == "run":
        train(with_values(*arguments, "plan=json"), run_dir=folder)
        return
    plan = make_plan(with_values(*arguments))
    if depth == "model":
        from cpt.trainer.preflight import prepare

        prepare(order_domains(plan), RunDir(folder))


def say(arguments: list[str], folder: Path, *, depth: str) -> dict[str, Any]:
    """What the command line says of these arguments: its exit code, its lines of error, its seconds."""
    said, began = io.StringIO(), time.monotonic()
    told: dict[str, Any] = {"code": 0, "traceback": ""}
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST_S)
    errors, out = contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO())
    quiet, there = warnings.catch_warnings(action="ignore"), contextlib.chdir(folder.parent)
    try:
        with errors, out, quiet, there, readable(errors_only=True):
            go(arguments, folder, depth)
    except SystemExit as error:
        told["code"] = error.code
    except (Exception, TooLongError):
        told |= {"code": 1, "traceback": traceback.format_exc()[-1500:]}
    finally:
        signal.alarm(0)
    lines = [line for line in said.getvalue().replace("\r", "\n").splitlines() if line.startswith("cpt: ")]
    return told | {"lines": lines, "took": round(time.monotonic() - began, 2)}


def too_long(*args: Any) -> None:
    raise TooLongError


def try_option(
    texts: Path, home: Path, option: tuple[str, str, str], draw: random.Random
) -> dict[str, dict[str, Any]]:
    """What was said of the wrong values of an option that it should not have been; by value.

    Each, and none (~key), is tried on the config, of those that it takes some on the model, and of a share of
    the options one of these up to a plan of the run."""
    group, choice, key = option
    base, found = small(texts, home / "cache", group, choice), {}
    folder = home / "work" / "run"  # a relative path of a value is below work
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir()
    given = {kind: f"{key}={value}" for kind, value in WRONG.items()} | {"gone": f"~{key}"}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def look(kind: str, depth: str) -> bool:
            told = say([*base, given[kind]], folder, depth=depth)
            if told["code"] and (wrong := fault(key, told, usual_lines(tuple(base), folder, depth))):
                found[kind] = {"wrong": wrong, "depth": depth, **told}
            return told["code"] == 0

        taken = [kind for kind in given if look(kind, "config")]
        tried = draw.sample(taken, min(TRIED, len(taken)))
        taken = [kind for kind in tried if look(kind, "model")]
        if taken and draw.random() < PLANNED:
            look(draw.choice(taken), "run")
    shutil.rmtree(folder.parent)
    return found


@cache
def usual_lines(base: tuple[str, ...], folder: Path, depth: str) -> list[str]:
    return say([*base], folder, depth=depth)["lines"]


def fault(key: str, told: dict[str, Any], usual: list[str]) -> str:
    """What is wrong with what was said of a wrong value; nothing where it was taken, or refused as a user is
    to see it. `usual`: what is said of the choice itself."""
    if told["traceback"]:
        return "a traceback"
    if told["code"] == 0 or told["lines"] == usual:
        return ""
    if told["code"] != 1 or len(told["lines"]) != 1:
        return f"{len(told['lines'])} lines, exit code {told['code']}"
    line = told["lines"][0]
    if not any(re.search(rf"\b{re.escape(part)}\b", line) for part in key.split(".")[-2:]):
        return "the option is not named"
    return "" if TOLD.search(line) else "what is allowed is not said"
