"""Earlier text in a domain's batches: which rows come when, how many, and that nothing else decides it."""

import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch

from cpt.core.randomness import key, sample_keys, shuffle
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.options import Budget
from cpt.data.replay import NO_REPLAY, Replay
from cpt.data.sampler import TrainStream
from cpt.models.objectives import Causal
from tests.conftest import ROOT
from tests.data.test_sampling import MASKED
from tests.support.data_fixtures import fake_trainer, rows_by_hand

SIZES = {"a": 23, "b": 7, "c": 40, "now": 31, "general": 9}
TEXTS = {name: rows_by_hand(size, last=5, seed=size) for name, size in SIZES.items()}
WHOSE = {
    tuple(ids): (name, row)
    for name, text in TEXTS.items()
    for row, ids in enumerate(text.ids(np.arange(len(text))).tolist())
}
BATCH = 8


def replay(**given) -> Replay:
    return Replay(**{"past": 0.0, "general": 0.0, "memory": None, "adds": False, **given})


def stream(mixture, *, names=("now",), past="abc", steps=(20,), stage="now", seed=0, **options):
    """The batches of a stage whose text is "now", after the domains of `past`."""
    options = {"batch_size": BATCH, "accumulate": 1, "rank": 0, "world": 1, "objective": Causal(), **options}
    general = {"general": TEXTS["general"]} if mixture.general else {}
    pools = mixture.pools({name: TEXTS[name] for name in past}, general, stage=stage, seed=seed)
    own, places = {name: TEXTS[name] for name in names}, {name: at for at, name in enumerate("abc")}
    return TrainStream(own, seed=seed, steps=list(steps), earlier=pools, places=places, **options)


def found(made):
    """The samples of each step, as texts with row numbers."""
    return [[WHOSE[tuple(ids)] for ids in made[at]["input_ids"].tolist()] for at in range(len(made))]


def bits(made):
    return [{name: each.tolist() for name, each in made[at].items()} for at in range(len(made))]


def keys_of(made, number):
    """The keys of what is replayed in a step."""
    parts, _, keys = made.samples(number)
    return keys[parts >= len(made.names)].tolist()


# --- an oracle that walks through the stage, with decks of cards


class Deck:
    """Cards that are dealt in a shuffle, and shuffled again when none is left."""

    def __init__(self, count, stream):
        self.count, self.stream, self.epoch, self.left = count, stream, 0, []

    def deal(self):
        if not self.left:
            (name,) = sample_keys(self.stream, np.array([self.epoch]))
            self.left = shuffle(np.arange(self.count), self.count, stream=int(name)).tolist()
            self.epoch += 1
        return self.left.pop(0)


def walked(mixture, *, past, general, own, steps, seed=0, stage="now", batch_size=BATCH):
    """What each step holds, in the order: own samples, of the past, general."""
    fresh = Deck(own, key(seed, "now"))
    kinds = []
    for kind, share, sizes in (("past", mixture.past, past), ("general", mixture.general, general)):
        names = list(sizes)
        quota = mixture.memory // len(names) if kind == "past" and mixture.memory and names else None
        kept = {
            name: shuffle(np.arange(size), size, stream=key(seed, "memory", name))[:quota].tolist()
            for name, size in sizes.items()
        }
        decks = {name: Deck(len(kept[name]), key(seed, stage, kind, "rows", name)) for name in names}
        turns = Deck(len(names), key(seed, stage, kind, "turns")) if names else None
        kinds.append((Decimal(str(share)) if names else Decimal(0), turns, names, decks, kept))
    for step in range(steps):
        drawn = []
        for share, turns, names, decks, kept in kinds:
            before, after = (int(share * batch_size * each) for each in (step, step + 1))
            for _ in range(after - before):
                name = names[turns.deal()]
                drawn.append((name, kept[name][decks[name].deal()]))
        new = batch_size if mixture.adds else batch_size - len(drawn)
        yield [("now", fresh.deal()) for _ in range(new)], drawn


MIXTURES = [
    replay(past=0.1, adds=True),
    replay(past=0.3, general=0.2),
    replay(past=0.7, memory=11),
    replay(general=0.35),
    replay(past=0.5, general=0.25, memory=3, adds=True),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("past", ["abc", "b", ""])
def test_the_rows_are_those_of_the_oracle(mixture, past):
    """The new samples are those of the same stream without replay, displaced or not; each says its domain."""
    made = stream(mixture, past=past, steps=[60])
    general = {"general": SIZES["general"]} if mixture.general else {}
    sizes = {name: SIZES[name] for name in past}
    expected = walked(mixture, past=sizes, general=general, own=SIZES["now"], steps=60)
    for number, (rows, (new, drawn)) in enumerate(zip(found(made), expected, strict=True)):
        assert [row for row in rows if row[0] == "now"] == new
        assert Counter(rows) == Counter(new + drawn)
        assert made[number]["domains"].tolist() == ["abc".find(name) for name, _ in rows]


def test_the_masks_of_a_draw_are_those_of_its_number():
    """Of the seed, the stage, the kind and how many came before."""
    made = stream(replay(past=0.5), past="a", steps=[12], objective=MASKED)
    for number in range(12):
        parts, rows, _ = made.samples(number)
        whole = MASKED.restored(made[number])["input_ids"]
        assert all(WHOSE[tuple(whole[at].tolist())] == ("a", rows[at]) for at in np.flatnonzero(parts == 1))
        expected = sample_keys(key(0, "now", "past", "masks"), np.arange(4 * number, 4 * number + 4))
        assert sorted(keys_of(made, number)) == sorted(expected.tolist())


@pytest.mark.parametrize("share", [0.3, 0.29, 0.57, 1e-3, 0.999, 1 / 3])
def test_counts_are_exact_for_millions_of_steps(share):
    """Floats do not serve: 0.29 * 100 is 28.999999999999996."""
    (pool,) = replay(past=share).pools({"a": TEXTS["a"]}, {}, stage="now", seed=0)
    for samples in [*range(200), 7 * 10**6, 256 * (10**7 + 3), 10 * (10**12 + 7)]:
        assert pool.count(samples) == int(Decimal(str(share)) * samples)


def test_a_memory_shrinks_as_domains_come():
    """Equal quotas, and what is kept later was kept before."""
    former, how = {}, {"steps": [60]}
    for past, quota in (("a", 13), ("ab", 6), ("abc", 4)):
        rows = {name: set() for name in past}
        for name, row in itertools.chain(*found(stream(replay(past=0.9, memory=13), past=past, **how))):
            rows.get(name, set()).add(row)
        assert {name: len(kept) for name, kept in rows.items()} == {
            name: min(SIZES[name], quota) for name in past
        }
        assert all(rows[name] <= former.get(name, rows[name]) for name in past)
        assert rows["a"] != set(range(quota))
        former = rows
    others = itertools.chain(*found(stream(replay(past=0.9, memory=13), seed=1, **how)))
    kept = {row for name, row in others if name == "a"}
    assert len(kept) == 4 and kept != former["a"]


@pytest.mark.parametrize("names, steps", [(["now"], [20]), (["a", "now"], [7, 9])])
def test_nothing_replayed_is_no_replay_bit_for_bit(names, steps):
    how = {"steps": steps, "accumulate": 2, "rank": 1, "world": 2}
    texts, places = {name: TEXTS[name] for name in names}, {"a": 0}
    plain = bits(TrainStream(texts, objective=Causal(), seed=0, batch_size=BATCH, places=places, **how))
    for mixture in (NO_REPLAY, replay(past=1e-9), replay(past=1e-9, adds=True)):
        assert bits(stream(mixture, names=names, **how)) == plain
    for adds in (False, True):
        assert bits(stream(replay(past=0.9, adds=adds), names=names, past="", **how)) == plain


def test_the_draws_are_the_stages_and_the_seeds():
    """So that a row does not meet the same masks in each stage that replays it."""
    how = {"past": "a", "steps": [6]}
    first = stream(replay(past=0.5), **how)
    others = {"stage": "later"}, {"seed": 1}, {}
    for changed in others:
        other = stream(replay(past=0.5, general=0 if changed else 0.2), **how, **changed)
        keys = [set(itertools.chain(*(keys_of(made, step) for step in range(6)))) for made in (first, other)]
        assert len(keys[0] & keys[1]) == (0 if changed else 24)


def test_replayed_rows_stand_everywhere():
    """Otherwise one process would learn the past and another the present."""
    places, made = Counter(), stream(replay(past=0.25), steps=[400])
    for step in range(400):
        places.update(np.flatnonzero(made.samples(step)[0] > 0).tolist())
    assert set(places) == set(range(BATCH)) and all(60 < count < 140 for count in places.values())


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("accumulate, world", [(2, 1), (1, 4), (4, 2)])
def test_processes_and_parts_share_out_the_same_step(accumulate, world, mixture):
    how = {"steps": [14], "accumulate": accumulate, "world": world}
    whole, ranks = stream(mixture, steps=[14]), [stream(mixture, rank=rank, **how) for rank in range(world)]
    assert {len(rank) for rank in ranks} == {14 * accumulate}
    for step in range(14):
        pieces = [rank[step * accumulate + part] for part in range(accumulate) for rank in ranks]
        sizes = [len(piece["input_ids"]) for piece in pieces]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        for name in ("input_ids", "targets", "domains"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), whole[step][name])
        weights = [float(piece["weight"]) * len(piece["positions"]) for piece in pieces]
        assert sum(weights) / (accumulate * world) == pytest.approx(1)
        assert len({float(piece["weight"]) for piece in pieces}) == 1


GOLDEN = [
    [("a", 14), ("b", 3), ("now", 3), ("now", 2), ("c", 29), ("general", 3), ("now", 9), ("now", 4)],
    [("general", 8), ("c", 7), ("now", 30), ("now", 27), ("b", 5), ("a", 9), ("general", 6), ("now", 20)],
    [("b", 4), ("now", 5), ("c", 6), ("general", 2), ("now", 24), ("now", 21), ("now", 14), ("a", 1)],
]


def test_draws_stay_what_they_were_in_earlier_versions():
    """A run that goes on, and one that is compared with an older one, meets the same samples."""
    made = stream(replay(past=0.4, general=0.2, memory=12), steps=[3])
    assert found(made) == GOLDEN
    assert [int(each) % 10**6 for each in keys_of(made, 1)] == [606658, 651746, 462615, 914098, 30606]


@pytest.mark.slow
def test_236_domains_cost_as_much_as_two():
    small, seconds = {f"d{number}": rows_by_hand(30, seed=number) for number in range(235)}, {}
    for count, at in ((2, 0), (235, 10**9)):
        past = dict(itertools.islice(small.items(), count))
        pools = replay(past=0.25).pools(past, {}, stage="now", seed=0)
        made = partial(TrainStream, {"now": TEXTS["now"]}, objective=Causal(), seed=0, batch_size=32)
        made = made(steps=[2 * 10**9], accumulate=1, rank=0, world=1, earlier=pools)
        taken = []
        for number in [*range(at, at + 120), *range(at, at + 60)]:  # at first every text is opened
            began = time.perf_counter()
            made[number]
            taken.append(time.perf_counter() - began)
        seconds[count] = sorted(taken[120:])[15]
    assert max(seconds.values()) < min(0.05, 6 * min(seconds.values())), seconds


# --- a sequence of stages


def sequence(mixture, *, enter="now", step=0, domains="abcn", **changes):
    names = [{"n": "now"}.get(name, name) for name in domains]
    stages = [Domain(name, place, (name,)) for place, name in enumerate(names)]
    options = {
        "train": TEXTS,
        "held_out": {},
        "objective": Causal(),
        "budget": Budget(steps=9, epochs=None, tokens=None, batch_size=BATCH),
        "replay": mixture,
        "seed": 0,
        "accumulate": 2,
        "eval_batch_size": 4,
        "probe_samples": 10,
        "workers": 0,
    }
    made = DomainSequence(stages, **{**options, **changes})
    made.trainer = fake_trainer(step=step)
    made.enter(next(stage for stage in made if stage.name == enter))
    return made


def names_in(made):
    """How many samples of each text the entered domain's batches hold."""
    batches = made.train_dataloader()
    return Counter(WHOSE[tuple(ids)][0] for batch in batches for ids in batch["input_ids"].tolist())


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_a_domain_that_is_resumed_gives_what_was_left(mixture):
    whole = list(sequence(mixture).train_dataloader())
    for step in (1, 4, 9):
        left = list(sequence(mixture, step=step).train_dataloader())
        assert len(left) == 18 - 2 * step
        for batch, expected in zip(left, whole[2 * step :], strict=True):
            assert all(torch.equal(batch[name], each) for name, each in expected.items())


def test_the_past_is_what_came_before():
    for name, past in (("a", ""), ("b", "a"), ("c", "ab"), ("now", "abc")):
        counts = names_in(sequence(replay(past=0.5, general=0.25), enter=name))
        assert set(counts) == {name, "general", *past} and counts["general"] == 18
        assert counts[name] == (18 if past else 54)
        assert [counts[each] * len(past) for each in past] == [36] * len(past)


def test_a_stage_of_several_texts_has_general_text_and_no_past_and_a_text_is_past_once():
    joint, again = Domain("joint", 0, ("a", "b", "now")), Domain("x", 1, ("a",))
    later = Domain("b", 2, ("c",))
    made = sequence(replay(past=0.5, general=0.1))
    made.domains = (joint, again, later)
    made.enter(joint)
    counts, alone = names_in(made), 9 * BATCH - 7  # but for what counts of the parts round down
    assert set(counts) == {"a", "b", "now", "general"} and counts.total() == 27 * BATCH
    assert counts["general"] == int(27 * BATCH * 0.1)
    assert all(alone - 1 <= counts[name] <= alone for name in ("a", "b", "now"))
    assert made.past(later) == ["a", "b", "now"]


@pytest.mark.parametrize(
    ("given", "how", "told"),
    [
        ({"past": 0.9, "general": 0.1}, None, "past=0.9 and general=0.1"),
        ({"past": 0.8, "general": 0.2}, None, "past=0.8 and general=0.2"),
        ({"general": 0.5, "memory": 5}, None, "memory=5 with past=0.0"),
        ({"past": 0.5, "memory": 2}, {}, "memory=2 for 3 past domains"),
        ({"general": 0.1}, {"train": {n: TEXTS[n] for n in SIZES if n != "general"}}, "no general text"),
        ({"past": 0.5, "general": 0.3}, {"accumulate": 1, "budget": 2}, "trainer.batch_size=2"),
    ],
)
def test_what_cannot_be_replayed_is_refused(given, how, told):
    """With a batch of two, the shares of both kinds round up in the same steps."""
    if how and "budget" in how:
        how = how | {"budget": Budget(steps=9, epochs=None, tokens=None, batch_size=how["budget"])}
        assert sequence(replay(**given, adds=True), **how) and sequence(replay(past=0.9), **how)
    with pytest.raises(ValueError, match=told):
        mixture = replay(**given)
        sequence(mixture, **how)
    assert sequence(replay(past=0.5, memory=2), domains="abn")


def test_room_is_left_whenever_it_is_promised():
    for batch_size, past, general in itertools.product((2, 3, 5, 8), (0.1, 0.3, 0.45), (0.05, 0.2, 0.5)):
        mixture = replay(past=past, general=general)
        try:
            mixture.check(domains=1, general=True, batch_size=batch_size)
        except ValueError:
            continue
        made = stream(mixture, batch_size=batch_size, steps=[200])
        new = [made.new(step + 1) - made.new(step) for step in range(200)]
        assert min(new) >= 0 and len(made.samples(int(np.argmin(new)))[0]) == batch_size


def test_a_pool_is_known_without_torch():
    code = "import sys; import cpt.data.replay; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def learned(folder):
    scores = json.loads((folder / "scores.json").read_text())
    state = torch.load(sorted((folder / "stages").glob("*.pt"))[-1], weights_only=True)
    return scores["nll"], {name: value.numpy().tobytes() for name, value in state.items()}


def test_the_method_is_ncl_with_replay_bit_for_bit(small, start, tmp_path):
    runs = {
        "ncl": ["method=ncl"],
        "over": ["method=ncl", "replay=past"],
        "method": ["method=replay"],
        "nothing": ["method=ncl", "replay=past", "replay.past=0"],
    }
    for name, chosen in runs.items():
        start(small("order=[law,food]", "trainer.steps=4", *chosen), tmp_path / name)
    results = {name: learned(tmp_path / name) for name in runs}
    assert results["method"] == results["over"] != results["ncl"] == results["nothing"]
    assert results["over"][0][:2] == results["ncl"][0][:2]  # the first domain has no past
    run = json.loads((tmp_path / "over" / "scores.json").read_text())["run"]
    assert (run["method"], run["replay"]) == ("ncl", "past")
