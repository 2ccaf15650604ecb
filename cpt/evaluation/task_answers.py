"""A model asked the questions of a task: which of the choices it finds likeliest, and what it writes.

The batches are a function of the questions; several processes share them out, each those of its `share`: rank
r of w has batches r, r + w, … So the answers do not change with the number of processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from cpt.data.collate import Batch, Rows
from cpt.data.tokenized_tasks import TaskPrompt
from cpt.evaluation.finetune import find_max_length
from cpt.models.forward import set_temporarily, supports_kv_cache
from cpt.models.generation import pad_prompts
from cpt.models.objectives import Objective

# Negative log-likelihood in nats, summed over the tokens of a choice and its end, by the indices of the
# question and of the choice.
ChoiceNLL = Mapping[tuple[int, int], float]


@torch.no_grad()
def score_choices(
    model: PreTrainedModel,
    objective: Objective,
    questions: Sequence[TaskPrompt],
    *,
    batch_size: int,
    step: Callable[[int], object],
    share: tuple[int, int] = (0, 1),
) -> ChoiceNLL:
    """The loss -sum_t log p(t | question, tokens before t) over the tokens t of each choice and its end, for
    the share of the questions' choices that this process has. `step` is called after each batch with its
    number of choices."""
    # A pair is the index of a question and the index of one of its choices.
    pairs: list[tuple[int, int]] = []
    for question_index, question in enumerate(questions):
        pairs.extend((question_index, choice_index) for choice_index in range(len(question.choices)))

    def length(pair: tuple[int, int]) -> int:
        question_index, choice_index = pair
        question = questions[question_index]
        return len(question.ids) + len(question.choices[choice_index])

    # Pairs of near length share a batch, which saves padding.
    pairs.sort(key=length)
    batches = [pairs[begin : begin + batch_size] for begin in range(0, len(pairs), batch_size)]
    rank, num_processes = share

    nll_by_pair: dict[tuple[int, int], float] = {}
    for batch_pairs in batches[rank::num_processes]:
        row_nll = sum_row_losses(model, objective, join_choices(questions, batch_pairs))
        nll_by_pair.update(zip(batch_pairs, row_nll, strict=True))
        step(len(batch_pairs))
    return nll_by_pair


@torch.no_grad()
def sum_row_losses(model: PreTrainedModel, objective: Objective, rows: Rows) -> list[float]:
    """The loss of each row in nats, summed over the tokens that are scored."""
    batch, _ = objective.batch(rows)
    on_device = {name: cast(Tensor, tensor).to(model.device) for name, tensor in batch.items()}
    token_nll = objective.nll(model, cast(Batch, on_device))

    # Added up by row: batch["rows"] is the row of each scored token.
    row_nll = torch.zeros(len(rows.ids), dtype=torch.double, device=token_nll.device)
    row_nll.index_add_(0, batch["rows"].to(token_nll.device), token_nll.double())
    return list(row_nll.tolist())


def join_choices(questions: Sequence[TaskPrompt], pairs: Sequence[tuple[int, int]]) -> Rows:
    """A row of tokens for each pair (index of a question, index of a choice): the question, then the choice,
    whose tokens are marked as the answer."""
    prompts = [questions[question_index].ids for question_index, _ in pairs]
    answers = [questions[question_index].choices[choice_index] for question_index, choice_index in pairs]
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return pad_rows(rows)


def pad_rows(rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Rows:
    """Rows of (ids, which of them are the answer), padded on the right."""
    lengths = np.array([len(ids) for ids, _ in rows])
    padded_ids = np.zeros((len(rows), lengths.max()), np.int64)
    is_answer = np.zeros(padded_ids.shape, bool)
    for row, (ids, marks) in enumerate(rows):
        padded_ids[row, : len(ids)] = ids
        is_answer[row, : len(ids)] = marks
    return Rows(padded_ids, lengths, np.zeros(len(rows), np.uint64), is_answer)


def select_likeliest_choices(
    questions: Sequence[TaskPrompt], choice_nll: ChoiceNLL
) -> tuple[list[str], list[str]]:
    """The text of the likeliest choice of each question by two measures: the smallest loss summed over the
    tokens of the choice, and the smallest mean loss per token. Of equal choices the first is taken."""
    best_by_sum = []
    best_by_mean = []
    for question_index, question in enumerate(questions):
        num_choices = len(question.choices)
        nll = np.array([choice_nll[question_index, choice_index] for choice_index in range(num_choices)])
        lengths = [len(choice) for choice in question.choices]  # tokens, the end included
        texts = question.example.choices
        best_by_sum.append(texts[nll.argmin()])
        best_by_mean.append(texts[(nll / lengths).argmin()])
    return best_by_sum, best_by_mean


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
    """The answers that the model writes by greedy decoding, by the index of the question, for the share of
    the questions that this process has. An answer has at most `max_new_tokens` tokens, ends at the token that
    ends answers, and is without special tokens. `step` is called as `generate_batches` says."""
    answers: dict[int, str] = {}
    batches = generate_batches(
        model,
        tokenizer,
        questions,
        ends=[questions[0].reference[-1]],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        step=step,
        share=share,
    )
    for batch, output in batches:
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        for question_index, text in zip(batch, texts, strict=True):
            answers[question_index] = text.strip()
    return answers


@torch.no_grad()
def generate_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[TaskPrompt],
    *,
    ends: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    step: Callable[[int], object],
    share: tuple[int, int],
) -> Iterator[tuple[list[int], Tensor]]:
    """Yields indices of questions and what the model writes after them by greedy decoding, [B, at most
    `max_new_tokens`] tokens: an answer ends at one of the tokens `ends`, and padding follows.

    Prompts are padded on the left for a causal model, on the right for an encoder. A model without a
    key-value cache takes no padding: a batch has prompts of one length.

    `step` is called with numbers of questions that are done, also while a batch is written, which can take
    minutes: the share of its questions that count as done is the share of its tokens that are written. What
    `step` raises ends all."""

    def length(question_index: int) -> int:
        return len(questions[question_index].ids)

    # Questions of near length share a batch, which saves padding. A batch holds indices of questions.
    by_length = sorted(range(len(questions)), key=length)
    batches = [by_length[begin : begin + batch_size] for begin in range(0, len(by_length), batch_size)]
    has_cache = supports_kv_cache(model)
    if not has_cache:
        batches = split_by_length(batches, length)

    is_seq2seq = model.config.is_encoder_decoder
    padding = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rank, num_processes = share

    for batch in batches[rank::num_processes]:
        prompts = [questions[question_index].ids for question_index in batch]
        ids, mask = pad_prompts(prompts, padding=padding, on_the_left=not is_seq2seq)
        width = ids.shape[1]
        num_tokens = max_new_tokens
        if not is_seq2seq:  # a causal model's answer takes positions after the prompt's
            max_length = find_max_length(model, width + max_new_tokens)
            num_tokens = max(1, max_length - width)
        generation = GenerationConfig(
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=has_cache,
            eos_token_id=list(ends),
            pad_token_id=padding,
            decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
        )
        parts = PartsDone(len(batch), max_new_tokens=num_tokens, step=step)
        with set_temporarily((model, "generation_config", generation)):  # and not the checkpoint's own
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                stopping_criteria=StoppingCriteriaList([parts]),
            )
        parts.finish()

        if not is_seq2seq:  # it repeats the prompt
            output = output[:, width:]
        yield batch, output


class PartsDone(StoppingCriteria):
    """Stops nothing: calls `step` while a batch of questions is answered. After each new token, as large a
    share of them is done as of the tokens that answers may have."""

    def __init__(self, num_questions: int, *, max_new_tokens: int, step: Callable[[int], object]) -> None:
        self.num_questions = num_questions
        self.max_new_tokens = max_new_tokens
        self.step = step
        self.num_tokens = 0  # of each answer so far
        self.num_done = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.num_tokens += 1
        self.advance(self.num_questions * self.num_tokens // self.max_new_tokens)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def finish(self) -> None:
        """All are done: answers may end early."""
        self.advance(self.num_questions)

    def advance(self, num_done: int) -> None:
        """Calls `step` where more questions are done than before."""
        if num_done > self.num_done:
            self.step(num_done - self.num_done)
            self.num_done = num_done


def split_by_length(batches: Sequence[Sequence[int]], length: Callable[[int], int]) -> list[list[int]]:
    """Batches of questions, given by their indices, in which all questions have one length: parts of
    `batches`, in each of which the questions are sorted by length."""
    parts = []
    for batch in batches:
        for _, question_indices in groupby(batch, key=length):
            parts.append(list(question_indices))
    return parts
