"""The installed package: a wheel, built and put into an environment of its own, used away from here."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cpt.core.config import CONF, flatten, make_plain_config
from cpt.reporting.published import PUBLISHED
from tests.conftest import ROOT, SMALL

pytestmark = pytest.mark.slow
BUILT = ("cpt", "conf", "benchmarks/results/published")
BUILT += ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
SINGLE_FILES = ("LICENSE", "benchmarks/README.md", "tests/test_package.py")
PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]

MODULE = """
from cpt.data.sources.texts import Texts
from cpt.methods.ncl import NCL

class Mine(NCL):
    def export(self, folder, order):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.txt").write_text(" ".join(order))
        return super().export(folder, order)

class Two(Texts):
    @property
    def names(self):
        return super().names[:2]
"""
FILES = {
    "my_package/__init__.py": "",
    "my_package/my_module.py": MODULE,
    "mine/method/mine.yaml": "name: mine\n_target_: my_package.my_module.Mine\n",
    "mine/domains/two.yaml": "defaults: [texts, _self_]\nname: two\n_target_: my_package.my_module.Two\n",
    "mine/experiment/mine.yaml": "# @package _global_\n"
    "defaults: [override /method: mine, override /domains: two]\nname: mine\nseed: 7\n",
}


def call(*command, cwd) -> str:
    """The output of a command, which succeeds and sees nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder, *, excluded=None) -> Path:
    """A wheel of the package without an excluded folder. It is built in `folder` from a copy, as setuptools
    writes into the folder that it builds."""
    for name in BUILT:
        path = ROOT / name
        shutil.copytree(path, folder / name) if path.is_dir() else shutil.copy(path, folder)
    if excluded is not None:
        shutil.rmtree(folder / excluded)
    call(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "made", folder, cwd=folder)
    return next(folder.glob("made/*.whl"))


def install_wheel(wheel, environment) -> Path:
    """Makes an environment with the wheel and the libraries of this one; the folder of its programs."""
    venv.create(environment, symlinks=True)
    programs = environment / "bin"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    libraries = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    install = [*PIP, f"--python={programs / 'python'}", "install", "--no-deps", "--no-index"]
    call(*install, "--no-build-isolation", "--ignore-installed", wheel, cwd=environment)
    return programs


def test_the_wheel_has_the_code_the_configs_and_published_scores(wheel):
    suffixes = (".py", ".typed", ".j2", ".json", ".jsonl")
    code = [path for path in (ROOT / "cpt").rglob("*.*") if path.suffix in suffixes]
    expected = {str(path.relative_to(ROOT)) for path in code}
    expected.update(f"cpt/conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml"))
    expected.update(f"cpt/published/{path.name}" for path in PUBLISHED.glob("*.json"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert expected - names == set() and not any(name.startswith("conf/") for name in names)


def test_a_source_archive_has_what_its_pages_link_to_and_no_part_of_the_tests(tmp_path):
    for name in ("cpt", "conf", "benchmarks/results/published", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tests").mkdir()
    for path in [*ROOT.glob("*.*"), *map(ROOT.joinpath, SINGLE_FILES)]:
        if path.is_file():
            shutil.copy(path, tmp_path / path.relative_to(ROOT))
    build = "from setuptools.build_meta import build_sdist; build_sdist('made')"
    call(sys.executable, "-c", build, cwd=tmp_path)
    with tarfile.open(next(tmp_path.glob("made/*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    linked = set()
    for page in [tmp_path / "README.md", *(tmp_path / "docs").rglob("*.md")]:
        links = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text(encoding="utf-8"))
        linked.update((page.parent / link).resolve().relative_to(tmp_path.resolve()) for link in links)
    assert len(linked) > 50 and {str(path) for path in linked} - names == set()
    assert {"cpt", "conf", "run.py", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith("tests")] == []


def test_a_users_own_method_source_and_experiment_are_swept_away_from_the_checkout(
    wheel, corpora, cache, tmp_path
):
    programs = install_wheel(wheel, tmp_path / "venv")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    overrides = [f"domains.root={corpora}", f"cache_dir={cache}", *SMALL, "seed=0,1"]
    output = call(programs / "cpt", "--config-dir=mine", "-m", "experiment=mine", *overrides, cwd=tmp_path)
    assert "2 jobs: 2 finished" in output

    paths = sorted((tmp_path / "outputs/mine").glob("*/scores.json"))
    for seed, path in enumerate(paths):
        scores = json.loads(path.read_text())
        assert (scores["run"]["method"], scores["run"]["seed"]) == ("mine", seed)
        assert scores["domains"] == ["food", "law", "general"]
        assert (path.parent / "model/mine.txt").read_text() == "food law"
    assert len(paths) == 2
    comparison = call(programs / "python", "-m", "cpt.report", "outputs/mine", cwd=tmp_path)
    assert "mine" in comparison and (tmp_path / "outputs/mine/comparison.html").exists()


def test_without_contrib_a_run_a_sweep_and_their_report_work(corpora, cache, tmp_path):
    (tmp_path / "built").mkdir()
    wheel = build_wheel(tmp_path / "built", excluded="cpt/contrib")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.startswith("cpt/contrib") for name in archive.namelist())
    programs = install_wheel(wheel, tmp_path / "venv")

    options = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]", *SMALL]
    call(programs / "cpt", *options, "name=alone", cwd=tmp_path)
    assert len([*tmp_path.glob("outputs/alone/*/report.html")]) == 1
    output = call(programs / "cpt", "-m", *options, "method=ncl,replay", "name=swept", cwd=tmp_path)
    assert "2 jobs: 2 finished" in output
    call(programs / "python", "-m", "cpt.report", "outputs/swept", cwd=tmp_path)
    assert (tmp_path / "outputs/swept/comparison.html").exists()


def test_the_bill_of_materials_has_a_license_of_every_dependency(capsys):
    runpy.run_path(str(ROOT / ".ci" / "licenses.py"))["main"](["docs"])
    licenses = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, license_name = line.split("\t")
        licenses[canonicalize_name(name)] = license_name
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = [Requirement(line) for line in pyproject["project"]["dependencies"]]
    assert {canonicalize_name(requirement.name) for requirement in requirements} <= licenses.keys()
    assert "cpt" not in licenses and "pluggy" not in licenses  # of pytest, in the extra dev
    assert "BSD" in licenses["networkx"] and "Apache" in licenses["tokenizers"]


def test_no_default_choice_is_in_contrib(composed):
    targets = [value for key, value in flatten(make_plain_config(composed())) if key.endswith("_target_")]
    assert targets and [target for target in targets if str(target).startswith("cpt.contrib")] == []
