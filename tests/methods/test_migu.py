"""MIGU: which rows are chosen, what happens to them, and what is measured when."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cpt.data.collate import label_batch
from cpt.gradient_masks.base import recording
from cpt.gradient_masks.migu import CACHED, choose_by_mass, choose_rows, count_kept, magnitudes
from cpt.models.fisher import samples
from cpt.models.objectives import Causal
from cpt.models.units import projections
from cpt.trainer import loop
from tests.conftest import SHARED
from tests.support import making
from tests.support.making import ORDER, weights
from tests.support.migu import watching

GOLDEN = SHARED / "golden" / "migu_linear.npz"
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=20, **NO_DROPOUT)
    )


@pytest.fixture
def made(small):
    """A method's module, its data and the config's trainer."""

    def build(*overrides: str):
        run = making.made(small(ORDER, *overrides))
        return run.module, run.data, run.plan.trainer.lightning

    return build


def fit(module, data, options, *, place: int = 0, steps: int = 3, accumulate: int = 1) -> None:
    data.enter(data.domains[place])
    data.accumulate = accumulate
    module.activate(place)
    options = {**options, "accumulate_grad_batches": accumulate}
    loop.make_trainer(options, label="", steps=steps).fit(module, datamodule=data)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the authors' numbers are not here")
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("case", ["plain", "two_calls"])
def test_magnitudes_and_masks_are_those_of_the_authors_code(case, threshold):
    arrays = {name: torch.from_numpy(np.asarray(value)) for name, value in np.load(GOLDEN).items()}
    inputs = [arrays["x0"]] if case == "plain" else [arrays["x0"], arrays["x1"]]
    found = sum(magnitudes(x @ arrays["weight"].T + arrays["bias"], None) for x in inputs)
    torch.testing.assert_close(found, arrays[f"{case}_magnitude"], rtol=1e-4, atol=1e-6)
    mask = choose_rows(found, [torch.arange(10)[None]], threshold)
    assert torch.equal(mask, arrays[f"{case}_T{threshold}_mask"])
    masked = arrays[f"{case}_grad_w"] * mask[:, None]
    torch.testing.assert_close(masked, arrays[f"{case}_T{threshold}_grad_w"], rtol=1e-4, atol=1e-6)


def test_magnitudes_of_more_tokens_than_the_cache_holds_are_those_of_all():
    output = torch.randn(7, 1 + CACHED // 96, 32)
    torch.testing.assert_close(magnitudes(output, None), output.abs().sum((0, 1)), rtol=1e-5, atol=0)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the authors' numbers are not here")
def test_of_equal_rows_no_more_than_the_share_is_chosen():
    """The released code compares with a quantile: all that are equal to it pass."""
    magnitude = torch.from_numpy(np.load(GOLDEN)["ties_magnitude"])
    for threshold in (0.5, 0.7, 0.9):
        assert choose_rows(magnitude, [torch.arange(10)[None]], threshold).sum() == count_kept(threshold, 10)


@pytest.mark.parametrize(
    ("threshold", "width", "rows"),
    [(0.7, 1024, 308), (0.7, 768, 231), (0.7, 8, 3), (0.1, 8, 8), (0.29, 100, 71), (0.0, 5, 5), (0.99, 5, 1)],
)
def test_the_number_of_rows_is_the_papers(threshold, width, rows):
    assert count_kept(threshold, width) == rows


def chosen_by_loops(
    captured: dict[str, list[torch.Tensor]], segments, threshold: float
) -> dict[str, list[int]]:
    """Mean |h| by token and row, and the largest rows of each segment."""
    rows = {}
    for name, outputs in captured.items():
        sums = [0.0] * outputs[0].shape[-1]
        for output in outputs:
            for token in output.reshape(-1, len(sums)).tolist():
                sums = [total + abs(value) for total, value in zip(sums, token, strict=True)]
        rows[name] = []
        for segment in segments[name]:
            best = sorted(segment.tolist(), key=lambda row: -sums[row])
            rows[name] += best[: len(segment) - math.floor(threshold * len(segment))]
    return rows


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_the_rows_are_those_with_the_largest_outputs(family):
    """Brute force, with Conv1D weights and fused projections ranked in segments, interleaved ones too."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=60, max_position_embeddings=20))
    model = {"gpt2": gpt2(), "gpt_neox": neox}[family]
    captured, names = {}, {each.module: each.name for each in projections(model)}
    for each in projections(model):
        keep = captured.setdefault(each.name, [])
        each.module.register_forward_hook(
            lambda m, a, output, keep=keep: keep.append(output.detach().clone())
        )
    mask = watching(model)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        with recording([mask]):
            ids = torch.randint(0, 60, (3, 9), generator=draw)
            model(input_ids=ids, labels=ids).loss.backward()
    segments = {each.name: each.segments for each in projections(model)}
    expected = chosen_by_loops(captured, segments, 0.7)
    weight_of = {id(module.weight): name for module, name in names.items()}
    found = {}
    for parameter, factor in mask.factors():
        flat = factor.flatten()
        assert factor.shape == ((len(flat), 1) if family == "gpt_neox" else (1, len(flat)))
        found[weight_of[id(parameter)]] = flat.nonzero().flatten().tolist()
    assert {name: sorted(rows) for name, rows in expected.items()} == found
    assert len(found) == 8


def test_what_is_not_the_training_loss_is_not_measured():
    """No evaluation, no pass without gradients, no part of the model on its own, nothing recomputed."""
    model, ids = gpt2(), torch.arange(9)[None]
    mask = watching(model)
    model(input_ids=ids)
    with recording([mask]), torch.no_grad():
        model(input_ids=ids)
    with recording([mask]):
        model.transformer(input_ids=ids)
    assert not mask.sums.any()
    with recording([mask]):
        model(input_ids=ids)
    once = mask.sums.clone()
    assert once.all() and not mask.recording
    model.activation_checkpointing_enable()
    mask.sums.zero_()
    with recording([mask]):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.testing.assert_close(mask.sums, once)


def test_each_step_chooses_by_its_own_batch_alone():
    model = gpt2()
    mask, fresh = watching(model), watching(model)
    first, second = torch.arange(9)[None], torch.arange(30, 39)[None]
    with recording([mask]):
        model(input_ids=first)
    list(mask.factors())
    with recording([mask, fresh]):
        model(input_ids=second)
    torch.testing.assert_close(mask.sums, fresh.sums, rtol=0, atol=0)
    for (_, one), (_, other) in zip(mask.factors(), fresh.factors(), strict=True):
        assert torch.equal(one, other)


def test_an_exception_within_the_model_ends_the_measurement():
    model = gpt2()
    mask = watching(model)
    with recording([mask]), pytest.raises(IndexError):
        model(input_ids=torch.tensor([[99]]))
    assert not mask.inside


def test_padding_is_not_measured():
    model, ids = gpt2().eval(), torch.arange(5, 14)[None]
    padded = torch.cat([ids, torch.ones(1, 4, dtype=torch.long)], dim=1)
    present = torch.tensor([[1] * 9 + [0] * 4])
    mask = watching(model)
    with recording([mask]):
        model(input_ids=ids)
        plain = mask.sums.clone()
        mask.sums.zero_()
        model(input_ids=padded, attention_mask=present)
    torch.testing.assert_close(mask.sums, plain)


def padded_pair(source: list[int], target: list[int]) -> dict[str, torch.Tensor]:
    """Rows of a model with a decoder, of so many tokens each, padded with 0."""
    draw = torch.Generator().manual_seed(3)
    rows = {}
    for name, lengths in (("input_ids", source), ("decoder_input_ids", target)):
        ids = torch.randint(3, 60, (len(lengths), max(lengths)), generator=draw)
        rows[name] = ids * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
    rows["decoder_input_ids"][:, 0] = 0  # what a decoder begins with
    rows["attention_mask"] = (torch.arange(max(source)) < torch.tensor(source)[:, None]).long()
    return rows


@pytest.mark.parametrize("target", [[5, 3, 4], [9, 4, 6]], ids=["shorter", "as long"])
@pytest.mark.parametrize("form", ["relu", "gated-gelu"])
def test_with_a_decoder_each_map_counts_the_tokens_that_it_works_on(form, target):
    """Brute force, row by row without any padding; source and target may be as long in padded tokens."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 60}
    model = T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj=form, dropout_rate=0.0))
    source = [9, 5, 7]
    batch = padded_pair(source, target)
    mask = watching(model)
    captured = {each.name: [] for each in projections(model)}
    handles = [
        each.module.register_forward_hook(
            lambda m, a, output, keep=captured[each.name]: keep.append(output.detach().clone())
        )
        for each in projections(model)
    ]
    for row, (s, t) in enumerate(zip(source, target, strict=True)):
        alone = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["decoder_input_ids"]}
        cut = {"input_ids": s, "decoder_input_ids": t}
        model(**{name: ids[row : row + 1, : cut[name]] for name, ids in alone.items()})
    for handle in handles:
        handle.remove()
    with recording([mask]):
        model(**batch)
    for each, place in zip(mask.maps, mask.places, strict=True):
        expected = sum(output.abs().sum((0, 1)) for output in captured[each.name])
        torch.testing.assert_close(mask.sums[place], expected, rtol=1e-4, atol=1e-5, msg=each.name)
    segments = {each.name: each.segments for each in projections(model)}
    names = {id(each.module.weight): each.name for each in projections(model)}
    wanted = {name: sorted(rows) for name, rows in chosen_by_loops(captured, segments, 0.7).items()}
    found = {names[id(p)]: factor.flatten().nonzero().flatten().tolist() for p, factor in mask.factors()}
    assert found == wanted
    assert len(found) == 2 * (4 + 2 + (form != "relu")) + 2 * (8 + 2 + (form != "relu"))


def test_a_head_counts_the_scored_positions():
    """Also where rows are padded: padding is scored nowhere."""
    model = gpt2().eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    ids, present = torch.arange(5, 15).view(2, 5), torch.ones(2, 5, dtype=torch.bool)
    present[1, 3:] = False
    labels = ids.where(present, torch.tensor(-100))
    batch = label_batch(ids, labels, present)
    mask = watching(model, head=True)
    with recording([mask]):
        logits, _ = Causal().outputs(model, batch)
    place = next(p for each, p in zip(mask.maps, mask.places, strict=True) if each.name == "lm_head")
    torch.testing.assert_close(mask.sums[place], logits.detach().abs().sum(0))


def test_in_training_the_rows_are_chosen_by_the_batch_that_is_learned(made, monkeypatch):
    module, data, options = made("model=tiny_roberta", "method=migu", "method.mask.only=0.intermediate")
    (each,), outputs, chosen = module.masks[0].maps, [], []
    each.module.register_forward_hook(lambda m, a, output: outputs.append(output.detach().clone()))
    factors = type(module.masks[0]).factors

    def noted(self):
        found = list(factors(self))
        chosen.append(found[0][1].flatten().nonzero().flatten().tolist())
        return iter(found)

    monkeypatch.setattr(type(module.masks[0]), "factors", noted)
    fit(module, data, options, steps=2)
    for output, rows in zip(outputs, chosen, strict=True):
        sums = output.flatten(0, -2).abs().sum(0).tolist()
        assert rows == sorted(
            sorted(range(len(sums)), key=lambda row: -sums[row])[: count_kept(0.7, len(sums))]
        )


def test_masked_rows_get_no_gradient_and_the_others_all_of_it(made, monkeypatch):
    """Also the canary: the share of masked rows is the threshold's, in every map and at every step; heads,
    embeddings, norms and biases are not touched; and masking comes before clipping."""
    module, data, options = made("model=tiny_roberta", "method=migu", "trainer.gradient_clip_val=1e-3")
    before, after, hook = [], [], type(module).on_before_optimizer_step

    def noted(self, optimizer):
        before.append({name: value.grad.clone() for name, value in self.model.named_parameters()})
        hook(self, optimizer)
        after.append({name: value.grad.clone() for name, value in self.model.named_parameters()})

    monkeypatch.setattr(type(module), "on_before_optimizer_step", noted)
    norms, make = [], module.make_optimizer

    def listening(groups):
        made = make(groups)
        made.register_step_post_hook(
            lambda *_: norms.append(
                sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None).sqrt()
            )
        )
        return made

    module.make_optimizer = listening
    fit(module, data, options)
    covered = {f"{each.name}.weight" for each in projections(module.model)}
    assert len(before) == 3 and len(covered) == 12
    for plain, masked in zip(before, after, strict=True):
        for name, gradient in plain.items():
            if name not in covered:
                assert torch.equal(masked[name], gradient)
                continue
            zero = (masked[name] == 0).all(1)
            assert zero.sum() == math.floor(0.7 * len(zero))
            assert torch.equal(masked[name][~zero], gradient[~zero])
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)


@pytest.mark.parametrize("acts_on", ["gradient", "update", "frozen"])
def test_what_masked_rows_do_under_adam(acts_on, made, monkeypatch):
    """The lower half of all rows is masked from the second step on. Scaled gradients: momentum and decay go
    on moving a row. Scaled updates: it keeps its bits. Frozen: its moments do as well."""
    module, data, options = made("method=migu", f"method.mask.acts_on={acts_on}", "optim.weight_decay=0.3")
    weight = module.masks[0].maps[0].module.weight
    upper, lower = slice(None, len(weight) // 2), slice(len(weight) // 2, None)
    levels = []

    def halved(scores, segments, threshold):
        state = module.trainer.optimizers[0].state.get(weight, {})
        levels.append(
            [weight.detach().clone()] + [state[name].clone() for name in ("exp_avg", "exp_avg_sq") if state]
        )
        mask = torch.ones(len(scores))
        if len(levels) > 1:
            mask[: len(weight)][lower] = 0
        return mask

    monkeypatch.setattr("cpt.gradient_masks.migu.choose_rows", halved)
    fit(module, data, options, steps=3)
    one, two = levels[1:]
    kept = [torch.equal(before[lower], after[lower]) for before, after in zip(one, two, strict=True)]
    assert kept == [acts_on != "gradient", acts_on == "frozen", acts_on == "frozen"]
    assert not any(torch.equal(before[upper], after[upper]) for before, after in zip(one, two, strict=True))


def test_as_a_method_and_as_a_mask_it_is_the_same(small, start, tmp_path):
    start(small(ORDER, "method=migu"), tmp_path / "method")
    start(small(ORDER, "mask=migu"), tmp_path / "mask")
    start(small(ORDER, "method=migu", "mask=migu"), tmp_path / "both")
    one = weights(tmp_path / "method")
    for other in ("mask", "both"):
        found = weights(tmp_path / other)
        assert all(torch.equal(one[name], found[name]) for name in one)


def test_the_first_domain_can_be_left_out(small, start, tmp_path):
    """As the released code does: bit for bit NCL until the second domain."""
    skip = ["method=migu", "method.mask.skip_first_domain=true", "keep_stages=true"]
    start(small(ORDER, "keep_stages=true"), tmp_path / "ncl")
    start(small(ORDER, *skip), tmp_path / "migu")
    for stage, same in (("001", True), ("002", False)):
        one, other = (
            torch.load(tmp_path / each / "stages" / f"{stage}.pt", weights_only=True)
            for each in ("ncl", "migu")
        )
        assert all(torch.equal(value, other[name]) for name, value in one.items()) == same


def test_other_importances(made):
    """The controls rank rows by the L1 norm of gradient or weight, or draw them anew at each step."""
    model = gpt2()
    ids = torch.arange(9)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    down = model.transformer.h[0].mlp.c_proj
    for importance, values in (("weight", down.weight), ("gradient", down.weight.grad)):
        mask = watching(model, importance=importance, only="h.0.mlp.c_proj")
        ((_, factor),) = mask.factors()
        best = sorted(range(32), key=lambda row: -values[:, row].abs().sum().item())[: count_kept(0.7, 32)]
        assert factor.flatten().nonzero().flatten().tolist() == sorted(best)
    mask = watching(model, importance="random")
    draws = [torch.cat([factor.flatten() for _, factor in mask.factors()]) for _ in range(400)]
    assert not torch.equal(draws[0], draws[1])
    again = watching(model, importance="random")
    assert torch.equal(torch.cat([factor.flatten() for _, factor in again.factors()]), draws[0])
    frequency = mask.chosen / mask.steps
    assert frequency.min() > 0.15 and frequency.max() < 0.5


def test_biases_and_heads_only_when_asked():
    model = gpt2()
    plain = {id(p) for p, _ in watching(model).factors()}
    assert plain == {id(each.module.weight) for each in projections(model)}
    with_biases = {id(p) for p, _ in watching(model, biases=True).factors()}
    assert with_biases == plain | {id(each.module.bias) for each in projections(model)}
    assert {id(p) for p, _ in watching(model, head=True).factors()} == plain
    tied = {id(p) for p, _ in watching(model, head=True, tied=True).factors()}
    assert tied == plain | {id(model.lm_head.weight)}
    untied = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60, tie_word_embeddings=False)
    )
    assert id(untied.lm_head.weight) in {id(p) for p, _ in watching(untied, head=True).factors()}


def test_sums_are_those_of_the_whole_batch_of_all_processes():
    """What the processes add up to is what one process would have measured."""
    model, ids = gpt2(), torch.randint(0, 60, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = watching(model.eval())
    with recording([mask]):
        model(input_ids=ids)
    whole = mask.sums.clone()
    mask.sums.zero_()
    with recording([mask]):
        model(input_ids=ids[:2])
        model(input_ids=ids[2:])
    torch.testing.assert_close(mask.sums, whole)


@pytest.mark.parametrize(
    ("mass", "chosen"),
    [
        (0.5, [0, 1]),
        (0.5001, [0, 1, 2]),
        (0.1, [1]),
        (0.9, [0, 1, 2, 4]),
        (0.91, [0, 1, 2, 3, 4]),
        (1.0, range(6)),
    ],
)
def test_the_fewest_rows_that_hold_a_share_are_chosen(mass, chosen):
    scores = torch.tensor([2.0, 3.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0])
    segments = [torch.arange(6)[None], torch.tensor([[6, 7]]), torch.tensor([[8]])]
    mask = choose_by_mass(scores, segments, mass)
    assert mask[:6].nonzero().flatten().tolist() == list(chosen)
    assert mask[6:].tolist() == [1, 1, 1]  # all of nothing; one row is never none


def test_rows_are_ranked_by_their_fisher_before_the_domain(small):
    """By hand: sums over rows of the squared gradients of each sample, of the model before the domain."""
    options = [f"mask.migu.{each}" for each in ("importance=fisher", "threshold=0.5", "acts_on=frozen")]
    small_probe = ["trainer.probe_samples=6", "optim.weight_decay=0.1"]
    work = making.made(small("mask=migu", ORDER, *options, *small_probe))
    (mask,), model = work.module.masks, deepcopy(work.module.model).eval()
    names = {each.name: model.get_parameter(f"{each.name}.weight") for each in mask.maps}
    work.learn(0)
    sums = dict.fromkeys(names, 0)
    for sample in (each for batch in work.probe() for each in samples(batch)):
        loss = work.module.objective.nll(model, sample).mean()
        for each, gradient in zip(mask.maps, torch.autograd.grad(loss, list(names.values())), strict=True):
            sums[each.name] += gradient.square().sum(1 - each.axis)
    for each in mask.maps:
        moved = (each.module.weight != names[each.name]).any(1 - each.axis)
        for segment in each.segments:
            best = segment[sums[each.name][segment].topk(len(segment) - len(segment) // 2).indices]
            assert set(segment[moved[segment]].tolist()) == set(best.tolist()), each.name


@pytest.mark.parametrize(
    ("model", "given", "told"),
    [
        ("small_gpt2", ["mask.migu.head=true"], "the head is the embedding"),
        ("small_gpt2", ["mask.migu.head=true", "mask.migu.tied=true"], ""),
        ("small", ["mask.migu.head=true", "method=lora"], "the method trains parts of the blocks alone"),
        ("small", ["method=lora"], ""),
    ],
)
def test_a_head_that_is_asked_for_and_not_there_is_told(model, given, told, request, caplog):
    making.made(request.getfixturevalue(model)("mask=migu", ORDER, *given))
    lines = [each for each in caplog.messages if "head=true adds nothing" in each]
    assert len(lines) == bool(told) and all(told in each for each in lines)
