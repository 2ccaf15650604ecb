"""Patterns of optim.lr_multipliers and optim.no_decay that find nothing that is trained."""

import pytest

from cpt.models.parameter_groups import check_patterns
from tests.models import test_units


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("nothing", "no parameter has such a name"),
        ("biases", "the model has none"),
        ("embeddings", "none of them is trained with method=ncl, freeze and trainable"),
        ("embed_tokens", "none of them is trained with method=ncl, freeze and trainable"),
        ("norms", ""),
    ],
)
def test_a_pattern_that_finds_nothing_trained_is_refused_with_the_reason(pattern, reason):
    model = test_units.build("llama")
    model.get_input_embeddings().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not reason:
        check_patterns(model, [pattern], trained, key="optim.no_decay", method="ncl")
        return
    with pytest.raises(ValueError, match=f"^optim.no_decay={pattern} is invalid: {reason}. Allowed: "):
        check_patterns(model, [pattern], trained, key="optim.no_decay", method="ncl")
