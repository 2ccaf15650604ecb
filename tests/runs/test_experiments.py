"""Every experiment composes, and plans what it says."""

import re
import shlex

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from cpt.data.orders import resolve_order
from cpt.prepare import LAYOUTS
from cpt.trainer.plan import make_plan
from cpt.trainer.read_config import read_sections
from tests.conftest import ROOT
from tests.support.campaign import run_few

pytestmark = pytest.mark.slow

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
DATA = "domains.root=there"  # of those that need data; nothing is read for a plan
OF_DATA = "das6 das6_mini das6_released das6_released_ewc das6_released_derpp migu_roberta standard_cl"
OF_DATA += " standard_cl_mini long_sequence migu_t5 migu_t5_released migu_components o_lora_released"
NEEDS = {name: [DATA] for name in [*OF_DATA.split(), "m2d2", "m2d2_mini"]}
MODEL = "model.name_or_path=model"
NEEDS |= {
    name: [DATA, MODEL]
    for name in (
        "llama_code",
        "das6_mpnet",
        "linux_texts",
        "long_context",
        "real_decoder",
        "m2d2_decoder",
        "standard_cl_decoder",
    )
}


def read_search_space(*overrides):
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
    lines = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    return {
        override.key_or_group: list(override.sweep_string_iterator())
        if override.is_sweep_override()
        else [override.get_value_element_as_str()]
        for override in OverridesParser.create().parse_overrides(lines)
    }


def order_of(cfg):
    if OmegaConf.select(cfg, "domains.root") is None:
        return make_plan(cfg).order
    orders = OmegaConf.to_container(cfg.domains).get("orders")
    if not orders:
        return []
    first_order = next(iter(orders.values())) if isinstance(orders, dict) else orders[0]
    return resolve_order(cfg.order, names=sorted(first_order), orders=orders, seed=cfg.seed)


@pytest.mark.parametrize("name", run_few(EXPERIMENTS, {*EXPERIMENTS} - {"methods_table"}))
def test_an_experiment_has_a_plan_with_each_value_it_sweeps_and_the_commands_it_gives(composed, name):
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert name == "smoke" or f"experiment={name}" in text
    needs = [f"experiment={name}", *NEEDS.get(name, [])]
    for key, values in ({"seed": ["0"]} | read_search_space(*needs)).items():
        for value in values:
            order_of(composed(*needs, f"{key}={value}"))
    commands = re.findall(r"^# .*?python run\.py ([^(;&\n]*?)[.:]?(?: &&.*)?$", text, re.MULTILINE)
    assert commands or "python run.py" not in text
    for command in commands:
        check_command(composed, command)


def check_command(composed, command):
    """The first job of a command composes and has valid options; its data are not there."""
    words = [re.sub("FOLDER|…", "there", word) for word in shlex.split(command)]
    override_words = [word for word in words if not word.startswith(("-", "hydra"))]
    cfg = composed(*(word if "[" in word else word.partition(",")[0] for word in override_words))
    try:
        read_sections(cfg)
    except ValueError as error:
        assert re.search("there is no (such )?folder", str(error)) and "root" in str(error)


def test_the_rows_of_the_page_of_papers_compose_and_it_prepares_known_layouts(composed):
    text = (ROOT / "docs/reproduce.md").read_text()
    assert re.findall(r"^python -m cpt.prepare (\S+)", text, re.MULTILINE) == list(LAYOUTS)
    for cell in re.findall(r"\| `(experiment=[^`]*)`", text):
        check_command(composed, f"{cell} domains.root=there model.name_or_path=there")


def test_the_methods_table_has_every_method(composed):
    methods = {path.stem for path in (ROOT / "conf/method").glob("*.yaml")}
    params = read_search_space("experiment=methods_table")
    # migu is ncl, none learns nothing, and sdft needs questions with answers, which these domains have not.
    assert set(params["method"]) == methods - {"migu", "none", "sdft"}
    assert (params["mask"], params["seed"]) == (["none", "migu"], ["0", "1", "2"])
