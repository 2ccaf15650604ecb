"""How texts are made ready, whatever they are."""

from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import or_null, whole


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """How the work on texts is carried out; nothing of it decides what comes out."""

    workers: int | None = option(
        "processes that tokenise a text; null: one per core that the run may use, fewer for small texts",
        or_null(whole(1)),
    )
