"""DER++ against its formula."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from cpt.data.collate import UNSCORED, labels_of
from cpt.data.sampler import TrainStream


def scored_outputs(module, ids, labels, length):
    """Logits [K, V] and last hidden states [K, D] at a row's scored positions, by a plain forward."""
    ids, places = ids[None, :length].long(), labels[:length] != UNSCORED
    hidden = module.model.base_model(input_ids=ids).last_hidden_state[0]
    return module.model(input_ids=ids).logits[0, places], hidden[places]


@pytest.mark.parametrize("family", ["masked", "causal"])
@pytest.mark.parametrize("matched", ["hidden", "logits"])
def test_the_losses_are_those_of_the_paper(matched, family, build):
    options = [f"method.matched={matched}", "method.alpha=0.3", "method.beta=0.7", "method.precision=float32"]
    work = build("derpp", "method.buffer_size=20", "method.minibatch_size=3", *options, on=family)
    text, module = work.data.train["law"], work.module.double().eval()
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    options = {"objective": work.data.objective, "seed": 0, "batch_size": 8, "rank": 0, "world": 1}
    parts = TrainStream({"law": text}, **options, accumulate=1, steps=[len(text) // 8 + 2])
    short = next(number for number in range(len(parts)) if "attention_mask" in parts[number])
    first = module.losses(parts[short])
    assert first["derpp_match"] == first["derpp_replay"] == 0 < first["lm"]
    for number in (0, short):
        module.losses(parts[number])
    kept, batch = module.memory, parts[1]
    for slot, stored in enumerate(kept.outputs):
        row = (kept.input_ids[slot], kept.labels[slot], kept.lengths[slot])
        outputs = scored_outputs(module, *row)[matched == "hidden"]
        torch.testing.assert_close(stored[: len(outputs)].double(), outputs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.mul_(1.2)
    assert not any(buffer.requires_grad or buffer.grad_fn for buffer in kept.buffers())
    # of 24: different draws, the short row in both; a micro-batch of two processes has its share of 76
    module.options = replace(module.options, minibatch_size=76)
    module._trainer = SimpleNamespace(world_size=2, accumulate_grad_batches=2)
    match, replay = (kept.draw(19, purpose=name) for name in ("match", "replay"))
    assert set(match.tolist()) != set(replay.tolist())
    assert all((kept.lengths[slots] < module.length).any() for slots in (match, replay))
    errors, nll = [], []
    for slot in match:
        row = (kept.input_ids[slot], kept.labels[slot], kept.lengths[slot])
        now = scored_outputs(module, *row)[matched == "hidden"]
        errors += (now - kept.outputs[slot, : len(now)].double()).square().flatten().tolist()
    for slot in replay:
        logits, _ = scored_outputs(module, kept.input_ids[slot], kept.labels[slot], kept.lengths[slot])
        labels = kept.labels[slot][kept.labels[slot] != UNSCORED].long()
        nll += [-row.log_softmax(0)[label].item() for row, label in zip(logits, labels, strict=True)]
    plain = []
    for ids, labels in zip(batch["input_ids"], labels_of(batch), strict=True):
        logits, _ = scored_outputs(module, ids, labels, len(ids))
        plain.append(functional.cross_entropy(logits, labels[labels != UNSCORED]))
    terms = module.losses(batch)
    expected = {"lm": sum(plain).item() / len(plain), "derpp_match": 0.3 * sum(errors) / len(errors)}
    expected["derpp_replay"] = 0.7 * sum(nll) / len(nll)
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-5)
    for term in terms.values():
        assert torch.autograd.grad(term, next(module.model.parameters()), retain_graph=True)[0].any()


@pytest.mark.parametrize("matched", ["hidden", "logits"])
def test_a_stored_row_without_a_scored_token_costs_nothing(matched, build):
    work = build("derpp", "method.buffer_size=1", "method.minibatch_size=1", f"method.matched={matched}")
    module, (batch,) = work.module.eval(), work.batches()
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    empty = batch | {name: batch[name][:0] for name in ("positions", "targets", "rows")}
    module.losses(empty | {"weight": torch.tensor(0.0)})
    terms = module.losses(batch)
    assert terms["derpp_match"] == terms["derpp_replay"] == 0 < terms["lm"]
