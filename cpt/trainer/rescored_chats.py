"""The held-out chats of a run, asked of a model that was made of the run's: as the run asked its own."""

import logging
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from cpt.adapters.domain_store import BASE
from cpt.evaluation.chat_answers import ChatAnswer, collect_losses, summarise_rows
from cpt.evaluation.chat_files import ANSWERS, BASE_LOSSES, LOSSES, StoredAnswers, chat_file, save_answers
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.trainer.build import build_data
from cpt.trainer.chat_evaluator import ChatEvaluator, answer_chats
from cpt.trainer.chat_losses import measure_row_losses
from cpt.trainer.evaluator import count_units, on_device
from cpt.trainer.evaluators import make_chat_evaluator
from cpt.trainer.rescoring import RunTexts, known_texts

log = logging.getLogger(__name__)
BASE_ROW = 0


@known_texts()
def measure_run_chats(
    texts: RunTexts, module: ContinualMethod, folder: Path, *, config: PretrainedConfig
) -> dict[str, Any]:
    """The row of a module in the chats of the run: the keys of `chats` in scores.json, each with the value of
    one row. Its answers are written into the folder. Empty for a run without chats, or whose chats or their
    results at the base are not there any more. `config` is that of the run's model."""
    options = texts.method_plan.chats
    if options is None or not texts.scores.chats.get("chats"):
        return {}
    evaluator = make_chat_evaluator(
        texts.method_plan,
        options,
        texts.corpora,
        texts.base,
        run=texts.run,
        module=module,
        data=build_data(texts.plan, texts.machine, texts.corpora, texts.base, module),
        model_config=config,
    )
    base_losses = evaluator.read_losses(BASE_ROW, LOSSES)
    if evaluator.digest != texts.scores.chats["set"] or base_losses is None:
        log.warning(
            "Skipping chats: the held-out chats of the run, or their losses under its base, no longer exist"
        )
        return {}

    # In the order in which a run measures them: the base's answers are read, the model's are new.
    losses = measure_request(evaluator, module, texts, LOSSES)
    nll, rise = collect_losses([base_losses.losses, losses])
    answers = None
    base_answer_nll = None
    base_answer_rise = None
    base_answers = evaluator.read_answers(BASE_ROW)
    base_answer_losses = evaluator.read_losses(BASE_ROW, BASE_LOSSES)
    if base_answers is not None and base_answer_losses is not None:
        losses = measure_request(evaluator, module, texts, BASE_LOSSES)
        both_nll, both_rises = collect_losses([base_answer_losses.losses, losses])
        base_answer_nll = both_nll[1]
        base_answer_rise = both_rises[1]

        new_answers = ask(evaluator, module, texts)
        answers = summarise_rows([base_answers.answers, new_answers])[1]
        stored = StoredAnswers(digest=evaluator.digest, seconds=0.0, answers=new_answers)
        save_answers(chat_file(folder, ANSWERS), stored)
    return {
        "set": evaluator.digest,
        "chats": len(evaluator.chats),
        "nll": nll[1],
        "rise": rise[1],
        "base_answer_nll": base_answer_nll,
        "base_answer_rise": base_answer_rise,
        "answers": answers,
    }


def measure_request(evaluator: ChatEvaluator, module: ContinualMethod, texts: RunTexts, request: str) -> Any:
    """The losses of the model on each chat of a request (LOSSES or BASE_LOSSES), [2, chats]: nats and scored
    tokens."""
    return measure_row_losses(
        module.model_for(BASE),
        evaluator.make_rows(request),
        evaluator.tokenizer,
        batch_size=evaluator.options.batch_size,
        device=texts.machine.device,
    )


def ask(evaluator: ChatEvaluator, module: ContinualMethod, texts: RunTexts) -> list[ChatAnswer]:
    """What the module answers to the chats that the base has answered."""
    answers: dict[int, ChatAnswer] = {}
    with (
        on_device(module.model_for(BASE), texts.machine.device) as model,
        set_mode(model, training=False),
        count_units("answers", total=len(evaluator.answered), hidden=False, unit="chat") as (_, on_done),
    ):
        answer_chats(
            model,
            evaluator.tokenizer,
            evaluator.answered,
            answers,
            ends=evaluator.ends,
            options=evaluator.options,
            on_batch_done=on_done,
            share=(0, 1),
        )
    return [answers[index] for index in range(len(evaluator.answered))]
