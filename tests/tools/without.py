"""Runs a patched model where private names are gone: `python tests/tools/without.py GROUP ...`.

Each group of names is hidden from moe_patch/compat.py alone, as if this version had renamed them,
in a process of its own, forked once torch and transformers are imported. A line of JSON a group
says what moe_patch said, and how far the results are from Hugging Face's.
"""

from __future__ import annotations

import builtins
import copy
import json
import os
import sys
import warnings
from importlib.machinery import PathFinder

os.environ |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import peft
import torch
from accelerate import cpu_offload
from torch import nn
from torch.autograd import forward_ad
from transformers import Llama4TextConfig, Qwen3MoeConfig
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen3_moe import modeling_qwen3_moe

torch.set_num_threads(1)
SIZES = {"hidden_size": 32, "num_experts_per_tok": 2}


def block(family: str, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama4":
        config = Llama4TextConfig(**SIZES, intermediate_size=16, num_local_experts=4)
        made = modeling_llama4.Llama4TextMoe(config)
    else:
        config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4)
        config._experts_implementation = implementation
        made = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made.eval()


def hide(names: list[str]) -> None:
    """Has compat.py find none of these attributes and words."""

    def hidden(owner, name, *default):
        return None if name in names else builtins.getattr(owner, name, *default)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            spec = PathFinder.find_spec(name, path) if name == "moe_patch.compat" else None
            if spec is not None:
                run = spec.loader.exec_module

                def exec_module(module):
                    module.getattr = hidden
                    run(module)
                    for constant, value in vars(module).items():  # others have renamed it
                        if constant.isupper() and value in names and isinstance(value, str):
                            setattr(module, constant, f"renamed{value}")

                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)


def trained(module, x):
    x = x.clone().requires_grad_()
    for _ in range(2):  # the second time onto what is there
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
        out.float().square().sum().backward()
    wanted = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return [out, x.grad, *(wanted[name] for name in sorted(wanted))]


def under_forward_ad(module, x):
    with torch.no_grad(), forward_ad.dual_level():
        out = module(forward_ad.make_dual(x, x.cos()))
        return list(forward_ad.unpack_dual(out))


def batched(module, x):
    x = x.clone().requires_grad_()
    out = module(x)
    return list(torch.autograd.grad(out, x, torch.stack([x, x.sin()]), is_grads_batched=True))


def inferred(module, x):
    with torch.no_grad():
        out = module(x)
        return [out[0] if isinstance(out, tuple) else out]


def exported(module, x):
    return [torch.export.export(module, (x,)).module()(x)]


def adapted(module, x):
    torch.manual_seed(1)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=names, init_lora_weights=False
    )
    return peft.inject_adapter_in_model(config, module)


def transformed(module, x):
    try:
        return [torch.func.grad(lambda x: module(x).square().sum())(x)]
    except RuntimeError as error:  # torch's own
        print(error, file=sys.stderr)
        return []


def offloaded(module, x):
    cpu_offload(module, execution_device="cpu")
    return module


def close(actual, expected):
    return bool(torch.allclose(actual, expected, rtol=1e-4, atol=1e-5))


def main() -> None:
    for argument in sys.argv[1:]:
        group = json.loads(argument)
        family, run = group.get("family", "qwen3_moe"), globals()[group.get("run", "trained")]
        around = globals().get(group.get("around", ""))
        plain = block(family, "batched_mm" if run is exported else "eager")
        ours = copy.deepcopy(plain)
        x = torch.randn(1, 5, 32, generator=torch.manual_seed(2))
        if around:
            plain, ours = around(plain, x), around(ours, x)
        expected = run(plain, x)
        sys.stdout.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        hide(group["names"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import moe_patch
            from moe_patch import compat

            report = moe_patch.patch(ours, strict=False)
            actual = run(ours, x)
            kept = moe_patch.precision.ieee_products() if group.get("ieee") else None
            if kept is not None:
                with kept:
                    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            with moe_patch.enabled():
                pass
            moe_patch.unpatch(ours)
            again = expected if run is trained else run(ours, x)  # which adds to gradients
        found = {
            "results": [len(actual), len(expected)],
            "close": all(map(close, actual, expected)) and all(map(close, again, expected)),
            "said": [str(each.message) for each in caught if "moe_patch" in str(each.message)],
            "sentences": compat.lost(),
            "report": str(report),
        }
        print(json.dumps(found), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
