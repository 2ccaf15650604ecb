"""Checkpoints that processes load together have the bits that each would load alone, and each process reads
its rows only."""

import json
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from cpt.core.distributed import full_tensor, to_local
from cpt.models import sharded_loading
from cpt.models.fsdp import Sharding
from cpt.models.loading import is_tied, load_model
from cpt.models.sharded_loading import VocabularyRows
from cpt.models.vocabulary import enlarge_embeddings, set_rows
from tests.support.forked_scripts import FORKS

CLASSES = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "span": AutoModelForSeq2SeqLM}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 151, "num_key_value_heads": 1, **SIZES}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 151}
CONFIGS = {
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 151},
    "experts": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "roberta": {**SIZES, "model_type": "roberta", "vocab_size": 151, "type_vocab_size": 1},
    "t5": {**T5, "model_type": "t5", "decoder_start_token_id": 0},
}
OBJECTIVES = {"roberta": "masked", "t5": "span"}


@pytest.fixture
def sharding():
    """A group of one process: its rows are all rows."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield Sharding(init_device_mesh("cpu", (1,)), reshard=True)
    distributed.destroy_process_group()


@pytest.fixture
def write(tmp_path):
    """Writes a random checkpoint in several files; returns its folder and the objective."""

    def write(name, dtype=torch.float32):
        objective = OBJECTIVES.get(name, "causal")
        torch.manual_seed(1)
        config = AutoConfig.for_model(**CONFIGS[name])
        model = CLASSES[objective].from_config(config, dtype=dtype)
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
        return tmp_path / name, objective

    return write


def assert_same_model(sharded, expected_model):
    weights = dict(expected_model.named_parameters(remove_duplicate=False))
    sharded_weights = dict(sharded.named_parameters(remove_duplicate=False))
    assert sharded_weights.keys() == weights.keys()
    for name, weight in sharded_weights.items():
        assert torch.equal(full_tensor(weight), weights[name]), name
        assert (weight.dtype, weight.requires_grad) == (weights[name].dtype, weights[name].requires_grad)
    buffers = dict(expected_model.named_buffers())
    for name, buffer in sharded.named_buffers():
        assert torch.equal(buffer, buffers.pop(name)), name
    assert not buffers and is_tied(sharded) == is_tied(expected_model) and sharded.training
    assert isinstance(sharded, type(expected_model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_that_are_loaded_in_shards_have_the_bits_of_whole_ones(name, dtype, write, sharding):
    folder, objective = write(name, dtype)
    sharded = load_model(folder, objective, sharding=sharding)
    assert isinstance(sharded, FSDPModule)
    assert_same_model(sharded, load_model(folder, objective))
    assert sharded._weight_conversions is not None


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_weights_that_stay_in_16_bits_are_loaded_in_shards(name, write, sharding):
    folder, objective = write(name, torch.bfloat16)
    sharded = load_model(folder, objective, dtype=torch.bfloat16, sharding=sharding)
    assert isinstance(sharded, FSDPModule)
    assert sharded.get_input_embeddings().weight.dtype == torch.bfloat16
    assert_same_model(sharded, load_model(folder, objective, dtype=torch.bfloat16))


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_stored_in_addition_to_its_embedding_is_tied_if_they_are_equal(is_equal, write, sharding):
    folder, objective = write("llama tied")
    path = max(folder.glob("*.safetensors"), key=lambda path: "model.embed_tokens.weight" in load_file(path))
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if is_equal else 1.0)
    save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    files["weight_map"]["lm_head.weight"] = path.name
    index.write_text(json.dumps(files))
    sharded = load_model(folder, objective, sharding=sharding)
    assert is_tied(sharded) == is_equal
    assert_same_model(sharded, load_model(folder, objective))


@pytest.mark.parametrize("name", ["llama", "llama tied", "roberta"])
def test_rows_of_new_tokens_are_those_of_a_whole_model(name, write, sharding):
    def add_rows(model):
        enlarge_embeddings(model, 170)
        set_rows(model, {151: [3, 4], 169: [5]})

    folder, objective = write(name)
    rows = VocabularyRows(add_rows, are_new=True)
    sharded = load_model(folder, objective, rows=rows, sharding=sharding)
    assert isinstance(sharded, FSDPModule) and sharded.config.vocab_size == 170
    assert_same_model(sharded, load_model(folder, objective, rows=rows))


def test_rows_that_are_only_looked_at_are_those_of_the_files(write, sharding):
    folder, objective = write("llama tied")
    embeddings = []
    rows = VocabularyRows(
        lambda model: embeddings.append(model.get_input_embeddings().weight.clone()), are_new=False
    )
    sharded = load_model(folder, objective, rows=rows, sharding=sharding)
    assert torch.equal(embeddings[0], full_tensor(sharded.get_input_embeddings().weight))


def save_pickle(folder, objective):
    model = load_model(folder, objective)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_without_head(folder, objective):
    load_model(folder, objective).base_model.save_pretrained(folder)


def save_without_norm(folder, objective):
    model = load_model(folder, objective)
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(folder, state_dict=state)


def save_with_adapter(folder, objective):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(load_model(folder, objective), adapter).save_pretrained(folder / "adapters" / "law")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize(("name", "change", "reason"), [
    ("llama", save_pickle, "they are not in safetensors"),
    ("roberta", save_without_head, "they lack lm_head.bias"),
    ("llama", save_without_norm, "they lack model.norm.weight"),
    ("llama", save_with_adapter, "an adapter is merged into them"),
])  # fmt: skip
def test_files_without_a_row_for_each_process_are_loaded_whole_with_a_log_line(
    name, change, reason, write, sharding, caplog
):
    folder, objective = write(name)
    change(folder, objective)
    with caplog.at_level(logging.INFO, logger="cpt"):
        model = load_model(folder, objective, sharding=sharding)
    assert f"Loading all weights of {folder} in each process: {reason}" in caplog.text
    assert not isinstance(model, FSDPModule)
    assert_same_model(model, load_model(folder, objective))


def test_weights_that_are_not_finite_are_refused(write, sharding):
    folder, objective = write("llama")
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    next(iter(tensors.values()))[-1] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="it has 1 tensor with NaN or infinite weights"):
        load_model(folder, objective, sharding=sharding)


class CountingFile:
    """A safetensors file that counts the numbers that are read of its slices."""

    def __init__(self, file, counts):
        self.file = file
        self.counts = counts

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)

    def keys(self):
        return self.opened.keys()

    def get_slice(self, key):
        return CountingSlice(self.opened.get_slice(key), self.counts)


class CountingSlice:
    def __init__(self, reader, counts):
        self.reader = reader
        self.counts = counts

    def __getitem__(self, index):
        values = self.reader[index]
        self.counts.append(values.numel())
        return values

    def __getattr__(self, name):
        return getattr(self.reader, name)


def load_in_process(rank, folder, store, results):
    """What one of two processes reads of the files and then has, and the weights of both."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    counts = []
    sharded_loading.safe_open = lambda *arguments: CountingFile(safe_open(*arguments), counts)
    sharding = Sharding(init_device_mesh("cpu", (2,)), reshard=True)
    model = load_model(folder, "causal", sharding=sharding)
    num_local = sum(to_local(weight).numel() for weight in model.parameters())
    weights = {name: full_tensor(weight).tolist() for name, weight in model.named_parameters()}
    results.put((sum(counts), num_local, weights))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_each_of_two_processes_reads_its_rows_only(write, tmp_path):
    folder, objective = write("llama")
    expected_weights = dict(load_model(folder, objective).named_parameters())
    results = FORKS.Queue()
    processes = []
    for rank in range(2):
        arguments = (rank, folder, tmp_path / "store", results)
        processes.append(FORKS.Process(target=load_in_process, args=arguments))
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()

    num_weights = sum(weight.numel() for weight in expected_weights.values())
    num_in_tables = 2 * 151 * 32  # of embedding and head: each process looks at all rows
    num_all = 0
    for num_read, num_local, weights in answers:
        assert num_read - num_in_tables == num_local < 0.55 * num_weights
        num_all += num_local
        assert weights.keys() == expected_weights.keys()
        for name, values in weights.items():
            assert torch.equal(torch.tensor(values), expected_weights[name]), name
    assert num_all == num_weights
