"""An exported model that is not the trained one is an error that says what is wrong with it."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpt.methods.base import ContinualMethod
from cpt.models.loading import load_model
from cpt.trainer import stage
from cpt.trainer.export_check import check_export, choose_tokens, draw_sample
from tests.runs.reading import read_scores
from tests.support.method_fixtures import build_method_fixture

ORDER = "order=[law]"
ENTRIES = 300  # of the tokenizer


@pytest.fixture
def exported(small_gpt2, tmp_path):
    """The check of a folder with the export of a module, and the module with its sample."""
    run = build_method_fixture(small_gpt2(ORDER, "trainer.steps=2"))
    run.learn(0)
    sample = draw_sample(run.module, run.data, num_entries=ENTRIES, precision="32-true")
    folder = tmp_path / "a 'quoted' model"
    expression = run.module.export(folder, ["law"])
    check = partial(check_export, folder, expression, sample, run.module, recorded=None, precision="32-true")
    return folder, check, run, sample


def rewrite(folder, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


LAYER = "transformer.h.0.mlp.c_fc.weight"
FAULTS = {
    "1 missing keys: " + LAYER: lambda state: {name: state[name] for name in state if name != LAYER},
    "1 unexpected keys: transformer.extra": lambda state: state | {"transformer.extra": torch.zeros(2)},
    "on law its loss is ": lambda state: state | {LAYER: 3 * state[LAYER]},
    "size mismatch|mismatch": lambda state: state | {LAYER: state[LAYER][:, :2].contiguous()},
}


@pytest.mark.parametrize("cause", FAULTS)
def test_other_weights_are_named(cause, exported):
    folder, check, _, _ = exported
    check()
    rewrite(folder, FAULTS[cause])
    with pytest.raises(
        ValueError, match=f"^the exported model in .* is not the trained one: .*({cause})"
    ) as raised:
        check()
    assert "\n" not in str(raised.value) and "the same command exports it again" in str(raised.value)


def test_a_lost_row_of_a_token_that_the_held_out_text_does_not_have_is_noticed(exported):
    folder, check, _, sample = exported
    absent_id = max({*range(ENTRIES)} - {*sample.held_out.batch["input_ids"].flatten().tolist()})

    def lose_row(state):
        table = state["transformer.wte.weight"].clone()
        table[absent_id] = table.mean(0)
        return {**state, "transformer.wte.weight": table}

    rewrite(folder, lose_row)
    with pytest.raises(ValueError, match="on tokens from all of the vocabulary its loss is .* rows of emb"):
        check()


def test_half_of_the_spread_tokens_are_the_last_of_the_vocabulary():
    tokens = choose_tokens(torch.zeros(2, 50), 1000).flatten().tolist()
    assert {*range(950, 1000)} < {*tokens}  # where new tokens are
    assert min(tokens) == 0 and len({*tokens}) == 100


def test_a_head_that_becomes_tied_again_is_noticed(exported):
    folder, check, run, _ = exported
    untied = load_model(folder, "causal")
    untied.lm_head.weight = torch.nn.Parameter(3 * untied.lm_head.weight.detach())
    untied.config.tie_word_embeddings = False
    run.module.model = untied
    untied.save_pretrained(folder)
    sample = draw_sample(run.module, run.data, num_entries=ENTRIES, precision="32-true")
    module_check = partial(
        check.func, *check.args[:2], sample, run.module, recorded=None, precision="32-true"
    )
    module_check()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    rewrite(folder, lambda state: {name: state[name] for name in state if name != "lm_head.weight"})
    with pytest.raises(ValueError, match="on law its loss is "):
        module_check()


def test_losses_that_the_last_row_does_not_have_are_noticed(exported):
    _, check, _, sample = exported
    recorded = sum_by_document(sample, sample.held_out.expected)
    check(recorded=recorded)
    recorded[0] += 0.05 * recorded[1]
    check(recorded=recorded, precision="bf16-mixed")  # may round that far
    with pytest.raises(ValueError, match="the last row has "):
        check(recorded=recorded)
    recorded[1] += 1  # of documents that the sample has a part of, nothing is known
    check(recorded=recorded)


def test_a_large_error_of_the_precision_is_logged_and_not_blamed_on_the_export(exported, caplog):
    _, check, run, _ = exported
    sample = draw_sample(run.module, run.data, num_entries=ENTRIES, precision="bf16-mixed")
    exact_losses = sample.held_out.expected
    assert not torch.equal(sample.in_run_precision, exact_losses)
    assert torch.allclose(sample.in_run_precision, exact_losses, atol=0.1)

    # As on unusual text with a checkpoint of large activations.
    far_off = replace(sample, in_run_precision=exact_losses + 0.5)
    far_check = partial(
        check.func, *check.args[:2], far_off, run.module, recorded=None, precision="bf16-mixed"
    )
    far_check(recorded=sum_by_document(far_off, far_off.in_run_precision))
    assert "In trainer.precision=bf16-mixed the loss on law is +0.500 nats off what" in caplog.text
    with pytest.raises(ValueError, match="the last row has "):
        far_check(recorded=sum_by_document(far_off, exact_losses))


def sum_by_document(sample, losses):
    """Losses as a row has them: nats and tokens of each document."""
    documents = sample.held_out.batch["documents"]
    sums = torch.zeros(int(documents.max()) + 1, dtype=torch.double)
    sums.index_add_(0, documents, losses)
    return torch.stack([sums, documents.bincount().double()]).numpy()


def test_nothing_of_the_module_changes(exported):
    _, check, run, _ = exported
    before = run.weights()
    generator = torch.get_rng_state()
    draw_sample(run.module, run.data, num_entries=ENTRIES, precision="32-true")
    check()
    assert all(torch.equal(before[name], value) for name, value in run.weights().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_a_run_whose_export_is_wrong_fails_and_the_same_command_exports_again(
    small_gpt2, start, tmp_path, monkeypatch
):
    cfg = small_gpt2(ORDER, "trainer.steps=2", "trainer.precision=bf16-mixed")
    folder = tmp_path / "run"

    def export_other_weights(method, model_folder, order):
        expression = export(method, model_folder, order)
        rewrite(model_folder, lambda state: state | {LAYER: 3 * state[LAYER]})
        return expression

    export = ContinualMethod.export
    with monkeypatch.context() as patch:
        patch.setattr(ContinualMethod, "export", export_other_weights)
        with pytest.raises(ValueError, match="is not the trained one: on law its loss is "):
            start(cfg, folder)
    assert not read_scores(folder)["run"]["finished"]
    with monkeypatch.context() as patch:
        patch.setattr(stage.StageTrainer, "train", None)  # nothing is trained again
        start(cfg, folder)
    assert read_scores(folder)["run"]["finished"]
