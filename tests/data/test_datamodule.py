"""The loaders that a Trainer and a method ask for, over texts made by hand."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.data.collate import labels_of
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.options import Budget
from cpt.data.replay import NO_REPLAY, Replay
from cpt.models.objectives import Causal, Masked
from tests.support.data_fixtures import fake_trainer, rows_by_hand

SIZES = {"a": 23, "b": 7, "c": 40, "general": 9}
DOMAINS = [Domain("a", 0, ("a",)), Domain("b", 1, ("b",)), Domain("c", 2, ("c",))]
JOINT = Domain("joint", 0, ("a", "b", "c"))


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 50


MASKED = Masked(Vocabulary(mask_token_id=1, all_special_ids=[0, 1], name_or_path="tiny"), rate=0.3)


@pytest.fixture(scope="module")
def texts():
    return {name: rows_by_hand(size, last=5, seed=size) for name, size in SIZES.items()}


def budget(**changes):
    return Budget(**{"steps": None, "epochs": None, "tokens": None, "batch_size": 4, **changes})


def sequence(texts, *, domains=DOMAINS, enter=0, trainer=None, **changes):
    options = {
        "train": {name: texts[name] for name in "abc"},
        "held_out": texts,
        "objective": MASKED,
        "budget": budget(steps=6),
        "replay": NO_REPLAY,
        "seed": 0,
        "accumulate": 1,
        "eval_batch_size": 4,
        "probe_samples": 10,
        "workers": 0,
    }
    made = DomainSequence(domains, **{**options, **changes})
    made.trainer = trainer or fake_trainer()
    made.enter(domains[enter])
    return made


def equal(batches, others):
    pairs = zip(batches, others, strict=True)
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in pairs
    )


def test_a_sequence_is_its_domains(texts):
    made = sequence(texts)
    assert list(made) == DOMAINS
    assert len(made) == 3
    assert made.places == {"a": 0, "b": 1, "c": 2}
    assert sequence(texts, domains=[JOINT]).places == {"a": 0, "b": 1, "c": 2}


def test_samples_and_masks_stay_what_they_were_in_earlier_versions(texts):
    """A run that goes on, and one that is compared with an older one, meets the same masks."""
    made, joint = sequence(texts), sequence(texts, domains=[JOINT])
    loaders = [made.train_dataloader(), made.val_dataloader(), made.probe(), joint.train_dataloader()]
    first = [next(iter(loader)) for loader in loaders]
    assert [batch["positions"].tolist()[:6] for batch in first] == [
        [2, 7, 14, 15, 20, 21],
        [1, 3, 8, 15, 20, 23],
        [2, 3, 13, 15, 18, 22],
        [0, 5, 8, 13, 17, 23],
    ]
    ids = [torch.where(labels_of(batch) == -100, batch["input_ids"], labels_of(batch)) for batch in first]
    inside = [row for name in "abc" for row in texts[name].ids(np.arange(SIZES[name])).tolist()]
    assert [[inside.index(row) for row in each.tolist()] for each in ids] == [
        [14, 7, 5, 12],
        [0, 1, 2, 3],
        [4, 17, 6, 12],
        [10, 39, 25, 37],
    ]


def test_training_is_on_the_current_domain(texts):
    made = sequence(texts)
    for domain in DOMAINS:
        made.enter(domain)
        rows = {tuple(row) for row in texts[domain.name].ids(np.arange(SIZES[domain.name])).tolist()}
        batches = list(made.train_dataloader())
        assert len(batches) == made.steps(domain) == 6
        for batch in batches:
            ids = torch.where(labels_of(batch) == -100, batch["input_ids"], labels_of(batch))
            assert {tuple(row) for row in ids.tolist()} <= rows


def test_the_seed_decides_the_order(texts):
    batches = {seed: list(sequence(texts, seed=seed).train_dataloader()) for seed in (0, 1)}
    assert equal(batches[0], list(sequence(texts, seed=0).train_dataloader()))
    assert not equal(batches[0], batches[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_at_the_trainers_step(texts, accumulate):
    whole = sequence(texts, domains=[JOINT], accumulate=accumulate).train_dataloader()
    assert len(whole) == 18 * accumulate
    for step in (0, 7, 18):
        rest = sequence(texts, domains=[JOINT], accumulate=accumulate, trainer=fake_trainer(step=step))
        assert equal(list(rest.train_dataloader()), list(whole)[step * accumulate :])
        assert len(rest.train_dataloader()) == len(whole)


def test_processes_share_out_the_training_batches(texts):
    whole = list(sequence(texts).train_dataloader())
    ranks = [
        list(sequence(texts, trainer=fake_trainer(rank=rank, world=2)).train_dataloader()) for rank in (0, 1)
    ]
    for batch, *shares in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.cat([each["input_ids"] for each in shares]), batch["input_ids"])
    with pytest.raises(ValueError, match="times 3 processes"):
        sequence(texts, trainer=fake_trainer(world=3)).train_dataloader()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader", "probe"])
def test_workers_change_nothing(texts, loader):
    alone, helped = (getattr(sequence(texts, domains=[JOINT], workers=n), loader)() for n in (0, 2))
    assert [getattr(each, "loader", each).num_workers for each in (alone, helped)] == [0, 2]
    assert len(alone) > 2
    assert equal(list(alone), list(helped))


def test_memory_is_pinned_for_the_accelerator_only(texts):
    assert not sequence(texts).train_dataloader().pin_memory
    trainer = fake_trainer()
    trainer.strategy.root_device = torch.device("cuda")
    assert sequence(texts, trainer=trainer).train_dataloader().pin_memory


def test_evaluation_is_every_row_of_every_text_whatever_is_learned(texts):
    made = sequence(texts)
    batches = list(made.val_dataloader())
    columns = [int(batch["column"]) for batch in batches]
    assert columns == sorted(columns)
    rows = [
        row
        for batch in batches
        for row in torch.where(labels_of(batch) == -100, batch["input_ids"], labels_of(batch))
    ]
    expected = itertools.chain(*(text.ids(np.arange(len(text))).tolist() for text in texts.values()))
    assert [row.tolist() for row in rows] == list(expected)
    others = {"enter": 2, "seed": 5, "budget": budget(steps=1, batch_size=2), "probe_samples": 3}
    for name, value in others.items():
        assert equal(list(sequence(texts, **{name: value}).val_dataloader()), batches)
    later = sequence(texts, trainer=fake_trainer(step=4))
    assert equal(list(later.val_dataloader()), batches)


def test_processes_share_out_evaluation_and_probes(texts):
    for loader in ("val_dataloader", "probe"):
        whole = list(getattr(sequence(texts), loader)())
        shares = [
            list(getattr(sequence(texts, trainer=fake_trainer(rank=rank, world=2)), loader)())
            for rank in (0, 1)
        ]
        assert equal(shares[0], whole[0::2])
        assert equal(shares[1], whole[1::2])


def probed(made):
    """The rows of a probe, unmasked, and where its masks are."""
    batches = list(made.probe())
    ids = [torch.where(labels_of(batch) == -100, batch["input_ids"], labels_of(batch)) for batch in batches]
    return torch.cat(ids).tolist(), torch.cat([labels_of(batch) for batch in batches]).tolist()


def test_a_probe_is_a_fixed_random_subset_of_the_domain(texts):
    rows, masks = probed(sequence(texts, enter=2))
    inside = texts["c"].ids(np.arange(40)).tolist()
    places = [inside.index(row) for row in rows]
    assert len(set(places)) == len(places) == 10
    assert places != sorted(places)
    assert max(places) > 19
    later = {"trainer": fake_trainer(step=3), "seed": 7, "budget": budget(epochs=2.0), "eval_batch_size": 3}
    for name, value in later.items():
        assert probed(sequence(texts, enter=2, **{name: value})) == (rows, masks)
    assert probed(sequence(texts, enter=2, probe_samples=6))[0] == rows[:6]
    assert len(probed(sequence(texts, enter=1))[0]) == SIZES["b"]


def test_a_probe_has_masks_of_its_own(texts):
    """Of the same rows under the same name, evaluation masks other places."""
    made = sequence(texts, held_out={"a": texts["a"]}, probe_samples=23)
    rows, masks = probed(made)
    scored = torch.cat([labels_of(batch) for batch in made.val_dataloader()]).tolist()
    assert 0 < sum(mask in scored for mask in masks) < 5
    assert len(rows) == 23


def test_a_probe_of_a_mixture_has_a_share_of_each_text(texts):
    rows, _ = probed(sequence(texts, domains=[JOINT], probe_samples=10))
    inside = {name: texts[name].ids(np.arange(SIZES[name])).tolist() for name in "abc"}
    assert [sum(row in inside[name] for row in rows) for name in "abc"] == [4, 4, 4]
    alone, _ = probed(sequence(texts, enter=0, probe_samples=4))
    assert rows[:4] == alone


def test_a_causal_sequence(texts):
    made = sequence(texts, objective=Causal())
    for batch in (next(iter(made.train_dataloader())), next(iter(made.val_dataloader()))):
        assert torch.equal(labels_of(batch)[:, :-1].flatten()[:7], batch["input_ids"][0, 1:])


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"steps": 6}, 6),
        ({"steps": 6.0}, 6),
        ({"epochs": 1}, 6),
        ({"epochs": 0.5}, 3),
        ({"epochs": 2.0}, 12),
        ({"epochs": 0.001}, 1),
        ({"tokens": 23 * 8}, 6),
        ({"tokens": 320}, 10),
        ({"tokens": 321}, 11),
        ({"tokens": 1e9}, 31_250_000),
        ({"epochs": 1, "batch_size": 23}, 1),
        ({"epochs": 1, "batch_size": 22}, 2),
        ({"epochs": 1, "batch_size": 1}, 23),
    ],
)
def test_a_budget_in_steps(texts, given, expected):
    steps = budget(**given).steps_for(texts["a"], length=8)
    assert (steps, type(steps)) == (expected, int)


def test_the_steps_of_a_mixture_are_those_of_its_texts(texts):
    made = sequence(texts, domains=[JOINT], budget=budget(epochs=1.0))
    assert made.steps_by_part(JOINT) == [6, 2, 10]
    assert made.steps(JOINT) == len(made.train_dataloader()) == 18


@pytest.mark.parametrize(
    "given, shown",
    [
        ({}, "is none, trainer.batch_size=4"),
        ({"steps": 3, "epochs": 1}, "is trainer.steps=3 trainer.epochs=1, trainer.batch_size=4"),
        ({"epochs": 1, "tokens": 5}, "is trainer.epochs=1 trainer.tokens=5, "),
        ({"steps": 0}, "is trainer.steps=0, "),
        ({"tokens": -5}, "is trainer.tokens=-5, "),
        ({"epochs": 0.0}, "is trainer.epochs=0.0, "),
        ({"steps": 2.5}, "is trainer.steps=2.5, "),
        ({"steps": 3, "batch_size": 0}, "is trainer.steps=3, trainer.batch_size=0; "),
    ],
)
def test_what_is_no_budget(given, shown):
    with pytest.raises(ValueError) as error:
        budget(**given)
    assert shown in str(error.value)
    assert "; allowed: exactly one of trainer.steps (whole), trainer.epochs, trainer.tokens" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_a_step_looks_at_its_own_domain_and_not_at_all(texts, monkeypatch):
    """The steps of all domains are counted once, whatever asks where the run is."""
    counted, own = [], Budget.steps_for
    monkeypatch.setattr(Budget, "steps_for", lambda *given, **more: counted.append(1) or own(*given, **more))
    data = sequence(texts, enter=1)
    found = [data.progress(step) for step in range(6)]
    assert [each.total_step for each in found] == list(range(6, 12)) and found[0].first == 6
    assert (found[0].domain, found[0].steps, found[0].total_steps) == (1, 6, 6 * len(DOMAINS))
    assert len(counted) == len(DOMAINS)


def test_without_replay_no_earlier_text_is_looked_at(texts):
    data = sequence(texts, enter=len(DOMAINS) - 1)
    assert [pool for pool in data.replay_pools(data.domain) if pool.texts] == []
    mixed = sequence(
        texts, enter=len(DOMAINS) - 1, replay=Replay(past=0.25, general=0.0, adds=False, memory=None)
    )
    assert [list(pool.texts) for pool in mixed.replay_pools(mixed.domain)] == [mixed.past(mixed.domain)]
