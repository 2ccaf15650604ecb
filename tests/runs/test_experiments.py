"""Every experiment composes, and plans what it says."""

import re
import shlex

import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from torch.optim import AdamW

from cpt.core.sections import read_section
from cpt.data.orders import resolve_order
from cpt.optim.options import read_optimizer
from cpt.trainer.build import log_ineffective
from cpt.trainer.plan import make_plan
from tests.conftest import ROOT
from tests.support.making import made
from tests.test_commands import compose_run

pytestmark = pytest.mark.slow

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
DATA = "domains.root=there"  # of those that need data; nothing is read for a plan
OF_DATA = (
    *(
        "das6",
        "das6_mini",
        "migu_roberta",
        "standard_cl",
        "standard_cl_mini",
        "long_sequence",
        "migu_t5",
        "migu_components",
    ),
    *("m2d2", "m2d2_mini"),
)
NEEDS = {name: [DATA] for name in OF_DATA} | {"llama_code": [DATA, "model.checkpoint=llama"]}


@pytest.fixture
def loaded(composed):
    """A config of an experiment as a sweep has it, with the Hydra part."""

    def load(*overrides):
        loader = GlobalHydra.instance().config_loader()
        return loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)

    return load


def swept(config):
    """The values that a sweep goes through, by key."""
    lines = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides(lines)
    return {
        each.key_or_group: list(each.sweep_string_iterator())
        if each.is_sweep_override()
        else [each.get_value_element_as_str()]
        for each in parsed
    }


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_is_and_how_it_is_started(name):
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert name == "smoke" or f"experiment={name}" in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_a_plan_with_each_value_it_sweeps(loaded, composed, name):
    needs = NEEDS.get(name, [])
    given = swept(loaded(f"experiment={name}", *needs))
    for key, values in ({"seed": ["0"]} | given).items():
        for value in values:
            cfg = composed(f"experiment={name}", *needs, f"{key}={value}")
            assert OmegaConf.select(cfg, "name") == cfg.name
            order_of(cfg)


def order_of(cfg):
    """The plan of a config; of data that is not there, its order alone."""
    if OmegaConf.select(cfg, "domains.root") is None:
        return make_plan(cfg).order
    orders = OmegaConf.to_container(cfg.domains).get("orders")
    if orders is None:
        return []
    names = sorted(next(iter(orders.values())) if isinstance(orders, dict) else orders[0])
    return resolve_order(cfg.order, names=names, orders=orders, seed=cfg.seed)


def test_the_methods_table_has_every_method(loaded):
    config = loaded("experiment=methods_table")
    methods = {path.stem for path in (ROOT / "conf/method").glob("*.yaml")}
    params = swept(config)
    # migu is ncl with mask=migu; none learns nothing.
    assert set(params["method"]) == methods - {"migu", "none"}
    assert (params["mask"], params["seed"]) == (["none", "migu"], ["0", "1", "2"])
    assert config.trainer.steps == 125


def test_das6_is_of_the_papers_size(composed):
    cfg = composed("experiment=das6", DATA, "method=das")
    assert (cfg.model.checkpoint, cfg.model.length, cfg.model.mask_rate) == ("roberta-base", 164, 0.15)
    trainer = cfg.trainer
    assert (trainer.steps, trainer.epochs, trainer.tokens, trainer.batch_size) == (2580, None, None, 248)
    assert trainer.batch_size / trainer.accumulate_grad_batches == 62
    assert (trainer.probe_samples, trainer.gradient_clip_val, trainer.precision) == (10000, None, "16-mixed")
    chosen = read_optimizer(read_section(cfg, "optim"))
    optim = chosen.arguments
    assert chosen.load() is AdamW
    assert (optim["lr"], optim["eps"], optim["weight_decay"]) == (1e-4, 1e-6, 0.0)
    assert tuple(optim["betas"]) == (0.9, 0.999)
    assert (cfg.schedule._target_, cfg.schedule.warmup) == ("cpt.optim.schedulers.Linear", 0.1)
    assert (cfg.domains.name, cfg.endtask.name) == ("das6", "das6")
    assert order_of(cfg) == ["restaurant", "acl", "ai", "phone", "pubmed", "camera"]


def test_a_methods_own_rate_counts_in_the_papers_experiment(composed):
    for method, times in (("ncl", 1), ("lora", 3), ("prompt", 10)):
        cfg = composed("experiment=das6", DATA, f"method={method}")
        assert cfg.optim.lr == pytest.approx(times * 1e-4)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_experiment_switches_a_methods_rate_off(name, composed):
    """A learning rate that is given stands as it is."""
    needs = [f"experiment={name}", *NEEDS.get(name, [])]
    assert OmegaConf.is_interpolation(composed(*needs, "method=lora").optim, "lr")


def test_a_line_tells_where_a_rate_has_no_effect(small, caplog):
    caplog.set_level("INFO", logger="cpt")
    for given in ([], ["optim.lr=0.5"]):
        work = made(small("method=lora", *given))
        log_ineffective(work.plan, work.module, torch.device("cpu"))
    (line,) = [each for each in caplog.messages if "optim.lr" in each]
    assert line.startswith("No effect of method.rate=3: optim.lr is a number")


def test_the_papers_end_tasks(composed):
    tasks = composed("experiment=das6", DATA).endtask
    assert (tasks.lr, tasks.batch_size, tasks.length, len(tasks.seeds)) == (3e-5, 16, 164, 5)
    epochs = {name: OmegaConf.select(tasks, f"tasks.{name}.epochs") for name in tasks.tasks}
    assert epochs == {"restaurant": 5, "acl": 10, "ai": 5, "phone": 15, "pubmed": 10, "camera": 15}


def test_orders_are_named_reversed_and_random_by_seed(loaded, composed):
    params = swept(loaded("experiment=orders"))
    assert (params["order"], params["seed"]) == (["0", "1", "2", "reverse", "random"], ["0", "1", "2"])
    assert {"ncl", "das"} <= set(params["method"])
    plans = [
        make_plan(composed("experiment=orders", f"order={order}")).order for order in params["order"][:4]
    ]
    assert len(set(map(tuple, plans))) == 4
    assert plans[3] == plans[0][::-1]
    drawn = [
        make_plan(composed("experiment=orders", "order=random", f"seed={seed}")).order for seed in range(3)
    ]
    assert len(set(map(tuple, drawn))) > 1


@pytest.fixture
def domains(tmp_path):
    """Folders with M2D2's kinds of names, of which a plan looks at the names alone."""
    for name in (
        "cs.AI",
        "cs.CL",
        "cs_l1",
        "math.AG",
        "hep-th",
        "Human_activites",
        "Human_activites__Society",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text("never read\n")
    return f"domains.root={tmp_path}"


FINE = ["Human_activites__Society", "cs.AI", "cs.CL", "hep-th", "math.AG"]


def test_m2d2_is_of_the_papers_protocol(composed, loaded, domains):
    cfg = composed("experiment=m2d2", domains)
    trainer = cfg.trainer
    assert (trainer.steps, trainer.epochs, trainer.tokens, trainer.batch_size) == (None, 1, None, 16)
    assert (cfg.model.checkpoint, cfg.model.length, cfg.eval.tokens) == ("gpt2", 1024, 50000)
    assert read_optimizer(read_section(cfg, "optim")).arguments["weight_decay"] == 0.0
    plan = make_plan(cfg)
    assert (
        plan.by_texts and plan.order == FINE and plan.evaluation.policy == {"rows": "each", "columns": "all"}
    )
    assert swept(loaded("experiment=m2d2", domains)) == {"seed": ["0", "1"], "order": ["similar", "random"]}
    for ablation in ("domains.balanced=true", "trainer.batch_size=64", "order=similar_swapped"):
        assert make_plan(composed("experiment=m2d2", domains, ablation)).order == FINE
    only = make_plan(composed("experiment=m2d2", domains, "domains.only='/.*__.*/'"))
    assert only.order == ["Human_activites__Society"]


def test_m2d2_mini_measures_a_part_of_the_matrix(composed, domains):
    plan = make_plan(composed("experiment=m2d2_mini", domains))
    assert plan.evaluation.policy == {"rows": "every:10", "columns": "near:8"}
    assert (plan.names["model"], plan.budget.steps, plan.order) == ("tiny_gpt2", 20, FINE)
    drawn = make_plan(composed("experiment=m2d2_mini", domains, "order=random", "seed=1"))
    assert sorted(drawn.order) == FINE and not drawn.by_texts


@pytest.mark.parametrize("experiment", ["standard_cl", "standard_cl_mini", "long_sequence"])
def test_tasks_of_published_sequences_are_known_by_exact_match(composed, experiment):
    cfg = composed(f"experiment={experiment}", "domains.root=nowhere")
    tasks = {task for order in cfg.domains.orders.values() for task in order}
    assert dict(cfg.answers.measures) == dict.fromkeys(tasks, "exact_match")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_commands_that_an_experiment_gives_compose(name):
    """With each value that the YAML itself sweeps, where the command has no other."""
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    commands = re.findall(r"^# .*?python run\.py ([^(;&\n]*?)[.:]?(?: &&.*)?$", text, re.MULTILINE)
    assert commands or "python run.py" not in text
    for command in commands:
        given = [word.replace("FOLDER", "there") for word in shlex.split(command)]
        asked = {word.partition("=")[0] for word in given}
        (experiment,) = [word for word in given if word.startswith("experiment=")]
        needs = NEEDS.get(experiment.partition("=")[2], [])
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            own = swept(loader.load_configuration("config", [experiment, *needs], RunMode.MULTIRUN))
        for key, values in ({"seed": ["0"]} | own).items():
            for value in values if key not in asked else []:
                compose_run([*given, f"{key}={value}"], ROOT / "conf")
