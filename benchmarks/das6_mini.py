"""The methods on six real domains: `python benchmarks/das6_mini.py --root FOLDER` makes their part of
docs/results.md.

FOLDER holds corpora/<domain>, endtasks/<domain> and general, each with {train,valid,test}.jsonl.gz (dev for
end tasks). What is finished below --runs is not run again: a killed start goes on with the same command."""

from collections.abc import Iterator
from itertools import product

import claims
import study

from cpt.reporting import compare
from cpt.reporting.load_runs import RunSection
from cpt.reporting.page import Block, markdown

SEEDS, ORDERS = "seed=0,1,2", ("order=0", "order=1")
SWEEPS = (
    ["method=ncl,one,joint,das,migu,ewc,kd,derpp,adapter,lora,demix,hat"],
    ["method=replay", "method.mixture.past=0.01,0.05,0.25"],
    ["method=kd,replay", "mask=migu"],
    ["method=das", "method.acts_on=gradient"],
    ["method=migu", "method.mask.acts_on=update"],
    ["method=das", "method.contrast=0", "method.acts_on=update,gradient"],
    ["method=none"],
)


def main() -> None:
    options = study.read_arguments("das6_mini", str(__doc__))
    sweeps = ([order, SEEDS, *sweep] for order, sweep in product(ORDERS, SWEEPS))
    study.make_study(options, "das6_mini", sweeps, name="comparison", raw="scores.jsonl", parts=parts)


def parts(section: RunSection) -> Iterator[str]:
    yield describe_runs(section)
    cells = claims.rows(section, claims.ON_TEXT)
    claimed = Block(title="What the papers claim", head=claims.HEAD, cells=cells, words=2)
    differences, tasks = compare.tabulate_differences(section), compare.tabulate_tasks(section)
    for block in (claimed, compare.tabulate_main(section), differences, tasks):
        yield markdown(block, picture="")


def describe_runs(section: RunSection) -> str:
    """What was run, from the runs themselves."""
    runs = [run.scores for run in section.runs]
    first = next(scores for scores in runs if len(scores.seen) > 1)
    tokens = f"{first.seen[1]:,} tokens a domain, {sum(first.scored):,} scored positions in the test texts"
    orders = study.list_orders(section.runs)
    return f"{len(runs)} runs of {len(section.groups)} groups; {tokens}. Orders:\n\n{orders}"


if __name__ == "__main__":
    main()
