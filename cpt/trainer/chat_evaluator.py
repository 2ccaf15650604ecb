"""Held-out chats: the model's loss on the assistant's turns, answers that it writes, and its loss on the
answers that the base has written.

Losses are measured after each stage that is due, answers on the base and the last model. Nothing of it
changes what is trained: models are in evaluation mode, and greedy decoding draws no random numbers."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.domain_store import BASE
from cpt.core.config import digest as hash_of
from cpt.core.distributed import barrier, gather_objects, leave_together
from cpt.core.messages import count_noun, log_once
from cpt.core.preemption import Preempted
from cpt.core.processes import is_first_process, rank_and_world
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.chat_answers import ChatAnswer, collect_losses, judge_answer, summarise_rows
from cpt.evaluation.chat_encoding import EncodedChat
from cpt.evaluation.chat_files import (
    ANSWERS,
    BASE_LOSSES,
    LOSSES,
    StoredAnswers,
    StoredLosses,
    chat_file,
    load_answers,
    load_losses,
    save_answers,
    save_losses,
)
from cpt.evaluation.metrics import Array
from cpt.evaluation.options import ChatOptions, is_due
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_answers import generate_batches, pad_rows, sum_row_losses
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.models.objectives import Objective
from cpt.trainer.evaluator import FileEvaluator, count_units, on_device
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
SetOfChats = Sequence[EncodedChat]
UNITS = {LOSSES: "losses", ANSWERS: "answers", BASE_LOSSES: "losses on the base's answers"}  # for a bar
MarkedRow = tuple[Sequence[int], Sequence[bool]]  # ids, and which of them are an answer


class ChatEvaluator(FileEvaluator):
    """Measures chats. A request is LOSSES or ANSWERS; processes share the chats out."""

    GROUP = "chats"
    KIND = "chats"
    LABEL = "chats"

    def __init__(
        self,
        options: ChatOptions,
        chats: SetOfChats,
        objective: Objective,  # that scores answers alone
        ends: Sequence[int],  # the tokens that end an answer
        digest: str,  # of all that losses and answers depend on besides the model
        tokenizer: PreTrainedTokenizerBase,
        *,
        run: RunDir,
        module: ContinualMethod,
        data: DomainSequence,
        settings_hash: str,
    ) -> None:
        super().__init__(options.when, run=run, module=module, data=data, settings_hash=settings_hash)
        self.options = options
        self.chats = chats
        self.answered = chats if options.generate is None else chats[: options.generate]
        self.objective = objective
        self.ends = ends
        self.digest = digest
        self.tokenizer = tokenizer
        self.stored: dict[tuple[int, str], StoredLosses | StoredAnswers] = {}  # of the files that were read

    def requests(self, number: int) -> list[str]:
        is_measured = is_due(self.when, number, stages=len(self.data))
        requests = []
        if self.chats and is_measured:
            requests.append(LOSSES)
        if self.answered and number in (0, len(self.data)):
            requests.append(ANSWERS)
        if self.answered and is_measured:
            requests.append(BASE_LOSSES)  # after the base's answers
        return requests

    def read(self, number: int, request: str) -> StoredLosses | StoredAnswers | None:
        """The content of a file; each is read once."""
        if (number, request) not in self.stored:
            path = chat_file(self.folder(number), request)
            stored: StoredLosses | StoredAnswers
            try:
                stored = load_answers(path) if request == ANSWERS else load_losses(path)
            except FileNotFoundError:
                return None
            except ValueError as error:
                log_once(log, f"Measuring again: {error}")
                return None
            if stored.digest != self.digest_of(request):
                return None
            self.stored[number, request] = stored
        return self.stored[number, request]

    def read_losses(self, number: int, request: str) -> StoredLosses | None:
        stored = self.read(number, request)
        return stored if isinstance(stored, StoredLosses) else None

    def read_answers(self, number: int) -> StoredAnswers | None:
        stored = self.read(number, ANSWERS)
        return stored if isinstance(stored, StoredAnswers) else None

    def digest_of(self, request: str) -> str:
        """A hash of all that the file of a request depends on besides the model. Losses on the base's answers
        depend on these, too: "" before the base has answered."""
        if request != BASE_LOSSES:
            return self.digest
        base_answers = self.read_answers(0)
        if base_answers is None:
            return ""
        return hash_of([self.digest, [answer.ids for answer in base_answers.answers]])

    def report_lost_weights(self, number: int, scores: Scores) -> None:
        """Logs it: chats may be asked for in a run whose stages were not kept, and compare base and last."""
        log.info(
            "Skipping chats after %s: its weights were not kept (save_all_stages=true keeps them)",
            scores.rows[number],
        )

    def measure_requests(self, number: int, requests: list[str], device: torch.device, label: str) -> None:
        _, world = rank_and_world()
        num_chats = {LOSSES: len(self.chats), ANSWERS: len(self.answered), BASE_LOSSES: len(self.answered)}
        num_units = 0
        descriptions = []  # a chat may have a loss and an answer: the bar says what it counts
        for request in requests:
            local_chats = num_chats[request] // world
            num_units += local_chats
            descriptions.append(f"{UNITS[request]} {local_chats}")

        learned = self.learned_domains(number)
        domain = self.data.domain_indices[learned[-1]] if learned else BASE  # the last one learned
        with (
            on_device(self.module.model_for(domain), device) as model,
            set_mode(model, training=False),
            count_units(
                f"{label} ({', '.join(descriptions)})",
                total=num_units,
                hidden=not is_first_process(),
                unit="chat",
            ) as (progress, on_batch_done),
        ):
            for request in requests:
                progress.set_postfix_str(request.replace("_", " "), refresh=False)
                if request == ANSWERS:
                    self.measure_answers(number, model, on_batch_done=on_batch_done)
                else:
                    self.measure_losses(number, request, model, on_batch_done=on_batch_done)

    def measure_losses(
        self, number: int, request: str, model: PreTrainedModel, *, on_batch_done: Callable[[int], object]
    ) -> None:
        """Writes the losses of a stage by chat. Each process scores its share; the first writes the file."""
        start_time = time.perf_counter()
        rows_by_chat = self.make_rows(request)
        local_losses: dict[int, float] = {}
        # A process that is to be preempted still waits for the others: all leave together.
        with suppress(Preempted):
            score_chats(
                model,
                self.objective,
                rows_by_chat,
                local_losses,
                batch_size=self.options.batch_size,
                on_batch_done=on_batch_done,
                share=rank_and_world(),
            )
        leave_together(f"in the chats after {self.stage_name(number)}")
        nats: dict[int, float] = {}
        for process_losses in gather_objects(local_losses):
            nats.update(process_losses)

        if is_first_process():
            stored = StoredLosses(
                digest=self.digest_of(request),
                seconds=round(time.perf_counter() - start_time, 3),
                chats=[chat.chat.example.id for chat in self.chats[: len(rows_by_chat)]],
                losses=stack_losses(nats, rows_by_chat),
            )
            save_losses(chat_file(self.folder(number), request), stored)
            warn_of_nonfinite(stored, stage=self.stage_name(number))
        barrier()  # the file is there for all

    def make_rows(self, request: str) -> list[list[MarkedRow]]:
        """By chat the rows whose answers are scored: the chats', or those that the base has written."""
        rows_by_chat: list[list[MarkedRow]] = []
        if request == LOSSES:
            for chat in self.chats:
                rows_by_chat.append([(row.ids, row.answer) for row in chat.rows])
            return rows_by_chat

        base_answers = self.read_answers(0)
        assert base_answers is not None  # measured before what needs them
        for chat, answer in zip(self.answered, base_answers.answers, strict=True):
            marks = [False] * len(chat.prompt.ids) + [True] * len(answer.ids)
            row: MarkedRow = ([*chat.prompt.ids, *answer.ids], marks)
            rows_by_chat.append([row])
        return rows_by_chat

    def measure_answers(
        self, number: int, model: PreTrainedModel, *, on_batch_done: Callable[[int], object]
    ) -> None:
        """Writes the answers of a stage. Each process asks its share; the first writes the file."""
        start_time = time.perf_counter()
        local_answers: dict[int, ChatAnswer] = {}
        with suppress(Preempted):
            answer_chats(
                model,
                self.tokenizer,
                self.answered,
                local_answers,
                ends=self.ends,
                options=self.options,
                on_batch_done=on_batch_done,
                share=rank_and_world(),
            )
        leave_together(f"in the chats after {self.stage_name(number)}")
        answers: dict[int, ChatAnswer] = {}
        for process_answers in gather_objects(local_answers):
            answers.update(process_answers)

        if is_first_process():
            stored = StoredAnswers(
                digest=self.digest,
                seconds=round(time.perf_counter() - start_time, 3),
                answers=[answers[index] for index in range(len(self.answered))],
            )
            save_answers(chat_file(self.folder(number), ANSWERS), stored)
        barrier()  # the file is there for all

    def results(self, num_rows: int) -> dict[str, Any]:
        losses: list[StoredLosses | None] = []
        base_answer_losses: list[StoredLosses | None] = []
        answers: list[StoredAnswers | None] = []
        for number in range(num_rows):
            losses.append(self.read_losses(number, LOSSES))
            base_answer_losses.append(self.read_losses(number, BASE_LOSSES))
            answers.append(self.read_answers(number))
        answers_by_row = [None if stored is None else stored.answers for stored in answers]
        measured = [stored for stored in (*losses, *base_answer_losses, *answers) if stored is not None]

        nll, rise = collect_losses(list_chat_losses(losses))
        base_answer_nll, base_answer_rise = collect_losses(list_chat_losses(base_answer_losses))
        return {
            "set": self.digest,
            "chats": len(self.chats),
            "tokens": sum(count_scored(rows) for rows in self.make_rows(LOSSES)),
            "nll": nll,
            "rise": rise,
            "base_answer_nll": base_answer_nll,
            "base_answer_rise": base_answer_rise,
            "answers": summarise_rows(answers_by_row),
            "seconds": sum(stored.seconds for stored in measured),
        }


def warn_of_nonfinite(stored: StoredLosses, *, stage: str) -> None:
    """Warns of chats whose loss is not finite: their mean is null in scores.json."""
    num_nonfinite = int((~np.isfinite(stored.losses)).any(0).sum())
    if num_nonfinite > 0:
        log.warning(
            "The loss on %s is not finite after %s: the mean over chats is not, either",
            count_noun(num_nonfinite, "held-out chat"),
            stage,
        )


def list_chat_losses(stored_by_row: Sequence[StoredLosses | None]) -> list[Array | None]:
    return [None if stored is None else stored.losses for stored in stored_by_row]


def stack_losses(nats: Mapping[int, float], rows_by_chat: Sequence[Sequence[MarkedRow]]) -> Array:
    """The losses by chat, [2, chats]: nats, scored tokens. `nats` are sums by index of the chat."""
    ordered_nats = [nats[index] for index in range(len(rows_by_chat))]
    num_tokens = [count_scored(rows) for rows in rows_by_chat]
    return np.array([ordered_nats, num_tokens], dtype=float)


def count_scored(rows: Sequence[MarkedRow]) -> int:
    """The tokens of answers in the rows of a chat."""
    return sum(sum(marks) for _, marks in rows)


def find_length(rows: Sequence[MarkedRow]) -> int:
    """The tokens of the longest row of a chat."""
    return max(len(ids) for ids, _ in rows)


def score_chats(
    model: PreTrainedModel,
    objective: Objective,
    rows_by_chat: Sequence[Sequence[MarkedRow]],
    losses: dict[int, float],
    *,
    batch_size: int,
    on_batch_done: Callable[[int], object],
    share: tuple[int, int],
) -> None:
    """Adds the loss of each chat in nats, summed over the tokens of its answers, to `losses`, by the index of
    the chat. `share`, a rank and a number of processes, says which of the batches this process computes.
    `on_batch_done` is called with the number of chats of a batch, and may raise Preempted."""
    # Chats of near length share a batch, which saves padding.
    lengths = [find_length(rows) for rows in rows_by_chat]
    by_length = sorted(range(len(rows_by_chat)), key=lengths.__getitem__)
    batches = [by_length[begin : begin + batch_size] for begin in range(0, len(by_length), batch_size)]
    rank, num_processes = share
    for batch in batches[rank::num_processes]:
        rows: list[MarkedRow] = []
        chat_of_row: list[int] = []
        for index in batch:
            rows += rows_by_chat[index]
            chat_of_row += [index] * len(rows_by_chat[index])
        for index, nats in zip(chat_of_row, sum_row_losses(model, objective, pad_rows(rows)), strict=True):
            losses[index] = losses.get(index, 0.0) + nats
        on_batch_done(len(batch))


def answer_chats(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: SetOfChats,
    answers: dict[int, ChatAnswer],
    *,
    ends: Sequence[int],
    options: ChatOptions,
    on_batch_done: Callable[[int], object],
    share: tuple[int, int],
) -> None:
    """Adds the answers of the model to `answers`, by the index of the chat. `share`, a rank and a number of
    processes, says which of the batches this process computes. An answer ends with the first of the token ids
    `ends`. `on_batch_done` is called with numbers of chats, also within a batch, and may raise Preempted."""
    batches = generate_batches(
        model,
        tokenizer,
        [chat.prompt for chat in chats],
        ends=ends,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        step=on_batch_done,
        share=share,
    )
    for batch, output in batches:
        for index, row in zip(batch, output.tolist(), strict=True):
            end_positions = [position for position, token in enumerate(row) if token in ends]
            is_complete = bool(end_positions)
            ids = row[: end_positions[0] + 1] if is_complete else row
            answers[index] = judge_answer(
                chats[index].chat,
                ids=ids,
                text=str(tokenizer.decode(ids, skip_special_tokens=True)).strip(),
                complete=is_complete,
            )
