"""Pairs that are weighed by the text or by the token, against sums over pairs written out, on tiny models."""

import pytest
import torch
from torch.nn import functional

from cpt.adapters import lora, plain_model
from cpt.adapters.routed_lora import attach_experts, attach_routed, begin_routed, find_router
from cpt.models.forward import find_input_stack
from tests.models.test_units import build, inputs_of
from tests.support.mixtures import build_mixture

R, ALPHA, PAIRS = 2, 5.0, 3
SAPT = {"key": "attention", "query": "embeddings"}
MOCL = {"key": "cosine", "query": "encoder"}
FAMILIES = ["roberta", "gpt2", "llama", "opt", "t5"]  # of llama, keys and values are narrower than the input
CAUSAL = ["gpt2", "llama", "opt"]


@torch.no_grad()
def build_routed(name: str, form: dict[str, str] = SAPT):
    model = build(name)
    settings = {"r": R, "alpha": ALPHA, "dropout": 0.0, "targets": "all-linear"}
    attach_routed(model, **settings, **form, bottleneck=4, scale=8.0, causal=name in CAUSAL)
    model.double().eval()
    for number in range(PAIRS):
        if number:
            begin_routed(model, torch.Generator().manual_seed(number))
        torch.manual_seed(number)
        for layer in lora.find_lora_layers(model).values():
            lora.get_factors(layer)[1].normal_(std=0.05)
    return model


def compute_queries(model, inputs, form) -> torch.Tensor:
    """e of each row, [B, 1, D], or at each place of a causal model, [B, T, D]."""
    if form["query"] == "embeddings":
        states = model.get_input_embeddings()(inputs["input_ids"])
    else:
        plain = plain_model.copy_without_tuners(model, merged=False)
        states = find_input_stack(plain)(input_ids=inputs["input_ids"]).last_hidden_state
    if not find_router(model).causal:
        return states.mean(1, keepdim=True)
    return torch.stack([states[:, : position + 1].mean(1) for position in range(states.shape[1])], dim=1)


def weights_by_hand(model, inputs, form) -> torch.Tensor:
    """a [B, 1 or T, t]."""
    router = find_router(model)
    means = compute_queries(model, inputs, form)
    keys = torch.cat([router.earlier, router.key])
    if form["key"] == "cosine":
        return (8 * functional.cosine_similarity(means[..., None, :], keys, dim=-1)).softmax(-1)
    query = functional.silu(means @ router.down.weight.T @ router.up.weight.T)
    query = functional.layer_norm(query, query.shape[-1:], router.norm.weight, router.norm.bias)
    return (query @ keys.T / keys.shape[1] ** 0.5).softmax(-1)


def record_layers(model, inputs):
    recorded = {}
    for layer in lora.find_lora_layers(model).values():
        layer.register_forward_hook(lambda module, args, output: recorded.update({module: (args[0], output)}))
    model(**inputs)
    assert len(recorded) > 4
    return recorded.items()


def sum_adapters(layer, x, pairs_a, pairs_b, weights) -> torch.Tensor:
    """The map with pairs, by their weights [..., pairs]."""
    expected = layer.get_base_layer()(x)
    for pair in range(PAIRS):
        columns = slice(pair * R, (pair + 1) * R)
        product = x @ pairs_a[columns].T @ pairs_b[:, columns].T
        expected = expected + ALPHA / R * weights[..., pair : pair + 1] * product
    return expected


CASES = [*((name, SAPT) for name in FAMILIES), ("roberta", MOCL), ("gpt2", MOCL)]


@pytest.mark.parametrize(("name", "form"), CASES)
@torch.no_grad()
def test_each_map_is_the_sum_of_its_pairs_by_their_weights(name, form):
    model = build_routed(name, form)
    inputs = inputs_of(model)
    recorded = record_layers(model, inputs)
    a = weights_by_hand(model, inputs, form)
    assert a.shape[2] == PAIRS and a.std(0).max() > 1e-3
    assert {layer.in_features == layer.out_features for layer, _ in recorded} == {True, False}
    for layer, (x, output) in recorded:
        halves = zip(lora.get_factors(layer, "earlier"), lora.get_factors(layer), strict=True)
        pairs = [torch.cat(halves_of_pair, dim) for dim, halves_of_pair in enumerate(halves)]
        weights = a.expand(-1, 7, -1).flatten(0, 1) if x.ndim == 2 else a
        torch.testing.assert_close(output, sum_adapters(layer, x, *pairs, weights), rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@torch.no_grad()
def test_latents_of_all_tokens_are_weighed_by_token_also_when_text_is_generated():
    model = build_mixture("deepseek_v3")
    attach_routed(
        model,
        r=R,
        alpha=ALPHA,
        dropout=0.0,
        targets="all-linear",
        **SAPT,
        bottleneck=4,
        scale=8.0,
        causal=True,
    )
    model.eval()
    begin_routed(model, torch.Generator().manual_seed(1))
    for layer in lora.find_lora_layers(model).values():
        for adapter in (lora.EARLIER, lora.NEWEST):
            lora.get_factors(layer, adapter)[1].normal_()
    layer = model.model.layers[0].self_attn.kv_b_proj
    inputs = []
    outputs = []
    layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))

    ids = torch.arange(3, 15).view(2, 6)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    weights = weights_by_hand(model, {"input_ids": ids}, SAPT)
    model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    latents = inputs[0]
    expanded, continued = outputs
    pairs = [lora.get_factors(layer, adapter) for adapter in (lora.EARLIER, lora.NEWEST)]
    expected = layer.get_base_layer()(latents)
    for pair, (a, b) in enumerate(pairs):
        expected = expected + ALPHA / R * weights[:, None, :, pair : pair + 1] * (latents @ a.T @ b.T)
    torch.testing.assert_close(expanded, expected, rtol=1e-4, atol=1e-5)
    assert continued.shape[2] == 7
    torch.testing.assert_close(continued[:, :, :6], expanded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [SAPT, MOCL], ids=["sapt", "mocl"])
@torch.no_grad()
def test_padding_is_no_part_of_the_query_nor_what_comes_later_in_a_causal_model(form):
    model = build_routed("gpt2", form)
    mask = torch.ones(3, 7, dtype=torch.long)
    ids = inputs_of(model)["input_ids"]
    changed = ids.clone()
    mask[0, 5:] = 0
    changed[:, 4:] = (changed[:, 4:] + 1) % 30 + 3
    before, after = (model(input_ids=input_ids).logits for input_ids in (ids, changed))
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.equal(before[:, 4], after[:, 4])
    for routed_model in (model, build_routed("roberta", form)):
        routed_model(input_ids=ids, attention_mask=mask)
        padded = find_router(routed_model).row_log_weights[0].clone()
        routed_model(input_ids=ids[:1, :5])
        torch.testing.assert_close(padded, find_router(routed_model).row_log_weights[0])


def test_gradients_go_through_the_frozen_pairs():
    model = build_routed("roberta")
    layer = next(iter(lora.find_lora_layers(model).values()))
    inputs = inputs_of(model)
    step = 1e-6
    weight = lora.get_factors(layer)[1]

    def loss():
        return model(**inputs).logits.square().sum()

    [gradient] = torch.autograd.grad(loss(), [weight])
    with torch.no_grad():
        weight[1, 0] += step
        higher = loss()
        weight[1, 0] -= 2 * step
        assert gradient[1, 0].item() == pytest.approx((higher - loss()).item() / (2 * step), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@torch.no_grad()
def test_experts_are_summed_by_the_gates_of_each_token(name):
    torch.manual_seed(1)
    model = build(name).float()
    attach_experts(model, experts=PAIRS, r=R, alpha=ALPHA, dropout=0.0, targets="all-linear")
    model.eval()
    for layer in lora.find_lora_layers(model).values():
        lora.get_factors(layer)[1].normal_(std=0.1)
        layer.router.weight.normal_()
    for layer, (x, output) in record_layers(model, inputs_of(model)):
        gates = torch.softmax(x @ layer.router.weight.T, -1)
        expected = sum_adapters(layer, x, *lora.get_factors(layer), gates)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        assert gates.std() > 0.01
    coarse = layer.router.bfloat16()
    gates = coarse.weigh(layer, (x.bfloat16(),), torch.ones(*x.shape[:-1], PAIRS * R))  # made in 32 bits
    assert (gates.unflatten(-1, (PAIRS, R)).sum(-2) - 1).abs().max() < 1e-6
