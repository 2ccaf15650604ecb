"""What a run measures after its stages beside the losses: end tasks, answers, probes."""

from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.methods.base import ContinualModule
from cpt.trainer.answers import Asking, make_asking
from cpt.trainer.base_model import Base
from cpt.trainer.endtasks import Examination, make_examination
from cpt.trainer.plan import Plan
from cpt.trainer.preflight import Ready
from cpt.trainer.probes import Probing, make_probing
from cpt.trainer.run_dir import RunDir

Measured = Examination | Asking | Probing


def make_examinations(
    plan: Plan,
    place: RunDir,
    ready: Ready,
    corpora: Corpora,
    start: Base,
    *,
    module: ContinualModule,
    data: DomainSequence,
) -> list[Measured]:
    """All that a plan asks for, in the order in which it is measured."""
    what = {"module": module, "data": data}
    found = [
        make_examination(plan.endtasks, place, tokenizer=start.tokenizer, **what),
        make_asking(plan, place, corpora, start, **what),
        make_probing(plan.probe, place, harness=ready.harness, tokenizer=start.tokenizer, **what),
    ]
    return [each for each in found if each is not None]
