"""What a batch says of its rows and scored places, and that an objective alone runs a model on it."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cpt.data.collate import label_batch, labels_of, single
from cpt.models.objectives import Objective
from tests.support.making import DROPOUT, ORDER, made

LABELS = torch.tensor([[-100, 7, -100, 8], [-100] * 4, [9, -100, -100, -100]])
IDS = torch.arange(12).view(3, 4)
CUT = ["trainer.steps=4", "trainer.accumulate_grad_batches=2"]
EVERYWHERE = torch.ones(3, 4, dtype=torch.bool)


def test_places_targets_and_rows_are_those_of_the_labels():
    batch = label_batch(IDS, LABELS, EVERYWHERE)
    assert "attention_mask" not in batch and "labels" not in batch
    assert batch["positions"].tolist() == [1, 3, 8]
    assert batch["targets"].tolist() == [7, 8, 9]
    assert batch["rows"].tolist() == [0, 0, 2]
    assert torch.equal(labels_of(batch), LABELS)


def test_a_row_of_a_batch_is_the_batch_of_the_row():
    present = EVERYWHERE.clone()
    present[1, 2:] = False
    batch = label_batch(IDS, LABELS, present)
    for row in range(3):
        one, own = single(batch, row), slice(row, row + 1)
        alone = label_batch(IDS[own], LABELS[own], present[own])
        alone.setdefault("attention_mask", torch.ones(1, 4, dtype=torch.long))
        assert one.keys() == alone.keys()
        assert all(torch.equal(one[name], alone[name]) for name in alone)


class Noting(Callback):
    """Holds on to the training batches."""

    def __init__(self) -> None:
        self.batches = []

    def on_train_batch_end(self, trainer, module, outputs, batch, *args):
        self.batches.append(batch)


@pytest.mark.parametrize("order", ["order=[law,food]", "order=[food,law]"])
def test_a_row_knows_whose_text_it_is(order, small):
    work = made(small(order, "replay=past", "replay.past=0.3", "replay.general=0.2", *CUT))
    noted, texts = Noting(), {}
    for name, text in work.data.train.items():
        rows = text.ids(torch.arange(len(text)).numpy())
        texts |= {tuple(row): work.data.places.get(name, -1) for row in rows.tolist()}
    for number in (0, 1):
        work.learn(number, noted)
    seen = set()
    for batch in noted.batches:
        rows = work.module.objective.restored(batch)["input_ids"].tolist()
        assert batch["domains"].tolist() == [texts[tuple(row)] for row in rows]
        seen |= set(batch["domains"].tolist())
    assert seen == {-1, 0, 1}


def test_probes_and_held_out_text_say_it_too(small):
    work = made(small("order=[law,food]"))
    work.learn(1)
    assert {each for batch in work.probe() for each in batch["domains"].tolist()} == {1}
    held_out = [
        (int(batch["column"]), set(batch["domains"].tolist())) for batch in work.data.val_dataloader()
    ]
    assert {(column, *domains) for column, domains in held_out} == {(0, 0), (1, 1), (2, -1)}


@pytest.mark.parametrize(
    "method", ["das", "derpp", "ewc", "kd", "demix", "prompt", "olora", "lora method.per_domain=true"]
)
def test_an_objective_alone_runs_a_model_on_a_batch(method, small, monkeypatch):
    running = []
    for name in ("outputs", "encode"):
        original = getattr(Objective, name)

        def noted(objective, *args, original=original):
            running.append(True)
            try:
                return original(objective, *args)
            finally:
                running.pop()

        monkeypatch.setattr(Objective, name, noted)
    work, calls = made(small(*f"method={method}".split(), ORDER, *DROPOUT, "trainer.steps=2")), []
    work.module.model.base_model.register_forward_pre_hook(lambda *_: calls.append(bool(running)))
    for number in (0, 1):
        work.learn(number)
        work.module.nll(work.probe()[0], number)
    assert calls and all(calls)
