"""What a language model has to predict, and how it is run to do so: from rows of token ids to logits.

This is the one place where a model is run on a batch, so that an objective may have a model of another
kind."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.randomness import draws
from cpt.data.collate import UNSCORED, Batch, Rows, Sharing, Sizes, label_batch
from cpt.models.forward import hidden_states, logits_and_hidden, nll_of
from cpt.models.isolation import by_sample, inputs_for


class Objective(ABC):
    """Makes batches and runs a model on them. `scored` counts ahead what `batch` will score, from each row's
    size alone."""

    scores: str  # in words: the tokens that the matrix is of
    causal = False  # whether a place sees only what stands before it
    sharing: Sharing | None = None  # of rows, by the samples of a batch that is learned from; None: none
    isolated = False  # whether documents share the rows of a text and do not meet

    @property
    def scoring(self) -> "Objective":
        """The objective by which held-out text is scored, where that is not all that is learned from."""
        return self

    @property
    def longest(self) -> int | None:
        """The longest row, in tokens; None: any."""
        return None

    def most(self, length: int) -> int:
        """The most places that are scored of a row of so many tokens."""
        return int(self.scored(Sizes.full(length))[0])

    def sides(self, length: int) -> tuple[int, int | None]:
        """How many places a row of so many tokens takes of a model's input, and of a decoder's; None: there
        is no decoder."""
        return length, None

    @abstractmethod
    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows, and for each scored place [K] which token of the rows it is there for: a place
        of their ids, flattened row after row."""

    @abstractmethod
    def scored(self, sizes: Sizes) -> np.ndarray:
        """Scored places per row, [B], of rows of such sizes."""

    @abstractmethod
    def scorable(self, sizes: Sizes) -> np.ndarray:
        """Tokens per row, [B], that the objective may score: what bits per byte are counted over."""

    @abstractmethod
    def uncorrupted(self, batch: Batch) -> Tensor:
        """The ids [B, T] of a batch as the text has them."""

    def restored(self, batch: Batch) -> Batch:
        """The batch with uncorrupted ids as its input."""
        return {**batch, "input_ids": self.uncorrupted(batch)}

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with a layout, where its samples are to share rows; else as it is. What of it there is to
        see stays: only the model is run on other rows."""
        return batch if self.sharing is None else self.sharing.lay_out(batch)

    def outputs(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [K, V] at the K scored positions of a batch, and the last hidden states [B, T, D] at all of
        them: of a decoder, where there is one."""
        inputs, places = inputs_for(model, batch, causal=self.causal)
        if places is None:
            return logits_and_hidden(model, inputs, positions=batch["positions"])
        logits, hidden = logits_and_hidden(model, inputs, positions=places[batch["positions"]])
        return logits, by_sample(hidden, places, batch)

    def encode(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """The last hidden states [B, T, D] of what a batch's model reads; neither a head nor a decoder is
        computed."""
        inputs, places = inputs_for(model, batch, causal=self.causal)
        hidden = hidden_states(model, inputs)
        return hidden if places is None else by_sample(hidden, places, batch)

    def nll(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Negative log-likelihood (nats) of the targets, [K]."""
        return nll_of(self.outputs(model, batch)[0], batch)


class Masked(Objective):
    """Masked language modelling (Devlin et al., NAACL 2019, section 3.1): `rate` of a row's text tokens are
    predicted; of these 80 % are replaced by the mask token, 10 % by a random token, 10 % stay. The number per
    row is fixed (rounded, at least 1), so that the batch's count of scored tokens is known before it is
    made."""

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
        counts = self.predicted(text.sum(1))
        chosen = lottery.argsort(1, kind="stable").argsort(1, kind="stable") < counts[:, None]
        fate = draws(keys, length, stream=1)
        token = self.plain[(draws(keys, length, stream=2) * len(self.plain)).astype(np.int64)]
        inputs = np.where(chosen & (fate < 0.8), self.mask, ids)
        inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), token, inputs)
        tables = map(torch.from_numpy, (inputs, np.where(chosen, ids, UNSCORED), rows.present))
        batch = label_batch(*tables, segments=segments_of(rows))
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
        following = np.full_like(rows.ids, UNSCORED)
        given = rows.present[:, 1:]
        if rows.segments is not None:
            given = given & (rows.segments[:, 1:] == rows.segments[:, :-1])
        following[:, :-1] = np.where(given, rows.ids[:, 1:], UNSCORED)
        tables = map(torch.from_numpy, (rows.ids, following, rows.present))
        batch = label_batch(*tables, segments=segments_of(rows))
        return batch, batch["positions"] + 1


def segments_of(rows: Rows) -> Tensor | None:
    """The document of each token [B, T], where documents are isolated."""
    return None if rows.segments is None else torch.from_numpy(rows.segments)
