"""The sequence of domains as a LightningDataModule that every method shares."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, Sampler

from cpt.core.distributed import leave_together
from cpt.core.randomness import key, shuffle
from cpt.data.collate import Batch, Collator, Sizes
from cpt.data.loader_processes import WatchedLoader, prepare_loader_processes, start_loader_process
from cpt.data.options import Budget, Domain
from cpt.data.packing import Packed
from cpt.data.replay import ReplayConfig, ReplayPool, ReplaySource, exact
from cpt.data.sampler import EvalSubset, ResumeSampler, ShardSampler, TrainStream
from cpt.data.sources.base import GENERAL
from cpt.optim.schedulers import Progress


@dataclass(frozen=True)
class ProbeLoader:
    """Batches on a device, as often as they are iterated; between two of them a run may be preempted."""

    loader: DataLoader
    device: torch.device
    name: str

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.loader):
            yield cast(Batch, {name: value.to(self.device) for name, value in batch.items()})
            if number < cast(ShardSampler, self.loader.sampler).common:
                leave_together(f"in the probe of {self.name}")

    def __len__(self) -> int:
        return len(self.loader)


@dataclass(eq=False, repr=False)
class DomainSequence(LightningDataModule):
    """The stages in their order; `enter` chooses the one that the loaders are of. `train`, `held_out` and
    `validation` (evaluated during training) are packed texts by name: the domains in the order of the
    matrix's columns, then `general`. Raises ValueError for invalid replay."""

    domains: Sequence[Domain]
    _: KW_ONLY
    train: Mapping[str, Packed]
    held_out: Mapping[str, Packed]
    objective: Collator
    budget: Budget
    replay: ReplayConfig
    seed: int
    accumulate: int
    eval_batch_size: int
    importance_samples: int
    workers: int
    eval_tokens: int | None = None
    validation: Mapping[str, Packed] = field(default_factory=dict)
    trainer: Trainer = field(init=False)  # Lightning's, while it fits or validates
    domain: Domain = field(default=Domain("", -1, ()), init=False)  # before the first is entered
    asked: Sequence[str] | None = field(default=None, init=False)  # the held-out texts to score; None: all
    by_length: bool = field(default=False, init=False)  # whether rows of similar length are scored together
    replay_source: ReplaySource | None = field(default=None, init=False)  # None: training text is replayed

    def __post_init__(self) -> None:
        super().__init__()
        most = max((len(self.past(domain)) for domain in self.domains), default=0)
        self.replay.check(domains=most, general=GENERAL in self.train, batch_size=self.budget.batch_size)
        self.domain_indices: dict[str, int] = {}  # of the domains' texts in the order
        for domain in self.domains:
            for index, text in enumerate(domain.texts, start=domain.index):
                self.domain_indices[text] = index

    def __iter__(self) -> Iterator[Domain]:
        return iter(self.domains)

    def __len__(self) -> int:
        return len(self.domains)

    def enter(self, domain: Domain) -> None:
        self.domain = domain

    def steps(self, domain: Domain) -> int:
        return self.recovery_steps(domain) + sum(self.steps_by_part(domain))

    def recovery_steps(self, domain: Domain) -> int:
        """The first of them, on the texts of the stages before."""
        own = sum(self.steps_by_part(domain)) if domain.recovery and self.past(domain) else 0
        return math.ceil(exact(domain.recovery) * own)

    def steps_by_part(self, domain: Domain) -> list[int]:
        texts = [self.train[part] for part in domain.texts]
        return [self.budget.steps_for(text, length=text.tokens_per_row) for text in texts]

    @cached_property
    def cumulative_steps(self) -> list[int]:
        """Steps before each stage, and of all; counted once, not in each step."""
        return list(accumulate(map(self.steps, self.domains), initial=0))

    def progress(self, step: int) -> Progress:
        """Where the run is at a step of the current stage; recovery has a schedule of its own."""
        made, place = self.cumulative_steps, self.domains.index(self.domain)
        before, ahead = made[place], self.recovery_steps(self.domain)
        within = (step, ahead) if step < ahead else (step - ahead, made[place + 1] - before - ahead)
        return Progress(*within, place, len(self.domains), before + step, made[-1], made[1])

    def past(self, domain: Domain) -> list[str]:
        """The texts of the stages before a domain's, each once."""
        before = self.domains[: self.domains.index(domain)]
        return list(dict.fromkeys(part for each in before for part in each.texts))

    def replayed(self, domain: Domain) -> dict[str, int]:
        """The texts that a stage replays, with how many samples it draws of each at most."""
        samples, found = self.steps(domain) * self.budget.batch_size, dict[str, int]()
        past = self.past(domain) if self.replay.past_ratio else []
        for share, names in ((self.replay.past_ratio, past), (self.replay.general_ratio, [GENERAL])):
            drawn = math.floor(samples * exact(share))
            found |= dict.fromkeys(names, -(-drawn // max(1, len(names))))
        return {name: count for name, count in found.items() if count}

    def train_dataloader(self) -> DataLoader:
        """The current stage from the trainer's step on; resuming costs the same anywhere."""
        stage, recovery, ahead = self.domain, None, self.recovery_steps(self.domain)
        texts = self.train if self.replay_source is None else self.replay_source.texts
        past = {name: texts[name] for name in self.past(stage) if name in texts}
        general = {GENERAL: texts[GENERAL]} if GENERAL in texts else {}
        pools = self.replay.pools(past, general, stage=stage.name, seed=self.seed)
        if self.replay_source is not None:
            pools += self.replay_source.extra_pools(stage)
        if ahead:
            how = dict[str, Any](memory=self.replay.buffer_size, place=(stage.name, "recovery"))
            recovery = ReplayPool(past, share=exact(1), adds=False, seed=self.seed, **how)
        stream = TrainStream(
            {part: self.train[part] for part in stage.texts},
            objective=self.objective,
            seed=self.seed,
            batch_size=self.budget.batch_size,
            steps=self.steps_by_part(stage),
            accumulate=self.accumulate,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
            earlier=pools,
            recovery=recovery,
            ahead=ahead,
            places=self.domain_indices,
        )
        return self.loader(stream, ResumeSampler(self.trainer.global_step * self.accumulate, len(stream)))

    def val_dataloader(self) -> DataLoader:
        """The held-out texts that are asked for, with the same masks for every model; the process's share."""
        rows = {name: self.scored_rows(name) for name in self.scored_texts}
        if self.by_length:
            rows = {name: self.held_out[name].by_length(each) for name, each in rows.items()}
        return self.shared_out(self.held_out, rows, purpose="score")

    @property
    def scored_texts(self) -> list[str]:
        return [name for name in self.held_out if self.asked is None or name in self.asked]

    def scored_rows(self, name: str) -> np.ndarray:
        """The rows of a held-out text that are scored: all, or a sample of `eval_tokens`."""
        if self.eval_tokens is None:
            return np.arange(len(self.held_out[name]))
        return self.held_out[name].draw_rows(self.eval_tokens, stream=key("scored rows", name))

    @property
    def cut(self) -> list[str]:
        """The held-out texts of which `eval_tokens` leaves rows out."""
        return [name for name, text in self.held_out.items() if len(self.scored_rows(name)) < len(text)]

    def scored_sizes(self, name: str) -> Sizes:
        return self.held_out[name].sizes(self.scored_rows(name))

    def importance_batches(self) -> ProbeLoader:
        """A fixed sample of the current stage's training text with fixed masks; the process's share of it."""
        texts, rows = {part: self.train[part] for part in self.domain.texts}, {}
        for name, text in texts.items():
            places = np.arange(min(math.ceil(self.importance_samples / len(texts)), len(text)))
            rows[name] = shuffle(places, len(text), stream=key("probe", name))
        loader = self.shared_out(texts, rows, purpose="probe")
        return ProbeLoader(loader, self.trainer.strategy.root_device, self.domain.name)

    def shared_out(
        self, texts: Mapping[str, Packed], rows: Mapping[str, np.ndarray], *, purpose: str
    ) -> DataLoader:
        """Rows of texts in batches of one text each; the process's share of them."""
        world = self.trainer.world_size
        how = dict[str, Any](batch_size=self.eval_batch_size, purpose=purpose, places=self.domain_indices)
        objective = self.objective.scoring if purpose == "score" else self.objective
        together = world if getattr(self.trainer.strategy, "lockstep", False) else 1
        least = world if purpose == "score" else 0  # Lightning refuses a process without a batch
        batches = EvalSubset(texts, rows, objective=objective, together=together, least=least, **how)
        return self.loader(batches, ShardSampler(len(batches), rank=self.trainer.global_rank, world=world))

    def loader(self, batches: Dataset, sampler: Sampler[int]) -> DataLoader:
        if self.workers:
            prepare_loader_processes()
        return WatchedLoader(
            batches,
            batch_size=None,
            sampler=sampler,
            num_workers=self.workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
            worker_init_fn=start_loader_process,
        )
