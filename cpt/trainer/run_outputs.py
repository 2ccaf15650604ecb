"""The page of a finished run, written again after something was added to the run's folder."""

from pathlib import Path

from cpt.core.files import CHECKSUMS, read_checksums, write_checksums
from cpt.evaluation.scores import Scores
from cpt.reporting.run_page import write_report
from cpt.trainer.run_dir import REPORTS, RunDir


def rewrite_report(run: RunDir, scores: Scores) -> None:
    """Writes the page and its checksums; the caller holds the lock. A run without checksums gets none."""
    write_report(run.path, scores)
    if not (run.path / CHECKSUMS).exists():
        return

    # The new checksums keep the next start of the run from calling the new page damaged.
    pages = [run.path / name for name in REPORTS]
    write_checksums(run.path, [*pages, *run.path.glob("report-*.png")], unread=read_checksums(run.path))


def finish_report(run: RunDir, scores: Scores, folder: Path) -> None:
    """Writes the page of a run again, of which an earlier start has made the model in `folder`: it may have
    been killed before it wrote the page. Prints that the model stays as it is."""
    with run.locked():
        rewrite_report(run, scores)
    print(f"{folder}: made by an earlier start, and left as it is; the page of {run.path} is written again")
