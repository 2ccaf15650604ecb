"""The families of parts and of projections on four supervised tasks, text to text:
`python benchmarks/standard_cl_families.py --root FOLDER` makes their part of docs/results.md.

FOLDER as for standard_cl_mini.py, whose base and tasks these are. Parts have four times the steps of whole
models, and learn at the model's own rate: chosen on validation text with method=lora, order 1, seed 0. Of
what was just learned it had 17 % right after 150 steps (25 % after 300 and 64 ranks, 35 % after 600; 7 to 8 %
at 3 and 10 times the rate), ncl 36 % after 150. After 600, 3 and 0.3 times the rate gave 19 and 22 %."""

from collections.abc import Iterator
from pathlib import Path

import study
from standard_cl_mini import describe_runs, tabulate_levels

from cpt.reporting import compare
from cpt.reporting.load_runs import RunSection
from cpt.reporting.page import markdown

EVERY = ["order=1,2,3", "seed=0"]
LONG = ["trainer.steps=600"]
SWEEPS = (
    ["method=ncl,joint,migu,osf"],
    ["method=agem", "method.acts_on=gradient,update"],
    ["method=lora,inclora,olora,nlora,sapt", "method.rate=1", *LONG],
    ["method=moelora", "method.rate=1", *LONG],
    ["method=sapt", "method.key=cosine", "method.query=encoder", "method.strength=1", "method.rate=1", *LONG],
    ["method=ncl", *LONG],
)


def main() -> None:
    options = study.read_arguments("standard_cl_families", str(__doc__))
    study.make_study(
        options,
        "standard_cl_mini",
        [[*EVERY, *sweep] for sweep in SWEEPS],
        name="standard_cl_families",
        raw="standard_cl_families.jsonl",
        parts=lambda section: parts(section, options.root),
        marked="standard_cl_families",
    )


def parts(section: RunSection, root: Path | None) -> Iterator[str]:
    yield describe_runs(section)
    for block in (
        compare.tabulate_main(section),
        compare.tabulate_differences(section),
        tabulate_levels(section, root),
    ):
        yield markdown(block, picture="")


if __name__ == "__main__":
    main()
