"""The families of parts and of projections on four supervised tasks, text to text:
`python benchmarks/standard_cl_families.py --root FOLDER` makes their part of docs/results.md.

FOLDER as for standard_cl_mini.py, whose base and tasks these are. Pairs of 64 ranks learn at the model's own
rate: chosen by validation text, method=lora, order 1, seed 0 (learned there: 17 % with 8 ranks, 7 to 8 % with
8 ranks at 3 to 100 times the rate, 35 % with 64 ranks; ncl 36 %)."""

from collections.abc import Iterator
from pathlib import Path

import study
from standard_cl_mini import describe_runs, tabulate_levels

from cpt.reporting.comparison import tables
from cpt.reporting.comparison.groups import ComparedRuns
from cpt.reporting.page import markdown

EVERY = ["order=1,2,3", "seed=0"]
WIDE = ["method.rank=64", "method.rate=1"]
SWEEPS = (
    ["method=ncl,joint,migu,osf"],
    ["method=agem", "method.acts_on=gradient,update"],
    ["method=lora,inclora,olora,nlora,sapt", *WIDE],
    ["method=sapt", "method.key=cosine", "method.query=encoder", "method.strength=1", *WIDE],
    ["method=moelora", "method.rank=16", "method.rate=1"],  # four pairs: as wide together
    ["method=lora", "method.per_domain=true", *WIDE],
    ["method=prompt,progprompt"],
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


def parts(section: ComparedRuns, root: Path | None) -> Iterator[str]:
    yield describe_runs(section)
    for block in (
        tables.tabulate_main(section, domains=()),
        tables.tabulate_differences(section),
        tabulate_levels(section, root),
    ):
        yield markdown(block, picture="")


if __name__ == "__main__":
    main()
