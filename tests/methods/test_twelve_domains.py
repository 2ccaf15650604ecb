"""A run of twelve domains, of one test document each: what its parameters and its files grow by."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import VOCABULARIES, sentences
from tests.support.campaign import run_few

DOMAINS = [f"domain{number:02d}" for number in range(12)]
TINY = ["trainer.steps=1", "trainer.probe_samples=4", "keep_stages=true"]
OVERHEAD = 8192  # bytes of a file for another few tensors
# How many numbers of 4 bytes each domain adds, from the number of trained ones.
GROWS_BY = {
    "ncl": lambda trained: 0,
    "adapter": lambda trained: 0,
    "adapter method.per_domain=true": lambda trained: trained,
    "lora": lambda trained: 0,
    "lora method.per_domain=true": lambda trained: trained,
    "inclora": lambda trained: 0,
    "inclora method.stored=pairs": lambda trained: trained,
    "nlora": lambda trained: 0,
    "moelora": lambda trained: 0,
    "progprompt method.tokens=3": lambda trained: trained,
    "prompt method.tokens=3": lambda trained: trained,
    "prompt method.tokens=3 method.per_domain=false": lambda trained: 0,
    # and where they began, what one more candidate scored, the share of first choices
    "lifelong_moe method.dense=frozen": lambda trained: trained + 5,
    "demix": lambda trained: trained + 4,  # and where its expert began, and what one more candidate scored
}
# At most such a share of the trained ones.
SHARED = {"olora": 0.6, "hat": 0.05, "hat method.form=adapter": 0.3, "cpt_plugin": 0.2}


@pytest.fixture(scope="module")
def twelve(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("twelve")
    for seed, name in enumerate([*DOMAINS, "general"]):
        words = VOCABULARIES[list(VOCABULARIES)[seed % 4]]
        (root / name).mkdir()
        (root / name / "all.txt").write_text("\n".join(sentences(words, count=25, seed=seed)) + "\n")
    return root


@pytest.fixture
def costs(small, start, twelve, tmp_path):
    """Trained parameters, stored bytes and bytes of the state's file after each of the twelve domains."""

    def run(method: str) -> np.ndarray:
        options = f"method={method}".split()
        start(small(*options, f"domains.root={twelve}", f"order=[{','.join(DOMAINS)}]", *TINY), tmp_path)
        scores = json.loads((tmp_path / "scores.json").read_text())
        files = [path.stat().st_size for path in sorted((tmp_path / "stages").iterdir())]
        assert scores["rows"] == ["base", *DOMAINS]
        assert {text["documents"]["test"] for text in scores["texts"].values()} == {1}
        return np.array([scores["trained"][1:], scores["stored"][1:], files])

    return run


@pytest.mark.parametrize("method", run_few(GROWS_BY, ["ncl", "demix"]))
def test_a_domain_adds_what_it_must_and_nothing_else(method, costs):
    trained, stored, files = costs(method)
    assert len(set(trained)) == 1
    wanted = 4 * GROWS_BY[method](trained[0])
    assert set(np.diff(stored)) == {wanted}
    assert np.abs(np.diff(files) - wanted).max() < OVERHEAD


@pytest.mark.parametrize("method", run_few(SHARED, ["olora", "hat"]))
def test_what_domains_share_is_stored_once(method, costs):
    trained, stored, files = costs(method)
    [grown] = set(np.diff(stored))
    assert 0 < grown <= SHARED[method] * 4 * trained[0]
    assert np.abs(np.diff(files) - grown).max() < OVERHEAD
    assert (np.diff(trained) <= 0).all()  # hat freezes what no unit owns after the first
