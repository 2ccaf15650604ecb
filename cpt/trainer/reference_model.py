"""The frozen second model that weights of tokens compare with (`loss=rho1`, `loss=flow`): a copy of the base,
or the model in a folder."""

from copy import deepcopy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.methods.base import ContinualMethod
from cpt.methods.stage_module import REFERENCE
from cpt.models.fast_kernels import pad_head
from cpt.models.loading import find_objectives, load_config, load_model, load_tokenizer
from cpt.trainer.base_model import Base
from cpt.trainer.check_checkpoint import check_stored_form, check_stored_weights, check_weight_files
from cpt.trainer.plan import Plan

KEY = "loss.reference"
ALLOWED = "null (the base), or the folder of a model with the tokenizer of the base"


def check_reference(folder: str, tokenizer: PreTrainedTokenizerBase | None, objective: str) -> None:
    """Raises ValueError for a folder without a model of the `objective` (masked, causal, span), or whose
    vocabulary differs from the `tokenizer` (None: not trained yet)."""
    if not Path(folder).is_dir():
        raise InvalidOptionError(KEY, folder, reason="there is no such folder", allowed=ALLOWED)
    try:
        config = load_config(folder)
        vocabulary = load_tokenizer(folder).get_vocab()
    except Exception as error:  # whatever the classes raise for files that they do not take
        raise InvalidOptionError(
            KEY, folder, reason=find_reason(error).rstrip("."), allowed=ALLOWED
        ) from error

    if objective not in find_objectives(config):
        raise InvalidOptionError(
            KEY, folder, reason=f"a {config.model_type} is not trained as {objective}", allowed=ALLOWED
        )
    if tokenizer is not None and vocabulary != tokenizer.get_vocab():
        raise InvalidOptionError(KEY, folder, reason="its tokenizer has other tokens", allowed=ALLOWED)


def check_reference_weights(folder: str, objective: str) -> None:
    """Raises ValueError for damaged weights, and for those that differ from what config.json describes: what
    is missing would be filled with random numbers."""
    config = load_config(folder)
    try:
        check_stored_form(folder, config)
        check_weight_files(Path(folder), config)
        check_stored_weights(folder, config, objective, head_steps=None)
    except InvalidOptionError as error:  # of model.name_or_path
        raise InvalidOptionError(KEY, folder, reason=error.reason, allowed=ALLOWED) from error


def make_reference(plan: Plan, base: Base, model: PreTrainedModel) -> PreTrainedModel:
    """The frozen model that weights of tokens compare with, in eval mode; without a folder a copy of the base
    `model`. Raises ValueError as `check_reference`."""
    folder = plan.reference_folder
    if folder is None:
        reference = deepcopy(model)
    else:
        check_reference(folder, base.tokenizer, base.objective_name)
        reference = load_model(folder, base.objective_name)
        pad_head(reference)
        reference.set_attn_implementation(model.config._attn_implementation)
    return reference.requires_grad_(False).eval()


def add_reference(method: ContinualMethod, reference: PreTrainedModel) -> None:
    """Adds the model that weights of tokens compare with to a method. Files of a run leave its weights out,
    which each start makes again."""
    method.auxiliary_models[REFERENCE] = reference
    names = [name for name, _ in reference.named_parameters(remove_duplicate=False)]
    method.names_left_to_base |= {f"auxiliary_models.{REFERENCE}.{name}" for name in names}
