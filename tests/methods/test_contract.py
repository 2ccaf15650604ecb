"""Every method keeps the same promises; a new YAML in conf/method is tested without a word here, and so is a
method of tests.support.seams."""

import hashlib
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

import cpt.adapters.export
from cpt.trainer import loop
from tests.conftest import ROOT
from tests.support import making
from tests.support.campaign import run_few
from tests.support.killing import KilledError, Killer
from tests.support.making import DROPOUT, ORDER
from tests.support.seams import SEAMS, chosen

METHODS = sorted(path.stem for path in ROOT.glob("conf/method/*.yaml")) + sorted(SEAMS)
LEARNING = [name for name in METHODS if name != "none"]
# One method of each kind of state; of promises that cost many runs, the others are kept in the campaign.
KINDS = {"none", "ncl", "joint", "das", "ewc", "derpp", "hat", "demix", "olora", "companions"}
WATCHED = ["monitor.every=4", "monitor.tokens=64"]
MOCL = ["method=sapt", "method.key=cosine", "method.query=encoder", "mask=migu", "replay=past"]


def of_each_kind(methods: list[str]) -> list:
    """The methods, of which those beside KINDS are asked for by `-m campaign`."""
    return run_few(methods, KINDS)


def bits(folder: Path) -> str:
    """A hash of everything that a run knows at its end."""
    stages = sorted((folder / "stages").glob("*.pt"))
    state = torch.load(stages[-1], weights_only=True) if stages else {}
    scores = json.loads((folder / "scores.json").read_text())
    hashed = hashlib.sha256(json.dumps([scores["nll"], scores["metrics"]]).encode())
    for name, value in sorted(state.items()):
        hashed.update(name.encode() + value.numpy().tobytes())
    return hashed.hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folders of uninterrupted runs, one per method."""
    return {}


@pytest.fixture
def uninterrupted(whole, small, start, tmp_path_factory):
    def run(method: str) -> Path:
        if method not in whole:
            whole[method] = tmp_path_factory.mktemp(method)
            start(small(*chosen(method), ORDER, *DROPOUT), whole[method])
        return whole[method]

    return run


@pytest.fixture
def module(small):
    """A method's module and its data, as a run makes them."""

    def build(*overrides: str):
        run = making.made(small(ORDER, *DROPOUT, *overrides))
        return run.module, run.data, run.plan.trainer.lightning

    return build


def test_there_are_methods():
    assert {"ncl", "one", "joint", "none"} <= set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_two_domains_are_learned(method, uninterrupted):
    scores = json.loads((uninterrupted(method) / "scores.json").read_text())
    assert scores["run"]["finished"]
    assert scores["domains"] == ["law", "food", "general"]
    assert all(isinstance(loss, float) and 0 < loss < 20 for row in scores["nll"] for loss in row)
    if method in LEARNING:
        assert scores["nll"][-1] != scores["nll"][0]


@pytest.mark.parametrize("method", METHODS)
def test_every_text_is_scored_by_known_parts(method, uninterrupted):
    scores = json.loads((uninterrupted(method) / "scores.json").read_text())
    if any(scores["parts"]):
        assert all(weights == {"base": 1.0} for weights in scores["parts"][0].values())
        for row in scores["parts"]:
            assert set(row) == set(scores["domains"])
            assert all(sum(weights.values()) == pytest.approx(1, abs=0.01) for weights in row.values())
            assert {part for weights in row.values() for part in weights} <= {"base", "law", "food"}
    learned = [name for name in scores["domains"] if name in scores["rows"]]
    told = [scores["parts"][-1].get(name) == {name: 1.0} for name in learned]
    assert scores["needs_domain"] == (any(scores["parts"]) and all(told))


@pytest.mark.parametrize("method", LEARNING)
def test_the_exported_model_is_that_of_the_last_domain(method, uninterrupted, module, monkeypatch):
    made, data, _ = module(*chosen(method))
    for domain in data:
        made.expand_to(domain)
    folder = uninterrupted(method)
    made.load_state_dict(torch.load(next((folder / "stages").iterdir()), weights_only=True))
    made.activate(len(data) - 1)
    monkeypatch.chdir(folder)
    loading = json.loads((folder / "scores.json").read_text())["loading"]
    names = {"transformers": transformers, "cpt": cpt, "peft": peft}
    loaded, wanted = eval(loading, names).eval(), made.model_for(len(data) - 1).eval()
    batch = next(iter(data.held_out.values())).ids(np.arange(4))
    ids = torch.as_tensor(batch)
    gates = {name for name, _ in wanted.named_parameters() if name.endswith("_gate.e")}  # closed for good
    assert {name for name, each in wanted.named_parameters() if not each.requires_grad} <= gates
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, wanted(input_ids=ids).logits)


@pytest.mark.parametrize("method", LEARNING)
def test_a_causal_model_is_learned(method, small_gpt2, start, tmp_path):
    few = ["trainer.steps=2", "trainer.probe_samples=4", "mask=migu", "replay=general"]
    start(small_gpt2(*chosen(method), ORDER, *few[: 3 if method == "replay" else 4]), tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["run"]["finished"] and scores["run"]["objective"] == "causal"
    assert all(0 < loss < 20 for row in scores["nll"] for loss in row)


@pytest.mark.parametrize("method", LEARNING)
def test_every_loss_term_is_finite_and_moves_something(method, module):
    made, data, options = module(*chosen(method))
    seen: dict[str, list[float]] = {}
    losses = made.losses

    def listened(batch):
        terms = losses(batch)
        for name, value in terms.items():
            seen.setdefault(name, []).append(value.item())
        return terms

    made.losses = listened
    for domain in data:
        before = {name: value.clone() for name, value in made.state_dict().items()}
        data.enter(domain)
        made.setup_stage(domain)
        loop.make_trainer(options, label="", steps=3).fit(made, datamodule=data)
        assert any(not torch.equal(before[name], value) for name, value in made.state_dict().items())
    assert "lm" in seen
    assert all(torch.tensor(values).isfinite().all() for values in seen.values())


@pytest.mark.parametrize("method", LEARNING)
def test_killed_and_started_again_it_ends_with_the_same_bits(
    method, uninterrupted, killing, small, start, tmp_path
):
    """Killed three times in the last domain: before a checkpoint, after one, and after the last step; and
    with looks at other text, which the other run has not."""
    last = "joint" if method == "joint" else "food"
    given = [*chosen(method), ORDER, *DROPOUT, *WATCHED]
    for step in (1, 3, 6):
        killing(Killer(step=step, domain=last))
        with pytest.raises(KilledError):
            start(small(*given), tmp_path)
    killing(None)
    start(small(*given), tmp_path)
    assert last in json.loads((tmp_path / "scores.json").read_text())["monitor"]
    assert bits(tmp_path) == bits(uninterrupted(method))


BOUNDED = ["monitor.every=2", "monitor.tokens=200", "budget.general=1e-3", "budget.past=1e-3"]


@pytest.mark.parametrize(
    "method",
    run_few([name for name in LEARNING if name not in ("one", "dga", "joint", "branched")], {"derpp"}),
)
def test_held_to_a_budget_it_goes_on_with_the_same_bits(method, killing, small, start, tmp_path):
    """Killed before a checkpoint, after one, and after the last step."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    given = [*chosen(method), ORDER, *DROPOUT, *BOUNDED]
    start(small(*given), whole)
    one = json.loads((whole / "scores.json").read_text())["monitor"]
    for step in sorted({1, min(3, one["food"]["steps"][-1]), one["food"]["steps"][-1] or 1}):
        killing(Killer(step=step, domain="food"))
        with pytest.raises(KilledError):
            start(small(*given), killed)
    killing(None)
    start(small(*given), killed)
    assert json.loads((killed / "scores.json").read_text())["monitor"] == one
    assert bits(killed) == bits(whole)


@pytest.mark.parametrize(
    "choices",
    [
        ["method=das", "mask=migu"],
        ["method=ewc", "mask=migu", "mask.migu.acts_on=frozen"],
        ["method=replay", "mask=migu", "mask.migu.acts_on=update"],
        ["method=derpp", "replay=general", "freeze.layers=1"],
        ["method=lora", "mask=migu", "replay=past"],
        ["method=adapter", "method.per_domain=true", "mask=migu", "mask.migu.acts_on=update"],
        ["method=demix", "routing@method.routing=posterior", "replay=general"],
        ["method=hat", "method.form=adapter", "mask=migu"],
        ["method=agem", "method.constraints=each", "mask=migu"],
        pytest.param(MOCL, marks=pytest.mark.campaign),
    ],
    ids=lambda choices: " ".join(choices),
)
def test_compositions_go_on_with_the_same_bits(choices, killing, small, start, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(small(*choices, ORDER, *DROPOUT), whole)
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small(*choices, ORDER, *DROPOUT), killed)
    killing(None)
    start(small(*choices, ORDER, *DROPOUT), killed)
    assert bits(killed) == bits(whole)


@pytest.mark.parametrize("precision", run_few(["bf16-mixed", "bf16-true"], ["bf16-true"]))
@pytest.mark.parametrize("method", of_each_kind(LEARNING))
def test_it_learns_in_16_bits(method, precision, small, start, tmp_path):
    few = ["trainer.steps=1", "trainer.probe_samples=4", f"trainer.precision={precision}"]
    start(small(*chosen(method), "mask=migu", ORDER, *DROPOUT, *few), tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["run"]["finished"] and all(0 < loss < 20 for row in scores["nll"] for loss in row)


@pytest.mark.parametrize("method", of_each_kind(METHODS))
@pytest.mark.parametrize("moment", run_few(["save_documents", "cleanup"], ["save_documents"]))
def test_killed_between_domains_it_ends_with_the_same_bits(
    method, moment, uninterrupted, monkeypatch, small, start, tmp_path
):
    rows = json.loads((uninterrupted(method) / "scores.json").read_text())["rows"]
    for number in range(len(rows)):
        with monkeypatch.context() as patched:
            patched.setattr(loop.RunDir, moment, dying(getattr(loop.RunDir, moment), at=number))
            with pytest.raises(KilledError):
                start(small(*chosen(method), ORDER, *DROPOUT), tmp_path)
    start(small(*chosen(method), ORDER, *DROPOUT), tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["rows"] == rows
    assert bits(tmp_path) == bits(uninterrupted(method))


def dying(commit, *, at: int):
    """A step of a commit that is carried out and then kills, for one row."""

    def step(folder, row, *args, **kwargs):
        commit(folder, row, *args, **kwargs)
        if row == at:
            raise KilledError

    return step


@pytest.mark.parametrize("method", METHODS)
def test_probes_and_evaluation_leave_no_trace(method, module):
    made, data, options = module(*chosen(method))
    trainer = loop.make_trainer(options, label="")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    modes = [each.training for each in made.modules()]
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in made.modules())
    trainer.validate(made, datamodule=data, verbose=False)
    first = [(nll.clone(), count.clone()) for nll, count in made.row().values()]
    loop.make_trainer(options, label="").validate(made, datamodule=data, verbose=False)
    for (nll, count), (again, counted) in zip(first, made.row().values(), strict=True):
        assert torch.equal(nll, again) and torch.equal(count, counted)
    after = made.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert modes == [each.training for each in made.modules()]
    assert all(parameter.grad is None for parameter in made.parameters())
    assert hooks == sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in made.modules())


@pytest.mark.parametrize("method", METHODS)
def test_the_state_goes_around(method, module):
    made, data, _ = module(*chosen(method))
    with torch.no_grad():
        for value in made.state_dict().values():
            value.add_(1) if value.is_floating_point() else value
    other, *_ = module(*chosen(method))
    other.load_state_dict(made.state_dict())
    for name, value in made.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_switching_domains_is_idempotent(method, module):
    made, data, _ = module(*chosen(method))
    for domain in data:
        made.activate(domain.index)
        once = {name: (value.clone(), value.requires_grad) for name, value in made.named_parameters()}
        made.activate(domain.index)
        for name, value in made.named_parameters():
            assert torch.equal(value, once[name][0]) and value.requires_grad == once[name][1]


@pytest.mark.parametrize("path", sorted(ROOT.glob("cpt/methods/*.py")), ids=lambda path: path.stem)
def test_only_the_base_class_touches_lightning(path):
    if path.stem not in ("base", "options", "__init__"):
        text = path.read_text().replace("def on_gradients_ready(", "")  # a hook of our own
        assert (ROOT / "conf" / "method" / path.name).with_suffix(".yaml").exists()
        assert "def on_" not in text and "_step(" not in text and "lightning" not in text
