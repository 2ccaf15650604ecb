"""The page of a finished run, written again after something was added to the run's folder."""

from cpt.core.files import CHECKSUMS, read_checksums, write_checksums
from cpt.evaluation.scores import Scores
from cpt.reporting.run_page import write_report
from cpt.trainer.run_dir import REPORTS, RunDir


def rewrite_report(run: RunDir, scores: Scores) -> None:
    """Writes the page and its checksums; the caller holds the lock. A run without checksums gets none."""
    write_report(run.path, scores)
    if not (run.path / CHECKSUMS).exists():
        return
    pages = [run.path / name for name in REPORTS]
    # Else the next start of the run would find the new page damaged.
    write_checksums(run.path, [*pages, *run.path.glob("report-*.png")], unread=read_checksums(run.path))
