"""What held-out chats will cost in time, from one batch that is scored and one that is answered."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cpt.adapters.domain_store import BASE
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.chat_files import LOSSES
from cpt.evaluation.options import is_due
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.trainer.base_model import Base
from cpt.trainer.chat_evaluator import ChatEvaluator, answer_chats, score_chats
from cpt.trainer.evaluator import on_device
from cpt.trainer.evaluators import make_chat_evaluator
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir

NUM_TIMED_TOKENS = 8  # of an answer; the time of more is proportional to their number


def estimate_chat_seconds(
    plan: Plan,
    corpora: Corpora,
    base: Base,
    module: ContinualMethod,
    data: DomainSequence,
    *,
    run: RunDir,
    stages: Sequence[Mapping[str, Any]],
    device: torch.device,
    world_size: int,
) -> float:
    """The seconds that the chats of the remaining stages take at most: as if no answer ended before
    `chats.max_new_tokens`. 0 for a run without chats."""
    if plan.chats is None or "chats" not in plan.evaluation_hashes:
        return 0.0
    evaluator = make_chat_evaluator(plan, plan.chats, corpora, base, run=run, module=module, data=data)
    if not evaluator.chats:
        return 0.0

    num_scorings = 0
    num_answerings = 0
    for number, stage in enumerate(stages):
        if stage["left_steps"] or stage["left_read_tokens"]:
            if is_due(plan.chats.when, number, stages=len(data)):
                num_scorings += 1
            if number in (0, len(data)):  # answers are written by the base and the last model
                num_answerings += 1
    with on_device(module.model_for(BASE), device) as model, set_mode(model, training=False):
        score_chat_batch(evaluator, model)  # the first call also prepares kernels
        batch_s = time_call(lambda: score_chat_batch(evaluator, model), device)
        token_s = 0.0
        if evaluator.answered:
            first_s = time_call(lambda: answer_batch(evaluator, model, num_tokens=1), device)
            all_s = time_call(lambda: answer_batch(evaluator, model, num_tokens=1 + NUM_TIMED_TOKENS), device)
            token_s = max(0.0, all_s - first_s) / NUM_TIMED_TOKENS

    batch_size = plan.chats.batch_size
    num_batches = math.ceil(len(evaluator.chats) / batch_size)
    num_answer_batches = math.ceil(len(evaluator.answered) / batch_size)
    scoring = num_scorings * (num_batches + num_answer_batches) * batch_s
    answering = num_answerings * num_answer_batches * plan.chats.max_new_tokens * token_s
    return (scoring + answering) / world_size


def score_chat_batch(evaluator: ChatEvaluator, model: Any) -> None:
    """Scores a batch of chats; the losses are discarded."""
    batch_size = evaluator.options.batch_size
    score_chats(
        model,
        evaluator.objective,
        evaluator.make_rows(LOSSES)[:batch_size],
        losses={},
        batch_size=batch_size,
        on_batch_done=lambda count: None,
        share=(0, 1),
    )


def answer_batch(evaluator: ChatEvaluator, model: Any, *, num_tokens: int) -> None:
    """Answers a batch of chats in at most `num_tokens` tokens each; the answers are discarded."""
    answer_chats(
        model,
        evaluator.tokenizer,
        evaluator.answered[: evaluator.options.batch_size],
        answers={},
        ends=evaluator.ends,
        options=replace(evaluator.options, max_new_tokens=num_tokens),
        on_batch_done=lambda count: None,
        share=(0, 1),
    )


def time_call(call: Callable[[], None], device: torch.device) -> float:
    """The seconds of a call, with the device's work done."""
    start_time = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_time
