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
from cpt.models.forward import set_temporarily, supports_kv_cache
from cpt.models.objectives import Objective

ChoiceSums = Mapping[tuple[int, int], float]  # nats of a choice and its end, by number of question and choice


@torch.no_grad()
def score_choices(
    model: PreTrainedModel,
    objective: Objective,
    questions: Sequence[TaskPrompt],
    *,
    batch_size: int,
    step: Callable[[int], object],
    share: tuple[int, int] = (0, 1),
) -> ChoiceSums:
    """-sum_t log p(choice_t, end | question) of each choice; `step` is called with the number done."""
    pairs: list[tuple[int, int]] = []
    for question, prompt in enumerate(questions):
        pairs.extend((question, choice) for choice in range(len(prompt.choices)))

    def length(pair: tuple[int, int]) -> int:
        question, choice = pair
        return len(questions[question].ids) + len(questions[question].choices[choice])

    # Pairs of near length share a batch, which saves padding.
    pairs.sort(key=length)
    batches = [pairs[begin : begin + batch_size] for begin in range(0, len(pairs), batch_size)]
    rank, num_processes = share

    sums: dict[tuple[int, int], float] = {}
    for batch_pairs in batches[rank::num_processes]:
        rows = join_choices(questions, batch_pairs)
        batch, _ = objective.batch(rows)
        on_device = {name: cast(Tensor, tensor).to(model.device) for name, tensor in batch.items()}
        nll = objective.nll(model, cast(Batch, on_device))

        row_sums = torch.zeros(len(batch_pairs), dtype=torch.double, device=nll.device)
        row_sums.index_add_(0, batch["rows"].to(nll.device), nll.double())
        sums.update(zip(batch_pairs, row_sums.tolist(), strict=True))
        step(len(batch_pairs))
    return sums


def join_choices(questions: Sequence[TaskPrompt], pairs: Sequence[tuple[int, int]]) -> Rows:
    """A row for each question with one of its choices, of which the choice is the answer."""
    prompts = [questions[question].ids for question, _ in pairs]
    answers = [questions[question].choices[choice] for question, choice in pairs]
    lengths = np.array([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])

    ids = np.zeros((len(pairs), lengths.max()), np.int64)
    is_answer = np.zeros(ids.shape, bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : lengths[row]] = prompt + answer
        is_answer[row, len(prompt) : lengths[row]] = True
    return Rows(ids, lengths, np.zeros(len(pairs), np.uint64), is_answer)


def rank_choices(questions: Sequence[TaskPrompt], sums: ChoiceSums) -> tuple[list[str], list[str]]:
    """For each question the choice of the largest sum_t log p(choice_t, end | question), and that of the
    largest mean over t; of equal ones the first."""
    best_by_sum = []
    best_by_mean = []
    for question, prompt in enumerate(questions):
        nll = np.array([sums[question, choice] for choice in range(len(prompt.choices))])
        lengths = [len(choice) for choice in prompt.choices]
        texts = prompt.example.choices
        best_by_sum.append(texts[nll.argmin()])
        best_by_mean.append(texts[(nll / lengths).argmin()])
    return best_by_sum, best_by_mean


@torch.no_grad()
def write_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[TaskPrompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    step: Callable[[int], object],
    share: tuple[int, int] = (0, 1),
) -> dict[int, str]:
    """What the model writes to each question of a share, by its number, by greedy decoding: at most
    `max_new_tokens` tokens, to the one that ends an answer, without special tokens. Prompts are padded on the
    left for a causal model, on the right for an encoder. A model without a key-value cache takes no padding:
    a batch has prompts of one length."""

    def length(question: int) -> int:
        return len(questions[question].ids)

    by_length = sorted(range(len(questions)), key=length)
    batches = [by_length[begin : begin + batch_size] for begin in range(0, len(by_length), batch_size)]
    has_cache = supports_kv_cache(model)
    if not has_cache:
        batches = split_by_length(batches, length)

    is_seq2seq = model.config.is_encoder_decoder
    end = questions[0].reference[-1]
    padding = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rank, num_processes = share

    answers: dict[int, str] = {}
    for batch in batches[rank::num_processes]:
        ids, mask = pad_prompts(
            [questions[question].ids for question in batch], padding=padding, on_the_left=not is_seq2seq
        )
        width = ids.shape[1]
        # A causal model's answer takes positions after the prompt's.
        num_tokens = max_new_tokens if is_seq2seq else max(1, longest(model, width + max_new_tokens) - width)
        generation = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=has_cache,
            eos_token_id=end,
            pad_token_id=padding,
            decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
        )
        with set_temporarily((model, "generation_config", generation)):  # and not the checkpoint's own
            output = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))

        if not is_seq2seq:  # it repeats the prompt
            output = output[:, width:]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        for question, text in zip(batch, texts, strict=True):
            answers[question] = text.strip()
        step(len(batch))
    return answers


def split_by_length(batches: Sequence[Sequence[int]], length: Callable[[int], int]) -> list[list[int]]:
    """Batches in which all questions have one length, from batches that are sorted by it."""
    parts = []
    for batch in batches:
        for _, questions in groupby(batch, key=length):
            parts.append(list(questions))
    return parts


def pad_prompts(
    prompts: Sequence[Sequence[int]], *, padding: int, on_the_left: bool
) -> tuple[Tensor, Tensor]:
    """Prompts as token ids and attention mask [prompts, tokens]."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        begin = width - len(prompt) if on_the_left else 0
        ids[row, begin : begin + len(prompt)] = torch.tensor(prompt)
        mask[row, begin : begin + len(prompt)] = 1
    return ids, mask
