"""The contrastive loss against loops and the authors' numbers, and what the released code got wrong."""

import math

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from cpt.core.randomness import sample_keys
from cpt.data.collate import Rows, labels_of
from cpt.gradient_masks.soft import SoftMask
from cpt.methods import das as contrasting
from cpt.methods.das import ContrastiveLoss, contrastive
from cpt.methods.options import ContrastOptions
from cpt.models.forward import dropout, dropout_of, mean_over
from cpt.models.objectives import Causal, Span
from tests.conftest import SHARED
from tests.gradient_masks.test_soft import batch_of, needs_golden, roberta


def by_loops(anchors, positives, negatives, temperature):
    """The formula, one pair after another."""

    def similarity(a, b):
        a, b = a.tolist(), b.tolist()
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b)) / temperature

    total = 0.0
    for n, anchor in enumerate(anchors):
        below = sum(math.exp(similarity(anchor, other)) for other in [*positives, *negatives])
        total -= math.log(math.exp(similarity(anchor, positives[n])) / below)
    return total / len(anchors)


def vectors(count: int, *, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, 6, dtype=torch.float64, generator=draw) for _ in range(3))


@needs_golden
@pytest.mark.parametrize("size", ["b8", "b5"])
def test_value_and_gradients_are_those_of_the_authors_code(size):
    """Their second argument is the anchor."""
    arrays = np.load(SHARED / "golden" / "contrast.npz")
    z1, z2, z3 = (torch.from_numpy(arrays[f"{size}_z{number}"]).requires_grad_() for number in (1, 2, 3))
    loss = contrastive(z2, z1, z3, temperature=0.05)
    theirs = torch.from_numpy(np.asarray(arrays[f"{size}_loss3"]))
    torch.testing.assert_close(loss, theirs, rtol=1e-4, atol=1e-6)
    for ours, name in zip(torch.autograd.grad(loss, [z1, z2, z3]), ("dz1", "dz2", "dz3"), strict=True):
        theirs = torch.from_numpy(arrays[f"{size}_loss3_{name}"])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_the_loss_is_the_formula(temperature):
    three = vectors(5)
    expected = by_loops(*three, temperature)
    assert contrastive(*three, temperature=temperature).item() == pytest.approx(expected, rel=1e-9)
    assert contrastive(*(4 * each for each in three), temperature=temperature).item() == pytest.approx(
        expected
    )


def test_swapping_samples_leaves_the_loss():
    three, order = vectors(5), torch.tensor([3, 1, 4, 0, 2])
    swapped = contrastive(*(each[order] for each in three), temperature=0.1)
    torch.testing.assert_close(swapped, contrastive(*three, temperature=0.1))


def test_a_samples_positive_is_its_own_second_pass():
    """The released code pairs neighbours: two different texts."""
    anchors, _, negatives = vectors(6)
    right = contrastive(anchors, anchors, negatives, temperature=0.05)
    neighbours = anchors.view(3, 2, 6).flip(1).reshape(6, 6)
    assert right < 0.05 < 2 < contrastive(anchors, neighbours, negatives, temperature=0.05)


def test_the_samples_of_other_processes_are_candidates(monkeypatch):
    """Of two processes the second one: its positives come after those of the first."""
    three, others = vectors(3), vectors(3, seed=1)
    joined = [torch.cat([first, own]) for first, own in zip(others, three, strict=True)]
    monkeypatch.setattr(
        contrasting, "gather_rows", lambda rows: (torch.stack([joined[1], joined[2]], dim=1), len(others[0]))
    )
    of_both, terms = [*joined[1], *joined[2]], []
    for n, anchor in enumerate(three[0]):
        cosines = torch.stack([torch.cosine_similarity(anchor, other, dim=0) for other in of_both]) / 0.1
        terms.append(cosines.logsumexp(0) - cosines[len(others[0]) + n])
    torch.testing.assert_close(contrastive(*three, temperature=0.1), torch.stack(terms).mean())


def test_negatives_push():
    anchors, positives, negatives = vectors(4)
    far = contrastive(anchors, positives, -anchors, temperature=0.1)
    near = contrastive(anchors, positives, anchors, temperature=0.1)
    assert near > far + 1


def test_padding_is_left_out_of_the_mean():
    hidden = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(mean_over(hidden, None), hidden.mean(1))
    assert torch.equal(mean_over(hidden, torch.tensor([[1, 1, 0, 0]])), hidden[:, :2].mean(1))


def masked(batch):
    """The batch with two of each sample's tokens corrupted, and their labels."""
    ids = batch["input_ids"].clone()
    ids.flatten()[batch["positions"]] = 4
    return {**batch, "input_ids": ids, "targets": batch["input_ids"].flatten()[batch["positions"]]}


class Uncorrupting(Causal):
    """As masked text does: the labels are the text."""

    def restored(self, batch):
        labels = labels_of(batch)
        return {**batch, "input_ids": torch.where(labels == -100, batch["input_ids"], labels)}


def contrast(
    model,
    *,
    strength=1.0,
    temperature=0.1,
    text="corrupted",
    rate=0.3,
    objective=None,
    samples=1.0,
    every=1,
    fixed=False,
):
    options = ContrastOptions(
        contrast=strength,
        contrast_text=text,
        contrast_dropout=rate,
        contrast_samples=samples,
        contrast_every=every,
        contrast_negatives="fixed" if fixed else "trained",
        temperature=temperature,
    )
    return ContrastiveLoss(model, objective or Causal(), options)


def soft_mask(model, kinds=("heads", "neurons", "outputs")):
    soft = SoftMask(model, kinds=kinds, acts_on="update", normalise="rank")
    soft.set(torch.rand(len(soft.importance), generator=torch.Generator().manual_seed(1)))
    return soft


def by_hand(model, batch, soft, *, rate, passes):
    """Vectors of so many passes in train mode with dropout at a rate, and of one with each unit times its
    importance."""
    inputs, hooks = {name: batch[name] for name in ("input_ids", "attention_mask")}, []
    mask, gates = batch["attention_mask"][..., None], soft.gates()

    def mean():
        hidden = model.roberta(**inputs).last_hidden_state
        return (hidden * mask).sum(1) / mask.sum(1)

    with dropout(model, rate):
        found = [mean() for _ in range(passes)]
        for number, layer in enumerate(model.roberta.encoder.layer):
            heads, neurons, outputs = (
                gates[group.name] for group in soft.groups[3 * number : 3 * number + 3]
            )

            def scale(module, inputs, heads=heads):
                return (inputs[0] * heads.repeat_interleave(8),)

            hooks += [
                layer.attention.output.dense.register_forward_pre_hook(scale),
                layer.output.dense.register_forward_pre_hook(lambda m, x, g=neurons: (x[0] * g,)),
                layer.output.dense.register_forward_hook(lambda m, x, y, g=outputs: y * g),
            ]
        found.append(mean())
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("own", [0.0, 0.3])
@pytest.mark.parametrize("text", ["uncorrupted", "corrupted"])
def test_the_term_contrasts_the_three_passes(text, own):
    """By hand: whole model, second dropout pass, pass with every unit times its importance, all with dropout,
    also of a model that has none of its own; the head of the language model is not run. Of the corrupted text
    the pass of the language-model loss is the first."""
    model, whole = roberta(rate=own), batch_of(4)
    batch, soft, headed = masked(whole), soft_mask(model), []
    model.lm_head.register_forward_hook(lambda *_: headed.append(1))
    hidden = torch.randn(4, 12, 32)
    options = {"strength": 2.0, "temperature": 0.5, "text": text, "objective": Uncorrupting()}
    torch.manual_seed(5)
    term = contrast(model, **options).term(batch, hidden=hidden, soft=soft)
    torch.manual_seed(5)
    if text == "uncorrupted":
        passes = by_hand(model, whole, soft, rate=0.3, passes=2)
    else:
        passes = [
            mean_over(hidden, batch["attention_mask"]),
            *by_hand(model, batch, soft, rate=0.3, passes=1),
        ]
    assert term["contrast"].item() == pytest.approx(2 * by_loops(*passes, 0.5), rel=1e-4)
    assert not headed
    assert contrast(model, strength=0.0).term(batch, hidden=hidden, soft=soft) == {}


def test_text_that_is_not_corrupted_costs_no_pass_more():
    """A causal model's, whose language-model pass is the anchor."""
    model, batch, passes = roberta(rate=0.1), batch_of(3), []
    model.roberta.register_forward_hook(lambda *_: passes.append(1))
    hidden = torch.randn(3, 12, 32)
    contrast(model, text="uncorrupted").term(batch, hidden=hidden, soft=soft_mask(model))
    assert len(passes) == 2
    options = {"text": "uncorrupted", "objective": Uncorrupting()}
    contrast(model, **options).term(masked(batch), hidden=hidden, soft=soft_mask(model))
    assert len(passes) == 5


@pytest.mark.parametrize("own", [0.0, 0.1])
def test_a_positive_is_not_its_anchor(own):
    """A model without dropout would only be pushed away."""
    model, batch, pairs = roberta(rate=own), batch_of(3), []
    term = contrast(model, text="uncorrupted", objective=Uncorrupting(), rate=0.1)
    before = [(m, name, rate, m.training) for m, name, rate in dropout_of(model)]
    vectors = ContrastiveLoss.represented

    def noted(self, batch):
        pairs.append(vectors(self, batch))
        return pairs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContrastiveLoss, "represented", noted)
        term.term(masked(batch), hidden=torch.randn(3, 12, 32), soft=soft_mask(model))
    anchor, positive, _ = pairs
    assert not torch.allclose(anchor, positive, rtol=1e-3)
    assert [(m, name, rate, m.training) for m, name, rate in dropout_of(model)] == before


@pytest.mark.parametrize("text", ["uncorrupted", "corrupted"])
def test_a_share_of_the_samples_is_contrasted_as_if_there_were_no_others(text):
    model, whole = roberta(rate=0.0), batch_of(5)
    batch, soft, hidden = masked(whole), soft_mask(model), torch.randn(5, 12, 32)
    options = {"text": text, "objective": Uncorrupting(), "strength": 2.0}
    few = {
        name: value[:3] for name, value in masked(whole).items() if name in ("input_ids", "attention_mask")
    }
    few |= {name: batch[name][batch["rows"] < 3] for name in ("positions", "targets", "rows")}
    torch.manual_seed(5)
    expected = contrast(model, **options).term(few, hidden=hidden[:3], soft=soft)["contrast"]
    torch.manual_seed(5)
    found = contrast(model, **options, samples=0.5).term(batch, hidden=hidden, soft=soft)["contrast"]
    assert found.item() == expected.item()


def test_in_some_steps_only_it_weighs_as_much_more():
    model, batch = roberta(rate=0.0), batch_of(4)
    soft = soft_mask(model)

    def terms(step, **options):
        torch.manual_seed(5)
        return contrast(model, **options).losses({**batch, "weight": 1.0}, soft=soft, step=step)

    plain, rare = terms(0), terms(0, every=3)
    assert rare["contrast"].item() == pytest.approx(3 * plain["contrast"].item())
    assert rare["lm"] == plain["lm"]
    assert [step for step in range(7) if "contrast" in terms(step, every=3)] == [0, 3, 6]


def test_fixed_negatives_have_their_values_and_no_gradients():
    model, batch = roberta(rate=0.1), batch_of(4)
    soft, hidden, vectors = soft_mask(model), torch.randn(4, 12, 32), []
    represented = ContrastiveLoss.represented

    def noted(self, batch):
        vectors.append(represented(self, batch))
        return vectors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContrastiveLoss, "represented", noted)
        terms = []
        for fixed in (False, True):
            torch.manual_seed(5)
            terms.append(contrast(model, fixed=fixed).term(batch, hidden=hidden, soft=soft)["contrast"])
    assert terms[0].item() == terms[1].item()
    assert [each.requires_grad for each in vectors] == [True, True, True, False]


def test_gradients_reach_all_three_passes():
    model, batch = roberta(rate=0.1), batch_of(3)
    hidden = torch.randn(3, 12, 32, requires_grad=True)
    contrast(model).term(batch, hidden=hidden, soft=soft_mask(model, ["outputs"]))["contrast"].backward()
    assert hidden.grad.abs().sum() > 0
    assert model.roberta.encoder.layer[0].output.dense.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rate": None},
            "null would not differ: all its dropout rates are 0.*or contrast=0",
        ),
    ],
)
def test_a_wrong_contrast_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        contrast(roberta(), **options)


def test_without_contrast_no_dropout_is_needed():
    assert contrast(roberta(), strength=0.0, rate=None).options.contrast == 0


@pytest.mark.parametrize("text", ["uncorrupted", "corrupted"])
def test_with_a_decoder_it_is_the_encoders_states_that_are_contrasted(text):
    """The anchor too, whatever the decoder has put out."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 60}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    span = Span(rate=0.4, mean=2, sentinels=list(range(59, 49, -1)), end=1, pad=0, start=0)
    ids = np.random.default_rng(0).integers(2, 50, (4, 12))
    batch, _ = span.batch(Rows(ids, np.array([12, 9, 12, 5]), sample_keys(1, np.arange(4))))
    soft = SoftMask(model, kinds=["heads"], acts_on="update", normalise="minmax")
    soft.set(torch.rand(len(soft.importance)))
    made = contrast(model, text=text, objective=span)
    terms = []
    for hidden in (torch.zeros(4, 6, 16), torch.rand(4, 6, 16)):
        torch.manual_seed(1)
        terms.append(made.term(batch, hidden=hidden, soft=soft)["contrast"])
    assert torch.equal(*terms) and terms[0] > 0
    model.eval()
    read = span.restored(batch) if text == "uncorrupted" else batch
    found = made.represented(read)
    for row in range(4):
        kept = read["input_ids"][row][read["attention_mask"][row].bool()]
        if text == "uncorrupted":
            assert kept.tolist() == ids[row, : len(kept)].tolist()
        alone = model.encoder(input_ids=kept[None]).last_hidden_state.mean(1)
        torch.testing.assert_close(found[row : row + 1], alone)
