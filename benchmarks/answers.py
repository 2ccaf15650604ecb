"""Fine-tuning T5 on a task and asking it, by cpt and by the Hugging Face Seq2SeqTrainer: how much faster cpt
is, decoding excluded and included. One command: `python benchmarks/answers.py`.

Both learn cpt's very batches with the same AdamW, schedule and clipping, without dropout: the weights at the
end show that they do the same work. Then each asks its model the same held-out questions by greedy decoding,
the Trainer with `predict_with_generate`, in batches of the same size, padded to the longest; how many of the
texts are the same is shown too. They take turns in one process. Of learning counts the time from the end of
the first step to that of the last, of decoding the whole call."""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ground import DROPOUT, Ground, arguments, ground
from lightning.pytorch.callbacks import Callback
from measuring import busy, paired, rotated, save, spread, wait_until_quiet
from stage import prepare
from subjects import fit
from torch import Tensor
from transformers import (
    DataCollatorWithPadding,
    GenerationConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from cpt.data.collate import inputs_of, labels_of
from cpt.data.corpora import Corpora
from cpt.data.tokenized_tasks import TaskPrompt, read_examples
from cpt.evaluation.task_answers import write_answers
from cpt.models.forward import set_mode

Times = dict[str, float]  # wall and cpu, seconds


@dataclass(frozen=True)
class Course:
    """What is learned and asked."""

    place: Ground
    begin: Mapping[str, Tensor]  # the weights that each learns from
    questions: Sequence[TaskPrompt]
    most: int  # tokens of an answer
    batch: int  # questions at once


def now() -> Times:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def between(first: Times, last: Times) -> Times:
    return {kind: last[kind] - first[kind] for kind in first}


def learn_ours(course: Course) -> tuple[PreTrainedModel, Times]:
    """As `python run.py` learns a domain."""
    ends: list[Times] = []

    class Pulse(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(now())

    workload = course.place
    workload.module.model.load_state_dict(course.begin)
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[Pulse()])
    return workload.module.model, between(ends[0], ends[-1])


def learn_theirs(course: Course) -> tuple[PreTrainedModel, Times]:
    """As the Seq2SeqTrainer learns; a row of its data is a batch of cpt's, which nothing has to pad."""
    ends: list[Times] = []

    class Pulse(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(now())

    workload, stream = course.place, course.place.stream()
    model = deepcopy(workload.module.model).train()
    model.load_state_dict(course.begin)
    batches = [stream[number] for number in range(len(stream))]
    clip = workload.plan.trainer.gradient_clip_val
    Seq2SeqTrainer(
        model=model,
        args=settings(max_steps=workload.steps, max_grad_norm=clip, per_device_train_batch_size=1),
        train_dataset=[{**inputs_of(batch), "labels": labels_of(batch)} for batch in batches],
        data_collator=lambda rows: rows[0],
        optimizers=workload.optimizer(model),
        callbacks=[Pulse()],
    ).train()
    return model, between(ends[0], ends[-1])


def settings(**extra_arguments: Any) -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        **extra_arguments,
    )


def ask_ours(course: Course, model: PreTrainedModel) -> list[str]:
    """As a run asks after a stage."""
    tokenizer = course.place.start.tokenizer
    with set_mode(model, training=False):
        texts = write_answers(
            model,
            tokenizer,
            course.questions,
            max_new_tokens=course.most,
            batch_size=course.batch,
            step=uncounted,
        )
    return [texts[number] for number in range(len(course.questions))]


def uncounted(count: int) -> None:
    """No bar, as the Trainer's predictions have none here."""


def ask_theirs(course: Course, model: PreTrainedModel) -> list[str]:
    """As `Seq2SeqTrainer.predict` writes; without references, of which the loss would be another pass."""
    tokenizer = course.place.start.tokenizer
    generation_config = GenerationConfig(
        max_new_tokens=course.most,
        do_sample=False,
        num_beams=1,
        eos_token_id=course.questions[0].end,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=settings(
            predict_with_generate=True,
            generation_config=generation_config,
            per_device_eval_batch_size=course.batch,
            disable_tqdm=True,
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    rows = [
        {"input_ids": question.ids, "attention_mask": [1] * len(question.ids)}
        for question in course.questions
    ]
    token_ids = trainer.predict(rows).predictions
    token_ids[token_ids == -100] = tokenizer.pad_token_id
    return [text.strip() for text in tokenizer.batch_decode(token_ids, skip_special_tokens=True)]


SUBJECTS: dict[str, tuple[Callable, Callable]] = {
    "cpt": (learn_ours, ask_ours),
    "hf": (learn_theirs, ask_theirs),
}


def turn(course: Course, name: str) -> tuple[dict[str, Times], dict[str, Tensor], list[str]]:
    """One subject learns and is asked: the times, the weights at the end, the texts."""
    gc.collect()
    learn, ask = SUBJECTS[name]
    busy_before, turn_start = busy(), now()
    model, learning = learn(course)
    decoding_start = now()
    texts = ask(course, model)
    decoding, turn_times = between(decoding_start, now()), between(turn_start, now())
    foreign = (busy() - busy_before - turn_times["cpu"]) / turn_times["wall"]
    total = {kind: learning[kind] + decoding[kind] for kind in learning}
    times = {"learning": learning, "decoding": decoding, "both": total, "foreign_cores": {"wall": foreign}}
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return times, weights, texts


def equality(course: Course) -> dict[str, float]:
    """The largest difference of a weight, the largest change of one, and the share of texts that are the
    same, and of questions that are answered rightly."""
    ends = {name: turn(course, name)[1:] for name in SUBJECTS}
    (our_weights, our_texts), (their_weights, their_texts) = ends["cpt"], ends["hf"]
    return {
        "apart": max((our_weights[name] - their_weights[name]).abs().max().item() for name in our_weights),
        "moved": max((our_weights[name] - course.begin[name]).abs().max().item() for name in our_weights),
        "same_texts": statistics.mean(
            our_text == their_text for our_text, their_text in zip(our_texts, their_texts, strict=True)
        ),
        "different_texts": len(set(our_texts)),
        "right": statistics.mean(
            text == question.example.target
            for text, question in zip(our_texts, course.questions, strict=True)
        ),
    }


def summary(course: Course, rounds: int, *, patience: float) -> dict[str, Any]:
    """How much faster cpt is in each part, and the times that this is of; the first round is not counted."""
    chunks: dict[str, list[dict[str, Times]]] = {name: [] for name in SUBJECTS}
    for number in range(rounds + 1):
        patience -= wait_until_quiet(patience)
        for name in rotated(list(SUBJECTS), number):
            chunks[name].append(turn(course, name)[0])
    counted = {name: each[1:] for name, each in chunks.items()}
    foreign = [each["foreign_cores"]["wall"] for every in counted.values() for each in every]
    over = {}
    for part in ("learning", "decoding", "both"):
        for kind in ("wall", "cpu"):
            ours, theirs = ([each[part][kind] for each in counted[name]] for name in ("cpt", "hf"))
            over[f"{part}_{kind}"] = paired(ours, theirs)
    return {"cpt_over_hf": over, "foreign_cores": spread(foreign), "chunks": counted}


def make_course(chosen: argparse.Namespace) -> Course:
    workload = ground(
        chosen.cache,
        "domains=tasks",
        f"model.max_seq_length={chosen.length}",
        f"trainer.batch_size={chosen.batch}",
        f"trainer.steps={chosen.steps}",
        f"optim.lr={chosen.lr}",
        *(f"{name}=0.0" for name in DROPOUT["t5"]),
        shape="t5",
    )
    texts = Corpora.read(workload.plan.source, workload.plan.order, cache=Path(chosen.cache))
    encoder = texts.encoder(workload.start.tokenizer, workload.start.length, seq2seq=True)
    examples = read_examples(texts.by_name[workload.plan.order[0]], "test")
    questions = [*map(encoder.prompt, examples)]
    begin = {name: value.detach().clone() for name, value in workload.module.model.state_dict().items()}
    return Course(workload, begin, questions, chosen.tokens, chosen.questions)


def options() -> argparse.Namespace:
    parser = arguments("Fine-tuning and asking T5, by cpt and by the Hugging Face Seq2SeqTrainer.")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each that are counted")
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=16, help="examples per step")
    parser.add_argument("--questions", type=int, default=32, help="questions per pass")
    parser.add_argument("--tokens", type=int, default=50, help="tokens of an answer, at most")
    parser.add_argument("--length", type=int, default=128, help="tokens of a question, at most")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    prepare(chosen.threads)
    torch.set_num_threads(chosen.threads)
    course = make_course(chosen)
    equal = equality(course)
    print("equal work", equal)
    results = summary(course, chosen.rounds, patience=chosen.patience)
    for part, ratio in results["cpt_over_hf"].items():
        print(f"{part:15}" + "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio))
    print("cores that others used meanwhile", results["foreign_cores"])
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")}
    save("answers", {"options": settings, "equal_work": equal, **results}, out=chosen.out)


if __name__ == "__main__":
    main()
