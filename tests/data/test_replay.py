"""Earlier text in a domain's batches: which rows come when, how many, and that nothing else decides it."""

import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cpt.core.randomness import key, sample_keys, shuffle
from cpt.data.corpora import Corpora
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.options import Budget
from cpt.data.replay import NO_REPLAY, Replay
from cpt.data.sampler import ResumeSampler, TrainStream
from cpt.models.objectives import Causal
from cpt.trainer import build
from cpt.trainer.base_model import make_base
from cpt.trainer.plan import make_plan
from tests.conftest import ROOT
from tests.support.data_fixtures import fake_trainer, rows_by_hand

pytestmark = pytest.mark.slow

SIZES = {"a": 23, "b": 7, "c": 40, "now": 31, "general": 9}
BATCH = 8


@pytest.fixture(scope="module")
def texts():
    return {name: rows_by_hand(size, last=5, seed=size) for name, size in SIZES.items()}


@pytest.fixture(scope="module")
def whose(texts):
    """The text and the number of each row by its ids."""
    return {
        tuple(ids): (name, row)
        for name, text in texts.items()
        for row, ids in enumerate(text.ids(np.arange(len(text))).tolist())
    }


def replay(**given) -> Replay:
    return Replay(**{"past": 0.0, "general": 0.0, "memory": None, "adds": False, **given})


def stream(texts, mixture, *, names=("now",), past="abc", steps=(20,), stage="now", seed=0, **options):
    """The batches of a stage whose text is "now", after the domains of `past`."""
    options = {"batch_size": BATCH, "accumulate": 1, "rank": 0, "world": 1, "objective": Causal(), **options}
    general = {"general": texts["general"]} if mixture.general else {}
    pools = mixture.pools({name: texts[name] for name in past}, general, stage=stage, seed=seed)
    own = {name: texts[name] for name in names}
    return TrainStream(own, seed=seed, steps=list(steps), earlier=pools, **options)


def found(made, whose, *, steps=None):
    """The samples of each step, as texts with row numbers."""
    numbers = range(len(made)) if steps is None else steps
    return [[whose[tuple(ids)] for ids in made[number]["input_ids"].tolist()] for number in numbers]


def bits(made, numbers=None):
    numbers = range(len(made)) if numbers is None else numbers
    return [{name: each.tolist() for name, each in made[number].items()} for number in numbers]


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
    replay(past=0.25),
    replay(past=0.1, adds=True),
    replay(past=0.3, general=0.2),
    replay(past=0.7, memory=11),
    replay(past=0.9),
    replay(general=0.35),
    replay(past=0.5, general=0.25, memory=3, adds=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("past", ["abc", "b", ""])
def test_the_rows_are_those_of_the_oracle(mixture, past, texts, whose):
    made = found(stream(texts, mixture, past=past, steps=[60]), whose)
    sizes = {name: SIZES[name] for name in past}
    general = {"general": SIZES["general"]} if mixture.general else {}
    expected = walked(mixture, past=sizes, general=general, own=SIZES["now"], steps=60)
    for rows, (new, drawn) in zip(made, expected, strict=True):
        assert [row for row in rows if row[0] == "now"] == new
        assert Counter(rows) == Counter(new + drawn)


def test_the_masks_of_a_draw_are_those_of_its_number(texts, whose):
    """Of the seed, the stage, the kind and how many came before."""
    from tests.data.test_datamodule import MASKED

    mixture, seen = replay(past=0.5), 0
    made = stream(texts, mixture, past="a", steps=[12], objective=MASKED)
    for number in range(12):
        batch = made[number]
        parts, rows, _ = made.samples(number)
        for place in np.flatnonzero(parts == 1):
            assert whose[tuple(MASKED.restored(batch)["input_ids"][place].tolist())] == ("a", rows[place])
        drawn = sorted(keys_of(made, number))
        assert drawn == sorted(
            sample_keys(key(0, "now", "past", "masks"), np.arange(seen, seen + 4)).tolist()
        )
        seen += 4


def keys_of(made, number):
    parts, _, keys = made.samples(number)
    return keys[parts >= len(made.names)].tolist()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.29, 0.57, 1e-3, 0.999, 1 / 3])
@pytest.mark.parametrize("batch_size", [1, 7, 10, 256])
def test_counts_are_exact_for_millions_of_steps(share, batch_size, texts):
    """Floats do not serve: 0.29 * 100 is 28.999999999999996."""
    (pool,) = replay(past=share).pools({"a": texts["a"]}, {}, stage="now", seed=0)
    for step in [*range(200), 10**6, 10**7 + 3, 10**12 + 7]:
        assert pool.count(step * batch_size) == int(Decimal(str(share)) * step * batch_size)
    assert replay(past=0.29).pools({"a": texts["a"]}, {}, stage="now", seed=0)[0].count(100) == 29


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_the_domain_is_learned_without_gaps(mixture, texts, whose):
    """The new samples are those of the same stream, displaced or not."""
    alone = itertools.chain(*found(stream(texts, NO_REPLAY, steps=[60]), whose))
    mixed = list(itertools.chain(*found(stream(texts, mixture, steps=[60]), whose)))
    new = [row for row in mixed if row[0] == "now"]
    assert new == list(itertools.islice(alone, len(new)))
    replayed = sum(int(Decimal(str(share)) * 60 * BATCH) for share in (mixture.past, mixture.general))
    assert len(new) == 60 * BATCH - replayed * (not mixture.adds)
    assert len(mixed) == len(new) + replayed


def test_a_memory_shrinks_as_domains_come(texts, whose):
    """Equal quotas, and what is kept later was kept before."""
    former = {}
    for past, quota in (("a", 13), ("ab", 6), ("abc", 4)):
        made = stream(texts, replay(past=0.9, memory=13), past=past, steps=[60])
        rows = {name: set() for name in past}
        for name, row in itertools.chain(*found(made, whose)):
            if name != "now":
                rows[name].add(row)
        assert {name: len(kept) for name, kept in rows.items()} == {
            name: min(SIZES[name], quota) for name in past
        }
        assert all(rows[name] <= former.get(name, rows[name]) for name in past)
        assert rows["a"] != set(range(quota))
        former = rows
    others = stream(texts, replay(past=0.9, memory=13), past="abc", steps=[60], seed=1)
    kept = {row for name, row in itertools.chain(*found(others, whose)) if name == "a"}
    assert len(kept) == 4 and kept != former["a"]


@pytest.mark.parametrize("names, steps", [(["now"], [20]), (["a", "now"], [7, 9])])
def test_nothing_replayed_is_no_replay_bit_for_bit(names, steps, texts):
    plain = TrainStream(
        {name: texts[name] for name in names},
        objective=Causal(),
        seed=0,
        batch_size=BATCH,
        steps=steps,
        accumulate=2,
        rank=1,
        world=2,
    )
    options = {"names": names, "steps": steps, "accumulate": 2, "rank": 1, "world": 2}
    for mixture in (NO_REPLAY, replay(adds=True), replay(past=1e-9), replay(past=1e-9, adds=True)):
        assert bits(stream(texts, mixture, **options)) == bits(plain)
    for mixture in (replay(past=0.9), replay(past=0.9, adds=True)):
        assert bits(stream(texts, mixture, past="", **options)) == bits(plain)


def test_the_draws_are_the_stages_and_the_seeds(texts):
    """So that a row does not meet the same masks in each stage that replays it."""
    options = {"past": "a", "steps": [6]}
    first = stream(texts, replay(past=0.5), **options)
    for other in (
        stream(texts, replay(past=0.5), stage="later", **options),
        stream(texts, replay(past=0.5), seed=1, **options),
        stream(texts, replay(past=0.5, general=0.2), **options),
    ):
        keys = [set(itertools.chain(*(keys_of(made, step) for step in range(6)))) for made in (first, other)]
        shared = len(keys[0] & keys[1])
        assert shared == (24 if len(other.earlier) == 2 else 0)


def test_replayed_rows_stand_everywhere(texts):
    """Otherwise one process would learn the past and another the present."""
    places = Counter()
    made = stream(texts, replay(past=0.25), steps=[400])
    for step in range(400):
        places.update(np.flatnonzero(made.samples(step)[0] > 0).tolist())
    assert set(places) == set(range(BATCH))
    assert all(60 < count < 140 for count in places.values())


# --- processes, parts, restarts


GRID = [(accumulate, world) for accumulate in (1, 2, 4, 8) for world in (1, 2, 4) if accumulate * world <= 8]


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("accumulate, world", GRID)
def test_processes_and_parts_share_out_the_same_step(accumulate, world, mixture, texts):
    whole = stream(texts, mixture, steps=[14])
    ranks = [
        stream(texts, mixture, steps=[14], accumulate=accumulate, world=world, rank=rank)
        for rank in range(world)
    ]
    assert {len(rank) for rank in ranks} == {14 * accumulate}
    for step in range(14):
        pieces = [rank[step * accumulate + part] for part in range(accumulate) for rank in ranks]
        sizes = [len(piece["input_ids"]) for piece in pieces]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        expected = whole[step]
        for name in ("input_ids", "targets", "domains"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), expected[name])
        weights = [float(piece["weight"]) * len(piece["positions"]) for piece in pieces]
        assert sum(weights) / (accumulate * world) == pytest.approx(1)
        assert len({float(piece["weight"]) for piece in pieces}) == 1


@pytest.mark.parametrize("config", ["small", "small_gpt2"])
@pytest.mark.parametrize("mixture", [replay(past=0.3), replay(past=0.3, adds=True)], ids=str)
def test_the_gradient_does_not_depend_on_how_the_mixture_is_cut(config, mixture, request):
    from tests.methods.test_base import gradient

    plan = make_plan(request.getfixturevalue(config)("order=[law,food]"))
    corpora = Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))
    start = make_base(plan.model, corpora, accelerator="cpu")
    module = build.build_method(plan, start).double()
    data = build.build_data(plan, corpora, start, module)
    pools = mixture.pools({"law": data.train["law"]}, {}, stage="food", seed=0)
    food = partial(TrainStream, {"food": data.train["food"]}, objective=data.objective, seed=0, batch_size=8)
    food = partial(food, steps=[9], earlier=pools)
    sizes = set()
    for number in (1, 2):
        whole = gradient(module, [food(accumulate=1, rank=0, world=1)[number]])
        for accumulate, world in ((2, 1), (1, 2), (2, 4), (8, 1)):
            parts = [
                food(accumulate=accumulate, rank=rank, world=world)[number * accumulate + part]
                for rank in range(world)
                for part in range(accumulate)
            ]
            sizes.add(tuple(sorted({len(part["input_ids"]) for part in parts})))
            torch.testing.assert_close(gradient(module, parts), whole, rtol=1e-6, atol=1e-10)
    assert ((1, 2) in sizes) == mixture.adds


def sequence(texts, mixture, *, enter="now", step=0, domains="abcn", **changes):
    names = [{"n": "now"}.get(name, name) for name in domains]
    stages = [Domain(name, place, (name,)) for place, name in enumerate(names)]
    options = {
        "train": texts,
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


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_a_domain_that_is_resumed_gives_what_was_left(mixture, texts):
    whole = list(sequence(texts, mixture).train_dataloader())
    for step in (1, 4, 9):
        left = list(sequence(texts, mixture, step=step).train_dataloader())
        assert len(left) == 18 - 2 * step
        for batch, expected in zip(left, whole[2 * step :], strict=True):
            assert all(torch.equal(batch[name], each) for name, each in expected.items())
    assert list(ResumeSampler(18, 18)) == []


# --- a sequence of stages


def names_in(made, whose):
    """How many samples of each text the entered domain's batches hold."""
    batches = made.train_dataloader()
    return Counter(whose[tuple(ids)][0] for batch in batches for ids in batch["input_ids"].tolist())


def test_the_past_is_what_came_before(texts, whose):
    mixture = replay(past=0.5, general=0.25)
    for name, past in (("a", ""), ("b", "a"), ("c", "ab"), ("now", "abc")):
        counts = names_in(sequence(texts, mixture, enter=name), whose)
        assert set(counts) == {name, "general", *past}
        assert counts["general"] == 18
        assert counts[name] == (54 if not past else 18)
        assert [counts[each] * len(past) for each in past] == [36] * len(past)


def test_a_stage_of_several_texts_has_general_text_and_no_past(texts, whose):
    joint = Domain("joint", 0, ("a", "b", "now"))
    made = sequence(texts, replay(past=0.5, general=0.1))
    made.domains = (joint,)
    made.enter(joint)
    counts = names_in(made, whose)
    assert set(counts) == {"a", "b", "now", "general"}
    assert counts.total() == 27 * BATCH
    assert counts["general"] == int(27 * BATCH * 0.1)
    # The samples that the sequence would give, but for what counts of the parts round down.
    alone = 9 * BATCH - 7
    assert all(alone - 1 <= counts[name] <= alone for name in ("a", "b", "now"))
    later = Domain("b", 1, ("c",))
    made.domains = (joint, later)
    assert made.past(later) == ["a", "b", "now"]


def test_a_text_learned_twice_is_past_once(texts):
    stages = [Domain("a", 0, ("a",)), Domain("again", 1, ("a",)), Domain("b", 2, ("b",))]
    made = sequence(texts, NO_REPLAY)
    made.domains = tuple(stages)
    assert made.past(stages[2]) == ["a"]


@pytest.mark.slow
def test_236_domains_cost_as_much_as_two(texts):
    small = {f"d{number}": rows_by_hand(30 + number % 7, seed=number) for number in range(235)}
    seconds = {}
    for count, at in ((2, 0), (235, 0), (2, 10**9), (235, 10**9)):
        past = dict(itertools.islice(small.items(), count))
        pools = replay(past=0.25).pools(past, {}, stage="now", seed=0)
        made = partial(TrainStream, {"now": texts["now"]}, objective=Causal(), seed=0, batch_size=32)
        made = made(steps=[2 * 10**9], accumulate=1, rank=0, world=1, earlier=pools)
        for number in range(at, at + 120):
            made[number]  # every text is opened
        taken = []
        for number in range(at, at + 60):
            began = time.perf_counter()
            made[number]
            taken.append(time.perf_counter() - began)
        seconds[count, at] = sorted(taken)[len(taken) // 4]
    assert max(seconds.values()) < 6 * min(seconds.values()), seconds
    assert max(seconds.values()) < 0.05


GOLDEN = [
    [("a", 14), ("b", 3), ("now", 3), ("now", 2), ("c", 29), ("general", 3), ("now", 9), ("now", 4)],
    [("general", 8), ("c", 7), ("now", 30), ("now", 27), ("b", 5), ("a", 9), ("general", 6), ("now", 20)],
    [("b", 4), ("now", 5), ("c", 6), ("general", 2), ("now", 24), ("now", 21), ("now", 14), ("a", 1)],
]
GOLDEN_KEYS = [606658, 651746, 462615, 914098, 30606]


def test_draws_stay_what_they_were_in_earlier_versions(texts, whose):
    """A run that goes on, and one that is compared with an older one, meets the same samples."""
    made = stream(texts, replay(past=0.4, general=0.2, memory=12), steps=[3])
    assert found(made, whose) == GOLDEN
    assert [int(each) % 10**6 for each in keys_of(made, 1)] == GOLDEN_KEYS


# --- what cannot be


@pytest.mark.parametrize(
    "given, told",
    [
        ({"past": 1.0}, "past=1.0; allowed: 0 or more and below 1"),
        ({"past": -0.1}, "past=-0.1; "),
        ({"general": 1.5}, "general=1.5; "),
        ({"past": float("nan")}, "past=nan; "),
        ({"past": "much"}, "past=much; "),
        ({"past": None}, "past=null; "),
        ({"past": True}, "past=true; "),
        ({"past": 0.9, "general": 0.1}, "past=0.9 and general=0.1; "),
        ({"past": 0.8, "general": 0.2}, "past=0.8 and general=0.2; "),
        ({"past": 0.5, "memory": 0}, "memory=0; allowed: null or a whole number, 1 or more"),
        ({"past": 0.5, "memory": -3}, "memory=-3"),
        ({"past": 0.5, "memory": 2.5}, "memory=2.5"),
        ({"past": 0.5, "memory": "all"}, "memory=all"),
        ({"past": 0.5, "memory": float("inf")}, "memory=inf"),
        ({"memory": 5}, "memory=5 with past=0.0; "),
        ({"general": 0.5, "memory": 5}, "memory=5 with past=0.0; "),
        ({"past": 0.5, "adds": "no"}, "adds=no; allowed: true, false"),
    ],
)
def test_what_is_no_replay(given, told):
    with pytest.raises(ValueError) as error:
        replay(**given)
    assert told in str(error.value) and "\n" not in str(error.value)
    assert "allowed: " in str(error.value)


def test_a_memory_holds_a_sample_of_each_domain(texts):
    with pytest.raises(ValueError, match="memory=2 for 3 past domains; allowed: a sample or more for each"):
        sequence(texts, replay(past=0.5, memory=2))
    assert sequence(texts, replay(past=0.5, memory=3))
    assert sequence(texts, replay(past=0.5, memory=2), domains="abn")


def test_general_text_has_to_be_there(texts):
    train = {name: texts[name] for name in ("a", "b", "c", "now")}
    with pytest.raises(ValueError, match="general=0.1, but there is no general text to train on; allowed: 0"):
        sequence(texts, replay(general=0.1), train=train)
    assert sequence(texts, replay(past=0.1), train=train)


def test_both_kinds_must_leave_room_for_each_other(texts):
    """With a batch of one, halves and thirds round up in the same steps."""
    tiny = {"budget": Budget(steps=9, epochs=None, tokens=None, batch_size=2), "accumulate": 1}
    with pytest.raises(ValueError, match=r"leaves 0.4 new samples in a batch of trainer.batch_size=2"):
        sequence(texts, replay(past=0.5, general=0.3), **tiny)
    assert sequence(texts, replay(past=0.5, general=0.3, adds=True), **tiny)
    assert sequence(texts, replay(past=0.9), **tiny)


def test_room_is_left_whenever_it_is_promised(texts):
    for batch_size, past, general in itertools.product((2, 3, 5, 8), (0.1, 0.3, 0.45), (0.05, 0.2, 0.5)):
        mixture = replay(past=past, general=general)
        try:
            mixture.check(domains=1, general=True, batch_size=batch_size)
        except ValueError:
            continue
        made = stream(texts, mixture, batch_size=batch_size, steps=[200])
        new = [made.new(step + 1) - made.new(step) for step in range(200)]
        assert min(new) >= 0
        assert len(made.samples(int(np.argmin(new)))[0]) == batch_size


def test_a_pool_is_known_without_torch():
    code = "import sys; import cpt.data.replay; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


# --- runs


def learned(folder):
    scores = json.loads((folder / "scores.json").read_text())
    state = torch.load(sorted((folder / "stages").glob("*.pt"))[-1], weights_only=True)
    return scores["nll"], {name: value.numpy().tobytes() for name, value in state.items()}


def test_the_method_is_ncl_with_replay_bit_for_bit(small, start, tmp_path):
    runs = {
        "ncl": ["method=ncl"],
        "over": ["method=ncl", "replay=past"],
        "method": ["method=replay"],
        "general": ["method=replay", "replay@method.mixture=general", "method.mixture.general=0.5"],
        "over_general": ["method=ncl", "replay=general", "replay.general=0.5"],
        "nothing": ["method=ncl", "replay=past", "replay.past=0"],
    }
    for name, chosen in runs.items():
        start(small("order=[law,food]", *chosen), tmp_path / name)
    results = {name: learned(tmp_path / name) for name in runs}
    assert results["method"] == results["over"]
    assert results["general"] == results["over_general"]
    assert results["nothing"] == results["ncl"]
    assert results["over"][0][:2] == results["ncl"][0][:2]  # the first domain has no past
    assert len({str(results[name][0]) for name in ("ncl", "over", "general")}) == 3
    run = json.loads((tmp_path / "over" / "scores.json").read_text())["run"]
    assert (run["method"], run["replay"]) == ("ncl", "past")
    assert "ncl + replay past" in (tmp_path / "over" / "report.md").read_text()


def test_replay_keeps_what_was_learned(small, start, tmp_path):
    """Three domains that share no words: over three seeds 0.35 to 0.39 nats are forgotten, -0.01 to 0.03 with
    replay."""
    options, metrics = ["order=[law,food,space]", "trainer.steps=60", "optim.lr=5e-3"], {}
    for name, chosen in {"ncl": [], "past": ["replay=past", "replay.past=0.5"]}.items():
        start(small(*options, *chosen), tmp_path / name)
        metrics[name] = json.loads((tmp_path / name / "scores.json").read_text())["metrics"]
    assert metrics["past"]["FG"]["nats"] < 0.5 * metrics["ncl"]["FG"]["nats"]
    assert metrics["past"]["LC"]["nats"] < metrics["ncl"]["LC"]["nats"]
