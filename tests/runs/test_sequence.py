"""Runs from config to folder: one that begins with what another has learned, that measures more of the matrix
later, or whose modules lie on disk."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers  # noqa: F401  (for an expression that is evaluated)
from transformers import AutoModelForMaskedLM

from cpt.adapters.domain_store import DomainParams
from cpt.trainer import stage
from cpt.trainer.loop import ContinualTrainer
from tests.runs.reading import killed, same_state, scores_of, state_of, times, told_by
from tests.support.campaign import run_few
from tests.support.kill_callback import KilledError
from tests.support.method_fixtures import build_method_fixture

ORDER = "order=[law,food]"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def done(place, small, start):
    if not (place / "run").exists():
        start(small(ORDER), place / "run")
    return place / "run"


def test_the_scores_keep_the_contract_beside_a_plain_model(done, corpora, monkeypatch):
    scores = told_by(done)
    assert scores["version"] == 1 and len(scores["config_hash"]) == 16
    assert (scores["domains"], scores["rows"]) == (["law", "food", "general"], ["base", "law", "food"])
    sizes = [scores[name] for name in ("tokens", "bytes", "scored")]
    assert [len(row) for row in scores["nll"]] == [3] * 3 == [len(size) for size in sizes]
    seconds = [each for stages in scores["phases"].values() for each in stages.values()]
    assert 0 < scores["seconds"] == pytest.approx(sum(seconds))
    for metric in ("ZS", "CPT", "LC", "FG", "FWT_gem", "BWT_gem", "general_drift"):
        low, high = scores["metrics"][metric]["interval"]["nats"]
        assert low <= scores["metrics"][metric]["nats"] <= high
    nll = scores["nll"]
    assert scores["metrics"]["FG"]["nats"] == pytest.approx(nll[2][0] - nll[1][0])
    assert scores["texts"]["law"]["documents"] == {"train": 108, "valid": 6, "test": 6}
    assert scores["bytes"][0] == scores["texts"]["law"]["bytes"]["test"]
    lines = (corpora / "law" / "all.txt").read_text().splitlines()
    assert sum(scores["texts"]["law"]["bytes"].values()) == sum(len(line.encode()) for line in lines)
    model, state = AutoModelForMaskedLM.from_pretrained(done / "model"), state_of(done)
    trained = sum(each.numel() for each in model.parameters())
    assert (scores["trained"], scores["stored"]) == ([0, trained, trained], [0, 0, 0])
    assert scores["modules"] == [{}, {}, {}] and not scores["needs_domain"]
    monkeypatch.chdir(done)
    assert eval(scores["loading"]).config.model_type == "modernbert"
    for name in ("config.yaml", "report.md", "report.html"):
        assert (done / name).stat().st_size > 0
    assert not (done / "checkpoints").exists()
    assert {path.name for path in (done / "stages").iterdir()} == {"002.pt", "002.1.linked"}
    (weights,) = (done / "stages").glob("*.linked/*")  # which are on the disk once
    assert weights.samefile(done / "model" / "model.safetensors")
    assert (done / "stages" / "002.pt").stat().st_size < weights.stat().st_size / 10
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in model.state_dict().items())


def test_a_finished_run_is_not_learned_again_and_a_folder_of_another_config_is_refused(done, small, start):
    before = times(done)
    assert start(small(ORDER), done) == told_by(done)["optimized_metric"] and times(done) == before
    with pytest.raises(ValueError, match=r"another config \(seed: 0 -> 1\).*choose another name"):
        start(small(ORDER, "seed=1"), done)


def test_joint_sees_all_domains_at_once_and_one_starts_from_the_base(done, small, start, tmp_path):
    start(small(ORDER, "method=joint"), tmp_path / "joint")
    start(small(ORDER, "method=one"), tmp_path / "one")
    start(small("order=[food]"), tmp_path / "alone")
    assert told_by(tmp_path / "joint")["rows"] == ["base", "joint"]
    one, alone, whole = (told_by(each)["nll"] for each in (tmp_path / "one", tmp_path / "alone", done))
    assert one[1] == whole[1] and one[2] != whole[2] and one[2][1:] == alone[1]


def test_a_checkpoint_or_a_run_is_the_base_of_another(done, small, small_gpt2, start, tmp_path):
    other = tmp_path / "other"
    start(small(ORDER, "seed=1"), other)
    given = ["order=[space]", "trainer.steps=1", f"model.name_or_path={done / 'model'}"]
    start(small(*given), tmp_path / "model")
    assert told_by(tmp_path / "model")["nll"][0][-1] == told_by(done)["nll"][-1][-1]
    further = small("order=[space]", "method=ewc", f"init_from={done}")
    start(further, tmp_path / "second")
    first, second = scores_of(done), scores_of(tmp_path / "second")
    assert second.matrix[0, -1] == pytest.approx(first.matrix[-1, -1], abs=1e-6)
    assert second.run["model"] == f"{first.run['model']} from run" and second.run["method"] == "ewc"
    start(further, tmp_path / "second")  # finished already
    with pytest.raises(ValueError, match=r"with other contents \(model.safetensors"):
        start(small("order=[space]", "method=ewc", f"init_from={other}"), tmp_path / "second")
    with pytest.raises(ValueError, match="causal"):
        start(small_gpt2(ORDER, f"init_from={done}"), tmp_path / "run")
    with pytest.raises(ValueError, match="is invalid: no finished run"):
        start(small("init_from=no"), tmp_path / "run")
    shutil.copytree(done, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="init_from=.* is invalid: model/model.safetensors differs.*Allowed"):
        start(small("order=[space]", f"init_from={tmp_path / 'damaged'}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


THREE = "order=[law,food,space]"
FEW = [THREE, "eval.rows=last", "eval.columns=seen"]


@pytest.fixture
def whole(start, small, tmp_path):
    start(small(THREE), tmp_path / "whole")
    return scores_of(tmp_path / "whole")


def test_a_policy_that_is_widened_fills_what_is_missing_also_after_a_kill(
    whole, start, small, tmp_path, monkeypatch
):
    start(small(*FEW, "save_all_stages=true"), tmp_path / "few")
    few = scores_of(tmp_path / "few")
    assert few.measured(1) == ["law", "general"] and few.measured(2) == ["food", "general"]
    assert few.measured(0) == few.measured(3) == whole.domains
    there = ~np.isnan(few.matrix)
    assert np.array_equal(few.matrix[there], whole.matrix[there]) and there.sum() == 12
    assert few.metrics["LC"] == whole.metrics["LC"] and few.metrics["FWT_zs"]["nats"] is None
    save, saved = ContinualTrainer.save_scores, []

    def dying(self):
        save(self)
        saved.append(len(saved))
        if len(saved) == 1:
            raise KilledError

    monkeypatch.setattr(ContinualTrainer, "save_scores", dying)
    with pytest.raises(KilledError):
        start(small(THREE), tmp_path / "few")
    start(small(THREE), tmp_path / "few")
    assert len(saved) == 2  # the first start filled one row, the second the other
    widened = scores_of(tmp_path / "few")
    assert widened.nll == whole.nll and widened.metrics == whole.metrics
    start(small(*FEW), tmp_path / "unkept")  # whose stages' weights are gone
    before = scores_of(tmp_path / "unkept").nll
    start(small(THREE), tmp_path / "unkept")
    assert scores_of(tmp_path / "unkept").nll == before


def test_so_many_tokens_of_each_text_are_the_same_rows_for_every_stage(whole, start, small, tmp_path):
    rows = {
        n: build_method_fixture(small(THREE, f"eval.max_tokens={n}")).data.scored_rows("law")
        for n in (64, 128, 10**6)
    }
    assert set(rows[64]) < set(rows[128]) < set(rows[10**6]) and list(rows[128]) == sorted(rows[128])
    start(small(THREE, "eval.max_tokens=64"), tmp_path / "few")
    few = scores_of(tmp_path / "few")
    assert all(part < full for part, full in zip(few.scored, whole.scored, strict=True))
    assert few.bytes == whole.bytes and few.tokens == whole.tokens and few.nll != whole.nll


METHODS = ["demix", "demix method.start=previous routing@method.routing=posterior", "hat", "olora"]
METHODS += ["adapter method.per_domain=true", "prompt method.per_domain=false"]
OPTIONS = ["order=[food,law,space]", "trainer.steps=2", "trainer.checkpoint_every=1", "save_all_stages=true"]


def assert_alike(one: Path, other: Path) -> None:
    scores, expected = told_by(one), told_by(other)
    assert all(scores[name] == expected[name] for name in ("rows", "nll", "metrics", "stored", "modules"))
    assert all(same_state(state_of(one, stage), state_of(other, stage)) for stage in range(3))


def mapped(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return "/stages/" in line
    return False


@pytest.mark.slow
@pytest.mark.parametrize("method", run_few(METHODS, ["demix"]))
def test_what_rests_on_disk_is_what_rests_in_memory(start, small, killing, tmp_path, monkeypatch, method):
    rested, rest = [], stage.map_stored
    options = [*f"method={method}".split(), *OPTIONS]

    def watched(module, path):
        rest(module, path)
        for stored in (each for each in module.modules() if isinstance(each, DomainParams)):
            rested.append([mapped(each) for each in stored._buffers.values()])

    start(small(*options, "modules.storage=memory"), tmp_path / "memory")
    monkeypatch.setattr(stage, "map_stored", watched)
    on_disk = small(*options, "modules.storage=disk")
    killed(start, killing, on_disk, tmp_path / "disk", step=1, domain="space")
    start(on_disk, tmp_path / "disk")
    assert_alike(tmp_path / "disk", tmp_path / "memory")
    assert len(rested) >= 3 and all(each and all(each) for each in rested)
