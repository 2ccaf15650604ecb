"""Span corruption, the pre-training of T5 (Raffel et al., JMLR 2020, section 3.1.4; as its code has it).

Of a row of n tokens, round(rate * n) are hidden in spans of `mean` tokens on average; text and holes take
turns, text first, so that a row ends with a hole. With x the text, s_k the k-th sentinel:

    source    x_0 s_0 x_1 s_1 … </s>          each hole is one sentinel
    target    s_0 hole_0 s_1 hole_1 … </s>    each text is one sentinel, and no sentinel closes

The lengths of the holes, and of the texts, are a random composition each: all that sum to their total are
equally likely. How many tokens are hidden, in how many holes, follows from n alone."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from cpt.core.randomness import draws
from cpt.data.collate import UNSCORED, Batch, Rows, Sizes, label_batch
from cpt.models.objectives import Objective


class Span(Objective):
    """Learned is the whole target, as T5 does; scored are its hidden tokens alone, as sentinels are nearly
    free and are no text.

    `sentinels` are the ids of <extra_id_0>, <extra_id_1>, …; `start` is what a decoder begins with."""

    scores = "hidden tokens, neither sentinels nor the end"

    def __init__(
        self,
        *,
        rate: float | None,
        mean: float | None,
        sentinels: Sequence[int],
        end: int,
        pad: int,
        start: int,
    ) -> None:
        if rate is None or not 0 < rate < 1:
            raise ValueError(f"model.mask_rate={rate}; allowed: above 0 and below 1")
        if mean is None or mean < 1:
            raise ValueError(
                f"model.mean_span={mean}; allowed: 1 or more, as the model learns by span corruption"
            )
        self.rate, self.mean, self.whole = rate, mean, True
        self.sentinels = np.asarray(sentinels, np.int64)
        self.end, self.pad, self.start = end, pad, start

    @property
    def scoring(self) -> "Span":
        scoring = copy(self)
        scoring.whole = False
        return scoring

    @property
    def longest(self) -> int:
        most = (len(self.sentinels) + 1) * self.mean / self.rate
        lengths = np.arange(2, int(most) + 2)
        return int(lengths[self.holes(lengths)[1] <= len(self.sentinels)].max(initial=1))

    def sides(self, length: int) -> tuple[int, int]:
        tokens, holes = (int(each[0]) for each in self.holes(np.array([length])))
        return length - tokens + holes + 1, tokens + holes + 1

    def holes(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens are hidden in rows of so many tokens, and in how many holes, [B] each; a row of one
        token counts as one of two. Products are rounded in 32 bits, as in T5's code."""
        lengths = np.maximum(lengths, 2)
        products = np.float32(self.rate) * lengths.astype(np.float32)
        tokens = np.clip(np.rint(products), 1, lengths - 1).astype(np.int64)
        means = tokens.astype(np.float32) / np.float32(self.mean)
        holes = np.maximum(1, np.rint(means)).astype(np.int64)
        return tokens, np.minimum(holes, lengths - tokens)

    def scored(self, sizes: Sizes) -> np.ndarray:
        tokens, holes = self.holes(sizes.all)
        hidden = np.where(sizes.all > 1, tokens, 0)
        return hidden + holes + 1 if self.whole else hidden

    def scorable(self, sizes: Sizes) -> np.ndarray:
        return sizes.all

    def hidden(self, rows: Rows) -> np.ndarray:
        """Which tokens of rows are hidden, [B, T]; raises ValueError where sentinels do not suffice."""
        tokens, holes = self.holes(rows.lengths)
        if holes.max(initial=0) > len(self.sentinels):
            raise ValueError(
                f"a row of {rows.lengths.max()} tokens has {holes.max()} holes; "
                f"allowed: {self.longest} tokens, for {len(self.sentinels)} sentinels"
            )
        width = rows.ids.shape[1]
        hidden = compose(rows.keys, tokens, holes, stream=0)
        text = compose(rows.keys, np.maximum(rows.lengths, 2) - tokens, holes, stream=1)
        ends = np.stack([text, hidden], axis=2).reshape(len(text), -1).cumsum(1)
        turns = np.zeros((len(text), width + 2), np.int64)
        np.add.at(turns, (np.arange(len(text))[:, None], np.minimum(ends, width + 1)), 1)
        return (turns.cumsum(1)[:, :width] % 2 == 1) & rows.present

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        count, width = rows.ids.shape
        hidden = append(self.hidden(rows), False)
        ids, present = append(rows.ids, self.end), append(rows.present, False)
        ends = np.arange(width + 1) == rows.lengths[:, None]
        ids[ends] = self.end
        behind = np.roll(hidden, 1, axis=1)  # whose first column is False: what is appended is not hidden
        opens, shows = hidden & ~behind, present & ~hidden & behind
        shows[:, 0] = True
        source = gather(
            np.where(opens, self.named(opens), ids), (present & ~hidden) | opens | ends, filler=self.pad
        )
        answers = hidden | shows | ends
        target = gather(np.where(shows, self.named(shows), ids), answers, filler=self.pad)
        learned = gather((hidden | self.whole) & (present | ends), answers, filler=False)
        taken = np.concatenate([np.full((count, 1), self.start), target[:, :-1]], axis=1)
        taken[:, 1:][~gather(answers, answers, filler=False)[:, 1:]] = self.pad
        lengths = ((present & ~hidden) | opens | ends).sum(1)
        batch = label_batch(
            *map(torch.from_numpy, (source, np.where(learned, target, UNSCORED))),
            torch.from_numpy(np.arange(source.shape[1]) < lengths[:, None]),
            decoder_input_ids=torch.from_numpy(taken),
        )
        return batch, torch.from_numpy(gather(owners(hidden, rows.lengths), answers, filler=0)[learned])

    def named(self, firsts: np.ndarray) -> np.ndarray:
        """The sentinel at each place where one stands, counted in its row, [B, T]; anything elsewhere."""
        return self.sentinels[np.clip(firsts.cumsum(1) - 1, 0, len(self.sentinels) - 1)]

    def corrupted(self, batch: Batch) -> Tensor:
        """Which rows of a batch have holes, [B]; others are of another objective."""
        sentinels = torch.from_numpy(self.sentinels).to(batch["decoder_input_ids"].device)
        return torch.isin(batch["decoder_input_ids"], sentinels).any(1)

    def uncorrupted(self, batch: Batch) -> Tensor:
        return self.restored(batch)["input_ids"]

    def restored(self, batch: Batch) -> Batch:
        """The text is put together of source and target at their sentinels; a decoder still takes the
        target."""
        source, target = batch["input_ids"], batch["decoder_input_ids"][:, 1:]
        sentinels = torch.from_numpy(self.sentinels).to(source.device)
        lengths = batch.get("attention_mask", torch.ones_like(source)).sum(1, keepdim=True)
        places = torch.arange(source.shape[1], device=source.device)
        opens, shows = torch.isin(source, sentinels), torch.isin(target, sentinels)
        # Text k stands before hole k.
        turns = torch.cat([2 * opens.cumsum(1), 2 * shows.cumsum(1) - 1], dim=1)
        text = torch.cat([(places < lengths - 1) & ~opens, (target != self.pad) & ~shows], dim=1)
        last = 2 * len(self.sentinels) + 2
        order = turns.masked_fill(~text, last).argsort(dim=1, stable=True)
        width = int(text.sum(1).max())
        ids = torch.cat([source, target], dim=1).gather(1, order)[:, :width]
        present = torch.arange(width, device=source.device) < text.sum(1, keepdim=True)
        rest = {name: value for name, value in batch.items() if name != "attention_mask"}
        mask = {} if present.all() else {"attention_mask": present.long()}
        return {**rest, "input_ids": ids.masked_fill(~present, self.pad), **mask}


def compose(keys: np.ndarray, totals: np.ndarray, parts: np.ndarray, *, stream: int) -> np.ndarray:
    """Random compositions of totals [B] into so many positive parts [B], each equally likely: lengths [B, P],
    0 beyond a row's parts. Of the places between two items, so many are drawn as there are cuts."""
    places = np.arange(totals.max(initial=1) - 1)
    lottery = np.where(places < (totals - 1)[:, None], draws(keys, len(places), stream=stream), 2.0)
    cuts = lottery.argsort(1, kind="stable").argsort(1, kind="stable") < (parts - 1)[:, None]
    part = np.concatenate([np.zeros((len(totals), 1), np.int64), cuts.cumsum(1)], axis=1)
    lengths = np.zeros((len(totals), parts.max(initial=1)), np.int64)
    np.add.at(lengths, (np.arange(len(totals))[:, None], part), np.arange(len(places) + 1) < totals[:, None])
    return lengths


def append(table: np.ndarray, value: int) -> np.ndarray:
    """A table [B, T] with a column more, of one value."""
    return np.concatenate([table, np.full((len(table), 1), value, table.dtype)], axis=1)


def gather(values: np.ndarray, chosen: np.ndarray, *, filler: int) -> np.ndarray:
    """The chosen values of each row [B, T], one after another, [B, W], filled up at the end."""
    table = np.full((len(values), chosen.sum(1).max(initial=0)), filler, values.dtype)
    table[chosen.nonzero()[0], chosen.cumsum(1)[chosen] - 1] = values[chosen]
    return table


def owners(hidden: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The token that each place of a target is there for, by its place in the rows, flattened: a hidden one
    itself, a sentinel's the first of the hole behind it, the end's the row's last. From [B, T + 1]."""
    count, width = hidden.shape
    own = np.where(hidden, np.arange(width), width)
    following = np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
    return np.minimum(following, lengths[:, None] - 1) + np.arange(count)[:, None] * (width - 1)
