"""Losses of chunks of logits: values and gradients are those of whole logits, whatever follows a model's body."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from cpt.adapters.lora import attach_lora
from cpt.core import memory
from cpt.data.collate import label_batch
from cpt.models import chunked_head
from cpt.models.chunked_head import WeightedLoss, make_nll
from cpt.models.fast_kernels import pad_head
from cpt.models.forward import kl_divergence
from cpt.models.fsdp import Sharding, named_weights, shard_model
from cpt.models.objectives import Causal
from cpt.models.weights import Snapshot, swap_weights

VOCABULARY = 150
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ENCODER = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 16}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
}
CAUSAL, MASKED, SPAN = AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
FAMILIES = {
    "llama": (CAUSAL, "llama", DECODER),
    "llama tied": (CAUSAL, "llama", DECODER | {"tie_word_embeddings": True}),
    "qwen3": (CAUSAL, "qwen3", DECODER),
    "qwen3 experts": (
        CAUSAL,
        "qwen3_moe",
        DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2 with a softcap": (CAUSAL, "gemma2", DECODER | {"final_logit_softcapping": 0.3}),
    "gemma3": (CAUSAL, "gemma3_text", DECODER),
    "granite scales logits": (CAUSAL, "granite", DECODER | {"logits_scaling": 6.0}),
    "cohere scales logits": (CAUSAL, "cohere", DECODER | {"logit_scale": 0.25}),
    "gpt2": (CAUSAL, "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY}),
    "opt": (CAUSAL, "opt", ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bert transforms": (MASKED, "bert", ENCODER),
    "roberta transforms": (MASKED, "roberta", ENCODER),
    "modernbert": (MASKED, "modernbert", ENCODER),
    "mobilebert joins matrices": (MASKED, "mobilebert", ENCODER | {"embedding_size": 16}),
    "t5 scales states": (SPAN, "t5", T5),
    "t5 untied": (SPAN, "t5", T5 | {"tie_word_embeddings": False}),
    "bart": (SPAN, "bart", BART),
}


def build_model(family):
    torch.manual_seed(0)
    auto, model_type, sizes = FAMILIES[family]
    model = auto.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    with torch.no_grad():  # as if trained: biases are not 0, and logits differ
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(model, *, rows=3, length=17):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels[0, ::3] = -100
    decoder_ids = labels.clamp_min(3) if model.config.is_encoder_decoder else None
    return label_batch(ids, labels, torch.ones_like(ids).bool(), decoder_input_ids=decoder_ids)


def gradients_of(model, compute) -> tuple[Tensor, dict[str, Tensor]]:
    """A value and its gradients by parameter."""
    model.zero_grad()
    value = compute(model)
    value.sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return value.detach(), gradients


def assert_close(value, expected, *, tolerance=1e-6):
    assert (value - expected).norm() <= tolerance * expected.norm()


@pytest.fixture
def in_chunks(monkeypatch):
    """A function that makes chunks of this many positions."""
    return lambda rows: monkeypatch.setattr(chunked_head, "MAX_LOGITS", rows * VOCABULARY + 1)


def assert_equal_in_chunks(model, compute, in_chunks, *, rows=7, tolerance=1e-6):
    in_chunks(10_000)
    expected, expected_gradients = gradients_of(model, compute)
    in_chunks(rows)
    value, gradients = gradients_of(model, compute)
    assert_close(value, expected, tolerance=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    size = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    for name, gradient in gradients.items():  # some are 0 but for rounding, as those of a key's bias
        assert (gradient - expected_gradients[name]).norm() <= tolerance * size, name


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_of_chunks_are_those_of_whole_logits(family, in_chunks):
    model = build_model(family)
    batch = make_batch(model)
    weights = torch.rand(len(batch["positions"]))
    assert_equal_in_chunks(model, lambda model: 0.1 * Causal().sum_nll(model, batch), in_chunks)
    assert_equal_in_chunks(model, lambda model: Causal().nll(model, batch) * weights, in_chunks)
    with torch.no_grad():
        nll = Causal().nll(model, batch)
        in_chunks(10_000)
        assert_close(nll, Causal().nll(model, batch))


class LargestTensor(TorchDispatchMode):
    """Records how many numbers the largest tensor has that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, tuple | list) else [output]
        for tensor in outputs:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return output


def run_methods(model, batch):
    """All that computes logits of a batch."""
    objective = Causal()

    def compare(logits, positions):
        return kl_divergence(*logits.chunk(2))

    def use(logits):
        return logits.values(compare, passes=2)

    with torch.no_grad():
        objective.nll(model, batch)
        teacher, _ = objective.keep_logits(model, batch)

    def distill(logits, positions):
        return kl_divergence(teacher.select(positions), logits)

    losses = {"lm": WeightedLoss(make_nll(batch)), "kd": WeightedLoss(distill, 0.5)}
    sums, _ = objective.sum_losses(model, batch, losses)
    (sums["lm"] + 0.5 * sums["kd"]).backward()
    objective.nll(model, batch).mean().backward()
    if len(batch["positions"]) % 2 == 0:
        objective.run(model, batch, use)[0].sum().backward()


def test_no_tensor_is_larger_with_more_positions(in_chunks):
    model = build_model("llama")
    in_chunks(20)
    largest = []
    for rows in (4, 12):
        with LargestTensor() as mode:
            run_methods(model, make_batch(model, rows=rows, length=18))
        largest.append(mode.numbers)
    # The weight [150, 32] of the head; hidden states of a batch [216, 48] are larger than chunks [20, 150].
    assert largest[0] == VOCABULARY * 32
    assert largest[1] == 12 * 18 * 48


def test_blocks_of_each_chunk_are_returned_in_the_backward_pass(in_chunks, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        chunked_head, "return_large_in_backward", lambda output, inputs: sizes.append(len(output))
    )
    model = build_model("llama")
    batch = make_batch(model)
    in_chunks(10)
    values = Causal().nll(model, batch)
    assert len(sizes) > 1 and sum(sizes) == len(values)


def test_blocks_of_whole_logits_are_returned_from_the_head_to_the_end_of_its_backward_pass(monkeypatch):
    monkeypatch.setattr(memory, "kept_size", memory.ANY_SIZE)
    model = build_model("llama")
    batch = make_batch(model)
    returned_in = {}

    def note_backward(gradient):
        returned_in["backward"] = memory.returns_large

    def note_head(module, args, output):
        returned_in["head"] = memory.returns_large
        output.register_hook(note_backward)

    model.lm_head.register_forward_hook(note_head)
    values = Causal().nll(model, batch)
    assert not memory.returns_large
    values.sum().backward()
    assert returned_in == {"head": True, "backward": True} and not memory.returns_large


@pytest.mark.parametrize("family", ["llama", "llama tied", "bert transforms", "gemma2 with a softcap"])
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_two_losses_have_the_gradient_of_any_weighted_sum(family, factor, in_chunks):
    model = build_model(family)
    teacher = build_model(family)
    batch = make_batch(model)
    weights = {name: 1.1 * parameter.detach() for name, parameter in teacher.named_parameters()}

    def compute(model):
        objective = Causal()
        with torch.no_grad(), swap_weights(model, weights):  # the weights are back when logits are computed
            teacher_logits, _ = objective.keep_logits(model, batch)

        def distill(logits, positions):
            return kl_divergence(teacher_logits.select(positions), logits)

        losses = {"lm": WeightedLoss(make_nll(batch)), "kd": WeightedLoss(distill, 0.5)}
        sums, _ = objective.sum_losses(model, batch, losses)
        return torch.stack([sums["lm"], factor * sums["kd"]])

    assert_equal_in_chunks(model, compute, in_chunks)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_sharded_teacher_keeps_the_head_that_it_had(family, mesh, in_chunks):
    model = build_model(family)
    shard_model(model, Sharding(mesh, reshard=False))
    teacher = Snapshot(model, persistent=True)
    with torch.no_grad():
        for parameter in named_weights(model).values():
            parameter.mul_(1.1)
    batch = make_batch(model)

    def compute(model):
        with teacher.teaching(model):
            teacher_logits, _ = Causal().keep_logits(model, batch)

        def distill(logits, positions):
            return kl_divergence(teacher_logits.select(positions), logits)

        losses = {"lm": WeightedLoss(make_nll(batch)), "kd": WeightedLoss(distill, 0.5)}
        sums, _ = Causal().sum_losses(model, batch, losses)
        return torch.stack([sums["lm"], 0.5 * sums["kd"]])

    def compute_gradients():
        value = compute(model)
        value.sum().backward()
        gradients = [weight.grad.full_tensor() for weight in named_weights(model).values()]
        model.zero_grad()
        return value.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    in_chunks(10_000)
    expected = compute_gradients()
    in_chunks(7)
    for value, expected_value in zip(compute_gradients(), expected, strict=True):
        assert_close(value, expected_value)


def test_losses_of_several_passes_compare_the_same_position(in_chunks):
    model = build_model("roberta transforms")
    batch = make_batch(model, rows=4)
    batch["positions"] = torch.arange(60)

    def compute(model):
        def compare(logits, positions):
            return kl_divergence(*logits.chunk(2)) * torch.arange(30.0)[positions]

        return Causal().run(model, batch, lambda logits: logits.values(compare, passes=2))[0]

    assert_equal_in_chunks(model, compute, in_chunks)


@pytest.mark.parametrize("family", ["qwen3", "llama tied"])
def test_a_frozen_head_has_no_gradient(family, in_chunks):
    model = build_model(family)
    attach_lora(model, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False)
    batch = make_batch(model)
    assert_equal_in_chunks(model, lambda model: Causal().sum_nll(model, batch), in_chunks)
    assert model.lm_head.weight.grad is None


def test_an_adapter_of_the_head_has_the_gradient_of_whole_logits(in_chunks):
    model = build_model("qwen3")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False), model)
    batch = make_batch(model)
    assert_equal_in_chunks(model, lambda model: Causal().sum_nll(model, batch), in_chunks)
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained == ["lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"]


def test_a_trained_head_on_a_frozen_body(in_chunks):
    model = build_model("bert transforms").requires_grad_(False)
    model.cls.requires_grad_(True)
    batch = make_batch(model)
    assert_equal_in_chunks(model, lambda model: Causal().sum_nll(model, batch), in_chunks)


def test_importances_of_swapped_weights_are_those_of_whole_logits(in_chunks):
    model = build_model("llama tied")
    batch = make_batch(model)
    weights = {name: (1.2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}

    def compute(rows):
        in_chunks(rows)
        with swap_weights(model, weights):
            value = Causal().nll(model, batch).mean()
        return torch.autograd.grad(value, list(weights.values()))

    for gradient, expected in zip(compute(7), compute(10_000), strict=True):
        assert_close(gradient, expected)


def test_a_hook_of_the_head_sees_each_position_once_before_the_backward_pass(in_chunks):
    model = build_model("qwen3")
    batch = make_batch(model)
    outputs_seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: outputs_seen.append(output))
    in_chunks(7)
    value = Causal().sum_nll(model, batch)
    assert sum(output.numel() for output in outputs_seen) == len(batch["positions"]) * VOCABULARY
    assert all(output.requires_grad for output in outputs_seen)
    value.backward()
    assert_equal_in_chunks(model, lambda model: Causal().sum_nll(model, batch), in_chunks)


@pytest.mark.parametrize("family", ["llama", "t5 scales states", "gpt2"])
def test_in_16_bits_chunks_round_no_more_than_whole_logits(family, in_chunks):
    model = build_model(family)
    pad_head(model)
    batch = make_batch(model)

    def compute(model, is_rounded=True):
        precision = torch.autocast("cpu", torch.bfloat16) if is_rounded else nullcontext()
        with precision:
            return 0.1 * Causal().sum_nll(model, batch)

    in_chunks(10_000)
    _, exact = gradients_of(model, lambda model: compute(model, is_rounded=False))
    _, of_whole_logits = gradients_of(model, compute)
    in_chunks(7)
    _, of_chunks = gradients_of(model, compute)
    for name, gradient in exact.items():
        error = (of_chunks[name] - gradient).norm()
        assert error <= 1.1 * (of_whole_logits[name] - gradient).norm() + 1e-3 * gradient.norm()


def test_chunks_begin_where_logits_would_be_too_many_and_depend_on_the_vocabulary_alone():
    assert chunked_head.count_chunk_positions(151_936, None) == 883
    assert chunked_head.count_chunk_positions(32_000, None) == 4_194
    assert chunked_head.count_chunk_positions(2**30, None) == 1
    assert chunked_head.count_chunk_positions(1_000, 2_500) == 2
    slices = chunked_head.divide(1_000, 883)
    assert [part.stop - part.start for part in slices] == [500, 500]
