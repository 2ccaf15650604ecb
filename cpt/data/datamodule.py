"""The sequence of domains as a LightningDataModule that every method shares."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, Sampler

from cpt.core.preemption import ignore_signals, leave_together
from cpt.core.randomness import key, shuffle
from cpt.data.batch import Batch, Collator, Sizes
from cpt.data.budget import Budget
from cpt.data.packing import Packed
from cpt.data.replay import Generated, Mixture, Pool, exact
from cpt.data.sampling import From, Recovery, Share, Stream, Subset
from cpt.data.sources.base import GENERAL
from cpt.optim.schedulers import Progress


@dataclass(frozen=True)
class OnDevice:
    """A loader's batches on a device, as often as they are asked for. Between two of them a run may leave."""

    loader: DataLoader
    device: torch.device
    name: str
    common: int  # batches that every process has

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.loader):
            yield cast(Batch, {name: value.to(self.device) for name, value in batch.items()})
            if number < self.common:
                leave_together(f"in the probe of {self.name}")

    def __len__(self) -> int:
        return len(self.loader)


@dataclass(frozen=True)
class Domain:
    """What is learned in one stage: the text of its name, or a mixture of several texts; before it, for a
    share of its steps, those of the stages before."""

    name: str
    index: int  # place in the order
    parts: tuple[str, ...]
    recovery: float = 0.0  # steps on the texts before it, as a share of its own


class DomainSequence(LightningDataModule):
    """The domains in the order they are learned; `enter` chooses what the loaders give.

    `train` and `held_out` are the packed texts by name: those of the domains, in the order of the matrix's
    columns, and that of `general`, if there is one, last. `replay` says how much earlier text stands among a
    domain's samples: that of the stages before it, and the general text; `forms` are the domains' examples as
    they are written, where the model is to learn that; `validation` is text that is looked at while a domain
    is learned.

    Raises ValueError for sizes below 1 and for replay that cannot be had."""

    trainer: Trainer  # Lightning's, while it fits or validates
    domain: Domain = Domain("", -1, ())  # before the first is entered
    asked: Sequence[str] | None = None  # the held-out texts that are scored; None: all
    by_length = False  # whether rows of much the same length are scored together
    generated: Mapping[str, Packed] | None = None  # what the model wrote before the current domain, by text

    def __init__(
        self,
        domains: Sequence[Domain],
        *,
        train: Mapping[str, Packed],
        held_out: Mapping[str, Packed],
        objective: Collator,
        budget: Budget,
        replay: Mixture,
        seed: int,
        accumulate: int,
        eval_batch_size: int,
        probe_samples: int,
        workers: int,
        eval_tokens: int | None = None,
        forms: Mapping[str, Packed] | None = None,
        validation: Mapping[str, Packed] | None = None,
    ) -> None:
        super().__init__()
        sizes = {"accumulate_grad_batches": accumulate, "eval_batch_size": eval_batch_size}
        for name, value in (sizes | {"probe_samples": probe_samples}).items():
            if value < 1:
                raise ValueError(f"trainer.{name}={value}; allowed: 1 or more")
        self.domains, self.train, self.held_out = tuple(domains), train, held_out
        self.objective, self.budget, self.seed, self.accumulate = objective, budget, seed, accumulate
        self.eval_batch_size, self.probe_samples, self.workers = eval_batch_size, probe_samples, workers
        self.replay, self.eval_tokens, self.forms = replay, eval_tokens, forms or {}
        self.validation = validation or {}
        most = max((len(self.past(domain)) for domain in self.domains), default=0)
        replay.check(domains=most, general=GENERAL in train, batch_size=budget.batch_size)
        self.places = {
            part: place for domain in self.domains for place, part in enumerate(domain.parts, domain.index)
        }

    def __iter__(self) -> Iterator[Domain]:
        return iter(self.domains)

    def __len__(self) -> int:
        return len(self.domains)

    def enter(self, domain: Domain) -> None:
        """Makes a domain the current one."""
        self.domain = domain

    def steps(self, domain: Domain) -> int:
        """Optimizer steps of a domain's stage."""
        return self.recovery_steps(domain) + sum(self.steps_by_part(domain))

    def recovery_steps(self, domain: Domain) -> int:
        """Those of them, the first, that are made on the texts before it alone; none where there is none."""
        if not domain.recovery or not self.past(domain):
            return 0
        return math.ceil(exact(domain.recovery) * sum(self.steps_by_part(domain)))

    def steps_by_part(self, domain: Domain) -> list[int]:
        texts = [self.train[part] for part in domain.parts]
        return [self.budget.steps_for(text, length=text.tokens_per_row) for text in texts]

    def progress(self, step: int) -> Progress:
        """Where the run is at a step of the current domain's stage; recovery has a course of its own."""
        made, place = self.made, self.numbers[self.domain]
        before, ahead = made[place], self.recovery_steps(self.domain)
        within = (step, ahead) if step < ahead else (step - ahead, made[place + 1] - before - ahead)
        return Progress(*within, place, len(self.domains), before + step, made[-1], made[1])

    @cached_property
    def numbers(self) -> dict[Domain, int]:
        """The places of the domains in their order."""
        return {domain: number for number, domain in enumerate(self.domains)}

    @cached_property
    def made(self) -> list[int]:
        """Optimizer steps after so many stages; of all domains once, not in each step."""
        return list(accumulate(map(self.steps, self.domains), initial=0))

    def past(self, domain: Domain) -> list[str]:
        """The texts that were learned before a domain, each once."""
        before = self.domains[: self.domains.index(domain)]
        return list(dict.fromkeys(part for each in before for part in each.parts))

    def replayed(self, domain: Domain) -> dict[str, int]:
        """The texts that a domain's batches replay, each with the samples that are drawn of it at most."""
        samples = self.steps(domain) * self.budget.batch_size
        found: dict[str, int] = {}
        past = self.past(domain) if self.replay.past else []
        for share, names in ((self.replay.past, past), (self.replay.general, [GENERAL])):
            drawn = samples * exact(share).numerator // exact(share).denominator
            found |= dict.fromkeys(names, -(-drawn // max(1, len(names))))
        return {name: count for name, count in found.items() if count}

    def earlier(self, domain: Domain) -> list[Pool]:
        """What a domain's batches replay: real text, or what the model wrote in its place."""
        texts = self.memory(domain)
        general = {GENERAL: texts[GENERAL]} if self.replay.general and GENERAL in texts else {}
        past = self.past_texts(domain) if self.replay.past else {}
        pools = self.replay.pools(past, general, stage=domain.name, seed=self.seed)
        if self.forms and isinstance(self.replay, Generated):
            forms = {part: self.forms[part] for part in domain.parts}
            pools.append(self.replay.form_pool(forms, stage=domain.name, seed=self.seed))
        return pools

    def memory(self, domain: Domain) -> Mapping[str, Packed]:
        """The texts that are replayed from, by name: what the model wrote of them where it is to, or their
        training texts."""
        if not self.replay.generates:
            return self.train
        if self.generated is None:
            raise ValueError(f"nothing has been generated yet that {domain.name} could replay")
        return self.generated

    def past_texts(self, domain: Domain) -> dict[str, Packed]:
        """What there is of the texts that were learned before a domain."""
        texts = self.memory(domain)
        return {name: texts[name] for name in self.past(domain) if name in texts}

    def recovery(self, domain: Domain) -> Recovery | None:
        """What a domain's stage begins with, before its own text."""
        if not (steps := self.recovery_steps(domain)):
            return None
        pool = self.replay.memory_pool(self.past_texts(domain), stage=domain.name, seed=self.seed)
        return Recovery(pool, steps)

    def train_dataloader(self) -> DataLoader:
        """The current domain from the trainer's step on; resuming costs the same anywhere."""
        stream = Stream(
            {part: self.train[part] for part in self.domain.parts},
            objective=self.objective,
            seed=self.seed,
            batch_size=self.budget.batch_size,
            steps=self.steps_by_part(self.domain),
            accumulate=self.accumulate,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
            earlier=self.earlier(self.domain),
            recovery=self.recovery(self.domain),
            places=self.places,
        )
        return self.loader(stream, From(self.trainer.global_step * self.accumulate, len(stream)))

    def val_dataloader(self) -> DataLoader:
        """The held-out texts that are asked for, the same masked positions for every model; each process has
        its share of the batches."""
        rows = {name: self.scored_rows(name) for name in self.scored_texts}
        if self.by_length:
            rows = {name: self.held_out[name].by_length(each) for name, each in rows.items()}
        return self.shared_out(self.held_out, rows, purpose="score")

    @property
    def scored_texts(self) -> list[str]:
        """The held-out texts that are scored now, in their order."""
        asked = self.held_out if self.asked is None else set(self.asked)
        return [name for name in self.held_out if name in asked]

    def scored_rows(self, name: str) -> np.ndarray:
        """The rows of a held-out text that stand for it: all, or those that `eval_tokens` are drawn from."""
        text = self.held_out[name]
        if self.eval_tokens is None:
            return np.arange(len(text))
        return text.draw_rows(self.eval_tokens, stream=key("scored rows", name))

    @property
    def cut(self) -> list[str]:
        """The held-out texts of which `eval_tokens` leave a part out."""
        texts = self.held_out.items() if self.eval_tokens is not None else ()
        longer = [name for name, text in texts if text.row_lengths.sum() > int(self.eval_tokens or 0)]
        return [name for name in longer if len(self.scored_rows(name)) < len(self.held_out[name])]

    def scored_sizes(self, name: str) -> Sizes:
        """What is known of the rows that are scored of a held-out text."""
        return self.held_out[name].sizes(self.scored_rows(name))

    def probe(self) -> OnDevice:
        """A fixed random subset of the current domain's training text, with fixed masks; the process's share
        of it."""
        texts = {part: self.train[part] for part in self.domain.parts}
        share = math.ceil(self.probe_samples / len(texts))
        rows = {
            name: shuffle(np.arange(min(share, len(text))), len(text), stream=key("probe", name))
            for name, text in texts.items()
        }
        loader = self.shared_out(texts, rows, purpose="probe")
        common = cast(Share, loader.sampler).common
        return OnDevice(loader, self.trainer.strategy.root_device, self.domain.name, common)

    def shared_out(
        self, texts: Mapping[str, Packed], rows: Mapping[str, np.ndarray], *, purpose: str
    ) -> DataLoader:
        world = self.trainer.world_size
        batches = Subset(
            texts,
            rows,
            objective=self.objective.scoring if purpose == "score" else self.objective,
            batch_size=self.eval_batch_size,
            purpose=purpose,
            places=self.places,
            together=world if getattr(self.trainer.strategy, "lockstep", False) else 1,
        )
        return self.loader(batches, Share(len(batches), rank=self.trainer.global_rank, world=world))

    def loader(self, batches: Dataset, sampler: Sampler[int]) -> DataLoader:
        pinned = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            batches,
            batch_size=None,
            sampler=sampler,
            num_workers=self.workers,
            pin_memory=pinned,
            worker_init_fn=ignore_signals,
        )
