"""IncLoRA: a new pair per domain, the earlier ones in the weights or beside them."""

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters import lora
from tests.support.making import (
    ORDER,
    assert_close,
    learned,
    made,
    same,
    state_beside_the_model,
    state_bytes,
    weights,
)
from tests.support.pairs import base_of, logits, pair_of

OLD_NAME = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
STRONG = "optim.lr=0.05"
THREE = "order=[law,food,space]"


@pytest.fixture
def build(small):
    return lambda *overrides: made(small("method=inclora", THREE, STRONG, *overrides))


def starts_of(work) -> list:
    """What the model is at each domain's first step: pair, base weights and logits on one batch."""
    module, before, found = work.module, work.module.before_domain, []
    probe = work.batches()[0]

    def noted(batches):
        before(batches)
        found.append((pair_of(module), base_of(module), logits(module.model, probe)))
        module.train()

    module.before_domain = noted
    return found


def test_the_first_domain_is_that_of_lora(small):
    inclora, single = (made(small(f"method={name}", ORDER, STRONG)) for name in ("inclora", "lora"))
    for work in (inclora, single):
        work.learn(0)
    assert same(inclora.weights(), single.weights())
    for work in (inclora, single):
        work.learn(1)
    assert not same(inclora.weights(), single.weights())


@pytest.mark.parametrize("stored", ("merged", "pairs"))
def test_each_domain_begins_with_a_new_pair_at_the_model_before(stored, build):
    work = build(f"method.stored={stored}")
    starts, ends = starts_of(work), []
    for number in range(3):
        work.learn(number)
        probe = work.batches()[0]
        ends.append((pair_of(work.module), base_of(work.module), logits(work.module.model, probe)))
    for number in (1, 2):
        (pair, _, out), (old, _, before) = starts[number], ends[number - 1]
        torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-4)
        assert not any(value.any() for name, value in pair.items() if "lora_B" in name)
        assert not any(torch.equal(value, old[name]) for name, value in pair.items())
    assert not same(starts[1][0], starts[2][0])


def test_the_frozen_weights_are_the_base_and_the_merged_pairs(build):
    work = build("optim.weight_decay=0.5", "method.r=4", "method.alpha=12")
    expected = base_of(work.module)
    for number in range(3):
        work.learn(number)
        assert_close(base_of(work.module), expected, rtol=1e-4, atol=1e-5)
        pair = pair_of(work.module)
        for name in [name for name in pair if "lora_A" in name]:
            layer = name.partition(".lora_A")[0]
            product = 3 * pair[name.replace("lora_A", "lora_B")] @ pair[name]
            assert product.abs().max() > 1e-3
            expected[f"{layer}.base_layer.weight"] += product


def test_within_a_domain_the_frozen_weights_keep_their_bits(build):
    work = build("optim.weight_decay=0.5")
    starts = starts_of(work)
    for number in range(2):
        work.learn(number)
        assert same(base_of(work.module), starts[number][1])


def test_kept_apart_the_weights_stay_the_bases(build):
    work = build("optim.weight_decay=0.5", "method.stored=pairs")
    base, kept = base_of(work.module), []
    for number in range(3):
        work.learn(number)
        assert same(base_of(work.module), base)
        for name, layer in lora.lora_layers(work.module.model).items():
            if number:
                earlier = lora.factors_of(layer, "earlier")[0].detach()
                expected = torch.cat([each[f"{name}.lora_A.default.weight"] for each in kept])
                assert torch.equal(earlier, expected)
        kept.append(pair_of(work.module))


@pytest.mark.parametrize("options", [[], ["method.dropout=0.3"]])
def test_merged_or_apart_the_same_is_learned(options, build):
    """Within 2e-3 in the logits: sums in another order, and Adam makes steps of rounding errors."""
    found = []
    for stored in ("merged", "pairs"):
        work = build(f"method.stored={stored}", "optim.lr=0.005", *options)
        for number in range(3):
            work.learn(number)
        found.append(logits(work.module.model, work.probe()[0]))
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_merged_the_state_does_not_grow_and_apart_it_does_by_a_pair(build):
    grown = {}
    for stored in ("merged", "pairs"):
        work = build(f"method.stored={stored}", "trainer.steps=1")
        sizes = []
        for number in range(3):
            work.learn(number)
            sizes.append(state_bytes(work.module))
        pair = sum(value.nbytes for value in pair_of(work.module).values())
        grown[stored] = [(size - sizes[0]) / pair for size in sizes]
        assert state_beside_the_model(work.module) == 0
    assert grown == {"merged": [0, 0, 0], "pairs": [0, 1, 2]}


def test_twelve_domains_do_not_grow_it(build):
    module = build().module
    size, keys = state_bytes(module), set(module.state_dict())
    for domain in range(12):
        lora.begin_adapter(module.model, stored="merged", seed=domain)
    assert (state_bytes(module), set(module.state_dict())) == (size, keys)


def test_kept_pairs_are_restored(build):
    work = build("method.stored=pairs")
    for number in range(3):
        work.learn(number)
    other = build("method.stored=pairs")
    other.module.load_state_dict(work.module.state_dict())
    other.module.activate(2)
    probe = work.probe()[0]
    assert torch.equal(logits(other.module.model, probe), logits(work.module.model, probe))
    trained = {name for name, p in other.module.model.named_parameters() if p.requires_grad}
    assert trained == set(pair_of(other.module))


@pytest.mark.parametrize("step", [0, 3])
def test_kept_apart_a_run_goes_on_with_the_same_bits(step, small, start, tmp_path, monkeypatch):
    """Killed between the first two domains, or within the third."""
    from cpt.methods.lora import IncLoRA

    cfg = small("method=inclora", THREE, STRONG, "method.stored=pairs")
    whole = learned(start, cfg, tmp_path / "whole")
    losses, left = IncLoRA.losses, [6 + 6 + step if step else 6]

    def deadly(self, batch):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return losses(self, batch)

    monkeypatch.setattr(IncLoRA, "losses", deadly)
    with pytest.raises(BaseException):  # noqa: B017, PT011  (Lightning ends the process in its own way)
        start(cfg, tmp_path / "killed")
    monkeypatch.undo()
    start(cfg, tmp_path / "killed")
    assert same(weights(tmp_path / "killed"), whole)
    assert any(".earlier." in name for name in whole)


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("stored", ("merged", "pairs"))
@pytest.mark.parametrize("exported", ("merged", "peft"))
def test_what_is_exported_gives_the_same_logits(exported, stored, build, tmp_path):
    work = build(f"method.exported={exported}", f"method.stored={stored}")
    for number in range(3):
        work.learn(number)
    expression = work.module.export(tmp_path, ["law", "food", "space"])
    loaded = eval(expression, {"peft": peft, "transformers": transformers})
    probe = work.probe()[0]
    inputs = {name: probe[name] for name in ("input_ids", "attention_mask") if name in probe}
    with torch.no_grad():
        found, expected = (each.eval()(**inputs).logits for each in (loaded, work.module.model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert [path.name for path in tmp_path.glob("adapters/*")] == ["space"] * (exported == "peft")
    assert not lora.lora_layers(work.module.model_for(2))
