"""Whole runs that measure the divergence from the base."""

import logging

import numpy as np
import pytest

from cpt import load_runs
from cpt.evaluation.divergence import estimate_mean, find_mean
from cpt.methods.lora import LoRA
from cpt.reporting.divergence_tables import describe_divergence
from cpt.reporting.frames import list_divergence_points
from cpt.reporting.load_runs import find_runs, measure_runs
from cpt.trainer import divergence_evaluator
from tests.runs.reading import assert_same_bits, read_scores, scores_of

MEASURED = ["order=[law,food]", "divergence=base", "optim.lr=1e-2"]


def divergences(folder):
    """The means by row and text."""
    means = []
    for row in read_scores(folder)["divergence"]["kl"]:
        means.append({text: estimate[0] for text, estimate in row.items()})
    return means


def assert_grows_from_the_base(folder, *, at_least=1e-4):
    base_row, *rows = divergences(folder)
    assert base_row == {"law": 0, "food": 0, "general": 0}
    for row in rows:
        assert min(row.values()) >= 0 and row["law"] > at_least


def test_it_is_0_at_the_base_changes_no_bit_of_training_and_is_measured_by_a_later_start(
    small, start, tmp_path
):
    start(small(*MEASURED, "save_all_stages=true"), tmp_path / "run")
    assert_grows_from_the_base(tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    just_trained, low, high = scores.divergence["just_trained"]
    kl = scores.divergence["kl"]
    assert (
        just_trained == pytest.approx((kl[1]["law"][0] + kl[2]["food"][0]) / 2) and low < just_trained < high
    )
    with np.load(tmp_path / "run/divergence/002-food/divergence.npz") as archive:
        assert kl[2]["general"] == pytest.approx(estimate_mean([archive["general"]]))
        assert find_mean(archive["general"], "nll") == pytest.approx(scores.nll[2][2], abs=1e-5)
        assert find_mean(archive["general"], "base_nll") == pytest.approx(scores.nll[0][2], abs=1e-5)

    start(small(*MEASURED[::2], "divergence=none", "save_all_stages=true"), tmp_path / "without")
    assert read_scores(tmp_path / "without")["divergence"] == {}
    assert_same_bits(tmp_path / "run", tmp_path / "without")
    start(small(*MEASURED, "save_all_stages=true"), tmp_path / "without")
    assert scores_of(tmp_path / "without").divergence == scores.divergence
    assert_same_bits(tmp_path / "run", tmp_path / "without")

    # What shows it: a sentence, the page, W&B's points, a column of comparisons.
    assert describe_divergence(scores).startswith(f"KL(base || model), nats per token: {just_trained:.4f} [")
    assert "Divergence from the base" in (tmp_path / "run" / "report.html").read_text()
    assert "KL(base" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert list_divergence_points(scores)[2] == {"stage": 2} | {
        f"kl/{text}": estimate[0] for text, estimate in kl[2].items()
    }
    frame = load_runs(tmp_path / "run").query("kind == 'divergence'").set_index("key")
    assert frame.loc["divergence/just_trained", "value"] == just_trained
    assert frame.loc["divergence/general", ["value", "low"]].tolist() == kl[2]["general"][:2]
    (measured,) = measure_runs(find_runs([tmp_path / "run"]).runs)
    assert measured.values["divergence/just_trained"] == just_trained


def test_a_damaged_file_is_measured_again_with_one_line(small, start, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cpt")
    start(small(*MEASURED[:2], "method=none"), tmp_path)
    file = tmp_path / "divergence/000-base/divergence.npz"
    measured = file.read_bytes()
    file.write_bytes(b"damaged")
    (tmp_path / "report.html").unlink()  # else the next start has nothing to do
    start(small(*MEASURED[:2], "method=none"), tmp_path)
    assert file.read_bytes() == measured and caplog.text.count("Measuring again") == 1


def test_a_run_that_is_killed_in_it_ends_with_the_same_numbers(small_gpt2, start, tmp_path, monkeypatch):
    start(small_gpt2(*MEASURED), tmp_path / "complete")
    assert_grows_from_the_base(tmp_path / "complete")
    collect = divergence_evaluator.collect_divergences

    def deadly(rows, *arguments, **options):
        if len(rows) == 2:
            raise KeyError("killed")
        return collect(rows, *arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyError, match="killed"):
        patched.setattr(divergence_evaluator, "collect_divergences", deadly)
        start(small_gpt2(*MEASURED), tmp_path / "killed")
    start(small_gpt2(*MEASURED), tmp_path / "killed")
    assert divergences(tmp_path / "killed") == divergences(tmp_path / "complete")


@pytest.mark.parametrize(
    "method",
    ["method=lora method.per_domain=true", "method=olora method.adapter_storage=separate", "method=prompt"],
)
def test_methods_with_modules_are_compared_with_the_base_without_them(method, small, start, tmp_path):
    start(small(*MEASURED, *method.split(), "optim.lr=0.1"), tmp_path / "run")
    assert_grows_from_the_base(tmp_path / "run", at_least=1e-7)


def test_what_cannot_be_the_base_again_is_refused(small, small_t5, start, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="divergence=base is invalid with method=elle: its model grows"):
        start(small(*MEASURED, "method=elle"), tmp_path / "run")
    mixed = ["method=demix", "routing@method.routing=posterior"]
    with pytest.raises(ValueError, match="divergence=base is invalid with method.routing.learned=posterior"):
        start(small(*MEASURED, *mixed), tmp_path / "run")
    assert not (tmp_path / "run").exists()

    # A method whose scores are of another model than that which is compared.
    monkeypatch.setattr(LoRA, "scoring_parameters", lambda self, domain: self.domain_params.weights(-1))
    wrong = [*MEASURED, "method=lora", "method.per_domain=true", "optim.lr=0.3"]
    for _ in range(2):  # the next start, too, does not take what was measured for a result
        with pytest.raises(ValueError, match="LoRA has no single model to compare with the base"):
            start(small_t5(*wrong), tmp_path / "other")


def test_stages_without_weights_are_left_out_of_a_later_measurement(small, start, tmp_path, caplog):
    start(small("order=[law,food]"), tmp_path / "run")
    caplog.set_level(logging.INFO, logger="cpt")
    start(small("order=[law,food]", "divergence=base"), tmp_path / "run")
    assert "Skipping the divergence after law: its weights were not kept (save_all_stages=true" in caplog.text
    base_row, law_row, food_row = read_scores(tmp_path / "run")["divergence"]["kl"]
    assert law_row == {} and food_row["food"][0] > 0
    assert base_row == {} or base_row["law"][0] == 0
