"""The domains that a run has given back: `withdrawn.json` in its folder, by `python -m cpt.withdraw`."""

import json
from collections.abc import Mapping
from pathlib import Path

from cpt.core.exceptions import DamagedFileError
from cpt.core.files import write_atomically
from cpt.core.schema import check_types

WITHDRAWN_FILE = "withdrawn.json"


def record_withdrawal(folder: Path, source: Path, record: Mapping[str, str]) -> None:
    """Writes the withdrawals of a run that was made of the `source` run: those of the source and one more."""
    records = [*load_withdrawals(source), dict(record)]
    write_atomically(folder / WITHDRAWN_FILE, json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def load_withdrawals(folder: Path) -> list[dict[str, str]]:
    """Domain, form and description of each withdrawal of a run. Raises ValueError for a damaged file."""
    path = folder / WITHDRAWN_FILE
    if not path.exists():
        return []
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        check_types({"withdrawn": records}, {"withdrawn": list[dict[str, str]]})
    except (OSError, TypeError, ValueError) as error:
        raise DamagedFileError(path, reason=str(error), remedy="restore it from a backup") from None
    withdrawals: list[dict[str, str]] = records
    return withdrawals
