"""The sources of `replay.sources` in the stages of a run: what each gives to the batches of a stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cpt.data.packing import Packed
from cpt.data.replay import NEW, PAST, ReplayConfig, SourcePool, SourceShare, to_fraction
from cpt.data.sources.base import GENERAL
from cpt.data.sources.mixed import MixedSource


@dataclass(frozen=True)
class MixedText:
    """The training text of a source, as rows."""

    options: MixedSource
    text: Packed

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.text.row_lengths.sum())

    @property
    def max_draws(self) -> int | None:
        """Rows that are read in the whole run, at most; None: no limit."""
        max_epochs = self.options.max_epochs
        return None if max_epochs is None else int(to_fraction(max_epochs) * len(self.text))


@dataclass(frozen=True)
class Mixture:
    """The sources of a run by name, with which new text is mixed."""

    texts: Mapping[str, MixedText]
    replay: ReplayConfig
    seed: int

    def shares(self) -> dict[str, SourceShare]:
        """The share of a batch that each source has."""
        return self.replay.find_source_shares({name: mixed.num_tokens for name, mixed in self.texts.items()})

    def pools(self, stage_samples: Sequence[int]) -> list[SourcePool]:
        """What the last of some stages draws from; `stage_samples` are the samples of each, in their order,
        with those that replay displaces."""
        pools = []
        shares = self.shares()
        *earlier_samples, samples = stage_samples
        for name, mixed in self.texts.items():
            share = shares[name]
            earlier_draws = [share.count_draws(count, stage_samples=count) for count in earlier_samples]
            pool = SourcePool(
                {name: mixed.text},
                share=share.start,
                is_appended=self.replay.is_appended,
                buffer_size=None,
                seed=self.seed,
                stream_name=("replay.sources", name),  # of no stage: a later one draws on where this one ends
                source_share=share,
                stage_samples=samples,
                wanted_before=sum(earlier_draws),
                max_draws=mixed.max_draws,
                loss_weight=float(mixed.options.weight),
            )
            pools.append(pool)
        return pools

    @property
    def part_names(self) -> tuple[str, ...]:
        """What a sample of a batch may be of: new text, that of past domains, general text, or a source."""
        return (NEW, PAST, GENERAL, *self.texts)


@dataclass(frozen=True)
class SourceUse:
    """How a stage uses a source."""

    name: str
    asked_share: float  # share of the samples, a mean over the stage, without the limit of repetition
    draws: int  # samples
    epochs: float  # of the source, from the beginning of the run to the end of the stage
    limit_step: int | None  # the first step in which the limit of repetition leaves samples out


def find_uses(pools: Sequence[SourcePool], *, steps: int, batch_size: int) -> Iterator[SourceUse]:
    """How a stage of some steps uses its sources."""
    for pool in pools:
        num_rows = int(pool.num_rows[0])
        draws = pool.count_draws(pool.stage_samples)
        unlimited_draws = pool.source_share.count_draws(pool.stage_samples, stage_samples=pool.stage_samples)
        num_before = pool.limit(pool.wanted_before)
        limit_step = None
        if draws < unlimited_draws:
            limit_step = find_limit_step(pool, steps=steps, batch_size=batch_size)
        yield SourceUse(
            name=pool.label,
            asked_share=float(pool.source_share.start + pool.source_share.end) / 2,
            draws=draws,
            epochs=(num_before + draws) / num_rows,
            limit_step=limit_step,
        )


def find_limit_step(pool: SourcePool, *, steps: int, batch_size: int) -> int | None:
    """The first step of a stage after which fewer samples are drawn than the share asks for; None if the
    share is always met."""
    for step in range(steps):
        num_samples = (step + 1) * batch_size
        wanted_draws = pool.source_share.count_draws(num_samples, stage_samples=pool.stage_samples)
        if pool.count_draws(num_samples) < wanted_draws:
            return step
    return None
