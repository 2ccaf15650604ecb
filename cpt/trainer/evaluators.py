"""The evaluators of a plan: fine-tuned end tasks, answers of supervised tasks, held-out chats, the divergence
from the base, the lm-evaluation-harness."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
from transformers import PretrainedConfig

from cpt.core.config import digest
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.corpora import Corpora
from cpt.data.corpus import hash_bytes
from cpt.data.datamodule import DomainSequence
from cpt.data.packing import find_padding_id
from cpt.data.tokenized_tasks import TaskPrompt, read_examples
from cpt.evaluation import task_metrics
from cpt.evaluation.chat_encoding import (
    TEMPLATE_DATE,
    EncodedChat,
    choose_chat_length,
    encode_held_out_chats,
    find_answer_ends,
)
from cpt.evaluation.chat_set import HeldOutChat
from cpt.evaluation.options import MAIN_MEASURES, ChatOptions, TaskEvalOptions
from cpt.evaluation.predictions import SOURCE
from cpt.methods.base import ContinualMethod
from cpt.models.loading import find_end_ids
from cpt.models.objectives import Causal, CausalAnswers
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.chat_evaluator import ChatEvaluator
from cpt.trainer.divergence_evaluator import DivergenceEvaluator
from cpt.trainer.evaluator import FileEvaluator
from cpt.trainer.finetune_evaluator import FinetuneEvaluator
from cpt.trainer.lm_eval_evaluator import LMEvalEvaluator
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir
from cpt.trainer.task_evaluator import TaskEvaluator, needs_sources

log = logging.getLogger(__name__)
ANSWERS_FORMAT = 2  # raised when the inputs of a file of answers change
CHATS_FORMAT = 1  # of how chats are scored, answered and judged


def make_evaluators(
    plan: Plan,
    corpora: Corpora,
    base: Base,
    harness: Any,
    *,
    machine: Machine,
    run: RunDir,
    module: ContinualMethod,
    data: DomainSequence,
) -> list[FileEvaluator]:
    """What a plan measures in addition to the matrix. Raises ValueError for a measure of choices where a task
    has none."""
    evaluators: list[FileEvaluator] = []
    if plan.endtasks is not None:
        evaluators.append(
            FinetuneEvaluator(
                plan.endtasks,
                base.tokenizer,
                run=run,
                module=module,
                data=data,
                settings_hash=plan.evaluation_hashes[FinetuneEvaluator.KIND],
            )
        )
    if plan.answers is not None:
        questions = read_questions(plan, plan.answers, corpora, base)
        if questions:
            evaluators.append(
                TaskEvaluator(
                    plan.answers,
                    questions,
                    hash_answers(plan, plan.answers, corpora, base, tasks=list(questions)),
                    base.tokenizer,
                    run=run,
                    module=module,
                    data=data,
                    settings_hash=plan.evaluation_hashes[TaskEvaluator.KIND],
                )
            )
    if plan.chats is not None and "chats" in plan.evaluation_hashes:
        evaluators.append(
            make_chat_evaluator(plan, plan.chats, corpora, base, run=run, module=module, data=data)
        )
    if plan.divergence is not None:
        evaluators.append(
            DivergenceEvaluator(
                plan.divergence,
                plan.evaluation,
                machine=machine,
                trainer_options=plan.trainer,
                run=run,
                module=module,
                data=data,
                settings_hash=plan.evaluation_hashes[DivergenceEvaluator.KIND],
            )
        )
    if plan.benchmark is not None:
        evaluators.append(
            LMEvalEvaluator(
                plan.benchmark,
                harness,
                base.tokenizer,
                run=run,
                module=module,
                data=data,
                settings_hash=plan.evaluation_hashes[LMEvalEvaluator.KIND],
            )
        )
    return evaluators


def make_chat_evaluator(
    plan: Plan,
    options: ChatOptions,
    corpora: Corpora,
    base: Base,
    *,
    run: RunDir,
    module: ContinualMethod,
    data: DomainSequence,
    model_config: PretrainedConfig | None = None,
) -> ChatEvaluator:
    """The evaluator of held-out chats; without chats where the shipped ones do not fit the model. Its length
    and the ends of answers are of `model_config`, by default that of the module's model."""
    chats: list[EncodedChat] = []
    if model_config is None:
        model_config = module.model.config
    length = choose_chat_length(model_config, trained_length=base.length)
    if base.objective_name == "causal" and base.tokenizer.is_fast:
        chats = encode_held_out_chats(options, base.tokenizer, length=length)
    elif is_first_process():
        log.info("Skipping chats: they are for causal models with a fast tokenizer (chats=none)")
    warn_of_trained_chats([chat.chat for chat in chats], corpora)
    ends = find_answer_ends(base.tokenizer, chats, find_end_ids(base.checkpoint, model_config))
    dependencies = [
        CHATS_FORMAT,
        [chat.chat.to_json() for chat in chats],
        options.generate,
        options.max_new_tokens,
        options.batch_size,
        length,
        ends,
        TEMPLATE_DATE,
        corpora.tokenizer_digest(base.tokenizer),
    ]
    return ChatEvaluator(
        options,
        chats,
        CausalAnswers(Causal(), pad=find_padding_id(base.tokenizer)),
        ends,
        digest(dependencies),
        base.tokenizer,
        run=run,
        module=module,
        data=data,
        settings_hash=plan.evaluation_hashes[ChatEvaluator.KIND],
    )


def warn_of_trained_chats(chats: Sequence[HeldOutChat], corpora: Corpora) -> None:
    """Warns of held-out chats whose turns before the last answer are those of a chat that is trained on, of a
    domain or of `replay.sources`."""
    if not chats or not is_first_process():
        return
    keys = np.array([hash_bytes(chat.example.question.encode()) for chat in chats], np.uint64)
    counts = {}
    for name, corpus in corpora.trained_examples.items():
        is_trained = np.isin(keys, corpus.keys("train"))
        if is_trained.any():
            counts[name] = int(is_trained.sum())
    if counts:
        log.warning(
            "Held-out chats that are also trained on bias their losses: of %s %s",
            count_noun(len(chats), "chat"),
            ", ".join(f"{count} in {name}" for name, count in counts.items()),
        )


def read_questions(
    plan: Plan, options: TaskEvalOptions, corpora: Corpora, base: Base
) -> dict[str, list[TaskPrompt]]:
    """The encoded questions by task; open ones only where answers are written. Raises ValueError for a
    measure of choices where the answers are open."""
    encoder = corpora.encoder(base.tokenizer, base.length, seq2seq=base.seq2seq)
    questions: dict[str, list[TaskPrompt]] = {}
    skipped = []
    for task in plan.order:
        examples = read_examples(
            corpora.by_name[task], plan.source.score_on, max_examples=options.max_documents
        )
        prompts = list(encoder.prompts(examples))
        has_choices = all(prompt.example.choices for prompt in prompts)
        measure = options.metric_of_task.get(task)
        if measure in task_metrics.RANKED and not has_choices:
            raise InvalidOptionError(
                f"answers.metrics.{task}",
                measure,
                reason="the answers are open, not choices",
                allowed=", ".join(name for name in MAIN_MEASURES if name not in task_metrics.RANKED),
            )
        # Open answers can only be written, choices can be ranked as well.
        if options.written or (options.ranked and has_choices):
            questions[task] = prompts
        else:
            skipped.append(task)

    if skipped and is_first_process():
        log.info("Skipping %s: free answers are measured with answers.written=true only", ", ".join(skipped))
    return questions


def hash_answers(
    plan: Plan, options: TaskEvalOptions, corpora: Corpora, base: Base, *, tasks: Sequence[str]
) -> Mapping[str, str]:
    """By task, a hash of all that its answers depend on besides the model."""
    settings = asdict(replace(options, when="each"))  # when they are asked changes no answer
    del settings["metrics"]  # nor do these, except that a file may have to hold the sources
    if options.ranked:
        del settings["ranked"]  # as in the files of versions without that option

    hashes = {}
    for task in tasks:
        dependencies = [
            ANSWERS_FORMAT,
            settings,
            asdict(cast(Any, corpora.encoding)),
            corpora.tokenizer_digest(base.tokenizer),
            base.length,
            plan.source.score_on,
            corpora.by_name[task].facts["digest"],
        ]
        if needs_sources(options, task):
            dependencies.append(SOURCE)
        hashes[task] = digest(dependencies)
    return hashes
