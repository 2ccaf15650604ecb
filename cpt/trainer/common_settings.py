"""What the processes of a run have to agree on: their settings, and the day that chats print."""

from cpt.core.config import digest, identity
from cpt.core.distributed import gather_objects
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.secrets import redact
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import KEYS_BY_CONTENT


def check_same_settings(plan: Plan) -> None:
    """Raises ValueError if processes resolved options that decide the result to different values, as with a
    user's resolver that draws them. Folders of texts and bases may differ from node to node."""
    leaves = identity(redact(plan.settings))
    settings = {key: value for key, value in leaves.items() if not is_node_local(key)}
    if len(set(gather_objects(digest(settings)))) == 1:
        return

    # The hashes differ, which says nothing: now all settings are sent, to name the first that differs.
    first_settings, *later_settings = gather_objects(settings)
    for key in sorted(first_settings):
        for process_settings in later_settings:
            if process_settings.get(key) != first_settings[key]:
                first_value = format_value(first_settings[key])
                other_value = format_value(process_settings.get(key))
                raise ValueError(
                    f"{key} is invalid: it is {first_value} in one process and {other_value} in another. "
                    "Allowed: the same value in all of them"
                )


def is_node_local(key: str) -> bool:
    """Whether an option may name another folder on each node: texts and bases are known by their contents."""
    return key in (*KEYS_BY_CONTENT, "model.name_or_path", "model.tokenizer") or key.endswith(".path")


def check_same_date(plan: Plan) -> None:
    """Raises ValueError where processes started on different days and chats print the day."""
    encoding = plan.source.encoding
    if not plan.source.chats or encoding is None or encoding.date is None:
        return
    dates = sorted({str(date) for date in gather_objects(encoding.date)})
    if len(dates) > 1:
        raise InvalidOptionError(
            "domains.date",
            None,
            reason=f"the processes started on {' and '.join(dates)}, and the chat template prints the date",
            allowed=f"domains.date={dates[0]}",
        )
