"""Text that a model writes: sampled as its distribution says, a function of numbers and nothing else."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cpt.contrib.generative_replay.sampling import Sampling, sample_texts
from cpt.core.randomness import draws, key, sample_keys

END, ENTRIES, VOCABULARY = 3, 90, 96
CONTEXTS = np.random.default_rng(0).integers(4, ENTRIES, (40, 5)).tolist()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=VOCABULARY, n_positions=64)
    made = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        made.transformer.wte.weight.mul_(5)  # sharp enough for texts to differ from chance
    made.generation_config.repetition_penalty = 5.0  # a checkpoint's habits are not this run's
    made.generation_config.eos_token_id = 7
    return made


def numbers(count, most):
    return torch.from_numpy(draws(sample_keys(key("texts"), np.arange(count)), most, stream=key("tokens")))


def sampling(**given) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "entries": ENTRIES, "end": END, **given})


def by_hand(model, context, uniforms, how):
    """A text, token by token, by whole forward passes in double precision."""
    ids, nll = list(context), []
    for uniform in uniforms.tolist():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        logits[how.entries :] = -torch.inf
        probabilities = (logits / how.temperature).softmax(-1)
        order = sorted(range(VOCABULARY), key=lambda token: (-probabilities[token].item(), token))
        kept, total = [], 0.0
        for token in order:
            if total >= how.top_p:
                break
            kept.append(token)
            total += probabilities[token].item()
        below = 0.0
        for token in kept:
            below += probabilities[token].item()
            if below > uniform * total:
                break
        ids.append(token)
        nll.append(-logits.log_softmax(-1)[token].item())
        if token == how.end:
            break
    return ids[len(context) :], float(np.mean(nll))


@torch.no_grad()
@pytest.mark.parametrize("given", [{}, {"temperature": 0.7, "top_p": 0.8}])
def test_texts_are_those_of_a_walk_by_hand(model, given):
    how, uniforms = sampling(**given), numbers(8, 20)
    found = sample_texts(model, CONTEXTS[:8], uniforms, sampling=how)
    for (ids, nll), context, row in zip(found, CONTEXTS, uniforms, strict=False):
        expected, mean = by_hand(model, context, row, how)
        assert ids == expected and nll == pytest.approx(mean, abs=1e-4)


def test_a_text_does_not_depend_on_its_batch(model):
    uniforms = numbers(40, 20)
    together = sample_texts(model, CONTEXTS, uniforms, sampling=sampling())
    assert any(END in ids for ids, _ in together) and len({len(ids) for ids, _ in together}) > 3
    for size in (1, 7):
        cuts = [slice(at, at + size) for at in range(0, 40, size)]
        parts = [sample_texts(model, CONTEXTS[at], uniforms[at], sampling=sampling()) for at in cuts]
        assert [ids for part in parts for ids, _ in part] == [ids for ids, _ in together]
