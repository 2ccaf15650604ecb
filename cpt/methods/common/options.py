"""Options that methods share."""

ESTIMATORS = ("per_sample", "batch")  # of cpt.models.fisher
RULES = ("average", "task_arithmetic", "ties", "dare", "dare_ties", "slerp", "fisher")
