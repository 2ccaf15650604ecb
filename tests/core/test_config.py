import subprocess
import sys

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from yaml import YAMLError

from cpt.core.config import identity as identity_of
from cpt.core.config import list_differences, plain_config
from cpt.core.errors import readable, reason
from cpt.core.naming import LONGEST, name_run
from cpt.optim.schedulers import Progress
from cpt.trainer.plan import make_plan, read_sections
from tests.conftest import ROOT
from tests.support.processes import ran
from tests.support.sparing import LOAD

GROUPS = sorted(path.parent.name for path in ROOT.glob("conf/*/*.yaml"))


def identity(cfg):
    return identity_of(plain_config(cfg))


CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml"))


def test_the_groups_are_those_of_the_house():
    assert {
        "model",
        "method",
        "mask",
        "replay",
        "routing",
        "domains",
        "optim",
        "schedule",
        "trainer",
        "strategy",
        "logger",
    } <= set(GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "model"])
def test_every_model_names_itself(choice, composed):
    assert composed(f"model={choice}").model.name == choice


@pytest.mark.slow
@pytest.mark.parametrize("group", ["method", "replay", "domains"])
def test_every_choice_is_called_as_its_file(group, composed):
    names = [name for each, name in CHOICES if each == group]
    assert [composed(f"{group}={name}")[group].name for name in names] == names


@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "schedule"])
def test_every_schedule_instantiates_and_warms_up(choice, composed):
    policy = read_sections(composed(f"schedule={choice}")).schedule
    factors = [policy(Progress.alone(step, steps=100)) for step in range(100)]
    assert 0 < factors[0] < factors[5] <= max(factors) <= 1
    assert min(factors) >= 0


@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "optim"])
def test_every_optimizer_instantiates(choice, composed):
    import torch

    weight = torch.nn.Parameter(torch.ones(2, 2))
    chosen = read_sections(composed(f"optim={choice}")).optim
    optimizer = chosen.load()([weight], **chosen.arguments)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert (weight < 1).all()


@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "strategy"])
def test_every_strategy_makes_a_trainer(choice, composed):
    from cpt.trainer.lightning import make_trainer

    options = read_sections(composed(f"strategy={choice}", "trainer.accelerator=cpu")).trainer
    made = make_trainer(options.lightning, label="")
    assert made.world_size == {"single": 1}.get(choice, 2)


def test_a_run_folder_is_named_by_its_choices():
    assert name_run([], "ncl", 0, 0) == "ncl_order-0_seed-0"
    overrides = [
        "method=das",
        "order=1",
        "seed=3",
        "trainer.steps=5",
        "name=x",
        "logger=none",
        "+trainer.devices=2",
    ]
    assert name_run(overrides, "das", 1, 3) == "das_order-1_seed-3_trainer.steps-5"
    assert name_run(["domains.root=../a b/c"], "ncl", "[b,a]", 0) == "ncl_order-.b.a_seed-0_domains.root-c"


def test_a_default_that_is_given_outright_is_not_in_the_name(composed):
    plain = name_run([], "ncl", 0, 0)
    for given in ("model=tiny_modernbert", "mask=none", "trainer.steps=250", "schedule.warmup=0.10"):
        assert name_run([given], "ncl", 0, 0) == plain
    for given in ("model=tiny_gpt2", "mask=migu", "trainer.steps=251"):
        assert name_run([given], "ncl", 0, 0) == f"{plain}_{given.replace('=', '-').replace('_', '.')}"
    place = "routing@method.routing"  # a group where the default has no such place
    assert name_run([f"{place}=last"], "demix", 0, 0) == "demix_order-0_seed-0_routing.method.routing-last"


def test_yaml_that_these_tests_read_again_is_what_the_file_says(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1e-3\nb: ${a}\nc: [1, {d: null}]\n")
    with path.open() as file:
        one, other = OmegaConf.load(path), OmegaConf.load(file)
    assert one == other == LOAD(path) and (one.b, one.c[1].d) == (0.001, None)
    one.a = 2
    assert (one.b, other.b, OmegaConf.load(str(path)).b) == (2, 0.001, 0.001)
    path.write_text("a: 1\na: 2\n")
    with pytest.raises(YAMLError, match=r'duplicate key a(.|\n)*mine.yaml", line 2'):
        OmegaConf.load(path)


def test_a_long_name_is_cut_and_stays_different():
    long = [name_run([f"domains.root={'x' * 200}{end}"], "ncl", 0, 0) for end in "ab"]
    assert len(set(long)) == 2
    assert max(map(len, long)) < LONGEST + 20


def test_what_carries_a_run_out_does_not_identify_it(composed):
    assert identity(composed("strategy=ddp", "logger=none", "name=x")) == identity(composed())
    assert list_differences(identity(composed()), identity(composed("trainer.steps=7", "seed=1"))) == [
        "seed: 0 -> 1",
        "trainer.steps: 250 -> 7",
    ]


def test_what_holds_a_budget_is_part_of_a_run_only_where_there_is_one(composed):
    before = composed()
    before.budget.steer = "rate"  # as it was by default
    assert identity(before) == identity(composed())
    before.budget.past = 0.1
    assert list_differences(identity(before), identity(composed("budget.past=0.1"))) == [
        "budget.steer: rate -> line"
    ]


def test_a_given_checkpoint_is_not_learned_at_the_rate_of_a_tiny_model(composed):
    assert composed().optim.lr == 2e-3
    assert composed("model.checkpoint=somewhere").optim.lr == 1e-4


def test_a_method_may_learn_at_a_rate_of_its_own(composed):
    assert composed("+method.rate=4").optim.lr == composed("optim=sgd", "+method.rate=4").optim.lr == 8e-3
    assert composed("+method.rate=4", "model.checkpoint=somewhere").optim.lr == 4e-4
    assert composed("+method.rate=4", "optim.lr=0.5").optim.lr == 0.5


def test_an_error_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended, readable(errors_only=True):
        raise ValueError("first line\n  second line")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "cpt: first line second line\n"
    with pytest.raises(ValueError, match="kept"), readable(errors_only=False):
        raise ValueError("kept")


def test_the_reason_of_a_failed_instantiation_is_the_cause():
    try:
        instantiate(
            {
                "_target_": "cpt.data.options.Budget",
                "steps": 0,
                "epochs": None,
                "tokens": None,
                "batch_size": 1,
            }
        )
    except InstantiationException as error:
        assert reason(error).startswith("the budget of a domain is trainer.steps=0")
    else:
        pytest.fail("a budget of 0 steps was accepted")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("order=7", "order=7 is not known; allowed: 0 (sympy networkx pandas), 1"),
        ("order=[sympy,law]", "order: unknown domain law; there are: networkx, pandas, sympy"),
        ("order=[sympy,sympy]", "only once"),
        ("objective=LC.furlongs", "objective=LC.furlongs; allowed: METRIC.UNIT of ZS"),
        ("domains.score_on=train", "domains.score_on=train; allowed: valid, test"),
        (
            "trainer.epochs=2",
            "trainer.steps=250 trainer.epochs=2, trainer.batch_size=32; allowed: exactly one of",
        ),
        ("trainer.accumulate_grad_batches=5", "trainer.batch_size=32 is not a multiple of"),
        ("domains.held_out.test=0", "shares above 0 and below 0.5"),
        ("domains.held_out.most=0", "allowed: null or a whole number, 1 or more"),
    ],
)
def test_wrong_choices_are_named_with_what_is_allowed(override, told, composed):
    with pytest.raises((ValueError, InstantiationException)) as raised:
        make_plan(composed(override))
    assert told in reason(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["order=9"], "order=9 is not known"),
        (["domains=texts"], "domains.root"),
        (["domains=texts", "domains.root=nowhere"], "there is no folder nowhere"),
    ],
)
def test_bad_input_on_the_command_line(arguments, told, tmp_path):
    ended = ran(ROOT / "run.py", *arguments, cwd=tmp_path)
    assert ended.returncode != 0
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_traceback_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    command = [sys.executable, str(ROOT / "run.py"), "order=9"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "Traceback" in ended.stderr


@pytest.mark.slow
def test_a_wrong_config_is_found_without_torch(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['run.py', 'order=9']; import runpy\n"
        f"try: runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')\n"
        "except SystemExit as ended: print(ended.code, {'torch', 'lightning', 'datasets'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines()[-1] == "1 set()", ended.stderr
