"""Training tokens/s of cpt (NCL, masked language model) against the Hugging Face Trainer and bare PyTorch.

Every subject is a process of its own that trains without end but waits between chunks of steps, so that the
subjects take turns on the same cores: A B C D, B C D A, ... All have the same weights, rows, optimizer,
schedule and clipping; a first, untimed pass without dropout on identical batches shows that they do the same
work."""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ground import Ground, arguments, ground
from measuring import busy, paired, rotated, save, spread, wait_until_quiet

WARMUP = 5


@dataclass(frozen=True)
class Course:
    """What the subjects run: `rounds` chunks of `chunk` steps after the warm-up. `equal` means identical
    batches and no dropout."""

    cache: str
    threads: int
    batch: int
    length: int
    fused: bool
    rounds: int
    chunk: int
    equal: bool

    @property
    def steps(self) -> int:
        return WARMUP + self.rounds * self.chunk

    def ground(self) -> Ground:
        dropout = 0.0 if self.equal else 0.1
        return ground(
            self.cache,
            f"model.length={self.length}",
            f"model.config.hidden_dropout_prob={dropout}",
            f"model.config.attention_probs_dropout_prob={dropout}",
            f"trainer.batch_size={self.batch}",
            f"trainer.steps={self.steps}",
            *(["++optim.fused=true"] if self.fused else []),
        )


class Beat:
    """Called after every step of a subject; between chunks it reports the chunk's time and waits for the
    next turn."""

    def __init__(self, pipe: Connection, course: Course) -> None:
        self.pipe, self.course = pipe, course
        self.losses: list[Any] = []
        self.scored: list[int] = []
        self.wall = self.cpu = 0.0

    def __call__(self, loss: Any, scored: int) -> None:
        self.losses.append(loss.detach())
        self.scored.append(scored)
        since = len(self.losses) - WARMUP
        if since >= 0 and since % self.course.chunk == 0:
            self.pause()

    def pause(self) -> None:
        self.pipe.send({"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu})
        self.pipe.recv()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def conclude(self) -> None:
        self.pipe.send({"losses": [loss.item() for loss in self.losses], "scored": self.scored})


def cpt(course: Course, beat: Beat) -> None:
    """The training of `python run.py method=ncl`, with its bar, checkpoint callback and curves."""
    from lightning.pytorch.callbacks import Callback

    from cpt.tracking import tracked
    from cpt.trainers import Checkpoint, trainer

    class Pulse(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            beat(outputs["loss"], len(batch["positions"]))

    place, folder = course.ground(), Path(tempfile.mkdtemp())
    options, domain = place.cfg.trainer, place.data.domain
    last = Checkpoint(folder / "last.ckpt", every=options.checkpoint_every)
    with tracked(place.cfg.logger, folder, group="bench", job="ncl", tags=[], config={}) as loggers:
        fitting = trainer(
            options, label=domain.name, loggers=loggers, steps=place.steps, callbacks=[last, Pulse()]
        )
        fitting.fit(place.module, datamodule=place.data)


def loop(course: Course, beat: Beat, *, loss_of: Callable[[Any, Any], Any]) -> None:
    """A training loop of a few lines on cpt's batches."""
    import torch

    place = course.ground()
    model, clip = place.module.model, place.cfg.trainer.gradient_clip_val
    optimizer, schedule = place.optimizer(model)
    for batch in place.loader():
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        beat(loss, len(batch["positions"]))


def bare(course: Course, beat: Beat) -> None:
    """The loop with cpt's head, which is computed at the scored positions only."""
    from cpt.methods.base import token_nll

    loop(course, beat, loss_of=lambda model, batch: token_nll(model, batch).sum() * batch["weight"])


def dense(course: Course, beat: Beat) -> None:
    """The loop with the model's own loss, whose head is computed at every position: what part of cpt's gain
    is the head."""
    names = ("input_ids", "labels", "attention_mask")
    loop(
        course,
        beat,
        loss_of=lambda model, batch: model(**{name: batch[name] for name in names if name in batch}).loss,
    )


def hf(course: Course, beat: Beat) -> None:
    """The Hugging Face Trainer as run_mlm uses it; its optimizer and schedule are cpt's."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Pulse(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            beat(losses[-1], scored[state.global_step - 1])

    place, losses, scored = course.ground(), [], []
    model, options = place.module.model, place.cfg.trainer
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss))
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=place.steps,
        per_device_train_batch_size=course.batch,
        max_grad_norm=options.gradient_clip_val,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    rows, collator = batches(place) if course.equal else unmasked(place)
    Trainer(
        model=model,
        args=settings,
        train_dataset=rows,
        data_collator=counting(collator, scored),
        optimizers=place.optimizer(model),
        callbacks=[Pulse()],
    ).train()


def unmasked(place: Ground) -> tuple[Any, Any]:
    """cpt's rows in cpt's order, and the collator that masks them."""
    import numpy as np
    from transformers import DataCollatorForLanguageModeling

    stream, model = place.stream(), place.cfg.model
    order = stream.locate(np.arange(len(stream) * stream.batch_size))[1]
    texts = stream.texts[0].rows.select_columns(["ids"]).rename_column("ids", "input_ids").select(order)
    first = stream[0]
    original = np.where(first["labels"] < 0, first["input_ids"], first["labels"])
    if texts[: stream.batch_size]["input_ids"] != original.tolist():
        raise RuntimeError("the rows are not those of cpt")
    return texts, DataCollatorForLanguageModeling(place.start.tokenizer, mlm_probability=model.mask_rate)


def batches(place: Ground) -> tuple[Any, Any]:
    """cpt's very batches, row by row, and the collator that only stacks them."""
    import torch
    from transformers import default_data_collator

    stream = place.stream()
    whole = [stream[number] for number in range(len(stream))]
    for batch in whole:
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    names = ("input_ids", "attention_mask", "labels")
    rows = [{name: batch[name][row] for name in names} for batch in whole for row in range(stream.batch_size)]
    return rows, default_data_collator


def counting(collator: Any, scored: list[int]) -> Any:
    """A collator that also notes how many tokens each of its batches scores (about 10 µs)."""

    def collate(rows: Any) -> Any:
        batch = collator(rows)
        scored.append(int((batch["labels"] >= 0).sum()))
        return batch

    return collate


SUBJECTS = {"cpt": cpt, "bare": bare, "dense": dense, "hf": hf}


def act(name: str, course: Course, pipe: Connection, log: str) -> None:
    """One subject's process; what it prints goes to a file."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    import torch

    torch.set_num_threads(course.threads)
    beat = Beat(pipe, course)
    SUBJECTS[name](course, beat)
    beat.conclude()


@dataclass(frozen=True)
class Actor:
    """A subject's process as the parent sees it."""

    process: BaseProcess
    pipe: Connection
    log: Path

    def report(self) -> dict[str, Any]:
        try:
            return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"a subject ended early:\n{self.log.read_text()[-3000:]}") from None

    def turn(self) -> dict[str, float]:
        """One chunk: its seconds, and the cores that processes other than the subject used meanwhile."""
        before = busy()
        self.pipe.send("go")
        chunk = self.report()
        return {**chunk, "foreign_cores": max(0.0, (busy() - before - chunk["cpu"]) / chunk["wall"])}


@contextmanager
def actors(course: Course) -> Iterator[dict[str, Actor]]:
    """All subjects, warmed up and waiting for their first turn."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as logs:
        cast = {name: enter(context, name, course, Path(logs) / name) for name in SUBJECTS}
        try:
            for actor in cast.values():
                actor.report()
            yield cast
        finally:
            for actor in cast.values():
                actor.process.terminate()
                actor.process.join()


def enter(context: Any, name: str, course: Course, log: Path) -> Actor:
    ours, theirs = context.Pipe()
    process = context.Process(target=act, args=(name, course, theirs, str(log)), daemon=True)
    process.start()
    theirs.close()
    return Actor(process, ours, log)


def played(course: Course, *, patience: float) -> dict[str, Any]:
    """All rounds: chunks and per-step losses and scored tokens of every subject, and the load average."""
    chunks: dict[str, list[dict[str, float]]] = {name: [] for name in SUBJECTS}
    load = []
    with actors(course) as cast:
        for number in range(course.rounds):
            patience -= wait_until_quiet(patience)
            load.append(os.getloadavg()[0])
            for name in rotated(list(cast), number):
                chunks[name].append(cast[name].turn())
            print(f"round {number + 1}/{course.rounds}", file=sys.stderr)
        for actor in cast.values():
            actor.pipe.send("go")
        steps = {name: actor.report() for name, actor in cast.items()}
    return {"chunks": chunks, "steps": steps, "load": load}


def equality(steps: dict[str, Any]) -> dict[str, Any]:
    """How far each subject's losses are from cpt's, at the first step and at most; scored tokens."""
    ours = steps["cpt"]["losses"]

    def distance(name: str) -> dict[str, Any]:
        apart = [abs(a - b) for a, b in zip(ours, steps[name]["losses"], strict=True)]
        same = steps[name]["scored"] == steps["cpt"]["scored"]
        return {
            "first": apart[0],
            "most": max(apart),
            "scored": sum(steps[name]["scored"]),
            "same_scored": same,
        }

    return {"loss": [ours[0], ours[-1]], "distance": {name: distance(name) for name in steps}}


def summary(run: dict[str, Any], course: Course) -> dict[str, Any]:
    """Tokens/s, paired ratios by wall and by processor time, losses and scored tokens."""
    tokens = course.chunk * course.batch * course.length
    times = {
        kind: {name: [chunk[kind] for chunk in chunks] for name, chunks in run["chunks"].items()}
        for kind in ("wall", "cpu")
    }
    foreign = [chunk["foreign_cores"] for chunks in run["chunks"].values() for chunk in chunks]
    return {
        "tokens_per_s": {name: tokens / statistics.median(each) for name, each in times["wall"].items()},
        "step_ms": {
            name: 1e3 * spread(each)["median"] / course.chunk for name, each in times["wall"].items()
        },
        "cpt_over": {
            kind: {name: paired(each["cpt"], each[name]) for name in SUBJECTS if name != "cpt"}
            for kind, each in times.items()
        },
        "scored_tokens": {name: sum(steps["scored"]) for name, steps in run["steps"].items()},
        "mean_loss": {name: statistics.mean(steps["losses"]) for name, steps in run["steps"].items()},
        "load": spread(run["load"]),
        "foreign_cores": spread(foreign),
    }


def shown(results: dict[str, Any]) -> str:
    lines = [f"{'subject':8}{'tokens/s':>10}{'ms/step':>9}{'scored':>9}{'mean loss':>11}   cpt is faster by"]
    for name, speed in results["tokens_per_s"].items():
        ratio = results["cpt_over"]["wall"].get(name)
        times = "{median:.3f} [{low:.3f}, {high:.3f}]".format(**ratio) if ratio else ""
        work = f"{results['scored_tokens'][name]:9}{results['mean_loss'][name]:11.4f}"
        lines.append(f"{name:8}{speed:10.0f}{results['step_ms'][name]:9.1f}{work}   {times}")
    for name, apart in results["equal_work"]["distance"].items():
        lines.append(f"equal work, {name}: {apart}")
    lines.append(f"load average {results['load']}, cores used by others {results['foreign_cores']}")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = arguments("Training tokens/s of cpt, the Hugging Face Trainer and bare PyTorch loops.")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per chunk")
    parser.add_argument("--repeats", type=int, default=15, help="chunks per subject")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--check-steps", type=int, default=25, help="steps of the equal-work check")
    parser.add_argument("--fused", action="store_true", help="fused AdamW on all sides")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    shared = {name: getattr(chosen, name) for name in ("cache", "threads", "batch", "length", "fused")}
    course = Course(**shared, rounds=chosen.repeats, chunk=chosen.steps, equal=False)
    check = Course(**shared, rounds=1, chunk=chosen.check_steps, equal=True)
    for each in (course, check):
        each.ground()  # fills the cache
    equal = equality(played(check, patience=0.0)["steps"])
    run = played(course, patience=chosen.patience)
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")}
    results = {"options": settings, "equal_work": equal, **summary(run, course), "chunks": run["chunks"]}
    print(shown(results))
    save("throughput", results, out=chosen.out)


if __name__ == "__main__":
    main()
