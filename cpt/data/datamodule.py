"""The sequence of domains as a LightningDataModule that every method shares."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import cast

import numpy as np
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, Sampler

from cpt.core.distributed import leave_together
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.randomness import key, permute
from cpt.data.collate import Batch, Collator, Sizes
from cpt.data.loader_processes import WatchedLoader, prepare_loader_processes, start_loader_process
from cpt.data.mixture import MixedText, Mixture, SourceUse, find_uses
from cpt.data.options import Budget, Domain
from cpt.data.packing import Packed
from cpt.data.replay import NEW, PAST, ReplayConfig, ReplayPool, ReplaySource, SourcePool, to_fraction
from cpt.data.sampler import EvalSubset, ResumeSampler, ShardSampler, TrainStream
from cpt.data.sources.base import GENERAL
from cpt.optim.schedulers import Progress


@dataclass(frozen=True)
class ImportanceLoader:
    """Batches on a device, as often as they are iterated; between two of them a run may be preempted."""

    loader: DataLoader
    device: torch.device
    domain: str
    num_common: int  # batches that every process has
    is_silent: bool  # all processes but the first

    def __iter__(self) -> Iterator[Batch]:
        # Not in the heartbeat: it takes the bars of a stage for steps of training.
        with make_progress_bar(
            f"measuring on {self.domain}",
            total=len(self.loader),
            hidden=self.is_silent,
            delay=DELAY,
            in_heartbeat=False,
        ) as bar:
            for number, batch in enumerate(self.loader):
                device_batch = {name: value.to(self.device) for name, value in batch.items()}
                yield cast(Batch, device_batch)
                bar.update()
                # Some processes may have one batch more than others: a collective after it would wait for
                # ever.
                if number < self.num_common:
                    leave_together(f"in the probe of {self.domain}")

    def __len__(self) -> int:
        return len(self.loader)


@dataclass(frozen=True, eq=False)
class RepeatedBatch(Dataset):
    """The same batch, a number of times."""

    batch: Batch
    num_batches: int

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, number: int) -> Batch:
        return self.batch


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
    mixed: Mapping[str, MixedText] = field(default_factory=dict)  # the sources of replay
    trainer: Trainer = field(init=False)  # Lightning's, while it fits or validates
    # The domain that has been entered last; before the first one a domain without texts.
    domain: Domain = field(default=Domain(name="", index=-1, texts=()), init=False)
    requested_texts: Sequence[str] | None = field(default=None, init=False)  # held out, to score; None: all
    by_length: bool = field(default=False, init=False)  # whether rows of similar length are scored together
    replay_source: ReplaySource | None = field(default=None, init=False)  # None: training text is replayed
    trial_batch: Batch | None = field(default=None, init=False)  # trains each micro-batch, in place of texts

    def __post_init__(self) -> None:
        super().__init__()
        self.replay.check(
            domains=max((len(self.earlier_texts(domain)) for domain in self.domains), default=0),
            general=GENERAL in self.train,
            batch_size=self.budget.batch_size,
        )
        self.mixture = Mixture(self.mixed, self.replay, self.seed)
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
        """Optimizer steps of a stage, those of recovery included."""
        return self.recovery_steps(domain) + sum(self.steps_by_text(domain))

    def recovery_steps(self, domain: Domain) -> int:
        """The first steps of a stage, on the texts of the stages before."""
        if not domain.recovery or not self.earlier_texts(domain):
            return 0
        return math.ceil(to_fraction(domain.recovery) * sum(self.steps_by_text(domain)))

    def steps_by_text(self, domain: Domain) -> list[int]:
        texts = [self.train[name] for name in domain.texts]
        return [self.budget.steps_for(text, length=text.tokens_per_row) for text in texts]

    def count_rows(self, domain: Domain) -> int:
        """The rows of a stage's texts, without those that it replays."""
        return sum(len(self.train[name]) for name in domain.texts)

    @cached_property
    def cumulative_steps(self) -> list[int]:
        """Steps before each stage, and of all; counted once, not in each step."""
        return list(itertools.accumulate(map(self.steps, self.domains), initial=0))

    @cached_property
    def stage_indices(self) -> dict[Domain, int]:
        """The position of each stage in the order; not searched for in each step."""
        return {domain: stage for stage, domain in enumerate(self.domains)}

    def progress(self, step: int) -> Progress:
        """Where the run is at a step of the current stage; recovery has a schedule of its own."""
        stage = self.stage_indices[self.domain]
        steps_before = self.cumulative_steps[stage]
        stage_steps = self.cumulative_steps[stage + 1] - steps_before
        recovery_steps = self.recovery_steps(self.domain)

        if step < recovery_steps:
            schedule_step = step
            schedule_steps = recovery_steps
        else:
            schedule_step = step - recovery_steps
            schedule_steps = stage_steps - recovery_steps
        return Progress(
            schedule_step,
            schedule_steps,
            domain=stage,
            domains=len(self.domains),
            total_step=steps_before + step,
            total_steps=self.cumulative_steps[-1],
            first_domain_steps=self.cumulative_steps[1],
        )

    def earlier_texts(self, domain: Domain) -> list[str]:
        """The texts of the stages before a domain's, each once."""
        names: dict[str, None] = {}
        for earlier_domain in self.domains[: self.stage_indices[domain]]:
            names.update(dict.fromkeys(earlier_domain.texts))
        return list(names)

    def source_pools(self, domain: Domain) -> list[SourcePool]:
        """What a stage draws from the sources of replay. Steps of recovery read none of them."""
        if not self.mixed:
            return []
        stage_samples = []
        for stage in self.domains[: self.stage_indices[domain] + 1]:
            stage_samples.append(sum(self.steps_by_text(stage)) * self.budget.batch_size)
        return self.mixture.pools(stage_samples)

    def find_uses(self, domain: Domain) -> list[SourceUse]:
        """How a stage uses the sources of replay."""
        steps = sum(self.steps_by_text(domain))
        return list(find_uses(self.source_pools(domain), steps=steps, batch_size=self.budget.batch_size))

    def find_asked_shares(self, domain: Domain) -> dict[str, float]:
        """The shares of a stage's samples that the options ask for, by the parts of the mixture; of new text
        what the others leave."""
        shares = {PAST: 0.0, GENERAL: float(self.replay.general_ratio)}
        if self.earlier_texts(domain):
            shares[PAST] = float(self.replay.past_ratio)
        for use in self.find_uses(domain):
            shares[use.name] = use.asked_share

        # Added samples enlarge the batch: each share is one of the larger batch.
        replayed = sum(shares.values())
        if self.replay.is_appended:
            shares = {name: share / (1 + replayed) for name, share in shares.items()}
        return {NEW: 1 - sum(shares.values()), **shares}

    def max_replayed(self, domain: Domain) -> dict[str, int]:
        """The texts that a stage replays, with how many samples it draws of each at most."""
        num_samples = self.steps(domain) * self.budget.batch_size
        num_past = math.floor(num_samples * to_fraction(self.replay.past_ratio))
        num_general = math.floor(num_samples * to_fraction(self.replay.general_ratio))

        # Turns go round, so that texts differ by one draw at most: rounded up, no text has too few.
        replayed = {}
        earlier_texts = self.earlier_texts(domain)
        for name in earlier_texts:
            replayed[name] = math.ceil(Fraction(num_past, len(earlier_texts)))
        replayed[GENERAL] = num_general
        return {name: count for name, count in replayed.items() if count > 0}

    def train_dataloader(self) -> DataLoader:
        """The current stage from the trainer's step on; resuming costs the same anywhere."""
        if self.trial_batch is not None:
            num_batches = self.trainer.max_steps * self.accumulate
            return DataLoader(RepeatedBatch(self.trial_batch, num_batches), batch_size=None)

        # A source of replay stands for what it has written: a text without any is not replayed.
        stage = self.domain
        texts = self.train if self.replay_source is None else self.replay_source.texts
        past = {name: texts[name] for name in self.earlier_texts(stage) if name in texts}
        general = {GENERAL: texts[GENERAL]} if GENERAL in texts else {}
        pools = self.replay.pools(past, general, stage=stage.name, seed=self.seed)
        if self.replay_source is not None:
            pools += self.replay_source.extra_pools(stage)
        pools += self.source_pools(stage)

        recovery = None
        recovery_steps = self.recovery_steps(stage)
        if recovery_steps:
            recovery = ReplayPool(
                past,
                share=Fraction(1),
                is_appended=False,
                buffer_size=self.replay.buffer_size,
                seed=self.seed,
                stream_name=(stage.name, "recovery"),
            )

        stream = TrainStream(
            {name: self.train[name] for name in stage.texts},
            objective=self.objective,
            seed=self.seed,
            batch_size=self.budget.batch_size,
            steps=self.steps_by_text(stage),
            accumulate=self.accumulate,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
            pools=pools,
            recovery=recovery,
            recovery_steps=recovery_steps,
            domain_indices=self.domain_indices,
            part_names=self.mixture.part_names if self.mixed else (),
        )
        sampler = ResumeSampler(self.trainer.global_step * self.accumulate, len(stream))
        return self.make_loader(stream, sampler)

    def val_dataloader(self) -> DataLoader:
        """The held-out texts that are asked for, with the same masks for every model; the process's share."""
        rows = {name: self.scored_rows(name) for name in self.scored_texts}
        if self.by_length:
            rows = {name: self.held_out[name].by_length(text_rows) for name, text_rows in rows.items()}
        return self.make_sharded_loader(self.held_out, rows, purpose="score")

    @contextmanager
    def scoring(self, texts: Sequence[str], *, by_length: bool) -> Iterator[None]:
        """Inside the context these held-out texts are evaluated; `by_length`: rows of similar length share a
        batch."""
        self.requested_texts = texts
        self.by_length = by_length
        try:
            yield
        finally:
            self.requested_texts = None
            self.by_length = False

    @property
    def scored_texts(self) -> list[str]:
        if self.requested_texts is None:
            return list(self.held_out)
        return [name for name in self.held_out if name in self.requested_texts]

    def scored_rows(self, name: str) -> np.ndarray:
        """The rows [B] of a held-out text that are scored, ascending: all, or a sample of `eval_tokens`."""
        if self.eval_tokens is None:
            return np.arange(len(self.held_out[name]))
        return self.held_out[name].draw_rows(self.eval_tokens, stream=key("scored rows", name))

    @property
    def sampled_texts(self) -> list[str]:
        """The held-out texts of which `eval_tokens` leaves rows out."""
        return [name for name, text in self.held_out.items() if len(self.scored_rows(name)) < len(text)]

    def scored_sizes(self, name: str) -> Sizes:
        return self.held_out[name].sizes(self.scored_rows(name))

    def importance_batches(self) -> ImportanceLoader:
        """A fixed sample of the current stage's training text with fixed masks; the process's share of it."""
        texts = {name: self.train[name] for name in self.domain.texts}
        max_rows = math.ceil(self.importance_samples / len(texts))
        rows = {}
        for name, text in texts.items():
            positions = np.arange(min(max_rows, len(text)))
            rows[name] = permute(positions, len(text), stream=key("probe", name))

        loader = self.make_sharded_loader(texts, rows, purpose="probe")
        sampler = cast(ShardSampler, loader.sampler)
        device = self.trainer.strategy.root_device
        is_silent = not self.trainer.is_global_zero
        return ImportanceLoader(loader, device, self.domain.name, sampler.common, is_silent)

    def make_sharded_loader(
        self, texts: Mapping[str, Packed], rows: Mapping[str, np.ndarray], *, purpose: str
    ) -> DataLoader:
        """Rows of texts in batches of one text each; the process's share of them. `purpose` is "score" or
        "probe", which have masks of their own."""
        world = self.trainer.world_size
        is_scoring = purpose == "score"
        # Declared by cpt's strategy of sharded models: all its processes make the same forward passes.
        is_lockstep = getattr(self.trainer.strategy, "lockstep", False)
        batches = EvalSubset(
            texts,
            rows,
            objective=self.objective.scoring if is_scoring else self.objective,
            batch_size=self.eval_batch_size,
            purpose=purpose,
            domain_indices=self.domain_indices,
            lockstep_processes=world if is_lockstep else 1,
            min_batches=world if is_scoring else 0,  # Lightning refuses a process without a batch
        )
        sampler = ShardSampler(len(batches), rank=self.trainer.global_rank, world=world)
        return self.make_loader(batches, sampler)

    def make_loader(self, batches: Dataset, sampler: Sampler[int]) -> DataLoader:
        """A loader of whole batches, by worker processes if there are to be some."""
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
