"""A model asked the questions of a task: which of the choices it finds likeliest, and what it writes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.data.batch import Batch, Rows
from cpt.models.objectives import Objective


@dataclass(frozen=True)
class Question:
    """An example as a model is asked it."""

    id: str
    prompt: list[int]  # the ids that the answer is written behind
    reference: str
    choices: tuple[str, ...]  # none where any text may be right
    answers: tuple[list[int], ...]  # the ids of each choice, with the end
    end: int  # the token that ends an answer
    text: str = ""  # what is asked about


@torch.no_grad()
def rank_choices(
    model: PreTrainedModel,
    objective: Objective,
    questions: Sequence[Question],
    *,
    batch_size: int,
    step: Callable[[int], object],
) -> tuple[list[str], list[str]]:
    """For each question the choice of the largest sum_t log p(choice_t, end | question), and that of the
    largest mean over t; of equal ones the first. `step` is told of questions done."""
    pairs = [(number, place) for number, each in enumerate(questions) for place in range(len(each.answers))]
    sums: dict[tuple[int, int], float] = {}
    lengths = {
        (number, place): len(questions[number].prompt) + len(questions[number].answers[place])
        for number, place in pairs
    }
    for chosen in in_batches(sorted(pairs, key=lengths.__getitem__), batch_size):
        rows = [(questions[number].prompt, questions[number].answers[place]) for number, place in chosen]
        batch, _ = objective.batch(rows_of(rows))
        found = sum_by_row(objective.nll(model, to_device(batch, model.device)), batch["rows"], len(rows))
        sums |= dict(zip(chosen, found.tolist(), strict=True))
        step(len(chosen))
    best, best_mean = [], []
    for number, each in enumerate(questions):
        nll = np.array([sums[number, place] for place in range(len(each.answers))])
        tokens = np.array([len(answer) for answer in each.answers])
        best.append(each.choices[int(nll.argmin())])
        best_mean.append(each.choices[int((nll / tokens).argmin())])
    return best, best_mean


def rows_of(pairs: Sequence[tuple[list[int], list[int]]]) -> Rows:
    """Rows of prompts and answers; nothing of such a row is drawn."""
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in pairs])
    ids = np.zeros((len(pairs), lengths.max()), np.int64)
    answers = np.zeros(ids.shape, bool)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : lengths[row]] = prompt + answer
        answers[row, len(prompt) : lengths[row]] = True
    return Rows(ids, lengths, np.zeros(len(pairs), np.uint64), answers)


def sum_by_row(nll: Tensor, rows: Tensor, count: int) -> Tensor:
    """The sums [B] of what belongs to each row."""
    sums = torch.zeros(count, dtype=torch.double, device=nll.device)
    return sums.index_add(0, rows.to(nll.device), nll.double())


@torch.no_grad()
def write_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    most: int,
    batch_size: int,
    step: Callable[[int], object],
) -> list[str]:
    """What the model writes to each question by greedy decoding: at most so many tokens, to the one that ends
    an answer, without special tokens. Prompts are padded on the left for a causal model, on the right for an
    encoder."""
    order = sorted(range(len(questions)), key=lambda number: len(questions[number].prompt))
    end = questions[0].end
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    how = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        eos_token_id=end,
        pad_token_id=padding,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    seq2seq = model.config.is_encoder_decoder
    written: dict[int, str] = {}
    for chosen in in_batches(order, batch_size):
        prompts = [questions[number].prompt for number in chosen]
        inputs = pad_prompts(prompts, padding=padding, left=not seq2seq)
        found = model.generate(**to_device(inputs, model.device), generation_config=how)
        found = found[:, 0 if seq2seq else inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        written |= {number: text.strip() for number, text in zip(chosen, texts, strict=True)}
        step(len(chosen))
    return [written[number] for number in range(len(questions))]


def pad_prompts(prompts: Sequence[list[int]], *, padding: int, left: bool) -> dict[str, Tensor]:
    """Prompts as ids and mask, [B, T]."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), padding), torch.zeros((len(prompts), width)).long()
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


def to_device(batch: Batch | dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def in_batches(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[at : at + size] for at in range(0, len(items), size))
