"""Deprecated option names: each is accepted with a warning, on the command line and in YAML files."""

import pytest
from omegaconf import OmegaConf

from cpt.core.config import CONF, flatten
from cpt.core.renames import GROUPS, KEYS, OPTIONS, VALUES, new_name, rename_keys, rename_overrides

CASES = [  # the choices that have the option, its old name, its new one
    ("", "schedule", "lr_scheduler"),
    ("", "model.base.steps", "model.pretraining.steps"),
    ("mask=migu", "mask.migu.mass", "mask.migu.top_p"),
    ("method=lora", "method.alpha", "method.lora_alpha"),
]


@pytest.mark.parametrize(("choice", "old", "new"), CASES)
def test_an_old_name_means_the_new_one_and_is_warned_of_once(choice, old, new, composed, capsys):
    given = choice.split()
    present = [f"{new}=x", f"++{new}=a,b", f"~{new}", "-m", "seed=1"]
    renamed = rename_overrides([*given, f"{old}=x", f"++{old}=a,b", f"~{old}", *present[3:]])
    assert renamed == [*given, *present]
    assert capsys.readouterr().err.count(f"cpt: {old} is deprecated") == 3
    cfg = composed(*given)
    OmegaConf.update(cfg, old, "x", force_add=True)
    OmegaConf.set_struct(cfg, True)
    rename_keys(cfg)
    assert OmegaConf.select(cfg, new) == "x" and (old in GROUPS or OmegaConf.select(cfg, old) is None)
    assert capsys.readouterr().err.count(f"use {new}") == 1


def test_each_new_name_is_one_of_a_yaml_file():
    text = "\n".join(path.read_text() for path in [*CONF.rglob("*.yaml")])
    names = {new.rpartition(".")[2] for table in (KEYS, *OPTIONS.values()) for new in table.values()}
    assert [name for name in sorted(names) if f"{name}:" not in text] == []
    assert all((CONF / group).is_dir() for group in GROUPS.values())


def test_old_values_mean_the_new_ones(composed, capsys):
    for key, values in VALUES.items():
        for old, new in values.items():
            assert rename_overrides([f"{key}=x,{old}"]) == [f"{key}=x,{new}"]
            assert f"use {key}=x,{new}" in capsys.readouterr().err
    cfg = composed("replay=past")
    OmegaConf.update(cfg, "replay.adds", True, force_add=True)
    cfg.domains.packing = "per_document"
    OmegaConf.update(cfg, "hydra.sweeper.params", {"domains.packing": "isolated,concat"}, force_add=True)
    rename_keys(cfg)
    assert (cfg.replay.mode, cfg.domains.packing) == ("append", "none") and "adds" not in cfg.replay
    assert cfg.hydra.sweeper.params == {"domains.packing": "document_mask,concat"}
    assert "use replay.mode=append" in capsys.readouterr().err
    cfg = OmegaConf.create({"model": {"checkpoint": "file", "name_or_path": "given"}})
    OmegaConf.update(cfg, "hydra.overrides.task", ["model.name_or_path=given"], force_add=True)
    rename_keys(cfg)
    assert cfg.model == {"name_or_path": "given"}, "the command line goes before a file"


def test_options_that_have_an_old_name_and_present_ones_are_left_alone(composed, capsys):
    own = ["method=derpp", "method.alpha=1", "method.mask.x=1"], ["method=demix", "method.experts=ffn"]
    other = ["method=das", "method.general=null"], ["method=peft", "method.arguments.alpha=3"]
    flags = ["--config-name", "check", "model.name_or_path=checkpoint", "hydra.job.name=check"]
    assert [rename_overrides(each) for each in (*own, *other, flags)] == [*own, *other, flags]
    cfg = composed("method=derpp", "+method.arguments={alpha: 1}")
    rename_keys(cfg)
    assert cfg == composed("method=derpp", "+method.arguments={alpha: 1}") and not capsys.readouterr().err
    mine = {"method._target_": "tests.support.seams.Growing", "method.memory": 5}
    assert new_name("method.memory", mine) == "method.memory"
    every = dict(flatten(OmegaConf.to_container(composed("mask=migu", "replay=past", "method=olora"))))
    assert [key for key in every if new_name(key, every) != key] == []
