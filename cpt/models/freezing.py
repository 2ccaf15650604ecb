"""Parts of a model that are not trained, whatever the method.

`only` is what is trained where that is little: biases (BitFit; Ben Zaken et al., ACL 2022), norms, the maps
of attention, or what a regular expression finds."""

import re
from collections.abc import Callable, Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.core.rules import show
from cpt.models.options import Freeze
from cpt.models.units import blocks

SHOWN = 6  # names that a message lists


def frozen_parameters(model: PreTrainedModel, freeze: Freeze) -> list[nn.Parameter]:
    """The parameters that stay as they are. Raises ValueError for more blocks than there are, and where
    nothing is what alone is to be trained."""
    chosen = [*first_parts(model, freeze), *beside(model, freeze)]
    return list({id(parameter): parameter for parameter in chosen}.values())


def first_parts(model: PreTrainedModel, freeze: Freeze) -> Iterator[nn.Parameter]:
    """The parameters of the embeddings and of the first blocks, as far as they are not to be trained."""
    if not freeze.embeddings and freeze.layers == 0:
        return
    found = blocks(model)
    if freeze.layers > len(found):
        raise ValueError(f"freeze.layers={freeze.layers}; allowed: 0 to {len(found)}, the model's blocks")
    within = {module for _, block in found for module in block.modules()}
    embedded = [m for m in model.modules() if isinstance(m, nn.Embedding) and m not in within]
    for module in [block for _, block in found[: freeze.layers]] + (embedded if freeze.embeddings else []):
        yield from module.parameters()


def beside(model: PreTrainedModel, freeze: Freeze) -> Iterator[nn.Parameter]:
    """The parameters that are none of those that alone are to be trained."""
    if freeze.only is None:
        return
    entries = [freeze.only] if isinstance(freeze.only, str) else freeze.only
    meant = {id(parameter) for entry in entries for parameter in find_meant(model, entry)}
    yield from (parameter for parameter in model.parameters() if id(parameter) not in meant)


def find_meant(model: PreTrainedModel, entry: str) -> list[nn.Parameter]:
    """The parameters that a word or a regular expression means; raises ValueError if there are none."""
    if entry in WORDS:
        found = list(WORDS[entry](model))
    else:
        found = [each for name, each in model.named_parameters() if re.search(entry, name)]
    if not found:
        names = [name for name, _ in model.named_parameters()]
        raise ValueError(
            f"freeze.only={show(entry)} finds nothing in a {model.config.model_type}; allowed: norms, "
            f"biases, attention, or a regular expression that finds some of {', '.join(names[:SHOWN])} …"
        )
    return found


def norms(model: nn.Module) -> Iterator[nn.Parameter]:
    """Scales and shifts of all layers that normalise."""
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            yield from module.parameters(recurse=False)


def biases(model: nn.Module) -> Iterator[nn.Parameter]:
    """Whatever is called a bias of a map or a norm: what is added to all tokens alike."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] == "bias":
            yield parameter


def attention(model: nn.Module) -> Iterator[nn.Parameter]:
    """The linear maps of attentions, to queries, keys and values and from heads."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and ATTENTION.search(name):
            yield from module.parameters()


ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
WORDS: dict[str, Callable[[nn.Module], Iterator[nn.Parameter]]] = {
    "norms": norms,
    "biases": biases,
    "attention": attention,
}
