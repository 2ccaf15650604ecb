"""What a run's model writes before a stage, to be replayed in it in place of past domains' text.

Processes write different texts at the same time; the first has all of them in a file, which grows round by
round, and makes rows of it that all read. Text number i is a function of the weights, the seed, the stage and
i: which process wrote it, and when, does not matter."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.bank import BASE
from cpt.core import files
from cpt.core.cache import discard, finish_artifact
from cpt.core.collectives import gather_objects, wait_for_others
from cpt.core.growing import PLACE
from cpt.core.preemption import leave_together
from cpt.core.processes import is_first_process, rank_and_world
from cpt.core.progress import progress_bar
from cpt.core.randomness import draws, key, sample_keys
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.generated import (
    FACTS,
    Sample,
    draw_beginnings,
    end_of,
    file_of,
    keep_samples,
    load_kept,
    open_rows,
    save_kept,
)
from cpt.data.packing import Packed, frame_of
from cpt.data.replay import Generated
from cpt.data.sources.base import GENERAL
from cpt.methods.base import ContinualModule
from cpt.models.forward import in_mode
from cpt.models.generation import Sampling, sample_texts
from cpt.trainer.run_dir import RunDir
from cpt.trainer.samples import Samples, agree_with_first, is_whole

if TYPE_CHECKING:
    from tqdm import tqdm


log = logging.getLogger(__name__)
FORMAT = 1  # counts changes of what is written, or of how


@dataclass(frozen=True)
class Task:
    """What is to be written in place of a text: by which part of the model, behind which contexts, of which
    `given` is replayed with it, and how many tokens of it are kept."""

    text: str
    domain: int  # its place in the order, or BASE
    contexts: list[list[int]]
    given: list[list[int]]
    budget: int


@dataclass(frozen=True)
class Generation:
    """The texts that a run's model writes."""

    options: Generated
    place: RunDir
    module: ContinualModule
    data: DomainSequence
    tokenizer: PreTrainedTokenizerBase
    length: int
    seed: int

    @cached_property
    def sampling(self) -> Sampling:
        how = self.options
        return Sampling(how.temperature, how.top_p, len(self.tokenizer), end_of(self.tokenizer))

    def prepare(self, number: int, stage: Domain, device: torch.device) -> None:
        """Has the data replay what the module, as it is after the stages before, writes for a stage: now, or
        what was written when the stage was first begun."""
        self.keep_of(stage)
        budgets, folder = self.budgets(stage), self.place.generated(number, stage.name)
        if budgets and not agree_with_first(is_whole(folder)):
            self.write(folder, [self.task(*each) for each in budgets.items()], stage, device)
        found = {name: self.open(folder, name) for name in budgets}
        self.data.generated = {name: rows for name, rows in found.items() if rows is not None}

    def keep_of(self, stage: Domain) -> None:
        """Keeps what there is to be of the texts of a stage, while they are there to be learned. Raises
        ValueError where their rows are shorter than a beginning."""
        general = [GENERAL] * (self.options.general > 0)
        for name in (*stage.parts, *general) if is_first_process() else ():
            path = file_of(self.place.kept_of_texts, name, "json")
            if not path.exists() and (kept := self.kept(name)) is not None:
                save_kept(path, kept)
        wait_for_others()

    def kept(self, text: str) -> Any:
        """What stays of a text: where some of its rows begin; None where nothing does."""
        if not self.options.prefix:
            return None
        how = {"count": self.options.starts, "prefix": self.options.prefix}
        return draw_beginnings(self.data.train[text], text, **how)

    def recall(self, text: str) -> Any:
        """What was kept of a text. Raises ValueError where it is gone or damaged."""
        instead = f"bring it back from a copy, or delete {self.place.path} to start again"
        return load_kept(file_of(self.place.kept_of_texts, text, "json"), instead=instead)

    def room(self, context: Sequence[int]) -> int:
        """Tokens that can be written behind a context."""
        return self.length - len(context)

    def open(self, folder: Path, text: str) -> Packed | None:
        """What is replayed in place of a text; None where nothing could be kept."""
        how = {"length": self.length, "tokenizer": self.tokenizer}
        return open_rows(folder, text, packing=self.data.train[text].packing, **how)

    def keep(self, folder: Path, task: Task) -> dict[str, Any]:
        """Makes rows of what was written; gives the facts about it."""
        how = {"length": self.length, "tokenizer": self.tokenizer}
        return keep_samples(folder, task.text, tokens=task.budget, wanted=self.wanted(task), **how)

    def budgets(self, stage: Domain) -> dict[str, int]:
        """Tokens that are kept in place of each text that a stage replays."""
        replayed = self.data.replayed(stage)
        return {name: self.options.budget(count * self.length) for name, count in replayed.items()}

    def task(self, text: str, budget: int) -> Task:
        """Raises ValueError where a prompt leaves nothing to write, or beginnings are gone."""
        begin, prompt = frame_of(self.tokenizer)[0], self.prompt(text)
        before = [*begin, *prompt] if prompt else []
        if self.options.prefix:
            given = self.recall(text)
            contexts = [[*before, *each] for each in given]
        else:
            given, contexts = [begin], [before or begin or [self.sampling.end]]
        return Task(text, self.data.places.get(text, BASE), contexts, given, budget)

    def prompt(self, text: str) -> list[int]:
        """The ids that every text of a domain is written behind. Raises ValueError where they leave nothing
        to write."""
        if self.options.prompt is None:
            return []
        asked = self.options.prompt.replace("{domain}", text)
        found = self.tokenizer(asked, add_special_tokens=False, verbose=False)["input_ids"]
        taken = len(frame_of(self.tokenizer)[0]) + len(found) + self.options.prefix
        if taken >= self.length:
            raise ValueError(
                f"replay.prompt={self.options.prompt} and replay.prefix={self.options.prefix} take {taken} "
                f"tokens and leave nothing to write of model.length={self.length}; allowed: fewer"
            )
        return list(found)

    def write(self, folder: Path, tasks: Sequence[Task], stage: Domain, device: torch.device) -> None:
        """Writes the texts of all tasks and makes rows of them, from where a killed run has left that."""
        begun = folder.with_name(f"{folder.name}.partial")
        with closing(Samples(self.form, begun, [task.text for task in tasks])) as written:
            total, done = sum(map(self.wanted, tasks)), sum(written.tokens.values())
            how = {"unit": "tok", "scale": True, "hidden": not is_first_process()}
            with progress_bar(f"texts before {stage.name}", total=total, done=done, **how) as progress:
                for task in tasks:
                    progress.set_postfix_str(task.text, refresh=False)
                    step = partial(advance, progress, stage)
                    self.write_texts(task, written, stage=stage, step=step, device=device)
        if is_first_process():
            self.finish(begun, folder, tasks, stage)
        wait_for_others()  # the rows are there for all

    def wanted(self, task: Task) -> int:
        """Tokens that have to be written of a task, so that enough are left."""
        return self.options.wanted(task.budget)

    @property
    def form(self) -> Any:
        """What decides the texts, beside the weights."""
        return [FORMAT, asdict(self.options), self.length, self.seed]

    def write_texts(
        self,
        task: Task,
        written: Samples,
        *,
        stage: Domain,
        step: Callable[[int], object],
        device: torch.device,
    ) -> None:
        """Writes texts of a task, a block in each process at a time, until there are enough."""
        wanted = self.wanted(task)
        if written.tokens[task.text] >= wanted:
            return
        model = self.module.backbone(task.domain)
        before, rank = model.device, rank_and_world()[0]
        stream = key(self.seed, "generated", stage.name, task.text)
        try:
            with in_mode(model.to(device), training=False):
                while (had := written.tokens[task.text]) < wanted:
                    own = self.write_block(model, task, written.blocks[task.text] + rank, stream=stream)
                    written.add(task.text, gather_objects(own), wanted=wanted)
                    step(written.tokens[task.text] - had)
        finally:
            model.to(before)

    def tell(self, texts: Sequence[str]) -> None:
        """Tells, in a line each, what of real text is kept, and where a choice changes nothing."""
        how, kept = self.options, self.options.prefix
        if not texts:
            log.info("replay=generated without effect: no stage has a past domain or a share to replay")
        elif kept:
            log.info(
                "replay=generated keeps up to %d beginnings of %d tokens of each domain, and nothing else of "
                "its text (replay.prefix=0 keeps none)",
                how.starts,
                kept,
            )
        elif len(texts) > 1 and "{domain}" not in (how.prompt or "") and self.module.bank is None:
            log.info(
                "replay.prefix=0: what is generated of all past domains is alike, as nothing says of which "
                "it is to be; replay.prefix=8 or a replay.prompt with {domain} would"
            )

    def write_block(self, model: PreTrainedModel, task: Task, block: int, *, stream: int) -> list[Sample]:
        """The texts of a block of a task."""
        numbers = block * self.options.batch_size + np.arange(self.options.batch_size)
        contexts = [task.contexts[number % len(task.contexts)] for number in numbers]
        uniforms = draws(sample_keys(stream, numbers), self.room(contexts[0]), stream=key("tokens"))
        found = sample_texts(model, contexts, torch.from_numpy(uniforms), sampling=self.sampling)
        given = [task.given[number % len(task.given)] for number in numbers]
        return [self.sample(*each) for each in zip(given, *zip(*found, strict=True), strict=True)]

    def sample(self, given: list[int], ids: list[int], nll: float) -> Sample:
        ended = ids[-1] == self.sampling.end
        whole = [*given, *(ids[:-1] if ended else ids)]
        text = self.tokenizer.decode(whole, skip_special_tokens=True)
        return Sample(whole, len(given) * (self.options.prefix > 0), ended, nll, text)

    def finish(self, begun: Path, folder: Path, tasks: Sequence[Task], stage: Domain) -> None:
        """Makes rows of what was written; then the folder is there as a whole."""
        facts = {task.text: self.keep(begun, task) for task in tasks}
        files.replace(begun / FACTS, json.dumps(facts, indent=1))
        (begun / PLACE).unlink()
        discard(folder)
        finish_artifact(begun, folder)
        tokens, texts, real = (
            sum(each[name] for each in facts.values()) for name in ("tokens", "texts", "real")
        )
        log.info(
            "before %s, %d texts of %d tokens are generated, %d of them kept beginnings: %s",
            *(stage.name, texts, tokens, real, folder),
        )


def advance(progress: tqdm, stage: Domain, tokens: int) -> None:
    """Called after every round; all processes leave if a signal has come to any."""
    progress.update(tokens)
    leave_together(f"in the texts that are generated before {stage.name}")
