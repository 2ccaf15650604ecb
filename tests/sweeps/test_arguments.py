"""What Hydra is given of a sweep's arguments."""

import re

import pytest

from cpt.cli import check_choices, leave_to_jobs


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("-m method=lora,olora method.rate=1", "-m method=lora,olora method.rate=choice(1)"),
        (
            "--multirun method=lora,olora method.targets=[query,value]",
            "--multirun method=lora,olora method.targets=choice([query,value])",
        ),
        ("-m method=choice(lora,olora) method.rate=1", "-m method=choice(lora,olora) method.rate=choice(1)"),
        ("-m mask=migu,mofo mask.migu.threshold=0.5", "-m mask=migu,mofo mask.migu.threshold=choice(0.5)"),
    ],
)
def test_options_of_a_swept_group_are_left_to_the_jobs(given, taken):
    assert leave_to_jobs(given.split()) == taken.split()


@pytest.mark.parametrize(
    "given",
    [
        "method=lora method.rate=1",
        "-m method=lora method.rate=1",
        "-m method=lora,olora seed=1 trainer.steps=2 +method.mine=1 ~method.rate",
        "-m method=lora,olora method.rate=1,3",
        "-m method=lora,olora method.rate= method.=(",
        "-m seed=0,1 method.rate=1",
    ],
)
def test_all_else_stays_as_it_is(given):
    assert leave_to_jobs(given.split()) == given.split()


@pytest.mark.parametrize(
    "given",
    [
        "optim=[null]",
        "optim=5",
        "experiment=null",
        "mask=true",
        "mask=[migu,5]",
        "+schedule=[[linear]]",
        "schedule=[{}]",
    ],
)
def test_a_choice_that_is_no_name_is_refused(given):
    with pytest.raises(ValueError, match=rf"{re.escape(given)}; allowed: a choice of conf/\w+, or a list"):
        check_choices(["seed=1", given])


@pytest.mark.parametrize(
    "given",
    [
        "mask=[migu,mofo]",
        "order=[law,food]",
        "order=[1,2]",
        "-m",
        "a=(",
        "optim=adamw",
        "~experiment",
        "optim={lr: 1}",
        "mask=migu,mofo",
    ],
)
def test_all_others_are_left_to_hydra(given):
    check_choices([given])
