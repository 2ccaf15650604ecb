"""Examples of an end task as token ids, and in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.randomness import key, shuffle
from cpt.evaluation.endtasks.tasks import Example, Settings
from cpt.models.loading import positions_of


@dataclass(frozen=True)
class Encoded:
    """Tokenised examples: ids and, where the tokenizer gives them, types, each a list of [T]
    int64; labels [N]."""

    ids: list[Tensor]
    types: list[Tensor] | None
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], *, pad: int, device: torch.device) -> dict[str, Tensor]:
        """Rows padded at their end to the longest of them: input_ids, attention_mask, perhaps token_type_ids
        [B, T], and labels [B]."""
        chosen = [self.ids[row] for row in rows]
        lengths = torch.tensor([len(ids) for ids in chosen])
        batch = {
            "input_ids": nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=pad),
            "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
            "labels": self.labels[torch.as_tensor(rows)],
        }
        if self.types is not None:
            types = [self.types[row] for row in rows]
            batch["token_type_ids"] = nn.utils.rnn.pad_sequence(types, batch_first=True)
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}

    def by_length(self, size: int) -> list[list[int]]:
        """Batches of all rows in which rows of near length stand together, the longest first."""
        order = sorted(range(len(self)), key=lambda row: -len(self.ids[row]))
        return [order[first : first + size] for first in range(0, len(order), size)]


def encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    classes: Sequence[str],
    types: bool,
) -> Encoded:
    """Examples as a tokenizer's own template has them, cut at the longer text to `length` tokens in all."""
    rows: list[dict[str, Any]] = [{}] * len(examples)
    for paired in (False, True):
        places = [place for place, each in enumerate(examples) if (each.text_pair is not None) == paired]
        if not places:
            continue
        texts = [[examples[place].text for place in places]]
        if paired:
            texts.append([examples[place].text_pair for place in places])
        found = tokenizer(*texts, truncation="longest_first", max_length=length, padding=False)
        for number, place in enumerate(places):
            rows[place] = {name: values[number] for name, values in found.items()}
    number_of = {name: number for number, name in enumerate(classes)}
    typed = types and any(any(row.get("token_type_ids", ())) for row in rows)
    return Encoded(
        ids=[torch.tensor(row["input_ids"]) for row in rows],
        types=[torch.tensor(row["token_type_ids"]) for row in rows] if typed else None,
        labels=torch.tensor([number_of[each.label] for each in examples]),
    )


def longest(model: PreTrainedModel, length: int) -> int:
    """The tokens of an example that a model takes, `length` at most: a prompt has positions too."""
    limit = positions_of(model)
    taken = sum(getattr(part, "positions_taken", 0) for part in model.modules())
    return length if limit is None else min(length, limit - taken)


def has_types(model: PreTrainedModel) -> bool:
    """Whether a model tells the two texts of a pair apart by token types."""
    return (getattr(model.config, "type_vocab_size", None) or 0) > 1


@dataclass(frozen=True)
class FineTuning:
    """A task's encoded splits, and what it takes to learn it: `dev` is None where nothing asks for it."""

    name: str
    train: Encoded
    dev: Encoded | None
    test: Encoded
    classes: int
    settings: Settings
    pad: int
    eval_batch_size: int

    @property
    def steps(self) -> int:
        return -(-len(self.train) // self.settings.batch_size) * self.settings.epochs

    def batches(self, seed: int, epoch: int) -> list[np.ndarray]:
        """Rows of an epoch's batches: a shuffle that is a function of task, seed and epoch; of `grouped`
        batches together the rows of near length share one, which saves padding."""
        size, stream = self.settings.batch_size, key("end task", self.name, seed, epoch)
        rows = shuffle(np.arange(len(self.train)), len(self.train), stream=stream)
        if self.settings.grouped == 1:
            return in_parts(rows, size)
        lengths = np.array([len(ids) for ids in self.train.ids])
        spans = [
            span[np.argsort(lengths[span], kind="stable")]
            for span in in_parts(rows, size * self.settings.grouped)
        ]
        batches = [batch for span in spans for batch in in_parts(span, size)]
        return [batches[place] for place in shuffle(np.arange(len(batches)), len(batches), stream=stream)]


def in_parts(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Rows in pieces of a size; the last has what is left."""
    return [rows[first : first + size] for first in range(0, len(rows), size)]
