"""The magnitude mask on LoRA: which rows of A and B a step changes, against loops."""

import pytest
import torch

from cpt.adapters import lora
from cpt.data.collate import inputs_of
from cpt.gradient_masks.migu import count_kept
from cpt.models.units import projections
from tests.support.making import ORDER, made

METHODS = ("lora", "inclora", "olora")
MIGU = ["mask=migu", "mask.migu.threshold=0.5", "optim.lr=0.05"]


@pytest.fixture
def build(small, small_gpt2):
    def built(method: str, *overrides: str, causal: bool = False):
        config = small_gpt2 if causal else small
        return made(config(f"method={method}", ORDER, *MIGU, *overrides))

    return built


@torch.no_grad()
def outputs(model, inputs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer A x and W x + alpha / r sum_k B_k A_k x, by arithmetic, [tokens, features]."""
    found, handles = {}, []
    for name, layer in lora.lora_layers(model).items():

        def note(module, args, y, *, name=name, layer=layer):
            x = args[0].flatten(0, -2)
            a, b = lora.join_adapters(layer)
            whole = layer.get_base_layer()(x) + layer.scaling["default"] * (x @ a.T @ b.T)
            found[name] = (x @ lora.factors_of(layer)[0].T, whole)

        handles.append(layer.register_forward_hook(note))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return found


def largest(output, present, segments, threshold: float) -> set[int]:
    """The rows with the largest mean of |output|, segment by segment, one by one."""
    means = output[present].abs().mean(0).tolist()
    chosen = set()
    for segment in segments:
        ranked = sorted(segment.tolist(), key=lambda row: -means[row])
        chosen |= set(ranked[: count_kept(threshold, len(ranked))])
    return chosen


@pytest.mark.parametrize("causal", [False, True], ids=["masked", "causal"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("lora", []), ("inclora", ["method.stored=pairs"]), ("inclora", []), ("olora", ["method.stored=pairs"])],
)
def test_the_rows_are_those_of_brute_force(method, options, causal, build):
    """In the second domain: an earlier pair counts in the layer's output, but is not changed."""
    work = build(method, *options, causal=causal)
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
    for name, layer in ((name, module.model.get_submodule(name)) for name in plain):
        ranked = [(torch.arange(8),), plain[name]]
        halves = zip(lora.factors_of(layer), expected[name], ranked, strict=True)
        for parameter, output, segments in halves:
            factor = factors[id(parameter)]
            assert factor.shape == (len(parameter), 1)
            assert set(factor.flatten().nonzero().flatten().tolist()) == largest(
                output, present, segments, 0.5
            )


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_are_not_chosen_keep_their_bits(method, build):
    work = build(method, "mask.migu.acts_on=frozen", "trainer.steps=1", "optim.weight_decay=0.5")
    module = work.module
    work.learn(0)
    before = module.before_domain
    starts = {}

    def noted(probe):
        before(probe)
        starts.update({n: p.detach().clone() for n, p in module.model.named_parameters() if ".lora_" in n})

    module.before_domain = noted
    counts = module.masks[0].chosen.clone()
    work.learn(1)
    chosen = module.masks[0].chosen - counts
    for each, place in zip(module.masks[0].maps, module.masks[0].places, strict=True):
        name = next(n for n, p in module.model.named_parameters() if p is each.module.weight)
        changed = (each.module.weight != starts[name]).any(1)
        allowed = chosen[place].bool()
        assert not changed[~allowed].any()
        assert (~allowed).sum() == len(allowed) // 2
        if name.endswith("lora_B.default.weight"):
            assert changed.any()
