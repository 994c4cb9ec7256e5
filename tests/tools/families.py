"""The MoE families of the installed transformers, and a tiny model of each."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import torch
import transformers
from small import MORE, shrink
from tiny import TINY
from torch import nn
from transformers import (
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)

MOE = {"intermediate_size": 32, "moe_intermediate_size": 32}
CONFIGS = {  # families that nothing but the decorator describes
    "mixtral": lambda: MixtralConfig(**TINY | MOE, num_local_experts=8),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **TINY | MOE, num_experts=8, shared_expert_intermediate_size=32
    ),
    "olmoe": lambda: OlmoeConfig(**TINY | MOE, num_experts=8),
    "deepseek_v3": lambda: DeepseekV3Config(
        **TINY | MOE | {"num_key_value_heads": 2, "head_dim": 16},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}
UNFUSED: dict[str, str] = {}  # switched, but not of a form that kernels compute
NARROW = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}  # half the time
WIDE = {"ernie4_5_vl_moe", "glm4v_moe", "granitemoehybrid"}  # whose heads follow from the width


def decorated_classes() -> list[tuple[str, str]]:
    """(module, class) of every use of the decorator in this transformers."""
    root = Path(transformers.__file__).parent
    return [
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path in sorted(root.glob("models/*/modeling_*.py"))
        for name in re.findall(
            r"^@use_experts_implementation.*\n(?:[^\n]*\n)*?class (\w+)",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]


FAMILIES = {"step3p7": "transformers.models.step3p7.modeling_step3p7"}
for module, _ in decorated_classes():
    FAMILIES.setdefault(module.split(".")[2], module)


def build(family, device, module=None, **more):
    """The smallest model of the family, on any part of which its experts run."""
    module = importlib.import_module(module or FAMILIES[family])
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    classes = [
        c for c in classes if issubclass(c, PreTrainedModel) and c.__module__ == module.__name__
    ]
    ends = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration")
    classes = [c for c in classes if c.__name__.endswith(ends) and "PreTrained" not in c.__name__]
    classes.sort(key=lambda c: next(i for i, end in enumerate(ends) if c.__name__.endswith(end)))
    cls = next(c for c in classes if not any(w in c.__name__ for w in ("Vision", "Audio", "MTP")))
    torch.manual_seed(0)
    sizes = ({} if family in WIDE else NARROW) | MORE.get(family, {}) | more
    model = cls(shrink(cls.config_class(), sizes)).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.1)
    return model
