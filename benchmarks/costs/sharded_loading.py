"""Peak host memory of N processes that load a checkpoint together, each its rows, or each the whole.

    python benchmarks/costs/sharded_loading.py

A random Llama of 125 million weights, in files of at most 100 MB, stored in 32 and in 16 bits, and loaded to
32 bits. Memory is the proportional set size (PSS) of all processes together, above what they had before: the
most that they allocate (`allocated`), and the most pages of the files that they have mapped (`mapped`), which
the system takes back where it needs them. Weights that are stored in 32 bits are such pages until they are
changed: `written` is what is allocated once all have been, as by a step."""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.core.distributed import to_local
from cpt.models.fsdp import Sharding
from cpt.models.loading import load_model

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import save

MEASURED = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
INTERVAL = 0.01  # seconds between two readings
FIELDS = {"allocated": "Pss_Anon", "mapped": "Pss_File"}  # of smaps_rollup


def write_checkpoint(folder: Path, dtype: torch.dtype, sizes: Mapping[str, int] = MEASURED) -> int:
    """Writes random weights; returns the bytes of their files."""
    config = AutoConfig.for_model(model_type="llama", tie_word_embeddings=False, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def load(rank: int, world: int, is_together: bool, folder: Path, barrier: Barrier) -> None:
    """One process: loads a tiny checkpoint, so that all libraries are there, and then the measured one."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world
    )
    sharding = None
    if is_together:
        sharding = Sharding(init_device_mesh("cpu", (world,)), reshard=True)
    load_model(folder / "tiny", "causal", sharding=sharding)
    barrier.wait()  # the parent reads what the processes have
    barrier.wait()
    model = load_model(folder / "measured", "causal", sharding=sharding)
    barrier.wait()
    barrier.wait()
    for weight in model.parameters():
        to_local(weight.detach()).mul_(1)
    barrier.wait()
    barrier.wait()
    distributed.destroy_process_group()


def read_memory(pids: list[int]) -> dict[str, int]:
    """Bytes of all processes together, by kind."""
    total_bytes = dict.fromkeys(FIELDS, 0)
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        values = dict(line.split(":") for line in text.splitlines()[1:])
        for kind, field in FIELDS.items():
            total_bytes[kind] += 1024 * int(values[field].split()[0])
    return total_bytes


def measure(folder: Path, *, world: int, is_together: bool) -> dict[str, int]:
    """Bytes above those before: the most of each kind, and what is allocated in the end."""
    barrier = multiprocessing.get_context("spawn").Barrier(world + 1)
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.spawn(load, (world, is_together, folder, barrier), nprocs=world, join=False)
    pids = context.pids()
    barrier.wait()
    before = read_memory(pids)

    barrier.wait()
    peak = dict(before)
    while barrier.n_waiting < world:
        memory = read_memory(pids)
        peak = {kind: max(peak[kind], memory[kind]) for kind in FIELDS}
        time.sleep(INTERVAL)

    barrier.wait()  # the model is there
    barrier.wait()
    barrier.wait()  # all weights have been changed
    after = read_memory(pids)
    barrier.wait()
    context.join()
    result = {kind: peak[kind] - before[kind] for kind in FIELDS}
    result["written"] = after["allocated"] - before["allocated"]
    return result


def describe(result: Mapping[str, int], file_bytes: int) -> str:
    return ", ".join(f"{kind} {num_bytes / file_bytes:.2f}" for kind, num_bytes in result.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--out", help="where the results go (default: benchmarks/results)")
    options = parser.parse_args()

    checkpoints: dict[str, Mapping[str, Any]] = {}
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file_bytes = write_checkpoint(folder / "measured", getattr(torch, dtype))
            write_checkpoint(folder / "tiny", getattr(torch, dtype), TINY)
            rows = {}
            for world in options.processes:
                rows[f"{world}, each its rows"] = measure(folder, world=world, is_together=True)
                if world > 1:
                    rows[f"{world}, each the whole"] = measure(folder, world=world, is_together=False)
            for label, row in rows.items():
                print(f"{dtype}, {label}:", describe(row, file_bytes), flush=True)
            checkpoints[dtype] = {"file": file_bytes, "bytes": rows}
    save("sharded_loading", {"checkpoints": checkpoints}, out=options.out)


if __name__ == "__main__":
    main()
