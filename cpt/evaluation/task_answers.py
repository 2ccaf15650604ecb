"""A model asked the questions of a task: which of the choices it finds likeliest, and what it writes.

The batches are a function of the questions; several processes share them out, each those of its `share`: rank
r of w has batches r, r + w, … So the answers do not change with the number of processes."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.data.collate import Batch, Rows
from cpt.data.tokenized_tasks import TaskPrompt
from cpt.evaluation.finetune import longest
from cpt.models.forward import is_written_whole, set_temporarily
from cpt.models.objectives import Objective

Sums = Mapping[tuple[int, int], float]  # nats of a choice and its end, by the numbers of question and choice


@torch.no_grad()
def score_choices(
    model: PreTrainedModel,
    objective: Objective,
    questions: Sequence[TaskPrompt],
    *,
    batch_size: int,
    step: Callable[[int], object],
    share: tuple[int, int] = (0, 1),
) -> Sums:
    """-sum_t log p(choice_t, end | question) of each choice; `step` is called with the number done."""
    pairs = [(number, place) for number, each in enumerate(questions) for place in range(len(each.choices))]
    pairs.sort(key=lambda pair: len(questions[pair[0]].ids) + len(questions[pair[0]].choices[pair[1]]))
    sums: dict[tuple[int, int], float] = {}
    batches = [pairs[at : at + batch_size] for at in range(0, len(pairs), batch_size)]
    for chosen in batches[share[0] :: share[1]]:
        rows = [(questions[number].ids, questions[number].choices[place]) for number, place in chosen]
        lengths = np.array([len(prompt) + len(answer) for prompt, answer in rows])
        ids = np.zeros((len(rows), lengths.max()), np.int64)
        answers = np.zeros(ids.shape, bool)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : lengths[row]] = prompt + answer
            answers[row, len(prompt) : lengths[row]] = True
        batch, _ = objective.batch(Rows(ids, lengths, np.zeros(len(rows), np.uint64), answers))
        moved = {name: cast(Tensor, value).to(model.device) for name, value in batch.items()}
        nll = objective.nll(model, cast(Batch, moved))
        found = torch.zeros(len(rows), dtype=torch.double, device=nll.device)
        found.index_add_(0, batch["rows"].to(nll.device), nll.double())
        sums |= dict(zip(chosen, found.tolist(), strict=True))
        step(len(chosen))
    return sums


def rank_choices(questions: Sequence[TaskPrompt], sums: Sums) -> tuple[list[str], list[str]]:
    """For each question the choice of the largest sum_t log p(choice_t, end | question), and that of the
    largest mean over t; of equal ones the first."""
    best, best_mean = [], []
    for number, each in enumerate(questions):
        nll = np.array([sums[number, place] for place in range(len(each.choices))])
        best.append(each.example.choices[nll.argmin()])
        best_mean.append(each.example.choices[(nll / [*map(len, each.choices)]).argmin()])
    return best, best_mean


@torch.no_grad()
def write_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[TaskPrompt],
    *,
    most: int,
    batch_size: int,
    step: Callable[[int], object],
    share: tuple[int, int] = (0, 1),
) -> dict[int, str]:
    """What the model writes to each question of a share, by its number, by greedy decoding: at most `most`
    tokens, to the one that ends an answer, without special tokens. Prompts are padded on the left for a
    causal model, on the right for an encoder; of a causal model with a part that takes rows of its own
    (`written_whole`) those of one length go together, and nothing is cached."""

    def length(number: int) -> int:
        return len(questions[number].ids)

    numbers = sorted(range(len(questions)), key=length)
    batches = [numbers[at : at + batch_size] for at in range(0, len(numbers), batch_size)]
    seq2seq, whole = model.config.is_encoder_decoder, is_written_whole(model)
    if whole:
        batches = [list(alike) for batch in batches for _, alike in groupby(batch, key=length)]
    end, padding = questions[0].reference[-1], tokenizer.pad_token_id
    padding = end if padding is None else padding
    start = getattr(model.config, "decoder_start_token_id", None)
    special = {"eos_token_id": end, "pad_token_id": padding, "decoder_start_token_id": start}
    how = {"do_sample": False, "num_beams": 1, "use_cache": not whole, **special}
    written: dict[int, str] = {}
    for chosen in batches[share[0] :: share[1]]:
        prompts = [questions[number].ids for number in chosen]
        width = max(map(len, prompts))
        ids, mask = torch.full((len(prompts), width), padding), torch.zeros((len(prompts), width)).long()
        for row, prompt in enumerate(prompts):
            place = slice(0, len(prompt)) if seq2seq else slice(width - len(prompt), width)
            ids[row, place], mask[row, place] = torch.tensor(prompt), 1
        room = most if seq2seq else max(1, longest(model, width + most) - width)  # of the model's positions
        config = GenerationConfig(max_new_tokens=room, **how)
        with set_temporarily((model, "generation_config", config)):  # and not the checkpoint's own
            found = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
        found = found[:, 0 if seq2seq else width :]
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        written |= {number: text.strip() for number, text in zip(chosen, texts, strict=True)}
        step(len(chosen))
    return written
