"""How soon a wrong option is told, each in a process of its own as a user starts it:
`python benchmarks/options.py`.

The options are those of tests/support/wrong_options.py; those on the model need torch, Lightning and
transformers, and are of the tests' small model."""

import subprocess
import sys
import tempfile
import time
from statistics import median

from measuring import ROOT, save

sys.path.insert(0, str(ROOT))
from tests.conftest import SMALL  # noqa: E402
from tests.support.wrong_options import AT_ONCE, ON_THE_MODEL  # noqa: E402


def time_answer(text: str, folder: str, *, size: list[str]) -> float:
    """Until a start with these overrides has ended, in one line."""
    overrides = [text] if "{" in text else [override.replace("=(", "='('") for override in text.split()]
    command = [sys.executable, str(ROOT / "run.py"), *size, *overrides]
    start_time = time.perf_counter()
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    duration = time.perf_counter() - start_time
    assert process.returncode and len(process.stderr.splitlines()) == 1, (text, process.stderr)
    return duration


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, table, size in (("at_once", AT_ONCE, []), ("on_the_model", ON_THE_MODEL, SMALL)):
            durations = {text: time_answer(text, folder, size=size) for text in table}
            slowest = max(durations, key=durations.get)
            figures = {
                "count": len(durations),
                "median": median(durations.values()),
                "most": durations[slowest],
            }
            results[name] = figures | {"slowest": slowest}
            print(name, results[name])
    save("options", results, out=None)


if __name__ == "__main__":
    main()
