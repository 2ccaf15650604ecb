"""Options of the data, and the stages of a run, without torch."""

import math
from collections.abc import Sized
from dataclasses import dataclass

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun


@dataclass(frozen=True)
class Domain:
    """What a stage trains on: one text, or the texts of several domains together."""

    name: str
    index: int  # in the order; of several domains, that of the first
    texts: tuple[str, ...]  # names of the texts
    recovery: float = (
        0.0  # steps on the texts of earlier stages, which come first, over the stage's own steps
    )


@dataclass(frozen=True)
class Budget:
    """How long a domain is trained: `steps`, `epochs` or `tokens`, in batches of `batch_size` samples."""

    steps: int | None
    epochs: float | None
    tokens: float | None
    batch_size: int

    def __post_init__(self) -> None:
        options = {name: value for name, value in vars(self).items() if value is not None}
        has_whole_steps = self.steps is None or float(self.steps).is_integer()
        if len(options) != 2 or min(options.values()) <= 0 or not has_whole_steps:
            has_no_length = len(options) == 1  # the size of a batch alone
            named_options = vars(self) if has_no_length else options
            assignments = " ".join(
                f"trainer.{name}={format_value(value)}" for name, value in named_options.items()
            )
            raise ValueError(
                f"{assignments} is invalid. Allowed: exactly one of trainer.steps (whole), trainer.epochs, "
                "trainer.tokens, all above 0; the others null, like trainer.steps=null"
            )

    @property
    def option(self) -> tuple[str, float]:
        """The name and the value of the option that sets how long: steps, epochs or tokens."""
        return next((name, value) for name, value in vars(self).items() if value is not None)

    def steps_for(self, text: Sized, *, length: float) -> int:
        """Optimizer steps for a text whose samples have `length` tokens on average. Raises ValueError for
        2^53 samples or more."""
        if self.steps is not None:
            return int(self.steps)
        samples = self.epochs * len(text) if self.epochs is not None else (self.tokens or 0) / length
        if samples >= 2**53:
            name, value = self.option
            raise InvalidOptionError(
                f"trainer.{name}", f"{value:g}", reason="2^53 samples or more", allowed="fewer"
            )
        return max(1, math.ceil(samples / self.batch_size))


def list_micro_batch_sizes(batch_size: int, *, world: int) -> list[int]:
    """The samples that a micro-batch of a process may have: the divisors of its share of a step, ascending;
    none where the batch does not divide among the processes.

    >>> list_micro_batch_sizes(24, world=2)
    [1, 2, 3, 4, 6, 12]
    """
    if batch_size % world:
        return []
    num_samples = batch_size // world
    return [number for number in range(1, num_samples + 1) if num_samples % number == 0]


def count_micro_batches(batch_size: int, *, micro_batch: int, world: int) -> int:
    """The micro-batches of a process and step; raises ValueError if the batch does not divide evenly."""
    possible = list_micro_batch_sizes(batch_size, world=world)
    if micro_batch not in possible:
        raise InvalidOptionError(
            "trainer.micro_batch",
            micro_batch,
            context=f"with trainer.batch_size={batch_size} of {count_noun(world, 'process', 'processes')}",
            allowed=", ".join(map(str, possible)) or f"a batch_size that {world} divides",
        )
    return batch_size // (micro_batch * world)


def share_batch(batch_size: int, *, accumulate: int, world: int) -> int:
    """Samples of a process's micro-batch; raises ValueError if the global batch does not divide evenly."""
    if accumulate < 1 or batch_size % (accumulate * world):
        process_count = count_noun(world, "process", "processes")
        raise InvalidOptionError(
            "trainer.batch_size",
            batch_size,
            allowed=f"a multiple of trainer.accumulate_grad_batches={accumulate} times {process_count}",
        )
    return batch_size // (accumulate * world)
