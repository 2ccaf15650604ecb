"""A run from its config to its folder, and one that begins with what another has learned."""

import shutil

import pytest
import torch
import transformers  # noqa: F401  (for an expression that is evaluated)
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.runs.reading import scores_of, state_of, times, told_by

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
    assert [path.name for path in (done / "stages").iterdir()] == ["002.pt"]
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(done / "model")
    batch = tokenizer("the court <mask> that a party", return_tensors="pt")
    assert model(**batch).logits.shape[-1] == len(tokenizer)


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
    one, two = told_by(done)["nll"], told_by(other)["nll"]
    assert one[0] == two[0] and one[1] != two[1]  # of another seed
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
