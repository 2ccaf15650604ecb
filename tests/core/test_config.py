"""Configs: what their choices make, how a run is named and identified, and errors that end in one line."""

import re
import subprocess
import sys

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cpt.core.config import identity as identity_of
from cpt.core.config import list_differences, plain_config
from cpt.core.errors import readable, reason
from cpt.core.naming import LONGEST, name_run
from cpt.optim.schedulers import Progress
from cpt.trainer.lightning import make_trainer
from cpt.trainer.plan import read_sections
from tests.conftest import ROOT

CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml"))


def choices(group):
    return [name for of, name in CHOICES if of == group]


def identity(cfg):
    return identity_of(plain_config(cfg))


@pytest.mark.slow
@pytest.mark.parametrize("group", ["model", "method", "replay", "domains"])
def test_every_choice_is_called_as_its_file(group, composed):
    assert [composed(f"{group}={name}")[group].name for name in choices(group)] == choices(group)


@pytest.mark.parametrize("choice", choices("schedule"))
def test_every_schedule_instantiates_and_warms_up(choice, composed):
    policy = read_sections(composed(f"schedule={choice}")).schedule
    factors = [policy(Progress.alone(step, steps=100)) for step in range(100)]
    assert 0 < factors[0] < factors[5] <= max(factors) <= 1 and min(factors) >= 0


@pytest.mark.parametrize("choice", choices("optim"))
def test_every_optimizer_instantiates(choice, composed):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    chosen = read_sections(composed(f"optim={choice}")).optim
    optimizer = chosen.load()([weight], **chosen.arguments)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert (weight < 1).all()


@pytest.mark.parametrize("choice", choices("strategy"))
def test_every_strategy_makes_a_trainer(choice, composed):
    options = read_sections(composed(f"strategy={choice}", "trainer.accelerator=cpu")).trainer
    assert make_trainer(options.lightning, label="").world_size == {"single": 1}.get(choice, 2)


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
    long = [name_run([f"domains.root={'x' * 200}{end}"], "ncl", 0, 0) for end in "ab"]
    assert len(set(long)) == 2 and max(map(len, long)) < LONGEST + 20


def test_a_default_that_is_given_outright_is_not_in_the_name(composed):
    plain = name_run([], "ncl", 0, 0)
    for given in ("model=tiny_modernbert", "mask=none", "trainer.steps=250", "schedule.warmup=0.10"):
        assert name_run([given], "ncl", 0, 0) == plain
    for given in ("model=tiny_gpt2", "mask=migu", "trainer.steps=251"):
        assert name_run([given], "ncl", 0, 0) == f"{plain}_{given.replace('=', '-').replace('_', '.')}"
    place = "routing@method.routing"  # a group where the default has no such place
    assert name_run([f"{place}=last"], "demix", 0, 0) == "demix_order-0_seed-0_routing.method.routing-last"


def test_what_carries_a_run_out_does_not_identify_it(composed):
    assert identity(composed("strategy=ddp", "logger=none", "name=x")) == identity(composed())
    differ = list_differences(identity(composed()), identity(composed("trainer.steps=7", "seed=1")))
    assert differ == ["seed: 0 -> 1", "trainer.steps: 250 -> 7"]


def test_what_holds_a_budget_is_part_of_a_run_only_where_there_is_one(composed):
    before = composed()
    before.budget.steer = "rate"  # as it was by default
    assert identity(before) == identity(composed())
    before.budget.past = 0.1
    differ = list_differences(identity(before), identity(composed("budget.past=0.1")))
    assert differ == ["budget.steer: rate -> line"]


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ("", 2e-3),
        ("model.checkpoint=somewhere", 1e-4),
        ("+method.rate=4", 8e-3),
        ("optim=sgd +method.rate=4", 8e-3),
        ("+method.rate=4 model.checkpoint=somewhere", 4e-4),
        ("+method.rate=4 optim.lr=0.5", 0.5),
    ],
)
def test_a_method_or_a_checkpoint_has_a_rate_of_its_own(given, rate, composed):
    assert composed(*given.split()).optim.lr == rate


# Errors


def test_an_error_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as ended, readable(errors_only=True):
        raise ValueError("first line\n  second line")
    assert ended.value.code == 1 and capsys.readouterr().err == "cpt: first line second line\n"
    with pytest.raises(ValueError, match="kept"), readable(errors_only=False):
        raise ValueError("kept")


def test_the_reason_of_a_failed_instantiation_is_the_cause():
    given = {"steps": 0, "epochs": None, "tokens": None, "batch_size": 1}
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "cpt.data.options.Budget", **given})
    assert reason(raised.value).startswith("the budget of a domain is trainer.steps=0")


def failing(error):
    def fails():
        raise error

    return fails


def resolved():
    try:
        raise MemoryError
    except MemoryError as error:
        raise ValueError("variant cannot be resolved") from error


FAILING = {
    "python": lambda: bytearray(1 << 62),
    "torch": lambda: torch.empty(1 << 50),
    "oneDNN": failing(RuntimeError("could not create a primitive")),
    "a thread": failing(RuntimeError("can't start new thread")),
    "a gpu": failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    "what became of it on the way up": resolved,
}


@pytest.mark.parametrize("what", FAILING)
def test_an_allocation_that_fails_is_one_line_about_memory(what, capsys):
    with pytest.raises(SystemExit) as ended, readable(errors_only=True):
        FAILING[what]()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert re.fullmatch(r"cpt: memory does not suffice \(.+\); the same command .+\n", said)


def test_what_is_no_want_of_memory_is_raised(capsys):
    with pytest.raises(RuntimeError, match="shapes"), readable(errors_only=True):
        raise RuntimeError("shapes differ")
    with pytest.raises(MemoryError), readable(errors_only=False):
        raise MemoryError
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_wrong_config_is_found_without_torch(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['run.py', 'order=9']; import runpy\n"
        f"try: runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')\n"
        "except SystemExit as ended: print(ended.code, {'torch', 'lightning', 'datasets'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "1 set()" and "order=9" in ended.stderr, ended.stderr
