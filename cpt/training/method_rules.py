"""What the options of the methods, masks and routings may be: `check` finds a wrong one before any text is
read. What an option means stands in conf/method, conf/mask and conf/routing."""

from collections.abc import Callable, Mapping
from typing import Any

from cpt.core.values import (
    PATTERN,
    YES_NO,
    Rule,
    Rules,
    is_list,
    is_pattern,
    is_text,
    is_whole,
    number,
    one_of,
    or_null,
    some_of,
    whole,
)

ACTS_ON = one_of("gradient", "update", "frozen")
START = one_of("base", "previous")
BOTTLENECK: Rules = {
    "placement": one_of("pfeiffer", "ffn", "houlsby"),
    "reduction": whole(1),
    "activation": one_of("relu", "gelu", "silu"),
}
PAIRS: Rules = {
    "r": whole(1),
    "alpha": number("above 0"),
    "dropout": number("0 or more and below 1"),
    "targets": Rule(
        lambda value: is_pattern(value) or (is_list(value, is_text) and len(value) > 0),
        "all-linear, a regular expression, or a list of names",
    ),
    "embeddings": YES_NO,
    "exported": one_of("merged", "peft"),
}
INCREMENTAL: Rules = {**PAIRS, "stored": one_of("merged", "pairs")}
SOFT: Rules = {
    "units": some_of("heads", "neurons", "outputs", "tokens"),
    "acts_on": ACTS_ON,
    "normalise": one_of("tanh_abs", "tanh_relu", "minmax", "rank"),
    "general": or_null(one_of("logits", "hidden")),
    "proxy_dropout": or_null(number("above 0 and below 1")),
    "columns": some_of("heads", "neurons", none=True),
    "contrast": number("0 or more"),
    "contrast_text": one_of("uncorrupted", "corrupted"),
    "contrast_dropout": or_null(number("0 or more and below 1")),
    "temperature": number("above 0"),
}
GATES: Rules = {"s_max": number("above 0"), "limit": number("above 0")}
METHODS: dict[str, Rules] = {
    "adapter": {**BOTTLENECK, "per_domain": YES_NO, "start": START},
    "cpt_plugin": {
        **GATES,
        "attention": number("above 0"),
        "ffn": number("above 0"),
        "output_relu": YES_NO,
        "norms": one_of("per_domain", "frozen"),
        "sparsity": number("0 or more"),
    },
    "das": {**SOFT, "domains": YES_NO},
    "demix": {
        **BOTTLENECK,
        "experts": one_of("ffn", "adapter"),
        "start": one_of("nearest", "previous", "base"),
    },
    "derpp": {
        "alpha": number("0 or more"),
        "beta": number("0 or more"),
        "memory": Rule(
            lambda value: value is None or is_whole(value, 1), "a whole number of samples from 1 on"
        ),
        "memory_bytes": or_null(number("above 0")),
        "draw": or_null(Rule(lambda value: is_whole(value, 1), "a whole number from 1 on")),
        "matched": one_of("hidden", "logits"),
        "precision": one_of("float16", "bfloat16", "float32"),
    },
    "dga": SOFT,
    "ema": {"decay": number("0 or more and below 1")},
    "ewc": {
        "strength": number("0 or more"),
        "estimator": one_of("per_sample", "batch"),
        "merge": one_of("mean", "decay"),
        "gamma": number("0 to 1"),
    },
    "hat": {
        **BOTTLENECK,
        **GATES,
        "form": one_of("full", "adapter"),
        "units": some_of("heads", "neurons", "outputs", none=True),
        "shared": one_of("frozen", "trained"),
        "acts_on": ACTS_ON,
        "strength": number("0 or more"),
        "std": number("above 0"),
        "gate_rate": number("above 0"),
    },
    "inclora": INCREMENTAL,
    "joint": {},
    "kd": {
        "strength": number("0 or more"),
        "temperature": number("above 0"),
        "distilled": one_of("logits", "hidden"),
    },
    "l2": {"strength": number("0 or more"), "towards": one_of("previous", "base")},
    "lora": {**PAIRS, "per_domain": YES_NO, "start": START},
    "migu": {},
    "ncl": {},
    "none": {},
    "olora": {
        **INCREMENTAL,
        "strength": number("0 or more"),
        "penalty": one_of("l1", "squared"),
        "norm": number("0 or more"),
    },
    "one": {},
    "prompt": {"tokens": whole(0), "per_domain": YES_NO, "start": one_of("vocabulary", "previous")},
    "replay": {},
    "wise_ft": {"previous": number("0 to 1")},
}
# What options say together, and what is said of them.
TOGETHER: dict[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    "derpp": (
        lambda given: (given["memory"] is None) != (given["memory_bytes"] is None),
        "method.memory={memory} and method.memory_bytes={memory_bytes}; allowed: exactly one, the other null",
    ),
    "hat": (
        lambda given: given["form"] != "full" or given["units"] or given["shared"] == "trained",
        "method.shared={shared} leaves nothing to train without units; allowed: trained",
    ),
}
MASKS: dict[str, Rules] = {
    "migu": {
        "threshold": number("0 or more and below 1"),
        "importance": one_of("output", "gradient", "weight", "random"),
        "acts_on": ACTS_ON,
        "only": or_null(PATTERN),
        "biases": YES_NO,
        "head": YES_NO,
        "tied": YES_NO,
        "skip_first_domain": YES_NO,
        "seed": whole(0),
    }
}
SCORED = ("posterior", "nearest")
ROUTING: Rules = {
    "learned": one_of("domain", *SCORED),
    "unlearned": one_of("base", "last", *SCORED),
    "prior": one_of("uniform", "updating", "cached"),
    "decay": number("0 to 1"),
    "cached": whole(1),
    "top_k": or_null(whole(1)),
    "base": YES_NO,
}
