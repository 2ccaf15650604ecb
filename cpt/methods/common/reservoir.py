"""A reservoir of training samples with the model's outputs on them at the time they were added.

Reservoir sampling: Vitter, ACM Transactions on Mathematical Software 11(1), 1985, algorithm R."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cpt.core.distributed import gather_shards
from cpt.core.processes import rank_and_world
from cpt.core.randomness import draws, key, sample_keys, shuffle
from cpt.data.collate import UNSCORED, Batch, label_batch, labels_of
from cpt.data.packing import PADDING
from cpt.models.objectives import Objective

PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}


def slot_of(objective: Objective, length: int) -> dict[str, Any]:
    """The arguments of a Reservoir for rows of `length` tokens under an objective."""
    source, target = objective.sides(length)
    slot = {"length": source, "target": target, "scored": objective.most(length)}
    return slot | {"isolated": objective.isolated}


class Reservoir(nn.Module):
    """`samples` slots: a row of `length` ids with its labels, and outputs [scored, width] at its scored
    positions, padded; `target` decoder ids; `isolated`: the document of each token; `by_domain`: the domain.

    Of w processes, r keeps its own samples in the slots r, r + w, r + 2w, ... and draws from these;
    `seen[r]` counts the samples that it was offered. A state_dict gathers all slots (a collective)."""

    input_ids: Tensor
    decoder_input_ids: Tensor
    labels: Tensor
    lengths: Tensor
    outputs: Tensor
    seen: Tensor
    segments: Tensor
    domains: Tensor

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
        self.by_domain, self.isolated, self.decodes = by_domain, isolated, target is not None
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

    def slots(self) -> np.ndarray:
        """This process's slots; raises ValueError if there are fewer than processes."""
        (rank, world), held = rank_and_world(), len(self.lengths)
        if held < world:
            allowed = f"one or more for each of {world} processes"
            raise ValueError(f"method.buffer_size={held} is invalid. Allowed: {allowed}")
        return np.arange(rank, held, world)

    @torch.no_grad()
    def count(self) -> int:
        """The samples offered to this process; rebalances a state of another number of processes."""
        rank, world = rank_and_world()
        if int((self.seen > 0).sum()) not in (0, world):
            order, total = (self.lengths == 0).int().argsort(stable=True), int(self.seen.sum())
            for buffer in (buffer for buffer in self.buffers() if buffer is not self.seen):
                buffer.copy_(buffer[order.to(buffer.device)])
            self.seen.zero_()
            self.seen[:world] = (total + torch.arange(world).flip(0)) // world
        return int(self.seen[rank])

    @torch.no_grad()
    def add(self, batch: Batch, outputs: Tensor, *, domain: int = -1) -> None:
        """Offers a batch's samples, of the domain with this place in the order, with the outputs [K, width]
        at its scored positions, clamped to the range of half precision."""
        (rank, world), own, numbers = rank_and_world(), self.slots(), np.arange(len(batch["input_ids"]))
        numbers += self.count()
        keys = sample_keys(key(self.seed, "reservoir", rank, world), numbers)
        # Sample k, from 0, fills slot k; later ones stay with probability slots / (k + 1).
        uniforms, slots = draws(keys, 1, stream=0)[:, 0], len(own)
        places = np.where(numbers < slots, numbers, (uniforms * (numbers + 1)).astype(np.int64))
        self.seen[:world] += len(numbers)
        # Of two samples of a batch that take the same slot, the later one stays.
        rows = {own[place]: row for row, place in enumerate(places) if place < slots}
        if rows:
            parts = outputs.split(torch.bincount(batch["rows"], minlength=len(numbers)).tolist())
            ids, labels = batch["input_ids"], labels_of(batch)
            lengths = batch.get("attention_mask", torch.ones_like(ids)).sum(1)
            limit = torch.finfo(self.outputs.dtype).max
            for slot, row in rows.items():
                if not parts[row].isfinite().all():  # as of a skipped step
                    continue
                stored = [(self.input_ids, ids, self.pad), (self.labels, labels, UNSCORED)]
                if self.decodes:
                    stored.append((self.decoder_input_ids, batch["decoder_input_ids"], self.pad))
                if self.isolated:
                    stored.append((self.segments, batch["segments"], PADDING))
                for buffer, values, filler in stored:
                    width = values.shape[1]
                    buffer[slot, :width], buffer[slot, width:] = values[row], filler
                self.lengths[slot] = lengths[row]
                missing = self.outputs.shape[1] - len(parts[row])
                clamped = parts[row].float().clamp(-limit, limit)
                self.outputs[slot] = functional.pad(clamped, (0, 0, 0, missing))
                if self.by_domain:
                    self.domains[slot] = domain

    def draw(self, count: int, *, purpose: str, domain: int | None = None) -> Tensor:
        """Up to `count` distinct filled slots of this process, of a domain or all, by the purpose."""
        stream = key(self.seed, purpose, *rank_and_world(), self.count())
        own = torch.from_numpy(self.slots())
        own = own if domain is None else own[self.domains[own] == domain]
        filled = own[self.lengths[own] > 0]
        order = shuffle(np.arange(min(count, len(filled))), len(filled), stream=stream)
        return filled[torch.from_numpy(order)]

    def batch(self, slots: Tensor) -> Batch:
        """The samples in slots [B] as an objective's batch without a weight, on the outputs' device."""
        ids, labels = self.input_ids[slots].long(), self.labels[slots].long()
        present = torch.arange(ids.shape[1]) < self.lengths[slots][:, None]
        taken = self.decoder_input_ids[slots].long() if self.decodes else None
        segments = self.segments[slots].long() if self.isolated else None
        batch = label_batch(ids, labels, present, decoder_input_ids=taken, segments=segments)
        device = self.outputs.device
        return cast(Batch, {name: cast(Tensor, value).to(device) for name, value in batch.items()})

    def outputs_of(self, slots: Tensor) -> Tensor:
        """The stored outputs [K, width] at the scored positions of the samples in slots [B]."""
        scored = (self.labels[slots] != UNSCORED).sum(1, keepdim=True)
        places = torch.arange(self.outputs.shape[1])
        chosen = (slots[:, None] * len(places) + places)[places < scored]
        return self.outputs.flatten(0, 1)[chosen.to(self.outputs.device)]

    @torch.no_grad()
    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for buffer in self.buffers():
            gather_shards(buffer)
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "Reservoir":
        # Outputs are moved but never cast; the other buffers stay on the CPU, where reads wait for no GPU.
        def moved(buffer: Tensor) -> Tensor:
            bits = BITS[buffer.itemsize] if buffer is self.outputs else None
            return buffer if bits is None else fn(buffer.view(bits)).view(buffer.dtype)

        return super()._apply(moved, recurse)
