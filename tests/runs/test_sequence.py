"""A run from its config to its folder."""

import contextlib
import gc
import json
import math
import weakref

import pytest
import torch
import transformers  # noqa: F401  (for an expression that is evaluated)
from filelock import FileLock
from lightning.pytorch.callbacks import Callback
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from cpt.core.heartbeat import Heartbeat, ProcessId, utc_now
from cpt.trainer.run_dir import RunDir
from tests.conftest import SHARED

ORDER = "order=[law,food]"


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def done(finished, small, start):
    """The folder of a finished run."""
    start(small(ORDER), finished)
    return finished


def scores_of(folder):
    return json.loads((folder / "scores.json").read_text())


def test_the_scores_keep_the_contract(done):
    scores = scores_of(done)
    assert scores["version"] == 3
    assert scores["domains"] == ["law", "food", "general"]
    assert scores["rows"] == ["base", "law", "food"]
    assert [len(row) for row in scores["nll"]] == [3, 3, 3]
    assert all(len(scores[name]) == 3 for name in ("tokens", "bytes", "scored"))
    seconds = [each for stages in scores["phases"].values() for each in stages.values()]
    assert 0 < scores["seconds"] == pytest.approx(sum(seconds))
    assert len(scores["config_digest"]) == 16
    for metric in ("ZS", "CPT", "LC", "FG", "FWT_gem", "BWT_gem", "general_drift"):
        low, high = scores["metrics"][metric]["interval"]["nats"]
        assert low <= scores["metrics"][metric]["nats"] <= high
    nll = scores["nll"]
    assert scores["metrics"]["FG"]["nats"] == pytest.approx(nll[2][0] - nll[1][0])
    assert scores["objective"] == pytest.approx((math.exp(nll[2][0]) + math.exp(nll[2][1])) / 2)


def test_bytes_and_tokens_are_those_of_the_held_out_text(done, corpora):
    scores = scores_of(done)
    assert scores["texts"]["law"]["documents"] == {"train": 108, "valid": 6, "test": 6}
    assert scores["bytes"][0] == scores["texts"]["law"]["bytes"]["test"]
    lines = (corpora / "law" / "all.txt").read_text().splitlines()
    assert sum(scores["texts"]["law"]["bytes"].values()) == sum(len(line.encode()) for line in lines)


def test_the_folder_holds_what_a_reader_looks_for(done):
    for name in ("config.yaml", "scores.json", "report.md", "report.html", "model/model.safetensors"):
        assert (done / name).stat().st_size > 0
    assert not (done / "checkpoints").exists()
    assert [path.name for path in sorted((done / "stages").iterdir())] == ["002.pt"]


def test_the_scores_say_what_the_method_costs_and_how_its_model_is_loaded(done, monkeypatch):
    scores = scores_of(done)
    trained = sum(each.numel() for each in AutoModelForMaskedLM.from_pretrained(done / "model").parameters())
    assert (scores["trained"], scores["stored"]) == ([0, trained, trained], [0, 0, 0])
    assert scores["parts"] == [{}, {}, {}] and not scores["needs_domain"]
    monkeypatch.chdir(done)
    assert scores["loading"] == 'transformers.ModernBertForMaskedLM.from_pretrained("model")'
    assert eval(scores["loading"]).config.model_type == "modernbert"


def test_the_model_loads_with_plain_transformers(done):
    model = AutoModelForMaskedLM.from_pretrained(done / "model")
    tokenizer = AutoTokenizer.from_pretrained(done / "model")
    state = torch.load(done / "stages" / "002.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[f"model.{name}"]), name
    batch = tokenizer("the court <mask> that a party", return_tensors="pt")
    assert model(**batch).logits.shape[-1] == len(tokenizer)


def test_a_finished_run_is_not_learned_again(done, small, start):
    signs = (".lock", "progress.json")  # of the start
    files = [path for path in done.rglob("*") if path.is_file() and path.name not in signs]
    before = {path: path.stat().st_mtime_ns for path in files}
    objective = start(small(ORDER), done)
    assert objective == scores_of(done)["objective"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_folder_of_another_config_is_refused(done, small, start):
    with pytest.raises(ValueError, match=r"another config \(seed: 0 -> 1\).*choose another name"):
        start(small(ORDER, "seed=1"), done)
    assert scores_of(done)["run"]["finished"]


def test_a_second_start_is_told_who_is_at_work(small, start, tmp_path):
    Heartbeat(state="running", began=utc_now()).write(tmp_path)
    own = ProcessId.current()
    said = rf"at work in {tmp_path} \(host {own.host}, process {own.pid}\); wait for it"
    with FileLock(tmp_path / ".lock"), pytest.raises(ValueError, match=said):
        start(small(ORDER), tmp_path)


@pytest.mark.parametrize("held", [True, False])
def test_a_start_that_is_refused_leaves_the_folder_of_a_younger_one(held, tmp_path):
    """Both begin in a new folder; the other has its config and its lock when this one ends."""
    place, other = RunDir(tmp_path / "run"), contextlib.ExitStack()
    with pytest.raises(ValueError, match="refused"), place.removed_if_rejected():
        place.write_config({"name": "x"})
        if held:
            other.enter_context(FileLock(place.path / ".lock"))
        raise ValueError("refused")
    assert place.config.exists() == held
    assert not (place.path / "progress.json").exists()
    other.close()


def test_the_same_seed_gives_the_same_bits_and_another_does_not(done, small, start, tmp_path):
    start(small(ORDER), tmp_path / "same")
    start(small(ORDER, "seed=1"), tmp_path / "other")
    assert scores_of(tmp_path / "same")["nll"] == scores_of(done)["nll"]
    assert scores_of(tmp_path / "other")["nll"][0] == scores_of(done)["nll"][0]
    assert scores_of(tmp_path / "other")["nll"][1] != scores_of(done)["nll"][1]


def test_a_stages_optimizer_is_gone_before_the_next_one(small, start, killing, tmp_path):
    """Its state is twice the weights; Python looks for what refers to itself much later, if ever."""
    states, alive = [], []

    class Spy(Callback):
        def on_train_start(self, trainer, module):
            alive.append(sum(state() is not None for state in states))

        def on_train_end(self, trainer, module):
            states.extend(weakref.ref(each["exp_avg"]) for each in trainer.optimizers[0].state.values())

    killing(Spy())
    gc.disable()
    try:
        start(small("order=[law,food,space]"), tmp_path)
    finally:
        gc.enable()
    assert alive == [0, 0, 0] and len(states) > 3


def test_stages_are_kept_on_request(small, start, tmp_path):
    start(small(ORDER, "keep_stages=true"), tmp_path)
    assert [path.name for path in sorted((tmp_path / "stages").iterdir())] == ["001.pt", "002.pt"]


def broken_at_second_save(save):
    """torch.save for the state after the first domain; the end for that after the second."""
    calls = []

    def step(state, path, *args, **kwargs):
        if not isinstance(state, dict) or "pytorch-lightning_version" in state:
            return save(state, path, *args, **kwargs)
        calls.append(path)
        if len(calls) == 2:
            raise RuntimeError("killed")
        return save(state, path, *args, **kwargs)

    return step


def test_joint_sees_all_domains_at_once_and_one_starts_from_the_base(done, small, start, tmp_path):
    start(small(ORDER, "method=joint"), tmp_path / "joint")
    start(small(ORDER, "method=one"), tmp_path / "one")
    start(small("order=[food]"), tmp_path / "alone")
    assert scores_of(tmp_path / "joint")["rows"] == ["base", "joint"]
    assert scores_of(tmp_path / "one")["nll"][1] == scores_of(done)["nll"][1]
    assert scores_of(tmp_path / "one")["nll"][2][1:] == scores_of(tmp_path / "alone")["nll"][1]
    assert scores_of(done)["nll"][2] != scores_of(tmp_path / "one")["nll"][2]


def test_a_causal_model(small_gpt2, start, tmp_path):
    start(small_gpt2(ORDER), tmp_path)
    scores = scores_of(tmp_path)
    assert scores["run"]["objective"] == "causal"
    assert scores["scored"] == [tokens - math.ceil(tokens / 16) for tokens in scores["tokens"]]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_a_local_checkpoint_is_learned_as_it_is(done, small, start, tmp_path):
    """The folder that a run exports is a checkpoint for the next one; hub names go the same way."""
    start(small(ORDER, f"model.checkpoint={done / 'model'}"), tmp_path)
    assert scores_of(tmp_path)["nll"][0] == scores_of(done)["nll"][-1]


def test_a_checkpoint_that_is_not_there(small, start, tmp_path):
    with pytest.raises(ValueError, match="model.checkpoint=nobody/nothing is neither a folder nor a name"):
        start(small(ORDER, "model.checkpoint=nobody/nothing"), tmp_path)


def test_a_sample_longer_than_the_model(small, start, tmp_path):
    with pytest.raises(ValueError, match="model.length=600; allowed: 2 to 512, the positions"):
        start(small(ORDER, "model.length=600"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [(["trainer.steps=null", "trainer.epochs=1"], None), (["trainer.steps=null", "trainer.tokens=700"], 6)],
)
def test_budgets_in_epochs_and_tokens(overrides, steps, small, start, tmp_path):
    from cpt.trainer import loop

    seen = []
    trainer = loop.make_trainer
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            loop, "make_trainer", lambda *args, **kwargs: (seen.append(kwargs), trainer(*args, **kwargs))[1]
        )
        start(small("order=[law]", *overrides), tmp_path)
    (made,) = [kwargs["steps"] for kwargs in seen if "steps" in kwargs]
    assert made == steps if steps else made > 6


def test_a_batch_that_cannot_be_shared_out(small, start, tmp_path):
    with pytest.raises(
        ValueError, match="trainer.batch_size=8 is not a multiple of trainer.accumulate_grad_batches=3"
    ):
        start(small(ORDER, "trainer.accumulate_grad_batches=3"), tmp_path)


def test_accumulated_parts_learn_what_the_whole_batch_does(done, small, start, tmp_path):
    start(small(ORDER, "trainer.accumulate_grad_batches=4"), tmp_path)
    for row, whole in zip(scores_of(tmp_path)["nll"], scores_of(done)["nll"], strict=True):
        assert row == pytest.approx(whole, rel=1e-4)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the das6-mini benchmark beside the checkout")
def test_the_six_domain_benchmark(small, start, tmp_path, composed, cache):
    root = SHARED / "data" / "das6-mini"
    few = ["order=[phone,restaurant]", "domains.general=null", "model.base.steps=2", "trainer.steps=2"]
    start(
        composed("domains=das6", f"domains.root={root}", f"cache_dir={cache}", "logger=none", *few), tmp_path
    )
    assert scores_of(tmp_path)["texts"]["phone"]["documents"] == {"train": 7654, "valid": 395, "test": 430}
