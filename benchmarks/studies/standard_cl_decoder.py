"""MIGU and LoRA with a real decoder on the four supervised tasks, text to text:
`python benchmarks/studies/standard_cl_decoder.py --root FOLDER --model FOLDER` writes their part of
docs/studies/standard-cl.md.

FOLDER of --root is that of standard_cl_mini.py; --model is a decoder. One seed, three orders. Rerun the same
command to resume."""

from collections.abc import Iterator

import claims
import study
from standard_cl_mini import describe_runs

from cpt.reporting.page import Block, format_markdown
from cpt.reporting.sections import RunSection

EXPERIMENT = "standard_cl_decoder"
ORDERS_AND_SEEDS = ["order=1,2,3", "seed=0"]
SWEEPS = (
    ["method=ncl,migu,lora"],
    ["method=lora", "mask=migu"],
)
MEASURES = {
    "answers/AP": ("final accuracy (AP), %", 1),
    "FG/nats": ("forgetting (FG), nats", 3),
    "general_drift/nats": ("general-text forgetting, nats", 3),
}
CONTRASTS = {"answers/AP": ("final accuracy, points", 1), "general_drift/nats": ("general text, nats", 3)}
# AP of T5-large on the same orders: table 2 of Du et al., EMNLP Findings 2024.
PUBLISHED_ACCURACY = {"ncl": "75.7", "migu": "78.8", "lora": "67.9", "lora + migu": "73.3"}


def main() -> None:
    options = study.read_arguments(EXPERIMENT, str(__doc__))
    study.make_study(
        options,
        EXPERIMENT,
        [[*ORDERS_AND_SEEDS, *sweep] for sweep in SWEEPS],
        page="standard-cl",
        parts=write_parts,
    )


def write_parts(section: RunSection) -> Iterator[str]:
    """The parts of the page: what was run, the two published claims, accuracies beside the paper's."""
    yield describe_runs(section)
    tested_claims = [claim for claim in claims.ON_TASKS if {claim.of, claim.against} <= {*PUBLISHED_ACCURACY}]
    cells = claims.tabulate_claims(section, tested_claims)
    yield format_markdown(
        Block(title="Claims, real decoder", head=claims.HEAD, cells=cells, num_word_columns=2), picture=""
    )
    yield format_markdown(tabulate_accuracy(section), picture="")
    yield study.tabulate(section, MEASURES, title="Means over orders, real decoder")
    yield study.tabulate_contrasts(section, CONTRASTS, title="Differences from ncl, real decoder")


def tabulate_accuracy(section: RunSection) -> Block:
    """The accuracy of each run, order by order, beside the published mean."""
    orders = sorted({run.pair[0] for run in section.runs})
    cells = []
    for group in section.groups:
        accuracy_by_order = claims.values_by_pair(group, "answers/AP")
        row = [group.name]
        for order in orders:
            values = [value for (run_order, _), value in accuracy_by_order.items() if run_order == order]
            row.append(", ".join(f"{100 * value:.1f}" for value in values) or "–")
        row.append(PUBLISHED_ACCURACY.get(group.name, "–"))
        cells.append(row)
    head = ["method", *map(" → ".join, orders), "T5-large, published"]
    return Block(title="Final accuracy (AP) by order, %", head=head, cells=cells)


if __name__ == "__main__":
    main()
