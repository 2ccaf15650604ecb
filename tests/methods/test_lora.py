"""LoRA and IncLoRA: where a domain begins, what stays of earlier ones, what is exported, and MIGU's rows."""

from dataclasses import replace

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters import lora
from cpt.data.collate import inputs_of
from tests.support.making import assert_close, same, state_bytes
from tests.support.pairs import base_of, logits, pair_of

STRONG, DECAY, THREE = "optim.lr=0.05", "optim.weight_decay=0.5", "order=[law,food,space]"


def starts_of(work) -> list:
    """What the model is at each domain's first step: pair, base weights and logits on one batch."""
    module, before, found, [probe] = work.module, work.module.before_domain, [], work.batches()

    def noted(batches):
        before(batches)
        found.append((pair_of(module), base_of(module), logits(module.model, probe)))
        module.train()

    module.before_domain = noted
    return found


@pytest.mark.parametrize("options", ["", "per_domain=true", "per_domain=true start=previous"])
def test_where_a_domain_begins(options, build):
    work = build("lora", STRONG, DECAY, *(f"method.{each}" for each in options.split()))
    base, first, starts = base_of(work.module), pair_of(work.module), starts_of(work)
    work.learn(0)
    end = pair_of(work.module)
    work.learn(1)
    second = starts[1][0]
    assert same(starts[0][0], first) and same(base_of(work.module), base)
    assert not any(torch.equal(value, end[name]) for name, value in pair_of(work.module).items())
    if options == "per_domain=true":
        assert all(bool(value.any()) == ("lora_A" in name) for name, value in second.items())
        assert not any(torch.equal(value, first[name]) for name, value in second.items() if "lora_A" in name)
    else:
        assert same(second, end)


@pytest.mark.parametrize("stored", ["merged", "pairs"])
def test_each_domain_begins_with_a_new_pair_at_the_model_before(stored, build):
    given = [THREE, "method.r=4", "method.lora_alpha=12"]
    work, plain = (
        build("inclora", *given, f"method.stored={stored}", STRONG, DECAY),
        build("lora", *given, STRONG, DECAY),
    )
    expected, starts, ends, sizes, module = base_of(work.module), starts_of(work), [], [], work.module
    plain.learn(0)
    for number in range(3):
        work.learn(number)
        pair, base = pair_of(module), base_of(module)
        assert number or same(pair, pair_of(plain.module))
        own = {name: value for name, value in base.items() if ".earlier." not in name}
        assert_close(own, expected, rtol=1e-4, atol=1e-5)
        assert same(base, starts[number][1])  # within a domain, every bit of it
        ends.append((pair, logits(module.model, work.batches()[0])))
        sizes.append(state_bytes(module))
        for name in lora.lora_layers(module.model) if stored == "merged" else ():
            product = 3 * pair[f"{name}.lora_B.default.weight"] @ pair[f"{name}.lora_A.default.weight"]
            expected[f"{name}.base_layer.weight"] += product
        if number:
            (first, _, out), (old, before) = starts[number], ends[number - 1]
            torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-4)
            assert not any(torch.equal(value, old[name]) for name, value in first.items())
    size = sum(value.nbytes for value in pair.values()) * (stored == "pairs")
    assert [each - sizes[0] for each in sizes] == [0, size, 2 * size]
    other = build("inclora", *given, f"method.stored={stored}").module
    other.load_state_dict(module.state_dict())
    other.activate(2)
    assert torch.equal(logits(other.model, work.batches()[0]), ends[-1][1])
    assert {name for name, p in other.model.named_parameters() if p.requires_grad} == set(pair)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("method", "options", "folders", "family"), [
    ("lora", ["per_domain=true", "embeddings=true"], ["food", "law"], "masked"),
    ("inclora", ["stored=pairs"], ["food"], "causal"),
])  # fmt: skip
def test_what_is_exported_gives_the_same_logits(method, options, folders, family, build, tmp_path):
    work = build(method, STRONG, "trainer.steps=3", *(f"method.{each}" for each in options), on=family)
    work.learn(0)
    work.learn(1)
    inputs, module = inputs_of(work.probe()[0]), work.module
    for exported, package in (("merged", "transformers"), ("peft", "peft")):
        module.options = replace(module.options, exported=exported)
        expression = module.export(tmp_path / exported, ["law", "food"])
        assert expression.startswith(f"{package}.")
        loaded = eval(expression, {"peft": peft, "transformers": transformers})
        with torch.no_grad():
            found, expected = (each.eval()(**inputs).logits for each in (loaded, module.model))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        own = sorted(path.name for path in (tmp_path / exported).glob("adapters/*"))
        assert own == folders * (exported == "peft")
