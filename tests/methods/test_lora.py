"""LoRA and IncLoRA: where a domain begins, what stays of earlier ones, what is exported, and MIGU's rows."""

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters import lora
from cpt.data.collate import inputs_of
from cpt.gradient_masks.migu import count_kept
from cpt.models.units import projections
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


OWN = "method.per_domain=true"


@pytest.mark.parametrize("options", [[], [OWN], [OWN, "method.start=previous"]])
def test_where_a_domain_begins(options, build):
    work = build("lora", STRONG, DECAY, *options)
    base, first, starts = base_of(work.module), pair_of(work.module), starts_of(work)
    work.learn(0)
    end = pair_of(work.module)
    work.learn(1)
    second = starts[1][0]
    assert same(starts[0][0], first) and same(base_of(work.module), base)
    assert not any(torch.equal(value, end[name]) for name, value in pair_of(work.module).items())
    if len(options) == 1:
        assert all(bool(value.any()) == ("lora_A" in name) for name, value in second.items())
        assert not any(torch.equal(value, first[name]) for name, value in second.items() if "lora_A" in name)
    else:
        assert same(second, end)


@pytest.mark.parametrize("stored", ["merged", "pairs"])
def test_each_domain_begins_with_a_new_pair_at_the_model_before(stored, build):
    given = [STRONG, DECAY, "method.r=4", "method.lora_alpha=12"]
    work = build("inclora", THREE, *given, f"method.stored={stored}")
    expected, starts, ends, sizes, module = base_of(work.module), starts_of(work), [], [], work.module
    plain = build("lora", THREE, *given)
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
        for name, layer in lora.lora_layers(module.model).items():
            product = 3 * pair[f"{name}.lora_B.default.weight"] @ pair[f"{name}.lora_A.default.weight"]
            assert product.abs().max() > 1e-3
            if stored == "merged":
                expected[f"{name}.base_layer.weight"] += product
            elif number:
                kept = torch.cat([each[f"{name}.lora_A.default.weight"] for each, _ in ends[:-1]])
                assert torch.equal(lora.factors_of(layer, "earlier")[0].detach(), kept)
        if number:
            (first, _, out), (old, before) = starts[number], ends[number - 1]
            torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-4)
            assert not any(value.any() for name, value in first.items() if "lora_B" in name)
            assert not any(torch.equal(value, old[name]) for name, value in first.items())
    size = sum(value.nbytes for value in pair.values()) * (stored == "pairs")
    assert [each - sizes[0] for each in sizes] == [0, size, 2 * size]
    other = build("inclora", THREE, "method.r=4", "method.lora_alpha=12", f"method.stored={stored}").module
    other.load_state_dict(module.state_dict())
    other.activate(2)
    assert torch.equal(logits(other.model, work.batches()[0]), ends[-1][1])
    assert {name for name, p in other.model.named_parameters() if p.requires_grad} == set(pair)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("exported", ["merged", "peft"])
@pytest.mark.parametrize(("method", "options", "folders", "family"), [
    ("lora", ["per_domain=true", "embeddings=true"], ["food", "law"], "masked"),
    ("lora", ["embeddings=true"], ["food"], "causal"),
    ("inclora", [], ["food"], "masked"),
    ("inclora", ["stored=pairs"], ["food"], "causal"),
])  # fmt: skip
def test_what_is_exported_gives_the_same_logits(method, options, folders, family, exported, build, tmp_path):
    given = [f"method.{each}" for each in [f"exported={exported}", *options]]
    work = build(method, STRONG, "trainer.steps=3", *given, on=family)
    work.learn(0)
    work.learn(1)
    expression = work.module.export(tmp_path, ["law", "food"])
    assert expression.startswith("peft." if exported == "peft" else "transformers.")
    loaded = eval(expression, {"peft": peft, "transformers": transformers})
    inputs = inputs_of(work.probe()[0])
    with torch.no_grad():
        found, expected = (each.eval()(**inputs).logits for each in (loaded, work.module.model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert sorted(path.name for path in tmp_path.glob("adapters/*")) == folders * (exported == "peft")


@torch.no_grad()
def outputs(model, inputs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer A x and W x + alpha / r sum_k B_k A_k x, by arithmetic, [tokens, features]."""
    found, handles = {}, []
    for name, layer in lora.lora_layers(model).items():

        def note(module, args, y, *, name=name, layer=layer):
            x, (a, b) = args[0].flatten(0, -2), lora.join_adapters(layer)
            whole = layer.get_base_layer()(x) + layer.scaling["default"] * (x @ a.T @ b.T)
            found[name] = (x @ lora.factors_of(layer)[0].T, whole)

        handles.append(layer.register_forward_hook(note))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return found


def largest(output, present, segments) -> set[int]:
    """The half of the rows with the largest mean of |output|, segment by segment, one by one."""
    means, chosen = output[present].abs().mean(0).tolist(), set()
    for segment in segments:
        ranked = sorted(segment.tolist(), key=lambda row: -means[row])
        chosen |= set(ranked[: count_kept(0.5, len(ranked))])
    return chosen


RANKED = [("lora", [], "causal"), ("inclora", [], "masked"), ("olora", ["method.stored=pairs"], "causal")]


@pytest.mark.parametrize(("method", "options", "family"), RANKED)
def test_the_rows_are_those_of_brute_force(method, options, family, build):
    work = build(method, "mask=migu", "mask.migu.threshold=0.5", STRONG, *options, on=family)
    plain = {each.name: each.segments for each in projections(work.module.model_for(0))}
    work.learn(0)
    work.learn(1)
    module, mask, batch = work.module, work.module.masks[0], work.batches()[0]
    inputs = inputs_of(batch)
    present = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).flatten().bool()
    expected = outputs(module.model.eval(), inputs)
    module.activate(1)
    mask.activate(1)
    module.train()
    mask.recording = True
    module.losses(batch)["lm"].backward()
    factors = {id(parameter): factor for parameter, factor in mask.factors()}
    assert len(factors) == 2 * len(plain)  # the head's map is not ranked: it sees the scored positions alone
    for name, segments in plain.items():
        halves, rows = lora.factors_of(module.model.get_submodule(name)), [(torch.arange(8),), segments]
        for parameter, output, own in zip(halves, expected[name], rows, strict=True):
            factor = factors[id(parameter)]
            assert factor.shape == (len(parameter), 1)
            assert {*factor.flatten().nonzero().flatten().tolist()} == largest(output, present, own)
