"""What methods that add something to NCL have in common: at neutral strength they are it, bit for bit."""

import pytest
import torch

from tests.support.making import DROPOUT, ORDER, learned, made

STRONG = "optim.lr=0.05"
DAS = ["method.contrast=0", "method.general=null", "method.domains=false"]
CASES = {  # what it is compared with, what makes the method that, and what does not
    "das": ("ncl", DAS, ["method.contrast=1"]),
    "das gradient": (
        "ncl",
        [*DAS, "method.units=[heads,neurons,outputs,tokens]", "method.acts_on=gradient"],
        ["method.contrast=1"],
    ),
    "das frozen": ("ncl", [*DAS, "method.acts_on=frozen"], ["method.domains=true"]),
    "derpp": ("ncl", ["method.memory=20", "method.alpha=0", "method.beta=0"], ["method.beta=0.5"]),
    "ema": ("ncl", ["method.decay=0"], ["method.decay=0.5"]),
    "elle": (
        "ncl",
        ["method.neurons=1", "method.layers=0", "method.recovery=0", "method.prompt=0"],
        ["method.prompt=1"],
    ),
    "ewc": ("ncl", ["method.strength=0"], ["method.strength=5000"]),
    "hat": ("ncl", ["method.units=[]", "method.shared=trained"], ["method.units=[neurons]"]),
    "kd": ("ncl", ["method.strength=0"], ["method.strength=1"]),
    "l2 base": ("ncl", ["method.towards=base", "method.strength=0"], ["method.strength=1"]),
    "l2 previous": ("ncl", ["method.towards=previous", "method.strength=0"], ["method.strength=1"]),
    "merge": (
        "ncl",
        ["method.rule=task_arithmetic", "method.scale=1"],
        ["method.scale=0.5"],
    ),
    "merge slerp": ("ncl", ["method.rule=slerp", "method.share=1"], ["method.share=0.5"]),
    "lifelong_moe": (
        "ncl",
        ["method.experts=0", "method.strength=0", "method.balance=0", "method.dense=trained"],
        ["method.strength=1"],
    ),
    "mas": ("ncl", ["method.strength=0"], ["method.strength=1"]),
    "migu": ("ncl", ["method.mask.threshold=0"], ["method.mask.threshold=0.7"]),
    "migu frozen": (
        "ncl",
        ["method.mask.threshold=0", "method.mask.acts_on=frozen"],
        ["method.mask.threshold=0.7"],
    ),
    "migu fisher": (
        "ncl",
        ["method.mask.threshold=0", "method.mask.importance=fisher"],
        ["method.mask.threshold=0.7"],
    ),
    "migu by mass": (
        "ncl",
        ["method.mask.threshold=null", "method.mask.mass=1"],
        ["method.mask.threshold=null", "method.mask.mass=0.5"],
    ),
    "migu random": (
        "ncl",
        ["method.mask.threshold=0", "method.mask.importance=random"],
        ["method.mask.threshold=0.7"],
    ),
    "migu update": (
        "ncl",
        ["method.mask.threshold=0", "method.mask.acts_on=update"],
        ["method.mask.threshold=0.7"],
    ),
    "moelora": ("lora", ["method.experts=1"], ["method.experts=2"]),
    "nlora": ("inclora", ["method.strength=0", STRONG], ["method.strength=1", STRONG]),
    "olora": ("inclora", ["method.strength=0", STRONG], ["method.strength=1", STRONG]),
    "osf": ("ncl", ["method.protected=0", "method.growth=0"], ["method.protected=0.5"]),
    "recadam": ("ncl", ["method.strength=0", "method.annealed=false"], ["method.strength=1"]),
    "replay": ("ncl", ["method.mixture.past=0"], ["method.mixture.past=0.5"]),
    "reptile": ("ncl", ["method.share=1"], ["method.share=0.5"]),
    "si": ("ncl", ["method.strength=0"], ["method.strength=1"]),
    "wise_ft": ("ncl", ["method.previous=0"], ["method.previous=0.5"]),
}


@pytest.fixture(scope="module")
def references():
    """The weights at the end of the plain runs, by method."""
    return {}


@pytest.fixture
def ends(small, start, tmp_path_factory):
    """The weights at the end of a run of a method."""
    return lambda method, *options: learned(
        start, small(f"method={method}", ORDER, *DROPOUT, *options), tmp_path_factory.mktemp(method)
    )


@pytest.mark.parametrize("case", CASES)
def test_at_neutral_strength_it_is_the_plain_method_bit_for_bit(case, ends, references):
    plain, neutral, strong = CASES[case]
    if plain not in references:
        references[plain] = ends(plain, *[STRONG] * (plain == "inclora"))
    for options, equal in ((neutral, True), ([*neutral, *strong], False)):
        found = ends(case.partition(" ")[0], *options)
        assert references[plain].keys() <= found.keys()
        both = [torch.equal(value, found[name]) for name, value in references[plain].items()]
        assert all(both) == equal, options


@pytest.mark.parametrize("options", [["kd"], ["ema", "method.decay=0.3"], ["wise_ft", "method.previous=0.3"]])
def test_frozen_embeddings_stay(options, small):
    method, *values = options
    work = made(small(f"method={method}", ORDER, "freeze.embeddings=true", *values))
    before = work.weights()
    work.learn(0)
    frozen = {id(p) for p in work.module.frozen}
    held = {name for name, p in work.module.model.named_parameters() if id(p) in frozen}
    assert held
    assert all(torch.equal(value, before[name]) for name, value in work.weights().items() if name in held)
    assert any(not torch.equal(value, before[name]) for name, value in work.weights().items())
