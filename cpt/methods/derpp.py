"""DER++: dark experience replay (Buzzega et al., NeurIPS 2020, equation 6, sections 3 and 4).

L = l(f(x), y) + alpha * ||h(x') - z'||^2 + beta * l(f(x''), y''), with x' and x'' two independent draws from
a reservoir of the whole stream, z' the model's outputs on x' when it was added. No domain labels are needed.

l is the language-model loss; h, at the scored positions, the last hidden states or the logits (the paper's).
||.||^2 is the mean over the draw's scored positions and features, the second l over its scored tokens."""

import torch
from torch import Tensor
from torch.nn import functional

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.common.reservoir import Reservoir, slot_of
from cpt.methods.options import DERPPOptions
from cpt.models.forward import at, nll_of


class DERPP(ContinualMethod):
    """Replays a reservoir: matches stored outputs on some of its samples, trains on the labels of others."""

    options: DERPPOptions

    def __init__(self, options: DERPPOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        slot = slot_of(self.objective, self.length)
        slot |= {"width": self.width(options.matched), "precision": options.precision}
        pad = self.model.config.pad_token_id or 0
        self.memory = Reservoir(samples=options.buffer_size, **slot, seed=self.seed, pad=pad)

    @torch.no_grad()
    def width(self, matched: str) -> int:
        """Features of an output at a position, from a forward pass: not every configuration says."""
        ids = torch.zeros(1, 2, dtype=torch.long)
        two: Batch = {"input_ids": ids, "positions": torch.zeros(1, dtype=torch.long)}
        if self.model.config.is_encoder_decoder:
            two["decoder_input_ids"] = ids
        with torch.random.fork_rng(devices=[]):
            logits, hidden = self.objective.outputs(self.model, two)
        return (logits if matched == "logits" else hidden).shape[-1]

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        logits, hidden = self.objective.outputs(self.model, batch)
        lm = nll_of(logits, batch).sum() * batch["weight"]
        match, replay = self.replayed(self.options.minibatch_size or max(1, len(hidden) // 2))
        held = logits if self.options.matched == "logits" else at(hidden, batch["positions"])
        self.memory.add(batch, held)
        terms = {"derpp_match": self.options.alpha * match, "derpp_replay": self.options.beta * replay}
        return {"lm": lm, **terms}

    def replayed(self, count: int) -> tuple[Tensor, Tensor]:
        """Squared error on one draw of `count` samples and loss on another, means; 0 from an empty memory."""
        matching, replaying = (self.memory.draw(count, purpose=name) for name in ("match", "replay"))
        if not len(matching):
            none = torch.zeros((), device=self.device)
            return none, none.clone()
        stored = self.memory.outputs_of(matching).float()
        both = self.objective.lay_out(self.memory.batch(torch.cat([matching, replaying])))
        before, after = both["positions"].tensor_split([len(stored)])
        replayed = both | {"positions": after, "targets": both["targets"][len(stored) :]}
        if self.options.matched == "hidden":  # the head is computed for the replayed draw only
            logits, hidden = self.objective.outputs(self.model, replayed)
            present = at(hidden, before)
        else:
            logits, _ = self.objective.outputs(self.model, both)
            present, logits = logits.tensor_split([len(stored)])
        nll = nll_of(logits, replayed)
        return functional.mse_loss(present.float(), stored), nll.mean()
