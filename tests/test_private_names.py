"""A private name that a newer version renames costs its feature and one sentence, nothing else."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from moe_patch import compat, notices

TESTS = Path(__file__).resolve().parent
NAMED = {name.path: name for name in compat.NAMES}


def last(name: compat.Name) -> str:
    """The attribute or word that a version may rename."""
    return re.split(r"[:.#]", name.path)[-1]


# Each name, looked up in the installed versions


def hidden(monkeypatch, *names: str) -> None:
    """compat.py finds none of these from here on."""

    def look(owner, name, *default):
        return None if name in names else builtins.getattr(owner, name, *default)

    monkeypatch.setattr(compat, "getattr", look, raising=False)


@pytest.mark.parametrize("path", NAMED)
def test_every_name_is_there_and_missed_when_it_is_not(path, monkeypatch):
    name = NAMED[path]
    if name.package == "deepspeed":
        pytest.importorskip("deepspeed")
    else:
        importlib.import_module(path.partition(":")[0])
    if name.needed() or name.package == "triton":
        assert name.find() is not None, f"{name.sentence()}: it was seen in {name.seen}"
        assert name.sentence() not in compat.lost()
    hidden(monkeypatch, last(name))
    assert name.find() is None
    assert (name.sentence() in compat.lost()) == name.needed()
    assert name.why.rstrip(".") and name.seen and not name.gone.endswith(".")
    assert last(name).removesuffix("()") in name.sentence()


def test_a_package_that_is_not_installed_has_lost_nothing(monkeypatch):
    name = compat.Name("no_such_package.inside:thing", "it is a test", "none", "nothing changes")
    monkeypatch.setattr(compat, "NAMES", [name])
    assert name.find() is None and compat.lost() == compat.lost(load=True) == []


# A patched block or model, with names gone

HOOKS = [f"{place}{name}" for place in ("", "_global") for name in compat.MODULE_HOOKS]
GROUPS = {
    "accumulation": {
        "names": [
            "_current_graph_task_id", "_will_engine_execute_node", "_post_accumulate_grad_hooks",
            "hooks_dict_ref",
        ]
    },
    "torch's state": {
        "names": [
            "_is_tracing", "_get_fp32_precision_getter", "_set_fp32_precision_setter",
            "_get_default_store", "_scaled_mm", *compat.MODULE_STATE,
        ],
        "ieee": True,
    },
    "hooks": {"names": HOOKS, "fused": "the activation SiLUActivation"},
    "views": {"names": ["_base", "_version"], "family": "llama4"},
    "Llama4's hooks": {
        "names": [*HOOKS, "_version"], "family": "llama4", "run": "inferred",
        "fused": "0 of 1",
    },
    "transforms": {
        "names": ["_are_functorch_transforms_active"], "run": "transformed", "fails": True
    },
    "forward-mode AD": {"names": ["_current_level"], "run": "under_forward_ad"},
    "batched gradients": {"names": ["_dispatch_keys"], "run": "batched"},
    "export": {"names": ["FakeTensor"], "run": "exported"},
    "the interpreter's shortcuts": {"names": ["_patch_lang", "_get_np_dtype", "rewrite"]},
    "the default gate": {"names": ["_default_apply_gate"], "fused": "gate not fused"},
    "gates": {"names": ["_apply_gate"], "fused": "0 of 1"},
    "interfaces": {
        "names": ["ExpertsInterface", "FP8ExpertsInterface", "FP8Experts"], "fused": "0 of 1"
    },
    "the dispatch's cell": {"names": ["experts_interface"], "fused": "0 of 1"},
    "the dispatch's field": {"names": ["_experts_implementation"], "fused": "0 of 1"},
    "choices": {
        "names": [
            "get_correct_experts_implementation", "_can_set_experts_implementation",
            "_from_config", "_experts_implementation_internal",
        ]
    },
    "quantised checkpoints": {
        "names": [
            "merge_quantization_configs", "distributed_config", "_weight_conversions",
            "_is_hf_initialized", "get_model_conversion_mapping",
        ]
    },
    "wrappers": {
        "names": [
            "_is_hooked", "original_forward", "_output_capturing_hooks_installed", "_old_init",
            "ds_shape", "_orig_mod", "_fsdp_wrapped_module", "_get_in_out_features",
            "_activate_lora", "_apply", "_check_merge_allowed", "_compiled_call_impl",
            "_gradient_checkpointing_func",
        ]
    },
    "offloading": {
        "names": ["_hf_hook", "_old_forward"], "run": "inferred", "around": "offloaded",
        "fused": "0 of 1",
    },
    "adapters": {
        "names": ["get_delta_factors", "_check_forward_args"], "around": "adapted",
        "fused": "adapters not fused",
    },
    "adapters' turns": {
        "names": ["_did_swap_in_out_features", "ParamWrapper"], "around": "adapted",
        "fused": "adapters not fused",
    },
}  # fmt: skip
LAUNCHES = {name.path for name in compat.NAMES if name.package == "triton"} | {
    "torch._C:_cuda_getDevice", "torch._C:_cuda_getCurrentRawStream",
}  # fmt: skip
"""A GPU needs most of them: below."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict]:
    arguments = [json.dumps(group) for group in GROUPS.values()]
    done = subprocess.run(
        [sys.executable, TESTS / "tools" / "without.py", *arguments],
        capture_output=True,
        text=True,
        timeout=550,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(lines) == len(GROUPS), done.stderr[-4000:]
    return dict(zip(GROUPS, lines))


@pytest.mark.parametrize("group", GROUPS)
def test_one_sentence_and_the_same_numbers(group, outcomes):
    found, asked = outcomes[group], GROUPS[group]
    said = "\n".join([*found["said"], found["report"]])
    gone = {name for name in compat.NAMES if last(name) in asked["names"]}
    assert {last(name) for name in gone} == set(asked["names"])
    assert {name.sentence() for name in gone} & set(found["sentences"])
    assert all(sentence in said for sentence in found["sentences"]), said
    assert len(found["said"]) == len(set(found["said"]))
    assert asked.get("fused", "fused 1 of 1 MoE blocks") in said, said
    actual, expected = found["results"]
    assert actual == (0 if asked.get("fails") else expected) and expected
    assert found["close"]


def test_no_name_is_left_out():
    hidden_somewhere = {name for group in GROUPS.values() for name in group["names"]}
    for path, name in NAMED.items():
        assert path in LAUNCHES or last(name) in hidden_somewhere, path


# What only a GPU would use


@pytest.fixture
def said(monkeypatch):
    """Sentences that were said inside."""
    sentences: list[str] = []
    monkeypatch.setattr(compat, "warn_once", sentences.append)
    compat._why_not_gluon.cache_clear()
    compat.tensor_descriptor.cache_clear()
    yield sentences
    compat._why_not_gluon.cache_clear()
    compat.tensor_descriptor.cache_clear()


@pytest.mark.parametrize("path", [name.path for name in (*compat._LAUNCH, compat._CALL)])
def test_without_the_launcher_triton_launches(path, monkeypatch, said):
    monkeypatch.setattr(compat, "_on_nvidia", lambda: True)
    assert compat.starts_directly() and not said
    hidden(monkeypatch, last(NAMED[path]))
    assert not compat.starts_directly()
    assert len(said) == 1 and "Triton's own launcher" in said[0] and last(NAMED[path]) in said[0]


LAUNCHERS = {
    "3.6": "gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    "global_scratch, profile_scratch, *args",
    "3.7": "gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    "kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, global_scratch, "
    "profile_scratch, self.arg_annotations, self.kernel_signature, args",
}
LAUNCHERS["3.8"] = LAUNCHERS["3.9"] = LAUNCHERS["3.7"].replace(" args", " kernel_args")


@pytest.mark.parametrize("version", LAUNCHERS)
def test_how_a_triton_launches_is_read(version):
    *settings, last = compat.convention(f"self.launch({LAUNCHERS[version]})")
    read = {"global_scratch", "profile_scratch", "launch_exit_hook", "self.launch_pdl"}
    assert read <= set(settings) and settings.index("self.launch_pdl") == 1
    assert last == ("*" if version == "3.6" else "()")


@pytest.mark.parametrize(
    "code",
    [
        LAUNCHERS["3.6"].replace("gridX, gridY", "gridY, gridX"),
        LAUNCHERS["3.6"].replace("*args", "args"),
        LAUNCHERS["3.7"].replace("kernel_metadata, ", ""),
        LAUNCHERS["3.7"].replace("self.launch_pdl", "self.launch_pdl, self.launch_cluster"),
        LAUNCHERS["3.7"].replace(" args", " *args"),
        LAUNCHERS["3.7"].replace(" args", " args=args"),
    ],
)
def test_a_launcher_that_nobody_knows_is_triton_s_to_call(code, monkeypatch, said):
    assert compat.convention(f"self.launch({code})") == ()
    assert compat.convention("self.launch(*a)\nself.launch(*a)") == ()
    monkeypatch.setattr(compat, "_on_nvidia", lambda: True)
    monkeypatch.setattr(compat, "_convention", lambda: compat.convention(f"self.launch({code})"))
    assert not compat.starts_directly()
    assert len(said) == 1 and "calls its launcher in another way" in said[0]
    assert said[0] in [f"moe_patch: {sentence}." for sentence in compat.lost(load=True)]


def test_another_triton_has_no_gluon_that_is_known(monkeypatch, said):
    monkeypatch.setattr(compat, "_on_nvidia", lambda: True)
    monkeypatch.setattr(compat, "_version", lambda package: "3.10.0")
    assert not compat.has_gluon()
    assert len(said) == 1 and "Triton 3.10.0 is not Triton 3.6 to 3.9" in said[0]
    assert said[0] in [f"moe_patch: {sentence}." for sentence in compat.lost(load=True)]


def test_a_launcher_of_another_make(monkeypatch, said):
    from moe_patch.kernels import launch

    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch, "cuda_device", lambda: 0)
    started = []

    class Kernel:
        params = ()

        def __getitem__(self, grid):
            return lambda *args, **more: started.append(grid) or SimpleNamespace(run=object())

    one = launch.Launch(Kernel())
    for _ in range(2):
        one((1,), torch.zeros(16))
    assert started == [(1,), (1,)] and launch.DIRECT is False
    assert len(said) == 1 and "AttributeError" in said[0]


@pytest.mark.parametrize("path", [name.path for name in compat._GLUON])
def test_without_gluon_triton_multiplies_fp8(path, monkeypatch, said):
    monkeypatch.setattr(compat, "_version", lambda package: "3.6.0")
    assert compat.has_gluon() and not said
    compat._why_not_gluon.cache_clear()
    hidden(monkeypatch, last(NAMED[path]))
    assert not compat.has_gluon() and len(said) == 1 and "slower than in Gluon" in said[0]


def test_without_descriptors_pointers_load(monkeypatch, said):
    assert compat.has_tensor_descriptor() and not said
    compat.tensor_descriptor.cache_clear()
    hidden(monkeypatch, "TensorDescriptor")
    assert not compat.has_tensor_descriptor() and "loaded by pointers" in said[0]


def test_without_knobs_the_environment_says_who_interprets(monkeypatch):
    hidden(monkeypatch, "knobs")
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert compat.interpreted() is expected


def test_streams_without_private_names(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7 + device)
    )
    assert compat._public_stream(1) == 8


def test_ranks_are_not_compared_without_a_store(monkeypatch, said):
    hidden(monkeypatch, "_get_default_store")
    assert compat.default_store() is None
    assert len(said) == 1 and "nothing checks that every rank" in said[0]


def test_a_block_is_not_copied_without_its_state(monkeypatch):
    hidden(monkeypatch, "_buffers")
    with pytest.raises(RuntimeError, match="has no torch.nn.Module._buffers, so check_parity"):
        compat.module_state(torch.nn.Linear(1, 1))


def test_a_family_that_lost_a_class_is_left(monkeypatch):
    from transformers.models.llama4 import modeling_llama4

    from moe_patch import models

    notices._warn_uncompiled.cache_clear()
    monkeypatch.delattr(modeling_llama4, "Llama4Router")
    monkeypatch.delitem(sys.modules, "moe_patch.models.llama4")
    before = dict(models.SWAPS)
    try:
        with pytest.warns(UserWarning, match="leaves llama4 to Hugging Face: .*Llama4Router"):
            exec(compile(Path(models.__file__).read_text(), "models", "exec"), vars(models))
    finally:
        models.SWAPS.update(before)
        notices._warn_uncompiled.cache_clear()


def test_tiles_that_are_read_once_have_a_policy_since_triton_3_9():
    policy = compat.gluon_read_once()
    assert (policy is not None) == (compat.release(triton.__version__) >= compat.release("3.9"))
    assert policy is None or policy.l2.primary == "evict_first"


# One place


def test_private_names_are_in_compat_alone():
    """Attributes and strings with an underscore that are not this package's own."""
    sources = [*(TESTS.parent / "moe_patch").rglob("*.py"), *(TESTS.parent / "models").glob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources}
    words = {last(name) for name in compat.NAMES if last(name).startswith("_")}
    own = {"_replace", "_fields"}  # of named tuples
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            of_self = getattr(getattr(node, "value", None), "id", "") == "self"
            own.add(getattr(node, "id", "") or (of_self and getattr(node, "attr", "")))
    for path, tree in trees.items():
        if path.name == "compat.py":
            continue
        for node in ast.walk(tree):
            found = getattr(node, "attr", "") if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = node.value if node.value in words else ""
            private = re.match(r"_[a-zA-Z]", found) and (found in words or found not in own)
            where = f"{path.relative_to(TESTS.parent)}:{getattr(node, 'lineno', 0)}"
            assert not private, f"{where} leans on {found}: give it an entry in compat.py"
