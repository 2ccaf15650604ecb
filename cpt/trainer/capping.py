"""How much of each text is scored where that is not said: a bound, or what the folder was begun with."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from cpt.core.config import digest, flatten, identity, plain_config
from cpt.core.rules import show
from cpt.evaluation.options import AUTO
from cpt.trainer.plan import Plan, with_cap
from cpt.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from cpt.data.datamodule import DomainSequence

log = logging.getLogger(__name__)
SHOWN = 3  # texts that a line names


def hold_cap(plan: Plan, place: RunFolder) -> Plan:
    """The plan with the bound that a folder was begun with, unless the plan says one."""
    if plan.evaluation.tokens != AUTO or not place.config.exists():
        return plan
    begun = dict(flatten(plain_config(OmegaConf.load(place.config)))).get("eval.tokens")  # absent: no bound
    if begun == plan.cap:
        return plan
    settings = with_cap(plan.settings, begun)
    return replace(plan, settings=settings, config_digest=digest(identity(settings)))


def tell_cap(plan: Plan, data: DomainSequence) -> None:
    """Tells, in a line, of which texts a part is scored; and where a run goes on with another bound than a
    new one would have, if that makes a difference."""
    texts = data.held_out
    tokens = {name: int(text.row_lengths.sum()) for name, text in texts.items()}
    usual = plan.evaluation.cap or 0
    if plan.evaluation.tokens == AUTO and plan.cap != usual and max(tokens.values(), default=0) > usual:
        log.info(
            "eval.tokens=%s, as the run was begun: what it scores stays what it was; a new run would score "
            "%s tokens of each text at most",
            show(plan.cap),
            f"{usual:,}",
        )
    read = {name: int(texts[name].row_lengths[data.scored_rows(name)].sum()) for name in data.cut}
    if read:
        told = [f"{name} {count:,} of {tokens[name]:,}" for name, count in read.items()]
        log.info(
            "eval.tokens=%s: of %d of %d texts a part is scored, the same rows after every stage (%s%s; of "
            "all texts %s of %s tokens); eval.tokens=null scores all, in a run of its own",
            show(plan.cap),
            len(read),
            len(texts),
            ", ".join(told[:SHOWN]),
            f"; and {len(told) - SHOWN} more" * (len(told) > SHOWN),
            f"{sum((tokens | read).values()):,}",
            f"{sum(tokens.values()):,}",
        )
