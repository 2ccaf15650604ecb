"""Language modelling objectives: from rows of token ids to batches, and from batches to logits.

Masked, causal and T5's span corruption, and answers only of supervised tasks. This is the one place where a
model is run on a batch, so that an objective may have a model of another kind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.randomness import draws
from cpt.data.batch import UNSCORED, Batch, Rows, Sizes, label_batch
from cpt.data.layout import Sharing
from cpt.models.block_attention import by_sample, inputs_for
from cpt.models.forward import hidden_states, logits_and_hidden, nll_of


class Objective(ABC):
    """Makes batches and runs a model on them. `scored` predicts what `batch` will score, from each row's size
    alone."""

    scores: str  # in words: the tokens of the performance matrix
    causal = False  # whether a place sees only what precedes it
    sharing: Sharing | None = None  # of rows, by the samples of a training batch
    isolated = False  # whether documents share the rows of a text without attention between them

    @property
    def scoring(self) -> "Objective":
        """The objective of held-out text, where it scores less than is trained on."""
        return self

    @property
    def longest(self) -> int | None:
        """The longest row, in tokens; None: any."""
        return None

    def most(self, length: int) -> int:
        """The largest number of scored places in a row of `length` tokens."""
        return int(self.scored(Sizes.full(length))[0])

    def sides(self, length: int) -> tuple[int, int | None]:
        """Places of a row of `length` tokens in a model's input, and in a decoder's; None: no decoder."""
        return length, None

    @abstractmethod
    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows, and for each scored place [K] the token of the rows that it stands for, as a
        place in their flattened ids."""

    @abstractmethod
    def scored(self, sizes: Sizes) -> np.ndarray:
        """Scored places per row, [B], of rows of such sizes."""

    @abstractmethod
    def scorable(self, sizes: Sizes) -> np.ndarray:
        """Tokens per row, [B], that may be scored: bits per byte are counted over them."""

    @abstractmethod
    def uncorrupted(self, batch: Batch) -> Tensor:
        """The original ids [B, T] of a batch."""

    def restored(self, batch: Batch) -> Batch:
        """The batch with uncorrupted ids as its input."""
        return {**batch, "input_ids": self.uncorrupted(batch)}

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with a layout where its samples share rows; only the model's input changes."""
        return batch if self.sharing is None else self.sharing.lay_out(batch)

    def outputs(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [K, V] at the scored positions, and the last hidden states [B, T, D] at all: of a decoder,
        where there is one."""
        inputs, places = inputs_for(model, batch, causal=self.causal)
        if places is None:
            return logits_and_hidden(model, inputs, positions=batch["positions"])
        logits, hidden = logits_and_hidden(model, inputs, positions=places[batch["positions"]])
        return logits, by_sample(hidden, places, batch)

    def encode(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """The last hidden states [B, T, D] of the model's input, without a head or a decoder."""
        inputs, places = inputs_for(model, batch, causal=self.causal)
        hidden = hidden_states(model, inputs)
        return hidden if places is None else by_sample(hidden, places, batch)

    def nll(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Negative log-likelihood (nats) of the targets, [K]."""
        return nll_of(self.outputs(model, batch)[0], batch)


class Masked(Objective):
    """Masked language modelling (Devlin et al., NAACL 2019, section 3.1): `rate` of a row's text tokens are
    predicted, of which 80 % become the mask token, 10 % a random token, 10 % stay. Their number per row is
    fixed (rounded, at least 1), and so known before the batch is made."""

    scores = "masked tokens"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, rate: float | None) -> None:
        if rate is None or not 0 < rate < 1:
            raise ValueError(f"model.mask_rate={rate}; allowed: above 0 and below 1")
        if tokenizer.mask_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} has no mask token; allowed: model.objective=causal"
            )
        self.rate, self.mask = rate, tokenizer.mask_token_id
        self.special = np.asarray(sorted(tokenizer.all_special_ids))
        self.plain = np.setdiff1d(np.arange(len(tokenizer)), self.special)

    def scored(self, sizes: Sizes) -> np.ndarray:
        return self.predicted(sizes.text)

    def predicted(self, text_tokens: np.ndarray) -> np.ndarray:
        """Predictions per row, [B], of rows with so many tokens of text."""
        return np.minimum(text_tokens, np.maximum(1, np.rint(self.rate * text_tokens))).astype(np.int64)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        return sizes.text

    def uncorrupted(self, batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        return ids.flatten().index_copy(0, batch["positions"], batch["targets"]).view_as(ids)

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        ids, keys, length = rows.ids, rows.keys, rows.ids.shape[1]
        text = rows.present & ~np.isin(ids, self.special)
        lottery = np.where(text, draws(keys, length, stream=0), 2.0)
        chosen = lowest(lottery, self.predicted(text.sum(1)))
        fate = draws(keys, length, stream=1)
        token = self.plain[(draws(keys, length, stream=2) * len(self.plain)).astype(np.int64)]
        inputs = np.where(chosen & (fate < 0.8), self.mask, ids)
        inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), token, inputs)
        batch = to_batch(inputs, np.where(chosen, ids, UNSCORED), rows.present, segments=rows.segments)
        return batch, batch["positions"]


class Causal(Objective):
    """Next-token prediction: every token of a row but its first, separators included; where documents are
    isolated, every token of a document but its first."""

    causal = True
    scores = "all tokens"

    def scored(self, sizes: Sizes) -> np.ndarray:
        return sizes.all - (1 if sizes.documents is None else sizes.documents)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        return sizes.all

    def uncorrupted(self, batch: Batch) -> Tensor:
        return batch["input_ids"]

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        given = rows.present[:, 1:]
        if rows.segments is not None:
            given = given & (rows.segments[:, 1:] == rows.segments[:, :-1])
        following = np.full_like(rows.ids, UNSCORED)
        following[:, :-1] = np.where(given, rows.ids[:, 1:], UNSCORED)
        batch = to_batch(rows.ids, following, rows.present, segments=rows.segments)
        return batch, batch["positions"] + 1


class Span(Objective):
    """Span corruption, the pre-training of T5 (Raffel et al., JMLR 2020, section 3.1.4; as its code has it).

    Of a row of n tokens, round(rate * n) are hidden in spans of `mean` tokens on average; text and holes
    alternate, text first. With x the text, s_k the k-th sentinel:

        source    x_0 s_0 x_1 s_1 … </s>          each hole is one sentinel
        target    s_0 hole_0 s_1 hole_1 … </s>    each text is one sentinel, and no sentinel closes

    Lengths of holes and of texts are random compositions, all equally likely; their number depends on n
    alone. Trained on is the whole target; scored are hidden tokens only, as sentinels are nearly free and no
    text. `sentinels` are the ids of <extra_id_0>, …; `start` is a decoder's first input."""

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
        lengths = np.arange(2, int((len(self.sentinels) + 1) * self.mean / self.rate) + 2)
        return int(lengths[self.holes(lengths)[1] <= len(self.sentinels)].max(initial=1))

    def sides(self, length: int) -> tuple[int, int]:
        tokens, holes = (int(each[0]) for each in self.holes(np.array([length])))
        return length - tokens + holes + 1, tokens + holes + 1

    def holes(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hidden tokens and holes [B] of rows of such lengths; a row of one token counts as one of two.
        Products are rounded in 32 bits, as in T5's code."""
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
        """Which tokens of rows are hidden, [B, T]; raises ValueError for more holes than sentinels."""
        tokens, holes = self.holes(rows.lengths)
        if holes.max(initial=0) > len(self.sentinels):
            raise ValueError(
                f"a row of {rows.lengths.max()} tokens has {holes.max()} holes; "
                f"allowed: {self.longest} tokens, for {len(self.sentinels)} sentinels"
            )
        width = rows.ids.shape[1]
        hidden = draw_composition(rows.keys, tokens, holes, stream=0)
        text = draw_composition(rows.keys, np.maximum(rows.lengths, 2) - tokens, holes, stream=1)
        ends = np.stack([text, hidden], axis=2).reshape(len(text), -1).cumsum(1)
        turns = np.zeros((len(text), width + 2), np.int64)
        np.add.at(turns, (np.arange(len(text))[:, None], np.minimum(ends, width + 1)), 1)
        return (turns.cumsum(1)[:, :width] % 2 == 1) & rows.present

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        def append(table: np.ndarray, value: int) -> np.ndarray:
            return np.concatenate([table, np.full((len(table), 1), value, table.dtype)], axis=1)

        def sentinel_at(firsts: np.ndarray) -> np.ndarray:  # numbered in its row
            return self.sentinels[np.clip(firsts.cumsum(1) - 1, 0, len(self.sentinels) - 1)]

        count, width = rows.ids.shape
        hidden = append(self.hidden(rows), False)
        ids, present = append(rows.ids, self.end), append(rows.present, False)
        ends = np.arange(width + 1) == rows.lengths[:, None]
        ids[ends] = self.end
        after = np.roll(hidden, 1, axis=1)  # whose first column is False: the appended token is not hidden
        opens, shows = hidden & ~after, present & ~hidden & after
        shows[:, 0] = True
        read, answers = (present & ~hidden) | opens | ends, hidden | shows | ends
        source = left_align(np.where(opens, sentinel_at(opens), ids), read, filler=self.pad)
        target = left_align(np.where(shows, sentinel_at(shows), ids), answers, filler=self.pad)
        learned = left_align((hidden | self.whole) & (present | ends), answers, filler=False)
        given = np.concatenate([np.full((count, 1), self.start), target[:, :-1]], axis=1)
        given[:, 1:][~left_align(answers, answers, filler=False)[:, 1:]] = self.pad
        text = np.arange(source.shape[1]) < read.sum(1)[:, None]
        batch = to_batch(source, np.where(learned, target, UNSCORED), text, decoder_input_ids=given)
        # A hidden token stands for itself, a sentinel for the first of the next hole, the end for the last.
        own = np.where(hidden, np.arange(width + 1), width + 1)
        own = np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
        own = np.minimum(own, rows.lengths[:, None] - 1) + np.arange(count)[:, None] * width
        return batch, torch.from_numpy(left_align(own, answers, filler=0)[learned])

    def corrupted(self, batch: Batch) -> Tensor:
        """Which rows of a batch have holes, [B]; others are of another objective."""
        sentinels = torch.from_numpy(self.sentinels).to(batch["decoder_input_ids"].device)
        return torch.isin(batch["decoder_input_ids"], sentinels).any(1)

    def uncorrupted(self, batch: Batch) -> Tensor:
        return self.restored(batch)["input_ids"]

    def restored(self, batch: Batch) -> Batch:
        """The text joined from source and target at their sentinels; the decoder's input stays."""
        source, target = batch["input_ids"], batch["decoder_input_ids"][:, 1:]
        sentinels = torch.from_numpy(self.sentinels).to(source.device)
        lengths = batch.get("attention_mask", torch.ones_like(source)).sum(1, keepdim=True)
        places = torch.arange(source.shape[1], device=source.device)
        opens, shows = torch.isin(source, sentinels), torch.isin(target, sentinels)
        # Text k precedes hole k.
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


class Answers(Objective):
    """Scores the answer of rows that have one (supervised tasks, instructions); rows of raw text keep the
    model's own objective, and a batch of these alone has the same bits as that objective's. `pad` is the
    padding id."""

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

    def uncorrupted(self, batch: Batch) -> Tensor:
        return self.raw.uncorrupted(batch)

    def scored(self, sizes: Sizes) -> np.ndarray:
        raw = self.raw.scored(sizes)
        return raw if sizes.answers is None else np.where(sizes.answers > 0, sizes.answers, raw)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        raw = self.raw.scorable(sizes)
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
        if len(parts) == 1:
            return parts[0][1], parts[0][2]
        return self.join(parts, *rows.ids.shape)

    def join(
        self, parts: list[tuple[np.ndarray, Batch, Tensor]], count: int, length: int
    ) -> tuple[Batch, Tensor]:
        """One batch of several, each with its rows among the `count` of `length` tokens, and the places of
        what it scores."""

        def stack(tables: list[Tensor], filler: int) -> Tensor:
            whole = torch.full((count, max(t.shape[1] for t in tables)), filler, dtype=tables[0].dtype)
            for (own, *_), table in zip(parts, tables, strict=True):
                whole[torch.from_numpy(own), : table.shape[1]] = table
            return whole

        grid = "decoder_input_ids" if "decoder_input_ids" in parts[0][1] else "input_ids"
        joined: Batch = {}
        for name in dict.fromkeys(("input_ids", grid)):
            joined[name] = stack([batch[name] for _, batch, _ in parts], self.pad)  # type: ignore[literal-required]
        mask = stack(
            [b.get("attention_mask", torch.ones_like(b["input_ids"])) for _, b, _ in parts], filler=0
        )
        if not mask.all():
            joined["attention_mask"] = mask
        width = joined[grid].shape[1]  # type: ignore[literal-required]
        owners = torch.cat([torch.from_numpy(own)[batch["rows"]] for own, batch, _ in parts])
        columns = torch.cat([batch["positions"] % batch[grid].shape[1] for _, batch, _ in parts])  # type: ignore[literal-required]
        places = torch.cat(
            [torch.from_numpy(own)[at // length] * length + at % length for own, _, at in parts]
        )
        positions = owners * width + columns
        order = positions.argsort()
        joined["positions"], joined["rows"] = positions[order], owners[order]
        joined["targets"] = torch.cat([batch["targets"] for _, batch, _ in parts])[order]
        return joined, places[order]

    @abstractmethod
    def answer_batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows that all have an answer, and the places of what is scored."""

    def outputs(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.raw.outputs(model, batch)

    def encode(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        return self.raw.encode(model, batch)


class CausalAnswers(Answers):
    """A decoder reads the question and predicts each token of the answer, and its end. The samples of a
    training batch may share rows."""

    causal = True

    def __init__(self, raw: Objective, *, pad: int, sharing: Sharing | None = None) -> None:
        super().__init__(raw, pad=pad)
        self.sharing = sharing

    def answer_batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        assert rows.answers is not None
        following = np.full_like(rows.ids, UNSCORED)
        following[:, :-1] = np.where(rows.answers[:, 1:], rows.ids[:, 1:], UNSCORED)
        batch = to_batch(rows.ids, following, rows.present)
        return batch, batch["positions"] + 1


class Seq2SeqAnswers(Answers):
    """The encoder reads the question, the decoder predicts the answer from itself shifted right after `start`
    (Raffel et al., JMLR 2020)."""

    raw: Span

    def __init__(self, raw: Span, *, pad: int, start: int) -> None:
        super().__init__(raw, pad=pad)
        self.start = start

    def sides(self, length: int) -> tuple[int, int | None]:
        return length, length

    def uncorrupted(self, batch: Batch) -> Tensor:
        return self.restored(batch)["input_ids"]

    def restored(self, batch: Batch) -> Batch:
        """Questions stay; in raw text what the model's own objective has hidden is restored."""
        corrupted = self.raw.corrupted(batch)
        if not corrupted.any():
            return batch
        both = [self.raw.restored(batch), batch]
        width = max(each["input_ids"].shape[1] for each in both)

        def choose(tables: list[Tensor], filler: int) -> Tensor:
            wide = [functional.pad(table, (0, width - table.shape[1]), value=filler) for table in tables]
            return torch.where(corrupted[:, None], *wide)

        ids = choose([each["input_ids"] for each in both], self.pad)
        masks = [each.get("attention_mask", torch.ones_like(each["input_ids"])) for each in both]
        mask = choose(masks, 0)
        rest = {name: value for name, value in batch.items() if name != "attention_mask"}
        return {**rest, "input_ids": ids, **({} if mask.all() else {"attention_mask": mask})}

    def answer_batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        assert rows.answers is not None
        asked = rows.present & ~rows.answers
        source, present = left_align(rows.ids, asked, filler=self.pad), left_align(asked, asked, filler=False)
        target = left_align(rows.ids, rows.answers, filler=self.pad)
        wanted = left_align(rows.answers, rows.answers, filler=False)
        given = np.concatenate([np.full((len(target), 1), self.start), target[:, :-1]], axis=1)
        given[:, 1:][~wanted[:, 1:]] = self.pad  # what follows the last label is padding
        labels = np.where(wanted, target, UNSCORED)
        batch = to_batch(source, labels, present, decoder_input_ids=given)
        return batch, torch.from_numpy(np.flatnonzero(rows.answers))


def to_batch(
    ids: np.ndarray,
    labels: np.ndarray,
    present: np.ndarray,
    *,
    segments: np.ndarray | None = None,
    decoder_input_ids: np.ndarray | None = None,
) -> Batch:
    """`label_batch` of numpy tables."""
    tables = {"segments": segments, "decoder_input_ids": decoder_input_ids}
    named = {name: torch.from_numpy(table) for name, table in tables.items() if table is not None}
    return label_batch(*map(torch.from_numpy, (ids, labels, present)), **named)


def lowest(lottery: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the `counts` [B] lowest numbers of each row are, [B, T]; the first of equal ones."""
    return lottery.argsort(1, kind="stable").argsort(1, kind="stable") < counts[:, None]


def draw_composition(keys: np.ndarray, totals: np.ndarray, parts: np.ndarray, *, stream: int) -> np.ndarray:
    """Random compositions of totals [B] into `parts` [B] positive parts, all equally likely: lengths [B, P],
    0 beyond a row's parts. Cuts are drawn from the places between two items."""
    places = np.arange(totals.max(initial=1) - 1)
    lottery = np.where(places < (totals - 1)[:, None], draws(keys, len(places), stream=stream), 2.0)
    cuts = lowest(lottery, parts - 1)
    part = np.concatenate([np.zeros((len(totals), 1), np.int64), cuts.cumsum(1)], axis=1)
    lengths = np.zeros((len(totals), parts.max(initial=1)), np.int64)
    np.add.at(lengths, (np.arange(len(totals))[:, None], part), np.arange(len(places) + 1) < totals[:, None])
    return lengths


def left_align(values: np.ndarray, chosen: np.ndarray, *, filler: int) -> np.ndarray:
    """The chosen values of each row [B, T] at its front, [B, W], filled up at the end."""
    table = np.full((len(values), chosen.sum(1).max(initial=0)), filler, values.dtype)
    table[chosen.nonzero()[0], chosen.cumsum(1)[chosen] - 1] = values[chosen]
    return table
