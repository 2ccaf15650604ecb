"""From what was seen of the first stages to all of them: memory, disk and time of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpt.data.datamodule import DomainSequence
from cpt.training.forecast.trial import STAGES, TIMED
from cpt.training.forecast.watching import Phase, Tried
from cpt.training.forecast.work import Row, Work
from cpt.training.options import minutes_of
from cpt.training.plan import Plan
from cpt.training.steering import add_last

PARTS = ("weights", "companions", "state", "others", "gradients", "optimizer")
OF_AN_ARRAY = 248  # bytes of a .npz file beside an array's own numbers
TOGETHER = "buckets"  # copies of the gradients that DistributedDataParallel sends
BEFORE = "stage files, the last two, until the last stage is committed"
GATHERED = "gathered"  # what of shared out weights is whole at once, with its gradients


def go_on(values: Sequence[float], number: int) -> float:
    """The value of stage 1, 2, … of which the first are known: from the last two of them on a line. Where
    a little more comes with each stage than with the one before (rows of a router for all experts so far), on
    the parabola through the last three."""
    if not values or number <= len(values):
        return values[number - 1] if values else 0
    if len(values) < STAGES:
        return values[-1]
    slope, more = values[-1] - values[-2], number - len(values)
    bend = slope - (values[-2] - values[-3])
    bend = bend if 0 < bend < slope / 100 else 0  # more than that is how a method begins
    return values[-1] + slope * more + bend * more * (more + 1) / 2


@dataclass(frozen=True)
class Outlook:
    """What was `tried` of the base and the first stages, said of all of a run's `work`."""

    plan: Plan
    data: DomainSequence
    work: Work
    tried: Sequence[Tried]
    world: int
    program: int  # bytes that the process held before there was a model; 0 on an accelerator

    @property
    def stages(self) -> int:
        return len(self.work.rows) - 1

    def known(self, name: str, number: int) -> float:
        """A number of a stage, of those tried as it was."""
        return go_on([getattr(each, name) for each in self.tried[1:]], number)

    def memory(self, number: int) -> dict[str, int]:
        """Bytes of a process by part while a stage is learned and scored, and their `peak`; the `rest` is
        activations, and what a step or an estimate needs for a while; on a processor, what the process
        held beyond all these is the `allocator`'s."""
        base, *tried = self.tried
        if not tried:  # nothing is learned
            whole = {"weights and scoring": base.scoring_peak, "program": self.program}
            return whole | {"peak": sum(whole.values())}
        parts = {name: int(go_on([self.own(each, name) for each in tried], number)) for name in PARTS}
        rests = [each.peak - sum(each.parts.values()) for each in tried]
        scoring = [each.scoring_peak - at_rest(each.parts) for each in tried]
        resting = at_rest(parts)
        parts["rest"] = max(0, *rests, resting + max(scoring) - sum(parts.values()))
        if self.is_sharded:
            parts[GATHERED] = 2 * max(each.gathered for each in tried)
        parts["kept"] = parts["gradients"] * self.plan.keeps
        parts[TOGETHER] = parts["gradients"] * (self.world > 1 and not self.is_sharded)
        parts["program"] = self.program
        if self.program:
            beyond = (each.held - each.mapped - each.peak - self.program for each in tried)
            parts["allocator"] = max(0, *beyond)
        return parts | {"peak": sum(parts.values())}

    def ends(self, name: str) -> dict[str, int]:
        """A number of the first stage and of the last."""
        places = {"first": min(1, self.stages), "last": self.stages}
        return {which: int(self.known(name, number)) if number else 0 for which, number in places.items()}

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.plan, self.world)

    def own(self, tried: Tried, name: str) -> float:
        """Bytes of a part that one of the processes has."""
        shared = tried.shareable.get(name, 0) if self.is_sharded else 0
        return tried.parts[name] - shared + shared / self.world

    def disk(self) -> dict[str, int]:
        """Bytes of what a run leaves; of the checkpoint, what it takes while it learns."""
        files = [int(self.known("state", number)) for number in range(1, self.stages + 1)]
        cells = [text for row in self.work.rows for text in row.texts]
        documents = sum(16 * self.work.texts[text].documents + OF_AN_ARRAY for text in cells)
        sizes = [each.checkpoint for each in self.tried if each.checkpoint]
        grown = max(0, files[-1] - self.tried[min(2, len(self.tried) - 1)].state) if files else 0
        return {
            "stage files, the last alone": files[-1] if files else 0,
            BEFORE: sum(files[-2:]) if len(files) > 1 else 0,
            "stage files, all (keep_stages=true)": sum(files),
            "checkpoint, while learning": sizes[-1] + grown + self.memory(1).get("kept", 0) if sizes else 0,
            "losses by document": documents,
            "answers": self.answers(),
            "exported model": self.exported(files),
        }

    def exported(self, files: Sequence[int]) -> int:
        """The model alone, or with its parts: at most what a stage's file has."""
        weights = int(go_on([each.parts["weights"] for each in self.tried[1:]], self.stages))
        return files[-1] if files else weights

    def answers(self) -> int:
        """About what is answered of each task: its reference and as much again."""
        options = self.plan.answers
        if options is None:
            return 0
        due = sum(options.is_due(row.number, stages=self.stages) for row in self.work.rows)
        texts = [self.data.held_out[part] for each in self.data for part in each.parts]
        return due * sum(2 * text.bytes + 24 * len(text) for text in texts)

    def seconds(self, *, base_step_s: float) -> dict[str, float]:
        """Seconds of what is left, by what they go to."""
        found = {"base model": base_step_s * self.plan.model.base.steps if base_step_s else 0.0}
        kinds = ("steps", "looks", "before and after domains", "checkpoints", "scoring", "generated text")
        found |= dict.fromkeys(kinds, 0.0)
        writing_s = self.known("writing_s", 1) / self.world
        for row in self.work.rows:
            found["scoring"] += self.scoring(row)
            found["generated text"] += row.left_generated * writing_s
            if row.left_steps:
                found["steps"] += row.left_steps * self.step_s(row.number)
                found["looks"] += self.looking(row)
                found["before and after domains"] += self.around(row)
                found["checkpoints"] += self.saving(row)
        return found

    def reference(self, number: int) -> Tried:
        """What stands for a stage: the first for itself, the second for all others."""
        return self.tried[min(number, 2, len(self.tried) - 1)]

    def step_s(self, number: int) -> float:
        """Seconds of a step of a stage, by the operations that it takes."""
        own = self.reference(number).step
        flops = go_on([each.step.flops for each in self.tried[1:]], number)
        return own.seconds * flops / own.flops if own.flops > 0 else own.seconds

    def around(self, row: Row) -> float:
        """Seconds of what a method does before a domain and after it; what computes grows with its probe."""
        stage = self.data.domains[row.number - 1]
        share = -(-self.plan.trainer.probe_samples // len(stage.parts))
        samples = sum(min(share, len(self.data.train[part])) for part in stage.parts) / self.world
        batch = min(self.plan.trainer.probe_samples, self.data.eval_batch_size)
        batch = min(batch, len(self.data.train[self.data.domains[0].parts[0]]))
        own = self.reference(row.number)
        total = 0.0
        for name in ("before", "after"):
            phase: Phase = getattr(own, name)
            flops = go_on([getattr(each, name).flops for each in self.tried[1:]], row.number)
            times = samples / batch * flops / phase.flops if phase.flops else 1
            total += phase.seconds * times
        return total

    def looking(self, row: Row) -> float:
        """Seconds of looks at other text while a stage is learned."""
        options, stage = self.plan.monitor, self.data.domains[row.number - 1]
        if not self.plan.watches:
            return 0.0
        total = 0.0
        names = options.choose(stage.parts, self.data.past(stage), stage=stage.name)
        for text in add_last(self.plan.drift, names, self.data, stage):
            kind = "seen" if self.data.places.get(text, self.stages) < row.number - 1 else "unseen"
            tokens = min(options.tokens, int(self.data.validation[text].row_lengths.sum()))
            total += tokens * self.token_s(kind, row.number)
        every = options.interval(max(1, row.steps), looks=self.plan.drift.looks)
        return total * (1 + row.left_steps // every) / self.world

    def saving(self, row: Row) -> float:
        """Seconds of checkpoints, and of the stage's file."""
        own = self.reference(row.number)
        every = self.plan.trainer.checkpoint_every
        if minutes := minutes_of(every):
            count = 1 + int(row.left_steps * self.step_s(row.number) / (60 * minutes))
        else:
            count = -(-row.left_steps // every)
        share = own.state / own.checkpoint if own.checkpoint else 0
        return own.checkpoint_s * (count + share)

    def scoring(self, row: Row) -> float:
        """Seconds of the cells that are left of a row."""
        total = 0.0
        for text in row.left_texts:
            kind = "seen" if self.data.places.get(text, self.stages) < row.number else "unseen"
            total += self.work.texts[text].rows_tokens * self.token_s(kind, row.number)
        return total / self.world

    def token_s(self, kind: str, number: int) -> float:
        """Seconds of a token that is scored after a stage, by the operations that it takes."""
        if number == 0:
            return self.tried[0].unseen.seconds
        own: Phase = getattr(self.reference(number), kind)
        flops = go_on([getattr(each, kind).flops for each in self.tried[1:]], number)
        return own.seconds * flops / own.flops if own.flops else own.seconds


def is_sharded(plan: Plan, world: int) -> bool:
    """Whether so many processes share weights out."""
    return world > 1 and plan.trainer.strategy == "fsdp"


def at_rest(parts: Mapping[str, int]) -> int:
    """Bytes of a module between two stages."""
    return sum(parts[name] for name in ("weights", "companions", "state"))


def as_data(outlook: Outlook, *, base_step_s: float) -> dict[str, Any]:
    """All of it as one would write it to a file."""
    work, last = outlook.work, outlook.stages
    rows = [
        {
            **{"stage": row.name, "steps": row.steps, "left_steps": row.left_steps, "tokens": row.tokens},
            **{"scored_texts": len(row.texts), "scored_tokens": work.scored(row.texts)},
            "left_scored_tokens": work.scored(row.left_texts),
            **({"generated_tokens": row.generated} if outlook.data.replay.generates else {}),
            **({"stored": int(outlook.known("stored", row.number))} if row.number else {}),
        }
        for row in work.rows
    ]
    texts = [
        {"text": each.name, "train_tokens": each.train, "held_out_tokens": each.held_out}
        for each in work.texts.values()
    ]
    seconds = outlook.seconds(base_step_s=base_step_s)
    trained = [int(outlook.known("trained", number)) for number in {1, last} if last]
    return {
        "texts": texts,
        "stages": rows,
        "scored_tokens": {
            **{name: sum(row[name] for row in rows) for name in ("scored_tokens", "left_scored_tokens")},
            "full_matrix": work.full,
        },
        "trained_parameters": max(trained, default=0),
        "memory": {"first": outlook.memory(min(1, last)), "last": outlook.memory(last)},
        **{name: outlook.ends(name) for name in ("mapped", "host")},
        "grows_by_domain": growth(outlook),
        "disk": outlook.disk(),
        "seconds": seconds | {"total": sum(seconds.values())},
        "timed_steps": TIMED,
        "step_seconds": outlook.reference(last).step.seconds if last else None,
    }


def growth(outlook: Outlook) -> Mapping[str, int]:
    """Bytes that a method takes more with each further domain: in memory, and in a stage's file."""
    tried = outlook.tried[1:]
    if len(tried) < 2:
        return {"memory": 0, "stored": 0}
    held = [sum(each.parts[name] for name in PARTS) for each in tried[-2:]]
    return {"memory": held[1] - held[0], "stored": tried[-1].stored - tried[-2].stored}
