"""Configs: what their choices make, how a run is named and identified, and errors that end in one line."""

import re
import subprocess
import sys

import pytest
import torch

from cpt.cli import to_hydra
from cpt.core.config import identity, make_plain_config
from cpt.core.errors import readable_errors
from cpt.core.naming import LONGEST, RunIdentity, describe_variant, distinguish_runs, name_run
from cpt.trainer.run_dir import RunDir
from tests.conftest import ROOT


def test_a_run_folder_is_named_by_its_choices():
    overrides = ["method=das", "order=1", "seed=3", "trainer.steps=9", "trainer.steps=5"]
    overrides += ["name=x", "logger=none", "+trainer.devices=2"]
    assert name_run(overrides, "das", 1, 3) == "das_order-1_seed-3_trainer.steps-5"
    assert name_run(["domains.root=../a b/c"], "ncl", "[b,a]", 0) == "ncl_order-.b.a_seed-0_domains.root-c"
    long = [name_run([f"domains.root={'x' * 200}{end}"], "ncl", 0, 0) for end in "ab"]
    assert len(set(long)) == 2 and max(map(len, long)) < LONGEST + 20
    paths = [name_run([f"model.name_or_path=out/{run}/model"], "ncl", 0, 0) for run in "ab"]
    assert paths[0].endswith("_model.name.or.path-a.model") and paths[0] != paths[1]
    assert name_run([], "ncl", "[наука,право]", 0).isascii()
    assert name_run(["optim.lr=1e-3"], "ncl", 0, 0) == "ncl_order-0_seed-0_optim.lr-0.001"


def test_patterns_are_shown_in_labels_as_they_were_typed():
    for patterns in (
        "{'^embed': 0.1, 'layers[.](0|1)[.]': 0.5}",
        r"{'a\d+': 2, 'x{2}': 0}",
        "{embeddings: 0}",
    ):
        (argument,) = to_hydra([f"optim.lr_multipliers={patterns}"])
        typed = patterns.replace("'", "").replace(" ", "")
        assert describe_variant([argument]) == f"optim.lr_multipliers={typed}"


def test_what_decides_the_result_identifies_a_run(composed, tmp_path):
    plain = make_plain_config(composed())
    assert identity(make_plain_config(composed("strategy=ddp", "logger=none", "name=x"))) == identity(plain)
    assert not any(key.startswith("loss") for key in identity(plain))  # as in runs of 0.1.0
    assert identity(make_plain_config(composed("loss=eaft")))["loss.alpha"] == 1
    run = RunDir(tmp_path)
    run.write_config(plain)
    differ = run.find_config_changes(make_plain_config(composed("trainer.steps=7", "seed=1")))
    assert differ == ["seed: 0 -> 1", "trainer.steps: 125 -> 7"]


def test_a_method_or_a_checkpoint_has_a_rate_of_its_own(composed):
    checkpoint = "model.name_or_path=somewhere"
    method = "+method.lr_multiplier=4"
    assert composed().optim.lr == 2e-3
    assert composed(method, checkpoint).optim.lr == 4e-4
    assert composed(method, "optim.lr=0.5").optim.lr == 0.5


OF_MEMORY = r"out of memory \(.+\); rerun the same command .+"
RESOLVED = ValueError("variant cannot be resolved")
RESOLVED.__cause__ = MemoryError()
ENDING = {
    "foreseen": (ValueError("first line\n  second line"), "first line second line"),
    "a gpu": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OF_MEMORY),
    "what became of it on the way up": (RESOLVED, OF_MEMORY),
    "a picture": (ValueError("quantization error"), OF_MEMORY),
}


@pytest.mark.parametrize(("error", "message"), ENDING.values(), ids=ENDING)
def test_an_error_of_the_user_or_of_memory_ends_in_one_line(error, message, capsys):
    with pytest.raises(SystemExit) as raised, readable_errors():
        raise error
    assert raised.value.code == 1 and re.fullmatch(f"cpt: {message}\n", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["order=9", "cache_dir=/proc/x"])  # of one option; after all of them
def test_a_wrong_config_is_found_without_torch(wrong, tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['run.py', {wrong!r}]; import runpy\n"
        f"try: runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')\n"
        "except SystemExit as error: print(error.code, {'torch', 'lightning', 'datasets'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.stdout.splitlines()[-1] == "1 set()", process.stderr
    assert f"{wrong} is invalid" in process.stderr


ALIKE = {
    "paths": (["a=x/run/checkpoint-9", "a=y/run/checkpoint-9"], ["x.run.checkpoint-9", "y.run.checkpoint-9"]),
    "parents": (["a=/data/x/last", "a=/data/y/last"], ["x.last", "y.last"]),
    "models": (["a=x/one/model", "a=y/one/model"], ["x.one.model", "y.one.model"]),
    "depths": (["a=last/", "a=x/last"], ["last", "x.last"]),
    "two options": (["a=x/l b=x/l", "a=x/l b=y/l"], ["x.l_b-x.l", "x.l_b-y.l"]),
}


@pytest.mark.parametrize("choices", ALIKE)
def test_runs_with_one_name_are_distinguished_by_their_paths(choices):
    overrides_of_runs, endings = ALIKE[choices]
    runs = [RunIdentity(overrides.split(), "ncl", 0, 0) for overrides in overrides_of_runs]
    assert len({run.name() for run in runs}) == 1
    assert distinguish_runs(runs) == [f"ncl_order-0_seed-0_a-{ending}" for ending in endings]


def test_runs_of_one_name_without_paths_have_a_hash():
    runs = [RunIdentity([f"domains.only=[{name}]"], "ncl", 0, 0) for name in ("law*", "law?")]
    names = distinguish_runs(runs)
    assert len({*names}) == 2 and all(name.startswith(f"{runs[0].name()}-") for name in names)
    assert names == distinguish_runs(runs)
