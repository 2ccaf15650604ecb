"""Deprecated option names: each is accepted with a warning, on the command line and in YAML files."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cpt.core.config import CONF, flatten
from cpt.core.renames import GROUPS, KEYS, OPTIONS, VALUES, new_name, rename_keys, rename_overrides
from cpt.gate import main

WITH = {  # choices that have the option of a place, by a part of its new name
    "answers.": "domains=tasks",
    "benchmark.": "benchmark=lm_eval",
    "buffer": "method=derpp",
    "endtask.": "endtask=submodules",
    "lora_": "method=lora",
    "lr_multiplier": "method=lora",
    "mask.": "mask=migu",
    "method.apply_to": "method=agem",
    "method.mask": "method=migu",
    "method.mixture": "method=replay",
    "minibatch": "method=derpp",
    "normalize": "method=das",
    "num_experts": "method=moelora",
    "num_virtual": "method=prompt",
    "reduction": "method=adapter",
    "replay.": "replay=generated",
    "replay.buffer": "replay=past",
    "target_modules": "method=peft",
}
PLACES = [(each, names) for places, names in OPTIONS.items() for each in places.split()]
ALL = KEYS | GROUPS
ALL |= {f"{each}.{old}": f"{each}.{new}" for each, names in PLACES for old, new in names.items()}
ALL = {old.replace("*", "migu"): new.replace("*", "migu") for old, new in ALL.items()}
ALL.pop("method.mixture.tokens")  # of generated text, which a method does not choose


@pytest.mark.parametrize(("old", "new"), ALL.items())
def test_an_old_name_means_the_new_one_and_is_warned_of_once(old, new, capsys):
    given = [choice for part, choice in WITH.items() if part in new][-1:]
    present = [f"{new}=x", f"++{new}=a,b", f"~{new}", "-m", "seed=1"]
    renamed = rename_overrides([*given, f"{old}=x", f"++{old}=a,b", f"~{old}", *present[3:]])
    assert renamed == [*given, *present]
    assert capsys.readouterr().err.count(f"cpt: {old} is deprecated") == 3
    cfg = composed(*given)
    assert OmegaConf.select(cfg, new, default=...) is not ... or "tasks.migu" in new
    OmegaConf.update(cfg, old, "x", force_add=True)
    OmegaConf.set_struct(cfg, True)
    rename_keys(cfg)
    place = "" if old in GROUPS else old
    assert OmegaConf.select(cfg, new) == "x" and (not place or OmegaConf.select(cfg, place) is None)
    assert capsys.readouterr().err.count(f"use {new}") == 1


def composed(*given):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(given))


def test_old_values_mean_the_new_ones(capsys):
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


def test_options_that_have_an_old_name_and_present_ones_are_left_alone(capsys):
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
