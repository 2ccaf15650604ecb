"""A mapping on the command line replaces that of an experiment, where its keys are the user's own."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from cpt.core.config import CONF
from cpt.core.errors import find_reason
from cpt.core.overrides import FULL_MAPPINGS, OPEN_MAPPINGS

EXPERIMENT = """# @package _global_
defaults:
  - override /domains: DOMAINS
domains: {columns: {law: body}}
optim: {lr_multipliers: {embeddings: 0.1, head: 0.5}}
model: {rope_parameters: {rope_type: yarn, factor: 4}}
"""


@pytest.fixture
def compose_mine(tmp_path):
    """Composes a config with an experiment that sets mappings."""

    def compose_with(*overrides, domains="texts", hydra=False):
        (tmp_path / "experiment").mkdir(exist_ok=True)
        text = EXPERIMENT.replace("DOMAINS", domains)
        (tmp_path / "experiment" / "mine.yaml").write_text(text)
        search = f"hydra.searchpath=[file://{tmp_path}]"
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", [search, "experiment=mine", *overrides], return_hydra_config=hydra)

    return compose_with


def test_a_mapping_replaces_that_of_an_experiment(compose_mine):
    cfg = compose_mine(
        "optim.lr_multipliers={norms: 2}",
        "model.rope_parameters={rope_type: linear, factor: 2}",
        "domains.columns={med: text}",
    )
    assert cfg.optim.lr_multipliers == {"norms": 2}
    assert cfg.model.rope_parameters == {"rope_type": "linear", "factor": 2}
    assert cfg.domains.columns == {"med": "text"}
    assert compose_mine("optim.lr_multipliers={head: 1}").optim.lr_multipliers == {"head": 1}
    assert compose_mine("optim.lr_multipliers={}").optim.lr_multipliers == {}
    assert compose_mine("optim.lr_multipliers=null").optim.lr_multipliers is None


def test_a_mapping_of_hydra_is_replaced_too(compose_mine):
    options = ["hydra/sweeper=optuna", "hydra.sweeper.params={model.lr: 1}"]
    cfg = compose_mine("+hydra.sweeper.params={seed: 2}", *options, hydra=True)
    assert cfg.hydra.sweeper.params == {"model.lr": 1}
    # Of Hydra's own sweeper, null with a type, into which OmegaConf cannot merge.
    assert compose_mine("hydra.sweeper.params={a: b}", hydra=True).hydra.sweeper.params == {"a": "b"}


def test_keys_of_the_users_own_are_added_and_changed_by_their_names(compose_mine):
    cfg = compose_mine("+optim.lr_multipliers={norms: 2}", "optim.lr_multipliers.head=1")
    assert cfg.optim.lr_multipliers == {"embeddings": 0.1, "head": 1, "norms": 2}
    assert compose_mine("optim.lr_multipliers.norms=2").optim.lr_multipliers.norms == 2
    assert compose_mine("domains.columns.med=text").domains.columns == {"law": "body", "med": "text"}
    cfg = compose_mine("domains.packages.torch=[torch]", domains="installed_docs")
    assert cfg.domains.packages.torch == ["torch"] and cfg.domains.packages.sympy == ["sympy"]
    cfg = compose_mine(
        "domains.catalogue.news={path: ag_news}", "domains.catalogue.news.column=body", domains="hub"
    )
    assert cfg.domains.catalogue.news == {"path": "ag_news", "column": "body"}
    assert compose_mine("answers.metrics.law=sari").answers.metrics == {"law": "sari"}  # null by default

    # Not below a mapping with defaults, where it is rather a mistyped one of these.
    with pytest.raises(HydraException) as raised:
        compose_mine("domains.columns.label=text", domains="tasks")
    assert find_reason(raised.value).endswith("to add it: +domains.columns.label=VALUE")


def test_a_mapping_with_defaults_is_changed_key_by_key(compose_mine):
    cfg = compose_mine("domains.columns={text: review}", domains="tasks")
    assert {"text": "review", "target": "label", "law": "body"}.items() <= cfg.domains.columns.items()
    cfg = compose_mine("domains.held_out={valid: 0.1}")
    assert cfg.domains.held_out.valid == 0.1 and cfg.domains.held_out.test == 0.05


@pytest.mark.parametrize("key", FULL_MAPPINGS)
def test_other_keys_of_a_mapping_with_defaults_are_refused_with_what_replaces_it(key, compose_mine):
    domains = "installed_docs" if key.startswith("domains") else "texts"
    with pytest.raises(HydraException) as raised:
        compose_mine(f"{key}={{mine: [5]}}", domains=domains)
    message = find_reason(raised.value)
    replacing = f"~{key} '+{key}={{…}}'"
    assert message.startswith(f"{key}.mine is invalid: ") and message.endswith(
        f"; to replace all: {replacing}"
    )
    section, name = key.split(".")
    assert compose_mine(f"~{key}", f"+{key}={{mine: [5]}}", domains=domains)[section][name] == {"mine": [5]}


def test_every_mapping_that_is_empty_by_default_is_replaced():
    empty_mappings = set()
    for path in CONF.rglob("*.yaml"):
        group = path.parent.relative_to(CONF).as_posix().replace("/", ".")
        for name, value in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).items():
            if value == {}:
                empty_mappings.add(f"{group}.{name}")
    assert empty_mappings and empty_mappings <= {*OPEN_MAPPINGS}


@pytest.mark.parametrize("key", OPEN_MAPPINGS)
def test_each_open_mapping_is_an_option(key):
    group, _, name = key.rpartition(".")
    paths = (CONF / group.replace(".", "/")).glob("*.yaml")
    assert any(f"{name}: " in path.read_text(encoding="utf-8") for path in paths)
