"""Kinds of devices that a plan is computed for: memory and peak operations of published data sheets.

Peaks are of dense matrix products in bf16 with sums in 32 bits, and in 32 bits without TF32, which torch does
not use unless asked. Data sheets of NVIDIA print bf16 with sparsity, which doubles it. Memory is that of the
data sheet in units of 10^9 bytes. Drivers report a few per cent more, which is room for the context of the
device and for fragments. Nothing here was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

HOPPER = "NVIDIA H100 and H200 Tensor Core GPU data sheets: 1,979 TFLOPS in bf16 with sparsity"
AMPERE = "NVIDIA A100 Tensor Core GPU data sheet"
# Shares of a GPU's peak that training reaches, with all that it does besides products.
SMALL_MODEL = 10**9  # parameters
SHARE_OF_SMALL = 0.2
SHARE_OF_LARGE = 0.35
SHARE_SOURCES = {
    SHARE_OF_SMALL: "16 and 22 % of cpt on an H100, GPT-2 of 124 and 355 M (docs/studies/performance.md)",
    SHARE_OF_LARGE: "33 to 39 % of torchtitan, Llama-3-8B with FSDP on H100 (its benchmarks/)",
}


@dataclass(frozen=True)
class DeviceKind:
    """A device: bytes of its memory, and its peak operations per second by the type of products."""

    description: str
    memory: int
    peak_flops: Mapping[str, float]
    source: str
    is_gpu: bool = True


def make_gpu(description: str, *, gigabytes: int, bf16: float, fp32: float, source: str) -> DeviceKind:
    """A GPU by its data sheet: TFLOPS in bf16 and in 32 bits."""
    return DeviceKind(
        description,
        memory=gigabytes * 10**9,
        peak_flops={"bfloat16": bf16 * 1e12, "float32": fp32 * 1e12},
        source=source,
    )


GPUS: Mapping[str, DeviceKind] = {
    "h100": make_gpu("NVIDIA H100 SXM, 80 GB", gigabytes=80, bf16=989.4, fp32=66.9, source=HOPPER),
    "h200": make_gpu("NVIDIA H200 SXM, 141 GB", gigabytes=141, bf16=989.4, fp32=66.9, source=HOPPER),
    "a100": make_gpu("NVIDIA A100 SXM, 80 GB", gigabytes=80, bf16=312, fp32=19.5, source=AMPERE),
    "a100-40gb": make_gpu("NVIDIA A100, 40 GB", gigabytes=40, bf16=312, fp32=19.5, source=AMPERE),
    "l40s": make_gpu(
        "NVIDIA L40S, 48 GB", gigabytes=48, bf16=362.05, fp32=91.6, source="NVIDIA L40S data sheet"
    ),
    "l4": make_gpu(
        "NVIDIA L4, 24 GB",
        gigabytes=24,
        bf16=121,
        fp32=30.3,
        source="NVIDIA L4 data sheet: 242 TFLOPS in bf16 with sparsity",
    ),
    "4090": make_gpu(
        "NVIDIA GeForce RTX 4090, 24 GB",
        gigabytes=24,
        bf16=165.2,
        fp32=82.6,
        source="NVIDIA Ada GPU architecture white paper, appendix A",
    ),
    "3090": make_gpu(
        "NVIDIA GeForce RTX 3090, 24 GB",
        gigabytes=24,
        bf16=71,
        fp32=35.6,
        source="NVIDIA Ampere GA102 GPU architecture white paper, appendix A",
    ),
    "mi300x": make_gpu(
        "AMD Instinct MI300X, 192 GB",
        gigabytes=192,
        bf16=1307.4,
        fp32=163.4,
        source="AMD Instinct MI300X data sheet",
    ),
}
THIS_CPU = "cpu"
KIND_NAMES = (*GPUS, THIS_CPU)
