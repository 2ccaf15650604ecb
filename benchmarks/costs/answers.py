"""Fine-tuning T5 on a task and asking it, by cpt and by the Hugging Face Seq2SeqTrainer: how much faster cpt
is, decoding excluded and included. One command: `python benchmarks/costs/answers.py`.

Both learn cpt's very batches with the same AdamW, schedule and clipping, without dropout: the weights at the
end show that they do the same work. Then each asks its model the same held-out questions by greedy decoding,
the Trainer with `predict_with_generate`, in batches of the same size, padded to the longest; how many of the
texts are the same is shown too. They take turns in one process. Of learning counts the time from the end of
the first step to that of the last, of decoding the whole call."""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import (
    DataCollatorWithPadding,
    GenerationConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from cpt.data.collate import place_labels, select_inputs
from cpt.data.corpora import Corpora
from cpt.data.tokenized_tasks import TaskPrompt, read_examples
from cpt.evaluation.task_answers import write_answers
from cpt.models.forward import set_mode

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import DROPOUT, Workload, build_workload, make_parser
from common.measuring import compare_times, read_busy_seconds, rotate, save, summarize_times, wait_until_quiet
from common.stage import prepare
from common.subjects import fit

Times = dict[str, float]  # wall and cpu, seconds


@dataclass(frozen=True)
class TaskSetup:
    """What is learned and asked."""

    workload: Workload
    initial_state: Mapping[str, Tensor]  # the weights that each starts from
    questions: Sequence[TaskPrompt]
    max_tokens: int  # tokens of an answer
    batch: int  # questions at once


@dataclass(frozen=True)
class SubjectRun:
    """What one subject did in one round: its times by part, its weights at the end, and its answers."""

    times: dict[str, Times]
    weights: dict[str, Tensor]
    texts: list[str]


def read_clocks() -> Times:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def subtract_times(first: Times, last: Times) -> Times:
    return {kind: last[kind] - first[kind] for kind in first}


def learn_ours(setup: TaskSetup) -> tuple[PreTrainedModel, Times]:
    """As `python run.py` learns a domain."""
    ends: list[Times] = []

    class StepCallback(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(read_clocks())

    workload = setup.workload
    workload.module.model.load_state_dict(setup.initial_state)
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[StepCallback()])
    return workload.module.model, subtract_times(ends[0], ends[-1])


def learn_theirs(setup: TaskSetup) -> tuple[PreTrainedModel, Times]:
    """As the Seq2SeqTrainer learns; a row of its data is a batch of cpt's, which nothing has to pad."""
    ends: list[Times] = []

    class StepCallback(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(read_clocks())

    workload = setup.workload
    stream = workload.stream()
    model = deepcopy(workload.module.model).train()
    model.load_state_dict(setup.initial_state)
    batches = [stream[number] for number in range(len(stream))]
    max_norm = workload.plan.trainer.gradient_clip_val
    trainer = Seq2SeqTrainer(
        model=model,
        args=make_settings(max_steps=workload.steps, max_grad_norm=max_norm, per_device_train_batch_size=1),
        train_dataset=[{**select_inputs(batch), "labels": place_labels(batch)} for batch in batches],
        data_collator=lambda rows: rows[0],
        optimizers=workload.optimizer(model),
        callbacks=[StepCallback()],
    )
    trainer.train()
    return model, subtract_times(ends[0], ends[-1])


def make_settings(**extra_arguments: Any) -> Seq2SeqTrainingArguments:
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


def ask_ours(setup: TaskSetup, model: PreTrainedModel) -> list[str]:
    """As a run asks after a stage."""
    tokenizer = setup.workload.start.tokenizer
    with set_mode(model, training=False):
        texts = write_answers(
            model,
            tokenizer,
            setup.questions,
            max_new_tokens=setup.max_tokens,
            batch_size=setup.batch,
            step=count_nothing,
        )
    return [texts[number] for number in range(len(setup.questions))]


def count_nothing(count: int) -> None:
    """No bar, as the Trainer's predictions have none here."""


def ask_theirs(setup: TaskSetup, model: PreTrainedModel) -> list[str]:
    """As `Seq2SeqTrainer.predict` writes; without references, of which the loss would be another pass."""
    tokenizer = setup.workload.start.tokenizer
    generation_config = GenerationConfig(
        max_new_tokens=setup.max_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=setup.questions[0].reference[-1],
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=make_settings(
            predict_with_generate=True,
            generation_config=generation_config,
            per_device_eval_batch_size=setup.batch,
            disable_tqdm=True,
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    rows = [
        {"input_ids": question.ids, "attention_mask": [1] * len(question.ids)} for question in setup.questions
    ]
    token_ids = trainer.predict(rows).predictions
    token_ids[token_ids == -100] = tokenizer.pad_token_id
    return [text.strip() for text in tokenizer.batch_decode(token_ids, skip_special_tokens=True)]


SUBJECTS: dict[str, tuple[Callable, Callable]] = {
    "cpt": (learn_ours, ask_ours),
    "hf": (learn_theirs, ask_theirs),
}


def run_subject(setup: TaskSetup, name: str) -> SubjectRun:
    """One subject learns and is asked."""
    gc.collect()
    learn, ask = SUBJECTS[name]
    busy_before = read_busy_seconds()
    start_times = read_clocks()
    model, learning = learn(setup)

    decoding_start = read_clocks()
    texts = ask(setup, model)
    decoding = subtract_times(decoding_start, read_clocks())
    turn_times = subtract_times(start_times, read_clocks())
    foreign_cores = (read_busy_seconds() - busy_before - turn_times["cpu"]) / turn_times["wall"]
    times = {
        "learning": learning,
        "decoding": decoding,
        "both": {kind: learning[kind] + decoding[kind] for kind in learning},
        "foreign_cores": {"wall": foreign_cores},
    }
    return SubjectRun(times, copy_tensors(dict(model.named_parameters())), texts)


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def compare_weights(setup: TaskSetup) -> dict[str, float]:
    """The largest difference of a weight, the largest change of one, and the share of texts that are the
    same, and of questions that are answered rightly."""
    ours = run_subject(setup, "cpt")
    theirs = run_subject(setup, "hf")
    targets = [question.example.target for question in setup.questions]
    return {
        "apart": largest_difference(ours.weights, theirs.weights),
        "moved": largest_difference(ours.weights, setup.initial_state),
        "same_texts": statistics.mean(map(eq, ours.texts, theirs.texts)),
        "different_texts": len(set(ours.texts)),
        "right": statistics.mean(map(eq, ours.texts, targets)),
    }


def largest_difference(weights: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    return max((weights[name] - reference[name]).abs().max().item() for name in weights)


def summarize(setup: TaskSetup, rounds: int, *, patience: float) -> dict[str, Any]:
    """How much faster cpt is in each part, and the times that this is of; the first round is not counted."""
    chunks: dict[str, list[dict[str, Times]]] = {name: [] for name in SUBJECTS}
    for number in range(rounds + 1):
        patience -= wait_until_quiet(patience)
        for name in rotate(list(SUBJECTS), number):
            chunks[name].append(run_subject(setup, name).times)
    counted = {name: turns[1:] for name, turns in chunks.items()}

    foreign_cores: list[float] = []
    for turns in counted.values():
        foreign_cores.extend(times["foreign_cores"]["wall"] for times in turns)
    ratios = {}
    for part in ("learning", "decoding", "both"):
        for kind in ("wall", "cpu"):
            ours = [times[part][kind] for times in counted["cpt"]]
            theirs = [times[part][kind] for times in counted["hf"]]
            ratios[f"{part}_{kind}"] = compare_times(ours, theirs)
    return {"cpt_over_hf": ratios, "foreign_cores": summarize_times(foreign_cores), "chunks": counted}


def make_setup(options: argparse.Namespace) -> TaskSetup:
    workload = build_workload(
        options.cache,
        "domains=tasks",
        f"model.max_seq_length={options.length}",
        f"trainer.batch_size={options.batch}",
        f"trainer.steps={options.steps}",
        f"optim.lr={options.lr}",
        *(f"{name}=0.0" for name in DROPOUT["t5"]),
        shape="t5",
    )
    texts = Corpora.read(workload.plan.source, workload.plan.order, cache=Path(options.cache))
    encoder = texts.encoder(workload.start.tokenizer, workload.start.length, seq2seq=True)
    examples = read_examples(texts.by_name[workload.plan.order[0]], "test")
    questions = [encoder.prompt(example) for example in examples]
    initial_state = copy_tensors(workload.module.model.state_dict())
    return TaskSetup(workload, initial_state, questions, options.tokens, options.questions)


def parse_options() -> argparse.Namespace:
    parser = make_parser("Fine-tuning and asking T5, by cpt and by the Hugging Face Seq2SeqTrainer.")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each that are counted")
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=16, help="examples per step")
    parser.add_argument("--questions", type=int, default=32, help="questions per pass")
    parser.add_argument("--tokens", type=int, default=50, help="tokens of an answer, at most")
    parser.add_argument("--length", type=int, default=128, help="tokens of a question, at most")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    prepare(options.threads)
    torch.set_num_threads(options.threads)
    setup = make_setup(options)
    equal = compare_weights(setup)
    print("equal work", equal)
    results = summarize(setup, options.rounds, patience=options.patience)
    for part, ratio in results["cpt_over_hf"].items():
        print(f"{part:15}" + "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio))
    print("cores that others used meanwhile", results["foreign_cores"])
    settings = {name: value for name, value in vars(options).items() if name not in ("cache", "out")}
    save("answers", {"options": settings, "equal_work": equal, **results}, out=options.out)


if __name__ == "__main__":
    main()
