"""LoRA and other tuners on unmodified models: where they stand, what they add, and what others can load."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.adapters import lora, plain_model
from cpt.methods.peft import TUNERS
from cpt.models.loading import is_tied, make_skeleton
from tests.models import test_units

pytestmark = pytest.mark.slow

TOKENS = torch.arange(24).view(2, 12) % 37 + 3
KINDS = ("modernbert", "roberta", "gpt2", "llama")


def build(kind="modernbert"):
    return test_units.build(kind, tie_word_embeddings=kind != "llama").float()


def attach(model, *, dropout=0.0, targets="all-linear", embeddings=False):
    return lora.attach_lora(model, r=4, alpha=12, dropout=dropout, targets=targets, embeddings=embeddings)


@torch.no_grad()
def learn(model, names, *, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for name in names:
        model.get_parameter(name).normal_(std=0.2)


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@pytest.mark.parametrize(("kind", "embeddings"), [*((kind, False) for kind in KINDS), ("gpt2", True)])
def test_the_first_model_is_the_base_and_a_layer_adds_alpha_over_r_times_the_product(kind, embeddings):
    model = build(kind)
    before = logits(model)
    names = attach(model, embeddings=embeddings).names
    assert torch.equal(logits(model), before)
    learn(model, names)
    for layer in lora.find_lora_layers(model).values():
        if hasattr(layer, "in_features"):
            x = torch.randn(5, layer.in_features)
            a, b = lora.get_factors(layer)
            if not isinstance(layer.base_layer, nn.Embedding):
                torch.testing.assert_close(layer(x), layer.base_layer(x) + 3 * (x @ a.T @ b.T))


def test_dropout_is_that_of_the_pairs_input_in_training_alone():
    model = build()
    learn(model, attach(model, dropout=0.5).names)
    layer = next(iter(lora.find_lora_layers(model).values()))
    x = torch.randn(4, layer.in_features)
    a, b = lora.get_factors(layer)
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3 * (x @ a.T @ b.T))
    torch.manual_seed(0)
    dropped = layer.train()(x)
    torch.manual_seed(0)
    dropped_input = nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(dropped, layer.base_layer(x) + 3 * (dropped_input @ a.T @ b.T))
    lora.begin_adapter(
        model.eval(), storage="separate", seed=1
    )  # B = 0: all that is seen is the earlier pair
    before = logits(model)
    assert torch.equal(logits(model.train()), before)


def test_targets_are_ends_of_names_or_a_regular_expression():
    for targets, layer_names in (
        (["0.attn.Wo", "layers.1.mlp.Wi"], ["model.layers.0.attn.Wo", "model.layers.1.mlp.Wi"]),
        (r"model|.*\.1\.mlp\..*", ["model.layers.1.mlp.Wi", "model.layers.1.mlp.Wo"]),
    ):
        model = build()
        scope = attach(model, targets=targets)
        assert list(lora.find_lora_layers(model)) == layer_names and len(scope.projections) == 2 * len(
            layer_names
        )


def test_an_adapted_embedding_is_no_longer_the_heads():
    model = build()
    base = build()
    names = attach(model, embeddings=True, targets=["Wqkv"]).names
    assert model.config.tie_word_embeddings is False and sum("embedding" in name for name in names) == 2
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    a, b = lora.get_factors(table)
    assert not head.weight.requires_grad and head.weight is not table.base_layer.weight
    learn(model, names)
    expected = base.get_input_embeddings().weight[TOKENS] + 3 * (b @ a).T[TOKENS]
    torch.testing.assert_close(table(TOKENS), expected)
    assert torch.equal(head.weight, base.get_output_embeddings().weight)


@pytest.mark.parametrize(("kind", "embeddings"), [("modernbert", True), ("gpt2", False)])
def test_merged_pairs_and_pairs_kept_apart_are_one_function(kind, embeddings):
    models = {}
    for storage in ("merged", "separate"):
        model = build(kind).double()
        names = attach(model, embeddings=embeddings).names
        for domain in range(3):
            if domain:
                lora.begin_adapter(model, storage=storage, seed=domain)
                start = logits(model)
            learn(model, names, seed=domain)
        models[storage] = logits(model), start
    for merged, separate in zip(*models.values(), strict=True):
        torch.testing.assert_close(merged, separate, rtol=0, atol=1e-10)
    assert (models["separate"][0] - logits(build(kind).double())).abs().max() > 1e-3


def test_what_is_drawn_is_a_function_of_the_seed():
    drawn = []
    for storage, noise, seed in (("merged", 1, 3), ("separate", 2, 3), ("separate", 2, 4)):
        model = build()
        names = attach(model).names
        learn(model, names)
        torch.manual_seed(noise)
        lora.begin_adapter(model, storage=storage, seed=seed)
        drawn.append(torch.cat([model.get_parameter(name).flatten() for name in names]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


ARGUMENTS = {"miss": {"r": 8}, "fourierft": {"n_frequency": 20}}
CASES = [("modernbert", name) for name in TUNERS] + [("gpt2", "dora"), ("gpt2", "vera"), ("t5", "ia3")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "tuner"), CASES)
def test_a_tuner_learns_and_is_merged(kind, tuner):
    model = build(kind)
    inputs = test_units.inputs_of(model)
    names = set(model.state_dict())
    first = model(**inputs).logits
    scope = lora.attach_tuner(model, tuner, targets="auto", arguments=ARGUMENTS.get(tuner, {}))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trained) == set(scope.names) and trained
    torch.testing.assert_close(model(**inputs).logits, first, rtol=1e-4, atol=1e-5)  # begins as the base

    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(**inputs).logits.flatten(0, 1)
        nn.functional.cross_entropy(logits, inputs["input_ids"].flatten()).backward()
        optimizer.step()
    last = model(**inputs).logits
    assert (last - first).abs().max() > 1e-3

    plain = plain_model.copy_without_tuners(model)
    assert set(plain.state_dict()) == names
    torch.testing.assert_close(plain.eval()(**inputs).logits, last, rtol=1e-3, atol=1e-4)


def make_plain_of_trained(kind, *, tied, arguments):
    """The inputs of a model whose tuner was moved, its logits, and the model without it."""
    model = test_units.build(kind, tie_word_embeddings=tied).float().eval()
    inputs = test_units.inputs_of(model)
    names = lora.attach_tuner(model, "dora", targets="auto", arguments={"use_dora": False} | arguments).names
    learn(model.eval(), names)
    with torch.no_grad():
        logits = model(**inputs).logits
    return inputs, logits, plain_model.copy_without_tuners(copy.deepcopy(model).requires_grad_(True)).eval()


BESIDE_ADAPTERS = [
    ("llama", False, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    ("llama", True, {"modules_to_save": ["embed_tokens"]}, False),
    ("llama", True, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, True),
    ("gpt2", True, {"modules_to_save": ["wte"]}, False),
    ("roberta", True, {"modules_to_save": ["word_embeddings"]}, False),  # whose head has a second bias
    ("llama", True, {"modules_to_save": ["norm"]}, True),
    ("llama", True, {"trainable_token_indices": {"embed_tokens": [5, 6]}}, True),
    ("llama", True, {"trainable_token_indices": {"lm_head": [5, 6]}}, False),
    ("llama", True, {"target_modules": ["q_proj", "embed_tokens"]}, False),
    ("llama", True, {"target_modules": ["q_proj", "lm_head"]}, False),
    ("llama", False, {"target_parameters": ["q_proj.weight"], "target_modules": ["v_proj"]}, False),
    ("gpt2", True, {"lora_bias": True}, True),
    ("bart", True, {"modules_to_save": ["lm_head"]}, False),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "tied", "arguments", "stays_tied"), BESIDE_ADAPTERS)
def test_what_peft_trains_beside_adapters_is_merged_and_loaded_again(
    kind, tied, arguments, stays_tied, tmp_path
):
    inputs, logits, plain = make_plain_of_trained(kind, tied=tied, arguments=arguments)
    plain.save_pretrained(tmp_path)
    loaded, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    torch.testing.assert_close(loaded.eval()(**inputs).logits, logits, rtol=1e-3, atol=1e-4)
    assert not any(info.values()) and is_tied(loaded) == loaded.config.tie_word_embeddings == stays_tied


UNMERGEABLE = [
    ("llama", {"layer_replication": [[0, 2], [0, 2]]}, "layer_replication is invalid"),
    ("llama", {"lora_bias": True}, "cannot be merged at the export"),
    ("llama", {"alora_invocation_tokens": [3]}, "cannot be merged at the export"),
    ("llama", {"inference_mode": True}, "leaves nothing to train"),
    ("t5", {"modules_to_save": ["shared"]}, "do not look tokens up in shared alone"),
    ("bert", {"trainable_token_indices": {"word_embeddings": [4]}}, "drops the bias of"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "arguments", "cause"), UNMERGEABLE)
def test_what_cannot_be_merged_is_refused_on_the_skeleton(kind, arguments, cause):
    with torch.device("meta"):
        model = test_units.build(kind, tie_word_embeddings=True)
        model = make_skeleton(model)
        with pytest.raises(ValueError, match=f"^method.*{cause}.*Allowed: "):
            lora.attach_tuner(model, "dora", targets="auto", arguments={"use_dora": False} | arguments)


@pytest.mark.parametrize("merged", [True, False])
def test_a_head_with_a_second_bias_keeps_it_where_lora_unties_it(merged, tmp_path):
    model = build("roberta").eval()
    inputs = test_units.inputs_of(model)
    with torch.no_grad():
        model.lm_head.bias.normal_()
    learn(model, attach(model, embeddings=True).names)
    plain = plain_model.copy_without_tuners(model, merged=merged).eval()
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs).logits, plain(**inputs).logits)


def test_the_reach_of_adapters_leaves_experts_out():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("mixtral", **sizes, vocab_size=300, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    assert lora.find_adapter_reach(model) is None
    experts = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 3)
    attention = 2 * 4 * 32 * 32
    routers_and_norms = 2 * 8 * 32 + 5 * 32
    attach(model)
    reach = lora.find_adapter_reach(model)
    assert reach.total == experts + attention + routers_and_norms
    assert attention <= reach.adapted <= attention + 2 * 8 * 32
    assert len(reach.unreached_experts) == 4 and "experts" in reach.unreached_experts[0]


def test_adapters_of_a_dense_model_leave_no_experts_out():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 300}
    mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))  # with convolutions
    attach(mamba, targets=["in_proj"])
    assert lora.find_adapter_reach(mamba).unreached_experts == ()
