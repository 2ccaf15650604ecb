"""Batches as functions of their number: nothing depends on workers, on ranks or on where a run was
resumed."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from cpt.budget import share
from cpt.objectives import Batch, Objective
from cpt.packing import Packed
from cpt.randomness import key, sample_keys, shuffled


class Stream(Dataset):
    """The training batches of one domain for one process.

    Position p of the domain's stream holds row `p mod rows` of the shuffle of epoch `p div rows`. A domain of
    several parts holds the positions of all its parts in one shuffle, so it gives exactly the samples that
    they would give one after another. Step s takes the positions [s * batch_size, (s + 1) * batch_size) and
    shares them out among the processes and their accumulated parts."""

    def __init__(
        self,
        texts: Mapping[str, Packed],
        *,
        objective: Objective,
        seed: int,
        batch_size: int,
        steps: Sequence[int],
        accumulate: int,
        rank: int,
        world: int,
    ) -> None:
        self.names, self.texts, self.objective, self.seed = list(texts), list(texts.values()), objective, seed
        self.batch_size, self.accumulate, self.rank, self.world = batch_size, accumulate, rank, world
        self.size = share(batch_size, accumulate=accumulate, world=world)
        self.ends = np.cumsum([count * batch_size for count in steps])
        self.starts = np.concatenate([[0], self.ends[:-1]])

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.batch_size * self.accumulate

    def __getitem__(self, number: int) -> Batch:
        """Batch `number` of this process. `weight` is what each scored token's loss is multiplied by, so that
        the mean over processes and accumulated parts is the mean over the scored tokens of the whole step."""
        step, part = divmod(number, self.accumulate)
        whole = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        parts, rows, keys = self.locate(whole)
        first = (part * self.world + self.rank) * self.size
        mine = slice(first, first + self.size)
        batch = assembled(self.texts, self.objective, parts[mine], rows[mine], keys[mine])
        batch["weight"] = torch.tensor(self.accumulate * self.world / max(1, self.scored(parts, rows)))
        return batch

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Part, row and key of the samples at positions of the stream, each [B]."""
        if len(self.texts) > 1:
            positions = shuffled(positions, int(self.ends[-1]), stream=key(self.seed, "mixture"))
        parts = np.searchsorted(self.ends, positions, side="right")
        rows, keys = np.empty_like(positions), np.empty(len(positions), np.uint64)
        for part in np.unique(parts):
            here = parts == part
            count = len(self.texts[part])
            epoch, place = np.divmod(positions[here] - self.starts[part], count)
            stream = sample_keys(key(self.seed, self.names[part]), epoch)
            rows[here] = shuffled(place, count, stream=stream)
            keys[here] = sample_keys(stream, rows[here])
        return parts, rows, keys

    def scored(self, parts: np.ndarray, rows: np.ndarray) -> int:
        count = 0
        for part in np.unique(parts):
            text, chosen = self.texts[part], rows[parts == part]
            count += int(self.objective.scored(text.text_tokens[chosen], text.row_lengths[chosen]).sum())
        return count


class Subset(Dataset):
    """Fixed rows of several texts in batches, each of one text: evaluation and probes. The masks are those of
    the text's name and the row alone, so every model meets the same ones."""

    def __init__(
        self,
        texts: Mapping[str, Packed],
        rows: Mapping[str, np.ndarray],
        *,
        objective: Objective,
        batch_size: int,
        purpose: str,
    ) -> None:
        self.texts, self.objective, self.purpose = texts, objective, purpose
        self.blocks = [
            (name, rows[name][at : at + batch_size])
            for name in texts
            for at in range(0, len(rows[name]), batch_size)
        ]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`; `column` is the text's place, `documents` [K] the document of each scored token."""
        name, rows = self.blocks[number]
        text = self.texts[name]
        keys = sample_keys(key(self.purpose, name), rows)
        batch = assembled([text], self.objective, np.zeros(len(rows), np.int64), rows, keys)
        owners = np.roll(text.document_of(rows), -self.objective.ahead, axis=1)
        batch["documents"] = torch.from_numpy(owners.ravel()[batch["positions"].numpy()])
        batch["weight"] = torch.tensor(1 / max(1, len(batch["positions"])))
        batch["column"] = torch.tensor(list(self.texts).index(name))
        return batch


def assembled(
    texts: Sequence[Packed],
    objective: Objective,
    parts: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray,
) -> Batch:
    """The objective's batch of rows that may come from several texts."""
    ids, lengths = np.empty((len(rows), texts[0].length), np.int64), np.empty(len(rows), np.int64)
    for part in np.unique(parts):
        here = parts == part
        ids[here], lengths[here] = texts[part].ids(rows[here]), texts[part].row_lengths[rows[here]]
    return objective.batch(ids, lengths, keys)


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
    """Every `world`-th number below `total`, from `rank` on: a process's part of an evaluation."""

    def __init__(self, total: int, *, rank: int, world: int) -> None:
        self.numbers = range(rank, total, world)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)
