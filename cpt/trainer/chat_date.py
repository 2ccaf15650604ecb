"""The day that the chat template of a checkpoint prints."""

import datetime
import logging

from cpt.core.processes import is_first_process
from cpt.data.chats import prints_date
from cpt.models.loading import load_tokenizer
from cpt.trainer.plan import Plan, with_template_date

log = logging.getLogger(__name__)


def date_chats(plan: Plan) -> Plan:
    """The plan of chats with the day that their template prints: `domains.date`, or today at a run's first
    start. Without a day where the template prints none, so that caches do not depend on it."""
    checkpoint = plan.model.name_or_path
    encoding = plan.source.encoding
    if not plan.source.chats or encoding is None or checkpoint is None:
        return plan

    tokenizer_source = plan.model.tokenizer or checkpoint
    if not prints_date(load_tokenizer(tokenizer_source)):
        if encoding.date is not None and is_first_process():
            log.warning(
                "Ignoring domains.date=%s: the chat template of %s prints no date",
                encoding.date,
                tokenizer_source,
            )
        return with_template_date(plan, None)

    date = encoding.date or datetime.date.today().isoformat()
    if is_first_process():
        log.info("The chat template prints a date: %s (domains.date=YYYY-MM-DD sets it)", date)
    return with_template_date(plan, date)
