"""The private APIs of libraries that cpt uses, where, and why.

A new version of a library may change them without notice. tests/core/test_private_apis.py fails if the
installed version lacks one, and if a module of cpt uses one that is not listed for it. The supported versions
have no public API in their place; a reason says which version brings one. Nothing imports this module but the
test."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrivateAPI:
    """An attribute of a module, of a class (`module:Class`), or of an argument of a function
    (`module:function`)."""

    owner: str
    name: str
    used_in: tuple[str, ...]  # modules of cpt
    reason: str

    def is_available(self) -> bool:
        """Whether the installed library has it."""
        module_name, _, class_name = self.owner.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError:
            return False
        if class_name:
            owner = getattr(owner, class_name, None)
        if hasattr(owner, self.name) or is_named_in_constructor(owner, self.name):
            return True
        return inspect.isfunction(owner) and self.name in inspect.unwrap(owner).__code__.co_names


def is_named_in_constructor(owner: Any, name: str) -> bool:
    """Whether the constructor of a class, or of one above it, sets or reads an attribute: only instances have
    it."""
    for kind in getattr(owner, "__mro__", ()):
        constructor = vars(kind).get("__init__")
        code = getattr(inspect.unwrap(constructor), "__code__", None) if constructor is not None else None
        if code is not None and (name in code.co_names or name in code.co_consts):
            return True
    return False


PRIVATE_APIS = (
    # torch: modules
    PrivateAPI(
        "torch.nn:Module",
        "_apply",
        (
            "core.tensors",
            "adapters.domain_store",
            "gradient_masks.migu",
            "methods.reservoir",
            "models.narrow_layers",
            "models.without_storage",
        ),
        "tensors that are moved with a module but not cast, modules that stay on disk, parameters without "
        "storage",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_load_from_state_dict",
        (
            "core.tensors",
            "adapters.domain_store",
            "adapters.routed_lora",
            "adapters.soft_prompt",
            "methods.experts",
        ),
        "modules whose parameters are made when a checkpoint is loaded",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_save_to_state_dict",
        ("methods.reservoir",),
        "the memory of examples is saved as it is used, not as it is allocated",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_parameters",
        (
            "models.weights",
            "models.chunked_head",
            "models.narrow_layers",
            "models.without_storage",
            "gradient_masks.migu",
        ),
        "a parameter is replaced for a while without __setattr__, which registers it again",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_buffers",
        (
            "core.tensors",
            "adapters.domain_store",
            "models.quantization",
            "models.without_storage",
            "trainer.checkpoint",
            "trainer.simulation",
        ),
        "the buffers of one module, without those of its children",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_forward_hooks",
        ("adapters.experts", "models.chunked_head"),
        "whether an expert or the head is being observed",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_forward_pre_hooks",
        ("models.chunked_head",),
        "whether the head is being observed",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_backward_hooks",
        ("models.chunked_head",),
        "whether the head is being observed",
    ),
    PrivateAPI(
        "torch.nn:Module",
        "_compiled_call_impl",
        ("models.growth", "models.chunked_head"),
        "a compiled block cannot be copied; a body is left out of a model's forward pass, with its hooks",
    ),
    PrivateAPI(
        "torch.nn.parallel:DistributedDataParallel",
        "_ddp_params_and_buffers_to_ignore",
        ("methods.stage_module",),
        "parameters that the processes do not synchronize",
    ),
    # torch: kernels for lists of tensors
    PrivateAPI("torch", "_foreach_abs", ("models.fisher",), "one kernel for all parameters"),
    PrivateAPI(
        "torch", "_foreach_add_", ("models.fisher", "methods.reservoir"), "one kernel for all parameters"
    ),
    PrivateAPI("torch", "_foreach_addcmul_", ("models.fisher",), "one kernel for all parameters"),
    PrivateAPI("torch", "_foreach_div_", ("methods.reservoir",), "one kernel for all parameters"),
    PrivateAPI("torch", "_foreach_lerp_", ("models.weights",), "one kernel for all parameters"),
    PrivateAPI("torch", "_foreach_mul", ("models.weights",), "one kernel for all parameters"),
    PrivateAPI(
        "torch", "_foreach_mul_", ("models.weights", "models.chunked_head"), "one kernel for all parameters"
    ),
    PrivateAPI("torch", "_foreach_sub", ("models.weights",), "one kernel for all parameters"),
    # torch: counts of operations and memory
    PrivateAPI(
        "torch",
        "_C",
        ("trainer.costs", "models.without_storage"),
        "operations that are made of others are not counted twice; attention of torch where ours replaces it",
    ),
    PrivateAPI(
        "torch._C",
        "_nn",
        ("models.without_storage",),
        "attention of torch where ours replaces it",
    ),
    PrivateAPI(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        ("trainer.costs", "core.allocations"),
        "operations are counted, and what they allocate",
    ),
    PrivateAPI(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode",
        ("trainer.simulation", "models.without_storage"),
        "plans are computed without storage",
    ),
    PrivateAPI(
        "torch._subclasses.fake_tensor", "FakeTensor", ("core.allocations",), "a tensor without values"
    ),
    PrivateAPI(
        "torch._subclasses.fake_tensor",
        "unset_fake_temporarily",
        ("core.allocations",),
        "what is computed of ids and counters has values",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_grouped_mm",
        ("trainer.costs",),
        "operations of mixtures of experts are counted",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_local_scalar_dense",
        ("core.allocations",),
        "numbers that an optimizer reads of tensors without values",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_to_copy",
        ("trainer.simulation",),
        "copies of weights in 16 bits are counted on their own",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_scaled_dot_product_flash_attention",
        ("models.without_storage",),
        "the memory of attention on a GPU",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_scaled_dot_product_efficient_attention",
        ("models.without_storage",),
        "the memory of attention on a GPU",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_scaled_dot_product_flash_attention_for_cpu",
        ("trainer.costs",),
        "operations of attention are counted as those of a GPU",
    ),
    PrivateAPI(
        "torch.ops:aten",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        ("trainer.costs",),
        "operations of attention are counted as those of a GPU",
    ),
    PrivateAPI(
        "torch._ops:OpOverload",
        "_schema",
        ("trainer.computed_work",),
        "which arguments an operation writes to",
    ),
    PrivateAPI(
        "torch._ops:OpOverload",
        "_overloadpacket",
        ("trainer.costs",),
        "an operation is counted whatever its overload",
    ),
    PrivateAPI(
        "torch:UntypedStorage",
        "_cdata",
        (
            "trainer.computed_work",
            "trainer.costs",
            "trainer.profiling",
            "trainer.simulation",
            "core.allocations",
            "optim.rounding",
        ),
        "the memory of tensors that share a storage is counted once",
    ),
    # torch: processes
    PrivateAPI(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        ("core.shards",),
        "a class that torch pickles in an index of shards",
    ),
    PrivateAPI(
        "torch.distributed.checkpoint.metadata",
        "_MEM_FORMAT_ENCODING",
        ("core.shards",),
        "a class that torch pickles in an index of shards",
    ),
    PrivateAPI(
        "torch.serialization",
        "_get_layout",
        ("core.shards",),
        "a function that torch pickles in an index of shards",
    ),
    PrivateAPI(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        ("core.distributed",),
        "processes that work on their own tell each other of signals and errors",
    ),
    PrivateAPI(
        "torch._utils", "ExceptionWrapper", ("data.loader_processes",), "an error of a loader's process"
    ),
    PrivateAPI(
        "torch.utils.data._utils.signal_handling",
        "_set_SIGCHLD_handler",
        ("data.loader_processes",),
        "the end of a loader's process is reported at once",
    ),
    PrivateAPI(
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
        "_workers",
        ("data.loader_processes",),
        "the processes of a loader, to see which has ended",
    ),
    # Lightning
    PrivateAPI(
        "lightning.pytorch:Trainer",
        "_signal_connector",
        ("trainer.lightning",),
        "signals are handled by cpt.core.preemption",
    ),
    PrivateAPI(
        "lightning.pytorch.loops.fit_loop:_FitLoop",
        "_data_fetcher",
        ("trainer.lightning",),
        "a fit that ended before its first batch has no iterator to tear down",
    ),
    PrivateAPI(
        "lightning.pytorch.loops.fetchers:_DataFetcher",
        "_combined_loader",
        ("trainer.lightning",),
        "a fit that ended before its first batch has no iterator to tear down",
    ),
    PrivateAPI(
        "lightning.pytorch.utilities.combined_loader:CombinedLoader",
        "_iterator",
        ("trainer.lightning",),
        "a fit that ended before its first batch has no iterator to tear down",
    ),
    PrivateAPI(
        "lightning.fabric.utilities.optimizer",
        "_optimizers_to_device",
        ("trainer.fsdp_strategy",),
        "the optimizer's state is moved where Lightning moves it",
    ),
    PrivateAPI(
        "lightning.fabric.strategies.launchers.subprocess_script:_ChildProcessObserver",
        "_child_processes",
        ("core.preemption",),
        "signals are sent on to the processes that Lightning has started",
    ),
    # transformers and peft
    PrivateAPI(
        "transformers:PretrainedConfig",
        "_attn_implementation",
        (
            "models.block_attention",
            "models.varlen_attention",
            "trainer.export_check",
            "trainer.reference_model",
        ),
        "the attention kernel that a model uses",
    ),
    PrivateAPI(
        "transformers:PreTrainedModel", "_is_stateful", ("models.block_attention",), "recurrent models"
    ),
    PrivateAPI(
        "transformers:PreTrainedModel",
        "_keep_in_fp32_modules",
        ("models.narrow_layers",),
        "weights that a model reads the type of",
    ),
    PrivateAPI(
        "transformers:PreTrainedModel",
        "_keep_in_fp32_modules_strict",
        ("models.narrow_layers",),
        "weights that a model reads the type of",
    ),
    PrivateAPI(
        "transformers:PreTrainedModel",
        "_keys_to_ignore_on_load_unexpected",
        ("models.stored_weights",),
        "stored weights of other parts, which a class skips without a report",
    ),
    PrivateAPI(
        "transformers:PreTrainedModel",
        "_keys_to_ignore_on_save",
        ("models.streamed_files",),
        "weights that transformers does not save",
    ),
    PrivateAPI(
        "transformers.core_model_loading:convert_and_load_state_dict_in_model",
        "_weight_conversions",
        ("adapters.plain_model",),
        "how a loaded checkpoint names and divides its tensors",
    ),
    PrivateAPI(
        "transformers:PreTrainedModel",
        "_load_pretrained_model",
        ("models.sharded_loading",),
        "a model is sharded before its weights are read, and some of them are read before others",
    ),
    PrivateAPI(
        "transformers.core_model_loading:set_param_for_module",
        "_is_hf_initialized",
        ("models.sharded_loading",),
        "what is loaded already is not drawn",
    ),
    PrivateAPI(
        "transformers:PreTrainedTokenizer",
        "_tokenize",
        ("models.vocabulary",),
        "the pieces of a token, without the added tokens",
    ),
    PrivateAPI(
        "peft.tuners.tuners_utils:BaseTunerLayer",
        "_cast_input_dtype",
        ("adapters.lora",),
        "peft's own cast of a layer's input",
    ),
    PrivateAPI(
        "peft:LoraModel",
        "_prepare_adapter_config",
        ("adapters.lora",),
        "the names of layers are set when peft has replaced those of experts",
    ),
    # Hydra, OmegaConf, submitit
    PrivateAPI(
        "hydra._internal.utils",
        "get_args_parser",
        ("cli", "sweeps.jobs", "trainer.help"),
        "flags are read as Hydra reads them",
    ),
    PrivateAPI("hydra._internal.utils", "run_and_report", ("cli",), "errors are reported in one line"),
    PrivateAPI(
        "hydra._internal.config_loader_impl",
        "ConfigLoaderImpl",
        ("core.overrides",),
        "a mapping on the command line replaces that of an experiment",
    ),
    PrivateAPI(
        "hydra._internal.config_loader_impl:ConfigLoaderImpl",
        "_apply_overrides_to_config",
        ("core.overrides",),
        "a mapping on the command line replaces that of an experiment",
    ),
    PrivateAPI(
        "hydra._internal.core_plugins.basic_sweeper",
        "BasicSweeper",
        ("sweeps.jobs",),
        "the sweeper of a command is Hydra's own",
    ),
    PrivateAPI(
        "hydra.core.utils:JobReturn",
        "_return_value",
        ("sweeps.launcher", "sweeps.optuna", "sweeps.tune"),
        "return_value raises the error of a failed job",
    ),
    PrivateAPI("omegaconf:Node", "_get_root", ("core.errors",), "the config of a key that an error names"),
    PrivateAPI(
        "submitit:AutoExecutor",
        "_typed_parameters",
        ("sweeps.launcher",),
        "the options that all of submitit's executors take",
    ),
    # Python
    PrivateAPI(
        "atexit",
        "_run_exitfuncs",
        ("core.preemption",),
        "what is registered to run at the end runs before a process leaves at once",
    ),
    PrivateAPI(
        "concurrent.futures:ProcessPoolExecutor",
        "_processes",
        ("data.tokenize",),
        "the pool's processes are stopped with the run; Python 3.14 has terminate_workers",
    ),
    PrivateAPI(
        "multiprocessing.queues:Queue",
        "_on_queue_feeder_error",
        ("data.loader_processes",),
        "a batch that cannot be sent ends the run",
    ),
)
