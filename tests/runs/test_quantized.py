"""Runs whose base is quantized: killed and resumed, extended, exported, and what quantization costs."""

import json
import logging
import re
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cpt.models.loading import load_model
from cpt.models.quantization import find_quantized_layers
from cpt.trainer import check_quantization
from cpt.trainer.dry_run import estimate
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.runs.reading import assert_same_bits, command, read_scores, scores_of, start_and_kill, state_of
from tests.runs.test_distributed import DDP, assert_agree, assert_scored_alike, launch
from tests.runs.test_extension import assert_same_runs
from tests.support.campaign import run_few
from tests.support.quantized_models import (
    SMALL_HF,
    STORED,
    needs_bitsandbytes,
    save_checkpoint,
    save_mxfp4,
    save_stored,
)

pytestmark = [
    pytest.mark.slow,
    needs_bitsandbytes,
    # peft 0.21 with transformers 5.24, of any adapter on a causal model
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ONE, TWO = "order=[law]", "order=[law,food]"
# Each method of adapters with the options that it needs for a quantized base.
METHODS = {
    "lora": ["method=lora"],
    "per_domain": ["method=lora", "method.per_domain=true"],
    "embeddings": ["method=lora", "method.embeddings=true"],
    "saved": ["method=lora", "method.modules_to_save=[head]"],
    "inclora": ["method=inclora", "method.adapter_storage=separate"],
    "olora": ["method=olora", "method.adapter_storage=separate"],
    "nlora": ["method=nlora", "method.adapter_storage=separate"],
    "moelora": ["method=moelora"],
    "sapt": ["method=sapt", "replay=past"],
    "peft": ["method=peft", "method.tuner=dora", "+method.arguments={use_dora: false}"],
    "masked": ["method=lora", "mask=migu"],
    "in 16 bits": ["method=lora", "trainer.precision=bf16-true"],
    "packed": ["method=lora", "domains.packing=document_mask", "trainer.gradient_checkpointing=true"],
}
LR = "optim.lr=0.01"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint")


@pytest.fixture
def config(composed, corpora, cache, checkpoint):
    texts = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}"]

    def compose(*overrides: str):
        return composed(*texts, *SMALL_HF, f"model.name_or_path={checkpoint}", *overrides)

    return compose


def load_exported(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval()


@torch.no_grad()
def loss_of(model) -> float:
    tokens = torch.arange(48).view(3, 16) % 90 + 3
    return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("method", run_few([*METHODS], ["lora", "olora", "sapt"]))
def test_a_killed_run_resumes_to_the_bit_and_exports_a_plain_model(
    method, kind, config, start, killing, tmp_path
):
    cfg = config(TWO, *METHODS[method], LR, f"model.quantization={kind}")
    start(cfg, tmp_path / "whole")
    start_and_kill(start, killing, cfg, tmp_path / "killed", step=3, domain="food")
    start(cfg, tmp_path / "killed")
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")
    # Nothing of few bits is in a stage: the checkpoint gives it again.
    assert all(
        tensor.is_floating_point() or tensor.ndim == 0 for tensor in state_of(tmp_path / "whole").values()
    )

    # Exported in full, with a config.json that says nothing of bits: no package of quantization is needed.
    assert "quantization_config" not in json.loads((tmp_path / "whole/model/config.json").read_text())
    load_exported(tmp_path / "whole")
    expected_dtype = "bfloat16" if method == "in 16 bits" else "float32"
    assert scores_of(tmp_path / "whole").exported["dtype"] == expected_dtype
    matrix = scores_of(tmp_path / "whole").matrix
    assert matrix[1, 0] < matrix[0, 0] - 0.02  # it has learned


def test_what_quantization_costs_is_in_the_scores_the_page_the_card_and_the_console(
    config, start, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    options = [ONE, "method=lora", "trainer.steps=2"]
    start(config(*options), tmp_path / "plain")
    start(config(*options, "model.quantization=nf4"), tmp_path / "nf4")
    plain_row = dict(
        zip(scores_of(tmp_path / "plain").domains, scores_of(tmp_path / "plain").nll[0], strict=True)
    )
    scores = scores_of(tmp_path / "nf4")
    assert scores.unquantized == pytest.approx(plain_row, rel=1e-5)
    row = dict(zip(scores.domains, scores.nll[0], strict=True))
    assert all(abs(row[text] - loss) > 1e-4 for text, loss in plain_row.items())
    before = sum(plain_row.values()) / len(plain_row)
    after = sum(row.values()) / len(row)
    line = (
        f"Quantization of the base (nf4): {before:.3f} nats before, {after:.3f} after ({after - before:+.3f})"
    )
    for name in ("report.md", "report.html", "model/README.md"):
        text = (tmp_path / "nf4" / name).read_text().replace("\u2212", "-")
        assert line in text.replace("&#43;", "+"), name
        assert line not in (tmp_path / "plain" / name).read_text()
    assert read_scores(tmp_path / "nf4")["numerics"]["quantization"] == "nf4"

    # Without training it is measured too.
    start(config(ONE, "method=none", "model.quantization=nf4"), tmp_path / "none")
    untrained = scores_of(tmp_path / "none")
    assert untrained.unquantized == scores.unquantized and untrained.nll == scores.nll[:1]
    shares = re.findall(
        r"Quantized (.*) % of the weights, in .* in place of .* in 32 bits; in full", caplog.text
    )
    assert len(set(shares)) == 1 and 40 < float(shares[0]) < 90


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_exported_adapter_loads_onto_the_plain_and_the_quantized_base(
    kind, config, start, checkpoint, tmp_path
):
    options = [ONE, "method=lora", LR, f"model.quantization={kind}"]
    start(config(*options, "method.export_format=peft"), tmp_path / "peft")
    start(config(*options), tmp_path / "merged")
    expected = loss_of(load_exported(tmp_path / "merged"))
    adapter = tmp_path / "peft/model/adapters/law"
    losses = {
        "its own": load_exported(tmp_path / "peft"),
        "quantized": load_model(checkpoint, "causal", quantization=kind).eval(),
        "by transformers": AutoModelForCausalLM.from_pretrained(
            checkpoint, quantization_config=STORED[kind], device_map={"": "cpu"}
        ),
        "plain": AutoModelForCausalLM.from_pretrained(checkpoint),
    }
    for name, base in losses.items():
        adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
        if name == "by transformers":
            adapted.train()  # in evaluation bitsandbytes rounds more than the weights
        # Without the rounding of the weights the loss is another one, but not far.
        tolerance = {"plain": 0.1, "by transformers": 0.01}.get(name, 1e-4)
        assert loss_of(adapted) == pytest.approx(expected, abs=tolerance), name


def test_domains_are_added_to_a_quantized_run_as_from_the_beginning(config, start, tmp_path):
    options = ["method=olora", "method.adapter_storage=separate", "model.quantization=nf4", LR]
    start(config(ONE, *options), tmp_path / "one")
    start(config(TWO, *options, f"extend={tmp_path / 'one'}"), tmp_path / "extended")
    start(config(TWO, *options), tmp_path / "whole")
    assert_same_runs(tmp_path / "extended", tmp_path / "whole")
    assert scores_of(tmp_path / "extended").unquantized == scores_of(tmp_path / "whole").unquantized
    assert len(scores_of(tmp_path / "whole").unquantized) == 3


# Scales of blocks in 8 bits, and for each layer a table of their 256 values; or scales of rows in 32 bits.
WEIGHT_BYTES = {"nf4": 0.5 + 1 / 64, "int8": 1 + 4 / 64}
LAYER_BYTES = {"nf4": 1024, "int8": 0}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_plan_counts_few_bits(kind, config, checkpoint, tmp_path):
    cost = estimate(
        make_plan(config(ONE, "method=lora", f"model.quantization={kind}")), RunDir(tmp_path / "run"), None
    )
    layers = find_quantized_layers(load_model(checkpoint, "causal", quantization=kind))
    num_quantized = sum(layer.num_weights for layer in layers.values())
    num_weights = sum(parameter.numel() for parameter in load_model(checkpoint, "causal").parameters())
    in_full = 4 * (num_weights - num_quantized + cost["trained_parameters"])
    in_few_bits = WEIGHT_BYTES[kind] * num_quantized + LAYER_BYTES[kind] * len(layers)
    assert cost["memory"]["last"]["weights"] == pytest.approx(in_full + in_few_bits, rel=0.02)
    assert cost["disk"]["exported model"] == 4 * num_weights


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_checkpoint_that_is_stored_quantized_is_trained_beside_its_bits(
    kind, config, start, checkpoint, tmp_path
):
    stored = save_stored(tmp_path / "stored", checkpoint, kind)
    base = f"model.name_or_path={stored}"
    start(config(ONE, base, "method=lora", LR), tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    assert not scores.unquantized and scores.numerics["quantization"] == kind
    assert load_exported(tmp_path / "run").dtype == torch.float32
    if kind != "fp4":
        start(config(ONE, "method=lora", LR, f"model.quantization={kind}"), tmp_path / "other")
        assert scores.matrix == pytest.approx(scores_of(tmp_path / "other").matrix, rel=1e-4)
    for refused, message in (
        ("method=ewc", "method=ewc is invalid with model.name_or_path="),
        ("method=ncl", "it trains or changes the weights that are quantized"),
        ("model.quantization=nf4", f"the weights of {stored} are stored in {kind}"),
        (
            "model.num_hidden_layers=1",
            f"model.num_hidden_layers=1 is invalid: the weights of {stored} are stored in {kind}",
        ),
    ):
        method = refused if refused.startswith("method") else "method=lora"
        with pytest.raises(ValueError, match=re.escape(message)):
            start(config(ONE, base, method, refused), tmp_path / "refused")


def test_an_adapter_in_the_folder_is_merged_before_weights_are_quantized(config, start, tmp_path):
    start(config(ONE, "method=lora", LR, "method.export_format=peft"), tmp_path / "peft")
    start(config(ONE, "method=lora", LR), tmp_path / "merged")
    options = ["order=[food]", "method=lora", "model.quantization=nf4", "trainer.steps=1"]
    start(config(*options, f"init_from={tmp_path / 'peft'}"), tmp_path / "from_peft")
    start(config(*options, f"init_from={tmp_path / 'merged'}"), tmp_path / "from_merged")
    matrices = [scores_of(tmp_path / name).matrix for name in ("from_peft", "from_merged")]
    assert matrices[0] == pytest.approx(matrices[1], rel=1e-3)


def test_two_processes_train_what_one_does(corpora, cache, checkpoint, tmp_path):
    options = command(corpora, cache, *SMALL_HF, f"model.name_or_path={checkpoint}", "method=lora", LR)
    options += ["model.quantization=nf4", "trainer.steps=2", "trainer.compile=true"]
    for name, devices in {"one": [], "two": [*DDP, "trainer.devices=2"]}.items():
        (tmp_path / name).mkdir()
        assert launch(tmp_path / name, tmp_path / name / "out", *options, *devices) == 0
    assert_agree(tmp_path / "two/out", count=2)
    assert_scored_alike(tmp_path / "one/run", tmp_path / "two/run")
    unquantized = [read_scores(tmp_path / name / "run")["unquantized"] for name in ("one", "two")]
    assert unquantized[0] == pytest.approx(unquantized[1], rel=1e-5)


def test_a_gpt_oss_in_mxfp4_is_trained_in_full(config, start, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    base = f"model.name_or_path={tmp_path / 'mxfp4'}"
    start(config(ONE, base, "method=ncl", "trainer.steps=1"), tmp_path / "run")
    assert f"Dequantizing the weights of {tmp_path / 'mxfp4'}, which are stored in mxfp4" in caplog.text
    assert load_exported(tmp_path / "run").model.layers[0].mlp.experts.down_proj.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"model.quantization=nf4 is invalid: .* are stored in mxfp4\. Allowed: none"
    ):
        start(config(ONE, base, "method=lora", "model.quantization=nf4"), tmp_path / "refused")


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "method.modules_to_save=[down_proj] method.target_modules=[q_proj]": r"down_proj.weight is quantized, and cannot be trained",
        "method.lora_dropout=0 method.target_parameters=[nothing]": "nothing is no parameter of experts",
    }.items(),
)
def test_what_does_not_go_with_few_bits_is_refused_on_the_skeleton(options, message, config, start, tmp_path):
    with pytest.raises(ValueError, match=message):
        start(config(ONE, "method=lora", "model.quantization=nf4", *options.split()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(config, monkeypatch):
    monkeypatch.setattr(check_quantization, "find_spec", lambda name: None)
    line = "model.quantization=nf4 is invalid: bitsandbytes is not installed. Allowed: after pip "
    with pytest.raises(ValueError, match=f"^{line}"):
        make_plan(config(ONE, "method=lora", "model.quantization=nf4"))


def test_weights_in_16_bits_are_exported_in_16_bits(config, start, tmp_path):
    """Dequantized and merged in 32 bits, then rounded once: the loss is that of the run."""
    folder = save_checkpoint(tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    base = f"model.name_or_path={folder}"
    start(config(ONE, base, "method=lora", LR, "model.quantization=nf4"), tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    assert scores.exported["dtype"] == "bfloat16"
    assert scores.exported["nll"] == pytest.approx(scores.exported["run_nll"], abs=0.02)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype="auto")
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.bfloat16}
