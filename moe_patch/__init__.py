"""Fused Triton MoE blocks for Hugging Face transformers, one line to put in and one to take out.

model.patch()                        # or moe_patch.patch(any_module)
print(moe_patch.check_parity(model))
model.unpatch()
"""

from pathlib import Path

from .starting import guard
from .version import __version__

guard()

import transformers  # noqa: E402

_version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if not (5, 17) <= _version < (6, 0):
    raise ImportError(
        f"moe_patch works with transformers 5.17 to 5.x, and {transformers.__version__} is too "
        f"{'old' if _version < (5, 17) else 'new'}, so nothing is patched: "
        "pip install 'transformers>=5.17,<6'."
    )

if not (Path(__file__).parent / "models").is_dir():
    __path__.append(str(Path(__file__).parents[1]))  # a checkout keeps models/ beside the package

from . import fp8  # noqa: E402
from .ops import fused_experts  # noqa: E402
from .parity import check_parity  # noqa: E402
from .patcher import patch, unpatch  # noqa: E402
from .pretrained import disable, enable, enabled, register  # noqa: E402
from .quantise import quantize_experts  # noqa: E402
from .quantizer.config import ExpertsQuantConfig  # noqa: E402
from .routing.load import expert_load  # noqa: E402
from .routing.record import record_routing  # noqa: E402
from .routing.recorded import Routing  # noqa: E402
from .routing.replay import replay_routing  # noqa: E402

__all__ = [
    "ExpertsQuantConfig",
    "Routing",
    "__version__",
    "check_parity",
    "disable",
    "enable",
    "enabled",
    "expert_load",
    "fp8",
    "fused_experts",
    "patch",
    "quantize_experts",
    "record_routing",
    "replay_routing",
    "unpatch",
]

register()
