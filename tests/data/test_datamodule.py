"""The loaders that a Trainer and a method ask for, over texts made by hand."""

import itertools

import numpy as np
import pytest
import torch

from cpt.data.collate import labels_of
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.options import Budget
from cpt.data.replay import NO_REPLAY
from tests.data.test_sampling import MASKED
from tests.support.data_fixtures import fake_trainer, rows_by_hand

SIZES = {"a": 23, "b": 7, "c": 40, "general": 9}
TEXTS = {name: rows_by_hand(size, last=5, seed=size) for name, size in SIZES.items()}
INSIDE = {name: text.ids(np.arange(len(text))).tolist() for name, text in TEXTS.items()}
DOMAINS = [Domain("a", 0, ("a",)), Domain("b", 1, ("b",)), Domain("c", 2, ("c",))]
JOINT = [Domain("joint", 0, ("a", "b", "c"))]


def budget(**changes):
    return Budget(**{"steps": None, "epochs": None, "tokens": None, "batch_size": 4, **changes})


def sequence(*, domains=DOMAINS, enter=0, trainer=None, **changes):
    options = {
        "train": {name: TEXTS[name] for name in "abc"},
        "held_out": TEXTS,
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


def whole(*batches):
    """The rows before they were masked."""
    rows = [MASKED.restored(batch)["input_ids"].tolist() for batch in batches]
    return list(itertools.chain(*rows))


def test_samples_and_masks_stay_what_they_were_in_earlier_versions():
    """A run that goes on, and one that is compared with an older one, meets the same masks."""
    made, joint = sequence(), sequence(domains=JOINT)
    loaders = [made.train_dataloader(), made.val_dataloader(), made.probe(), joint.train_dataloader()]
    first = [next(iter(loader)) for loader in loaders]
    assert [batch["positions"].tolist()[:6] for batch in first] == [
        [2, 7, 14, 15, 20, 21],
        [1, 3, 8, 15, 20, 23],
        [2, 3, 13, 15, 18, 22],
        [0, 5, 8, 13, 17, 23],
    ]
    inside = [row for name in "abc" for row in INSIDE[name]]
    assert [[inside.index(row) for row in whole(batch)] for batch in first] == [
        [14, 7, 5, 12],
        [0, 1, 2, 3],
        [4, 17, 6, 12],
        [10, 39, 25, 37],
    ]


def test_training_is_on_the_current_domain_and_a_batch_says_whose_text_it_is():
    made = sequence()
    assert list(made) == DOMAINS and made.places == {"a": 0, "b": 1, "c": 2}
    assert sequence(domains=JOINT).places == {"a": 0, "b": 1, "c": 2}
    for domain in DOMAINS:
        made.enter(domain)
        batches = list(made.train_dataloader())
        assert len(batches) == made.steps(domain) == 6
        assert all(row in INSIDE[domain.name] for row in whole(*batches))
        assert {each for batch in made.probe() for each in batch["domains"].tolist()} == {domain.index}
    told = {(int(batch["column"]), *batch["domains"].tolist()[:1]) for batch in made.val_dataloader()}
    assert told == {(0, 0), (1, 1), (2, 2), (3, -1)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_goes_on_at_the_trainers_step(accumulate):
    loader = sequence(domains=JOINT, accumulate=accumulate).train_dataloader()
    assert len(loader) == 18 * accumulate
    for step in (0, 7, 18):
        rest = sequence(domains=JOINT, accumulate=accumulate, trainer=fake_trainer(step=step))
        assert equal(list(rest.train_dataloader()), list(loader)[step * accumulate :])
        assert len(rest.train_dataloader()) == len(loader)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("loader", ["train_dataloader", "probe"])
def test_workers_change_nothing(loader):
    alone, helped = (getattr(sequence(domains=JOINT, workers=n), loader)() for n in (0, 2))
    assert [getattr(each, "loader", each).num_workers for each in (alone, helped)] == [0, 2]
    assert len(alone) > 2 and equal(list(alone), list(helped))


def test_evaluation_is_every_row_of_every_text_whatever_is_learned():
    batches = list(sequence().val_dataloader())
    columns = [int(batch["column"]) for batch in batches]
    assert columns == sorted(columns) and whole(*batches) == list(itertools.chain(*INSIDE.values()))
    others = {"enter": 2, "seed": 5, "budget": budget(steps=1, batch_size=2), "probe_samples": 3}
    for name, value in (others | {"trainer": fake_trainer(step=4)}).items():
        assert equal(list(sequence(**{name: value}).val_dataloader()), batches)


@pytest.mark.parametrize("loader", ["val_dataloader", "probe"])
def test_processes_share_out_evaluation_and_probes(loader):
    batches = list(getattr(sequence(), loader)())
    for rank in (0, 1):
        share = getattr(sequence(trainer=fake_trainer(rank=rank, world=2)), loader)()
        assert equal(list(share), batches[rank::2])


def probed(**how):
    """The rows of a probe, unmasked, and where its masks are."""
    batches = list(sequence(**how).probe())
    return whole(*batches), torch.cat([labels_of(batch) for batch in batches]).tolist()


def test_a_probe_is_a_fixed_random_subset_of_the_domain():
    rows, masks = probed(enter=2)
    places = [INSIDE["c"].index(row) for row in rows]
    assert len(set(places)) == len(places) == 10 and places != sorted(places) and max(places) > 19
    later = {"trainer": fake_trainer(step=3), "seed": 7, "budget": budget(epochs=2.0), "eval_batch_size": 3}
    for name, value in later.items():
        assert probed(enter=2, **{name: value}) == (rows, masks)
    assert probed(enter=2, probe_samples=6)[0] == rows[:6]
    assert len(probed(enter=1)[0]) == SIZES["b"]
    mixed = probed(domains=JOINT)[0]  # a share of each text
    assert [sum(row in INSIDE[name] for row in mixed) for name in "abc"] == [4, 4, 4]
    assert mixed[:4] == probed(probe_samples=4)[0]


def test_a_probe_has_masks_of_its_own():
    """Of the same rows under the same name, evaluation masks other places."""
    how = {"held_out": {"a": TEXTS["a"]}, "probe_samples": 23}
    rows, masks = probed(**how)
    scored = torch.cat([labels_of(batch) for batch in sequence(**how).val_dataloader()]).tolist()
    assert 0 < sum(mask in scored for mask in masks) < 5 and len(rows) == 23


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"steps": 6.0}, 6),
        ({"epochs": 1}, 6),
        ({"epochs": 0.001}, 1),
        ({"tokens": 320}, 10),
        ({"tokens": 321}, 11),
        ({"epochs": 1, "batch_size": 23}, 1),
        ({"epochs": 1, "batch_size": 22}, 2),
    ],
)
def test_a_budget_in_steps(given, expected):
    steps = budget(**given).steps_for(TEXTS["a"], length=8)
    assert (steps, type(steps)) == (expected, int)


def test_the_steps_of_a_mixture_are_those_of_its_texts():
    made = sequence(domains=JOINT, budget=budget(epochs=1.0))
    assert made.steps_by_part(JOINT[0]) == [6, 2, 10]
    assert made.steps(JOINT[0]) == len(made.train_dataloader()) == 18


@pytest.mark.parametrize(
    "given", [{}, {"steps": 3, "epochs": 1}, {"epochs": 1, "tokens": 5}, {"steps": 2.5}, {"epochs": 0.0}]
)
def test_a_budget_is_exactly_one_of_steps_epochs_and_tokens(given):
    with pytest.raises(ValueError, match="exactly one of trainer.steps"):
        budget(**given)


def test_a_step_looks_at_its_own_domain_and_not_at_all(monkeypatch):
    """The steps of all domains are counted once, whatever asks where the run is."""
    counted, own = [], Budget.steps_for
    monkeypatch.setattr(Budget, "steps_for", lambda *given, **more: counted.append(1) or own(*given, **more))
    data = sequence(enter=1)
    found = [data.progress(step) for step in range(6)]
    assert [each.total_step for each in found] == list(range(6, 12)) and found[0].first == 6
    assert (found[0].domain, found[0].steps, found[0].total_steps) == (1, 6, 6 * len(DOMAINS))
    assert len(counted) == len(DOMAINS)
