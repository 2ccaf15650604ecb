"""Memory and time of real steps on a CPU, beside what `plan=json plan_device=cpu` computes of them.

Models have random weights in published shapes. For each setup one process computes the plan from a folder
with a config alone, and another takes a few real steps and evaluates a batch. Its memory is measured in two
ways: `allocated` are the tensors that exist after the timed steps, and the most that torch's allocator hands
out in two more, by its profiler; `resident` is the most that the process held in the first two steps, with
Python, libraries and the holes of the C heap. Time is that of the CPU, so that other programs do not count,
but for what they do to caches and memory: before the first of three steps and after each, the time of a
step is computed anew, from kernels and rates that are timed at that moment, and a step is compared with the
mean of what was computed before and after it. The median of the three ratios is reported, and that of the
plan as it was printed by another process."""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch import Tensor

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.core.cache import make_once
from cpt.core.distributed import to_local
from cpt.core.memory import read_peak_bytes, reset_peak_bytes, trim_heap
from cpt.models import loading
from cpt.trainer.base_model import make_base
from cpt.trainer.build import build_data, build_method, read_corpora
from cpt.trainer.computed_memory import make_layout
from cpt.trainer.computed_plan import choose_kind
from cpt.trainer.computed_time import count_step_work, find_rates, find_work_seconds, measure_cpu_once
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.plan import make_plan
from cpt.trainer.preflight import prepare_run
from cpt.trainer.run_dir import RunDir
from cpt.trainer.simulated_plan import SimulatedPlan

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import RESULTS, ROOT, describe_machine, save
from common.shapes import SMOLLM2_135M

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {  # of the published configurations, some with fewer blocks
    "smollm2-135m": SMOLLM2_135M,
    "gpt2": {"model_type": "gpt2"},
    "qwen3-0.6b, 4 blocks": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b, 2 blocks, 16 experts": {
        "model_type": "qwen3_moe",
        "vocab_size": 16384,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
ALWAYS = [
    "domains=texts",
    "order=[docs]",
    "model=hf",
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.num_workers=0",
    "trainer.eval_batch_size=2",
    "trainer.importance_samples=2",
    "trainer.precision=32-true",
]
SHARDED = ["strategy=fsdp", "trainer.devices=2"]
CHECKPOINTING = "trainer.gradient_checkpointing=true"
SHORT = ["model.max_seq_length=128", "trainer.batch_size=2"]
LONG = ["model.max_seq_length=512", "trainer.batch_size=1"]
SETUPS: list[tuple[str, list[str]]] = [  # a shape, and the changes to the config
    ("smollm2-135m", ["model.max_seq_length=128", "trainer.batch_size=4"]),
    ("smollm2-135m", LONG),
    ("smollm2-135m", [*LONG, CHECKPOINTING]),
    ("smollm2-135m", [*SHORT, "trainer.accumulate_grad_batches=2"]),
    ("smollm2-135m", [*SHORT, "trainer.precision=bf16-mixed"]),
    ("smollm2-135m", [*SHORT, "trainer.precision=bf16-true"]),
    ("smollm2-135m", [*SHORT, "optim=muon"]),
    ("smollm2-135m", [*SHORT, "optim=adafactor"]),
    ("smollm2-135m", [*SHORT, "optim=adamw_8bit"]),
    ("smollm2-135m", [*LONG, "method=lora"]),
    ("smollm2-135m", [*LONG, "method=lora", CHECKPOINTING, "model.quantization=nf4"]),
    ("smollm2-135m", [*LONG, "method=lora", "model.quantization=int8"]),
    ("smollm2-135m", [*SHORT, *SHARDED]),
    ("smollm2-135m", [*SHORT, "method=kd"]),
    ("smollm2-135m", [*SHORT, "method=ewc"]),
    ("gpt2", SHORT),
    ("qwen3-0.6b, 4 blocks", SHORT),
    ("qwen3-0.6b, 4 blocks", [*LONG, "method=lora", CHECKPOINTING]),
    ("qwen3-30b-a3b, 2 blocks, 16 experts", SHORT),
]
PAGE = ROOT / "docs" / "plan.md"
FILE = RESULTS / "plan.json"
BEGIN = "<!-- generated: plan -->"
END = "<!-- end: plan -->"
# Steps from 0: the first makes the optimizer's state, and the memory of the process is read after the second,
# before a plan is computed in it. The next ones are timed, and the last two are profiled.
NUM_TIMED_STEPS = 3
FIRST_TIMED_STEP = 2
PROFILED_STEP = FIRST_TIMED_STEP + NUM_TIMED_STEPS
NUM_STEPS = PROFILED_STEP + 2
TOKENIZER_ENTRIES = 8192
# Measured over computed figures, in the order of the table.
RATIOS = ("allocated, training", "process, training", "step, computed anew", "step, plan")


def compose_config(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def make_model_config(shape: str) -> Any:
    """The configuration of a shape."""
    config = loading.AutoConfig.for_model(**SHAPES[shape])
    config.architectures = [loading.AUTO_MODELS["causal"]._model_mapping[type(config)].__name__]
    return config


def make_texts(cache: Path) -> Path:
    """The documentation of this program as a domain."""
    folder = cache / "plan-texts"
    (folder / "docs").mkdir(parents=True, exist_ok=True)
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    (folder / "docs" / "pages.txt").write_text("\n".join(pages), encoding="utf-8")
    return folder


def make_checkpoint(shape: str, cache: Path) -> Path:
    """A model of a shape with random weights, and a tokenizer learned from the texts."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        text = (make_texts(cache) / "docs" / "pages.txt").read_text(encoding="utf-8")
        tokenizer = loading.train_tokenizer(iter([[text]]), vocabulary=TOKENIZER_ENTRIES, objective="causal")
        loading.AUTO_MODELS["causal"].from_config(make_model_config(shape)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return make_once(cache / "models" / f"plan-{shape.replace(', ', '-').replace(' ', '')}", make=make)


def compute(shape: str, changes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The plan as the command line prints it, from a folder with a config alone, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        make_model_config(shape).save_pretrained(f"{folder}/model")
        command = [
            sys.executable,
            str(ROOT / "run.py"),
            *ALWAYS,
            *changes,
            f"model.name_or_path={folder}/model",
            f"domains.root={make_texts(Path(options.cache))}",
            f"cache_dir={options.cache}",
            "plan=json",
            "plan_device=cpu",
            f"hydra.run.dir={folder}/run",
        ]
        env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        start_time = time.perf_counter()
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        seconds = time.perf_counter() - start_time
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stdout[-2000:]}{process.stderr[-2000:]}")
    return json.loads(process.stdout) | {"wall_seconds": seconds}


def train(checkpoint: Path, changes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Bytes and seconds of a few real steps and of a batch of held-out text, in a process of its own."""
    torch.set_num_threads(options.threads)
    overrides = [
        *ALWAYS,
        *changes,
        f"trainer.steps={NUM_STEPS}",
        f"model.name_or_path={checkpoint}",
        f"domains.root={make_texts(Path(options.cache))}",
        f"cache_dir={options.cache}",
    ]
    plan = make_plan(compose_config(overrides))
    with tempfile.TemporaryDirectory() as folder:
        machine = prepare_run(plan, RunDir(Path(folder) / "run")).machine
    corpora = read_corpora(plan)
    base = make_base(plan.model, corpora, accelerator="cpu")
    warm_up()
    method = build_method(plan, machine, base)
    data = build_data(plan, machine, corpora, base, method)
    data.eval_tokens = plan.trainer.eval_batch_size * plan.model.max_seq_length
    (stage,) = data
    data.enter(stage)
    method.setup_stage(stage)
    method.train()
    monitor = StepMonitor(overrides)
    arguments = machine.lightning_arguments(plan.trainer)
    trainer = make_trainer(arguments, label="steps", steps=NUM_STEPS, callbacks=[monitor])
    trim_heap()
    reset_peak_bytes(CPU)
    trainer.fit(method, datamodule=data)
    drop_optimizer(trainer)
    method.zero_grad()

    data.requested_texts = ["docs"]
    trainer = make_trainer(arguments, label="evaluation")
    with profile_memory() as evaluation_profile:
        trainer.validate(method, datamodule=data, verbose=False)
    return {
        "allocated": {
            "training": monitor.find_peak(),
            "evaluation": count_bytes([*method.parameters(), *method.buffers()])
            + find_peak(evaluation_profile),
        },
        "resident": {"training": monitor.resident},
        "step_seconds": monitor.seconds,
        "computed_step_seconds": monitor.computed,
    }


class StepMonitor(Callback):
    """Measures the CPU's seconds of some steps and computes them anew after each, the most that the process
    held in the first two steps, and what is allocated in the last ones."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = overrides
        self.start_time = 0.0
        self.seconds: list[float] = []  # of the timed steps
        self.computed: list[float] = []  # seconds of a step, before the first timed one and after each
        self.resident = 0
        self.bytes_before = 0
        self.profile = profile_memory()

    @cached_property
    def simulated(self) -> SimulatedPlan:
        """The plan that is computed, made when the memory of the real steps has been measured."""
        overrides = [*self.overrides, "plan=json", "plan_device=cpu"]
        plan = make_plan(compose_config(overrides))
        return SimulatedPlan(plan, choose_kind(plan))

    def compute_step(self) -> float:
        """The seconds of a step, from kernels and rates that are timed now."""
        measure_cpu_once.cache_clear()
        plan = self.simulated.plan
        num_devices = 2 if SHARDED[0] in self.overrides else 1
        work = count_step_work(self.simulated, make_layout(plan, num_devices))
        return find_work_seconds(work, find_rates(self.simulated))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_index: int) -> None:
        if batch_index % trainer.accumulate_grad_batches:
            return
        step = trainer.global_step
        if FIRST_TIMED_STEP < step <= PROFILED_STEP:
            self.seconds.append(time.thread_time() - self.start_time)
        if step == FIRST_TIMED_STEP:
            self.resident = read_peak_bytes(CPU)
        if FIRST_TIMED_STEP <= step <= PROFILED_STEP:
            self.computed.append(self.compute_step())
        if step == PROFILED_STEP:
            module.zero_grad()  # the profiler would not see that gradients of before are freed
            state_tensors = []
            for state in trainer.optimizers[0].state.values():
                state_tensors.extend(value for value in state.values() if isinstance(value, Tensor))
            self.bytes_before = count_bytes([*module.parameters(), *module.buffers(), *state_tensors])
            self.profile.__enter__()
        self.start_time = time.thread_time()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.profile.__exit__(None, None, None)

    def find_peak(self) -> int:
        """The most bytes of tensors in the profiled steps."""
        return self.bytes_before + find_peak(self.profile)


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, of those that share storage once; of sharded ones those of this process."""
    storages = {}
    for tensor in tensors:
        storage = to_local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def profile_memory() -> Any:
    """Records what torch's allocator hands out and gets back."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def find_peak(memory_profile: Any) -> int:
    """The most bytes that were allocated at once, of those that were allocated while it was recorded."""
    changes = []
    for event in memory_profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    changes.sort()
    return max(itertools.accumulate(num_bytes for _, num_bytes in changes), default=0)


def warm_up() -> None:
    """Has torch allocate what it needs once, for its kernels and threads."""
    matrix = torch.ones(512, 512, requires_grad=True)
    (matrix @ matrix).sum().backward()


def set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def train_in_processes(
    checkpoint: Path, changes: list[str], options: argparse.Namespace, *, num_processes: int
) -> dict[str, Any]:
    """The figures of the process that needs most, of as many as train together."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes)}
    futures = []
    with ExitStack() as pools:
        for rank in range(num_processes):
            variables = {}
            if num_processes > 1:
                variables = common | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            pool = pools.enter_context(
                ProcessPoolExecutor(
                    max_workers=1,
                    mp_context=get_context("spawn"),
                    initializer=set_environment,
                    initargs=(variables,),
                )
            )
            futures.append(pool.submit(train, checkpoint, changes, options))
        results = [future.result() for future in futures]
    return max(results, key=lambda figures: figures["resident"]["training"])


def compare(shape: str, changes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The computed and the measured figures of a setup."""
    num_processes = 2 if SHARDED[0] in changes else 1
    plan = compute(shape, changes, options)
    checkpoint = make_checkpoint(shape, Path(options.cache))
    measured = train_in_processes(checkpoint, changes, options, num_processes=num_processes)

    (estimate,) = [entry for entry in plan["estimates"] if entry["devices"] == num_processes]
    phases = estimate["memory"]
    computed = {
        "training": sum(phases["step"].values()),
        "evaluation": sum(phases["evaluation"].values()),
        "resident": sum(phases["step"].values()) + estimate["holes"] + plan["process"],
        "step_seconds": estimate["seconds"]["step"],
        "per_second": plan["device"]["per_second"],
    }
    seconds = measured["step_seconds"]
    computed_anew = []
    for before, after in itertools.pairwise(measured["computed_step_seconds"]):
        computed_anew.append((before + after) / 2)
    step_ratios = [real / expected for real, expected in zip(seconds, computed_anew, strict=True)]
    ratios = {
        "step, computed anew": statistics.median(step_ratios),
        "step, plan": statistics.median(seconds) / computed["step_seconds"],
        "process, training": measured["resident"]["training"] / computed["resident"],
    }
    for phase, num_bytes in measured["allocated"].items():
        ratios[f"allocated, {phase}"] = num_bytes / computed[phase]
    return {
        "shape": shape,
        "changes": changes,
        "processor": describe_machine()["processor"],
        "computed": computed,
        "computed_by_use": phases,
        "measured": measured,
        "ratios": ratios,
        "plan_seconds": plan["wall_seconds"],
    }


def name_setup(setup: dict[str, Any]) -> str:
    """The shape and the changes in short."""
    changes = []
    for change in setup["changes"]:
        changes.append(change.rpartition(".")[2].replace("gradient_checkpointing=true", "checkpointing"))
    return f"{setup['shape']}: {', '.join(changes)}"


def format_table(setups: list[dict[str, Any]]) -> str:
    """The computed memory of a step, and the measured figures over the computed ones."""
    lines = [
        "| setup | CPU | tensors, MB | measured | process | time | time, plan |",
        "| :-- | :-- | --: | --: | --: | --: | --: |",
    ]
    for setup in setups:
        ratios = setup["ratios"]
        cpu_name = setup["processor"].removesuffix(" Processor")
        cells = [name_setup(setup), cpu_name, f"{setup['computed']['training'] / 1e6:,.0f}"]
        for name in RATIOS:  # an earlier version of this program measured the first alone
            cells.append(f"{ratios[name]:.2f}" if name in ratios else "—")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(setups: list[dict[str, Any]]) -> None:
    before, _, remainder = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = remainder.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{format_table(setups)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--only", nargs="+", type=int, help="numbers of setups, from 0, to measure again")
    parser.add_argument("--published", action="store_true", help="write the page from published results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", default=str(cache), help="folder of the tokenised text and the models")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()

    if options.published:
        write_page(json.loads(FILE.read_text(encoding="utf-8"))["setups"])
        return
    out = Path(options.out or FILE)
    results: dict[str, dict[str, Any]] = {}
    if options.only is not None and out.exists():
        results = {
            name_setup(setup): setup for setup in json.loads(out.read_text(encoding="utf-8"))["setups"]
        }
    for number, (shape, changes) in enumerate(SETUPS):
        if options.only is not None and number not in options.only:
            continue
        setup = compare(shape, changes, options)
        results[name_setup(setup)] = setup
        print(format_table([setup]).splitlines()[-1], flush=True)
        save("plan", {"threads": options.threads, "setups": list(results.values())}, out=options.out)
    if options.out is None:
        write_page(list(results.values()))


if __name__ == "__main__":
    main()
