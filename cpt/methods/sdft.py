"""SDFT, on-policy self-distillation (Shenfeld, Damani, Hübotter and Agrawal, 2026, arXiv 2601.19897).

The student writes an answer y to the question x of a training example. The teacher is the same model with
averaged weights phi, and reads the example's own answer c in its prompt:

    L = 1/B sum_b 1/|y| sum_t KL(pi_phi(. | x, c, y_<t) || pi_theta(. | x, y_<t)),    y ~ pi_theta(. | x)
    phi <- alpha theta + (1 - alpha) phi      after each step, from the weights before the domain on

over the whole vocabulary (the analytic estimator of appendix A.1), the teacher constant. `divergence=reverse`
is equation 1, KL(pi_theta || pi_phi); the results of the paper are by the divergence above, as section 3 of
its second version and the authors' README say. Not the earlier SDFT, which rewrites the data (Yang et al.,
ACL 2024, arXiv 2402.13669).

    (1 - lambda) L_lm + lambda L,    lambda = 1 in the paper; samples without a question have L_lm alone

What is written to an example is a function of the weights, the seed, the domain, the step and the example."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.core.randomness import draw_uniforms, key, sample_keys
from cpt.data.collate import Batch, select_inputs, select_output_ids
from cpt.data.demonstrations import Demonstration
from cpt.evaluation.finetune import find_max_length
from cpt.evaluation.task_answers import pad_rows
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import SDFTOptions
from cpt.models.chunked_head import WeightedLoss
from cpt.models.forward import kl_divergence, set_mode
from cpt.models.generation import Sampling, sample_texts
from cpt.models.token_weights import TokenWeights
from cpt.models.weights import PreciseSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """An answer of a training batch, and what is asked for it."""

    row: int  # of the batch
    prompt: list[int]
    answer: list[int]  # of the example, without the token that ends it
    end: int  # the token that ends answers
    key: np.uint64  # of the random numbers


@dataclass(frozen=True)
class Rollout:
    """What the student has written after its prompt, and the prompt that the teacher reads."""

    prompt: list[int]
    shown_prompt: list[int]
    answer: list[int]  # with the token that ends it, if it ends


class SDFT(ContinualMethod):
    """Distills the model that is shown the answer, on answers that the model writes without it."""

    needs_examples = True
    sharded = False  # each process writes answers of its own, for which it needs the whole model
    options: SDFTOptions

    def __init__(self, options: SDFTOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.has_logged_place = False
        self.has_logged_length = False
        if options.strength == 0:
            return
        if options.strength == 1 and type(context.token_weights) is not TokenWeights:
            raise InvalidOptionError(
                "loss",
                type(context.token_weights).__name__,
                context="with method=sdft method.strength=1",
                reason="its loss has no tokens of the training text",
                allowed="loss=none, or method.strength below 1",
            )
        self.teacher_weights = PreciseSnapshot(self.model, persistent=True)
        if context.tokenizer is not None:  # else a check before the run's tokenizer is trained
            self.num_entries = len(context.tokenizer)
            self.demonstration = Demonstration.encode(options.prompt, context.tokenizer)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.strength > 0:
            self.teacher_weights.capture(self.model)

    def after_update(self) -> None:
        if self.options.strength > 0:
            self.teacher_weights.capture(self.model, share=self.options.teacher_update_rate)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        if self.options.strength == 0:
            return super().losses(batch)

        questions = find_questions(batch, self.find_stream())
        rollouts = self.write_answers(questions)
        terms = {}
        num_rows = len(batch["input_ids"])
        # Also of a batch without rollouts: its loss has to depend on the weights.
        if self.options.strength < 1 or len(questions) < num_rows or not rollouts:
            terms["lm"] = self.sum_text_loss(batch, questions)
        if rollouts:
            divergence = self.sum_divergences(rollouts)
            terms["sdft"] = self.options.strength * divergence / batch["mean_rows"]
        return terms

    def find_stream(self) -> int:
        """The key of the random numbers of a step, the same in all its micro-batches and processes."""
        return key("sdft", self.seed, self.domain.name, self.trainer.global_step)

    def sum_text_loss(self, batch: Batch, questions: Sequence[Question]) -> Tensor:
        """The language-model loss of a batch, a scalar, in which rows with a question weigh 1 - strength."""
        row_weights = torch.ones(len(batch["input_ids"]), device=self.device)
        row_weights[[question.row for question in questions]] = 1 - self.options.strength
        position_weights = row_weights[batch["rows"]]
        lm_loss = self.lm_loss(batch)

        def weighted_loss(logits: Tensor, positions: slice) -> Tensor:
            return position_weights[positions] * lm_loss.loss(logits, positions)

        weighted = WeightedLoss(weighted_loss, find_weights=lm_loss.find_weights)
        sums, _ = self.objective.sum_losses(self.model, batch, {"lm": weighted})
        return sums["lm"] * batch["weight"]

    def write_answers(self, questions: Sequence[Question]) -> list[Rollout]:
        """What the student answers, without the questions to which no token of an answer counts."""
        # Questions with one limit and one end are answered together: by these two, their indices.
        shown_prompts = []
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, question in enumerate(questions):
            self.log_place(question)
            shown_prompt = self.demonstration.insert(question.prompt, question.answer)
            shown_prompts.append(shown_prompt)
            # The teacher reads the answer after the longer prompt, so that this one leaves the limit.
            max_length = find_max_length(self.model, len(shown_prompt) + self.options.max_new_tokens)
            limit = max_length - len(shown_prompt)
            if limit > self.options.skipped_tokens:
                groups[limit, question.end].append(index)
            else:
                self.log_length(len(shown_prompt))

        answers: dict[int, list[int]] = {}
        for (limit, end), indices in groups.items():
            texts = self.sample([questions[index] for index in indices], limit=limit, end=end)
            answers.update(zip(indices, texts, strict=True))

        # In the order of the questions.
        rollouts = []
        for index, question in enumerate(questions):
            answer = answers.get(index, [])
            if len(answer) > self.options.skipped_tokens:
                rollouts.append(Rollout(question.prompt, shown_prompts[index], answer))
        return rollouts

    def sample(self, questions: Sequence[Question], *, limit: int, end: int) -> list[list[int]]:
        """Answers of at most `limit` tokens to some questions."""
        keys = np.array([question.key for question in questions])
        uniforms = torch.from_numpy(draw_uniforms(keys, limit, stream=key("tokens")))
        sampling = Sampling(
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            entries=self.num_entries,
            end=end,
        )
        prompts = [question.prompt for question in questions]
        with set_mode(self.model, training=False):
            texts = sample_texts(self.model, prompts, uniforms, sampling=sampling)
        return [ids for ids, _ in texts]

    def sum_divergences(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The sum over rollouts of the mean divergence over the tokens of each, a scalar."""
        student_batch = self.make_batch([(rollout.prompt, rollout.answer) for rollout in rollouts])
        teacher_batch = self.make_batch([(rollout.shown_prompt, rollout.answer) for rollout in rollouts])
        # Both batches score the same tokens of the same answers.
        with self.teacher_weights.teaching(self.model):
            teacher_logits, _ = self.objective.keep_logits(self.model, teacher_batch)
        token_counts = torch.bincount(student_batch["rows"])
        position_weights = 1 / token_counts[student_batch["rows"]]

        def distill(logits: Tensor, positions: slice) -> Tensor:
            teacher = teacher_logits.select(positions)
            if self.options.divergence == "forward":
                divergence = kl_divergence(teacher, logits)
            else:
                divergence = kl_divergence(logits, teacher)
            return position_weights[positions] * divergence

        # The factor that `losses` gives the sum: the gradient of another one would take longer.
        losses = {"sdft": WeightedLoss(distill, strength=self.options.strength)}
        sums, _ = self.objective.sum_losses(self.model, student_batch, losses)
        return sums["sdft"]

    def make_batch(self, texts: Sequence[tuple[list[int], list[int]]]) -> Batch:
        """The batch of prompts with their answers, in which the answers are scored after `skipped_tokens`."""
        rows = []
        for prompt, answer in texts:
            num_unscored = len(prompt) + self.options.skipped_tokens
            num_scored = len(answer) - self.options.skipped_tokens
            rows.append((prompt + answer, [False] * num_unscored + [True] * num_scored))
        batch, _ = self.objective.batch(pad_rows(rows))
        on_device = {name: cast(Tensor, tensor).to(self.device) for name, tensor in batch.items()}
        return cast(Batch, on_device)

    def log_place(self, question: Question) -> None:
        """Logs once that demonstrations are not in the question's turn, though there is a chat template."""
        has_template = bool(self.demonstration.end_of_question)
        if self.has_logged_place or not has_template or self.demonstration.ends_question(question.prompt):
            return
        self.has_logged_place = True
        if is_first_process():
            log.info(
                "Showing answers after the prompt where it does not end with a turn of the user, as in %s",
                self.domain.name,
            )

    def log_length(self, num_tokens: int) -> None:
        """Logs once that a question is left out, as its prompt with the answer fills the model."""
        if self.has_logged_length:
            return
        self.has_logged_length = True
        log.warning(
            "Leaving out questions of %s that leave no positions for an answer: the first takes %s "
            "with its demonstration (method.prompt)",
            self.domain.name,
            count_noun(num_tokens, "token"),
        )


def find_questions(batch: Batch, stream: int) -> list[Question]:
    """The questions of a training batch. One answer is drawn of a row with several; a row that is scored from
    its beginning, as of raw text, has no question. `stream` is the key of the random numbers."""
    width = select_output_ids(batch).shape[1]
    rows = batch["rows"].cpu().numpy()
    columns = batch["positions"].cpu().numpy() - rows * width
    targets = batch["targets"].cpu().numpy()
    input_ids = select_inputs(batch)["input_ids"].cpu().numpy()

    questions = []
    for row in range(len(input_ids)):
        is_of_row = rows == row
        row_columns = columns[is_of_row]
        row_targets = targets[is_of_row]
        if len(row_columns) == 0 or row_columns[0] == 0:
            continue

        # An answer is scored in columns without a gap; the column before its first token predicts that. Where
        # each begins and ends among the scored columns of the row:
        begins = np.flatnonzero(np.diff(row_columns, prepend=-1) > 1)
        ends = np.append(begins[1:], len(row_columns))

        # The example is known by its ids, so that what is drawn does not depend on its row in the batch.
        last_column = int(row_columns[-1])
        example_key = np.array([key(*input_ids[row, : last_column + 1].tolist())], np.uint64)
        row_key = sample_keys(stream, example_key)
        answer_index = int(draw_uniforms(row_key, 1, stream=key("answer"))[0, 0] * len(begins))

        begin = begins[answer_index]
        answer = row_targets[begin : ends[answer_index]].tolist()
        prompt_length = int(row_columns[begin]) + 1
        end_token = int(row_targets[-1])
        questions.append(
            Question(
                row=row,
                prompt=input_ids[row, :prompt_length].tolist(),
                answer=answer[:-1] if answer[-1] == end_token else answer,
                end=end_token,
                key=row_key[0],
            )
        )
    return questions
