"""The command of a run, as pages, cards and programs print it."""

import re
import tomllib

import pytest
import yaml

from cpt.core.run_command import (
    find_config_folders,
    find_given_folder,
    find_program_words,
    format_install_command,
)
from cpt.optim.options import KINDS
from tests.conftest import ROOT


def test_a_checkout_has_run_py_and_an_installed_package_the_command_cpt(tmp_path):
    assert find_program_words() == ["python", "run.py"]
    assert find_program_words(tmp_path) == ["cpt"]
    (tmp_path / "run.py").touch()  # somebody's own, next to an installed package
    assert find_program_words(tmp_path) == ["cpt"]
    (tmp_path / "pyproject.toml").touch()
    assert find_program_words(tmp_path) == ["python", "run.py"]


def test_an_extra_is_installed_from_the_checkout_or_into_the_installed_package(tmp_path):
    assert format_install_command("ray") == "pip install -e '.[ray]' in the checkout of cpt"
    assert format_install_command("ray", tmp_path) == "pip install 'cpt[ray]'"


def test_messages_name_extras_that_there_are():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named_extras = {kind.extra for kind in KINDS.values() if kind.extra}
    for path in (ROOT / "cpt").rglob("*.py"):
        named_extras.update(
            re.findall(r"format_install_command\('([^']+)'\)", path.read_text(encoding="utf-8"))
        )
    for path in (ROOT / "conf/hydra/launcher").glob("*.yaml"):
        named_extras.update(re.findall(r"^extra: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"bitsandbytes", "lm-eval", "ray"} < named_extras <= set(project["optional-dependencies"])


def test_a_command_has_the_folders_that_it_was_given(tmp_path):
    assert find_config_folders(tmp_path) == find_given_folder(tmp_path) == []
    sources = [{"provider": "main", "path": "conf"}, {"provider": "command-line", "path": "/srv/mine"}]
    overrides = {"hydra": ["hydra.run.dir=runs/1", "hydra.mode=RUN"], "task": ["seed=1"]}
    settings = {"hydra": {"runtime": {"config_sources": sources}, "overrides": overrides}}
    (tmp_path / ".hydra").mkdir()
    path = tmp_path / ".hydra" / "hydra.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert find_config_folders(tmp_path) == ["--config-dir=/srv/mine"]
    assert find_given_folder(tmp_path) == ["hydra.run.dir=runs/1"]


@pytest.mark.parametrize("text", ["", "[", "a: 1", "hydra: 1", "hydra: {}", "- hydra"])
def test_without_settings_of_hydra_there_are_none(tmp_path, text):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "hydra.yaml").write_text(text)
    assert find_config_folders(tmp_path) == find_given_folder(tmp_path) == []
