"""Every private or undocumented name of torch, Triton, transformers, PEFT, accelerate and DeepSpeed
that the package leans on, and what happens in a version that has renamed it.

A name is looked up here and nowhere else. One that is gone costs the feature that it serves, with
one sentence: `patch` warns of it, `python -m moe_patch env` lists it. Names that a hot path or a
traced function reads are constants, looked up on import: C functions and strings, no calls.

Names of Triton, PEFT, accelerate and DeepSpeed are looked up when something needs them: importing
those packages takes time, and Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import operator
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .notices import warn_once
from .versions import TESTED, installed, release, tested


@dataclass(frozen=True)
class Name:
    """One private name."""

    path: str
    """`module:attribute.attribute`; `()` calls what stands before it, and `#word` is a word in the
    code of the function before it: an attribute that it sets or reads, or a variable."""
    why: str
    seen: str
    """The versions in which the tests ran with it."""
    gone: str
    """What a version without it costs: the end of a sentence."""
    needed: Callable[[], bool] = lambda: True
    """Whether this environment could use it."""

    @property
    def package(self) -> str:
        """The package whose name it is."""
        return self.path.split(".")[0].split(":")[0]

    def find(self) -> Any:
        """What has this name; None when there is none, or no such package."""
        module, _, rest = self.path.partition(":")
        found = _imported(module)
        for part in rest.partition("#")[0].split("."):
            if found is not None:
                found = getattr(found, part.removesuffix("()"), None)
            if found is not None and part.endswith("()"):
                found = found()
        if "#" not in rest or found is None:
            return found
        code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
        words = SimpleNamespace(**dict.fromkeys(_words(code) if code else (), True))
        return getattr(words, rest.partition("#")[2], None)

    def put(self, new: Any) -> None:
        """Gives the name to something else."""
        module, _, rest = self.path.partition(":")
        *owners, last = rest.split(".")
        setattr(functools.reduce(getattr, owners, importlib.import_module(module)), last, new)

    def sentence(self) -> str:
        """What is lost without it."""
        name = self.path.partition("#")[2] or self.path.replace(":", ".").replace("()", "")
        return f"{self.package} {_version(self.package)} has no {name}, so {self.gone}"


NAMES: list[Name] = []
"""Every private name, in the order of this file."""


def lost(load: bool = False) -> list[str]:
    """A sentence for each name that the installed packages lack.

    Modules that nobody has imported are not asked, unless `load`; absent packages never are.
    """
    sentences = [
        name.sentence()
        for name in NAMES
        if (load and _may_import(name.package) or name.path.partition(":")[0] in sys.modules)
        and name.needed()
        and name.find() is None
    ]
    unlike = [_why_not_direct(), _why_not_gluon()] if load and _on_nvidia() else []
    return sentences + [reason for reason in unlike if reason and reason not in sentences]


@functools.cache
def say_lost(packages: frozenset[str]) -> None:
    """Warns once of each name that is gone; asked again when more of the packages are imported."""
    for sentence in lost():
        warn_once(f"moe_patch: {sentence}.")


def loaded() -> frozenset[str]:
    """The modules of NAMES that are imported."""
    return frozenset({name.path.partition(":")[0] for name in NAMES} & sys.modules.keys())


def _may_import(package: str) -> bool:
    # importing DeepSpeed asks for compilers and prints
    return package != "deepspeed" and _imported(package) is not None


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _version(package: str) -> str:
    return installed(package) or "of this environment"


def _words(code: CodeType) -> Iterator[str]:
    """Names and variables of a function's code and of the functions inside it."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _words(const)
        elif isinstance(const, str):
            yield const


def _name(path: str, why: str, seen: str, gone: str, **more: Callable[[], bool]) -> Name:
    NAMES.append(Name(path, why, seen, gone, **more))
    return NAMES[-1]


def _now(path: str, why: str, seen: str, gone: str, **more: Callable[[], bool]) -> Any:
    """What has that name in this environment; None when it is gone."""
    return _name(path, why, seen, gone, **more).find()


def _word(path: str, why: str, seen: str, gone: str) -> str:
    """The last word of the path: an attribute that others set, absent where they renamed it."""
    _name(path, why, seen, gone)
    return path.rpartition("#")[2] if "#" in path else path.rpartition(".")[2]


def _first_lost(names: list[Name]) -> str | None:
    return next((name.sentence() for name in names if name.find() is None), None)


def _and(*found: Any) -> bool:
    return all(one is not None for one in found)


# torch: what kernels cannot be part of

TORCH = tested("torch")

_in_transform = _now(
    "torch._C:_are_functorch_transforms_active",
    "Tensors inside torch.func's transforms have no memory that a kernel could read.",
    TORCH,
    "torch.func transforms of patched models and of fused_experts fail: unpatch the model for them",
) or (lambda: False)
_in_trace = (
    _now(
        "torch._C:_is_tracing",
        "torch.jit.trace cannot record kernels; torch.jit.is_tracing asks the same by two calls.",
        TORCH,
        "torch.jit.is_tracing is asked instead, which takes longer",
    )
    or torch.jit.is_tracing
)


class _AskedLevel:
    """In the place of torch.autograd.forward_ad: levels cannot be nested, so one more is tried."""

    @property
    def _current_level(self) -> int:
        try:
            with torch.autograd.forward_ad.dual_level():
                return -1
        except RuntimeError:
            return 0


_forward_ad: Any = torch.autograd.forward_ad
if (
    _now(
        "torch.autograd.forward_ad:_current_level",
        "Kernels compute no tangents, so they must not run under forward-mode AD.",
        TORCH,
        "a level of forward-mode AD is opened to find out whether one is open, which takes longer",
    )
    is None
):
    _forward_ad = _AskedLevel()


def why_not_kernels() -> str | None:
    """None where kernels may run, else what they cannot be part of, in one sentence.

    Compiled graphs hold them as operators of their own, with the rules that torch.compile asks for.
    """
    if torch.compiler.is_compiling():
        return None
    if _in_transform():
        return "a torch.func transform runs, whose tensors the fused kernels cannot read"
    if _forward_ad._current_level >= 0:
        return "forward-mode AD runs, and the fused kernels compute no tangents"
    if _in_trace():
        return "torch.jit.trace runs, which cannot record the fused kernels"
    return None


def _keys_by_storage(tensor: Tensor) -> str:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return "Batched"
    return ""


dispatch_keys: Callable[[Tensor], object] = (
    _now(
        "torch._C:_dispatch_keys",
        "is_grads_batched=True runs a vmap older than torch.func's, known by its tensors' keys.",
        TORCH,
        "tensors are asked for their storage instead, which those of that vmap have not",
    )
    or _keys_by_storage
)
"""Of a tensor; its text has "Batched" in it under that vmap."""


# torch: weight gradients that a kernel adds to `.grad`

_ADDS = "autograd adds the weights' gradients itself, which takes another buffer of their size"

current_graph_task = _now(
    "torch._C:_current_graph_task_id",
    "A hook that was left by a backward that failed must not run in the next one.",
    TORCH,
    _ADDS,
)
will_execute_node = _now(
    "torch._C:_will_engine_execute_node",
    "torch.autograd.grad does not end in `.grad`.",
    TORCH,
    _ADDS,
)
_have_hooks = _and(
    _now(
        "torch:Tensor._backward_hooks",
        "Hooks of a parameter are to see its gradient, so nothing may be added behind them.",
        TORCH,
        _ADDS,
    ),
    _now(
        "torch:Tensor._post_accumulate_grad_hooks",
        "The same, for hooks that run after the gradient is added.",
        TORCH,
        _ADDS,
    ),
)
backward_hooks = operator.attrgetter("_backward_hooks")
post_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
_refers = _now(
    "torch.utils.hooks:RemovableHandle.__init__#hooks_dict_ref",
    "Whether others have hooks on the node that adds a gradient.",
    TORCH,
    _ADDS,
)
hooks_beside = operator.attrgetter("hooks_dict_ref")
"""All hooks of the kind that a handle is of, as a weak reference to their dictionary."""
ADDS_TO_GRAD = _have_hooks and _and(current_graph_task, will_execute_node, _refers)
"""Whether it can be known that nothing could tell a kernel's addition from autograd's."""

_base = _now(
    "torch:Tensor._base",
    "The parameter behind a transposed view, which is kept for the backward in the view's place.",
    TORCH,
    "weights stored [E, K, N] are kept as views, whose gradients autograd adds itself",
)
base_of: Callable[[Tensor], Tensor | None] = (
    operator.attrgetter("_base") if _base is not None else lambda tensor: None
)
"""The tensor that one is a view of; None where it is none."""

version_of: Callable[[Tensor], int] | None = (
    operator.attrgetter("_version")
    if _now(
        "torch:Tensor._version",
        "Whether anybody wrote to a Llama4 router's scores since the router made them.",
        TORCH,
        "Llama4's blocks choose experts a second time, from the router's scores",
    )
    is not None
    else None
)


# torch: products, launches, modules

_PRECISION = (
    "float32 products follow torch.backends.cuda.matmul.fp32_precision, and check_parity leaves it "
    "set to what it was inherited as"
)
_get_precision = _now(
    "torch._C:_get_fp32_precision_getter",
    "What torch.matmul asks. Of its two public APIs one raises where the other said something else",
    TORCH,
    _PRECISION,
)
_set_precision = _now(
    "torch._C:_set_fp32_precision_setter", "The same, to set it.", TORCH, _PRECISION
)
INHERITS_PRECISION = _and(_get_precision, _set_precision)
"""Whether a place of its own can be told from one that follows another."""


def _public_place(backend: str) -> Any:
    found: Any = torch.backends.cuda if backend == "cuda" else torch.backends.mkldnn
    return found.matmul


def _get_public(backend: str, _: str) -> str:
    return _public_place(backend).fp32_precision


def _set_public(backend: str, _: str, precision: str) -> None:
    _public_place(backend).fp32_precision = precision


get_precision: Callable[[str, str], str] = _get_precision if INHERITS_PRECISION else _get_public
set_precision: Callable[..., Any] = _set_precision if INHERITS_PRECISION else _set_public

FakeTensor: type | None = _now(
    "torch._subclasses:FakeTensor",
    "Weights are FakeTensors while torch.export traces.",
    TORCH,
    "torch.export gets Hugging Face's own forward from a patched model",
)

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of nn.Module: dictionaries of its hooks."""
_HOOKS = "activations are called as modules: such experts run by parts or as Hugging Face's"
_found = [
    _now(
        f"torch.nn:Module().{name}",
        "An activation without hooks may be computed without being called.",
        TORCH,
        _HOOKS,
    )
    for name in MODULE_HOOKS
] + [
    _now(
        f"torch.nn.modules.module:_global{name}",
        "The same, for hooks on all modules.",
        TORCH,
        _HOOKS,
    )
    for name in MODULE_HOOKS
]
GLOBAL_HOOKS: tuple[dict[int, Any], ...] | None = (
    tuple(_found[len(MODULE_HOOKS) :]) if _and(*_found) else None
)
"""The hooks on all modules, one dictionary a kind of MODULE_HOOKS; None: nobody can say."""

MODULE_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of nn.Module: what it holds."""
_STATE = [
    _name(
        f"torch.nn:Module().{_state}",
        "check_parity copies a block and shares its weights, entries that are None among them.",
        TORCH,
        "check_parity cannot copy a block",
    )
    for _state in MODULE_STATE
]


APPLY = _word(
    "torch.nn:Module._apply",
    "model.to(dtype) and model.half() end in it: they are not to cast the scales of 4-bit weights.",
    TORCH,
    "model.to(dtype) casts the scales of experts in 4 bits",
)


def module_state(module: nn.Module) -> tuple[Any, ...]:
    """(parameters, buffers, modules, names of buffers that are not saved) of a module alone.

    Raises:
        RuntimeError: this torch keeps them elsewhere.
    """
    state = tuple(getattr(module, name, None) for name in MODULE_STATE)
    if not _and(*state):
        raise RuntimeError(f"moe_patch: {_first_lost(_STATE)}.")
    return state


def bind_thread() -> None:
    """Give the calling thread the current device's context, as most of torch's calls do."""
    if torch.cuda.is_available():
        torch.cuda.mem_get_info()


cuda_device: Callable[[], int] = (
    _now(
        "torch._C:_cuda_getDevice",
        "A launch asks for the current device; torch.cuda.current_device takes longer.",
        TORCH,
        "torch.cuda.current_device is asked at every launch, which takes longer",
        needed=torch.cuda.is_available,
    )
    or torch.cuda.current_device
)


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


cuda_stream: Callable[[int], int] = (
    _now(
        "torch._C:_cuda_getCurrentRawStream",
        "A launch needs the stream's number; the public call makes an object around it.",
        TORCH,
        "torch.cuda.current_stream is asked at every launch, which takes longer",
        needed=torch.cuda.is_available,
    )
    or _public_stream
)

_STORE = _name(
    "torch.distributed.distributed_c10d:_get_default_store",
    "Ranks compare what they patch through the store behind torch.distributed.",
    TORCH,
    "nothing checks that every rank patches its shards of the model",
    needed=torch.distributed.is_available,
)


def default_store() -> Any:
    """The store behind torch.distributed; None, with a warning, when nobody can say which."""
    get = _STORE.find()
    if get is None:
        warn_once(f"moe_patch: {_STORE.sentence()}.")
    return get and get()


scaled_mm = _now(
    "torch:_scaled_mm",
    "What FP8 products are timed against; torch.nn.functional.scaled_mm takes other arguments.",
    TORCH,
    "`bench --fp8` shows no loop over torch's own FP8 products",
)

FSDP_WRAPPED = _word(
    "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.module.fget"
    "#_fsdp_wrapped_module",
    "Where FSDP keeps the module that it wraps.",
    TORCH,
    "the patch report names blocks under FSDP by their wrappers",
)
ORIG_MOD = _word(
    "torch._dynamo.eval_frame:OptimizedModule.__init__#_orig_mod",
    "Where torch.compile keeps the module that it wraps.",
    TORCH,
    "the patch report names compiled blocks by their wrappers",
)
COMPILED = _word(
    "torch.nn:Module.compile#_compiled_call_impl",
    "Where model.compile() keeps what it compiled.",
    TORCH,
    "nobody is told that a compiled model runs uncompiled while its routing is recorded",
)


# transformers: experts under @use_experts_implementation

TRANSFORMERS = tested("transformers")
CHECKPOINTS = (
    _word(
        "transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing"
        "#_gradient_checkpointing_func",
        "What a layer checkpoints with: a forward that runs again has to take the same experts.",
        TRANSFORMERS,
        "replaying a routing in training works for one forward at a time under checkpointing",
    ),
    "checkpoint_fn",
)
"""Attributes of modules that call torch's checkpoint: transformers' and torch's own wrapper's."""
_MOE = "transformers.integrations.moe"
_UNFUSED = "no experts under @use_experts_implementation are fused"

ExpertsInterface = _now(
    f"{_MOE}:ExpertsInterface",
    'Where the name "moe_patch" is registered, and how the decorator\'s dispatch is known.',
    TRANSFORMERS,
    _UNFUSED,
)
INTERFACE = _word(
    f"{_MOE}:use_experts_implementation#experts_interface",
    "A variable of the decorator's dispatch: where a class looks implementations up.",
    TRANSFORMERS,
    _UNFUSED,
)
IMPLEMENTATION = _word(
    f"{_MOE}:use_experts_implementation#_experts_implementation",
    "The field of a config that the dispatch reads: `patch` stands in for the config.",
    TRANSFORMERS,
    _UNFUSED,
)
INTERNAL = _word(
    "transformers:PreTrainedConfig._experts_implementation.fset#_experts_implementation_internal",
    "The same field of one config alone: setting the other one writes to parts of the config too.",
    TRANSFORMERS,
    "unpatch sets the default implementation on the parts of a config too",
)
GATE = _word(
    f"{_MOE}:use_experts_implementation#_apply_gate",
    "The method of a class that is its gate.",
    TRANSFORMERS,
    "no experts with gates are fused",
)
default_gate = _now(
    f"{_MOE}:_default_apply_gate",
    "The gate that the decorator provides, act_fn(gate) * up, is known by identity.",
    TRANSFORMERS,
    "gates are run by parts: two GEMMs in Triton and the class's own gate between them",
)
FP8Experts = _now(
    "transformers.integrations.finegrained_fp8:FP8Experts",
    "The experts of FP8 checkpoints.",
    TRANSFORMERS,
    "FP8 experts are left to Hugging Face",
)
FP8ExpertsInterface = _now(
    "transformers.integrations.finegrained_fp8:FP8ExpertsInterface",
    'Where the name "moe_patch" is registered for them.',
    TRANSFORMERS,
    "FP8 experts are left to Hugging Face",
)
CHOOSE = _word(
    "transformers:PreTrainedModel.get_correct_experts_implementation",
    "Every choice of an implementation asks it.",
    TRANSFORMERS,
    'experts_implementation="moe_patch" says nothing where it does nothing, and unpatch puts '
    "grouped_mm for the default implementation",
)
CAN_CHOOSE = _word(
    "transformers:PreTrainedModel._can_set_experts_implementation",
    "Whether experts_implementation does anything for a model.",
    TRANSFORMERS,
    'experts_implementation="moe_patch" says nothing where it does nothing',
)
FROM_CONFIG = _word(
    "transformers:PreTrainedModel._from_config",
    "The Auto classes' from_config ends in it.",
    TRANSFORMERS,
    "moe_patch.enable() patches models of from_pretrained alone: call model.patch() on others",
)
_PLANS = "transformers.distributed.tensor_parallel"
_PLANNED = (
    "models under a tensor- or expert-parallel plan are not fused when they are patched after it"
)
HOOKED = _word(
    f"{_PLANS}:apply_tensor_parallelism#_is_hooked",
    "Marks modules whose forward a plan replaced by one that still calls the dispatch.",
    TRANSFORMERS,
    _PLANNED,
)
PLANNED_FORWARD = _word(
    f"{_PLANS}:TensorParallelLayer.install_forward#original_forward",
    "A variable of the forward that a plan puts on a module: the forward that it found there.",
    TRANSFORMERS,
    _PLANNED,
)
CAPTURED = _word(
    "transformers.utils.output_capturing:maybe_install_capturing_hooks"
    "#_output_capturing_hooks_installed",
    "Marks models with hooks that a copy does not have.",
    TRANSFORMERS,
    "check_parity's copies record no router logits",
)


def implementation_of(experts: nn.Module) -> Any:
    """The name of the experts implementation that a module's dispatch looks up."""
    return getattr(experts.config, IMPLEMENTATION, None)


# transformers: quantised checkpoints

_KEEPS = "ExpertsQuantConfig quantises, and cannot keep experts that are in 4 bits already"
MERGE = _name(
    "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
    "Refuses a config of another class than the checkpoint's: ours reads the checkpoint's.",
    TRANSFORMERS,
    _KEEPS,
)
DISTRIBUTED = _word(
    "transformers:PreTrainedModel.from_pretrained#distributed_config",
    "The field of a config that says that a plan is going to shard the model.",
    TRANSFORMERS,
    "4-bit experts under a tensor- or expert-parallel plan are refused by shapes that do not fit",
)
LOADED = _word(
    "transformers.core_model_loading:set_param_for_module#_is_hf_initialized",
    "Marks what a checkpoint had: 4-bit weights that it lacks cannot be initialised.",
    TRANSFORMERS,
    "checkpoints with 4-bit experts do not load",
)
_SAVED = "4-bit experts are split to single ones when they are saved, and do not load again"
CONVERSIONS = _word(
    "transformers.core_model_loading:convert_and_load_state_dict_in_model#_weight_conversions",
    "What save_pretrained reverses: 4-bit stacks are to be saved as they are.",
    TRANSFORMERS,
    _SAVED,
)
_MAPPING = _name(
    "transformers.conversion_mapping:get_model_conversion_mapping",
    "What save_pretrained reverses for a model that was not loaded.",
    TRANSFORMERS,
    _SAVED,
)


def model_conversions(model: nn.Module) -> list[Any]:
    """What save_pretrained reverses for a model that was not loaded."""
    find = _MAPPING.find()
    found = [] if find is None else find(model, add_legacy=False)
    return [each for each in found if type(each).__name__ != "PrefixChange"]


# accelerate, DeepSpeed, PEFT: what they put around modules

ACCELERATE = "accelerate 1.10 to 1.15"
HF_HOOK = _word(
    "accelerate.hooks:add_hook_to_module#_hf_hook",
    "Marks modules whose weights accelerate brings when they are called.",
    ACCELERATE,
    "offloaded blocks are not fused when they are patched after that",
)
OLD_FORWARD = _word(
    "accelerate.hooks:add_hook_to_module#_old_forward",
    "Where accelerate keeps the forward that its own calls.",
    ACCELERATE,
    "offloaded blocks are not fused when they are patched after that",
)

DEEPSPEED = "DeepSpeed 0.19"
_ZERO = "deepspeed.runtime.zero.partition_parameters"
OLD_INIT = _word(
    f"{_ZERO}:InsertPostInitMethodToModuleSubClasses.patch_init_and_builtins#_old_init",
    "A copy of a class's __init__ that zero.Init leaves behind, no method of a router.",
    DEEPSPEED,
    "routers are not fused in models that are made under zero.Init",
)
DS_SHAPE = _word(
    f"{_ZERO}:Init._convert_to_deepspeed_param#ds_shape",
    "The shape of a parameter that ZeRO-3 has taken the memory of.",
    DEEPSPEED,
    "adapters on experts that ZeRO-3 partitions are left to PEFT",
)

PEFT = "PEFT 0.21"
_LORA = "peft.tuners.lora.layer"
_LEFT = "adapters on experts' parameters are left to PEFT, which forms the updated weights"
_ADAPTER = [
    _name(
        f"{_LORA}:ParamWrapper",
        "The wrapper around one parameter of the experts: a fused one stands in for it.",
        PEFT,
        _LEFT,
    ),
    _name(
        f"{_LORA}:ParamWrapper.get_delta_factors",
        "Versions with it keep their factors as `ops.low_rank.factors` reads them.",
        PEFT,
        _LEFT,
    ),
    _name(
        f"{_LORA}:ParamWrapper._check_forward_args",
        "PEFT's own refusals of arguments.",
        PEFT,
        _LEFT,
    ),
    _name(
        f"{_LORA}:ParamWrapper.__init__#_did_swap_in_out_features",
        "Whether a factor's `in` is the weight's last dimension.",
        PEFT,
        _LEFT,
    ),
]


_NO_CODES = "PEFT's adapters on the parameters of experts in 4 bits are refused"
MEASURE = _name(
    f"{_LORA}:ParamWrapper._get_in_out_features",
    "The first that a wrapper asks of its parameter: there it learns that it is in 4 bits.",
    PEFT,
    _NO_CODES,
)
_ACTIVATE = _name(
    f"{_LORA}:ParamWrapper._activate_lora",
    "Where a wrapper adds its update to the parameter: experts in 4 bits get the factors instead.",
    PEFT,
    _NO_CODES,
)
MERGEABLE = _name(
    "peft.tuners.lora.model:LoraModel._check_merge_allowed",
    "What PEFT asks before it merges anything: adapters on 4-bit weights are refused there.",
    PEFT,
    "adapters on experts in 4 bits are refused when others have been merged already",
)


def why_no_adapters() -> str | None:
    """None when PEFT's wrapper is as the fused one takes it to be, else the reason."""
    return _first_lost(_ADAPTER)


def why_no_adapters_on_codes() -> str | None:
    """None when PEFT's wrapper can be taught parameters in 4 bits, else the reason."""
    return _first_lost([*_ADAPTER, MEASURE, _ACTIVATE])


def check_forward_args(wrapper: Any, *args: Any) -> None:
    """PEFT's own refusals of what its wrapper is called with."""
    wrapper._check_forward_args(*args)


def swapped(wrapper: Any) -> bool:
    """Whether PEFT's wrapper takes its parameter for [E, out, in]."""
    return wrapper._did_swap_in_out_features


# Triton: its interpreter, launches without its argument binder, descriptors, Gluon

TRITON = tested("triton")


def _on_nvidia() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and not interpreted()


_RUNTIME = _name(
    "triton:knobs.runtime.interpret",
    "Whether kernels run in the interpreter, which TRITON_INTERPRET=1 asks for.",
    TRITON,
    "TRITON_INTERPRET alone says whether kernels run in the interpreter",
)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter."""
    found = _RUNTIME.find()
    return os.environ.get("TRITON_INTERPRET") == "1" if found is None else bool(found)


_REPEATED = "its interpreter repeats work that could be done once, and takes several times as long"
_INTERPRETER = "triton.runtime.interpreter"
INTERPRETER = {
    name: _name(path, why, TRITON, _REPEATED, needed=interpreted)
    for name, path, why in (
        (
            "patch",
            f"{_INTERPRETER}:_patch_lang",
            "Puts the interpreter's functions into triton.language for each launch and call.",
        ),
        ("dtype", f"{_INTERPRETER}:_get_np_dtype", "Makes a table for each look-up."),
        ("call", f"{_INTERPRETER}:InterpretedFunction.__call__", "Patches for each call."),
        ("rewrite", f"{_INTERPRETER}:InterpretedFunction.rewrite", "What a call runs."),
        ("block", "triton.language.core:block_type.__init__", "Writes its name for each result."),
        ("tensor", "triton.language.core:tensor.__init__", "Makes constants of a result's shape."),
        (
            "overflow",
            "triton.language.semantic:TritonSemantic.binary_op_sanitize_overflow_impl",
            "Computes sums of integers again in 64 bits, for a check that is off.",
        ),
        (
            "broadcast",
            "triton.language.semantic:TritonSemantic.broadcast_impl_value",
            "Compares shapes for each operation.",
        ),
        ("cast", "triton.language.semantic:TritonSemantic.cast", "Compares types for each cast."),
        ("builder", f"{_INTERPRETER}:interpreter_builder", "Has the functions that compute."),
        ("handle", f"{_INTERPRETER}:TensorHandle", "What these take and return."),
        ("reduce", f"{_INTERPRETER}:ReduceOps.generic_reduce", "Takes elements one by one."),
        ("xor", "triton.language.standard:_xor_combine", "How tl.sort reduces at each step."),
    )
}

COMPUTING = {
    name: _name(
        f"{_INTERPRETER}:InterpreterBuilder.{name}", why, TRITON, _REPEATED, needed=interpreted
    )
    for name, why in (
        ("binary_op", "Calls one of numpy's functions of two arrays."),
        ("create_addptr", "Adds offsets to pointers."),
        ("create_idiv", "Divides integers."),
        ("create_ashr", "Shifts signed integers."),
        ("cast_impl", "Casts."),
        ("create_fp_to_fp", "Casts from and to FP8."),
    )
}
"""Functions of the interpreter's builder that compute what an operator or a cast asks for."""

MASKED = {
    _name(
        f"{_INTERPRETER}:InterpreterBuilder.{name}",
        "In 3.9 a mask made of comparisons of scalars is an integer, which these refuse.",
        TRITON,
        "the interpreter may refuse a kernel's mask",
        needed=interpreted,
    ): at
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2))
}
"""Functions that read a mask -> its place among their arguments."""

_LAUNCHER = "kernels start through Triton's own launcher, which takes longer for each"
_NVIDIA = "triton.backends.nvidia.driver"
_LAUNCH = [
    _name(path, why, TRITON, _LAUNCHER, needed=_on_nvidia)
    for path, why in (
        (
            "triton:knobs.runtime.launch_enter_hook.calls",
            "Profilers are to see every launch: with hooks, Triton's own launcher is taken.",
        ),
        ("triton:knobs.runtime.launch_exit_hook.calls", "The same."),
        ("triton.runtime.jit:JITFunction.__init__#params", "How many constants follow arguments."),
        (
            "triton.compiler:CompiledKernel.__init__#packed_metadata",
            "An argument of the launcher: what a kernel was compiled for.",
        ),
        ("triton.compiler:CompiledKernel.__init__#function", "The kernel on its device."),
        (f"{_NVIDIA}:CudaLauncher.__init__#launch", "The C function that starts a kernel."),
        (f"{_NVIDIA}:CudaLauncher.__init__#launch_pdl", "Its argument."),
        (f"{_NVIDIA}:CudaLauncher.__init__#launch_cooperative_grid", "Its argument."),
        (
            f"{_NVIDIA}:CudaLauncher.__init__#global_scratch_size",
            "Kernels that need scratch memory are not started directly.",
        ),
        (f"{_NVIDIA}:CudaLauncher.__init__#profile_scratch_size", "The same."),
        (
            f"{_NVIDIA}:wrap_handle_tensordesc#launcher",
            "The C function behind one in Python that encodes descriptors at every launch.",
        ),
        (f"{_NVIDIA}:make_tensordesc_arg", "Encodes a descriptor."),
    )
]
_CALL = _name(
    f"{_NVIDIA}:CudaLauncher.__call__",
    "Its code says which arguments the C function takes, and in which order.",
    TRITON,
    _LAUNCHER,
    needed=_on_nvidia,
)
_GRID = ("gridX", "gridY", "gridZ", "stream", "function")
_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "self.launch_cooperative_grid": lambda compiled: compiled.run.launch_cooperative_grid,
    "self.launch_pdl": lambda compiled: compiled.run.launch_pdl,
    "self.arg_annotations": lambda compiled: compiled.run.arg_annotations,
    "self.kernel_signature": lambda compiled: compiled.run.kernel_signature,
    "kernel_metadata": lambda compiled: compiled.packed_metadata,
    "launch_metadata": lambda compiled: None,  # for hooks
    "launch_enter_hook": lambda compiled: None,
    "launch_exit_hook": lambda compiled: None,
    "global_scratch": lambda compiled: None,  # of no bytes
    "profile_scratch": lambda compiled: None,
}
"""Arguments of the C function between the grid and the kernel's own, by their names in Triton."""
_SPREAD = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "*")
"""Triton 3.6 passes on as `*args` what it was called with."""


def starts_directly() -> bool:
    """Whether kernels can be started without Triton's argument binder.

    Warns once where a card of NVIDIA could have it and this Triton has not.
    """
    if not _on_nvidia():
        return False
    reason = _why_not_direct()
    if reason:
        warn_once(f"moe_patch: {reason}.")
    return reason is None


def _why_not_direct() -> str | None:
    reason = _first_lost([*_LAUNCH, _CALL])
    if reason is None and not _convention():
        reason = (
            f"Triton {_version('triton')} calls its launcher in another way than {TRITON}, so "
            f"{_LAUNCHER}"
        )
    return reason


@functools.cache
def _convention() -> tuple[str, ...]:
    """`convention` of the installed Triton."""
    try:
        return convention(textwrap.dedent(inspect.getsource(_CALL.find())))
    except (OSError, SyntaxError, TypeError):
        return ()


def convention(code: str) -> tuple[str, ...]:
    """Arguments of the C function behind the grid, read from Triton's call of it in `code`.

    The last is "*" where the kernel's arguments follow one by one, "()" where they are one tuple.
    Empty when the code is not as in a known version.
    """
    tree = ast.parse(code)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [node for node in calls if ast.unparse(node.func) == "self.launch"]
    if len(calls) != 1 or calls[0].keywords:
        return ()
    names = tuple(ast.unparse(arg) for arg in calls[0].args)
    grid, settings, last = names[:5], names[5:-1], names[-1]
    if grid != _GRID or not _SETTINGS.keys() >= set(settings):
        return ()
    if last == "*args" and "kernel_metadata" not in settings:
        return (*settings, *_SPREAD)
    if last in ("args", "kernel_args") and "kernel_metadata" in settings:
        return (*settings, "()")
    return ()


class Binary(NamedTuple):
    """A compiled kernel, and how it is started."""

    start: Any
    """The C function."""
    function: int
    """The kernel on its device."""
    settings: tuple[Any, ...]
    boxes: list[tuple[int, str, Any]]
    """(place among the arguments, name, what the launcher knows) of each descriptor; the name says
    what this binary wants of it."""
    unread: tuple[None, ...]
    """None for each constexpr, which travel behind the arguments."""
    packed: bool
    """Whether the kernel's arguments travel as one tuple."""


def binary(kernel: Any, compiled: Any, args: tuple[Any, ...]) -> Binary | None:
    """How to start a compiled kernel; None, with a warning, where Triton's launcher is unknown."""
    try:
        return _binary(kernel, compiled, args)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        warn_once(f"moe_patch: Triton's launcher is not as in {TRITON} ({found}), so {_LAUNCHER}.")
        return None


def _binary(kernel: Any, compiled: Any, args: tuple[Any, ...]) -> Binary:
    launcher = compiled.run
    assert not launcher.global_scratch_size and not launcher.profile_scratch_size
    assert not getattr(launcher, "gsan_enabled", False)  # a sanitizer, whose launches have more
    start: Any = launcher.launch
    boxes: list[Any] = []
    at = [i for i, arg in enumerate(args) if hasattr(arg, "block_shape")]  # Triton's or Gluon's
    if at:  # wrapped in Python, to encode descriptors at every launch
        start = inspect.getclosurevars(start).nonlocals["launcher"]
        for i, meta in zip(at, compiled.metadata.tensordesc_meta, strict=True):
            boxes.append((i, str((meta["swizzle"], *meta["block_size"])), meta))
    *names, last = _convention()
    settings = tuple(_SETTINGS[name](compiled) for name in names)
    unread = (None,) * (len(kernel.params) - len(args))
    return Binary(start, compiled.function, settings, boxes, unread, last == "()")


@functools.cache
def _encoder() -> tuple[Any, tuple[None, ...]]:
    """Triton's function that encodes a descriptor, and what it is given besides that and the
    launcher's knowledge: since 3.8 the launcher's other arguments, which it does not read."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    others = len(inspect.signature(make_tensordesc_arg).parameters) - 2
    return make_tensordesc_arg, (None,) * others


def encode(box: Any, name: str, meta: dict[str, Any]) -> list[Any]:
    """Returns the arguments that a descriptor becomes, and keeps them in `box.encoded` by what a
    binary wants of it."""
    make, rest = _encoder()
    box.encoded[name] = found = make(box, meta, *rest)
    return found


_DESCRIPTOR = _name(
    "triton.tools.tensor_descriptor:TensorDescriptor",
    "Tiles travel through the Tensor Memory Accelerator.",
    TRITON,
    "tiles are loaded by pointers, which is slower on Hopper and later",
)


tensor_descriptor = functools.cache(_DESCRIPTOR.find)
"""Triton's class for TMA descriptors that the host makes."""


_ONE_BY_ONE = "the first call takes longer: its kernels are compiled one after the other"
_ASYNC = [
    _name(path, why, TRITON, _ONE_BY_ONE, needed=_on_nvidia)
    for path, why in (
        ("triton:AsyncCompileMode", "In this context `warmup` compiles on an executor."),
        (f"{_NVIDIA}:CudaLauncher", "Making one builds the C function that starts a kernel."),
    )
]


@functools.cache
def async_compile() -> Any:
    """Triton's context in which `warmup` compiles on an executor; None where it has none."""
    return None if _first_lost(_ASYNC) else _ASYNC[0].find()


def say_one_by_one(call: str, error: Exception) -> None:
    """Warns once that the kernels of a call could not be compiled together."""
    warn_once(
        f"moe_patch: {call} was not rehearsed ({type(error).__name__}: {error}), so "
        f"{_ONE_BY_ONE}: please report this."
    )


def build_launcher(compiled: Any) -> None:
    """Builds what starts a compiled kernel, as its first launch would, which finds it on disk."""
    _ASYNC[1].find()(compiled.src, compiled.metadata)


@torch.compiler.assume_constant_result
def has_tensor_descriptor() -> bool:
    """Whether Triton has them; warns once where not."""
    if tensor_descriptor() is None:
        warn_once(f"moe_patch: {_DESCRIPTOR.sentence()}.")
    return tensor_descriptor() is not None


_SLOWER = "on Hopper some products run in Triton, which is slower than in Gluon"
_GLUON = [
    _name(path, why, TRITON, _SLOWER, needed=_on_nvidia)
    for path, why in (
        ("triton.experimental.gluon:jit", "Kernels for Hopper are written in Gluon."),
        ("triton.experimental.gluon:constexpr_function", "What computes their layouts."),
        ("triton.experimental.gluon.language:NVMMASharedLayout", "Their tiles' layout."),
        (
            "triton.experimental.gluon.nvidia.hopper:TensorDescriptor",
            "Their descriptors, which have a layout.",
        ),
        ("triton.experimental.gluon.language.nvidia.hopper:warpgroup_mma", "Their products."),
        ("triton.experimental.gluon.language.nvidia.hopper:mbarrier", "How their warps wait."),
        (
            "triton.experimental.gluon.language.nvidia.hopper:fence_async_shared",
            "Lets products read what threads copied.",
        ),
        ("triton.experimental.gluon.language.nvidia.hopper:tma", "How tiles travel."),
        ("triton.experimental.gluon.language.nvidia.ampere:async_copy", "How rows are gathered."),
    )
]


def fast_paths() -> dict[str, str | None]:
    """Fast paths of an NVIDIA card, each with None or why this Triton lacks it. Needs no card."""
    return {
        "direct launches": _why_not_direct(),
        "TMA descriptors": _first_lost([_DESCRIPTOR]),
        "kernels in Gluon": _why_not_gluon(),
    }


def gluon_load() -> Any:
    """Gluon's function that brings a tile by TMA, which had another name before Triton 3.8."""
    tma = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper").tma
    return getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def gluon_store() -> Any:
    """Gluon's function that writes a tile by TMA, which had another name before Triton 3.8."""
    tma = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper").tma
    return getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def gluon_copy() -> Any:
    """Gluon's function that copies by pointers (cp.async), with another name before Triton 3.8."""
    copies = importlib.import_module("triton.experimental.gluon.language.nvidia.ampere").async_copy
    return getattr(copies, "async_load", None) or copies.async_copy_global_to_shared


def gluon_read_once() -> Any:
    """Gluon's policy of the L2 cache for tiles that TMA brings once: their lines are the first to
    go. None where TMA takes no policy, before Triton 3.9."""
    ampere = importlib.import_module("triton.experimental.gluon.language.nvidia.ampere")
    if "cache_policy" not in inspect.signature(gluon_load()).parameters:
        return None
    return ampere.CachePolicy(l2=ampere.FractionalEvictionPolicy("evict_first", 1.0))


def gluon_barrier() -> Any:
    """Gluon's function with which a warpgroup waits for itself, with another name before 3.7."""
    language = importlib.import_module("triton.experimental.gluon.language")
    return getattr(language, "barrier", None) or language.thread_barrier


@torch.compiler.assume_constant_result
def has_gluon() -> bool:
    """Whether kernels in Gluon can be compiled; warns once where they cannot."""
    reason = _why_not_gluon()
    if reason:
        warn_once(f"moe_patch: {reason}.")
    return reason is None


@functools.cache
def _why_not_gluon() -> str | None:
    version, reason = _version("triton"), _first_lost(_GLUON)
    oldest, newest = TESTED["triton"]
    if not oldest <= release(version) <= newest:  # Gluon is experimental
        reason = f"Triton {version} is not {TRITON}, so {_SLOWER}"
    return reason
