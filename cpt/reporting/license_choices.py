"""Licenses that the user has given to `cpt.card`, for the model of a run and for texts that it was trained
on. They are kept in the run's folder, as `licenses.json`, and each later model card of the run has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cpt.core.exceptions import DamagedFileError
from cpt.core.files import write_atomically
from cpt.core.schema import check_types

LICENSES_FILE = "licenses.json"


@dataclass(frozen=True, kw_only=True)
class LicenseChoices:
    """Identifiers of licenses as the Hub has them."""

    model: str = ""  # empty: the one that follows from what is stated, if any does
    texts: Mapping[str, str] = field(default_factory=dict)  # by name


def load_license_choices(folder: Path) -> LicenseChoices:
    """The choices in a run's folder, empty ones without a file. Raises ValueError for a damaged file."""
    path = folder / LICENSES_FILE
    if not path.exists():
        return LicenseChoices()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        check_types(content, {"model": str, "texts": dict[str, str]})
    except (OSError, TypeError, ValueError) as error:
        raise DamagedFileError(
            path, reason=str(error), remedy="delete it, and state the licenses again"
        ) from None
    return LicenseChoices(model=content["model"], texts=content["texts"])


def save_license_choices(folder: Path, choices: LicenseChoices) -> None:
    """Writes the choices into a run's folder; without any the file is removed."""
    path = folder / LICENSES_FILE
    if choices == LicenseChoices():
        path.unlink(missing_ok=True)
        return
    write_atomically(path, json.dumps(asdict(choices), indent=1, ensure_ascii=False) + "\n")
