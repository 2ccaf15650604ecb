"""Check a run whose base is quantized: by `model.quantization`, or as its checkpoint is stored."""

from importlib.util import find_spec

from cpt.adapters.options import LayerLoRAOptions, StoredLoRAOptions
from cpt.core.exceptions import InvalidOptionError
from cpt.core.run_command import format_install_command
from cpt.core.sections import Choice
from cpt.methods.options import PeftOptions
from cpt.trainer.read_config import Sections

PACKAGES = ("bitsandbytes", "accelerate")  # with which transformers quantizes
METHODS = "lora, inclora, nlora, olora, moelora, sapt, none, peft with tuner=dora as plain LoRA"
PLAIN_LORA = "'method.arguments={use_dora: false}'"


def check_quantization(
    plan: Sections, *, method_name: str, key: str, value: str, needs_packages: bool = True
) -> None:
    """Raises ValueError for what does not go with a base that is quantized by `key=value`."""
    missing_packages = [name for name in PACKAGES if find_spec(name) is None]
    if missing_packages and needs_packages:
        raise InvalidOptionError(
            key,
            value,
            reason=f"{missing_packages[0]} is not installed",
            allowed=f"after {format_install_command('quantized')}",
        )
    context = f"with {key}={value}"
    check_method(plan.method, method_name, context=context)
    if plan.trainer.strategy == "fsdp":
        raise InvalidOptionError(
            "strategy",
            "fsdp",
            context=context,
            reason="quantized weights cannot be sharded",
            allowed="single, ddp",
        )
    if plan.trainer.match is not None:
        raise InvalidOptionError(
            "trainer.match",
            plan.trainer.match,
            context=context,
            reason="it counts the operations that train all weights",
            allowed="null",
        )


def check_method(method: Choice, name: str, *, context: str) -> None:
    """Raises ValueError for a method or options of it that need weights in full."""
    options = method.options
    method_class = method.load()
    if isinstance(options, PeftOptions):
        check_tuner(options, context=context)

    if not method_class.takes_quantized:
        raise InvalidOptionError(
            "method",
            name,
            context=context,
            reason="it trains or changes the weights that are quantized",
            allowed=METHODS,
        )
    if isinstance(options, StoredLoRAOptions) and options.adapter_storage == "merged":
        raise InvalidOptionError(
            "method.adapter_storage",
            "merged",
            context=context,
            reason="rounded to so few bits, weights lose most of an adapter",
            allowed="separate",
        )
    if isinstance(options, LayerLoRAOptions) and options.has_pissa:
        raise InvalidOptionError(
            "method.init_lora_weights",
            options.init_lora_weights,
            context=context,
            reason="it takes singular values out of weights, which have to be there in full",
            allowed="true, gaussian",
        )
    if isinstance(options, LayerLoRAOptions) and options.use_dora:
        raise InvalidOptionError(
            "method.use_dora",
            True,
            context=context,
            reason="norms are of weights in full, which would be dequantized once more in each step",
            allowed="false",
        )


def check_tuner(options: PeftOptions, *, context: str) -> None:
    """Raises ValueError for tuners of peft but LoRA, and for a start of LoRA that changes the weights."""
    is_plain_lora = options.tuner == "dora" and options.arguments.get("use_dora") is False
    if not is_plain_lora:
        raise InvalidOptionError(
            "method.tuner",
            options.tuner,
            context=context,
            reason="it needs weights in full",
            allowed=f"dora as plain LoRA, {PLAIN_LORA}",
        )
    initialization = options.arguments.get("init_lora_weights", True)
    if initialization not in (True, "gaussian"):
        raise InvalidOptionError(
            "method.arguments.init_lora_weights",
            initialization,
            context=context,
            reason="it changes the weights that are quantized, or computes with them in full",
            allowed="true, gaussian",
        )
    if options.arguments.get("kasa_config"):
        raise InvalidOptionError(
            "method.arguments.kasa_config",
            options.arguments["kasa_config"],
            context=context,
            reason="it changes the weights that are quantized",
            allowed="null",
        )
