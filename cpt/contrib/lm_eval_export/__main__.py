"""Write held-out examples as lm-eval tasks: `python -m cpt.contrib.lm_eval_export FOLDER domains=tasks …`.

The prompts are those that the model sees in such a run. The arguments after the folder are those of
`python run.py`. Nothing is trained."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from hydra import compose, initialize_config_dir

from cpt.core.config import CONF
from cpt.core.errors import readable
from cpt.core.output import run_program
from cpt.trainer.plan import Plan, make_plan

NEEDED = "a folder to write to, and what python run.py is given: FOLDER domains=tasks model=…"


def main(arguments: Sequence[str]) -> None:
    about = "Writes the held-out examples of supervised tasks as tasks of the lm-evaluation-harness."
    parser = argparse.ArgumentParser(prog="python -m cpt.contrib.lm_eval_export", description=about)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where to write the tasks")
    run = "options of python run.py, as domains=tasks model=…"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=run)
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with readable():
        if given.folder is None or "=" in given.folder:
            raise ValueError(f"FOLDER={given.folder} is invalid. Allowed: {NEEDED}")
        overrides = [each.replace("+experiment=", "experiment=") for each in given.overrides]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            plan = make_plan(compose("config", overrides))
        print("\n".join(export(plan, Path(given.folder))))


def export(plan: Plan, folder: Path) -> list[str]:
    """Writes the tasks of a plan into a folder; gives what is to be said of it. Raises ValueError for domains
    that are no tasks."""
    if plan.source.encoding is None:
        raise ValueError(
            f"domains={plan.settings['domains']['name']} is invalid: it is raw text. Allowed: domains=tasks"
        )
    from cpt.contrib.lm_eval_export.tasks import HarnessTexts, export_group, export_task
    from cpt.data.corpora import Corpora
    from cpt.data.tokenized_tasks import Encoder, read_examples
    from cpt.trainer.base_model import describe_base

    plan.source.check_domains(plan.order)
    corpora = Corpora.read(
        plan.source, plan.order, cache=Path(plan.run.cache_dir), workers=plan.data.preprocessing_num_workers
    )
    base, done = describe_base(plan.model, corpora), {}
    texts = HarnessTexts(Encoder(base.tokenizer, base.length, plan.source.encoding, base.seq2seq))
    for task in plan.order:
        prompts = map(texts.encoder.prompt, read_examples(corpora.by_name[task], plan.source.score_on))
        most = plan.answers.max_documents if plan.answers else None
        done[task] = export_task(folder, task, islice(prompts, most), texts)
    written = [each for each in done.values() if each is not None]
    if not written:
        why = "has choices, which the harness is to rank; needed: one"
        raise ValueError(f"no task of {', '.join(done)} {why}")
    group, other = export_group(folder, written), "the harness makes other tokens of"
    differing = {each.name: each.differing for each in written if each.differing}
    return [
        *(f"{each.name}: {each.examples:,} examples" for each in written),
        *(f"{name}: {other} {len(ids):,}, like {ids[0]}" for name, ids in differing.items()),
        *(f"{task} has no choices and is left out" for task, each in done.items() if each is None),
        f"benchmark=lm_eval benchmark.include={folder} 'benchmark.tasks=[{group}]'",
    ]


if __name__ == "__main__":
    run_program(main)
