"""What the command line says of options and choices."""

import re

import pytest
from hydra import compose, initialize_config_dir

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.core.config import CONF
from cpt.core.exceptions import InvalidOptionError
from cpt.trainer.help import describe_choice, describe_options, explaining_missing
from cpt.trainer.read_config import read_sections


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["domains=texts"],
            "domains.root is missing: folder of all text, with a sub-folder for each domain. All",
        ),
        (["model=hf"], "model.name_or_path is missing: name on the Hub or folder; "),
        (["benchmark=lm_eval"], "benchmark.tasks is missing: tasks, groups and tags, "),
    ],
)
def test_a_required_option_is_missed_with_what_it_is(overrides, message):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    with pytest.raises(ValueError) as error, explaining_missing(cfg):
        read_sections(cfg)
    assert str(error.value).startswith(message)


def test_required_options_come_first():
    lines = describe_options(["domains=texts", "model=hf", "--options"]).splitlines()
    keys = [line.partition("=")[0] for line in lines if line and not line.startswith(" ")]
    for section in ("domains", "model"):
        options = [key for key in keys if key.startswith(f"{section}.")]
        required = "root" if section == "domains" else "name_or_path"
        assert options[0] == f"{section}.{required}"
    assert "domains.root=???  (required)" in lines


@pytest.mark.parametrize("override", ["method=das,ncl", "optim.lr=1e-4,1e-3", "seed=range(3)"])
def test_options_are_those_of_one_run(override):
    with pytest.raises(InvalidOptionError, match=f"{re.escape(override)} is invalid .*Allowed: one value"):
        describe_options(["-m", override, "--options"])


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("# One. Two.\n", "One."),
        ("# @package x\n#  Long,\n# over lines. More\nname: x\n", "Long, over lines."),
        ("# Of Ke et al. (2023), then\n# more. Last.\n", "Of Ke et al. (2023), then more."),
        ("# Commands:\n# python run.py\n", "Commands"),
        ("# Text: python run.py\n", "Text"),
        ("name: x  # One.\n", ""),
    ],
)
def test_a_choice_is_described_by_the_first_sentence_of_its_file(comment, sentence, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(comment)
    assert describe_choice(path) == sentence


def test_every_choice_has_a_description():
    for path in CONF.glob("*/*.yaml"):
        assert describe_choice(path), path
