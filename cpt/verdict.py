"""The verdict on what a run has read of the shared cache, before it keeps a result."""

from torch import distributed

from cpt.cache import damage
from cpt.folder import RunFolder
from cpt.plan import is_first_process


def confirm(place: RunFolder) -> None:
    """Waits until all that the run has opened in the cache is read through, by whichever process does it.

    Raises ValueError, in every process alike, if something was damaged: what the run has learned since its
    last committed row is of it, and is removed."""
    found = damage()
    if distributed.is_available() and distributed.is_initialized():
        every = [[]] * distributed.get_world_size()
        distributed.all_gather_object(every, found)
        found = sum(every, [])
    if not found:
        return
    if is_first_process():
        place.forget_checkpoints()
    raise ValueError(
        f"{'; '.join(found)}; nothing of it is kept: the same command makes it again and goes on"
    )
