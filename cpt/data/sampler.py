"""Batches as functions of their number: workers, ranks and the step of a resume do not matter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from cpt.core.randomness import key, permute, sample_keys
from cpt.data.collate import Batch, Collator, Rows, make_idle_batch
from cpt.data.options import share_batch
from cpt.data.packing import PADDING, Packed
from cpt.data.replay import NEW, PAST, ReplayPool, Samples, SourcePool
from cpt.data.sources.base import DOCUMENT_MASK, NONE

NUM_LOCATED_STEPS = 32  # steps
NO_DOMAIN = -1  # the index of the domain of general text, and of the sources of replay


@dataclass(eq=False, repr=False)
class TrainStream(Dataset):
    """The training batches of one stage for one process.

    Position p of a text's stream is row `p mod rows` of the shuffle of epoch `p div rows`; a stage of
    several texts shuffles the positions of all. A step takes the next `batch_size` positions, less those
    that replay displaces, and shares its samples out among processes and micro-batches."""

    stage_texts: Mapping[str, Packed]
    _: KW_ONLY
    objective: Collator
    seed: int
    batch_size: int  # samples of a step, of all processes and micro-batches
    steps: Sequence[int]  # of each text
    accumulate: int  # micro-batches of a step
    rank: int
    world: int
    pools: Sequence[ReplayPool] = ()  # what is replayed
    recovery: ReplayPool | None = None
    recovery_steps: int = 0  # come first, on `recovery` alone
    domain_indices: Mapping[str, int] = field(default_factory=dict)  # of texts in the order of domains
    part_names: Sequence[str] = ()  # of a mixture, whose parts are counted: see Mixture.part_names

    def __post_init__(self) -> None:
        share_batch(self.batch_size, accumulate=self.accumulate, world=self.world)
        self.names = list(self.stage_texts)
        domains = [self.domain_indices.get(name, NO_DOMAIN) for name in self.names]
        self.texts = [*self.stage_texts.values()]  # then those of each pool, recovery last
        pools = [*self.pools]
        if self.recovery is not None:
            pools.append(self.recovery)
        for pool in pools:
            self.texts += pool.texts.values()
            # A source of replay is no domain, whatever its name is.
            indices = {} if isinstance(pool, SourcePool) else self.domain_indices
            domains += [indices.get(name, NO_DOMAIN) for name in pool.texts]
        self.domains = np.array(domains)
        if self.part_names:
            self.number_parts(pools)

        # Positions of the stage's own stream: of each text, those from `starts` up to `ends`.
        self.total = sum(self.steps)
        self.ends = np.cumsum([self.count_new(steps) for steps in self.steps])
        self.starts = np.concatenate([[0], self.ends[:-1]])
        # New samples of NUM_LOCATED_STEPS steps, and the first of these steps.
        self.located: tuple[int, Samples] | None = None

    def number_parts(self, pools: Sequence[ReplayPool]) -> None:
        """Sets the part of the mixture, and the factor of the loss, of each text."""
        labels = [NEW] * len(self.names)
        weights = [1.0] * len(self.names)
        for pool in pools:
            label = pool.label if pool.label in self.part_names else PAST  # recovery
            labels += [label] * len(pool.texts)
            weights += [pool.loss_weight] * len(pool.texts)
        self.part_of_text = np.array([self.part_names.index(label) for label in labels])
        self.weight_of_text = np.array(weights, np.float32)

    def __len__(self) -> int:
        return (self.recovery_steps + self.total) * self.accumulate

    def __getitem__(self, number: int) -> Batch:
        """Batch `number` of this process. `weight` makes the mean over processes and micro-batches the mean
        over the scored tokens of the whole step."""
        step, micro_batch = divmod(number, self.accumulate)
        if self.recovery is not None and step < self.recovery_steps:
            samples = self.locate_recovery(self.recovery, step)
        else:
            samples = self.locate_step(step - self.recovery_steps)

        # Every process finds all samples of the step, and reads the share of its micro-batch.
        num_samples = len(samples.rows)
        num_shares = self.accumulate * self.world
        share = micro_batch * self.world + self.rank
        begin = num_samples * share // num_shares
        end = num_samples * (share + 1) // num_shares
        local_samples = samples.select(slice(begin, end))

        batch, _ = self.objective.batch(stack_rows(self.texts, local_samples))
        batch["domains"] = torch.from_numpy(self.domains[local_samples.text_indices])
        num_scored, num_read = self.count_tokens(samples)
        batch["weight"] = torch.tensor(num_shares / max(1, num_scored))
        batch["mean_rows"] = torch.tensor(num_samples / num_shares)
        batch["mean_tokens"] = torch.from_numpy(num_read / num_shares).float()
        if self.part_names:
            self.add_parts(batch, samples, local_samples)
        return self.objective.lay_out(batch)

    def add_parts(self, batch: Batch, samples: Samples, local_samples: Samples) -> None:
        """Adds to a batch the part that each of its rows is of, and the counts of the parts in the whole
        step, which all processes know alike."""
        batch["parts"] = torch.from_numpy(self.part_of_text[local_samples.text_indices])
        if (self.weight_of_text != 1).any():
            batch["part_weights"] = torch.from_numpy(self.weight_of_text[local_samples.text_indices])

        counts = np.zeros((3, len(self.part_names)), np.int64)
        for index in np.unique(samples.text_indices):
            sizes = self.texts[index].sizes(samples.rows[samples.text_indices == index])
            scored = self.objective.scored(sizes).sum()
            counts[:, self.part_of_text[index]] += (len(sizes.all), sizes.all.sum(), scored)
        batch["part_counts"] = torch.from_numpy(counts)

    def count_tokens(self, samples: Samples) -> tuple[int, np.ndarray]:
        """The scored tokens of samples, and [2] those that a model reads of them (`Collator.count_read`)."""
        num_scored = 0
        num_read = np.zeros(2, np.int64)
        for index in np.unique(samples.text_indices):
            sizes = self.texts[index].sizes(samples.rows[samples.text_indices == index])
            num_scored += int(self.objective.scored(sizes).sum())
            num_read += self.objective.count_read(sizes).sum(1)
        return num_scored, num_read

    def count_new(self, steps: int) -> int:
        """Positions of the stage's own stream that the first `steps` steps take."""
        samples = steps * self.batch_size
        num_displaced = sum(pool.count_draws(samples) for pool in self.pools if not pool.is_appended)
        return samples - num_displaced

    def locate_recovery(self, recovery: ReplayPool, step: int) -> Samples:
        """The samples of a step on earlier texts alone."""
        samples = recovery.locate(np.arange(step * self.batch_size, (step + 1) * self.batch_size))
        first_text = len(self.texts) - len(recovery.texts)
        return samples._replace(text_indices=samples.text_indices + first_text)

    def locate_step(self, step: int) -> Samples:
        """The samples of a step after recovery, the replayed ones at random positions among the new ones."""
        new_samples = self.locate_new(step)
        if not self.pools:
            return new_samples

        # Draws of a pool are numbered over all steps: those of this one lie between what the steps before and
        # this one have drawn in all. Its texts follow the stage's own.
        parts = [new_samples]
        first_text = len(self.names)
        for pool in self.pools:
            begin = pool.count_draws(step * self.batch_size)
            end = pool.count_draws((step + 1) * self.batch_size)
            samples = pool.locate(np.arange(begin, end))
            parts.append(samples._replace(text_indices=samples.text_indices + first_text))
            first_text += len(pool.texts)
        all_samples = Samples.join(parts)

        # Mixed, as a step is cut into micro-batches and processes: each is to have its share of both.
        num_new = len(new_samples.rows)
        num_samples = len(all_samples.rows)
        stream = sample_keys(key(self.seed, "places", *self.names), np.array([step]))
        order = np.full(num_samples, -1)
        replayed_positions = permute(np.arange(num_samples - num_new), num_samples, stream=stream)
        order[replayed_positions] = np.arange(num_new, num_samples)
        order[order < 0] = np.arange(num_new)
        return all_samples.select(order)

    def locate_new(self, step: int) -> Samples:
        """The new samples of a step, of the stage's own stream."""
        first_step = step - step % NUM_LOCATED_STEPS
        first_position = self.count_new(first_step)
        if self.located is None or self.located[0] != first_step:
            end_step = min(first_step + NUM_LOCATED_STEPS, self.total)
            positions = np.arange(first_position, self.count_new(end_step))
            self.located = (first_step, self.locate(positions))

        begin = self.count_new(step) - first_position
        end = self.count_new(step + 1) - first_position
        return self.located[1].select(slice(begin, end))

    def locate(self, positions: np.ndarray) -> Samples:
        """The samples at positions [B] of the stage's own stream."""
        if len(self.names) > 1:
            positions = permute(positions, int(self.ends[-1]), stream=key(self.seed, "mixture"))
        text_indices = np.searchsorted(self.ends, positions, side="right")

        rows = np.empty_like(positions)
        keys = np.empty(len(positions), np.uint64)
        for index in np.unique(text_indices):
            is_of_text = text_indices == index
            num_rows = len(self.texts[index])
            epochs, epoch_positions = np.divmod(positions[is_of_text] - self.starts[index], num_rows)
            streams = sample_keys(key(self.seed, self.names[index]), epochs)
            text_rows = permute(epoch_positions, num_rows, stream=streams)
            rows[is_of_text] = text_rows
            keys[is_of_text] = sample_keys(streams, text_rows)
        return Samples(text_indices, rows, keys)


@dataclass(frozen=True)
class EvalBatch:
    """The rows of a batch of one text. Of an idle one nothing is scored: its process only takes part in a
    collective forward pass."""

    text: str
    rows: np.ndarray
    is_idle: bool = False


@dataclass(eq=False, repr=False)
class EvalSubset(Dataset):
    """Fixed rows of several texts in batches of one text each.

    Masks depend on the `purpose`, the text's name and the row alone, so every model gets the same ones. Where
    `lockstep_processes` run forward passes collectively, each text is filled up with idle batches to a
    multiple of them; all texts to `min_batches`."""

    texts: Mapping[str, Packed]
    rows: Mapping[str, np.ndarray]
    _: KW_ONLY
    objective: Collator
    batch_size: int
    purpose: str
    domain_indices: Mapping[str, int] = field(default_factory=dict)
    lockstep_processes: int = 1
    min_batches: int = 0

    def __post_init__(self) -> None:
        self.columns = {name: column for column, name in enumerate(self.texts)}
        self.batches: list[EvalBatch] = []
        for name in self.texts:
            if name not in self.rows:
                continue
            rows = self.rows[name]
            begins = range(0, len(rows), self.batch_size)
            for begin in begins:
                self.batches.append(EvalBatch(name, rows[begin : begin + self.batch_size]))
            for _ in range(-len(begins) % self.lockstep_processes):
                self.batches.append(EvalBatch(name, rows[:1], is_idle=True))

        if self.batches:
            first = self.batches[0]
            idle = EvalBatch(first.text, first.rows[:1], is_idle=True)
            for _ in range(self.min_batches - len(self.batches)):
                self.batches.append(idle)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`; `column` is the text's index, `documents` [K] the document of each scored token."""
        eval_batch = self.batches[number]
        name = eval_batch.text
        rows = eval_batch.rows
        text = self.texts[name]
        samples = Samples(
            text_indices=np.zeros(len(rows), np.int64),
            rows=rows,
            keys=sample_keys(key(self.purpose, name), rows),
        )
        stacked = stack_rows([text], samples)
        batch, scored_positions = self.objective.batch(stacked)

        documents = text.document_of(rows)[:, : stacked.ids.shape[1]]
        batch["documents"] = torch.from_numpy(documents.ravel()[scored_positions.numpy()])
        batch["domains"] = torch.full((len(rows),), self.domain_indices.get(name, NO_DOMAIN))
        batch["weight"] = torch.tensor(1 / max(1, len(batch["positions"])))
        batch["column"] = torch.tensor(self.columns[name])
        return make_idle_batch(batch) if eval_batch.is_idle else batch


@dataclass(frozen=True)
class TextRows:
    """The samples of one text in a batch."""

    text: Packed
    is_here: np.ndarray  # [B] bool: which samples of the batch they are
    rows: np.ndarray  # their rows in the text

    @classmethod
    def group(cls, texts: Sequence[Packed], samples: Samples) -> list["TextRows"]:
        """Samples by their text, in the order of the texts."""
        groups = []
        for index in np.unique(samples.text_indices):
            is_here = samples.text_indices == index
            groups.append(cls(texts[index], is_here, samples.rows[is_here]))
        return groups


def stack_rows(texts: Sequence[Packed], samples: Samples) -> Rows:
    """The rows of samples of several texts, as wide as the longest if an example is among them, or all texts
    have one document a row; else as wide as the model's length."""
    groups = TextRows.group(texts, samples)
    lengths = np.empty(len(samples.rows), np.int64)
    for group in groups:
        lengths[group.is_here] = group.text.row_lengths[group.rows]

    # Packed rows are full, so that all batches have one width, which compiled models need. Rows of examples
    # and single documents are short: a batch is as wide as its longest.
    answers_by_group = [group.text.answers(group.rows) for group in groups]
    has_answers = any(answers is not None for answers in answers_by_group)
    if has_answers or all(group.text.packing == NONE for group in groups):
        width = int(lengths.max())
    else:
        width = max(group.text.length for group in groups)

    ids = np.full((len(lengths), width), texts[0].pad, np.int64)
    is_answer = np.zeros(ids.shape, bool) if has_answers else None
    is_isolated = any(group.text.packing == DOCUMENT_MASK for group in groups)
    segments = np.full(ids.shape, PADDING, np.int64) if is_isolated else None
    for group, answers in zip(groups, answers_by_group, strict=True):
        group_ids = group.text.ids(group.rows)[:, :width]
        group_width = group_ids.shape[1]  # texts may be of different lengths
        ids[group.is_here, :group_width] = group_ids
        if is_answer is not None and answers is not None:
            is_answer[group.is_here, :group_width] = answers[:, :width]
        if segments is not None:
            segments[group.is_here, :group_width] = group.text.document_of(group.rows)[:, :width]
    return Rows(ids=ids, lengths=lengths, keys=samples.keys, answers=is_answer, segments=segments)


@dataclass(eq=False)
class ResumeSampler(Sampler[int]):
    """The numbers from `start` to `total`; its length is `total`, as Lightning counts batches on."""

    start: int
    total: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.total))

    def __len__(self) -> int:
        return self.total


class ShardSampler(Sampler[int]):
    """Every `world`-th number below `total`, from `rank` on; each process has at least `common`."""

    def __init__(self, total: int, *, rank: int, world: int) -> None:
        self.numbers = range(rank, total, world)
        self.common = total // world

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)
