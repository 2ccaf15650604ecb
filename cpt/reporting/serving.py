"""Which adapters of an exported model vLLM and llama.cpp load, from their configs.

Checked with vLLM 0.32 (`vllm/lora/peft_helper.py`) and `convert_lora_to_gguf.py` of llama.cpp: see
docs/serving.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_MAX_RANK = 16  # of vLLM
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank of vLLM takes


def describe_adapters(model: Path) -> list[str]:
    """A sentence on each kind of adapters in an exported model; none without adapters."""
    sentences: dict[str, None] = {}  # adapters of a run are alike: each sentence once
    for path in sorted(model.glob("adapters/*/adapter_config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        sentences.update(dict.fromkeys(describe_adapter(config)))
    return list(sentences)


def describe_adapter(config: Mapping[str, Any]) -> list[str]:
    """What engines that load LoRA adapters and their base apart make of an adapter."""
    obstacles = find_obstacles(config)
    if obstacles:
        reason = " and ".join(obstacles)
        return [f"vLLM and llama.cpp do not load the adapters ({reason}). Use method.export_format=merged."]
    if config.get("target_parameters"):
        return ["Adapters of parameters, like those of experts, were not tried in vLLM and llama.cpp."]
    rank = int(config["r"])
    sentence = "vLLM (--enable-lora) and llama.cpp (--lora) load the adapters"
    if rank <= DEFAULT_MAX_RANK:
        return [f"{sentence}."]
    allowed_ranks = [allowed_rank for allowed_rank in MAX_RANKS if allowed_rank >= rank]
    if not allowed_ranks:
        return [f"llama.cpp (--lora) loads the adapters; vLLM takes ranks up to {MAX_RANKS[-1]}, not {rank}."]
    return [f"{sentence}; vLLM with --max-lora-rank {allowed_ranks[0]}."]


def find_obstacles(config: Mapping[str, Any]) -> list[str]:
    """The parts of a config that neither engine takes, by the options of cpt."""
    obstacles = []
    if config.get("use_dora"):
        obstacles.append("use_dora")
    if config.get("modules_to_save"):
        obstacles.append("modules_to_save")
    return obstacles
