"""Names of M2D2's domains (Reid et al., EMNLP 2022).

M2D2 lists 239 names: 22 coarse domains, 214 fine ones, and three that are not domains. Some are misspelt
there (`General_referece`, `Human_activites`); these are the real ones."""

NOT_DOMAINS = ("eval_sets", "only_text", "only_txt2")
COARSE_OF_WIKIPEDIA = {
    "Culture_and_the_arts",
    "General_referece",
    "Health_and_fitness",
    "History_and_events",
    "Human_activites",
    "Mathematics_and_logic",
    "Natural_and_physical_sciences",
    "Philosophy_and_thinking",
    "Religion_and_belief_systems",
    "Society_and_social_sciences",
    "Technology_and_applied_sciences",
}


def parse_name(name: str) -> tuple[str, str | None]:
    """The coarse and the fine domain in a name of M2D2: A and b in `A__b` (Wikipedia), cs and AI in `cs.AI`
    (S2ORC). The fine one is None in the name of a coarse domain, and the coarse one in that of an archive
    without classes, like `hep-th`. Raises ValueError for a name that is no domain."""
    if name in NOT_DOMAINS:
        raise ValueError(f"{name} is in M2D2's list and is no domain. Allowed: domains.ignore=[{name}]")
    if name in COARSE_OF_WIKIPEDIA or name.endswith("_l1"):
        return name.removesuffix("_l1"), None
    separator = "__" if "__" in name else "."
    coarse, _, fine = name.partition(separator)
    return coarse, fine or coarse
