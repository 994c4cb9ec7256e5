"""The quantizer that transformers calls: before weights are loaded, for each of them, and after."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import ConversionOps, PreTrainedModel
from transformers.quantizers import HfQuantizer, auto
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from ..compat import CONVERSIONS, DISTRIBUTED, LOADED, MERGE, model_conversions
from ..formats.packed import Packed, check_packed, empty_packed
from ..patcher import SUPPORTED, find_blocks
from ..recognise import routers
from ..recognise.four_bits import FourBits, dequantise_module, is_four_bits, quantise_module
from ..recognise.lending import is_adapter
from ..recognise.parts import stored_transposed, up_name
from ..recognise.wrapped import is_dtensor
from . import conversions
from .config import METHOD, ExpertsQuantConfig

_GATE = re.compile(r"(gate|router)$")
"""Names of linear layers that choose or weigh experts."""


class ExpertsQuantizer(HfQuantizer):
    """Quantises experts as they load, loads those that are quantised, and saves them.

    `linear` is Hugging Face's quantizer of bitsandbytes, for linear layers; None without.
    """

    requires_calibration = False
    quantization_config: ExpertsQuantConfig

    def __init__(self, quantization_config: ExpertsQuantConfig, **kwargs: Any) -> None:
        self.pre_quantized: bool
        super().__init__(quantization_config.resolved(), **kwargs)
        config = self.quantization_config
        self.stacks: dict[str, bool] = {}
        """Names of the stacks of experts -> whether the family stores them [E, K, N]."""
        self.shapes: dict[str, torch.Size] = {}
        """Names of the tensors that they are loaded into -> their shapes."""
        self.refusals: list[Exception] = []
        """Why weights were not converted."""
        self.quantises = not self.pre_quantized
        if config.linear_is_new:  # a checkpoint is quantised or not: this one is not yet
            self.pre_quantized = False
        self.linear = None
        if config.linear is not None:
            linear = copy.deepcopy(config.linear)
            self.linear = Bnb4BitHfQuantizer(linear, pre_quantized=self.pre_quantized)

    # before anything is loaded

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be loaded, in one sentence.

        Raises:
            ImportError: `linear` without bitsandbytes.
            ValueError: weights that are to stay on disk.
        """
        _need_memory(kwargs.get("device_map"))
        if self.linear is not None:
            if importlib.util.find_spec("bitsandbytes") is None:
                raise ImportError(
                    "linear= quantises linear layers by bitsandbytes, which is not installed: pip "
                    "install bitsandbytes, or leave linear out."
                )
            self.linear.validate_environment(*args, **kwargs)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the model."""
        return dtype if self.linear is None else self.linear.update_dtype(dtype)

    def update_device_map(self, device_map: Any) -> Any:
        """Return where the model goes."""
        return device_map if self.linear is None else self.linear.update_device_map(device_map)

    def adjust_max_memory(self, max_memory: Any) -> Any:
        """Return the memory that weights may take."""
        return max_memory if self.linear is None else self.linear.adjust_max_memory(max_memory)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if getattr(model.config, DISTRIBUTED, None) is not None:
            raise ValueError(
                "a plan distributes the model, and 4-bit experts cannot be sharded: load them on "
                "each device without tp_plan and distributed_config."
            )
        self._process_experts(model)
        if self.linear is not None:
            config = self.linear.quantization_config
            if config.llm_int8_skip_modules is None:
                config.llm_int8_skip_modules = self.get_modules_to_not_convert(model)
                config.llm_int8_skip_modules += _routers(model)
            self.quantization_config.linear = config
            self.linear._process_model_before_weight_loading(model, **kwargs)

    def _process_experts(self, model: nn.Module) -> None:
        """Give experts their 4-bit form, whose tensors are still to be loaded.

        Raises:
            ValueError: no experts, or sizes that groups do not divide.
        """
        config = self.quantization_config
        for name, experts in stacked_experts(model):
            if _is_in(name, config.skip):
                continue
            names = [join(name, which) for which in (up_name(experts), "down_proj")]
            weights = [model.get_parameter(each) for each in names]
            transposed = stored_transposed(experts)
            try:
                packed = [self._empty(weight.mT if transposed else weight) for weight in weights]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            quantise_module(experts, *packed)
            for which, weight, stack in zip(names, weights, packed):
                self.stacks[which] = transposed
                for each, tensor in conversions.named(which, stack).items():
                    self.shapes[each] = tensor.shape
                if self.quantises:  # loaded as the family stores it, and quantised then
                    setattr(experts, which.rpartition(".")[2], weight)
            # nothing is initialised: what is missing is refused after loading
            setattr(experts, LOADED, True)
        if not self.stacks:
            raise ValueError(
                f"{type(model).__name__} has no experts that can be in 4 bits: supported are "
                f"{SUPPORTED}; load it without ExpertsQuantConfig."
            )

    def _empty(self, weight: torch.Tensor) -> Packed:
        config = self.quantization_config
        return empty_packed(
            weight.shape,
            config.format,
            config.group,
            scale_dtype=config.scale_dtype,
            zeros=config.zeros,
            device=weight.device,
        )

    # for each weight

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight is quantised as it is loaded, or was: its shape is checked here then."""
        if param_name in self.shapes:
            return self.quantises or self.pre_quantized
        return self.linear is not None and self.linear.param_needs_quantization(model, param_name)

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes that an element of a weight will take."""
        if param_name in self.stacks:
            return 0.5 if param.is_floating_point() else param.element_size()
        if self.linear is not None:
            return self.linear.param_element_size(model, param_name, param)
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the step that quantises a weight."""
        others = None if self.linear is None else self.linear.get_quantize_ops()
        return conversions.QuantizeStacks(
            self.refusals, self.quantization_config, self.stacks, others
        )

    def get_new_dtype(
        self, converter: Any, param: Any, dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """Return the dtype that a tensor of the checkpoint is read in; None: its own."""
        if conversions.is_own(converter):
            return None
        parent: Any = super() if self.linear is None else self.linear
        return parent.get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Return how tensors of the checkpoint become tensors of the model."""
        layout = self.quantization_config.layout
        if layout is not None:
            weight_conversions = conversions.keeping(
                weight_conversions, layout, self.stacks, self.refusals
            )
        elif not self.quantises:
            weight_conversions = conversions.without(weight_conversions, self.stacks)
        if self.linear is not None:
            return self.linear.update_weight_conversions(weight_conversions, *model)
        return weight_conversions

    # after everything is loaded

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        if self.refusals:
            raise self.refusals[0]
        _need_memory(getattr(model, "hf_device_map", None))
        for name, shape in self.shapes.items():
            stored = model.get_parameter(name)
            if not getattr(stored, LOADED, False):
                raise ValueError(f"the checkpoint has no {name}: load one that is whole.")
            if stored.shape != shape:
                raise ValueError(
                    f"the checkpoint makes {name} {list(stored.shape)}, and the model with its "
                    f"quantization_config needs {list(shape)}: load one that is whole."
                )
            stored.requires_grad_(False)
        self._take_scale_dtype(model)
        if self.linear is not None:
            self.linear._process_model_after_weight_loading(model, **kwargs)
        return model

    def _take_scale_dtype(self, model: nn.Module) -> None:
        """Have the config name the dtype of the scales, which other libraries' configs do not."""
        found = {}
        for name, experts in stacked_experts(model):
            for packed in _packed(experts) if is_four_bits(experts) else ():
                check_packed(name, packed)
                found[packed.scales.dtype] = name
        if len(found) > 1:
            scales = " and ".join(f"{dtype} in {name}" for dtype, name in found.items())
            raise ValueError(f"scales are {scales}: one dtype is needed, convert the checkpoint.")
        (self.quantization_config.scale_dtype,) = found

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, Any]]:
        """Have `save_pretrained` write stacks as stacks: they are not split to experts again."""
        reversed_ones = getattr(model, CONVERSIONS, None)
        if reversed_ones is None:
            reversed_ones = model_conversions(model)
        setattr(model, CONVERSIONS, conversions.without(reversed_ones, self.stacks))
        return None, {}

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> Any:
        """Has experts, and linear layers, in `dtype`: what `model.dequantize()` calls.

        Raises:
            ValueError: adapters on the experts, which stand on their 4-bit form, or codes that are
                offloaded or spread over ranks. Nothing is changed.
        """
        if any(map(is_adapter, model.modules())):
            raise ValueError(
                f"PEFT has put adapters on experts of {type(model).__name__}: save them, call "
                "dequantize() of the model without them, and load them then."
            )
        four_bits = [experts for _, experts in stacked_experts(model) if is_four_bits(experts)]
        if any(t.is_meta or is_dtensor(t) for experts in four_bits for t in experts.stored()):
            raise ValueError(
                f"experts of {type(model).__name__} are offloaded or spread over ranks: dequantize "
                "the model before that."
            )
        if isinstance(dtype, str):  # as a config may have it
            dtype = getattr(torch, dtype)
        for experts in four_bits:
            dequantise_module(experts, dtype or experts.weight_dtype)
        vars(model).pop(CONVERSIONS, None)
        return model if self.linear is None else self.linear._dequantize(model, dtype=dtype)

    def is_serializable(self) -> bool:
        """Whether the model can be saved."""
        return self.linear is None or self.linear.is_serializable()

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on the model can be trained."""
        return True


def stacked_experts(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of the stacked weights in MoE blocks that `patch` knows."""
    return [
        (name, module)
        for block in find_blocks(model)
        if block.is_known()
        for name, module in block.module.named_modules(prefix=block.name)
        if isinstance(getattr(module, up_name(module), None), torch.Tensor)
        and isinstance(getattr(module, "down_proj", None), torch.Tensor)
    ]


def models_with_experts(module: nn.Module) -> list[PreTrainedModel]:
    """Return the models of transformers in a module that are not a part of another one."""
    found: dict[str, PreTrainedModel] = {}
    for name, model in module.named_modules():
        inside = any(f"{name}.".startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(model, PreTrainedModel) and not inside and stacked_experts(model):
            found[name] = model
    return list(found.values())


def why_not_attach(model: nn.Module, config: ExpertsQuantConfig) -> str | None:
    """None when `attach` will take the model with this config, else the reason."""
    found = getattr(model, "hf_quantizer", None)
    if found is not None and not isinstance(found, ExpertsQuantizer | Bnb4BitHfQuantizer):
        return (
            f"{type(model).__name__} is quantised by {type(found).__name__}, which cannot save "
            "4-bit experts: load it in 16 bits, or with ExpertsQuantConfig"
        )
    kinds = {(p.format, p.group, p.zeros is not None) for p in _all_packed(model)}
    if kinds - {(config.format, config.group, config.zeros)}:
        return (
            "some experts are in 4 bits of another kind, and a model is saved with one: load it "
            "again and quantise it as a whole"
        )
    return None


def attach(model: PreTrainedModel, config: ExpertsQuantConfig) -> None:
    """Have transformers know a model whose experts are in 4 bits: it saves, loads and trains them.

    Raises:
        ValueError: see `why_not_attach`.
    """
    if reason := why_not_attach(model, config):
        raise ValueError(f"{reason}.")
    found = getattr(model, "hf_quantizer", None)
    linear = found if isinstance(found, Bnb4BitHfQuantizer) else getattr(found, "linear", None)
    quantizer = ExpertsQuantizer(config, pre_quantized=True)
    for name, experts in stacked_experts(model):
        if not is_four_bits(experts):
            quantizer.quantization_config.skip.append(name)
            continue
        for which in (up_name(experts), "down_proj"):
            quantizer.stacks[join(name, which)] = stored_transposed(experts)
    if linear is not None:
        quantizer.linear, quantizer.quantization_config.linear = linear, linear.quantization_config
        linear.quantization_config.llm_int8_skip_modules = linear.modules_to_not_convert
    model.is_quantized, model.quantization_method = True, METHOD
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def _packed(experts: FourBits) -> list[Packed]:
    """Both stacks of experts."""
    return [experts.packed(which) for which in (up_name(experts), "down_proj")]


def _all_packed(model: nn.Module) -> list[Packed]:
    found = (m for _, m in stacked_experts(model) if is_four_bits(m))
    return [packed for experts in found for packed in _packed(experts)]


def _is_in(name: str, names: Sequence[str]) -> bool:
    """Whether a module is named, by the name that it has in this model or in one around it."""
    return any(f".{a}".endswith(f".{b}") for n in names for a, b in ((n, name), (name, n)))


def join(name: str, which: str) -> str:
    """Return the name in the model of a module's tensor."""
    return f"{name}.{which}" if name else which


def _routers(model: nn.Module) -> list[str]:
    """Names of linear layers that choose or weigh experts, or are a part of what does."""
    chosen = tuple(f"{n}." for n, module in model.named_modules() if routers.is_router(n, module))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (f"{name}.".startswith(chosen) or _GATE.search(name))
    ]


def _need_memory(device_map: Any) -> None:
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            "the device_map leaves weights on disk, which 4-bit experts do not support: give it "
            "devices and cpu alone."
        )


def register() -> None:
    """Have `from_pretrained` know `ExpertsQuantConfig`, and take it for checkpoints of others."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    register_quantization_config(METHOD)(ExpertsQuantConfig)
    register_quantizer(METHOD)(ExpertsQuantizer)
    merge = MERGE.find()
    if merge is not None and not hasattr(merge, "moe_patch_original"):
        MERGE.put(_merging(merge))


def _merging(original: Callable[..., Any]) -> Any:
    """Transformers' merge of the checkpoint's config and ours, which keeps what can be kept."""

    @functools.wraps(original)
    def merge(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        asked = quantization_config_from_args
        if not isinstance(asked, ExpertsQuantConfig):
            return original(quantization_config, asked)
        found = quantization_config
        return asked.keeping(found if isinstance(found, dict) else found.to_dict())

    vars(merge)["moe_patch_original"] = original
    return classmethod(merge)
