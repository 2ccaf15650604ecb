"""The losses on held-out chats during a stage, for the monitor."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cpt.core.distributed import gather_objects
from cpt.core.processes import is_first_process, rank_and_world
from cpt.core.randomness import key, permute
from cpt.evaluation.chat_answers import compute_mean_losses
from cpt.evaluation.chat_files import ANSWERS, BASE_LOSSES, LOSSES
from cpt.evaluation.monitor import BASE_ANSWERS, CHAT
from cpt.methods.base import ContinualMethod
from cpt.trainer.chat_evaluator import ChatEvaluator, MarkedRow, score_chats, stack_losses

log = logging.getLogger(__name__)


class ChatMonitor:
    """Evaluates a fixed sample of the held-out chats with the model as it is: the assistant's turns and,
    where the run has them, the answers that the base has written. `max_tokens` is the size of either sample.

    Every process has to call `measure`: each evaluates a share of the chats."""

    def __init__(self, evaluator: ChatEvaluator, *, max_tokens: int) -> None:
        self.evaluator = evaluator
        self.rows_by_chat = {CHAT: draw_chats(evaluator.make_rows(LOSSES), max_tokens=max_tokens)}
        # The base writes its answers before the first stage, and none with chats.generate=0.
        if evaluator.answered and evaluator.read(0, ANSWERS) is not None:
            rows = evaluator.make_rows(BASE_LOSSES)
            self.rows_by_chat[BASE_ANSWERS] = draw_chats(rows, max_tokens=max_tokens)

    @property
    def names(self) -> list[str]:
        """The names of the losses, which the monitor has among those of texts."""
        return list(self.rows_by_chat)

    def measure(self, module: ContinualMethod) -> dict[str, Tensor]:
        """The losses by name, [2, chats] on the CPU: for each chat the mean in nats per token, and 1 as its
        weight. So all chats count alike, as they do after a stage."""
        losses = {}
        for name, rows_by_chat in self.rows_by_chat.items():
            local_nats: dict[int, float] = {}
            score_chats(
                module.model,
                self.evaluator.objective,
                rows_by_chat,
                local_nats,
                batch_size=self.evaluator.options.batch_size,
                on_batch_done=lambda count: None,
                share=rank_and_world(),
            )
            nats: dict[int, float] = {}  # by index of the chat, of all processes
            for process_nats in gather_objects(local_nats):
                nats.update(process_nats)

            means = torch.from_numpy(compute_mean_losses(stack_losses(nats, rows_by_chat)))
            losses[name] = torch.stack([means, torch.ones_like(means)])
        return losses


def make_chat_monitor(evaluator: ChatEvaluator | None, *, max_tokens: int) -> ChatMonitor | None:
    """The chats that a stage monitors; None, with a line in the log, where the template of the model takes
    none of them."""
    if evaluator is None or not evaluator.chats:
        if is_first_process():
            log.info("Monitoring no chats: none of the held-out chats fits the model (monitor.chats=true)")
        return None
    return ChatMonitor(evaluator, max_tokens=max_tokens)


def draw_chats(rows_by_chat: Sequence[Sequence[MarkedRow]], *, max_tokens: int) -> list[Sequence[MarkedRow]]:
    """A sample of the chats, the same at each call, in their order: the first of a permutation until they
    have `max_tokens` tokens. The last one may go beyond."""
    num_chats = len(rows_by_chat)
    order = permute(np.arange(num_chats), num_chats, stream=key("monitored chats"))
    num_tokens = 0
    drawn = []
    for index in order.tolist():
        if num_tokens >= max_tokens:
            break
        drawn.append(index)
        num_tokens += sum(len(ids) for ids, _ in rows_by_chat[index])
    return [rows_by_chat[index] for index in sorted(drawn)]


def find_chat_evaluator(evaluators: Sequence[object]) -> ChatEvaluator | None:
    """The evaluator of chats among those of a run; None if the run does not measure them."""
    for evaluator in evaluators:
        if isinstance(evaluator, ChatEvaluator):
            return evaluator
    return None
