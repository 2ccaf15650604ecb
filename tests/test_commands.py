"""Commands of the documents: what starts a run composes with values that are allowed, and every other program
has the options that it is given. Nothing is run."""

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from cpt.cli import to_hydra
from cpt.core.config import CONF
from cpt.trainer.plan import read_sections
from tests.conftest import ROOT, with_values
from tests.test_docs import DOCUMENTS, each_document, lines, told

OF_HYDRA = {"-m", "--multirun", "--help", "--options", "--check"}
# In configs of their own.
OF_THE_READER = re.compile(r"(method|experiment)=(mine|first|manuals|with_replay|three_methods|monthly)")
# Of extras, and of searches.
OF_ANOTHER = ("hydra/launcher=slurm", "hydra/launcher=ray_jobs", "hydra.launcher.options.", "hydra/sweeper=")
OF_ANOTHER += ("hydra.sweeper.",)
NO_FOLDER = re.compile(r"\.root=.*(there is no folder|no such folder)")


def calls(path: Path) -> list[list[str]]:
    parts = (shlex.split(part, comments=True) for line in lines(path) for part in line.split("&&"))
    return [words for words in parts if words]


def one_of(override: str) -> str:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_sweep_override():
        return override
    first = next(iter(parsed.sweep_string_iterator())) if parsed.is_choice_sweep() else "0.001"  # of a range
    return f"{parsed.get_key_element()}={first}"


def reader_configs(folder: Path) -> Path:
    """The YAMLs of the documents whose file is named above them, written there."""
    named = re.compile(r"`my_conf/(\S+)`[^\n]*:\n\n```yaml\n(.*?)^```", re.M | re.S)
    for path in DOCUMENTS:
        for name, text in named.findall(told(path)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.replace("my_package.my_module.Mine", "cpt.methods.ncl.NCL"))
    return folder


def compose_run(given: list[str], configs: Path) -> None:
    """Composes what a run is told, and has its values checked."""
    flags = OF_HYDRA | {word for word in given if word.startswith(("--config-dir=", "$"))}
    wanted = [one_of(word.replace("…", "x")) for word in given if word not in flags]
    wanted = [word for word in wanted if not word.startswith(OF_ANOTHER)]
    own = to_hydra(wanted)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        if any(OF_THE_READER.fullmatch(word) for word in own):
            path = f"hydra.searchpath=[file://{configs},file://{ROOT / 'docs' / 'examples'}]"
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
    for words in calls(path):
        places = [at for at, word in enumerate(words) if word == "run.py" or (word == "cpt" and at == 0)]
        given = words[places[0] + 1 :] if places else []
        if places and not any("_target_=my_package" in word for word in given):
            try:
                compose_run(given, configs)
            except Exception as error:  # whatever is wrong is told of all commands at once
                wrong[" ".join(given)] = str(error)
    assert wrong == {}
    with pytest.raises(ValueError, match=r"trainer.steps=-1"):  # that it can fail
        compose_run(["trainer.steps=-1"], configs)


def test_a_routing_and_an_experiment_are_given_plainly():
    given = ["+experiment=mine", "method.routing=posterior", "method.routing.decay=0.5"]
    assert to_hydra(given) == ["experiment=mine", "routing@method.routing=posterior", given[2]]


PROGRAMS = sorted({*re.findall(r"python -m (cpt\.[\w.]+)", told(ROOT / "docs/cli.md"))})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_documented_program_has_a_help(program, capsys):
    is_file = find_spec(program).submodule_search_locations is None
    module = import_module(program if is_file else f"{program}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0 and f"usage: python -m {program}" in capsys.readouterr().out
