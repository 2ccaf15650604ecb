"""How long a user waits for the message about a wrong option: `python benchmarks/costs/options.py`.

Each wrong option of tests/support/wrong_options.py is given to a process of its own, as a user starts it.
Options in AT_ONCE are refused from the config alone. Options in ON_THE_MODEL are refused when the model is
known, which needs torch, Lightning and transformers; they are given together with SMALL, the overrides of the
tests' small model."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, save

sys.path.insert(0, str(ROOT))
from tests.conftest import SMALL  # noqa: E402
from tests.support.wrong_options import AT_ONCE, ON_THE_MODEL  # noqa: E402


def time_refusal(text: str, folder: str, *, model_overrides: list[str]) -> float:
    """Seconds from the start of `run.py` with a wrong option until it has ended. `text` is the option, or
    several overrides with spaces between them. It has to fail, with one line."""
    is_mapping = "{" in text  # one override, which may have spaces
    overrides = [text] if is_mapping else [override.replace("=(", "='('") for override in text.split()]
    command = [sys.executable, str(ROOT / "run.py"), *model_overrides, *overrides]
    start_time = time.perf_counter()
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    duration = time.perf_counter() - start_time
    assert process.returncode and len(process.stderr.splitlines()) == 1, (text, process.stderr)
    return duration


def measure_table(texts: Iterable[str], folder: str, *, model_overrides: list[str]) -> dict[str, Any]:
    """The median and the longest duration over a table of wrong options, and the option that took longest."""
    durations = {text: time_refusal(text, folder, model_overrides=model_overrides) for text in texts}
    slowest = max(durations, key=durations.get)
    return {
        "count": len(durations),
        "median": median(durations.values()),
        "most": durations[slowest],
        "slowest": slowest,
    }


def main() -> None:
    """Measures both tables of wrong options, prints the figures and saves them."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        results["at_once"] = measure_table(AT_ONCE, folder, model_overrides=[])
        print("at_once", results["at_once"])
        results["on_the_model"] = measure_table(ON_THE_MODEL, folder, model_overrides=SMALL)
        print("on_the_model", results["on_the_model"])
    save("options", results, out=None)


if __name__ == "__main__":
    main()
