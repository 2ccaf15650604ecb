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
from tests.runs.reading import read_scores, same_state, scores_of, start_and_kill, state_of, times
from tests.support.campaign import run_few
from tests.support.kill_callback import KilledError
from tests.support.method_fixtures import build_method_fixture

ORDER = "order=[law,food]"


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def finished_run(shared_folder, small, start):
    if not (shared_folder / "run").exists():
        start(small(ORDER), shared_folder / "run")
    return shared_folder / "run"


def test_the_scores_keep_the_contract_beside_a_plain_model(finished_run, corpora, monkeypatch):
    scores = read_scores(finished_run)
    assert scores["version"] == 1 and len(scores["config_hash"]) == 16
    assert (scores["domains"], scores["rows"]) == (["law", "food", "general"], ["base", "law", "food"])
    sizes = [scores[name] for name in ("tokens", "bytes", "scored")]
    assert [len(row) for row in scores["nll"]] == [3] * 3 == [len(size) for size in sizes]
    seconds = sum(sum(stages.values()) for stages in scores["phases"].values())
    assert 0 < scores["seconds"] == pytest.approx(seconds)

    for metric in ("ZS", "CPT", "LC", "FG", "FWT_gem", "BWT_gem", "general_drift"):
        low, high = scores["metrics"][metric]["interval"]["nats"]
        assert low <= scores["metrics"][metric]["nats"] <= high

    nll = scores["nll"]
    assert scores["metrics"]["FG"]["nats"] == pytest.approx(nll[2][0] - nll[1][0])
    assert scores["texts"]["law"]["documents"] == {"train": 108, "valid": 6, "test": 6}
    assert scores["bytes"][0] == scores["texts"]["law"]["bytes"]["test"]
    lines = (corpora / "law" / "all.txt").read_text().splitlines()
    assert sum(scores["texts"]["law"]["bytes"].values()) == sum(len(line.encode()) for line in lines)

    model = AutoModelForMaskedLM.from_pretrained(finished_run / "model")
    state = state_of(finished_run)
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert (scores["trained"], scores["stored"]) == ([0, trained, trained], [0, 0, 0])
    assert scores["modules"] == [{}, {}, {}] and not scores["needs_domain"]

    monkeypatch.chdir(finished_run)
    assert eval(scores["loading"]).config.model_type == "modernbert"
    for name in ("config.yaml", "report.md", "report.html"):
        assert (finished_run / name).stat().st_size > 0

    assert not (finished_run / "checkpoints").exists()
    assert {path.name for path in (finished_run / "stages").iterdir()} == {"002.pt", "002.1.linked"}
    (weights,) = (finished_run / "stages").glob("*.linked/*")  # which are on the disk once
    assert weights.samefile(finished_run / "model" / "model.safetensors")
    assert (finished_run / "stages" / "002.pt").stat().st_size < weights.stat().st_size / 10
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in model.state_dict().items())


def test_a_finished_run_is_not_learned_again_and_a_folder_of_another_config_is_refused(
    finished_run, small, start
):
    before = times(finished_run)
    assert start(small(ORDER), finished_run) == read_scores(finished_run)["optimized_metric"]
    assert times(finished_run) == before
    with pytest.raises(ValueError, match=r"another config \(seed: 0 -> 1\).*choose another name"):
        start(small(ORDER, "seed=1"), finished_run)


def test_joint_sees_all_domains_at_once_and_one_starts_from_the_base(finished_run, small, start, tmp_path):
    start(small(ORDER, "method=joint"), tmp_path / "joint")
    start(small(ORDER, "method=one"), tmp_path / "one")
    start(small("order=[food]"), tmp_path / "alone")
    assert read_scores(tmp_path / "joint")["rows"] == ["base", "joint"]
    nll_of_one, nll_of_food, nll = (
        read_scores(run)["nll"] for run in (tmp_path / "one", tmp_path / "alone", finished_run)
    )
    assert nll_of_one[1] == nll[1] and nll_of_one[2] != nll[2] and nll_of_one[2][1:] == nll_of_food[1]


def test_a_checkpoint_or_a_run_is_the_base_of_another(finished_run, small, small_gpt2, start, tmp_path):
    other_run = tmp_path / "other"
    start(small(ORDER, "seed=1"), other_run)

    # The exported model as a checkpoint.
    options = ["order=[space]", "trainer.steps=1", f"model.name_or_path={finished_run / 'model'}"]
    start(small(*options), tmp_path / "model")
    assert read_scores(tmp_path / "model")["nll"][0][-1] == read_scores(finished_run)["nll"][-1][-1]

    # The run itself, which then must not change.
    further = small("order=[space]", "method=ewc", f"init_from={finished_run}")
    start(further, tmp_path / "second")
    first = scores_of(finished_run)
    second = scores_of(tmp_path / "second")
    assert second.matrix[0, -1] == pytest.approx(first.matrix[-1, -1], abs=1e-6)
    assert second.run["model"] == f"{first.run['model']} from run" and second.run["method"] == "ewc"
    start(further, tmp_path / "second")  # finished already
    with pytest.raises(ValueError, match=r"with other contents \(model.safetensors"):
        start(small("order=[space]", "method=ewc", f"init_from={other_run}"), tmp_path / "second")

    # Not a run of another objective, of no folder, or with damaged weights.
    with pytest.raises(ValueError, match="causal"):
        start(small_gpt2(ORDER, f"init_from={finished_run}"), tmp_path / "run")
    with pytest.raises(ValueError, match="is invalid: no finished run"):
        start(small("init_from=no"), tmp_path / "run")
    shutil.copytree(finished_run, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="init_from=.* is invalid: model/model.safetensors differs.*Allowed"):
        start(small("order=[space]", f"init_from={tmp_path / 'damaged'}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


THREE = "order=[law,food,space]"
FEW = [THREE, "eval.when=last", "eval.columns=seen"]


@pytest.fixture
def full_scores(start, small, tmp_path):
    start(small(THREE), tmp_path / "whole")
    return scores_of(tmp_path / "whole")


def test_a_policy_that_is_widened_fills_what_is_missing_also_after_a_kill(
    full_scores, start, small, tmp_path, monkeypatch
):
    start(small(*FEW, "save_all_stages=true"), tmp_path / "few")
    sparse = scores_of(tmp_path / "few")
    assert sparse.measured(1) == ["law", "general"] and sparse.measured(2) == ["food", "general"]
    assert sparse.measured(0) == sparse.measured(3) == full_scores.domains
    is_measured = ~np.isnan(sparse.matrix)
    assert np.array_equal(sparse.matrix[is_measured], full_scores.matrix[is_measured])
    assert is_measured.sum() == 12
    assert sparse.metrics["LC"] == full_scores.metrics["LC"] and sparse.metrics["FWT_zs"]["nats"] is None

    save = ContinualTrainer.save_scores
    saved = []

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
    assert widened.nll == full_scores.nll and widened.metrics == full_scores.metrics

    start(small(*FEW), tmp_path / "unkept")  # whose stages' weights are gone
    before = scores_of(tmp_path / "unkept").nll
    start(small(THREE), tmp_path / "unkept")
    assert scores_of(tmp_path / "unkept").nll == before


def test_so_many_tokens_of_each_text_are_the_same_rows_for_every_stage(full_scores, start, small, tmp_path):
    rows = {
        n: build_method_fixture(small(THREE, f"eval.max_tokens={n}")).data.scored_rows("law")
        for n in (64, 128, 10**6)
    }
    assert set(rows[64]) < set(rows[128]) < set(rows[10**6]) and list(rows[128]) == sorted(rows[128])
    start(small(THREE, "eval.max_tokens=64"), tmp_path / "few")
    sparse = scores_of(tmp_path / "few")
    assert all(part < full for part, full in zip(sparse.scored, full_scores.scored, strict=True))
    assert sparse.bytes == full_scores.bytes
    assert sparse.tokens == full_scores.tokens
    assert sparse.nll != full_scores.nll


METHODS = ["demix", "demix method.start=previous routing@method.routing=posterior", "hat", "olora"]
METHODS += ["adapter method.per_domain=true", "prompt method.per_domain=false"]
OPTIONS = [
    "order=[food,law,space]",
    "trainer.steps=2",
    "trainer.checkpoint_every_n_steps=1",
    "save_all_stages=true",
]


def assert_alike(run: Path, other_run: Path) -> None:
    scores = read_scores(run)
    expected = read_scores(other_run)
    assert all(scores[name] == expected[name] for name in ("rows", "nll", "metrics", "stored", "modules"))
    assert all(same_state(state_of(run, stage), state_of(other_run, stage)) for stage in range(3))


def is_mapped_from_stage(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return "/stages/" in line
    return False


@pytest.mark.slow
@pytest.mark.parametrize("method", run_few(METHODS, ["demix"]))
def test_what_rests_on_disk_is_what_rests_in_memory(start, small, killing, tmp_path, monkeypatch, method):
    rested = []
    map_stored = stage.map_stored
    options = [*f"method={method}".split(), *OPTIONS]

    def watched(module, path):
        map_stored(module, path)
        for child in module.modules():
            if isinstance(child, DomainParams):
                rested.append([is_mapped_from_stage(tensor) for tensor in child._buffers.values()])

    start(small(*options, "modules.storage=memory"), tmp_path / "memory")
    monkeypatch.setattr(stage, "map_stored", watched)
    on_disk = small(*options, "modules.storage=disk")
    start_and_kill(start, killing, on_disk, tmp_path / "disk", step=1, domain="space")
    start(on_disk, tmp_path / "disk")
    assert_alike(tmp_path / "disk", tmp_path / "memory")
    assert len(rested) >= 3 and all(module_part and all(module_part) for module_part in rested)
