"""Batches by their number: processes, parts and restarts gives the same samples, replayed ones too."""

import itertools
from collections import Counter
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.core.randomness import key, sample_keys
from cpt.data.collate import UNSCORED, label_batch, labels_of, single
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Budget, Domain
from cpt.data.replay import NO_REPLAY, Replay
from cpt.data.sampler import EvalSubset, ResumeSampler, ShardSampler, TrainStream
from cpt.models.objectives import Causal, Masked
from tests.support.data_fixtures import fake_trainer, make_rows


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 50


MASKED = Masked(Vocabulary(mask_token_id=1, all_special_ids=[0, 1], name_or_path="tiny"), rate=0.3)
OBJECTIVES = {"masked": MASKED, "causal": Causal()}
SIZES = {"a": 23, "b": 7, "c": 40, "now": 31, "general": 9}
TEXTS = {name: make_rows(size, last=5, seed=size) for name, size in SIZES.items()}
WHOSE = {
    tuple(ids): (name, row)
    for name, text in TEXTS.items()
    for row, ids in enumerate(text.ids(np.arange(len(text))).tolist())
}


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]


def stream(names, steps, *, objective=MASKED, seed=0, batch_size=12, **options):
    texts = names if isinstance(names, dict) else {name: TEXTS[name] for name in names}
    options = {"accumulate": 1, "rank": 0, "world": 1, **options}
    return TrainStream(texts, objective=objective, seed=seed, batch_size=batch_size, steps=steps, **options)


def samples(batch):
    pairs = zip(batch["input_ids"].tolist(), labels_of(batch).tolist(), strict=True)
    return [(tuple(inputs), tuple(labels)) for inputs, labels in pairs]


def all_samples(made):
    return [sample for number in range(len(made)) for sample in samples(made[number])]


def whole(*batches):
    rows = (MASKED.restore(batch)["input_ids"].tolist() for batch in batches)
    return [WHOSE[tuple(ids)] for ids in itertools.chain(*rows)]


def numbers(made):
    return whole(*(made[number] for number in range(len(made))))


def equal(batches, others):
    pairs = zip(batches, others, strict=True)
    return all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in pairs
    )


def test_an_epoch_is_every_row_once_in_an_order_and_with_masks_of_the_epoch_the_domain_and_the_seed():
    made = stream("a", [10])
    rows = [row for _, row in numbers(made)]
    epochs = [rows[start : start + 23] for start in range(0, 115, 23)]
    assert len(made) == 10 and len(rows) == 120 and len(set(all_samples(made))) > 100
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5 and list(range(23)) not in epochs
    runs = [stream({name: TEXTS["a"]}, [2], seed=seed) for name, seed in (("a", 0), ("a", 1), ("b", 0))]
    assert numbers(runs[0]) == numbers(stream("a", [2]))
    for one, other in itertools.combinations(runs, 2):
        assert numbers(one) != numbers(other)
        assert len({*all_samples(one)} & {*all_samples(other)}) < 4
    drawn = all_samples(stream("a", [12], batch_size=4))
    assert all_samples(stream("a", [3], batch_size=16)) == drawn
    assert all_samples(stream("a", [6], batch_size=4)) == drawn[:24]


def test_a_batch_with_nothing_to_score_has_weight_1_and_one_that_cannot_be_shared_out_is_refused():
    text = {"a": make_rows(4, length=1)}
    rows = EvalSubset(text, {"a": np.arange(4)}, objective=Causal(), batch_size=4, purpose="x")
    for batch in (stream(text, [1], objective=Causal(), batch_size=4)[0], rows[0]):
        assert batch["positions"].tolist() == [] and float(batch["weight"]) == 1
    for accumulate, world in ((5, 1), (1, 5), (4, 2), (0, 1)):
        with pytest.raises(ValueError, match=f"trainer.batch_size=12 .*_batches={accumulate}"):
            stream("abc", [1, 1, 1], accumulate=accumulate, world=world)


def test_the_mixture_is_exactly_the_samples_of_its_parts(objective):
    mixture = all_samples(stream("abc", [3, 5, 2], objective=objective))
    parts = [
        all_samples(stream(name, [steps], objective=objective))
        for name, steps in zip("abc", (3, 5, 2), strict=True)
    ]
    assert Counter(mixture) == Counter(sum(parts, [])) and mixture != sum(parts, [])


def test_resuming_gives_what_was_left_and_shares_are_everything_once():
    sampler = ResumeSampler(5, 12)
    assert list(sampler) == [5, 6, 7, 8, 9, 10, 11] and len(sampler) == 12
    assert list(ResumeSampler(12, 12)) == []
    for total, world in itertools.product((0, 7, 8), (1, 3, 9)):
        shares = [ShardSampler(total, rank=rank, world=world) for rank in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(total))
        assert [len(share) for share in shares] == [len(list(share)) for share in shares]
        assert {share.common for share in shares} == {min(map(len, shares))}


ROWS = {"a": np.array([22, 3, 0, 8, 7, 11]), "c": np.array([5, 39, 1])}


def subset(texts, rows, *, objective=MASKED, batch_size=4, purpose="score", **how):
    return EvalSubset(texts, rows, objective=objective, batch_size=batch_size, purpose=purpose, **how)


def test_a_subset_is_its_rows_with_masks_of_the_text_the_row_and_the_purpose():
    made, texts = subset(TEXTS, ROWS), {name: TEXTS[name] for name in "abc"}
    found = [made[number] for number in range(len(made))]
    assert [(int(batch["column"]), len(batch["input_ids"])) for batch in found] == [(0, 4), (0, 2), (2, 3)]
    assert numbers(made) == [(name, row) for name, rows in ROWS.items() for row in rows]
    assert all(float(batch["weight"]) == pytest.approx(1 / len(batch["positions"])) for batch in found)
    drawn = all_samples(made)
    assert all_samples(subset(TEXTS, ROWS, batch_size=9)) == drawn
    reordered = subset(dict(reversed(texts.items())), {name: rows[::-1] for name, rows in ROWS.items()})
    assert Counter(all_samples(reordered)) == Counter(drawn)
    assert len({*all_samples(subset(TEXTS, ROWS, purpose="probe"))} & {*drawn}) <= 2
    assert len({*all_samples(subset({"x": TEXTS["a"]}, {"x": ROWS["a"]}))} & {*drawn}) <= 1


def test_each_scored_token_has_its_document(objective):
    made = subset(TEXTS, {"a": np.arange(23)}, objective=objective, batch_size=6)
    ahead = int(isinstance(objective, Causal))
    for number in range(len(made)):
        owners = []
        for place, labels in enumerate(labels_of(made[number]).tolist()):
            predicted = (t + ahead for t, label in enumerate(labels) if label != UNSCORED)
            owners += [((number * 6 + place) * 8 + t) // 5 for t in predicted]
        assert made[number]["documents"].tolist() == owners


def test_processes_that_go_together_are_at_one_text_and_none_is_left_over(objective):
    rows = {name: np.arange(len(TEXTS[name])) for name in "abc"}
    how = {"objective": objective, "batch_size": 8}
    alone, together = subset(TEXTS, rows, **how), subset(TEXTS, rows, **how, lockstep_processes=3)
    every = [together[number] for number in range(len(together))]
    for pass_ in zip(*(every[rank::3] for rank in range(3)), strict=True):
        assert len({int(batch["column"]) for batch in pass_}) == 1
    idle = [batch for batch in every if "idle" in batch]
    assert len(idle) == len(every) - len(alone) == 3 and all(len(batch["positions"]) == 0 for batch in idle)
    kept = [samples(batch) for batch in every if "idle" not in batch]
    assert kept == [samples(alone[number]) for number in range(len(alone))]
    more = subset(TEXTS, {"b": rows["b"]}, **how, min_batches=4)  # a process without a batch ends a run
    assert ["idle" in more[number] for number in range(len(more))] == [False, True, True, True]


def test_places_targets_and_rows_are_those_of_the_labels_and_a_row_is_a_batch():
    labels = torch.tensor([[-100, 7, -100, 8], [-100] * 4, [9, -100, -100, -100]])
    ids, present = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.bool)
    batch = label_batch(ids, labels, present)
    assert "attention_mask" not in batch and "labels" not in batch
    assert batch["positions"].tolist() == [1, 3, 8] and batch["targets"].tolist() == [7, 8, 9]
    assert batch["rows"].tolist() == [0, 0, 2] and torch.equal(labels_of(batch), labels)
    present[1, 2:] = False
    batch = label_batch(ids, labels, present)
    for row in range(3):
        one, own = single(batch, row), slice(row, row + 1)
        alone = label_batch(ids[own], labels[own], present[own])
        alone.setdefault("attention_mask", torch.ones(1, 4, dtype=torch.long))
        assert equal([one], [alone])


DOMAINS = [Domain("a", 0, ("a",)), Domain("b", 1, ("b",)), Domain("c", 2, ("c",))]
JOINT = [Domain("joint", 0, ("a", "b", "c"))]
PLAIN = {name: TEXTS[name] for name in ("a", "b", "c", "general")}


def budget(**changes):
    return Budget(**{"steps": None, "epochs": None, "tokens": None, "batch_size": 4, **changes})


def sequence(*, domains=DOMAINS, enter=0, trainer=None, **changes):
    options = {
        **{"train": {name: TEXTS[name] for name in "abc"}, "held_out": PLAIN, "objective": MASKED},
        **{"budget": budget(steps=6), "replay": NO_REPLAY, "seed": 0, "accumulate": 1, "workers": 0},
        **{"eval_batch_size": 4, "importance_samples": 10},
    }
    made = DomainSequence(domains, **{**options, **changes})
    made.trainer = trainer or fake_trainer()
    made.enter(domains[enter])
    return made


def test_training_is_on_the_current_domain_and_a_batch_says_whose_text_it_is():
    made = sequence()
    assert list(made) == DOMAINS and made.domain_indices == {"a": 0, "b": 1, "c": 2}
    assert sequence(domains=JOINT).domain_indices == {"a": 0, "b": 1, "c": 2}
    for domain in DOMAINS:
        made.enter(domain)
        batches = list(made.train_dataloader())
        assert len(batches) == made.steps(domain) == 6
        assert {name for name, _ in whole(*batches)} == {domain.name}
        assert {each for batch in made.importance_batches() for each in batch["domains"].tolist()} == {
            domain.index
        }
    told = {(int(batch["column"]), *batch["domains"].tolist()[:1]) for batch in made.val_dataloader()}
    assert told == {(0, 0), (1, 1), (2, 2), (3, -1)}
    # Evaluation is every row of every text, whatever is learned, and shared out.
    batches = list(sequence().val_dataloader())
    assert whole(*batches) == [(name, row) for name in PLAIN for row in range(SIZES[name])]
    others = {"enter": 2, "seed": 5, "budget": budget(steps=1, batch_size=2), "importance_samples": 3}
    assert equal(list(sequence(**others, trainer=fake_trainer(step=4)).val_dataloader()), batches)
    share = sequence(trainer=fake_trainer(rank=1, world=2))
    assert equal(list(share.val_dataloader()), batches[1::2])


def test_a_probe_is_a_fixed_random_subset_of_the_domain_with_masks_of_its_own():
    def probed(**how):
        batches = list(sequence(**how).importance_batches())
        return whole(*batches), torch.cat([labels_of(batch) for batch in batches]).tolist()

    rows, masks = probed(enter=2)
    places = [row for name, row in rows if name == "c"]
    assert len(set(places)) == len(rows) == 10 and places != sorted(places) and max(places) > 19
    later = {"trainer": fake_trainer(step=3), "seed": 7, "budget": budget(epochs=2.0), "eval_batch_size": 3}
    assert probed(enter=2, **later) == (rows, masks)
    assert len(probed(enter=1)[0]) == SIZES["b"]
    mixed = probed(domains=JOINT)[0]  # a share of each text
    assert Counter(name for name, _ in mixed) == dict.fromkeys("abc", 4)


def test_a_budget_in_steps_is_exactly_one_of_steps_epochs_and_tokens():
    budgets = [({"steps": 6.0}, 6), ({"epochs": 1}, 6), ({"epochs": 0.001}, 1), ({"tokens": 320}, 10)]
    for given, expected in (*budgets, ({"tokens": 321}, 11), ({"epochs": 1, "batch_size": 22}, 2)):
        steps = budget(**given).steps_for(TEXTS["a"], length=8)
        assert (steps, type(steps)) == (expected, int)
    made = sequence(domains=JOINT, budget=budget(epochs=1.0))
    assert made.steps_by_text(JOINT[0]) == [6, 2, 10]
    assert made.steps(JOINT[0]) == len(made.train_dataloader()) == 18


BATCH = 8


def replay(**given) -> Replay:
    return Replay(**vars(NO_REPLAY) | given)


def replayed(mixture, *, names=("now",), past="abc", steps=(20,), stage="now", seed=0, **options):
    """The batches of a stage whose text is "now", after the domains of `past`."""
    general = {"general": TEXTS["general"]} if mixture.general_ratio else {}
    pools = mixture.pools({name: TEXTS[name] for name in past}, general, stage=stage, seed=seed)
    options = {"batch_size": BATCH, "objective": Causal(), "seed": seed, "pools": pools, **options}
    texts, places = {name: TEXTS[name] for name in names}, {name: at for at, name in enumerate("abc")}
    return stream(texts, list(steps), domain_indices=places, **options)


MIXTURES = [
    replay(past_ratio=0.1, mode="append"),
    replay(past_ratio=0.29, general_ratio=0.2),  # in floats, 0.29 * 100 is 28.999999999999996
    replay(past_ratio=0.7, buffer_size=11),
    replay(general_ratio=0.35),
    replay(past_ratio=0.5, general_ratio=0.25, buffer_size=3, mode="append"),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_shares_are_exact_and_new_rows_come_as_without_replay(mixture):
    made, new = (
        replayed(mixture, steps=[40], objective=MASKED),
        numbers(replayed(NO_REPLAY, steps=[40], objective=MASKED)),
    )
    shares = [Decimal(str(share)) for share in (mixture.past_ratio, mixture.general_ratio) if share]
    for step in range(40):
        rows, drawn = whole(made[step]), []
        for pool, share in zip(made.pools, shares, strict=True):
            draws = np.arange(*(int(share * BATCH * each) for each in (step, step + 1)))
            parts, places, _ = pool.locate(draws)
            drawn += [([*pool.texts][part], place) for part, place in zip(parts, places, strict=True)]
        own = [row for row in rows if row[0] == "now"]
        assert len(own) == (BATCH if mixture.is_appended else BATCH - len(drawn)) and own == new[: len(own)]
        assert Counter(rows) == Counter(own + drawn)
        assert made[step]["domains"].tolist() == ["abc".find(name) for name, _ in rows]
        del new[: len(own)]


@pytest.mark.parametrize(("memory", "kept"), [(None, [23, 7, 40]), (11, [3, 3, 3])])
def test_a_turn_draws_from_every_text_and_an_epoch_is_what_is_kept_of_it_in_every_stage(memory, kept):
    mixture, past, epochs = (
        replay(past_ratio=0.7, buffer_size=memory),
        {name: TEXTS[name] for name in "abc"},
        {},
    )
    for stage in ("now", "later"):
        (pool,) = mixture.pools(past, {}, stage=stage, seed=0)
        parts, rows, _ = pool.locate(np.arange(240))
        turns = parts.reshape(-1, 3)
        assert (np.sort(turns) == range(3)).all() and len(np.unique(turns, axis=0)) > 1
        for part, count in enumerate(kept):
            own = rows[parts == part][: 80 // count * count].reshape(-1, count)
            assert len(np.unique(own)) == count and len(np.unique(own, axis=0)) > 1
            epochs[stage, part] = np.sort(own)
            assert (epochs[stage, part] == epochs["now", part][0]).all()


def test_the_masks_of_a_draw_are_those_of_its_number_and_replayed_rows_stand_everywhere():
    made = replayed(replay(past_ratio=0.5), past="a", steps=[12], objective=MASKED, seed=4, stage="later")
    for number in range(12):
        parts, rows, keys = made.locate_step(number)
        inside = whole(made[number])
        assert all(inside[at] == ("a", rows[at]) for at in np.flatnonzero(parts == 1))
        expected = sample_keys(key(4, "later", "past", "masks"), np.arange(4 * number, 4 * number + 4))
        assert sorted(keys[parts == 1].tolist()) == sorted(expected.tolist())
    places, made = Counter(), replayed(replay(past_ratio=0.25), steps=[400])
    for step in range(400):
        places.update(np.flatnonzero(made.locate_step(step)[0] > 0).tolist())
    assert set(places) == set(range(BATCH)) and all(60 < count < 140 for count in places.values())


SHARED_OUT = [(mixture, ["now"], [14]) for mixture in (*MIXTURES[1:3], MIXTURES[4])]
SHARED_OUT += [(NO_REPLAY, ["a"], [3]), (NO_REPLAY, "abc", [3, 2, 4])]


@pytest.mark.parametrize(("mixture", "names", "steps"), SHARED_OUT, ids=str)
@pytest.mark.parametrize("accumulate, world", [(1, 2), (2, 1), (4, 2)])
def test_processes_and_parts_share_out_the_same_step(objective, accumulate, world, mixture, names, steps):
    how, parts = {"names": names, "steps": steps, "objective": objective}, accumulate * world
    undivided, divided = replayed(mixture, **how), {"accumulate": accumulate, "world": world}
    ranks = [replayed(mixture, rank=rank, **how, **divided) for rank in range(world)]
    assert {len(rank) for rank in ranks} == {len(undivided) * accumulate}
    for step in range(len(undivided)):
        pieces = [rank[step * accumulate + part] for part in range(accumulate) for rank in ranks]
        sizes = [len(piece["input_ids"]) for piece in pieces]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        for name in ("input_ids", "targets", "domains"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), undivided[step][name])
        scored = sum(len(piece["positions"]) for piece in pieces)
        assert [float(piece["weight"]) for piece in pieces] == pytest.approx([parts / scored] * parts)
        assert [float(piece["mean_rows"]) for piece in pieces] == pytest.approx([sum(sizes) / parts] * parts)


LATER = [*DOMAINS, Domain("now", 3, ("now",))]


def after(mixture, *, enter=3, step=0, **changes):
    how = {"domains": LATER, "train": TEXTS, "objective": Causal(), "accumulate": 2}
    how |= {"budget": budget(steps=9, batch_size=BATCH), "trainer": fake_trainer(step=step)}
    return sequence(**how | {"replay": mixture, "enter": enter, "held_out": {}} | changes)


def test_a_domain_that_is_resumed_gives_what_was_left_and_the_past_is_what_came_before():
    for mixture, step in itertools.product((NO_REPLAY, *MIXTURES), (1, 4, 9)):
        everything, rest = list(after(mixture).train_dataloader()), after(mixture, step=step)
        assert equal(list(rest.train_dataloader()), everything[2 * step :])
        assert len(rest.train_dataloader()) == len(everything) == 18
    for place, (name, past) in enumerate((("a", ""), ("b", "a"), ("c", "ab"), ("now", "abc"))):
        batches = after(replay(past_ratio=0.5, general_ratio=0.25), enter=place).train_dataloader()
        counts = Counter(WHOSE[tuple(ids)][0] for batch in batches for ids in batch["input_ids"].tolist())
        assert set(counts) == {name, "general", *past} and counts["general"] == 18
        assert counts[name] == (18 if past else 54)
        assert [counts[each] * len(past) for each in past] == [36] * len(past)
