"""Answers alone are predicted: supervised tasks and instructions, beside raw text in the same batch."""

from abc import abstractmethod
from copy import copy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.data.collate import UNSCORED, Batch, Rows, Sharing, Sizes, label_batch
from cpt.models.objectives import Objective
from cpt.models.span import Span


class Answers(Objective):
    """Scores the answer's tokens of rows that have one; rows of raw text keep the model's own objective, and
    a batch of these alone is that objective's, bit for bit. `pad` fills what is shorter."""

    def __init__(self, raw: Objective, *, pad: int) -> None:
        self.raw, self.pad = raw, pad

    @property
    def scores(self) -> str:  # type: ignore[override]
        return f"answers and their ends; of raw text {self.raw.scores}"

    @property
    def scoring(self) -> "Answers":
        scoring = copy(self)
        scoring.raw = self.raw.scoring
        return scoring

    @property
    def longest(self) -> int | None:
        return self.raw.longest

    def most(self, length: int) -> int:
        return max(self.raw.most(length), length)

    def restored(self, batch: Batch) -> Batch:
        return self.raw.restored(batch)

    def scored(self, sizes: Sizes) -> np.ndarray:
        return self.answers_or(self.raw.scored(sizes), sizes)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        return self.answers_or(self.raw.scorable(sizes), sizes)

    def answers_or(self, raw: np.ndarray, sizes: Sizes) -> np.ndarray:
        return raw if sizes.answers is None else np.where(sizes.answers > 0, sizes.answers, raw)

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        if rows.answers is None:
            return self.raw.batch(rows)
        answered = rows.answers.any(1)
        asked, text = np.flatnonzero(answered), np.flatnonzero(~answered)
        parts = [(asked, *self.answer_batch(rows.some(asked)))] if len(asked) else []
        if len(text):
            alone = rows.some(text)
            parts.append((text, *self.raw.batch(Rows(alone.ids, alone.lengths, alone.keys))))
        return join_batches(parts, rows, pad=self.pad)

    @abstractmethod
    def answer_batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows that have an answer each, and the places of what is scored."""

    def uncorrupted(self, batch: Batch) -> Tensor:
        return self.raw.uncorrupted(batch)

    def outputs(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.raw.outputs(model, batch)

    def encode(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        return self.raw.encode(model, batch)


class CausalAnswers(Answers):
    """A decoder reads the question and predicts each token of the answer, and its end. The samples of a
    batch that is learned from may share rows."""

    causal = True

    def __init__(self, raw: Objective, *, pad: int, sharing: Sharing | None = None) -> None:
        super().__init__(raw, pad=pad)
        self.sharing = sharing

    def answer_batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        assert rows.answers is not None
        following = np.full_like(rows.ids, UNSCORED)
        following[:, :-1] = np.where(rows.answers[:, 1:], rows.ids[:, 1:], UNSCORED)
        batch = label_batch(*map(torch.from_numpy, (rows.ids, following, rows.present)))
        return batch, batch["positions"] + 1


class Seq2SeqAnswers(Answers):
    """The encoder reads what is not the answer; the decoder predicts the answer. `start` is what the decoder
    is given first: its input is the answer shifted right (Raffel et al., JMLR 2020)."""

    raw: Span

    def __init__(self, raw: Span, *, pad: int, start: int) -> None:
        super().__init__(raw, pad=pad)
        self.start = start

    def sides(self, length: int) -> tuple[int, int | None]:
        return length, length

    def uncorrupted(self, batch: Batch) -> Tensor:
        return self.restored(batch)["input_ids"]

    def restored(self, batch: Batch) -> Batch:
        """A question is as the text has it; of raw text what the model's own objective has hidden is put
        back."""
        corrupted = self.raw.corrupted(batch)
        if not corrupted.any():
            return batch
        both = [self.raw.restored(batch), batch]
        width = max(each["input_ids"].shape[1] for each in both)
        ids = [widen(each["input_ids"], width, filler=self.pad) for each in both]
        masks = [
            widen(each.get("attention_mask", torch.ones_like(each["input_ids"])), width, filler=0)
            for each in both
        ]
        whole, mask = (torch.where(corrupted[:, None], *tables) for tables in (ids, masks))
        rest = {name: value for name, value in batch.items() if name != "attention_mask"}
        return {**rest, "input_ids": whole, **({} if mask.all() else {"attention_mask": mask})}

    def answer_batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        assert rows.answers is not None
        source, there, _ = left_aligned(rows.ids, rows.present & ~rows.answers, filler=self.pad)
        target, wanted, places = left_aligned(rows.ids, rows.answers, filler=self.pad)
        given = np.concatenate([np.full((len(target), 1), self.start), target[:, :-1]], axis=1)
        given[:, 1:][~wanted[:, 1:]] = self.pad  # what stands behind the last label is no text
        labels = torch.from_numpy(np.where(wanted, target, UNSCORED))
        batch = label_batch(torch.from_numpy(given), labels, torch.from_numpy(np.ones_like(wanted)))
        batch["decoder_input_ids"] = batch["input_ids"]
        batch["input_ids"] = torch.from_numpy(source)
        if not there.all():
            batch["attention_mask"] = torch.from_numpy(there).long()
        return batch, torch.from_numpy(places[wanted])


def left_aligned(
    ids: np.ndarray, chosen: np.ndarray, *, filler: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The chosen ids of each row of [B, T], moved to its front: ids, where there are some, and their places
    in the flattened rows, each [B, most]."""
    counts = chosen.sum(1)
    there = np.arange(counts.max()) < counts[:, None]
    moved = np.full(there.shape, filler, ids.dtype)
    places = np.zeros(there.shape, np.int64)
    moved[there], places[there] = ids[chosen], np.flatnonzero(chosen)
    return moved, there, places


def join_batches(
    parts: list[tuple[np.ndarray, Batch, Tensor]], rows: Rows, *, pad: int
) -> tuple[Batch, Tensor]:
    """One batch of several, each with the places of its rows among `rows` and those of what it scores."""
    if len(parts) == 1:
        return parts[0][1], parts[0][2]
    count, length = rows.ids.shape
    grid = "decoder_input_ids" if "decoder_input_ids" in parts[0][1] else "input_ids"
    joined: Batch = {}
    for name in dict.fromkeys(("input_ids", grid)):
        joined[name] = scatter([(own, batch[name]) for own, batch, _ in parts], count, filler=pad)  # type: ignore[literal-required]
    masks = [
        (own, batch.get("attention_mask", torch.ones_like(batch["input_ids"]))) for own, batch, _ in parts
    ]
    if not (mask := scatter(masks, count, filler=0)).all():
        joined["attention_mask"] = mask
    width = joined[grid].shape[1]  # type: ignore[literal-required]
    owners = torch.cat([torch.from_numpy(own)[batch["rows"]] for own, batch, _ in parts])
    columns = torch.cat([batch["positions"] % batch[grid].shape[1] for _, batch, _ in parts])  # type: ignore[literal-required]
    places = torch.cat([torch.from_numpy(own)[at // length] * length + at % length for own, _, at in parts])
    positions = owners * width + columns
    order = positions.argsort()
    joined["positions"], joined["rows"] = positions[order], owners[order]
    joined["targets"] = torch.cat([batch["targets"] for _, batch, _ in parts])[order]
    return joined, places[order]


def widen(table: Tensor, width: int, *, filler: int) -> Tensor:
    """A table [B, t] as one [B, width]."""
    return functional.pad(table, (0, width - table.shape[1]), value=filler)


def scatter(parts: list[tuple[np.ndarray, Tensor]], count: int, *, filler: int) -> Tensor:
    """Tables [b, t] as the rows of one [count, most], filled up."""
    whole = torch.full((count, max(table.shape[1] for _, table in parts)), filler, dtype=parts[0][1].dtype)
    for own, table in parts:
        whole[torch.from_numpy(own), : table.shape[1]] = table
    return whole
