"""Language modelling objectives, from rows of token ids to batches and logits: masked, causal, T5's span
corruption, and answers of supervised tasks. Models are run on batches here and nowhere else."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.randomness import draws
from cpt.data.collate import UNSCORED, Batch, Rows, Sharing, Sizes, label_batch
from cpt.models.block_attention import make_inputs, split_samples
from cpt.models.forward import hidden_states, logits_and_hidden, token_nll


@dataclass(frozen=True)
class Tables:
    """A batch as tables, with the column of the row of tokens that each label stands for."""

    ids: np.ndarray  # [B, W]
    present: np.ndarray  # [B, W], False at padding
    labels: np.ndarray  # [B, L]
    columns: np.ndarray  # [B, L]
    decoder_ids: np.ndarray | None = None  # [B, L]


class Objective(ABC):
    """Makes batches and runs a model on them; `scored` predicts what `batch` will score, from sizes alone."""

    scores: str  # in words: the tokens of the performance matrix
    longest: int | None = None  # row, in tokens; None: any
    causal = False  # whether a place sees only what precedes it
    sharing: Sharing | None = None  # of rows, by the samples of a training batch
    isolated = False  # whether documents share the rows of a text without attention between them

    @property
    def scoring(self) -> "Objective":
        """The objective of held-out text, where it scores less than is trained on."""
        return self

    def most(self, length: int) -> int:
        """The largest number of scored places in a row of `length` tokens."""
        return int(self.scored(Sizes(*np.array([[length], [length]])))[0])

    def sides(self, length: int) -> tuple[int, int | None]:
        """Places of a row of `length` tokens in a model's input, and in a decoder's; None: no decoder."""
        return length, None

    @abstractmethod
    def tables(self, rows: Rows) -> Tables:
        """What is predicted of rows."""

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows, and for each scored place [K] its token's place in their flattened ids."""
        made, (count, length) = self.tables(rows), rows.ids.shape
        named = {"decoder_input_ids": made.decoder_ids, "segments": rows.segments}
        some = {name: torch.from_numpy(table) for name, table in named.items() if table is not None}
        ids, labels, present = map(torch.from_numpy, (made.ids, made.labels, made.present))
        batch = label_batch(ids, labels, present, **some)
        places = np.arange(count)[:, None] * length + made.columns
        return batch, torch.from_numpy(places[made.labels != UNSCORED])

    @abstractmethod
    def scored(self, sizes: Sizes) -> np.ndarray:
        """Scored places per row, [B], of rows of such sizes."""

    def scorable(self, sizes: Sizes) -> np.ndarray:
        """Tokens per row, [B], that may be scored: bits per byte are counted over them."""
        return sizes.all if sizes.inserted is None else sizes.all - sizes.inserted

    def restored(self, batch: Batch) -> Batch:
        """The batch with the original ids [B, T] as its input."""
        return batch

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with a layout where its samples share rows; only the model's input changes."""
        return batch if self.sharing is None else self.sharing.lay_out(batch)

    def outputs(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [K, V] at the scored positions, and the last hidden states [B, T, D], a decoder's if any."""
        (inputs, places), positions = make_inputs(model, batch, causal=self.causal), batch["positions"]
        positions = positions if places is None else places[positions]
        logits, hidden = logits_and_hidden(model, inputs, positions=positions)
        return logits, split_samples(hidden, places, batch)

    def encode(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """The last hidden states [B, T, D] of the model's input, without a head or a decoder."""
        inputs, places = make_inputs(model, batch, causal=self.causal)
        return split_samples(hidden_states(model, inputs), places, batch)

    def nll(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Negative log-likelihood (nats) of the targets, [K]."""
        return token_nll(self.outputs(model, batch)[0], batch)


class Masked(Objective):
    """Masked language modelling (Devlin et al., NAACL 2019, section 3.1): a fixed number of a row's text
    tokens, `rate` of them, are predicted; 80 % become the mask token, 10 % a random token, 10 % stay."""

    scores = "masked tokens"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, rate: float) -> None:
        if tokenizer.mask_token_id is None:
            name = tokenizer.name_or_path
            told = f"model.objective=masked is invalid: the tokenizer {name} has no mask token"
            raise ValueError(f"{told}. Allowed: model.objective=causal")
        self.rate, self.mask = rate, tokenizer.mask_token_id
        self.special = np.asarray(sorted(tokenizer.all_special_ids))
        self.plain = np.setdiff1d(np.arange(len(tokenizer)), self.special)

    def scored(self, sizes: Sizes) -> np.ndarray:
        return np.minimum(sizes.text, np.maximum(1, np.rint(self.rate * sizes.text))).astype(np.int64)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        return sizes.text

    def restored(self, batch: Batch) -> Batch:
        ids = batch["input_ids"]
        whole = ids.flatten().index_copy(0, batch["positions"], batch["targets"])
        return {**batch, "input_ids": whole.view_as(ids)}

    def tables(self, rows: Rows) -> Tables:
        ids, keys, length = rows.ids, rows.keys, rows.ids.shape[1]
        text = rows.present & ~np.isin(ids, self.special)
        lottery = np.where(text, draws(keys, length, stream=0), 2.0)
        chosen = lowest(lottery, self.scored(Sizes(text.sum(1), rows.lengths)))
        fate = draws(keys, length, stream=1)
        token = self.plain[(draws(keys, length, stream=2) * len(self.plain)).astype(np.int64)]
        inputs = np.where(chosen & (fate < 0.8), self.mask, ids)
        inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), token, inputs)
        columns = np.broadcast_to(np.arange(length), ids.shape)
        return Tables(inputs, rows.present, np.where(chosen, ids, UNSCORED), columns)


class Causal(Objective):
    """Next-token prediction: every token but the first of a row, or of a document if isolated."""

    causal = True
    scores = "all tokens"

    def scored(self, sizes: Sizes) -> np.ndarray:
        return sizes.all - (1 if sizes.documents is None else sizes.documents)

    def tables(self, rows: Rows) -> Tables:
        given = rows.present
        if rows.segments is not None:
            given[:, 1:] &= rows.segments[:, 1:] == rows.segments[:, :-1]
        return next_tokens(rows, given)


class Span(Objective):
    """Span corruption, the pre-training of T5 (Raffel et al., JMLR 2020, section 3.1.4; as its code has it).

    Of a row of n tokens, round(rate * n) are hidden in spans of `mean` tokens on average; texts x_k and
    holes alternate. The source is x_0 s_0 x_1 s_1 … </s> with sentinels s_k, the target s_0 hole_0 s_1
    hole_1 … </s>. Trained on is the whole target, scored are hidden tokens only. `start` is a decoder's
    first input."""

    scores = "hidden tokens, neither sentinels nor the end"

    def __init__(
        self, *, rate: float, mean: float, sentinels: Sequence[int], end: int, pad: int, start: int
    ) -> None:
        self.rate, self.mean, self.whole = rate, mean, True
        self.sentinels = np.asarray(sentinels, np.int64)
        self.end, self.pad, self.start = end, pad, start
        lengths = np.arange(2, int((len(self.sentinels) + 1) * mean / rate) + 2)
        self.longest = int(lengths[self.holes(lengths)[1] <= len(self.sentinels)].max(initial=1))

    @property
    def scoring(self) -> "Span":
        scoring = copy(self)
        scoring.whole = False
        return scoring

    def sides(self, length: int) -> tuple[int, int]:
        tokens, holes = (int(each[0]) for each in self.holes(np.array([length])))
        return length - tokens + holes + 1, tokens + holes + 1

    def holes(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hidden tokens and holes [B] of rows of such lengths, rounded in 32 bits as in T5's code."""
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

    def hidden(self, rows: Rows) -> np.ndarray:
        """Which tokens of rows, of at most `longest`, are hidden, [B, T]."""
        tokens, holes = self.holes(rows.lengths)
        width = rows.ids.shape[1]
        hidden = draw_composition(rows.keys, tokens, holes, stream=0)
        text = draw_composition(rows.keys, np.maximum(rows.lengths, 2) - tokens, holes, stream=1)
        ends = np.stack([text, hidden], axis=2).reshape(len(text), -1).cumsum(1)
        turns = np.zeros((len(text), width + 2), np.int64)
        np.add.at(turns, (np.arange(len(text))[:, None], np.minimum(ends, width + 1)), 1)
        return (turns.cumsum(1)[:, :width] % 2 == 1) & rows.present

    def tables(self, rows: Rows) -> Tables:
        def append(table: np.ndarray, value: int) -> np.ndarray:
            return np.concatenate([table, np.full((len(table), 1), value, table.dtype)], axis=1)

        count, width = rows.ids.shape
        number = lambda firsts: np.clip(firsts.cumsum(1) - 1, 0, len(self.sentinels) - 1)  # noqa: E731
        hidden = append(self.hidden(rows), False)
        ids, present = append(rows.ids, self.end), append(rows.present, False)
        ends = np.arange(width + 1) == rows.lengths[:, None]
        ids[ends] = self.end
        after = np.roll(hidden, 1, axis=1)  # whose first column is False: the appended token is not hidden
        opens, shows = hidden & ~after, present & ~hidden & after
        shows[:, 0] = True
        read, answers = (present & ~hidden) | opens | ends, hidden | shows | ends
        source = left_align(np.where(opens, self.sentinels[number(opens)], ids), read, filler=self.pad)
        target = left_align(np.where(shows, self.sentinels[number(shows)], ids), answers, filler=self.pad)
        learned = left_align((hidden | self.whole) & (present | ends), answers, filler=False)
        given = np.concatenate([np.full((count, 1), self.start), target[:, :-1]], axis=1)
        given[:, 1:][~left_align(answers, answers, filler=False)[:, 1:]] = self.pad
        text = np.arange(source.shape[1]) < read.sum(1)[:, None]
        # A hidden token stands for itself, a sentinel for the first of the next hole, the end for the last.
        own = np.where(hidden, np.arange(width + 1), width + 1)
        own = np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
        columns = left_align(np.minimum(own, rows.lengths[:, None] - 1), answers, filler=0)
        return Tables(source, text, np.where(learned, target, UNSCORED), columns, given)

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
        return read_instead(batch, ids.masked_fill(~present, self.pad), present)


class Answers(Objective):
    """Scores the answer of rows that have one (supervised tasks, instructions); rows of raw text keep the
    objective `raw`, and a batch of these alone its bits. `pad` is the padding id."""

    def __init__(self, raw: Objective, *, pad: int) -> None:
        self.raw, self.pad = raw, pad
        self.scores, self.longest = f"answers and their ends; of raw text {raw.scores}", raw.longest

    @property
    def scoring(self) -> "Answers":
        scoring = copy(self)
        scoring.raw = self.raw.scoring
        return scoring

    def most(self, length: int) -> int:
        return max(self.raw.most(length), length)

    def restored(self, batch: Batch) -> Batch:
        return self.raw.restored(batch)

    def scored(self, sizes: Sizes) -> np.ndarray:
        raw = self.raw.scored(sizes)
        return raw if sizes.answers is None else np.where(sizes.answers > 0, sizes.answers, raw)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        raw = self.raw.scorable(sizes)
        return raw if sizes.answers is None else np.where(sizes.answers > 0, sizes.answers, raw)

    def tables(self, rows: Rows) -> Tables:
        if rows.answers is None:
            return self.raw.tables(rows)
        answered = cast(np.ndarray, rows.answers.any(1))
        parts = [(answered, self.answer_tables(rows.some(answered)))] if answered.any() else []
        if not answered.all():
            alone = rows.some(~answered)
            parts.append((~answered, self.raw.tables(Rows(alone.ids, alone.lengths, alone.keys))))
        if len(parts) == 1:
            return parts[0][1]
        fillers, joined = (self.pad, False, UNSCORED, 0, self.pad), []
        columns = zip(*(vars(made).values() for _, made in parts), strict=True)
        for tables, filler in zip(columns, fillers, strict=True):
            if tables[0] is not None:
                whole = np.full((len(answered), max(t.shape[1] for t in tables)), filler, tables[0].dtype)
                for (own, _), table in zip(parts, tables, strict=True):
                    whole[own, : table.shape[1]] = table
                joined.append(whole)
        return Tables(*joined)

    @abstractmethod
    def answer_tables(self, rows: Rows) -> Tables:
        """What is predicted of rows that all have an answer."""


class CausalAnswers(Answers):
    """A decoder reads the question and predicts each token of the answer, and its end."""

    causal = True

    def __init__(self, raw: Objective, *, pad: int, sharing: Sharing | None = None) -> None:
        super().__init__(raw, pad=pad)
        self.sharing = sharing

    def answer_tables(self, rows: Rows) -> Tables:
        assert rows.answers is not None
        return next_tokens(rows, rows.answers)


class Seq2SeqAnswers(Answers):
    """The encoder reads the question, the decoder predicts the answer from itself shifted right."""

    raw: Span

    def __init__(self, raw: Span, *, pad: int, start: int) -> None:
        super().__init__(raw, pad=pad)
        self.start = start

    def sides(self, length: int) -> tuple[int, int | None]:
        read, written = self.raw.sides(length)  # raw text is longer where most of it is holes
        return max(length, read), max(length, written)

    def restored(self, batch: Batch) -> Batch:
        """Questions stay; in raw text what the model's own objective has hidden is restored."""
        sentinels = torch.from_numpy(self.raw.sentinels).to(batch["decoder_input_ids"].device)
        corrupted = torch.isin(batch["decoder_input_ids"], sentinels).any(1)  # rows with holes
        if not corrupted.any():
            return batch
        both = [self.raw.restored(batch), batch]
        width = max(each["input_ids"].shape[1] for each in both)
        wide = []
        for each in both:
            ids, more = each["input_ids"], (0, width - each["input_ids"].shape[1])
            mask = functional.pad(each.get("attention_mask", torch.ones_like(ids)), more)
            wide.append((functional.pad(ids, more, value=self.pad), mask))
        (ids, mask), (own, present) = wide
        chosen = corrupted[:, None]
        return read_instead(batch, torch.where(chosen, ids, own), torch.where(chosen, mask, present))

    def answer_tables(self, rows: Rows) -> Tables:
        assert rows.answers is not None
        asked = rows.present & ~rows.answers
        source, present = left_align(rows.ids, asked, filler=self.pad), left_align(asked, asked, filler=False)
        target = left_align(rows.ids, rows.answers, filler=self.pad)
        wanted = left_align(rows.answers, rows.answers, filler=False)
        given = np.concatenate([np.full((len(target), 1), self.start), target[:, :-1]], axis=1)
        given[:, 1:][~wanted[:, 1:]] = self.pad  # what follows the last label is padding
        columns = np.broadcast_to(np.arange(rows.ids.shape[1]), rows.ids.shape)
        columns = left_align(columns, rows.answers, filler=0)
        return Tables(source, present, np.where(wanted, target, UNSCORED), columns, given)


def next_tokens(rows: Rows, predicted: np.ndarray) -> Tables:
    """Each token where `predicted` [B, T] as the label of the place before it."""
    labels = np.full_like(rows.ids, UNSCORED)
    labels[:, :-1] = np.where(predicted[:, 1:], rows.ids[:, 1:], UNSCORED)
    columns = np.broadcast_to(np.arange(1, rows.ids.shape[1] + 1), rows.ids.shape)
    return Tables(rows.ids, rows.present, labels, columns)


def read_instead(batch: Batch, ids: Tensor, present: Tensor) -> Batch:
    """A batch with other ids [B, T] as its input, which are padding where not `present`."""
    rest = {name: value for name, value in batch.items() if name != "attention_mask"}
    made = cast(Batch, rest | {"input_ids": ids})
    return made if present.all() else {**made, "attention_mask": present.long()}


def lowest(lottery: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the `counts` [B] lowest numbers of each row are, [B, T]; the first of equal ones."""
    return lottery.argsort(1, kind="stable").argsort(1, kind="stable") < counts[:, None]


def draw_composition(keys: np.ndarray, totals: np.ndarray, parts: np.ndarray, *, stream: int) -> np.ndarray:
    """Uniform random compositions of totals [B] into `parts` [B] positive parts: lengths [B, P]."""
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
