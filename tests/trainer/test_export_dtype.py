"""The type of exported weights: rounded once, recorded with what rounding does to the loss."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cpt.trainer import export_check, finalize, stage
from cpt.trainer.export_dtype import convert_files, find_export_dtype
from cpt.trainer.options import ExportOptions
from cpt.trainer.plan import make_plan, with_stored_export
from tests.runs.reading import read_scores
from tests.support.stored_checkpoints import load_float32, write_checkpoint

ORDER = "order=[law]"
FEW = ["model.max_seq_length=16", "trainer.steps=3", "trainer.batch_size=8", "logger=none"]


def tensors_in(folder) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def test_all_shards_are_rounded_once_with_their_index_and_config(tmp_path):
    folder = write_checkpoint(tmp_path / "model", dtype=torch.float32)
    model = load_float32(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    trained = tensors_in(folder)
    convert_files(folder, torch.float32)
    assert all(torch.equal(trained[name], tensor) for name, tensor in tensors_in(folder).items())

    convert_files(folder, torch.bfloat16)
    rounded = tensors_in(folder)
    assert rounded.keys() == trained.keys()
    assert all(torch.equal(trained[name].bfloat16(), tensor) for name, tensor in rounded.items())
    [index] = folder.glob("*.index.json")
    assert json.loads(index.read_text())["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in rounded.values()
    )
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            assert opened.metadata()["format"] == "pt"


def test_weights_beyond_the_range_of_16_bits_are_named(tmp_path):
    save_file({"wide": torch.tensor([1.0, 7e4])}, tmp_path / "model.safetensors", {"format": "pt"})
    message = "export.dtype=float16 is invalid: wide has values beyond its range .7e.04.. Allowed: bfloat16, float32"
    with pytest.raises(ValueError, match=message):
        convert_files(tmp_path, torch.float16)
    assert load_file(tmp_path / "model.safetensors")["wide"].dtype == torch.float32


STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float32,
}


@pytest.mark.parametrize("stored", STORED)
def test_auto_is_as_the_checkpoint_is_stored(stored, tmp_path):
    folder = str(write_checkpoint(tmp_path, dtype=getattr(torch, stored)))
    auto = ExportOptions(dtype="auto")
    assert find_export_dtype(auto, folder, "32-true") == STORED[stored]
    assert find_export_dtype(ExportOptions(dtype="float16"), folder, "32-true") == torch.float16
    assert find_export_dtype(auto, None, "bf16-mixed") == torch.float32  # a new model
    assert find_export_dtype(auto, None, "bf16-true") == torch.bfloat16  # as it is trained


def test_a_few_weights_in_32_bits_do_not_decide(tmp_path):
    folder = write_checkpoint(tmp_path, dtype=torch.bfloat16)
    state = load_file(folder / "model.safetensors")
    state = {name: tensor.float() if tensor.ndim == 1 else tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert find_export_dtype(ExportOptions(dtype="auto"), str(folder), "32-true") == torch.bfloat16


def test_a_run_that_began_without_the_option_exports_in_32_bits(small):
    plan = make_plan(small(ORDER))
    assert with_stored_export(plan, {}).export.dtype == "auto"
    assert with_stored_export(plan, {"seed": 0, "export.dtype": "auto"}).export.dtype == "auto"
    assert with_stored_export(plan, {"seed": 0}).export.dtype == "float32"
    plan_in_16_bits = make_plan(small(ORDER, "export.dtype=float16"))
    assert with_stored_export(plan_in_16_bits, {"seed": 0}).export.dtype == "float16"


@pytest.mark.parametrize("method", ["ncl", "lora"])
def test_an_export_has_the_checkpoints_type_and_a_finished_run_is_exported_again_in_another(
    method, composed, corpora, cache, start, tmp_path, monkeypatch, capsys
):
    checkpoint = write_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    options = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "model=hf", *FEW]
    options += [ORDER, f"model.name_or_path={checkpoint}", f"method={method}", "trainer.precision=32-true"]
    folder = tmp_path / "run"
    held_bytes = []  # by the run, when its export is loaded

    def record_held(*arguments, **keywords):
        module = arguments[3]
        held_bytes.append(sum(tensor.nbytes for tensor in module.state_dict().values()))
        return export_check.check_export(*arguments, **keywords)

    monkeypatch.setattr(finalize, "check_export", record_held)
    start(composed(*options, "plan=json"), tmp_path / "plan")
    planned = json.loads(capsys.readouterr().out)["disk"]["exported model"]
    start(composed(*options), folder)
    assert held_bytes == [0]
    rounded = tensors_in(folder / "model")
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert planned == sum(tensor.nbytes for tensor in rounded.values())
    exported = read_scores(folder)["exported"]
    assert (exported["requested"], exported["dtype"], exported["text"]) == ("auto", "bfloat16", "law")
    assert exported["nll"] != exported["run_nll"] == pytest.approx(exported["nll"], rel=0.01)
    losses = f"{exported['nll']:.4f} on {exported['tokens']:,} tokens of law"
    assert f"bfloat16: loss {losses}" in (folder / "report.md").read_text().replace("\\", "")
    card = (folder / "model" / "README.md").read_text()
    assert "The weights are bfloat16" in card and f"{exported['nll']:.4f}" in card

    # The movement is that of training; what LoRA does not change is that of the base again.
    if method == "lora":
        base = tensors_in(checkpoint)
        name = "model.embed_tokens.weight"
        assert torch.equal(rounded[name], base[name])
    assert read_scores(folder)["moved"]["attention"][1] == 1.0

    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    start(composed(*options, "export.dtype=bfloat16"), folder)
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before
    monkeypatch.setattr(stage.StageTrainer, "train", None)  # nothing is trained again
    start(composed(*options, "export.dtype=float32"), folder)
    trained = tensors_in(folder / "model")
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in trained.items())
    assert read_scores(folder)["exported"]["nll"] == pytest.approx(exported["run_nll"], abs=1e-5)
