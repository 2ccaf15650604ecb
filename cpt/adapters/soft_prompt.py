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
from cpt.core.messages import count_noun
from cpt.models.forward import CACHES, find_body, find_input_stack
from cpt.models.fsdp import call_within
from cpt.models.loading import find_max_positions

# The last hidden states of encoders with those at the prompt's positions, by the same states without them: a
# decoder, which is called with the latter, attends to the former.
STATES_WITH_PROMPT = WeakTensorKeyDictionary()


class PromptVectors(nn.Module):
    """Inserts the prompt `weight` [n, D], or [B, n, D] by row, into the input of a model's body after the
    first `num_before` tokens, and cuts n positions from its output: the first n if `is_cut_at_start`, else
    those of the prompt. `placeholder` is the token id at the prompt's positions, whose embedding is replaced;
    `max_length` the most positions that the model has (None: no bound), `argument_names` the arguments of the
    body's forward in their order."""

    written_whole = True  # a causal model generates without a cache, and not after padding

    def __init__(
        self,
        weight: Tensor,
        *,
        num_before: int,
        is_cut_at_start: bool,
        placeholder: int,
        max_length: int | None,
        argument_names: list[str],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.num_before = num_before
        self.is_cut_at_start = is_cut_at_start
        self.placeholder = placeholder
        self.max_length = max_length
        self.argument_names = argument_names
        self.is_in_pass = False  # whether the body's pass has started: embeddings may be computed outside it

    @property
    def positions_taken(self) -> int:
        """n: the positions of a model that a text cannot have."""
        return self.weight.shape[-2]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}weight", self.weight)
        if len(stored) != len(self.weight):  # n is what the state has
            self.weight = nn.Parameter(self.weight.new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def insert(self, values: Tensor, filler: int) -> Tensor:
        """[B, T] or [B, T, D] with n columns of a filler at the prompt's positions."""
        columns = values.new_full((len(values), self.positions_taken, *values.shape[2:]), filler)
        return torch.cat([values[:, : self.num_before], columns, values[:, self.num_before :]], dim=1)

    def widen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The pre-hook of the body: its inputs with n more positions in each row, all by keyword. Raises
        ValueError for inputs that a prompt does not go with."""
        inputs = dict(zip(self.argument_names, args, strict=False)) | kwargs
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
        if position_ids is not None:
            # They count on through the prompt: the tokens after it stand n positions further back.
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
        if self.max_length is not None and length + count > self.max_length:
            token_count = count_noun(length, "token")
            raise ValueError(f"{token_count} and a prompt of {count}. Allowed: {self.max_length} together")
        mask = inputs.get("attention_mask")
        if mask is not None and (mask.ndim != 2 or not mask[:, 0].all()):
            raise ValueError("a prompt takes an attention_mask [B, T] of rows that are padded at their end")

    def fill(self, embeddings: Tensor) -> Tensor:
        """Widened embeddings [B, T + n, D] with the prompt at its positions."""
        prompt = self.weight.to(embeddings).expand(len(embeddings), -1, -1)
        end_of_prompt = self.num_before + self.positions_taken
        return torch.cat([embeddings[:, : self.num_before], prompt, embeddings[:, end_of_prompt:]], dim=1)

    def embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The forward hook of the input embedding: puts the prompt over the embeddings of the placeholders,
        in passes of the body only."""
        return self.fill(output) if self.is_in_pass else output

    def cut(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook of the body: its output, and all layers', at the text's places."""
        self.is_in_pass = False
        if output is None:  # the pass has failed
            return output
        states_with_prompt = output.last_hidden_state
        output.last_hidden_state = self.cut_states(states_with_prompt)
        if self.num_before == 0:  # in an encoder alone
            STATES_WITH_PROMPT[output.last_hidden_state] = states_with_prompt
        if output.get("hidden_states") is not None:
            output.hidden_states = tuple(self.cut_states(states) for states in output.hidden_states)
        return output

    def cut_states(self, states: Tensor) -> Tensor:
        """Hidden states [B, T + n, D] less n of them, [B, T, D]: those of the prompt, but in a causal model
        the prompt's last state takes the place of the first token's."""
        count = self.positions_taken
        # In a causal model the prompt stands between the first token and the second, which its last state
        # predicts. With encoder and decoder it precedes the encoder's text: the first n states are its own.
        if self.is_cut_at_start:
            return states[:, count:]
        return torch.cat([states[:, :1], states[:, 1 + count :]], 1)

    def restore_prompt(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The decoder's pre-hook: it attends to the prompt too. Raises ValueError for another encoder's
        output."""
        states = kwargs.get("encoder_hidden_states")
        if states is None or states not in STATES_WITH_PROMPT:
            raise ValueError(
                "the decoder got states that its encoder did not compute with the prompt. "
                "Allowed: states as the encoder returns them; in generation num_beams=1"
            )
        inputs = kwargs | {"encoder_hidden_states": STATES_WITH_PROMPT[states]}
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
    """Adds a prompt, which starts as the embeddings of `tokens` random ordinary tokens, to the encoder of a
    model or to its body; returns the scope with the prompt alone. `causal` says whether the model's outputs
    predict the next token."""
    has_encoder = model.config.is_encoder_decoder
    stack = find_input_stack(model)  # the encoder or body
    # Encoder and decoder call an embedding module each, which share one table of weights: only the
    # encoder's may insert the prompt.
    embedding = (stack if has_encoder else model).get_input_embeddings()
    prompt = PromptVectors(
        draw_prompt(model, tokens),
        num_before=0 if has_encoder else 1,  # <s> stays the first token of a model without an encoder
        is_cut_at_start=causal or has_encoder,
        placeholder=find_smallest_ordinary_id(model),
        max_length=find_max_positions(model),
        argument_names=list(inspect.signature(stack.forward).parameters),
    )

    stack.add_module("prompt", prompt)
    stack.register_forward_pre_hook(prompt.widen, with_kwargs=True)
    embedding.register_forward_hook(prompt.embed)
    stack.register_forward_hook(prompt.cut, always_call=True)
    if has_encoder:
        find_body(model).register_forward_pre_hook(prompt.restore_prompt, with_kwargs=True)
    names = [name for name, parameter in model.named_parameters() if parameter is prompt.weight]
    return Scope(names=tuple(names), projections=())


@torch.no_grad()
def draw_prompt(model: PreTrainedModel, tokens: int, generator: torch.Generator | None = None) -> Tensor:
    """The input embeddings of random ordinary tokens, [tokens, D]; one may come twice."""
    embedding = model.get_input_embeddings()
    special_ids = find_special_ids(model)
    ordinary_ids = torch.tensor(
        [token_id for token_id in range(embedding.num_embeddings) if token_id not in special_ids]
    )
    drawn_ids = ordinary_ids[torch.randint(len(ordinary_ids), (tokens,), generator=generator)]
    return call_within(model, embedding, drawn_ids.to(model.device)).clone()


def find_smallest_ordinary_id(model: PreTrainedModel) -> int:
    """The smallest token id that is not special."""
    special_ids = find_special_ids(model)
    ordinary_id = 0
    while ordinary_id in special_ids:
        ordinary_id += 1
    return ordinary_id


def find_special_ids(model: PreTrainedModel) -> set[int]:
    """The ids of special tokens in a model's configuration, such as padding."""
    ids: set[int] = set()
    for name, value in model.config.to_dict().items():
        if not name.endswith("_token_id") or value is None:
            continue
        if isinstance(value, list):  # several ends of a text
            ids.update(value)
        else:
            ids.add(value)
    return ids
