"""LoRA as a method: one pair through all domains, or one per domain."""

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters.domain_store import BASE
from tests.support.making import (
    ORDER,
    made,
    parameter_bytes,
    same,
    state_beside_the_model,
)
from tests.support.pairs import base_of, pair_of
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
                token_nll(module.model_for(domain).eval(), probe), expected, rtol=1e-4, atol=1e-4
            )
    assert module.needs_domain and not torch.equal(alone[1], alone[2])


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
