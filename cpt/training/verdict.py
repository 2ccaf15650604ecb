"""The verdict on what a run has read of the shared cache, before it keeps a result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cpt.core.cache import FOREVER, WATCH
from cpt.core.processes import is_first_process
from cpt.training.run_folder import RunFolder

PATIENCE = 60.0  # seconds after which processes speak to each other again: backends end those that do not


def confirm(place: RunFolder) -> None:
    """Waits until all that the run has opened in the cache is read through, by whichever process does it.

    Raises ValueError, in every process alike, if something was damaged."""
    from cpt.core.collectives import gather_objects  # torch, without which a finished run is checked

    pending, found = True, []
    while pending:
        waits = WATCH.pending > 0  # before it is waited for: what is found later is asked for again
        told = gather_objects((waits, WATCH.damage(seconds=PATIENCE)))
        found += [line for _, lines in told for line in lines]
        pending = any(waits for waits, _ in told)
    if found:
        raise ValueError(damage_message(place, found))


@contextmanager
def explain_damage(place: RunFolder) -> Iterator[None]:
    """Turns an error into that of the damage in the cache that may have caused it, if there is some."""
    try:
        yield
    except Exception as error:
        # Our own refusals are plain ValueErrors; another error was not foreseen, and is worth the wait.
        if found := WATCH.damage(seconds=0 if type(error) is ValueError else FOREVER):
            raise ValueError(damage_message(place, found)) from error
        raise


def damage_message(place: RunFolder, found: Sequence[str]) -> str:
    """What to do about damage; what was learned since the last committed row is of it, and is removed."""
    if is_first_process():
        place.forget_checkpoints()
    return f"{'; '.join(found)}; nothing of it is kept: the same command makes it again and goes on"
