"""What stated licenses of a base model and of data say of the license of a model that is trained from them.

Licenses are compared by their identifiers on the Hub, with the table below, and conservatively: terms that
may apply to a trained model are taken to apply. Where the table cannot tell, no license is claimed. Nothing
of it is legal advice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpt.core.exceptions import InvalidOptionError

# Kinds of terms.
PERMISSIVE = "permissive"
SHARE_ALIKE = "share-alike"
NON_COMMERCIAL = "non-commercial"
NO_DERIVATIVES = "no derivatives"
MODEL_TERMS = "terms of a model"
# The identifiers of the Hub (HUB_LIST) by kind. Without those of families whose members differ (`cc`), and
# without `other` and `unknown`.
IDENTIFIERS_BY_KIND = {
    PERMISSIVE: """
        apache-2.0 mit isc zlib ncsa bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 unlicense wtfpl
        afl-3.0 artistic-2.0 ecl-2.0 postgresql etalab-2.0 odc-by pddl c-uda open-mdw
        cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cdla-permissive-1.0 cdla-permissive-2.0
    """,
    SHARE_ALIKE: """
        cc-by-sa-3.0 cc-by-sa-4.0 cdla-sharing-1.0 odbl gfdl gpl gpl-2.0 gpl-3.0 agpl-3.0 lgpl lgpl-2.1
        lgpl-3.0 lgpl-lr mpl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 osl-3.0 ms-pl ofl-1.1 lppl-1.3c
    """,
    NON_COMMERCIAL: """
        cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0
    """,
    NO_DERIVATIVES: "cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0",
    MODEL_TERMS: """
        llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma openrail openrail++ bigscience-openrail-m
        creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m deepfloyd-if-license apple-ascl
        apple-amlr intel-research h-research lfm1.0 fair-noncommercial-research-license grok2-community
    """,
}
KINDS: dict[str, str] = {}  # by identifier
for kind, identifiers in IDENTIFIERS_BY_KIND.items():
    KINDS.update(dict.fromkeys(identifiers.split(), kind))
OTHER = "other"  # a license that the Hub does not list, with a name of its own
NOT_STATED = "not stated"
OPTION = "--license"
EXAMPLES = "apache-2.0, mit, cc-by-4.0, llama3.1"
HUB_LIST = "https://huggingface.co/docs/hub/repositories-licenses"


@dataclass(frozen=True, kw_only=True)
class StatedLicense:
    """What is stated of a base model, or of a text that it was trained on."""

    source: str  # `the base model x`, or the name of a text
    is_model: bool = False
    identifier: str = ""  # of the Hub, lower case; empty: not stated
    name: str = ""  # of a license that the Hub does not list
    link: str = ""  # to its text
    stated_in: str = ""  # a file or a card, without a path

    @property
    def label(self) -> str:
        """What it is called in sentences and tables."""
        return self.name or self.identifier or NOT_STATED

    @property
    def kind(self) -> str:
        """The kind of its terms; empty where the table cannot tell. Named terms of a model are its own."""
        if self.identifier == OTHER and self.name and self.is_model:
            return MODEL_TERMS
        return KINDS.get(self.identifier, "")


@dataclass(frozen=True, kw_only=True)
class LicenseDecision:
    """The license that a model card claims, and why; without an identifier it claims none."""

    identifier: str = ""
    name: str = ""
    link: str = ""
    reason: str

    @property
    def label(self) -> str:
        return self.name or self.identifier


def normalize_identifier(text: str) -> str:
    """An identifier as the Hub has it, from one of the Hub or of SPDX.

    >>> normalize_identifier("Apache-2.0"), normalize_identifier("GPL-3.0-or-later")
    ('apache-2.0', 'gpl-3.0')
    """
    return re.sub(r"-(only|or-later)$", "", text.strip().lower())


def check_identifier(text: str, *, option: str) -> str:
    """The identifier that an option gives. Raises ValueError for one that the Hub does not list."""
    identifier = normalize_identifier(text)
    if identifier not in KINDS:
        similar = difflib.get_close_matches(identifier, KINDS, n=1)
        hint = f". Did you mean {similar[0]}?" if similar else ""
        raise InvalidOptionError(
            option,
            text,
            reason="no identifier of a license",
            allowed=f"{EXAMPLES} and others of {HUB_LIST}{hint}",
        )
    return identifier


def decide_license(stated: Sequence[StatedLicense]) -> LicenseDecision:
    """The license of a model that was made from a base and texts. The base, if there is one, is the first of
    `stated`."""
    # What keeps a decision from being made, the clearest obstacle first.
    missing = [license.source for license in stated if not license.identifier]
    if missing or not stated:
        return LicenseDecision(reason=f"no license is stated of {shorten_list(missing) or 'anything'}")
    unclear = [f"{license.label} ({license.source})" for license in stated if not license.kind]
    if unclear:
        return LicenseDecision(reason=f"cpt does not know the terms of {shorten_list(unclear)}")
    forbidding = [
        f"{license.label} ({license.source})" for license in stated if license.kind == NO_DERIVATIVES
    ]
    if forbidding:
        return LicenseDecision(reason=f"{shorten_list(forbidding)} does not allow changed versions")

    # A license that is not permissive applies to the model, too: of two, neither covers it alone.
    restrictive = list_distinct(license for license in stated if license.kind != PERMISSIVE)
    if len(restrictive) > 1:
        labels = [f"{license.label} ({license.source})" for license in restrictive]
        return LicenseDecision(reason=f"{shorten_list(labels)} may each apply to the model, and differ")
    if restrictive:
        license = restrictive[0]
        return make_decision(
            license, f"its terms ({license.kind}) may apply to what is made of {license.source}"
        )

    permissive = list_distinct(stated)
    if stated[0].is_model or len(permissive) == 1:
        return make_decision(stated[0], "all stated licenses are permissive")
    labels = [license.label for license in permissive]
    return LicenseDecision(reason=f"{shorten_list(labels)} are permissive, and none is of a base model")


def choose_license(stated: Sequence[StatedLicense], identifier: str) -> LicenseDecision:
    """The decision for a license that somebody chose, with what speaks against it."""
    decision = decide_license(stated)
    reason = f"chosen with {OPTION}"
    if not decision.identifier:
        reason += f"; from what is stated it does not follow: {decision.reason}"
    elif decision.identifier != identifier and KINDS.get(decision.identifier) != PERMISSIVE:
        reason += f"; what is stated speaks for {decision.label}: {decision.reason}"
    return LicenseDecision(identifier=identifier, reason=reason)


def make_decision(license: StatedLicense, reason: str) -> LicenseDecision:
    return LicenseDecision(identifier=license.identifier, name=license.name, link=license.link, reason=reason)


def list_distinct(licenses: Iterable[StatedLicense]) -> list[StatedLicense]:
    """The first of each license."""
    first: dict[tuple[str, str], StatedLicense] = {}
    for license in licenses:
        first.setdefault((license.identifier, license.name), license)
    return list(first.values())


def shorten_list(names: Sequence[str], *, limit: int = 3) -> str:
    """The first names, and how many follow.

    >>> shorten_list(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    return ", ".join(names)
