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
STILL = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
T5 = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
FAMILIES = {"llama": {}, "gpt_neox": {}, "gpt2": {"tie_word_embeddings": True, **STILL}}
FAMILIES |= {"t5-gated": T5, "t5": {"feed_forward_proj": "relu", **T5}}
FAMILIES["roberta"] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VALUES = {
    **{"threshold": 0.7, "importance": "output", "estimator": "per_sample", "apply_to": "gradient"},
    **{"only": None, "biases": False, "head": False, "tied": False, "skip_first_domain": False},
    **{"backend": "hooks", "seed": 0, "magnitudes": True},
}


def watching(model, **values):
    mask = MagnitudeMask(MagnitudeMaskOptions(**{**VALUES, **values}))
    mask.watch(model, None)
    return mask


def tiny(family, **given):
    return test_units.build(family, **{**FAMILIES[family], **given}).float().train()


gpt2 = partial(tiny, "gpt2")


@needs_golden
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("case", ["plain", "two_calls"])
def test_magnitudes_and_masks_are_those_of_the_authors_code(case, threshold):
    golden = np.load(GOLDEN / "migu_linear.npz").items()
    arrays = {name: torch.from_numpy(np.asarray(value)) for name, value in golden}
    inputs = [arrays["x0"]] if case == "plain" else [arrays["x0"], arrays["x1"]]
    found = sum(sum_magnitudes(x @ arrays["weight"].T + arrays["bias"], None) for x in inputs)
    torch.testing.assert_close(found, arrays[f"{case}_magnitude"], rtol=1e-4, atol=1e-6)
    mask = choose_rows(found, [torch.arange(10)[None]], threshold)
    assert torch.equal(mask, arrays[f"{case}_T{threshold}_mask"])
    masked = arrays[f"{case}_grad_w"] * mask[:, None]
    torch.testing.assert_close(masked, arrays[f"{case}_T{threshold}_grad_w"], rtol=1e-4, atol=1e-6)
    # Of equal rows no more than the share: their code compares with a quantile, which all that equal it pass.
    equal = choose_rows(arrays["ties_magnitude"], [torch.arange(10)[None]], threshold)
    assert equal.sum() == count_chosen(threshold, 10)


def test_magnitudes_count_a_prompt_and_no_padding():
    output, present = torch.randn(2, 3 + 4, 5), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    counted = torch.cat([output[0, :6], output[1, :5]]).abs().sum(0)
    torch.testing.assert_close(sum_magnitudes(output, present), counted)
    large = torch.randn(7, 1 + CACHED // 96, 32)
    torch.testing.assert_close(sum_magnitudes(large, None), large.abs().sum((0, 1)), rtol=1e-5, atol=0)


def test_texts_are_compared_by_the_rows_with_their_largest_magnitudes():
    model, present, outputs = gpt2().eval(), torch.tensor([[1, 1, 1], [1, 1, 0]]), []
    mask = watching(model)
    [widest] = [each for each in mask.maps if each.name.endswith("h.1.attn.c_attn")]
    widest.module.register_forward_hook(lambda module, args, x: outputs.append(x.flatten(0, -2)))
    batches = [(3, IDS[:, :5], None), (3, IDS[:, 5:], None), (5, IDS[:, :6].view(2, 3), present)]
    with torch.inference_mode():
        for text, ids, given in batches:
            with mark_observed([mask], text):
                model(input_ids=ids, attention_mask=given)
        model(input_ids=IDS)  # no text that is observed
    found, (first, second, padded, _) = mask.diagnostics(), outputs
    sums = [torch.cat([first, second]).abs().sum(0), padded[present.flatten().bool()].abs().sum(0)]
    one, other = (choose_rows(own, [each[None] for each in widest.segments], 0.7) for own in sums)
    index = (one * other).sum() / torch.maximum(one, other).sum()
    torch.testing.assert_close(found[f"similarity/{widest.name}"], torch.tensor([[1, index], [index, 1]]))
    shares = torch.stack([each / each.sum() for each in sums])
    torch.testing.assert_close(found[f"magnitudes/{widest.name}"], shares)
    assert found["texts"].tolist() == [3, 5] and "texts" not in mask.diagnostics()


def test_the_magnitudes_of_all_micro_batches_of_a_step_are_summed():
    model = gpt2().eval()
    mask, sums = watching(model), []
    for ids in (IDS[:, :4], IDS[:, 4:]):
        alone = watching(model)
        with mark_recorded([alone]):
            model(input_ids=ids)
        sums.append(alone.sums.clone())
    with mark_recorded([mask]):
        model(input_ids=IDS[:, :4])
        model(input_ids=IDS[:, 4:])
    torch.testing.assert_close(mask.sums, sums[0] + sums[1])
    assert sums[0].min() > 0


def test_the_number_of_rows_is_the_papers():
    counts = {(0.7, 1024): 308, (0.7, 768): 231, (0.1, 8): 8, (0.29, 100): 71, (0.0, 5): 5, (0.99, 5): 1}
    assert {given: count_chosen(*given) for given in counts} == counts


def test_the_fewest_rows_that_hold_a_share_are_chosen():
    scores = torch.tensor([2.0, 3.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0])
    segments = [torch.arange(6)[None], torch.tensor([[6, 7]]), torch.tensor([[8]])]
    rows = {0.5: [0, 1], 0.5001: [0, 1, 2], 0.1: [1], 0.9: [0, 1, 2, 4], 0.91: [0, 1, 2, 3, 4]}
    for top_p, chosen in rows.items():
        mask = choose_by_mass(scores, segments, top_p)
        assert mask[:6].nonzero().flatten().tolist() == chosen
        assert mask[6:].tolist() == [1, 1, 1]  # all of nothing; one row is never none


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "t5-gated"])
def test_the_rows_are_those_with_the_largest_outputs(family):
    draw, model, captured = torch.Generator().manual_seed(3), tiny(family).eval(), {}
    lengths = {"input_ids": [9, 5, 7]} | ({"decoder_input_ids": [5, 3, 4]} if family == "t5-gated" else {})
    rows = {
        name: [torch.randint(3, 60, (size,), generator=draw) for size in lengths[name]] for name in lengths
    }
    for row in rows.get("decoder_input_ids", ()):
        row[0] = 0  # what a decoder begins with
    batch, mask = {name: pad_sequence(each, batch_first=True) for name, each in rows.items()}, watching(model)
    with mark_recorded([mask]):
        model(**batch, attention_mask=(batch["input_ids"] != 0).long())
    sums, factors = mask.sums.clone(), dict(mask.factors())
    hook = lambda module, args, output: captured.setdefault(module, []).append(output.detach())  # noqa: E731
    for each in mask.maps:
        each.module.register_forward_hook(hook)
    for number in range(3):
        model(**{name: each[number][None] for name, each in rows.items()})
    for each, place in zip(mask.maps, mask.slices, strict=True):
        own, expected = sum(output.abs().sum((0, 1)) for output in captured[each.module]), []
        torch.testing.assert_close(sums[place], own, rtol=1e-4, atol=1e-5, msg=each.name)
        for segment in each.segments:
            count = len(segment) - math.floor(0.7 * len(segment))
            expected += segment[own[segment].topk(count).indices].tolist()
        factor = factors[each.module.weight]
        assert factor.shape == ((1, len(own)) if family == "gpt2" else (len(own), 1))
        assert factor.flatten().nonzero().flatten().tolist() == sorted(expected)
    assert len(factors) == {"gpt2": 8, "gpt_neox": 8, "t5-gated": 36}[family]


def test_what_is_not_the_training_loss_is_not_measured():
    model = gpt2()
    mask = watching(model)
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
    once = mask.sums.clone()
    assert once.all() and not mask.recording
    list(mask.factors())
    fresh = watching(model)
    with mark_recorded([mask, fresh]):
        model(input_ids=IDS + 30)
    assert torch.equal(mask.sums, fresh.sums)  # each step chooses by its own batch alone
    checkpoint_activations(model)
    mask.sums.zero_()
    with mark_recorded([mask]):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    torch.testing.assert_close(mask.sums, once)


def test_biases_and_heads_only_when_asked():
    model, untied = gpt2(), gpt2(tie_word_embeddings=False)
    maps = [each.module for each in find_projections(model)]
    plain, biases = {id(each.weight) for each in maps}, {id(each.bias) for each in maps}
    covered = lambda model, **given: {id(p) for p, _ in watching(model, **given).factors()}  # noqa: E731
    assert covered(model) == covered(model, head=True) == plain
    assert covered(model, biases=True) == plain | biases
    assert covered(model, head=True, tied=True) == plain | {id(model.lm_head.weight)}
    assert id(untied.lm_head.weight) in covered(untied, head=True)


@pytest.mark.parametrize("apply_to", ["gradient", "update", "frozen"])
def test_what_masked_rows_do_under_adam(apply_to, build, monkeypatch):
    work = build("migu", f"method.mask.apply_to={apply_to}", "optim.weight_decay=0.3", "trainer.steps=3")
    weight, levels = work.module.masks[0].maps[0].module.weight, []
    upper, lower = slice(None, len(weight) // 2), slice(len(weight) // 2, None)

    def halved(scores, segments, threshold):
        state = work.module.trainer.optimizers[0].state.get(weight, {})
        moments = [state[name].clone() for name in ("exp_avg", "exp_avg_sq") if state]
        levels.append([weight.detach().clone(), *moments])
        mask = torch.ones(len(scores))
        if len(levels) > 1:
            mask[: len(weight)][lower] = 0
        return mask

    monkeypatch.setattr("cpt.gradient_masks.migu.choose_rows", halved)
    work.learn(0)
    one, two = levels[1:]
    kept = [torch.equal(before[lower], after[lower]) for before, after in zip(one, two, strict=True)]
    assert kept == [apply_to != "gradient", apply_to == "frozen", apply_to == "frozen"]
    assert not any(torch.equal(before[upper], after[upper]) for before, after in zip(one, two, strict=True))


def test_the_first_domain_can_be_left_out(build):
    plain, masked = build("ncl"), build("migu", "method.mask.skip_first_domain=true")
    for number in (0, 1):
        for work in (plain, masked):
            work.learn(number)
        assert equal_tensors(plain.weights(), masked.weights()) == (number == 0)


def test_other_importances():
    model = gpt2()
    model(input_ids=IDS, labels=IDS).loss.backward()
    down = model.transformer.h[0].mlp.c_proj
    for importance, values in (("weight", down.weight), ("gradient", down.weight.grad)):
        ((_, factor),) = watching(model, importance=importance, only="h.0.mlp.c_proj").factors()
        best = values.abs().sum(0).topk(count_chosen(0.7, 32)).indices.tolist()
        assert factor.flatten().nonzero().flatten().tolist() == sorted(best)
    mask, again = watching(model, importance="random"), watching(model, importance="random")
    draws = [torch.cat([factor.flatten() for _, factor in mask.factors()]) for _ in range(200)]
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(torch.cat([factor.flatten() for _, factor in again.factors()]), draws[0])
    frequency = mask.chosen / mask.steps
    assert frequency.min() > 0.12 and frequency.max() < 0.55


def test_rows_are_ranked_by_their_fisher_before_the_domain(build):
    options = [f"mask.migu.{each}" for each in ("importance=fisher", "threshold=0.5", "apply_to=frozen")]
    work = build("ncl", "mask=migu", *options, "trainer.importance_samples=6", "optim.weight_decay=0.1")
    (mask,), model = work.module.masks, deepcopy(work.module.model).eval()
    work.learn(0)
    found = estimate_fisher(
        model, work.importance_batches(), objective=work.module.objective, estimator="per_sample"
    )
    for each in mask.maps:
        own = found[f"{each.name}.weight"].sum(1 - each.axis)
        moved = (each.module.weight != model.get_parameter(f"{each.name}.weight")).any(1 - each.axis)
        for segment in each.segments:
            best = segment[own[segment].topk(len(segment) - len(segment) // 2).indices]
            assert set(segment[moved[segment]].tolist()) == set(best.tolist()), each.name


TEXT = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(0))


def gradients(family, backend, *, change=lambda made: None, dtype=None, passes=1):
    torch.manual_seed(0)
    made = tiny(family)
    change(made)
    mask = watching(made, backend=backend)
    with mark_recorded([mask]), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = sum(made(input_ids=TEXT + turn, labels=TEXT).loss for turn in range(passes))
    loss.backward()
    named = {name: each for name, each in made.named_parameters() if each.grad is not None}
    raw, factors = {name: each.grad.clone() for name, each in named.items()}, dict(mask.factors())
    kept = {name: factors[each] for name, each in named.items() if each in factors}
    return raw, kept, {name: each * kept.get(name, 1) for name, each in raw.items()}


@pytest.mark.parametrize(("family", "given"), [
    ("llama", {}),
    ("t5", {}),
    ("gpt2", {"passes": 3}),  # of one loss, which are counted together
    ("roberta", {"dtype": torch.bfloat16}),
    ("roberta", {"change": checkpoint_activations}),
    ("roberta", {"change": lambda made: made.roberta.encoder.layer[0].requires_grad_(False)}),
])  # fmt: skip
def test_masks_and_gradients_are_those_of_the_hooks(family, given):
    (_, masks, expected), (raw, found, scaled) = (
        gradients(family, each, **given) for each in ("hooks", "backward")
    )
    near = 0.02 if "dtype" in given else 1e-6
    assert equal_tensors(masks, found) and masks
    assert_close(expected, scaled, rtol=near, atol=near)
    for name, factor in found.items():
        assert raw[name].any() and not raw[name][(factor == 0).expand_as(raw[name])].any(), name


def test_passes_that_are_not_of_the_loss_have_all_gradients():
    made, found = gpt2(), []
    mask = watching(made, backend="backward")
    models = made, deepcopy(made)
    for context in (nullcontext(), mark_recorded([mask], is_only_micro_batch=False), mark_recorded([mask])):
        with context:
            loss = sum(each(input_ids=TEXT, labels=TEXT).loss for each in models)
        loss.backward()
        found.append([bool(each.transformer.h[0].mlp.c_fc.weight.grad.any(0).all()) for each in models])
        for each in models:
            each.zero_grad()
    assert found == [[True, True], [True, True], [False, True]]


@pytest.mark.parametrize("method", ["hat", "cpt_plugin"])
def test_gates_on_an_output_are_part_of_the_gradient_of_either_backend(method, build):
    given = ["mask=migu", "mask.migu.threshold=0"]
    hooks, backward = (build(method, *given, f"mask.migu.backend={each}") for each in ("hooks", "backward"))
    for each in (hooks, backward):
        each.learn(0)
    assert_close(backward.weights(), hooks.weights(), rtol=1e-4, atol=1e-6)
