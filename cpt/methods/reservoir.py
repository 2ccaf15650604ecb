"""Methods that store samples of a run in a reservoir: DER++ and A-GEM.

Reservoir sampling: Vitter, ACM Transactions on Mathematical Software 11(1), 1985, algorithm R."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from cpt.core.distributed import all_reduce_sum, gather_shards
from cpt.core.processes import rank_and_world
from cpt.core.randomness import draws, key, sample_keys, shuffle
from cpt.data.collate import UNSCORED, Batch, label_batch, labels_of
from cpt.data.packing import PADDING
from cpt.gradient_masks.base import Constraint, Step
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import AGEMOptions, DERPPOptions
from cpt.models.forward import select_positions, token_nll
from cpt.models.objectives import Objective

SWEEPS = 1000  # over the entries of v, at most
CLOSE = 1e-12  # relative change of v that ends the sweeps
PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}


class Reservoir(nn.Module):
    """`samples` slots: a row of ids with its labels, and outputs [scored, width] at its scored positions,
    padded; of an encoder-decoder its decoder ids, where documents share rows the document of each token, and
    `by_domain` the domain.

    Of w processes, r keeps its own samples in the slots r, r + w, r + 2w, ... and draws from these;
    `seen[r]` counts the samples that it was offered. A state_dict gathers all slots (a collective)."""

    def __init__(
        self,
        objective: Objective,
        *,
        samples: int,
        length: int,
        seed: int,
        width: int = 0,
        precision: str = "float32",
        pad: int | None = None,
        by_domain: bool = False,
    ) -> None:
        super().__init__()
        source, target = objective.sides(length)
        self.seed, self.pad, self.by_domain = seed, pad or 0, by_domain
        self.isolated, self.decodes = objective.isolated, target is not None
        self.input_ids = nn.Buffer(torch.zeros(samples, source, dtype=torch.int32))
        if target is not None:
            self.decoder_input_ids = nn.Buffer(torch.zeros(samples, target, dtype=torch.int32))
        self.labels = nn.Buffer(torch.full((samples, target or source), UNSCORED, dtype=torch.int32))
        self.lengths = nn.Buffer(torch.zeros(samples, dtype=torch.int32))
        size = (samples, objective.most(length), width)
        self.outputs = nn.Buffer(torch.zeros(size, dtype=PRECISIONS[precision]))
        self.seen = nn.Buffer(torch.zeros(samples, dtype=torch.int64))
        if self.isolated:
            self.segments = nn.Buffer(torch.full((samples, source), PADDING, dtype=torch.int32))
        if by_domain:
            self.domains = nn.Buffer(torch.full((samples,), -1, dtype=torch.int32))

    def slots(self) -> np.ndarray:
        """This process's slots; raises ValueError if there are fewer than processes."""
        (rank, world), held = rank_and_world(), len(self.lengths)
        if held < world:
            allowed = f"one or more for each of {world} processes"
            raise ValueError(f"method.buffer_size={held} is invalid. Allowed: {allowed}")
        return np.arange(rank, held, world)

    @torch.no_grad()
    def count(self) -> int:
        """The samples offered to this process; rebalances a state of another number of processes."""
        rank, world = rank_and_world()
        if int((self.seen > 0).sum()) not in (0, world):
            order, total = (self.lengths == 0).int().argsort(stable=True), int(self.seen.sum())
            for buffer in (buffer for buffer in self.buffers() if buffer is not self.seen):
                buffer.copy_(buffer[order.to(buffer.device)])
            self.seen.zero_()
            self.seen[:world] = (total + torch.arange(world).flip(0)) // world
        return int(self.seen[rank])

    @torch.no_grad()
    def add(self, batch: Batch, outputs: Tensor, *, domain: int = -1) -> None:
        """Offers a batch's samples, of the domain with this place in the order, with the outputs [K, width]
        at its scored positions, clamped to the range of half precision."""
        (rank, world), own, numbers = rank_and_world(), self.slots(), np.arange(len(batch["input_ids"]))
        numbers += self.count()
        keys = sample_keys(key(self.seed, "reservoir", rank, world), numbers)
        # Sample k, from 0, fills slot k; later ones stay with probability slots / (k + 1).
        uniforms, slots = draws(keys, 1, stream=0)[:, 0], len(own)
        places = np.where(numbers < slots, numbers, (uniforms * (numbers + 1)).astype(np.int64))
        self.seen[:world] += len(numbers)
        # Of two samples of a batch that take the same slot, the later one stays.
        rows = {own[place]: row for row, place in enumerate(places) if place < slots}
        if rows:
            parts = outputs.split(torch.bincount(batch["rows"], minlength=len(numbers)).tolist())
            ids, labels = batch["input_ids"], labels_of(batch)
            lengths = batch.get("attention_mask", torch.ones_like(ids)).sum(1)
            limit = torch.finfo(self.outputs.dtype).max
            for slot, row in rows.items():
                if not parts[row].isfinite().all():  # as of a skipped step
                    continue
                stored = [(self.input_ids, ids, self.pad), (self.labels, labels, UNSCORED)]
                if self.decodes:
                    stored.append((self.decoder_input_ids, batch["decoder_input_ids"], self.pad))
                if self.isolated:
                    stored.append((self.segments, batch["segments"], PADDING))
                for buffer, values, filler in stored:
                    width = values.shape[1]
                    buffer[slot, :width], buffer[slot, width:] = values[row], filler
                self.lengths[slot] = lengths[row]
                missing = self.outputs.shape[1] - len(parts[row])
                clamped = parts[row].float().clamp(-limit, limit)
                self.outputs[slot] = functional.pad(clamped, (0, 0, 0, missing))
                if self.by_domain:
                    self.domains[slot] = domain

    def draw(self, count: int, *, purpose: str, domain: int | None = None) -> Tensor:
        """Up to `count` distinct filled slots of this process, of a domain or all, by the purpose."""
        stream = key(self.seed, purpose, *rank_and_world(), self.count())
        own = torch.from_numpy(self.slots())
        own = own if domain is None else own[self.domains[own] == domain]
        filled = own[self.lengths[own] > 0]
        order = shuffle(np.arange(min(count, len(filled))), len(filled), stream=stream)
        return filled[torch.from_numpy(order)]

    def batch(self, slots: Tensor) -> Batch:
        """The samples in slots [B] as an objective's batch without a weight, on the outputs' device."""
        ids, labels = self.input_ids[slots].long(), self.labels[slots].long()
        present = torch.arange(ids.shape[1]) < self.lengths[slots][:, None]
        taken = self.decoder_input_ids[slots].long() if self.decodes else None
        segments = self.segments[slots].long() if self.isolated else None
        batch = label_batch(ids, labels, present, decoder_input_ids=taken, segments=segments)
        device = self.outputs.device
        return cast(Batch, {name: cast(Tensor, value).to(device) for name, value in batch.items()})

    def outputs_of(self, slots: Tensor) -> Tensor:
        """The stored outputs [K, width] at the scored positions of the samples in slots [B]."""
        scored = (self.labels[slots] != UNSCORED).sum(1, keepdim=True)
        places = torch.arange(self.outputs.shape[1])
        chosen = (slots[:, None] * len(places) + places)[places < scored]
        return self.outputs.flatten(0, 1)[chosen.to(self.outputs.device)]

    @torch.no_grad()
    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for buffer in self.buffers():
            gather_shards(buffer)
        super()._save_to_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "Reservoir":
        # Outputs are moved but never cast; the other buffers stay on the CPU, where reads wait for no GPU.
        def moved(buffer: Tensor) -> Tensor:
            bits = BITS[buffer.itemsize] if buffer is self.outputs else None
            return buffer if bits is None else fn(buffer.view(bits)).view(buffer.dtype)

        return super()._apply(moved, recurse)


class DERPP(ContinualMethod):
    """DER++: dark experience replay (Buzzega et al., NeurIPS 2020, equation 6, sections 3 and 4).

        L = l(f(x), y) + alpha * ||h(x') - z'||^2 + beta * l(f(x''), y'')

    with x' and x'' two independent draws from a reservoir of the whole stream, z' the model's outputs on x'
    when it was added. No domain labels are needed. l is the language-model loss; h, at the scored positions,
    the last hidden states or the logits (the paper's). ||.||^2 is the mean over the draw's scored positions
    and features, the second l over its scored tokens.

    With `trainer.accumulate_grad_batches` the draws are made, and samples offered to the reservoir, for each
    micro-batch: a later one of the same step may draw what an earlier one has stored."""

    options: DERPPOptions
    settled = 1  # in the first step of all nothing is stored yet

    def __init__(self, options: DERPPOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        how: dict[str, Any] = {"samples": options.buffer_size, "length": self.length, "seed": self.seed}
        how |= {"width": self.width(options.matched), "pad": self.model.config.pad_token_id}
        self.memory = Reservoir(self.objective, precision=options.precision, **how)

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

    def describe_accumulation(self) -> str:
        return "each micro-batch draws its own past samples, also from those of the step's earlier ones"

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        logits, hidden = self.objective.outputs(self.model, batch)
        lm = token_nll(logits, batch).sum() * batch["weight"]
        size, given = len(hidden) // 2, self.options.minibatch_size
        if given is not None:
            size = given // (self.trainer.world_size * self.trainer.accumulate_grad_batches)
        match, replay = self.replayed(max(1, size))
        held = logits if self.options.matched == "logits" else select_positions(hidden, batch["positions"])
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
            present = select_positions(hidden, before)
        else:
            logits, _ = self.objective.outputs(self.model, both)
            present, logits = logits.tensor_split([len(stored)])
        nll = token_nll(logits, replayed)
        squared = functional.mse_loss(present.float(), stored, reduction="sum") / max(1, stored.numel())
        return squared, nll.sum() / max(1, len(nll))  # a drawn row may have no scored token


class Reference(Constraint):
    """Projects steps so that they raise none of the losses whose gradients are the references."""

    def __init__(self, *, apply_to: str, margin: float = 0.0) -> None:
        super().__init__(apply_to=apply_to)
        self.margin = margin
        self.gradients: list[Mapping[nn.Parameter, Tensor]] = []  # the references of the current step
        self.steps = nn.Buffer(torch.zeros(2, dtype=torch.int64))  # with a reference, and projected

    def covered(self) -> Iterable[nn.Parameter]:
        return self.gradients[0] if self.gradients else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        moved, sign = [each for _, each in steps], 1 if self.apply_to == "gradient" else -1
        references = [[found[parameter] for parameter, _ in steps] for found in self.gradients]
        products = sign * torch.stack([inner_product(moved, each) for each in references])
        against = bool((products < 0).any())
        self.steps.add_(torch.tensor([1, against], device=self.steps.device))
        if against:
            gram = [torch.stack([inner_product(a, b) for b in references]) for a in references]
            weights = solve(torch.stack(gram), products, least=self.margin).tolist()
            for weight, reference in zip(weights, references, strict=True):
                torch._foreach_add_(moved, reference, alpha=sign * weight)

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of steps that were projected."""
        return {"projected": (self.steps[1] / self.steps[0].clamp_min(1)).view(1)}


class AGEM(ContinualMethod):
    """A-GEM, averaged gradient episodic memory (Chaudhry et al., ICLR 2019, eq. 11): to first order, no step
    may raise the loss on a draw of earlier domains' samples.

        g <- g - (g^T g_ref / g_ref^T g_ref) g_ref     where g^T g_ref < 0

    g_ref is the gradient of L_lm on samples from a memory of the domains before. `constraints: each` is GEM
    (Lopez-Paz and Ranzato, NeurIPS 2017, eq. 11), with one per earlier domain, the rows of G:

        g <- g + G^T v,    v = argmin_{v >= margin} 1/2 v^T G G^T v + (G g)^T v    where G g has an entry < 0

    With `apply_to: update` the same holds for -d of the step d that is made, decay included."""

    sharded = False  # reference gradients are of whole weights
    options: AGEMOptions

    def __init__(self, options: AGEMOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.each = options.constraints == "each"
        how: dict[str, Any] = {"samples": options.buffer_size, "length": self.length, "seed": self.seed}
        how |= {"by_domain": self.each, "pad": self.model.config.pad_token_id}
        self.memory = Reservoir(self.objective, **how)
        self.reference = Reference(apply_to=options.apply_to, margin=options.margin)
        self.masks.append(self.reference)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        for batch in importance_batches:
            self.memory.add(batch, torch.empty(len(batch["positions"]), 0), domain=self.domain.index)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        earlier = self.domain.index
        sources = [*range(earlier)] if self.each else [None] * (earlier > 0)
        self.reference.gradients = [found for source in sources if (found := self.refer(source))]

    def refer(self, source: int | None) -> dict[nn.Parameter, Tensor]:
        """The mean loss's gradient by parameter on a draw from a domain's samples, or (None) from all."""
        trained = [parameter for parameter in self.parameters() if parameter.grad is not None]
        share = max(1, self.options.minibatch_size // self.trainer.world_size)
        slots = self.memory.draw(share, purpose=f"step {self.trainer.global_step}", domain=source)
        found, count = [torch.zeros_like(each) for each in trained], torch.zeros((), device=self.device)
        if len(slots):
            batch = self.objective.lay_out(self.memory.batch(slots))
            with torch.autocast(self.device.type, enabled=False), torch.enable_grad():
                loss = self.objective.nll(self.model, batch).sum()
            found = list(torch.autograd.grad(loss, trained, materialize_grads=True, allow_unused=True))
            count += len(batch["positions"])
        all_reduce_sum(*found, count)
        if not count:
            return {}
        torch._foreach_div_(found, count)
        return dict(zip(trained, found, strict=True))


def solve(gram: Tensor, products: Tensor, *, least: float) -> Tensor:
    """argmin over v [t] >= least of 1/2 v^T gram v + products^T v, by coordinate descent in 64 bits."""
    gram, products = gram.double().cpu(), products.double().cpu()
    found = torch.full_like(products, least)
    for _ in range(SWEEPS):
        before = found.clone()
        for k in gram.diagonal().nonzero().flatten().tolist():
            found[k] = (found[k] - (gram[k] @ found + products[k]) / gram[k, k]).clamp_min(least)
        if (found - before).abs().max() <= CLOSE * found.abs().max():
            break
    return found


def inner_product(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The inner product of two lists of tensors, a scalar in at least 32 bits."""
    pairs = zip(ones, others, strict=True)
    return torch.stack([torch.dot(a.flatten().float(), b.flatten().float()) for a, b in pairs]).sum()
