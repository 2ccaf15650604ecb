"""What writes the texts that a run replays: text behind beginnings, or examples of tasks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt.adapters.bank import BASE
from cpt.core.processes import is_first_process
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.encoding import Encoder
from cpt.data.examples import Example
from cpt.data.forms import keep_examples, open_examples, write_form
from cpt.data.packing import Packed
from cpt.data.replay import Generated
from cpt.methods.base import ContinualModule
from cpt.trainer.generation import Generation, Task
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from cpt.trainer.base_model import Base
    from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExampleGeneration(Generation):
    """The examples of past tasks that a run's model writes, questions and answers: LFPT5's way of replay (Qin
    and Joty, ICLR 2022). What stays of a task are its choices, of which an answer has to be one."""

    corpora: Corpora
    encoder: Encoder

    def kept(self, text: str) -> Any:
        return list(self.corpora.choices(text))

    def task(self, text: str, budget: int) -> Task:
        return Task(text, self.data.places.get(text, BASE), [self.prompt(text)], [[]], budget)

    def prompt(self, text: str) -> list[int]:
        return self.encoder.prompt(write_form(Example(text, "", "", text), self.options.sign(text)))

    def room(self, context: Sequence[int]) -> int:
        return self.length if self.encoder.seq2seq else self.length - len(context)

    def keep(self, folder: Path, task: Task) -> dict[str, Any]:
        how = {"encoder": self.encoder, "sign": self.options.sign(task.text)}
        how |= {"tokens": task.budget, "wanted": self.wanted(task)}
        facts = keep_examples(folder, task.text, choices=self.recall(task.text), **how)
        if facts["invalid"]:
            log.info(
                "%d of %d examples written for %s are no examples of it%s",
                facts["invalid"],
                facts["texts"] + facts["left_out"],
                task.text,
                "" if facts["texts"] else ": nothing of it is replayed",
            )
        return facts

    def open(self, folder: Path, text: str) -> Packed | None:
        return open_examples(folder, text, self.encoder)

    def tell(self, texts: Sequence[str]) -> None:
        if texts and not self.options.forms:
            log.info(
                "replay.forms=0: no domain's examples are learned as a whole, so that the model writes what "
                "it knows of them by other ways"
            )
        elif not texts:
            super().tell(texts)


def make_generation(
    plan: Plan,
    place: RunDir,
    corpora: Corpora,
    start: Base,
    *,
    module: ContinualModule,
    data: DomainSequence,
) -> Generation | None:
    """What writes the texts that a run replays; None where it replays none, or text as it is. Raises
    ValueError where there would be nothing to write."""
    options = module.replay
    if not isinstance(options, Generated):
        return None
    kind: Any = Generation
    if corpora.encoding is not None:
        encoder = corpora.encoder(start.tokenizer, start.length, seq2seq=start.seq2seq)
        kind = partial(ExampleGeneration, corpora=corpora, encoder=encoder)
    made = kind(options, place, module, data, start.tokenizer, start.length, plan.run.seed)
    texts = list(dict.fromkeys(text for stage in data for text in data.replayed(stage)))
    for text in texts:
        made.prompt(text)
    if is_first_process():
        made.tell(texts)
    return made
