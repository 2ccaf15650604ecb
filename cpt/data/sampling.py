"""Batches as functions of their number: nothing depends on workers, on ranks or on where a run was
resumed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from cpt.core.randomness import key, sample_keys, shuffle
from cpt.data.batch import Batch, Collator, Rows, idle_batch
from cpt.data.budget import share_batch
from cpt.data.packing import PADDING, Packed
from cpt.data.replay import Pool
from cpt.data.sources.base import PER_DOCUMENT

TOGETHER = 32  # steps whose samples are found at once
Located = tuple[np.ndarray, np.ndarray, np.ndarray]  # part, row and key of samples, each [B]


@dataclass(frozen=True)
class Recovery:
    """Steps that a stage begins with, on earlier text alone."""

    pool: Pool
    steps: int


class Stream(Dataset):
    """The training batches of one domain for one process.

    Position p of the domain's stream holds row `p mod rows` of the shuffle of epoch `p div rows`. A domain of
    several parts holds the positions of all its parts in one shuffle, so it gives exactly the samples that
    they would give one after another. Step s goes on where step s - 1 ended, by `batch_size` positions less
    what is displaced by draws from earlier text, and shares its samples out among the processes and their
    accumulated parts. The steps of a `recovery` come before all of that. `places` are those of the texts in
    the order, for those that are of a domain."""

    def __init__(
        self,
        texts: Mapping[str, Packed],
        *,
        objective: Collator,
        seed: int,
        batch_size: int,
        steps: Sequence[int],
        accumulate: int,
        rank: int,
        world: int,
        earlier: Sequence[Pool] = (),
        recovery: Recovery | None = None,
        places: Mapping[str, int] | None = None,
    ) -> None:
        share_batch(batch_size, accumulate=accumulate, world=world)
        self.names, self.objective, self.seed, self.earlier = list(texts), objective, seed, tuple(earlier)
        self.recovery, self.ahead = recovery, recovery.steps if recovery else 0
        pools = [*earlier, *([recovery.pool] if recovery else [])]
        self.texts = [*texts.values(), *(text for pool in pools for text in pool.texts.values())]
        drawn_from = [*texts, *(name for pool in pools for name in pool.texts)]
        self.domains = np.array([(places or {}).get(name, -1) for name in drawn_from])
        self.batch_size, self.accumulate, self.rank, self.world = batch_size, accumulate, rank, world
        self.steps, self.ends = sum(steps), np.cumsum([self.new(count) for count in steps])
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.located: tuple[int, Located] | None = None  # from a step on: what is new of TOGETHER steps

    def __len__(self) -> int:
        return (self.ahead + self.steps) * self.accumulate

    def __getitem__(self, number: int) -> Batch:
        """Batch `number` of this process. `weight` is what each scored token's loss is multiplied by, so that
        the mean over processes and accumulated parts is the mean over the scored tokens of the whole step."""
        step, part = divmod(number, self.accumulate)
        parts, rows, keys = self.recovered(step) if step < self.ahead else self.samples(step - self.ahead)
        piece = part * self.world + self.rank
        mine = slice(*(len(rows) * each // (self.accumulate * self.world) for each in (piece, piece + 1)))
        batch, _ = assemble_batch(self.texts, self.objective, parts[mine], rows[mine], keys[mine])
        batch["domains"] = torch.from_numpy(self.domains[parts[mine]])
        batch["weight"] = torch.tensor(self.accumulate * self.world / max(1, self.scored(parts, rows)))
        return self.objective.lay_out(batch)

    def recovered(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Part, row and key of the samples of a step of recovery, each [B]."""
        pool = cast(Recovery, self.recovery).pool
        parts, rows, keys = pool.locate(np.arange(step * self.batch_size, (step + 1) * self.batch_size))
        return parts + len(self.texts) - len(pool.texts), rows, keys

    def new(self, steps: int) -> int:
        """How many positions of the stream so many steps take."""
        samples = steps * self.batch_size
        return samples - sum(pool.count(samples) for pool in self.earlier if not pool.adds)

    def samples(self, step: int) -> Located:
        """Part, row and key of the samples of a step, each [B]; parts after its own are those of the earlier
        pools. What is drawn from them stands in random places, so that each process has its mixture."""
        found, first = [self.locate_step(step)], len(self.names)
        if not self.earlier:
            return found[0]
        for pool in self.earlier:
            begin, end = (pool.count(each * self.batch_size) for each in (step, step + 1))
            parts, rows, keys = pool.locate(np.arange(begin, end))
            found.append((parts + first, rows, keys))
            first += len(pool.texts)
        new, drawn = len(found[0][0]), sum(len(parts) for parts, *_ in found[1:])
        stream = sample_keys(key(self.seed, "places", *self.names), np.array([step]))
        order = amid(new, shuffle(np.arange(drawn), new + drawn, stream=stream))
        return tuple(np.concatenate(each)[order] for each in zip(*found, strict=True))

    def locate_step(self, step: int) -> Located:
        """Part, row and key of the new samples of a step, each [B]; those of some steps are found at once."""
        first = step - step % TOGETHER
        if self.located is None or self.located[0] != first:
            last = min(first + TOGETHER, self.steps)
            self.located = first, self.locate(np.arange(self.new(first), self.new(last)))
        here = slice(*(self.new(each) - self.new(first) for each in (step, step + 1)))
        parts, rows, keys = (each[here] for each in self.located[1])
        return parts, rows, keys

    def locate(self, positions: np.ndarray) -> Located:
        """Part, row and key of the samples at positions of the stream, each [B]."""
        if len(self.names) > 1:
            positions = shuffle(positions, int(self.ends[-1]), stream=key(self.seed, "mixture"))
        parts = np.searchsorted(self.ends, positions, side="right")
        rows, keys = np.empty_like(positions), np.empty(len(positions), np.uint64)
        for part in np.unique(parts):
            here = parts == part
            count = len(self.texts[part])
            epoch, place = np.divmod(positions[here] - self.starts[part], count)
            stream = sample_keys(key(self.seed, self.names[part]), epoch)
            rows[here] = shuffle(place, count, stream=stream)
            keys[here] = sample_keys(stream, rows[here])
        return parts, rows, keys

    def scored(self, parts: np.ndarray, rows: np.ndarray) -> int:
        count = 0
        for part in np.unique(parts):
            count += int(self.objective.scored(self.texts[part].sizes(rows[parts == part])).sum())
        return count


def amid(new: int, places: np.ndarray) -> np.ndarray:
    """The order in which what follows `new` items comes to stand at `places` among them."""
    order = np.full(new + len(places), -1)
    order[places] = np.arange(new, len(order))
    order[order < 0] = np.arange(new)
    return order


class Subset(Dataset):
    """Fixed rows of several texts in batches, each of one text: evaluation and probes. The masks are those of
    the text's name and the row alone, so every model meets the same ones.

    Where processes go `together`, so many at a time, each text is filled up with idle batches, so that all of
    them are at the same text and none is left over."""

    def __init__(
        self,
        texts: Mapping[str, Packed],
        rows: Mapping[str, np.ndarray],
        *,
        objective: Collator,
        batch_size: int,
        purpose: str,
        places: Mapping[str, int] | None = None,
        together: int = 1,
    ) -> None:
        self.texts, self.objective, self.purpose = texts, objective, purpose
        self.places, self.columns = places or {}, {name: column for column, name in enumerate(texts)}
        self.blocks: list[tuple[str, np.ndarray, bool]] = []
        for name in (each for each in texts if each in rows):
            starts = range(0, len(rows[name]), batch_size)
            self.blocks += [(name, rows[name][at : at + batch_size], False) for at in starts]
            self.blocks += [(name, rows[name][:1], True)] * (-len(starts) % together)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`; `column` is the text's place, `documents` [K] the document of each scored token."""
        name, rows, idle = self.blocks[number]
        text = self.texts[name]
        keys = sample_keys(key(self.purpose, name), rows)
        parts = np.zeros(len(rows), np.int64)
        gathered = gather_rows([text], parts, rows, keys)
        batch, places = self.objective.batch(gathered)
        owners = text.document_of(rows)[:, : gathered.ids.shape[1]]
        batch["documents"] = torch.from_numpy(owners.ravel()[places.numpy()])
        batch["domains"] = torch.full((len(rows),), self.places.get(name, -1))
        batch["weight"] = torch.tensor(1 / max(1, len(batch["positions"])))
        batch["column"] = torch.tensor(self.columns[name])
        return idle_batch(batch) if idle else batch


def assemble_batch(
    texts: Sequence[Packed],
    objective: Collator,
    parts: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray,
) -> tuple[Batch, Tensor]:
    """The objective's batch of rows that may come from several texts, with the places of what it scores."""
    return objective.batch(gather_rows(texts, parts, rows, keys))


def gather_rows(texts: Sequence[Packed], parts: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> Rows:
    """Rows that may come from several texts. With an example among them, or a document to a row, they are as
    wide as the longest."""
    used = {part: parts == part for part in np.unique(parts)}
    lengths = np.empty(len(rows), np.int64)
    for part, here in used.items():
        lengths[here] = texts[part].row_lengths[rows[here]]
    marked = {part: texts[part].answers(rows[here]) for part, here in used.items()}
    some = any(each is not None for each in marked.values())
    narrow = some or all(texts[part].packing == PER_DOCUMENT for part in used)
    width = int(lengths.max()) if narrow else texts[0].length
    ids = np.full((len(rows), width), texts[0].pad, np.int64)
    answers = np.zeros(ids.shape, bool) if some else None
    segments = np.full(ids.shape, PADDING, np.int64) if any(texts[part].isolated for part in used) else None
    for part, here in used.items():
        table, own = texts[part].ids(rows[here])[:, :width], marked[part]
        ids[here, : table.shape[1]] = table
        if own is not None and answers is not None:
            answers[here, : table.shape[1]] = own[:, :width]
        if segments is not None:
            segments[here, : table.shape[1]] = texts[part].document_of(rows[here])[:, :width]
    return Rows(ids, lengths, keys, answers, segments)


class From(Sampler[int]):
    """The numbers from `start` to `total`; its length is `total`, since Lightning's count of batches goes on
    too."""

    def __init__(self, start: int, total: int) -> None:
        self.start, self.total = start, total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.total))

    def __len__(self) -> int:
        return self.total


class Share(Sampler[int]):
    """Every `world`-th number below `total`, from `rank` on: a process's part of an evaluation; each process
    has at least `common`."""

    def __init__(self, total: int, *, rank: int, world: int) -> None:
        self.numbers, self.common = range(rank, total, world), total // world

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)
