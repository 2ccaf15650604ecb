"""Language modelling objectives, from rows of token ids to batches and logits: masked, causal, T5's span
corruption, and answers of supervised tasks. Models are run on batches here and nowhere else."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.exceptions import InvalidOptionError
from cpt.core.randomness import draw_uniforms
from cpt.data.collate import UNSCORED, Batch, Rows, Sharing, Sizes, label_batch
from cpt.models.block_attention import make_inputs, split_samples
from cpt.models.chunked_head import Logits, WeightedLoss, make_nll, run_model, sum_losses
from cpt.models.forward import hidden_states

Result = TypeVar("Result")


@dataclass(frozen=True)
class Tables:
    """A batch as tables: W is the width of the model's input, L of the labels."""

    ids: np.ndarray  # [B, W], of the model's input, the encoder's in an encoder-decoder
    is_token: np.ndarray  # [B, W], False at padding
    labels: np.ndarray  # [B, L], UNSCORED where nothing is predicted
    label_columns: np.ndarray  # [B, L], the column in the rows of tokens of the token that a label stands for
    decoder_ids: np.ndarray | None = None  # [B, L]


class Objective(ABC):
    """Makes batches and runs a model on them. `scored` says from sizes how many positions `batch` scores."""

    scores: str  # which tokens the performance matrix scores, in words
    longest: int | None = None  # the longest row in tokens; None: any
    causal = False  # whether a token sees only those that precede it
    sharing: Sharing | None = None  # of rows, by the samples of a training batch
    isolated = False  # whether documents share the rows of a text without attention between them
    max_logits: int | None = None  # computed at once; None: chunked_head.MAX_LOGITS

    @property
    def scoring(self) -> "Objective":
        """The objective of held-out text, where it scores less than is trained on."""
        return self

    def max_scored(self, length: int) -> int:
        """The largest number of scored positions in a row of `length` tokens."""
        sizes = Sizes(text=np.array([length]), all=np.array([length]))
        return int(self.scored(sizes)[0])

    def side_lengths(self, length: int) -> tuple[int, int | None]:
        """The lengths of a model's input and a decoder's for a row of `length` tokens; None: no decoder."""
        return length, None

    @abstractmethod
    def make_tables(self, rows: Rows) -> Tables:
        """The model's input for rows, and the labels that it is to predict."""

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows, and for each scored position [K] its token's position in their flattened ids."""
        tables = self.make_tables(rows)
        batch = label_batch(
            torch.from_numpy(tables.ids),
            torch.from_numpy(tables.labels),
            torch.from_numpy(tables.is_token),
            decoder_input_ids=None if tables.decoder_ids is None else torch.from_numpy(tables.decoder_ids),
            segments=None if rows.segments is None else torch.from_numpy(rows.segments),
        )
        num_rows, length = rows.ids.shape
        positions = np.arange(num_rows)[:, None] * length + tables.label_columns
        return batch, torch.from_numpy(positions[tables.labels != UNSCORED])

    @abstractmethod
    def scored(self, sizes: Sizes) -> np.ndarray:
        """The number of scored positions of each row, [B], for rows of some sizes."""

    def count_read(self, sizes: Sizes) -> np.ndarray:
        """The tokens of each row that a model reads, [2, B]: its encoder or body, and its decoder, 0 without
        an encoder."""
        return np.stack([sizes.all, np.zeros_like(sizes.all)])

    def scorable(self, sizes: Sizes) -> np.ndarray:
        """The number of tokens of each row, [B], that may be scored: bits per byte are counted over them."""
        return sizes.all if sizes.inserted is None else sizes.all - sizes.inserted

    def restore(self, batch: Batch) -> Batch:
        """The batch with the original ids [B, T] as its input."""
        return batch

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with a layout where its samples share rows; only the model's input changes."""
        return batch if self.sharing is None else self.sharing.lay_out(batch)

    def outputs(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [K, V] at the scored positions, and the last hidden states [B, T, D], a decoder's if any."""
        return self.run(model, batch, lambda logits: logits.select(slice(None)))

    def encode(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """The last hidden states [B, T, D] of the model's input, without a head or a decoder."""
        inputs, layout_positions = make_inputs(model, batch, causal=self.causal)
        return split_samples(hidden_states(model, inputs), layout_positions, batch)

    def run(
        self, model: PreTrainedModel, batch: Batch, use: Callable[[Logits], Result]
    ) -> tuple[Result, Tensor]:
        """What becomes of the logits at the scored positions, which may be too many to be one tensor, and the
        last hidden states [B, T, D], a decoder's if any."""
        inputs, layout_positions = make_inputs(model, batch, causal=self.causal)
        positions = batch["positions"]
        if layout_positions is not None:
            positions = layout_positions[positions]
        result, hidden = run_model(model, inputs, positions=positions, use=use, max_logits=self.max_logits)
        return result, split_samples(hidden, layout_positions, batch)

    def keep_logits(self, model: PreTrainedModel, batch: Batch) -> tuple[Logits, Tensor]:
        """The logits at the scored positions, without gradients, for when the model has other weights, and
        the last hidden states [B, T, D], a decoder's if any."""
        return self.run(model, batch, lambda logits: logits.keep())

    def nll(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Negative log-likelihood (nats) of the targets, [K]."""
        nll, _ = self.run(model, batch, lambda logits: logits.values(make_nll(batch)))
        return nll

    def sum_nll(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """The sum of `nll`, a scalar, for one backward pass; faster than the sum of what `nll` returns."""
        sums, _ = self.sum_losses(model, batch, {"lm": WeightedLoss(make_nll(batch))})
        return sums["lm"]

    def sum_losses(
        self, model: PreTrainedModel, batch: Batch, losses: Mapping[str, WeightedLoss]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The sums of losses over the scored positions, scalars for one backward pass, and the last hidden
        states [B, T, D], a decoder's if any."""
        return self.run(model, batch, lambda logits: sum_losses(logits, losses))


class Masked(Objective):
    """Masked language modelling (Devlin et al., NAACL 2019, section 3.1): a fixed number of a row's text
    tokens, `rate` of them, are predicted; 80 % become the mask token, 10 % a random token, 10 % stay."""

    scores = "masked tokens"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, rate: float) -> None:
        if tokenizer.mask_token_id is None:
            raise InvalidOptionError(
                "model.objective",
                "masked",
                reason=f"the tokenizer {tokenizer.name_or_path} has no mask token",
                allowed="model.objective=causal",
            )
        self.rate = rate
        self.mask_id = tokenizer.mask_token_id
        self.special_ids = np.asarray(sorted(tokenizer.all_special_ids))
        self.plain_ids = np.setdiff1d(np.arange(len(tokenizer)), self.special_ids)

    def scored(self, sizes: Sizes) -> np.ndarray:
        return np.minimum(sizes.text, np.maximum(1, np.rint(self.rate * sizes.text))).astype(np.int64)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        return sizes.text

    def restore(self, batch: Batch) -> Batch:
        ids = batch["input_ids"]
        original = ids.flatten().index_copy(0, batch["positions"], batch["targets"])
        return {**batch, "input_ids": original.view_as(ids)}

    def make_tables(self, rows: Rows) -> Tables:
        ids = rows.ids
        length = ids.shape[1]
        is_text = rows.is_token & ~np.isin(ids, self.special_ids)
        lottery = np.where(is_text, draw_uniforms(rows.keys, length, stream=0), 2.0)  # draws are below 1
        is_predicted = mark_lowest(lottery, self.scored(Sizes(is_text.sum(1), rows.lengths)))

        corruption = draw_uniforms(rows.keys, length, stream=1)
        choices = (draw_uniforms(rows.keys, length, stream=2) * len(self.plain_ids)).astype(np.int64)
        inputs = np.where(is_predicted & (corruption < 0.8), self.mask_id, ids)
        is_random = is_predicted & (corruption >= 0.8) & (corruption < 0.9)
        inputs = np.where(is_random, self.plain_ids[choices], inputs)

        labels = np.where(is_predicted, ids, UNSCORED)
        own_columns = np.broadcast_to(np.arange(length), ids.shape)
        return Tables(ids=inputs, is_token=rows.is_token, labels=labels, label_columns=own_columns)


class Causal(Objective):
    """Next-token prediction: every token but the first of a row, or of a document if isolated."""

    causal = True
    scores = "all tokens"

    def scored(self, sizes: Sizes) -> np.ndarray:
        first_tokens = 1 if sizes.documents is None else sizes.documents
        return sizes.all - first_tokens

    def make_tables(self, rows: Rows) -> Tables:
        is_predicted = rows.is_token
        if rows.segments is not None:
            is_predicted[:, 1:] &= rows.segments[:, 1:] == rows.segments[:, :-1]
        return label_next_tokens(rows, is_predicted)


class Span(Objective):
    """Span corruption, the pre-training of T5 (Raffel et al., JMLR 2020, section 3.1.4; as its code has it).

    In a row of n tokens, round(rate * n) are hidden, in spans of `mean` tokens on average; texts x_k and
    holes alternate. The source is x_0 s_0 x_1 s_1 … </s> with sentinels s_k, the target s_0 hole_0 s_1 hole_1
    … </s>. Trained on is the whole target, scored are hidden tokens only. `start` is a decoder's first
    input."""

    scores = "hidden tokens, neither sentinels nor the end"

    def __init__(
        self, *, rate: float, mean: float, sentinels: Sequence[int], end: int, pad: int, start: int
    ) -> None:
        self.rate = rate
        self.mean = mean
        self.learns_sentinels = True
        self.sentinels = np.asarray(sentinels, np.int64)
        self.end = end
        self.pad = pad
        self.start = start

        lengths = np.arange(2, int((len(self.sentinels) + 1) * mean / rate) + 2)
        _, num_holes = self.count_holes(lengths)
        self.longest = int(lengths[num_holes <= len(self.sentinels)].max(initial=1))

    @property
    def scoring(self) -> "Span":
        scoring = copy(self)
        scoring.learns_sentinels = False
        return scoring

    def side_lengths(self, length: int) -> tuple[int, int]:
        num_hidden, num_holes = self.count_holes(np.array([length]))
        hidden = int(num_hidden[0])
        holes = int(num_holes[0])
        return length - hidden + holes + 1, hidden + holes + 1

    def count_holes(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hidden tokens and holes [B] of rows of such lengths, rounded in 32 bits as in T5's code."""
        lengths = np.maximum(lengths, 2)
        products = np.float32(self.rate) * lengths.astype(np.float32)
        num_hidden = np.clip(np.rint(products), 1, lengths - 1).astype(np.int64)
        means = num_hidden.astype(np.float32) / np.float32(self.mean)
        num_holes = np.maximum(1, np.rint(means)).astype(np.int64)
        return num_hidden, np.minimum(num_holes, lengths - num_hidden)

    def scored(self, sizes: Sizes) -> np.ndarray:
        num_hidden, num_holes = self.count_holes(sizes.all)
        scored = np.where(sizes.all > 1, num_hidden, 0)
        return scored + num_holes + 1 if self.learns_sentinels else scored

    def count_read(self, sizes: Sizes) -> np.ndarray:
        num_hidden, num_holes = self.count_holes(sizes.all)
        # Nothing of a single token is hidden, and its target has a sentinel nonetheless.
        has_holes = sizes.all > 1
        num_hidden = np.where(has_holes, num_hidden, 0)
        num_source = sizes.all - num_hidden + np.where(has_holes, num_holes, 0) + 1
        return np.stack([num_source, num_hidden + num_holes + 1])

    def draw_hidden(self, rows: Rows) -> np.ndarray:
        """Which tokens of rows, of at most `longest`, are hidden, [B, T]."""
        num_hidden, num_holes = self.count_holes(rows.lengths)
        num_shown = np.maximum(rows.lengths, 2) - num_hidden
        hole_lengths = draw_composition(rows.keys, num_hidden, num_holes, stream=0)
        text_lengths = draw_composition(rows.keys, num_shown, num_holes, stream=1)

        # Texts and holes alternate: a token is hidden after an odd number of their ends.
        num_rows, width = rows.ids.shape
        ends = np.stack([text_lengths, hole_lengths], axis=2).reshape(num_rows, -1).cumsum(1)
        num_ends = np.zeros((num_rows, width + 2), np.int64)
        np.add.at(num_ends, (np.arange(num_rows)[:, None], np.minimum(ends, width + 1)), 1)
        return (num_ends.cumsum(1)[:, :width] % 2 == 1) & rows.is_token

    def make_tables(self, rows: Rows) -> Tables:
        """The source with its holes, the target that fills them, and the decoder's input. With `scoring`,
        sentinels and the end have no label."""
        # A column more: the end of the longest row.
        width = rows.ids.shape[1] + 1
        ids = append_column(rows.ids, self.end)
        is_token = append_column(rows.is_token, False)
        is_hidden = append_column(self.draw_hidden(rows), False)
        is_end = np.arange(width) == rows.lengths[:, None]
        ids[is_end] = self.end

        # In the source a sentinel replaces the first token of each hole, in the target the first token of
        # each kept text: sentinel k stands for hole k in the source, and precedes it in the target.
        follows_hidden = np.roll(is_hidden, 1, axis=1)  # the last column, which becomes the first, is False
        opens_hole = is_hidden & ~follows_hidden
        opens_text = is_token & ~is_hidden & follows_hidden
        opens_text[:, 0] = True
        in_source = (is_token & ~is_hidden) | opens_hole | is_end
        in_target = is_hidden | opens_text | is_end
        source_ids = np.where(opens_hole, self.number_sentinels(opens_hole), ids)
        target_ids = np.where(opens_text, self.number_sentinels(opens_text), ids)
        source = left_align(source_ids, in_source, filler=self.pad)
        target = left_align(target_ids, in_target, filler=self.pad)
        is_source = left_align(in_source, in_source, filler=False)

        is_learned = is_hidden
        if self.learns_sentinels:
            is_learned = is_token | is_end
        labels = np.where(left_align(is_learned, in_target, filler=False), target, UNSCORED)
        is_target = left_align(in_target, in_target, filler=False)
        decoder_ids = shift_right(target, is_target, start=self.start, pad=self.pad)

        # A hidden token stands for itself, a sentinel for the first token of the hole that follows it, and
        # the end for the last token of the row.
        last_columns = rows.lengths[:, None] - 1
        columns = np.minimum(find_next_column(is_hidden), last_columns)
        label_columns = left_align(columns, in_target, filler=0)
        return Tables(
            ids=source,
            is_token=is_source,
            labels=labels,
            label_columns=label_columns,
            decoder_ids=decoder_ids,
        )

    def number_sentinels(self, opens: np.ndarray) -> np.ndarray:
        """The sentinel of each column [B, T], the k-th from the k-th that `opens` on."""
        numbers = np.clip(opens.cumsum(1) - 1, 0, len(self.sentinels) - 1)
        return cast(np.ndarray, self.sentinels[numbers])

    def restore(self, batch: Batch) -> Batch:
        """The batch with the original text as its input: source and target joined at their sentinels. The
        decoder's input stays."""
        source = batch["input_ids"]
        target = batch["decoder_input_ids"][:, 1:]
        sentinels = torch.from_numpy(self.sentinels).to(source.device)
        opens_hole = torch.isin(source, sentinels)
        opens_text = torch.isin(target, sentinels)

        # Only tokens of the text are taken: no sentinels and no padding, and of the source no end. The target
        # has its end only as a label, which the decoder does not read.
        lengths = batch.get("attention_mask", torch.ones_like(source)).sum(1, keepdim=True)
        positions = torch.arange(source.shape[1], device=source.device)
        is_source_text = (positions < lengths - 1) & ~opens_hole
        is_target_text = (target != self.pad) & ~opens_text
        is_text = torch.cat([is_source_text, is_target_text], dim=1)

        # Tokens are sorted by keys: those of text k have the key 2 k, those of hole k, which follows it, the
        # key 2 k + 1. In the source k sentinels precede text k, in the target k + 1 precede hole k.
        source_keys = 2 * opens_hole.cumsum(1)
        target_keys = 2 * opens_text.cumsum(1) - 1
        key_of_dropped = 2 * len(self.sentinels) + 2  # above all others
        order_keys = torch.cat([source_keys, target_keys], dim=1).masked_fill(~is_text, key_of_dropped)
        order = order_keys.argsort(dim=1, stable=True)

        num_tokens = is_text.sum(1, keepdim=True)
        width = int(num_tokens.max())
        ids = torch.cat([source, target], dim=1).gather(1, order)[:, :width]
        is_token = torch.arange(width, device=source.device) < num_tokens
        return replace_input(batch, ids.masked_fill(~is_token, self.pad), is_token)


class Answers(Objective):
    """Scores the answer of rows that have one (supervised tasks, instructions); rows of raw text keep the
    objective `raw`, and a batch of these alone its bits. `pad` is the padding id."""

    def __init__(self, raw: Objective, *, pad: int) -> None:
        self.raw = raw
        self.pad = pad
        self.scores = f"answers and their ends; of raw text {raw.scores}"
        self.longest = raw.longest

    @property
    def scoring(self) -> "Answers":
        scoring = copy(self)
        scoring.raw = self.raw.scoring
        return scoring

    def max_scored(self, length: int) -> int:
        return max(self.raw.max_scored(length), length)

    def restore(self, batch: Batch) -> Batch:
        return self.raw.restore(batch)

    def scored(self, sizes: Sizes) -> np.ndarray:
        scored = self.raw.scored(sizes)
        if sizes.answers is None:
            return scored
        return np.where(sizes.answers > 0, sizes.answers, scored)

    def scorable(self, sizes: Sizes) -> np.ndarray:
        scorable = self.raw.scorable(sizes)
        if sizes.answers is None:
            return scorable
        return np.where(sizes.answers > 0, sizes.answers, scorable)

    def make_tables(self, rows: Rows) -> Tables:
        if rows.answers is None:
            return self.raw.make_tables(rows)
        is_answered = cast(np.ndarray, rows.answers.any(1))
        if is_answered.all():
            return self.make_answer_tables(rows.some(is_answered))

        raw_rows = rows.some(~is_answered)
        raw_tables = self.raw.make_tables(
            Rows(ids=raw_rows.ids, lengths=raw_rows.lengths, keys=raw_rows.keys, segments=raw_rows.segments)
        )
        if not is_answered.any():
            return raw_tables
        answer_tables = self.make_answer_tables(rows.some(is_answered))
        return join_tables(answer_tables, raw_tables, is_answered, pad=self.pad)

    @abstractmethod
    def make_answer_tables(self, rows: Rows) -> Tables:
        """What is predicted of rows that all have an answer."""


class CausalAnswers(Answers):
    """A decoder reads the question and predicts each token of the answer, and its end."""

    causal = True

    def __init__(self, raw: Objective, *, pad: int, sharing: Sharing | None = None) -> None:
        super().__init__(raw, pad=pad)
        self.sharing = sharing

    def make_answer_tables(self, rows: Rows) -> Tables:
        assert rows.answers is not None
        return label_next_tokens(rows, rows.answers)


class CausalMixture(CausalAnswers):
    """Raw text, with which chats of other sources are mixed while it is trained on: of these the answers are
    scored. Held-out text is raw."""

    def __init__(self, raw: Causal, *, pad: int) -> None:
        super().__init__(raw, pad=pad)
        self.scores = raw.scores
        self.isolated = raw.isolated

    @property
    def scoring(self) -> Objective:  # type: ignore[override]  # not of answers
        return self.raw.scoring


class Seq2SeqAnswers(Answers):
    """The encoder reads the question, the decoder predicts the answer from itself shifted right."""

    raw: Span

    def __init__(self, raw: Span, *, pad: int, start: int) -> None:
        super().__init__(raw, pad=pad)
        self.start = start

    def side_lengths(self, length: int) -> tuple[int, int | None]:
        source_length, target_length = self.raw.side_lengths(length)
        # Raw text is longer where most of it is holes.
        return max(length, source_length), max(length, target_length)

    def count_read(self, sizes: Sizes) -> np.ndarray:
        of_raw_text = self.raw.count_read(sizes)
        if sizes.answers is None:
            return of_raw_text
        of_answers = np.stack([sizes.all - sizes.answers, sizes.answers])
        return np.where(sizes.answers > 0, of_answers, of_raw_text)

    def restore(self, batch: Batch) -> Batch:
        """Questions stay; in raw text what the model's own objective has hidden is restored."""
        decoder_ids = batch["decoder_input_ids"]
        sentinels = torch.from_numpy(self.raw.sentinels).to(decoder_ids.device)
        has_holes = torch.isin(decoder_ids, sentinels).any(1)
        if not has_holes.any():
            return batch

        restored = self.raw.restore(batch)
        width = max(restored["input_ids"].shape[1], batch["input_ids"].shape[1])
        restored_ids, restored_mask = self.widen_input(restored, width)
        ids, mask = self.widen_input(batch, width)
        is_restored = has_holes[:, None]
        return replace_input(
            batch,
            torch.where(is_restored, restored_ids, ids),
            torch.where(is_restored, restored_mask, mask),
        )

    def widen_input(self, batch: Batch, width: int) -> tuple[Tensor, Tensor]:
        """The ids of a batch and their attention mask, padded to [B, width]."""
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        padding = (0, width - ids.shape[1])
        return functional.pad(ids, padding, value=self.pad), functional.pad(mask, padding)

    def make_answer_tables(self, rows: Rows) -> Tables:
        assert rows.answers is not None
        in_question = rows.is_token & ~rows.answers
        source = left_align(rows.ids, in_question, filler=self.pad)
        is_source = left_align(in_question, in_question, filler=False)

        target = left_align(rows.ids, rows.answers, filler=self.pad)
        is_target = left_align(rows.answers, rows.answers, filler=False)
        decoder_ids = shift_right(target, is_target, start=self.start, pad=self.pad)

        labels = np.where(is_target, target, UNSCORED)
        row_columns = np.broadcast_to(np.arange(rows.ids.shape[1]), rows.ids.shape)
        label_columns = left_align(row_columns, rows.answers, filler=0)
        return Tables(
            ids=source,
            is_token=is_source,
            labels=labels,
            label_columns=label_columns,
            decoder_ids=decoder_ids,
        )


def label_next_tokens(rows: Rows, is_predicted: np.ndarray) -> Tables:
    """Tables in which each token where `is_predicted` [B, T] is the label of the position before it."""
    labels = np.full_like(rows.ids, UNSCORED)
    labels[:, :-1] = np.where(is_predicted[:, 1:], rows.ids[:, 1:], UNSCORED)
    next_columns = np.broadcast_to(np.arange(1, rows.ids.shape[1] + 1), rows.ids.shape)
    return Tables(ids=rows.ids, is_token=rows.is_token, labels=labels, label_columns=next_columns)


def join_tables(answers: Tables, raw: Tables, is_answered: np.ndarray, *, pad: int) -> Tables:
    """The tables of a batch [B, …] from those of its rows where `is_answered` [B], and of the others."""

    def join(answer_table: np.ndarray, raw_table: np.ndarray, filler: int) -> np.ndarray:
        width = max(answer_table.shape[1], raw_table.shape[1])
        table = np.full((len(is_answered), width), filler, answer_table.dtype)
        table[is_answered, : answer_table.shape[1]] = answer_table
        table[~is_answered, : raw_table.shape[1]] = raw_table
        return table

    decoder_ids = None
    if answers.decoder_ids is not None and raw.decoder_ids is not None:
        decoder_ids = join(answers.decoder_ids, raw.decoder_ids, pad)
    return Tables(
        ids=join(answers.ids, raw.ids, pad),
        is_token=join(answers.is_token, raw.is_token, False),
        labels=join(answers.labels, raw.labels, UNSCORED),
        label_columns=join(answers.label_columns, raw.label_columns, 0),
        decoder_ids=decoder_ids,
    )


def replace_input(batch: Batch, ids: Tensor, is_token: Tensor) -> Batch:
    """A batch with other ids [B, T] as its input, which are padding where not `is_token`."""
    unchanged = {name: value for name, value in batch.items() if name != "attention_mask"}
    replaced = cast(Batch, {**unchanged, "input_ids": ids})
    if not is_token.all():
        replaced["attention_mask"] = is_token.long()
    return replaced


def mark_lowest(lottery: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the lowest numbers of each row are, `counts` [B] of them, [B, T]; of equal ones the first."""
    # Sorting twice gives the rank of each number in its row.
    ranks = lottery.argsort(1, kind="stable").argsort(1, kind="stable")
    return cast(np.ndarray, ranks < counts[:, None])


def draw_composition(keys: np.ndarray, totals: np.ndarray, parts: np.ndarray, *, stream: int) -> np.ndarray:
    """Uniform random compositions of totals [B] into `parts` [B] positive parts: lengths [B, P]."""
    # A part ends between two units where the lottery is lowest.
    num_rows = len(totals)
    num_gaps = int(totals.max(initial=1)) - 1
    is_gap = np.arange(num_gaps) < (totals - 1)[:, None]
    lottery = np.where(is_gap, draw_uniforms(keys, num_gaps, stream=stream), 2.0)
    is_cut = mark_lowest(lottery, parts - 1)

    # Each unit counts for its part: its number is the number of cuts before it.
    part_numbers = np.concatenate([np.zeros((num_rows, 1), np.int64), is_cut.cumsum(1)], axis=1)
    is_unit = np.arange(num_gaps + 1) < totals[:, None]
    lengths = np.zeros((num_rows, parts.max(initial=1)), np.int64)
    np.add.at(lengths, (np.arange(num_rows)[:, None], part_numbers), is_unit)
    return lengths


def left_align(values: np.ndarray, is_chosen: np.ndarray, *, filler: int) -> np.ndarray:
    """The chosen values of each row [B, T] at its front, [B, W], filled up at the end."""
    width = is_chosen.sum(1).max(initial=0)
    table = np.full((len(values), width), filler, values.dtype)
    # The k-th chosen value of a row goes to its column k.
    row_indices = is_chosen.nonzero()[0]
    column_indices = is_chosen.cumsum(1)[is_chosen] - 1
    table[row_indices, column_indices] = values[is_chosen]
    return table


def find_next_column(is_wanted: np.ndarray) -> np.ndarray:
    """For each column of a table [B, T] the first one from it on where `is_wanted`, [B, T]; T without any."""
    width = is_wanted.shape[1]
    wanted_columns = np.where(is_wanted, np.arange(width), width)
    # The smallest of all that follow: a running minimum from the right.
    from_the_right = wanted_columns[:, ::-1]
    return np.minimum.accumulate(from_the_right, axis=1)[:, ::-1]


def shift_right(target: np.ndarray, is_target: np.ndarray, *, start: int, pad: int) -> np.ndarray:
    """A decoder's input [B, L]: `start`, then the target without its last token; padding after it."""
    shifted = np.concatenate([np.full((len(target), 1), start), target[:, :-1]], axis=1)
    shifted[:, 1:][~is_target[:, 1:]] = pad  # the decoder does not read the last token
    return shifted


def append_column(table: np.ndarray, value: int) -> np.ndarray:
    """The table [B, T] with a column of one value at its end, [B, T + 1]."""
    column = np.full((len(table), 1), value, table.dtype)
    return np.concatenate([table, column], axis=1)
