"""How much of each domain is learned."""

import math
from collections.abc import Sized
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How much of a text is learned: one of `steps`, `epochs` or `tokens`, in global batches of `batch_size`
    samples."""

    steps: int | None
    epochs: float | None
    tokens: int | None
    batch_size: int

    def __post_init__(self) -> None:
        given = {
            name: value for name, value in vars(self).items() if name != "batch_size" and value is not None
        }
        whole = self.steps is None or float(self.steps).is_integer()
        if len(given) != 1 or min(given.values()) <= 0 or not whole or self.batch_size < 1:
            shown = " ".join(f"trainer.{name}={value}" for name, value in given.items()) or "none"
            raise ValueError(
                f"the budget of a domain is {shown}, trainer.batch_size={self.batch_size}; "
                "allowed: exactly one of "
                "trainer.steps (whole), trainer.epochs, trainer.tokens above 0 (the others null), "
                "and batches of 1 or more"
            )

    def steps_for(self, text: Sized, *, length: float) -> int:
        """Optimizer steps for a text whose samples are `length` tokens long, on average."""
        if self.steps is not None:
            return int(self.steps)
        samples = self.epochs * len(text) if self.epochs is not None else (self.tokens or 0) / length
        return max(1, math.ceil(samples / self.batch_size))


def share_batch(batch_size: int, *, accumulate: int, world: int) -> int:
    """Samples of a global batch that a process takes at once; ValueError if it cannot be shared out."""
    if accumulate < 1 or batch_size % (accumulate * world):
        raise ValueError(
            f"trainer.batch_size={batch_size} is not a multiple of "
            f"trainer.accumulate_grad_batches={accumulate} times {world} processes"
        )
    return batch_size // (accumulate * world)
