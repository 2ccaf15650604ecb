"""Prompt tuning (Lester, Al-Rfou and Constant, EMNLP 2021): trained embeddings P [n, D] within a text's own.

    [e(x_1); ...; e(x_T)]  ->  [e(x_1); P; e(x_2); ...; e(x_T)]

The prompt follows the first token, so that <s> keeps its place. The output of the model's body is cut back to
the T places of the text: of a causal model the first n are cut, as the prompt's last place predicts the
second token. With encoder and decoder P precedes the encoder's input, and the decoder attends to it too.
peft's PromptTuning puts the prompt before <s> and has no form for masked language models."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainParams, Scope
from cpt.models.forward import CACHES, find_body, find_input_stack
from cpt.models.fsdp import call_within
from cpt.models.loading import find_max_positions

UNCUT = WeakTensorKeyDictionary()  # an encoder's output with the prompt's places, by that without them


class PromptVectors(nn.Module):
    """Inserts the prompt `weight` [n, D], or [B, n, D] by row, into the input of a model's body `before`
    tokens from its start, and cuts its output back, with `leading` at the first places."""

    written_whole = True  # a causal model generates without a cache, and not after padding

    def __init__(
        self, weight: Tensor, *, before: int, leading: bool, placeholder: int, limit: int | None, names: list
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.before = before
        self.leading = leading
        self.placeholder = placeholder
        self.limit = limit
        self.names = names
        self.is_in_pass = False  # whether the body's pass has started: embeddings may be computed outside it

    @property
    def positions_taken(self) -> int:
        """n: of a model's positions, those that a text can not have."""
        return self.weight.shape[-2]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}weight", self.weight)
        if len(stored) != len(self.weight):  # n is what the state has
            self.weight = nn.Parameter(self.weight.new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def insert(self, values: Tensor, filler: int) -> Tensor:
        """[B, T] or [B, T, D] with n columns of a filler at the prompt's positions."""
        columns = values.new_full((len(values), self.positions_taken, *values.shape[2:]), filler)
        return torch.cat([values[:, : self.before], columns, values[:, self.before :]], dim=1)

    def widen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The body's pre-hook: adds n positions to each row. ValueError for inputs that do not go with it."""
        inputs = dict(zip(self.names, args, strict=False)) | kwargs
        inputs = {name: value for name, value in inputs.items() if value is not None}
        self.check_inputs(inputs)

        # What stands at the prompt's positions: any ids, as `embed` puts the prompt over their embeddings; 1
        # in the mask, which attends to them.
        fillers = {
            "inputs_embeds": 0,
            "attention_mask": 1,
            "token_type_ids": 0,
            "input_ids": self.placeholder,
        }
        for name, filler in fillers.items():
            if name in inputs:
                inputs[name] = self.insert(inputs[name], filler)
        # With ids the embedding has a hook (`embed`); embeddings that are passed in go past it.
        if "inputs_embeds" in inputs:
            inputs["inputs_embeds"] = self.fill(inputs["inputs_embeds"])

        position_ids = inputs.get("position_ids")
        if position_ids is not None:  # they count on through the prompt
            count = self.positions_taken
            steps = torch.arange(1, count + 1, device=position_ids.device)
            first = position_ids[:, :1]
            inputs["position_ids"] = torch.cat([first, first + steps, position_ids[:, 1:] + count], 1)
        self.is_in_pass = True
        return (), inputs

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raises ValueError for a body's inputs that a prompt does not go with."""
        text = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if text is None:
            raise ValueError("a model with a prompt needs input_ids or inputs_embeds")
        for name in {*CACHES, "encoder_hidden_states"} & inputs.keys():
            raise ValueError(f"a model with a prompt takes no {name}; to generate: use_cache=False")
        length = text.shape[1]
        count = self.positions_taken
        if self.limit is not None and length + count > self.limit:
            raise ValueError(f"{length} tokens and a prompt of {count}. Allowed: {self.limit} together")
        mask = inputs.get("attention_mask")
        if mask is not None and (mask.ndim != 2 or not mask[:, 0].all()):
            raise ValueError("a prompt takes an attention_mask [B, T] of rows that are padded at their end")

    def fill(self, embeddings: Tensor) -> Tensor:
        """Widened embeddings [B, T + n, D] with the prompt at its positions."""
        prompt = self.weight.to(embeddings).expand(len(embeddings), -1, -1)
        after = self.before + self.positions_taken
        return torch.cat([embeddings[:, : self.before], prompt, embeddings[:, after:]], dim=1)

    def embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self.fill(output) if self.is_in_pass else output

    def cut(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook of the body: its output, and all layers', at the text's places."""
        self.is_in_pass = False
        if output is None:  # the pass has failed
            return output
        uncut = output.last_hidden_state
        output.last_hidden_state = self.cut_states(uncut)
        if self.before == 0:  # an encoder's
            UNCUT[output.last_hidden_state] = uncut
        if output.get("hidden_states") is not None:
            output.hidden_states = tuple(self.cut_states(states) for states in output.hidden_states)
        return output

    def cut_states(self, states: Tensor) -> Tensor:
        """Hidden states [B, T + n, D] at the text's positions, [B, T, D]."""
        count = self.positions_taken
        # In a causal model the state at the prompt's last position predicts the second token: the first
        # token's state is among those that are cut. An encoder's prompt precedes the text.
        if self.leading:
            return states[:, count:]
        return torch.cat([states[:, :1], states[:, 1 + count :]], 1)

    def restore_prompt(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The decoder's pre-hook: it attends to the prompt too. ValueError for another encoder's output."""
        states = kwargs.get("encoder_hidden_states")
        if states is None or states not in UNCUT:
            raise ValueError("a decoder takes a prompt from its encoder; to generate: num_beams=1")
        inputs = kwargs | {"encoder_hidden_states": UNCUT[states]}
        mask = kwargs.get("encoder_attention_mask")
        if mask is not None:
            inputs["encoder_attention_mask"] = self.insert(mask, 1)
        return args, inputs


class PromptChain(DomainParams):
    """Prompts of domains; the parameters of domain k are [P_k; ...; P_1] (Progressive Prompts)."""

    def weights(self, domain: int) -> dict[str, Tensor]:
        if domain == BASE:
            return super().weights(BASE)
        prompts = []  # by name, of the domain and those before it
        for earlier in self.up_to(domain):
            prompts.append(super().weights(earlier))
        chain = {}
        for name in prompts[0]:
            chain[name] = torch.cat([prompt[name] for prompt in prompts])
        return chain

    def up_to(self, domain: int) -> list[int]:
        """The domains up to one that have a prompt, descending."""
        return [earlier for earlier in reversed(self.domains) if earlier <= domain]

    def before(self, domain: int) -> list[int]:
        """The domains before one that have a prompt, ascending."""
        return [earlier for earlier in self.domains if earlier < domain]


def attach_prompt(model: PreTrainedModel, *, tokens: int, causal: bool) -> Scope:
    """Adds a prompt of `tokens` random ordinary tokens' vectors; `causal`: outputs predict the next token."""
    has_encoder = model.config.is_encoder_decoder
    inner = find_input_stack(model)
    # An encoder's own, as it and the decoder have two modules with one table.
    table = (inner if has_encoder else model).get_input_embeddings()
    special = special_ids(model)
    prompt = PromptVectors(
        draw_prompt(model, tokens),
        before=0 if has_encoder else 1,
        leading=causal or has_encoder,
        placeholder=next(number for number in range(len(special) + 1) if number not in special),
        limit=find_max_positions(model),
        names=list(inspect.signature(inner.forward).parameters),
    )
    inner.add_module("prompt", prompt)
    inner.register_forward_pre_hook(prompt.widen, with_kwargs=True)
    table.register_forward_hook(prompt.embed)
    inner.register_forward_hook(prompt.cut, always_call=True)
    if has_encoder:
        find_body(model).register_forward_pre_hook(prompt.restore_prompt, with_kwargs=True)
    names = [name for name, parameter in model.named_parameters() if parameter is prompt.weight]
    return Scope(tuple(names), ())


@torch.no_grad()
def draw_prompt(model: PreTrainedModel, tokens: int, generator: torch.Generator | None = None) -> Tensor:
    """The input embeddings of random ordinary tokens, [tokens, D]; one may come twice."""
    table = model.get_input_embeddings()
    special = special_ids(model)
    ordinary = torch.tensor([number for number in range(table.num_embeddings) if number not in special])
    chosen = ordinary[torch.randint(len(ordinary), (tokens,), generator=generator)]
    return call_within(model, table, chosen.to(model.device)).clone()


def special_ids(model: PreTrainedModel) -> set[int]:
    """The token ids that a model's configuration names, the padding's among them."""
    ids: set[int] = set()
    for name, value in model.config.to_dict().items():
        if not name.endswith("_token_id") or value is None:
            continue
        if isinstance(value, list):  # several ends of a text
            ids.update(value)
        else:
            ids.add(value)
    return ids
