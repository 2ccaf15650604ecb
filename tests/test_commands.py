"""Commands of the documents: what starts a run composes with values that are allowed, and every other program
has the options that it is given. Nothing is run."""

import contextlib
import io
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from cpt.core.config import CONF
from cpt.trainer.plan import read_sections
from tests.conftest import ROOT, with_values
from tests.test_docs import DOCUMENTS, each_document, lines, told

OF_HYDRA = {"-m", "--multirun", "--help", "--options", "--check"}
# In configs of their own.
OF_THE_READER = re.compile(r"(method|experiment)=(mine|first|manuals|with_replay|three_methods|monthly)")
OF_ANOTHER = ("hydra/launcher=slurm", "hydra/launcher=ray_jobs", "hydra.launcher.options.")  # of extras
NO_FOLDER = re.compile(r"\.root=.*(there is no folder|no such folder)")
OF_SEARCHES = ("hydra/sweeper=", "hydra.sweeper.")
EXAMPLES = ROOT / "docs" / "examples"


def calls(path: Path) -> list[list[str]]:
    """The words of each command in blocks of bash; what is joined by && is several."""
    parts = (shlex.split(part, comments=True) for line in lines(path) for part in line.split("&&"))
    return [words for words in parts if words]


def overrides_of(words: list[str]) -> list[str] | None:
    """What a run is told by a command; None where the command starts no run."""
    places = [at for at, word in enumerate(words) if word == "run.py" or (word == "cpt" and at == 0)]
    return words[places[0] + 1 :] if places else None


def one_of(override: str) -> str:
    """An override, or the first of those that a sweep makes of it."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_sweep_override():
        return override
    if parsed.is_choice_sweep():
        return f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"
    return f"{parsed.get_key_element()}=0.001"  # of a range


def reader_configs(folder: Path) -> Path:
    """The YAMLs of the documents that name their file in a comment, written there."""
    for path in DOCUMENTS:
        for name, text in re.findall(r"^```yaml\n# my_conf/(\S+)\n(.*?)^```", told(path), re.M | re.S):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.replace("my_package.my_module.Mine", "cpt.methods.ncl.NCL"))
    return folder


def compose_run(given: list[str], configs: Path) -> None:
    """Composes what a run is told, and has its values checked."""
    flags = OF_HYDRA | {word for word in given if word.startswith("--config-dir=")}
    wanted = [one_of(word.replace("…", "x")) for word in given if word not in flags]
    wanted = [word for word in wanted if not word.startswith(OF_ANOTHER + OF_SEARCHES)]
    own = [word.replace("+experiment", "experiment") for word in wanted]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        if any(OF_THE_READER.fullmatch(word) for word in own):
            path = f"hydra.searchpath=[file://{configs},file://{EXAMPLES}]"
            cfg = compose("config", overrides=[*own, path])
        else:
            cfg = with_values(*own)
    try:
        read_sections(cfg)
    except ValueError as error:
        if not NO_FOLDER.search(str(error)):  # the reader's folders are not here
            raise


@pytest.mark.slow
@each_document
def test_what_starts_a_run_composes_with_values_that_are_allowed(path, tmp_path):
    configs, wrong = reader_configs(tmp_path), {}
    for given in map(overrides_of, calls(path)):
        if given is not None and not any("_target_=my_package" in word for word in given):
            try:
                compose_run(given, configs)
            except Exception as error:  # whatever is wrong is told of all commands at once
                wrong[" ".join(given)] = str(error)
    assert wrong == {}


@cache
def help_of(program: str) -> str:
    """What a program says of itself, in this process."""
    written = io.StringIO()
    before, sys.argv = sys.argv, [program, "--help"]
    sys.path.insert(0, str((ROOT / program).parent))  # as Python does for a file
    try:
        with contextlib.redirect_stdout(written), pytest.raises(SystemExit) as ended:
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
        sys.path.pop(0)
    assert not ended.value.code, f"{program} --help ended with {ended.value.code}"
    return written.getvalue()


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The module of ours or the file that a command calls, and what it is told."""
    for at, word in enumerate(words[:-1]):
        ours = word == "-m" and words[at - 1].startswith("python") and words[at + 1].startswith("cpt.")
        if ours or word == "python" and re.fullmatch(r"benchmarks/\w+\.py", words[at + 1]):
            return words[at + 1], words[at + 2 :]
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@each_document
def test_other_programs_have_the_options_they_are_given(path):
    for program, given in filter(None, map(program_of, calls(path))):
        flags = [word.partition("=")[0] for word in given if word.startswith("--")]
        there = set(re.findall(r"--[\w-]+", help_of(program)))
        assert set(flags) <= there, f"{program}: {set(flags) - there}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_program_has_a_help():
    for path in sorted((ROOT / "cpt").glob("*.py")):
        if "def main(" in told(path) and not path.name.startswith("__"):
            assert f"python -m cpt.{path.stem}" in help_of(f"cpt.{path.stem}")


def test_a_wrong_command_is_found():
    """That the tests above can fail."""
    place = ROOT / "conf"
    for given in (["method=nothing"], ["trainer.steps=-1"], ["no.such=1"], ["optim.lr=1e-3,x", "order=1,2"]):
        if given[0].startswith("optim"):
            compose_run(given, place)  # of a sweep the first is looked at
        else:
            with pytest.raises(Exception, match="nothing|steps|such"):
                compose_run(given, place)
    assert overrides_of(shlex.split("torchrun --nproc-per-node 8 run.py method=ewc")) == ["method=ewc"]
    assert overrides_of(["python", "-m", "cpt.report", "x"]) is None
