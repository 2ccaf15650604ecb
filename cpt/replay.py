"""Earlier text mixed into a domain's batches: of the domains before it, and the general text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replay:
    """How much earlier text is mixed in."""

    past: float
    general: float
    memory: int | None
    adds: bool


NOTHING = Replay(past=0.0, general=0.0, memory=None, adds=False)
