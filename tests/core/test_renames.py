"""Deprecated option names: each is accepted with a warning, on the command line and in YAML files."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cpt.core.config import CONF
from cpt.core.renames import GROUPS, KEYS, rename_keys, rename_overrides
from cpt.gate import main


@pytest.mark.parametrize(("old", "new"), (KEYS | GROUPS).items())
def test_an_old_name_means_the_new_one_and_is_warned_of_once(old, new, capsys):
    assert rename_overrides([f"{old}=x", f"++{old}=a,b", f"~{old}", "-m", "seed=1"]) == [
        f"{new}=x",
        f"++{new}=a,b",
        f"~{new}",
        "-m",
        "seed=1",
    ]
    assert capsys.readouterr().err.count(f"cpt: {old} is deprecated") == 3
    cfg = OmegaConf.create({})
    OmegaConf.update(cfg, old, "x", force_add=True)
    OmegaConf.set_struct(cfg, True)
    rename_keys(cfg)
    assert OmegaConf.select(cfg, new) == "x" and OmegaConf.select(cfg, old) is None
    assert capsys.readouterr().err.count(f"use {new}") == 1


def test_present_names_are_those_of_the_config_and_are_left_alone(capsys):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config")
    assert [new for new in KEYS.values() if OmegaConf.select(cfg, new, default=...) is ...] == []
    assert all((CONF / group).is_dir() for group in GROUPS.values())
    same = ["optimized_metric=LC.nats", "model.objective=auto", "benchmark.tasks=[a]", "hydra.job.name=check"]
    assert rename_overrides(same) == same and rename_overrides(["probe.tasks=[a]"]) == ["benchmark.tasks=[a]"]
    assert capsys.readouterr().err.count("deprecated") == 1
    assert rename_overrides(["model=gpt2,checkpoint"]) == ["model=gpt2,hf"]
    flags = ["--config-name", "check", "model.name_or_path=checkpoint"]  # values are no keys
    assert rename_overrides(flags) == flags


def test_the_command_line_goes_before_an_old_name_in_a_file():
    cfg = OmegaConf.create({"model": {"checkpoint": "file", "name_or_path": "given"}, "check": "full"})
    OmegaConf.update(cfg, "hydra.overrides.task", ["model.name_or_path=given"], force_add=True)
    rename_keys(cfg)
    assert cfg.model == {"name_or_path": "given"} and cfg.verify_inputs == "full"


def test_the_gates_old_flags_are_warned_of(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--gain", "0.1", "--loss=0.1"])
    said = capsys.readouterr().err
    assert "--gain is deprecated" in said and "use --max-forgetting" in said


def test_help_and_version_are_short_and_name_every_group():
    text = OmegaConf.load(CONF / "config.yaml").hydra.help.template
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra", "routing", "trainer"}
    assert [group for group in sorted(groups) if f"  {group}  " not in text] == [] and len(
        text.splitlines()
    ) < 30
