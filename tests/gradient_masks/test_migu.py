"""MIGU: which rows are chosen, what happens to them, what is measured when."""

import math
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from cpt.gradient_masks.base import mark_observed, mark_recorded
from cpt.gradient_masks.migu import (
    CACHED,
    MagnitudeMask,
    choose_by_mass,
    choose_rows,
    count_chosen,
    sum_magnitudes,
)
from cpt.gradient_masks.options import MagnitudeMaskOptions
from cpt.models.activation_checkpointing import checkpoint_activations
from cpt.models.fisher import estimate_fisher
from cpt.models.units import find_projections
from tests.conftest import GOLDEN, needs_golden
from tests.models import test_units
from tests.support.method_fixtures import assert_close, equal_tensors

IDS = torch.arange(9)[None]
NO_DROPOUT = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
T5 = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
FAMILIES = {
    "llama": {},
    "gpt_neox": {},
    "gpt2": {"tie_word_embeddings": True, **NO_DROPOUT},
    "t5-gated": T5,
    "t5": {"feed_forward_proj": "relu", **T5},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
DEFAULTS = {
    "threshold": 0.7,
    "importance": "output",
    "estimator": "per_sample",
    "apply_to": "gradient",
    "only": None,
    "biases": False,
    "head": False,
    "tied": False,
    "skip_first_domain": False,
    "backend": "hooks",
    "seed": 0,
    "magnitudes": True,
}


def make_mask(model, **options):
    """A mask that watches a model."""
    mask = MagnitudeMask(MagnitudeMaskOptions(**(DEFAULTS | options)))
    mask.watch(model, None)
    return mask


def build_tiny(family, **changes):
    return test_units.build(family, **(FAMILIES[family] | changes)).float().train()


build_gpt2 = partial(build_tiny, "gpt2")


@needs_golden
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("case", ["plain", "two_calls"])
def test_magnitudes_and_masks_are_those_of_the_authors_code(case, threshold):
    golden = np.load(GOLDEN / "migu_linear.npz").items()
    arrays = {name: torch.from_numpy(np.asarray(value)) for name, value in golden}
    inputs = [arrays["x0"]] if case == "plain" else [arrays["x0"], arrays["x1"]]
    magnitudes = sum(sum_magnitudes(x @ arrays["weight"].T + arrays["bias"], None) for x in inputs)
    torch.testing.assert_close(magnitudes, arrays[f"{case}_magnitude"], rtol=1e-4, atol=1e-6)
    mask = choose_rows(magnitudes, [torch.arange(10)[None]], threshold)
    assert torch.equal(mask, arrays[f"{case}_T{threshold}_mask"])
    masked = arrays[f"{case}_grad_w"] * mask[:, None]
    torch.testing.assert_close(masked, arrays[f"{case}_T{threshold}_grad_w"], rtol=1e-4, atol=1e-6)

    # Of equal rows no more than the share: their code compares with a quantile, which all that equal it pass.
    mask_of_ties = choose_rows(arrays["ties_magnitude"], [torch.arange(10)[None]], threshold)
    assert mask_of_ties.sum() == count_chosen(threshold, 10)


def test_magnitudes_count_a_prompt_and_no_padding():
    output = torch.randn(2, 3 + 4, 5)
    text_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    expected = torch.cat([output[0, :6], output[1, :5]]).abs().sum(0)
    torch.testing.assert_close(sum_magnitudes(output, text_mask), expected)
    large = torch.randn(7, 1 + CACHED // 96, 32)
    torch.testing.assert_close(sum_magnitudes(large, None), large.abs().sum((0, 1)), rtol=1e-5, atol=0)


def test_texts_are_compared_by_the_rows_with_their_largest_magnitudes():
    model = build_gpt2().eval()
    mask = make_mask(model)
    [widest] = [layer for layer in mask.projections if layer.name.endswith("h.1.attn.c_attn")]
    outputs = []
    widest.module.register_forward_hook(lambda module, args, output: outputs.append(output.flatten(0, -2)))

    attention_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batches = [
        (3, IDS[:, :5], None),
        (3, IDS[:, 5:], None),
        (5, IDS[:, :6].view(2, 3), attention_mask),
    ]
    with torch.inference_mode():
        for text, ids, batch_mask in batches:
            with mark_observed([mask], text):
                model(input_ids=ids, attention_mask=batch_mask)
        model(input_ids=IDS)  # no text that is observed
    diagnostics = mask.diagnostics()

    first, second, padded, _ = outputs
    sums = [torch.cat([first, second]).abs().sum(0), padded[attention_mask.flatten().bool()].abs().sum(0)]
    segments = [segment[None] for segment in widest.segments]
    large_rows = [choose_rows(text_sums, segments, 0.7) for text_sums in sums]
    index = (large_rows[0] * large_rows[1]).sum() / torch.maximum(*large_rows).sum()
    similarity = torch.tensor([[1, index], [index, 1]])
    torch.testing.assert_close(diagnostics[f"similarity/{widest.name}"], similarity)
    shares = torch.stack([text_sums / text_sums.sum() for text_sums in sums])
    torch.testing.assert_close(diagnostics[f"magnitudes/{widest.name}"], shares)
    assert diagnostics["texts"].tolist() == [3, 5]
    assert "texts" not in mask.diagnostics()


def test_the_magnitudes_of_all_micro_batches_of_a_step_are_summed():
    model = build_gpt2().eval()
    mask = make_mask(model)
    sums = []
    for ids in (IDS[:, :4], IDS[:, 4:]):
        mask_of_one = make_mask(model)
        with mark_recorded([mask_of_one]):
            model(input_ids=ids)
        sums.append(mask_of_one.sums.clone())
    with mark_recorded([mask]):
        model(input_ids=IDS[:, :4])
        model(input_ids=IDS[:, 4:])
    torch.testing.assert_close(mask.sums, sums[0] + sums[1])
    assert sums[0].min() > 0


def test_the_number_of_rows_is_the_papers():
    counts = {(0.7, 1024): 308, (0.7, 768): 231, (0.1, 8): 8, (0.29, 100): 71, (0.0, 5): 5, (0.99, 5): 1}
    assert {arguments: count_chosen(*arguments) for arguments in counts} == counts


def test_the_fewest_rows_that_hold_a_share_are_chosen():
    scores = torch.tensor([2.0, 3.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0])
    segments = [torch.arange(6)[None], torch.tensor([[6, 7]]), torch.tensor([[8]])]
    rows = {0.5: [0, 1], 0.5001: [0, 1, 2], 0.1: [1], 0.9: [0, 1, 2, 4], 0.91: [0, 1, 2, 3, 4]}
    for top_p, chosen in rows.items():
        mask = choose_by_mass(scores, segments, top_p)
        assert mask[:6].nonzero().flatten().tolist() == chosen
        assert mask[6:].tolist() == [1, 1, 1]  # all of nothing; one row is never none


def draw_rows(family, generator):
    """Three rows of ids of different lengths, by the name of the model's input."""
    lengths = {"input_ids": [9, 5, 7]}
    if family == "t5-gated":
        lengths["decoder_input_ids"] = [5, 3, 4]
    rows = {}
    for name, sizes in lengths.items():
        rows[name] = [torch.randint(3, 60, (size,), generator=generator) for size in sizes]
    for row in rows.get("decoder_input_ids", ()):
        row[0] = 0  # what a decoder begins with
    return rows


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "t5-gated"])
def test_the_rows_are_those_with_the_largest_outputs(family):
    rows = draw_rows(family, torch.Generator().manual_seed(3))
    model = build_tiny(family).eval()
    mask = make_mask(model)
    batch = {name: pad_sequence(sequences, batch_first=True) for name, sequences in rows.items()}
    with mark_recorded([mask]):
        model(**batch, attention_mask=(batch["input_ids"] != 0).long())
    sums = mask.sums.clone()
    factors = dict(mask.factors())

    # The outputs of each row alone, without padding.
    outputs = {layer.module: [] for layer in mask.projections}
    for layer in mask.projections:
        layer.module.register_forward_hook(
            lambda module, args, output: outputs[module].append(output.detach())
        )
    for number in range(3):
        model(**{name: sequences[number][None] for name, sequences in rows.items()})

    for layer, layer_rows in zip(mask.projections, mask.row_slices, strict=True):
        layer_sums = sum(output.abs().sum((0, 1)) for output in outputs[layer.module])
        torch.testing.assert_close(sums[layer_rows], layer_sums, rtol=1e-4, atol=1e-5, msg=layer.name)
        expected = []
        for segment in layer.segments:
            count = len(segment) - math.floor(0.7 * len(segment))
            expected += segment[layer_sums[segment].topk(count).indices].tolist()
        factor = factors[layer.module.weight]
        assert factor.shape == ((1, len(layer_sums)) if family == "gpt2" else (len(layer_sums), 1))
        assert factor.flatten().nonzero().flatten().tolist() == sorted(expected)
    assert len(factors) == {"gpt2": 8, "gpt_neox": 8, "t5-gated": 36}[family]


def test_what_is_not_the_training_loss_is_not_measured():
    model = build_gpt2()
    mask = make_mask(model)
    model(input_ids=IDS)
    with mark_recorded([mask]):
        model.transformer(input_ids=IDS)  # a part on its own
        with torch.no_grad():
            model(input_ids=IDS)
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[99]]))
    assert not mask.sums.any() and not mask.is_measuring

    with mark_recorded([mask]):
        model(input_ids=IDS)
    sums = mask.sums.clone()
    assert sums.all() and not mask.recording

    list(mask.factors())
    new_mask = make_mask(model)
    with mark_recorded([mask, new_mask]):
        model(input_ids=IDS + 30)
    assert torch.equal(mask.sums, new_mask.sums)  # each step chooses by its own batch alone

    checkpoint_activations(model)
    mask.sums.zero_()
    with mark_recorded([mask]):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    torch.testing.assert_close(mask.sums, sums)


def masked_ids(model, **options):
    """The ids of the parameters that a mask has factors for."""
    return {id(parameter) for parameter, _ in make_mask(model, **options).factors()}


def test_biases_and_heads_only_when_asked():
    model = build_gpt2()
    untied_model = build_gpt2(tie_word_embeddings=False)
    modules = [projection.module for projection in find_projections(model)]
    weights = {id(module.weight) for module in modules}
    biases = {id(module.bias) for module in modules}
    assert masked_ids(model) == masked_ids(model, head=True) == weights
    assert masked_ids(model, biases=True) == weights | biases
    assert masked_ids(model, head=True, tied=True) == weights | {id(model.lm_head.weight)}
    assert id(untied_model.lm_head.weight) in masked_ids(untied_model, head=True)


@pytest.mark.parametrize("apply_to", ["gradient", "update", "frozen"])
def test_what_masked_rows_do_under_adam(apply_to, build, monkeypatch):
    work = build("migu", f"method.mask.apply_to={apply_to}", "optim.weight_decay=0.3", "trainer.steps=3")
    weight = work.module.masks[0].projections[0].module.weight
    upper = slice(None, len(weight) // 2)
    lower = slice(len(weight) // 2, None)
    states = []  # before each step: the weight and its moments

    def choose_upper_rows(scores, segments, threshold):
        state = work.module.trainer.optimizers[0].state.get(weight, {})
        moments = [state[name].clone() for name in ("exp_avg", "exp_avg_sq") if state]
        states.append([weight.detach().clone(), *moments])
        mask = torch.ones(len(scores))
        if len(states) > 1:
            mask[: len(weight)][lower] = 0
        return mask

    monkeypatch.setattr("cpt.gradient_masks.migu.choose_rows", choose_upper_rows)
    work.learn(0)
    _, before, after = states
    lower_stays = [torch.equal(old[lower], new[lower]) for old, new in zip(before, after, strict=True)]
    assert lower_stays == [apply_to != "gradient", apply_to == "frozen", apply_to == "frozen"]
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old[upper], new[upper])


def test_the_first_domain_can_be_left_out(build):
    plain = build("ncl")
    masked = build("migu", "method.mask.skip_first_domain=true")
    for domain in (0, 1):
        plain.learn(domain)
        masked.learn(domain)
        assert equal_tensors(plain.weights(), masked.weights()) == (domain == 0)


def test_other_importances():
    model = build_gpt2()
    model(input_ids=IDS, labels=IDS).loss.backward()
    down = model.transformer.h[0].mlp.c_proj
    for importance, values in (("weight", down.weight), ("gradient", down.weight.grad)):
        [(_, factor)] = make_mask(model, importance=importance, only="h.0.mlp.c_proj").factors()
        largest = values.abs().sum(0).topk(count_chosen(0.7, 32)).indices.tolist()
        assert factor.flatten().nonzero().flatten().tolist() == sorted(largest)

    mask = make_mask(model, importance="random")
    same_mask = make_mask(model, importance="random")
    draws = [torch.cat([factor.flatten() for _, factor in mask.factors()]) for _ in range(200)]
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(torch.cat([factor.flatten() for _, factor in same_mask.factors()]), draws[0])
    frequency = mask.chosen / mask.steps
    assert frequency.min() > 0.12 and frequency.max() < 0.55


def test_rows_are_ranked_by_their_fisher_before_the_domain(build):
    work = build(
        "ncl",
        "mask=migu",
        "mask.migu.importance=fisher",
        "mask.migu.threshold=0.5",
        "mask.migu.apply_to=frozen",
        "trainer.importance_samples=6",
        "optim.weight_decay=0.1",
    )
    [mask] = work.module.masks
    model = deepcopy(work.module.model).eval()
    work.learn(0)
    importances = estimate_fisher(
        model, work.importance_batches(), objective=work.module.objective, estimator="per_sample"
    )
    for layer in mask.projections:
        name = f"{layer.name}.weight"
        scores = importances[name].sum(1 - layer.axis)
        has_moved = (layer.module.weight != model.get_parameter(name)).any(1 - layer.axis)
        for segment in layer.segments:
            largest = segment[scores[segment].topk(len(segment) - len(segment) // 2).indices]
            assert set(segment[has_moved[segment]].tolist()) == set(largest.tolist()), layer.name


TEXT = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(0))


def compute_gradients(family, backend, *, change=None, dtype=None, passes=1):
    """By parameter the gradients of a loss, the factors of the mask, and their products."""
    torch.manual_seed(0)
    model = build_tiny(family)
    if change is not None:
        change(model)
    mask = make_mask(model, backend=backend)
    autocast = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
    with mark_recorded([mask]), autocast:
        loss = sum(model(input_ids=TEXT + number, labels=TEXT).loss for number in range(passes))
    loss.backward()

    named = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
    mask_factors = dict(mask.factors())
    factors = {
        name: mask_factors[parameter] for name, parameter in named.items() if parameter in mask_factors
    }
    scaled = {name: gradient * factors.get(name, 1) for name, gradient in gradients.items()}
    return gradients, factors, scaled


@pytest.mark.parametrize(("family", "options"), [
    ("llama", {}),
    ("t5", {}),
    ("gpt2", {"passes": 3}),  # of one loss, which are counted together
    ("roberta", {"dtype": torch.bfloat16}),
    ("roberta", {"change": checkpoint_activations}),
    ("roberta", {"change": lambda model: model.roberta.encoder.layer[0].requires_grad_(False)}),
])  # fmt: skip
def test_masks_and_gradients_are_those_of_the_hooks(family, options):
    _, hook_factors, expected = compute_gradients(family, "hooks", **options)
    gradients, factors, scaled = compute_gradients(family, "backward", **options)
    tolerance = 0.02 if "dtype" in options else 1e-6
    assert equal_tensors(hook_factors, factors) and hook_factors
    assert_close(expected, scaled, rtol=tolerance, atol=tolerance)
    for name, factor in factors.items():
        assert gradients[name].any(), name
        assert not gradients[name][(factor == 0).expand_as(gradients[name])].any(), name


def test_passes_that_are_not_of_the_loss_have_all_gradients():
    model = build_gpt2()
    mask = make_mask(model, backend="backward")
    copy = deepcopy(model)
    has_all_gradients = []  # of the model and its copy, by context
    contexts = (
        nullcontext(),
        mark_recorded([mask], is_only_micro_batch=False),
        mark_recorded([mask]),
    )
    for context in contexts:
        with context:
            loss = sum(tested(input_ids=TEXT, labels=TEXT).loss for tested in (model, copy))
        loss.backward()
        gradients = [tested.transformer.h[0].mlp.c_fc.weight.grad for tested in (model, copy)]
        has_all_gradients.append([bool(gradient.any(0).all()) for gradient in gradients])
        model.zero_grad()
        copy.zero_grad()
    assert has_all_gradients == [[True, True], [True, True], [False, True]]


@pytest.mark.parametrize("method", ["hat", "cpt_plugin"])
def test_gates_on_an_output_are_part_of_the_gradient_of_either_backend(method, build):
    options = ("mask=migu", "mask.migu.threshold=0")
    hooks = build(method, *options, "mask.migu.backend=hooks")
    backward = build(method, *options, "mask.migu.backend=backward")
    hooks.learn(0)
    backward.learn(0)
    assert_close(backward.weights(), hooks.weights(), rtol=1e-4, atol=1e-6)
