"""Every experiment composes, and plans what it says."""

import re
import shlex

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from cpt.data.orders import resolve_order
from cpt.trainer.build import log_ineffective
from cpt.trainer.plan import make_plan, read_sections
from tests.conftest import ROOT
from tests.support.campaign import run_few
from tests.support.making import made

pytestmark = pytest.mark.slow

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
DATA = "domains.root=there"  # of those that need data; nothing is read for a plan
OF_DATA = "das6 das6_mini migu_roberta standard_cl standard_cl_mini long_sequence migu_t5 migu_components"
NEEDS = {name: [DATA] for name in [*OF_DATA.split(), "m2d2", "m2d2_mini"]}
NEEDS["llama_code"] = [DATA, "model.checkpoint=llama"]


@pytest.fixture
def swept(composed):
    """The values that a sweep of an experiment goes through, by key."""

    def read(*overrides):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
        lines = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        return {
            each.key_or_group: list(each.sweep_string_iterator())
            if each.is_sweep_override()
            else [each.get_value_element_as_str()]
            for each in OverridesParser.create().parse_overrides(lines)
        }

    return read


def order_of(cfg):
    """The plan of a config; of data that is not there, its order alone."""
    if OmegaConf.select(cfg, "domains.root") is None:
        return make_plan(cfg).order
    orders = OmegaConf.to_container(cfg.domains).get("orders")
    names = sorted(next(iter(orders.values())) if isinstance(orders, dict) else orders[0]) if orders else []
    return resolve_order(cfg.order, names=names, orders=orders, seed=cfg.seed) if orders else []


@pytest.mark.parametrize("name", run_few(EXPERIMENTS, {*EXPERIMENTS} - {"methods_table"}))
def test_an_experiment_has_a_plan_with_each_value_it_sweeps_and_the_commands_it_gives(swept, composed, name):
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert name == "smoke" or f"experiment={name}" in text
    needs = [f"experiment={name}", *NEEDS.get(name, [])]
    for key, values in ({"seed": ["0"]} | swept(*needs)).items():
        for value in values:
            order_of(composed(*needs, f"{key}={value}"))
    assert OmegaConf.is_interpolation(composed(*needs, "method=lora").optim, "lr")  # a method's rate counts
    commands = re.findall(r"^# .*?python run\.py ([^(;&\n]*?)[.:]?(?: &&.*)?$", text, re.MULTILINE)
    assert commands or "python run.py" not in text
    for command in commands:
        words = [re.sub("FOLDER|…", "there", word) for word in shlex.split(command)]
        given = [word for word in words if not word.startswith(("-", "hydra"))]
        cfg = composed(*(word if "[" in word else word.partition(",")[0] for word in given))
        try:
            read_sections(cfg)
        except ValueError as error:
            assert "there is no" in str(error) and "root" in str(error)


def test_the_methods_table_has_every_method(swept):
    methods = {path.stem for path in (ROOT / "conf/method").glob("*.yaml")}
    params = swept("experiment=methods_table")
    assert set(params["method"]) == methods - {"migu", "none"}  # which is ncl, and learns nothing
    assert (params["mask"], params["seed"]) == (["none", "migu"], ["0", "1", "2"])


def test_das6_is_of_the_papers_size(composed):
    cfg = composed("experiment=das6", DATA, "method=das")
    assert (cfg.model.checkpoint, cfg.model.length, cfg.model.mask_rate) == ("roberta-base", 164, 0.15)
    assert (cfg.trainer.steps, cfg.trainer.batch_size, cfg.trainer.probe_samples) == (2580, 248, 10000)
    assert order_of(cfg) == ["restaurant", "acl", "ai", "phone", "pubmed", "camera"]


def test_a_line_tells_where_a_rate_has_no_effect(small, caplog):
    caplog.set_level("INFO", logger="cpt")
    for given in ([], ["optim.lr=0.5"]):
        work = made(small("method=lora", *given))
        log_ineffective(work.plan, work.module, torch.device("cpu"))
    (line,) = [each for each in caplog.messages if "optim.lr" in each]
    assert line.startswith("No effect of method.rate=3: optim.lr is a number")


def test_m2d2_plans_by_names_alone(composed, swept, tmp_path):
    fine = ["Human_activites__Society", "cs.AI", "cs.CL", "hep-th", "math.AG"]
    for name in (*fine, "cs_l1", "Human_activites"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text("never read\n")
    domains = f"domains.root={tmp_path}"
    plan = make_plan(composed("experiment=m2d2", domains))
    assert plan.by_texts and plan.order == fine
    assert plan.evaluation.policy == {"rows": "each", "columns": "all"}
    assert swept("experiment=m2d2", domains) == {"seed": ["0", "1"], "order": ["similar", "random"]}
    only = make_plan(composed("experiment=m2d2", domains, "domains.only='/.*__.*/'"))
    assert only.order == fine[:1]
    mini = make_plan(composed("experiment=m2d2_mini", domains, "order=random"))
    assert mini.evaluation.policy == {"rows": "every:10", "columns": "near:8"}
    assert sorted(mini.order) == fine and not mini.by_texts
