"""A reservoir of learned samples with the model's outputs on them, as they were when each was learned.

Reservoir sampling: Vitter, ACM Transactions on Mathematical Software 11(1), 1985, algorithm R."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cpt.core.collectives import gather_shards
from cpt.core.processes import rank_and_world
from cpt.core.randomness import draws, key, sample_keys, shuffle
from cpt.data.collate import UNSCORED, Batch, label_batch, labels_of
from cpt.data.packing import PADDING
from cpt.models.objectives import Objective

PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}


def slot_of(objective: Objective, length: int) -> dict[str, Any]:
    """What a slot must have room for, of rows of so many tokens: ids of an input, of a decoder's input where
    there is one, scored positions, whose documents tokens are where these are isolated."""
    source, target = objective.sides(length)
    slot = {"length": source, "target": target, "scored": objective.most(length)}
    return slot | ({"isolated": True} if objective.isolated else {})


def bytes_per_sample(
    *,
    length: int,
    scored: int,
    width: int,
    precision: str,
    target: int | None = None,
    isolated: bool = False,
) -> int:
    """What a slot takes, and a reservoir nothing more: ids (int32) of `length` tokens and of a decoder's
    `target`, labels (int32) of what is given out, the documents (int32) of tokens where these are `isolated`,
    the row's length (int32), a count (int64), and `width` numbers at each of `scored` positions."""
    ids = (2 * length if target is None else length + 2 * target) + length * isolated
    return 4 * ids + 12 + scored * width * PRECISIONS[precision].itemsize


def capacity(memory: int | None, memory_bytes: float | None, *, sample_bytes: int) -> int:
    """Slots of a memory given in samples or, where that is None, in bytes; raises ValueError for bytes that
    hold none."""
    if memory is not None:
        return int(memory)
    if memory_bytes < sample_bytes:
        raise ValueError(f"method.memory_bytes={memory_bytes}; allowed: {sample_bytes} or more, one sample")
    return int(memory_bytes // sample_bytes)


def offer(numbers: np.ndarray, uniforms: np.ndarray, slots: int) -> np.ndarray:
    """The slot that each sample [B] of a stream takes; `slots` or more: it is not kept. The first ones fill
    the slots; number k, counted from 0, draws one of k + 1 places, so that it stays with probability
    slots / (k + 1)."""
    return np.where(numbers < slots, numbers, (uniforms * (numbers + 1)).astype(np.int64))


def fill_row(row: Tensor, values: Tensor, filler: int) -> None:
    """Writes values [t] into a row [T] that may be longer, and a filler behind them."""
    row[: len(values)], row[len(values) :] = values, filler


class Reservoir(nn.Module):
    """`samples` slots, each a row of `length` ids with its labels and the outputs, [scored, width], at its
    scored positions; a row with less of either is padded. Of a model with a decoder, a slot has `target` ids
    that it takes as well, and labels of these; `pad` fills them up. Where documents share rows `isolated`, a
    slot has the document of each token. Kept `by_domain`, a slot knows the domain of its sample.

    Of w processes, r keeps a reservoir of its own samples in the slots r, r + w, r + 2w, ... and draws from
    these; how many it was offered stands in `seen[r]`. The others' slots are stale there until a state_dict
    is made, which brings all shards to all processes (a collective: every process has to make it). Another
    number of processes that goes on shares out samples and counts evenly, so every sample of the stream is as
    likely to be kept as before. (Where w does not divide the slots, some processes have one slot more.)"""

    def __init__(
        self,
        *,
        samples: int,
        length: int,
        scored: int,
        width: int,
        precision: str,
        seed: int,
        target: int | None = None,
        pad: int = 0,
        by_domain: bool = False,
        isolated: bool = False,
    ) -> None:
        super().__init__()
        self.seed, self.pad = seed, pad
        self.register_buffer("input_ids", torch.zeros(samples, length, dtype=torch.int32))
        if target is not None:
            self.register_buffer("decoder_input_ids", torch.zeros(samples, target, dtype=torch.int32))
        size = (samples, length if target is None else target)
        self.register_buffer("labels", torch.full(size, UNSCORED, dtype=torch.int32))
        self.register_buffer("lengths", torch.zeros(samples, dtype=torch.int32))
        self.register_buffer("outputs", torch.zeros(samples, scored, width, dtype=PRECISIONS[precision]))
        self.register_buffer("seen", torch.zeros(samples, dtype=torch.int64))
        if isolated:
            self.register_buffer("segments", torch.full((samples, length), PADDING, dtype=torch.int32))
        if by_domain:
            self.register_buffer("domains", torch.full((samples,), -1, dtype=torch.int32))

    @property
    def by_domain(self) -> bool:
        """Whether slots know the domain of their sample."""
        return "domains" in self._buffers

    @property
    def decodes(self) -> bool:
        """Whether samples are those of a model with a decoder."""
        return "decoder_input_ids" in self._buffers

    @property
    def isolated(self) -> bool:
        """Whether slots know the document of each token."""
        return "segments" in self._buffers

    @property
    def bytes(self) -> int:
        """What all buffers take."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def slots(self) -> np.ndarray:
        """This process's slots; raises ValueError where there are fewer than processes."""
        rank, world = rank_and_world()
        if len(self.lengths) < world:
            raise ValueError(
                f"the memory holds {len(self.lengths)} samples; allowed: one or more for each of {world} "
                "processes"
            )
        return np.arange(rank, len(self.lengths), world)

    def count(self) -> int:
        """How many samples this process was offered; if the state is of another number of processes, its
        share of theirs."""
        rank, world = rank_and_world()
        if int((self.seen > 0).sum()) not in (0, world):
            self.share_out(world)
        return int(self.seen[rank])

    @torch.no_grad()
    def share_out(self, world: int) -> None:
        """Moves filled slots to the front, so that each process has as many, and splits the count evenly."""
        order, total = (self.lengths == 0).int().argsort(stable=True), int(self.seen.sum())
        for buffer in (buffer for buffer in self.buffers() if buffer is not self.seen):
            buffer.copy_(buffer[order.to(buffer.device)])
        self.seen.zero_()
        self.seen[:world] = (total + torch.arange(world).flip(0)) // world

    @torch.no_grad()
    def add(self, batch: Batch, outputs: Tensor, *, domain: int = -1) -> None:
        """Offers a batch's samples, of the domain with this place in the order, with the outputs [K, width]
        at its scored positions; in half precision these are cut to its range."""
        (rank, world), own, numbers = rank_and_world(), self.slots(), np.arange(len(batch["input_ids"]))
        numbers += self.count()
        keys = sample_keys(key(self.seed, "reservoir", rank, world), numbers)
        places = offer(numbers, draws(keys, 1, stream=0)[:, 0], len(own))
        self.seen[:world] += len(numbers)
        # Of two samples of a batch that take the same slot, the later one stays.
        rows = {own[place]: row for row, place in enumerate(places) if place < len(own)}
        if rows:
            parts = outputs.split(torch.bincount(batch["rows"], minlength=len(numbers)).tolist())
            ids, labels = batch["input_ids"], labels_of(batch)
            lengths = batch.get("attention_mask", torch.ones_like(ids)).sum(1)
            for slot, row in rows.items():
                taken = batch["decoder_input_ids"][row] if self.decodes else None
                mine = batch["segments"][row] if self.isolated else None
                how = {"taken": taken, "segments": mine}
                self.put(slot, ids[row], labels[row], int(lengths[row]), parts[row], **how)
                if self.by_domain:
                    self.domains[slot] = domain

    def put(
        self,
        slot: int,
        ids: Tensor,
        labels: Tensor,
        length: int,
        outputs: Tensor,
        *,
        taken: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> None:
        """Writes a sample, ids and labels [T] of which so many are text, with its outputs [k, width], and
        the document of each token [T] where these are isolated; of a model with a decoder labels [L] and what
        that has `taken` [L]. Outputs that are not finite, as of a step that is left out, are not taken."""
        if not outputs.isfinite().all():
            return
        fill_row(self.input_ids[slot], ids, self.pad)
        fill_row(self.labels[slot], labels, UNSCORED)
        if taken is not None:
            fill_row(self.decoder_input_ids[slot], taken, self.pad)
        if segments is not None:
            fill_row(self.segments[slot], segments, PADDING)
        self.lengths[slot] = length
        limit, missing = torch.finfo(self.outputs.dtype).max, self.outputs.shape[1] - len(outputs)
        self.outputs[slot] = functional.pad(outputs.float().clamp(-limit, limit), (0, 0, 0, missing))

    def draw(self, count: int, *, purpose: str, domain: int | None = None) -> Tensor:
        """Different slots of this process, uniform, as many as asked for or as are filled, of a domain's
        samples or of all; the purpose names the draw."""
        stream = key(self.seed, purpose, *rank_and_world(), self.count())
        own = torch.from_numpy(self.slots())
        own = own if domain is None else own[self.domains[own] == domain]
        filled = own[self.lengths[own] > 0]
        order = shuffle(np.arange(min(count, len(filled))), len(filled), stream=stream)
        return filled[torch.from_numpy(order)]

    def batch(self, slots: Tensor) -> Batch:
        """The samples in slots [B] as an objective's batch, without a weight, where the outputs are."""
        ids, labels = self.input_ids[slots].long(), self.labels[slots].long()
        present = torch.arange(ids.shape[1]) < self.lengths[slots][:, None]
        taken = self.decoder_input_ids[slots].long() if self.decodes else None
        segments = self.segments[slots].long() if self.isolated else None
        batch = label_batch(ids, labels, present, decoder_input_ids=taken, segments=segments)
        return {name: value.to(self.outputs.device) for name, value in batch.items()}

    def outputs_of(self, slots: Tensor) -> Tensor:
        """The stored outputs [K, width] at the scored positions of the samples in slots [B]."""
        scored = (self.labels[slots] != UNSCORED).sum(1, keepdim=True)
        places = torch.arange(self.outputs.shape[1])
        chosen = (slots[:, None] * len(places) + places)[places < scored]
        return self.outputs.flatten(0, 1)[chosen.to(self.outputs.device)]

    @torch.no_grad()
    def gather(self) -> None:
        """Brings the slots of every process to all; a collective."""
        for buffer in self.buffers():
            gather_shards(buffer)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.gather()
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "Reservoir":
        # Outputs are moved but never cast: double() or Lightning's true half precision would change what is
        # stored. The rest stays on the CPU, where reading it waits for no GPU.
        def moved(buffer: Tensor) -> Tensor:
            if buffer is not self.outputs:
                return buffer
            return fn(buffer.view(BITS[buffer.itemsize])).view(buffer.dtype)

        return super()._apply(moved, recurse)
