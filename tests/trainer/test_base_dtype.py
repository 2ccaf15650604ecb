"""A frozen base in 16 bits, as its checkpoint has it: half the memory, and no other bit of a result."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cpt.core.config import identity
from cpt.models.loading import load_config, load_model, truncate_config
from cpt.models.narrow_layers import find_narrow_weights
from cpt.models.units import find_blocks
from cpt.trainer import base_dtype
from cpt.trainer.base_dtype import choose_base_dtype, computes_the_same
from cpt.trainer.plan import make_plan
from tests.support.campaign import run_few
from tests.support.frozen_bases import KEEPING, REWRITING
from tests.support.method_fixtures import ORDER, build_method_fixture, equal_tensors
from tests.support.quantized_models import needs_bitsandbytes
from tests.support.stored_checkpoints import write_checkpoint

FEW_STEPS = ["model.max_seq_length=16", "trainer.steps=2", "trainer.batch_size=8", "logger=none"]
FEW_STEPS += ["trainer.importance_samples=4", "domains.preprocessing_num_workers=1"]
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("stored"), dtype=torch.bfloat16)


@pytest.fixture
def config(composed, corpora, cache, stored):
    def build(*overrides: str):
        texts = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", ORDER]
        return composed(*texts, "model=hf", f"model.name_or_path={stored}", *FEW_STEPS, *overrides)

    return build


CASES = [" ".join(words) for words in itertools.product(PRECISIONS, [*KEEPING, *REWRITING])]
FEW = [
    "32-true lora",
    f"bf16-mixed {KEEPING[1]}",
    f"32-true {KEEPING[-1]}",
    "32-true demix",
    "32-true adapter",
]
FEW += [f"32-true {case}" for case in REWRITING]


@needs_bitsandbytes
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_is_not_quantized_is_kept_in_16_bits(precision, config, tmp_path):
    assert_same_bits(f"{precision} lora model.quantization=nf4", config, tmp_path)


@pytest.mark.parametrize("case", run_few(CASES, FEW))
def test_a_base_in_16_bits_changes_no_bit(case, config, tmp_path):
    assert_same_bits(case, config, tmp_path)


def assert_same_bits(case: str, config, folder: Path) -> None:
    precision, *words = case.split()
    cfg = config(f"method={words[0]}", *words[1:], f"trainer.precision={precision}")
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        run = build_method_fixture(cfg, base_dtype=dtype)
        constant = {id(parameter) for parameter in run.module.constant_weights}
        narrow = {id(weight) for weight in find_narrow_weights(run.module.model)}
        assert narrow <= constant and bool(narrow) == (dtype == torch.bfloat16)
        for number in range(2):
            run.learn(number)
        exported_folder = folder / str(dtype)
        run.module.export(exported_folder, ["law", "food"])
        tensors = run.module.state_dict()
        for path in exported_folder.rglob("*.safetensors"):
            exported = {f"{path.name} {name}": tensor.float() for name, tensor in load_file(path).items()}
            tensors.update(exported)
        results[dtype] = tensors
    assert equal_tensors(results[torch.float32], results[torch.bfloat16])


FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},
    "gemma3_text": {"head_dim": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    "t5": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_heads": 2,
        "num_layers": 2,
        "decoder_start_token_id": 0,
    },
    "modernbert": {},
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
OBJECTIVES = {"t5": "span", "modernbert": "masked"}


# Configurations whose blocks are described by more than `layer_types`, or by a property.
HYBRIDS = {
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
    "bamba": {"attn_layer_indices": [3], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "head_dim": 16, "vocab_size_per_layer_input": 96},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": 96},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_type_is_chosen_for_blocks_that_a_property_describes(family):
    sizes = SIZES | {"num_hidden_layers": 8} | HYBRIDS[family]
    model_config = AutoConfig.for_model(family, **sizes)
    assert isinstance(computes_the_same(model_config, "causal", torch.bfloat16), bool)
    assert model_config.num_hidden_layers == 8


def test_the_first_blocks_of_a_hybrid_are_kept_and_what_cannot_have_fewer_is_refused():
    sizes = SIZES | {"num_hidden_layers": 8}
    jamba_sizes = sizes | HYBRIDS["jamba"]
    jamba = truncate_config(AutoConfig.for_model("jamba", **jamba_sizes), 3)
    assert len(jamba.layer_types) == 3
    experts = truncate_config(AutoConfig.for_model("exaone_moe", **sizes), 3)  # two lists of kinds
    assert type(experts).from_dict(experts.to_dict()).mlp_layer_types == ["dense", "sparse", "sparse"]

    kinds = {"attention_types": [[["global", "local"], 4]], "num_layers": 8}
    with pytest.raises(
        ValueError, match=r"model\.num_hidden_layers=3 is invalid: no configuration of this"
    ) as caught:
        truncate_config(AutoConfig.for_model("gpt_neo", **kinds), 3)
    assert str(caught.value).endswith("Allowed: null, or 8, all blocks")
    gemma = sizes | {"num_kv_shared_layers": 2, "head_dim": 16, "vocab_size_per_layer_input": 96}
    with pytest.raises(ValueError, match="a gemma3n_text has embeddings for each of its blocks in one table"):
        truncate_config(AutoConfig.for_model("gemma3n_text", **gemma), 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_families_have_the_same_logits(family, dtype):
    sizes = SIZES | FAMILIES[family]
    model_config = AutoConfig.for_model(family, **sizes)
    assert computes_the_same(model_config, OBJECTIVES.get(family, "causal"), dtype)


def test_a_class_that_reads_the_type_of_a_weight_is_kept_in_32_bits(monkeypatch):
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaMLP.forward

    def forward_in_the_type_of_the_weight(module, hidden):
        return forward(module, hidden.to(module.up_proj.weight.dtype))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward_in_the_type_of_the_weight)
    assert not computes_the_same(AutoConfig.for_model("llama", **SIZES), "causal", torch.bfloat16)


SIX_BLOCKS = {
    "llama": {},
    "gpt2": FAMILIES.get("gpt2", {}),
    # The first block has a dense network, the others have experts.
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
    },
}


@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 1), ("gpt2", 1), ("deepseek_v3", 2)])
def test_as_few_blocks_are_tried_as_have_all_kinds(family, num_blocks, monkeypatch):
    models = []
    find_logits = base_dtype.find_logits

    def record(model, objective):
        models.append(model)
        return find_logits(model, objective)

    monkeypatch.setattr(base_dtype, "find_logits", record)
    sizes = {**SIZES, **SIX_BLOCKS[family], "num_hidden_layers": 6}
    config = AutoConfig.for_model(family, **sizes)
    computes_the_same(config, "causal", torch.bfloat16)
    assert [len(find_blocks(model)) for model in models] == [num_blocks, num_blocks]
    assert config.num_hidden_layers == 6


def choose(cfg) -> torch.dtype:
    plan = make_plan(cfg)
    return choose_base_dtype(plan, load_config(str(plan.model.name_or_path)))


def test_auto_follows_the_matrices_of_the_checkpoint(config, stored, tmp_path, caplog):
    caplog.set_level("INFO")
    assert choose(config("method=lora")) == torch.bfloat16
    assert choose(config("method=lora", "model.dtype=float32")) == torch.float32
    assert choose(config("method=ncl")) == torch.float32  # which trains all weights
    assert not caplog.messages
    assert choose(config("method=lora", "model.num_hidden_layers=1")) == torch.float32  # the run makes it
    in_16_bits = write_checkpoint(tmp_path / "half", dtype=torch.float16)
    assert choose(config("method=lora", f"model.name_or_path={in_16_bits}")) == torch.float16
    in_32_bits = write_checkpoint(tmp_path / "wide", dtype=torch.float32)
    wide = config("method=lora", f"model.name_or_path={in_32_bits}")
    caplog.clear()
    assert choose(wide) == torch.float32
    assert caplog.messages == [
        "Frozen weights (model.dtype=auto): float32, as the base's files do not have all matrices in one type "
        "of 16 bits"
    ]
    forced = config("method=lora", f"model.name_or_path={in_32_bits}", "model.dtype=bfloat16")
    assert choose(forced) == torch.bfloat16

    # Norms may be stored in 32 bits, one matrix may not; nor is an adapter merged into 16 bits.
    path = in_16_bits / "model.safetensors"
    half = load_file(path)
    norms = {name: tensor.float() if tensor.ndim == 1 else tensor for name, tensor in half.items()}
    save_file(norms, path, {"format": "pt"})
    assert choose(config("method=lora", f"model.name_or_path={in_16_bits}")) == torch.float16
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(half | {name: half[name].float()}, path, {"format": "pt"})
    assert choose(config("method=lora", f"model.name_or_path={in_16_bits}")) == torch.float32
    save_file(half, path, {"format": "pt"})
    (in_16_bits / "adapters" / "law").mkdir(parents=True)
    (in_16_bits / "adapters" / "law" / "adapter_config.json").write_text("{}")
    assert choose(config("method=lora", f"model.name_or_path={in_16_bits}")) == torch.float32


REFUSED = {
    "ncl": "it leaves no weights frozen",
    "hat": "it leaves no weights frozen",
    "merge_lora": "it changes the weights that it does not train",
    "inclora method.adapter_storage=merged": "it changes the weights that it does not train",
    "lora method.init_lora_weights=pissa": "it changes the weights that it does not train",
}


@pytest.mark.parametrize("case", REFUSED)
def test_16_bits_are_refused_by_name_where_weights_change(case, config, start, tmp_path):
    words = f"method={case}".split()
    message = f"model.dtype=bfloat16 is invalid with {words[0]}: {REFUSED[case]}.* Allowed: auto, float32"
    with pytest.raises(ValueError, match=message):
        start(config(*words, "model.dtype=bfloat16"), tmp_path / "run")


def test_what_gives_the_same_bits_is_the_same_run(config):
    identities = {}
    for dtype in ("auto", "float32", "bfloat16"):
        identities[dtype] = identity(make_plan(config("method=lora", f"model.dtype={dtype}")).settings)
    assert identities["auto"] == identities["float32"] != identities["bfloat16"]
    assert "model.dtype" not in identities["auto"]


def test_the_plan_has_the_smaller_memory_and_the_log_its_reason(config, start, tmp_path, capsys, caplog):
    weights = {}
    for dtype in ("auto", "float32"):
        options = ["method=prompt", "method.num_virtual_tokens=1", f"model.dtype={dtype}"]
        start(config(*options, "plan=json"), tmp_path / dtype)
        weights[dtype] = json.loads(capsys.readouterr().out)["memory"]["first"]["weights"]
    assert weights["auto"] == pytest.approx(weights["float32"] / 2, rel=0.05)
    caplog.set_level("INFO")
    start(config("method=prompt", "plan=true"), tmp_path / "log")
    assert "Frozen weights (model.dtype=auto): bfloat16, " in caplog.text


def test_a_narrow_model_is_loaded_as_it_is_stored_with_its_buffers_in_32_bits(stored):
    model = load_model(stored, "causal", dtype=torch.bfloat16)
    expected = load_model(stored, "causal")
    assert type(model) is type(expected) and model.config.to_dict() == expected.config.to_dict()
    parameters = dict(expected.named_parameters())
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(tensor.float(), parameters[name]) for name, tensor in model.named_parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
