"""Batches as functions of their number: workers, ranks and the step of a resume do not matter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from cpt.core.randomness import key, sample_keys, shuffle
from cpt.data.collate import Batch, Collator, Rows, idle_batch
from cpt.data.options import share_batch
from cpt.data.packing import PADDING, Packed
from cpt.data.replay import ReplayPool
from cpt.data.sources.base import DOCUMENT_MASK, NONE

LOCATED_AT_ONCE = 32  # steps
Located = tuple[np.ndarray, np.ndarray, np.ndarray]  # index of the text, row and key of samples, each [B]


@dataclass(eq=False, repr=False)
class TrainStream(Dataset):
    """The training batches of one stage for one process.

    Position p of a text's stream is row `p mod rows` of the shuffle of epoch `p div rows`; a stage of
    several texts shuffles the positions of all. A step takes the next `batch_size` positions, less those
    that replay displaces, and shares its samples out among processes and micro-batches. `ahead` steps on
    `recovery` come first. `places` are the indices of texts in the order of domains."""

    own: Mapping[str, Packed]
    _: KW_ONLY
    objective: Collator
    seed: int
    batch_size: int
    steps: Sequence[int]  # of each text
    accumulate: int
    rank: int
    world: int
    earlier: Sequence[ReplayPool] = ()
    recovery: ReplayPool | None = None
    ahead: int = 0  # steps on `recovery` alone
    places: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        share_batch(self.batch_size, accumulate=self.accumulate, world=self.world)
        self.names, pools = list(self.own), [*self.earlier, *([self.recovery] if self.recovery else [])]
        named = [*self.own.items(), *(each for pool in pools for each in pool.texts.items())]
        self.texts = [text for _, text in named]
        self.domains = np.array([self.places.get(name, -1) for name, _ in named])
        self.total, self.ends = sum(self.steps), np.cumsum([self.new(count) for count in self.steps])
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.located: tuple[int, Located] | None = None  # new samples of LOCATED_AT_ONCE steps from a step on

    def __len__(self) -> int:
        return (self.ahead + self.total) * self.accumulate

    def __getitem__(self, number: int) -> Batch:
        """Batch `number` of this process. `weight` makes the mean over processes and micro-batches the mean
        over the scored tokens of the whole step."""
        step, micro = divmod(number, self.accumulate)
        if self.recovery and step < self.ahead:
            draws = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
            parts, rows, keys = self.recovery.locate(draws)
            parts = parts + len(self.texts) - len(self.recovery.texts)
        else:
            parts, rows, keys = self.samples(step - self.ahead)
        pieces, piece = self.accumulate * self.world, micro * self.world + self.rank
        mine = slice(*(len(rows) * each // pieces for each in (piece, piece + 1)))
        batch, _ = self.objective.batch(stack_rows(self.texts, parts[mine], rows[mine], keys[mine]))
        batch["domains"] = torch.from_numpy(self.domains[parts[mine]])
        sizes = (self.texts[part].sizes(rows[parts == part]) for part in np.unique(parts))
        scored = sum(int(self.objective.scored(each).sum()) for each in sizes)
        batch["weight"] = torch.tensor(pieces / max(1, scored))
        batch["mean_rows"] = torch.tensor(len(rows) / pieces)
        return self.objective.lay_out(batch)

    def new(self, steps: int) -> int:
        """Positions of the stream that the first `steps` steps take."""
        samples = steps * self.batch_size
        return samples - sum(pool.count(samples) for pool in self.earlier if not pool.adds)

    def samples(self, step: int) -> Located:
        """The samples of a step, replayed ones at random places; pools' texts come after its own."""
        first = step - step % LOCATED_AT_ONCE
        if self.located is None or self.located[0] != first:
            last = min(first + LOCATED_AT_ONCE, self.total)
            self.located = first, self.locate(np.arange(self.new(first), self.new(last)))
        here = slice(*(self.new(each) - self.new(first) for each in (step, step + 1)))
        parts, rows, keys = (each[here] for each in self.located[1])
        found, index = [(parts, rows, keys)], len(self.names)
        if not self.earlier:
            return found[0]
        for pool in self.earlier:
            begin, end = (pool.count(each * self.batch_size) for each in (step, step + 1))
            parts, rows, keys = pool.locate(np.arange(begin, end))
            found.append((parts + index, rows, keys))
            index += len(pool.texts)
        new, total = len(found[0][0]), sum(len(parts) for parts, *_ in found)
        stream = sample_keys(key(self.seed, "places", *self.names), np.array([step]))
        order = np.full(total, -1)
        order[shuffle(np.arange(total - new), total, stream=stream)] = np.arange(new, total)
        order[order < 0] = np.arange(new)
        parts, rows, keys = (np.concatenate(each)[order] for each in zip(*found, strict=True))
        return parts, rows, keys

    def locate(self, positions: np.ndarray) -> Located:
        """The samples at positions [B] of the stage's own stream."""
        if len(self.names) > 1:
            positions = shuffle(positions, int(self.ends[-1]), stream=key(self.seed, "mixture"))
        parts = np.searchsorted(self.ends, positions, side="right")
        rows, keys = np.empty_like(positions), np.empty(len(positions), np.uint64)
        for part in np.unique(parts):
            here, count = parts == part, len(self.texts[part])
            epoch, place = np.divmod(positions[here] - self.starts[part], count)
            stream = sample_keys(key(self.seed, self.names[part]), epoch)
            rows[here] = shuffle(place, count, stream=stream)
            keys[here] = sample_keys(stream, rows[here])
        return parts, rows, keys


@dataclass(eq=False, repr=False)
class EvalSubset(Dataset):
    """Fixed rows of several texts in batches of one text each. Masks depend on the `purpose`, the text's
    name and the row alone, so every model gets the same ones. Where `together` processes run forward passes
    collectively, each text is filled up with idle batches to a multiple of them; all texts to the `least`."""

    texts: Mapping[str, Packed]
    rows: Mapping[str, np.ndarray]
    _: KW_ONLY
    objective: Collator
    batch_size: int
    purpose: str
    places: Mapping[str, int] = field(default_factory=dict)
    together: int = 1
    least: int = 0

    def __post_init__(self) -> None:
        self.columns = {name: column for column, name in enumerate(self.texts)}
        self.blocks: list[tuple[str, np.ndarray, bool]] = []
        for name, rows in ((name, self.rows[name]) for name in self.texts if name in self.rows):
            starts = range(0, len(rows), self.batch_size)
            self.blocks += [(name, rows[at : at + self.batch_size], False) for at in starts]
            self.blocks += [(name, rows[:1], True)] * (-len(starts) % self.together)
        if self.blocks:
            name, rows, _ = self.blocks[0]
            self.blocks += [(name, rows[:1], True)] * (self.least - len(self.blocks))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`; `column` is the text's index, `documents` [K] the document of each scored token."""
        name, rows, idle = self.blocks[number]
        text, keys = self.texts[name], sample_keys(key(self.purpose, name), rows)
        gathered = stack_rows([text], np.zeros(len(rows), np.int64), rows, keys)
        batch, places = self.objective.batch(gathered)
        owners = text.document_of(rows)[:, : gathered.ids.shape[1]]
        batch["documents"] = torch.from_numpy(owners.ravel()[places.numpy()])
        batch["domains"] = torch.full((len(rows),), self.places.get(name, -1))
        batch["weight"] = torch.tensor(1 / max(1, len(batch["positions"])))
        batch["column"] = torch.tensor(self.columns[name])
        return idle_batch(batch) if idle else batch


def stack_rows(texts: Sequence[Packed], parts: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> Rows:
    """Rows `rows` [B] of texts `parts` [B], as wide as the longest if an example is among them, or all texts
    have one document a row; else as wide as the model's length."""
    used = {part: parts == part for part in np.unique(parts)}
    lengths = np.empty(len(rows), np.int64)
    for part, here in used.items():
        lengths[here] = texts[part].row_lengths[rows[here]]
    marks = {part: texts[part].answers(rows[here]) for part, here in used.items()}
    has_answers = any(each is not None for each in marks.values())
    narrow = has_answers or all(texts[part].packing == NONE for part in used)
    width = int(lengths.max()) if narrow else max(texts[part].length for part in used)
    ids = np.full((len(rows), width), texts[0].pad, np.int64)
    answers = np.zeros(ids.shape, bool) if has_answers else None
    isolated = any(texts[part].packing == DOCUMENT_MASK for part in used)
    segments = np.full(ids.shape, PADDING, np.int64) if isolated else None
    for part, here in used.items():
        table, own = texts[part].ids(rows[here])[:, :width], marks[part]
        ids[here, : table.shape[1]] = table
        if own is not None and answers is not None:
            answers[here, : table.shape[1]] = own[:, :width]
        if segments is not None:
            segments[here, : table.shape[1]] = texts[part].document_of(rows[here])[:, :width]
    return Rows(ids, lengths, keys, answers, segments)


@dataclass(eq=False)
class ResumeSampler(Sampler[int]):
    """The numbers from `start` to `total`; its length is `total`, as Lightning counts batches on."""

    start: int
    total: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.total))

    def __len__(self) -> int:
        return self.total


class ShardSampler(Sampler[int]):
    """Every `world`-th number below `total`, from `rank` on; each process has at least `common`."""

    def __init__(self, total: int, *, rank: int, world: int) -> None:
        self.numbers, self.common = range(rank, total, world), total // world

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)
