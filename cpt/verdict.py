"""The verdict on what a run has read of the shared cache, before it keeps a result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cpt.cache import damage
from cpt.folder import RunFolder
from cpt.plan import is_first_process


def confirm(place: RunFolder) -> None:
    """Waits until all that the run has opened in the cache is read through, by whichever process does it.

    Raises ValueError, in every process alike, if something was damaged."""
    from torch import distributed

    found = damage()
    if distributed.is_available() and distributed.is_initialized():
        every = [[]] * distributed.get_world_size()
        distributed.all_gather_object(every, found)
        found = sum(every, [])
    if found:
        raise ValueError(refusal(place, found))


@contextmanager
def explained(place: RunFolder) -> Iterator[None]:
    """Turns an error into that of the damage in the cache that may have caused it, if there is some."""
    try:
        yield
    except Exception as error:
        # Our own refusals are plain ValueErrors; another error was not foreseen, and is worth the wait.
        if found := damage(wait=type(error) is not ValueError):
            raise ValueError(refusal(place, found)) from error
        raise


def refusal(place: RunFolder, found: Sequence[str]) -> str:
    """What to do about damage; what was learned since the last committed row is of it, and is removed."""
    if is_first_process():
        place.forget_checkpoints()
    return f"{'; '.join(found)}; nothing of it is kept: the same command makes it again and goes on"
