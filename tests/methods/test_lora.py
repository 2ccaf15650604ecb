"""LoRA as a method: one pair through all domains, or one per domain."""

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters import lora
from cpt.adapters.domain_store import BASE
from tests.support.making import (
    DROPOUT,
    ORDER,
    Watch,
    learned,
    made,
    parameter_bytes,
    same,
    state_beside_the_model,
    state_bytes,
)
from tests.support.pairs import base_of, logits, pair_of
from tests.support.running import token_nll

OLD_NAME = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
STRONG = "optim.lr=0.05"


@pytest.fixture
def build(small):
    return lambda *overrides: made(small("method=lora", ORDER, STRONG, *overrides))


def test_the_base_keeps_its_bits_under_weight_decay(build):
    work = build("optim.weight_decay=0.5")
    base, pair = base_of(work.module), pair_of(work.module)
    work.learn(0)
    work.learn(1)
    assert same(base_of(work.module), base)
    after = pair_of(work.module)
    assert not any(torch.equal(value, pair[name]) for name, value in after.items())


def test_one_pair_goes_through_all_domains(build):
    """The second domain begins at the first one's end."""
    work = build()
    work.learn(0)
    end = pair_of(work.module)
    module, starts = work.module, []
    before = module.before_domain
    module.before_domain = lambda probe: (before(probe), starts.append(pair_of(module)))
    work.learn(1)
    assert same(starts[0], end)


def test_the_state_does_not_grow(build):
    work = build()
    sizes = [state_bytes(work.module)]
    for number in (0, 1):
        work.learn(number)
        sizes.append(state_bytes(work.module))
    assert len(set(sizes)) == 1 and state_beside_the_model(work.module) == 0


@pytest.mark.parametrize("options", [["method.per_domain=false"], ["method.per_domain=true"]])
def test_only_the_pairs_are_trained(options, build):
    work = build(*options)
    work.module.activate(0)
    names = {name for name, p in work.module.named_parameters() if p.requires_grad}
    widths = sum(
        layer.in_features + layer.out_features for layer in lora.lora_layers(work.module.model).values()
    )
    assert sum(work.module.get_parameter(name).numel() for name in names) == 8 * widths
    assert all(".lora_" in name and name.startswith("model.") for name in names)


def test_each_domain_has_the_pair_of_its_end(build):
    work = build("method.per_domain=true")
    ends = []
    for number in (0, 1):
        work.learn(number)
        ends.append(pair_of(work.module))
    for number, end in enumerate(ends):
        assert same(dict(work.module.bank.weights(number)), end)
    assert not same(*ends)
    grown = state_beside_the_model(work.module)
    assert grown == 2 * sum(value.nbytes for value in ends[0].values()) < parameter_bytes(work.module)


@pytest.mark.parametrize("start", ["base", "previous"])
def test_where_a_domain_begins(start, build):
    work = build("method.per_domain=true", f"method.start={start}")
    module, starts, before = work.module, [pair_of(work.module)], work.module.before_domain
    module.before_domain = lambda probe: (before(probe), starts.append(pair_of(module)))
    work.learn(0)
    end = pair_of(module)
    work.learn(1)
    first, drawn, second = starts
    assert same(first, drawn)
    if start == "previous":
        assert same(second, end)
    else:
        assert all(bool(value.any()) == ("lora_A" in name) for name, value in second.items())
        assert not any(torch.equal(value, first[name]) for name, value in second.items() if "lora_A" in name)


def test_a_text_is_scored_by_its_domains_pair(build):
    work = build("method.per_domain=true")
    probe, module, alone = work.batches()[0], work.module, []
    with torch.no_grad():
        alone.append(token_nll(module.model.eval(), probe))
        for number in (0, 1):
            work.learn(number)
            alone.append(token_nll(module.model.eval(), probe))
        for domain, expected in zip((BASE, 0, 1), alone, strict=True):
            found, counts = module.nll(probe, domain)
            assert torch.equal(found, expected) and torch.equal(counts, torch.ones_like(found))
            assert module.used(domain) == {domain: 1.0}
            torch.testing.assert_close(
                token_nll(module.backbone(domain).eval(), probe), expected, rtol=1e-4, atol=1e-4
            )
    assert module.needs_domain and not torch.equal(alone[1], alone[2])


def test_without_a_pair_per_domain_no_domain_must_be_known(build):
    work = build()
    assert not work.module.needs_domain and work.module.used(0) == {}
    assert build("method.per_domain=true", "routing@method.routing=posterior").module.needs_domain is False


def test_the_state_of_several_domains_is_taken_by_a_new_module(build):
    work, other = build("method.per_domain=true"), build("method.per_domain=true")
    work.learn(0)
    work.learn(1)
    other.module.load_state_dict(work.module.state_dict())
    probe = work.probe()[0]
    for domain in (0, 1):
        assert torch.equal(*(each.module.eval().nll(probe, domain)[0] for each in (work, other)))


def test_the_backbone_is_a_plain_model_of_its_own(build):
    work = build()
    work.learn(0)
    probe = work.probe()[0]
    expected, state = logits(work.module.model, probe), pair_of(work.module)
    plain = work.module.backbone(0)
    assert not lora.lora_layers(plain) and all(p.requires_grad for p in plain.parameters())
    torch.testing.assert_close(logits(plain, probe), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert torch.equal(logits(work.module.model, probe), expected) and same(pair_of(work.module), state)


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("exported", ["merged", "peft"])
@pytest.mark.parametrize("per_domain", ["true", "false"])
@pytest.mark.parametrize("embeddings", ["true", "false"])
def test_what_is_exported_gives_the_same_logits(exported, per_domain, embeddings, build, tmp_path):
    work = build(
        f"method.exported={exported}", f"method.per_domain={per_domain}", f"method.embeddings={embeddings}"
    )
    work.learn(0)
    work.learn(1)
    expression = work.module.export(tmp_path, ["law", "food"])
    assert expression.startswith("peft." if exported == "peft" else "transformers.")
    loaded = eval(expression, {"peft": peft, "transformers": transformers})
    probe = work.probe()[0]
    inputs = {name: probe[name] for name in ("input_ids", "attention_mask") if name in probe}
    with torch.no_grad():
        found, expected = (each.eval()(**inputs).logits for each in (loaded, work.module.model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    folders = sorted(path.name for path in tmp_path.glob("adapters/*"))
    assert folders == {"merged": [], "peft": ["food", "law"] if per_domain == "true" else ["food"]}[exported]


def test_replay_goes_with_it(build):
    work = build("replay=past")
    base = base_of(work.module)
    work.learn(0)
    alone = pair_of(work.module)
    work.learn(1)
    assert same(base_of(work.module), base) and not same(pair_of(work.module), alone)


def test_frozen_layers_have_frozen_pairs(build):
    work = build("freeze.layers=1")
    before = pair_of(work.module)
    work.learn(0)
    moved = {name for name, value in pair_of(work.module).items() if not torch.equal(value, before[name])}
    assert moved and not any(".layers.0." in name for name in moved)


def test_the_modules_are_the_same_throughout(build):
    """Optimizer, hooks and masks always see the pair that learns."""
    work = build("method.per_domain=true", *DROPOUT)
    watch = Watch(lambda module: [id(p) for p in module.model.parameters()])
    work.learn(0, watch)
    work.learn(1, watch)
    assert len({tuple(ids) for _, ids in watch.seen}) == 1


def test_it_learns_and_a_run_ends_with_its_pair(small, start, tmp_path):
    weights = learned(start, small("method=lora", ORDER, STRONG), tmp_path)
    assert any(".lora_B." in name and value.any() for name, value in weights.items())
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    assert not lora.lora_layers(loaded)
