"""With other packages that change the same model: docs/with_other_libraries.md.

A package that registers in `ExpertsInterface`, Liger's kernels, TRL's GRPO, DeepSpeed under the
Trainer, torch.compile around a model, transformers' continuous batching. SFTTrainer, adapters alone
and generation are in tests/stack.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import MethodType
from unittest import mock

import numpy
import pytest
import torch
from lora import adapters
from peft import get_peft_model
from tiny import assert_close, both_families, tiny_config, tiny_model, tokenizer, tokens, train_step
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import moe as hf_moe
from transformers.integrations.liger import apply_liger_kernel
from transformers.integrations.moe import ExpertsInterface
from transformers.models.llama4 import modeling_llama4 as hf_llama4
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf_qwen3

import moe_patch
from moe_patch import pretrained, switch

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")
TOOLS = Path(__file__).resolve().parent / "tools"
OURS, THEIRS = "moe_patch", "their_experts"


def small(device, family="qwen3_moe", **changes):
    return tiny_model(family, device, num_hidden_layers=1, **changes)


def experts_of(model):
    return model.model.layers[0].mlp.experts


# Packages that register in ExpertsInterface


class Package:
    """Another package: `forward` is its implementation, `calls` grows when that runs."""

    def __init__(self):
        self.calls = []

    def forward(self):
        def their_forward(experts, hidden_states, top_k_index, top_k_weights):
            """Every expert for every token, then those that were chosen."""
            self.calls.append(type(experts).__name__)
            up = torch.einsum("th,eoh->teo", hidden_states, experts.gate_up_proj)  # [T, E, 2I]
            gate, up = up.chunk(2, dim=-1)
            out = torch.einsum("tei,ehi->teh", nn.functional.silu(gate) * up, experts.down_proj)
            index = top_k_index.long()[..., None].expand(-1, -1, out.shape[-1])  # [T, K, H]
            return (out.gather(1, index) * top_k_weights[..., None]).sum(1)

        return their_forward


@pytest.fixture
def package(monkeypatch):
    """Registered as "their_experts", after us; transformers' registry is restored afterwards."""
    found = Package()
    before = dict(ExpertsInterface._global_mapping)
    ExpertsInterface.register(THEIRS, found.forward())
    yield found
    hf_moe.ALL_EXPERTS_FUNCTIONS._local_mapping.clear()
    ExpertsInterface._global_mapping.clear()
    ExpertsInterface._global_mapping.update(before)


@pytest.fixture
def who(package, fused_calls, device):
    """Says whose experts a model of one layer runs; its logits must be Hugging Face's."""
    with torch.no_grad():
        expected = small(device)(tokens(device)).logits

    def run(model):
        package.calls.clear()
        fused_calls.clear()
        with torch.no_grad():
            assert_close(model(tokens(device)).logits, expected)
        assert len(fused_calls) + len(package.calls) <= 1
        return OURS if fused_calls else THEIRS if package.calls else "transformers"

    return run


@pytest.mark.parametrize("when", ["before", "after", "loaded"])
def test_patch_wins_over_a_chosen_name_until_unpatch(when, who, device):
    model = small(device)
    if when == "loaded":
        config = tiny_config("qwen3_moe", num_hidden_layers=1)
        loaded = AutoModelForCausalLM.from_config(config, experts_implementation=THEIRS)
        loaded.load_state_dict(model.state_dict())
        model = loaded.to(device).eval()
    if when == "before":
        model.set_experts_implementation(THEIRS)
    if when != "after":
        assert who(model) == THEIRS
    assert len(model.patch().fused) == 1
    if when == "after":
        model.set_experts_implementation(THEIRS)
    assert model.config._experts_implementation == THEIRS
    assert who(model) == OURS
    model.unpatch()
    assert who(model) == THEIRS


def test_loading_hook_wins_over_a_chosen_name(who, device):
    config = tiny_config("qwen3_moe", num_hidden_layers=1)
    with moe_patch.enabled():
        model = AutoModelForCausalLM.from_config(config, experts_implementation=THEIRS)
    model.load_state_dict(small(device).state_dict())
    model = model.to(device).eval()
    assert who(model) == OURS
    model.unpatch()
    assert who(model) == THEIRS


def test_last_name_wins_where_nothing_is_patched(who, device):
    model = small(device)
    for name in (OURS, THEIRS, OURS):
        model.set_experts_implementation(name)
        assert who(model) == name


def test_patch_over_our_own_name_leaves_the_later_choice(who, device):
    model = small(device)
    model.set_experts_implementation(OURS)
    model.patch()
    model.set_experts_implementation(THEIRS)
    assert who(model) == OURS
    model.unpatch()
    assert who(model) == THEIRS


def test_chosen_name_runs_where_the_kernels_are_off(who, device, monkeypatch):
    model = small(device)
    model.set_experts_implementation(THEIRS)
    model.patch()
    monkeypatch.setattr(switch, "ENABLED", False)  # MOE_PATCH=0
    assert who(model) == THEIRS
    model.unpatch()
    assert who(model) == THEIRS


def test_order_of_registration_does_not_matter(package, who, device):
    names = ExpertsInterface._global_mapping
    for first, second in ((OURS, THEIRS), (THEIRS, OURS)):
        for name in (OURS, THEIRS):
            del names[name]
        for name in (first, second):
            if name == OURS:
                pretrained.register()  # as `import moe_patch` does
            else:
                ExpertsInterface.register(THEIRS, package.forward())
        model = small(device)
        model.set_experts_implementation(THEIRS)
        assert who(model) == THEIRS
        model.patch()
        assert who(model) == OURS


# ... under our name


@pytest.mark.parametrize("where", ["register", "instance"])
def test_our_name_taken_before_patch_is_reported(where, package, who, device):
    if where == "register":
        ExpertsInterface.register(OURS, package.forward())
    else:
        hf_moe.ALL_EXPERTS_FUNCTIONS[OURS] = package.forward()
    model = small(device)
    report = model.patch()
    assert not report.fused and not report.routers
    (reason,) = [reason for _, _, reason in report.skipped]
    assert 'their_forward was registered as "moe_patch" in ExpertsInterface' in reason
    assert who(model) == "transformers"
    if where == "register":
        pretrained.register()
    else:
        del hf_moe.ALL_EXPERTS_FUNCTIONS[OURS]
    assert len(model.patch().fused) == 1
    assert who(model) == OURS


def test_our_name_taken_after_patch_runs_theirs(package, who, device):
    model = small(device)
    model.patch()
    ExpertsInterface.register(OURS, package.forward())
    assert who(model) == THEIRS
    assert 'registered as "moe_patch"' in str(model.patch())
    model.unpatch()
    assert who(model) == "transformers"


def test_our_name_taken_before_import_is_ours_again(package, who, device):
    ExpertsInterface.register(OURS, package.forward())
    pretrained.register()  # as `import moe_patch` does
    model = small(device)
    assert len(model.patch().fused) == 1
    assert who(model) == OURS


# ... in an interface of their own


def test_experts_that_look_names_up_elsewhere(package, who, device):
    """A package may decorate a class with an interface that does not share transformers' names."""

    class TheirInterface(ExpertsInterface):
        _global_mapping = {THEIRS: package.forward()}

    class TheirExperts(nn.Module):
        def __init__(self, like):
            super().__init__()
            self.gate_up_proj, self.down_proj = like.gate_up_proj, like.down_proj
            self.num_experts, self.act_fn = like.num_experts, like.act_fn

        forward = inspect.unwrap(hf_qwen3.Qwen3MoeExperts.forward)

    init = TheirExperts.__init__
    TheirExperts.__init__ = lambda self, config, like: init(self, like)
    decorated = hf_moe.use_experts_implementation(TheirExperts, experts_interface=TheirInterface())
    model = small(device)
    model.set_experts_implementation(THEIRS)
    model.model.layers[0].mlp.experts = decorated(model.config, experts_of(model))
    assert who(model) == THEIRS
    assert len(model.patch().fused) == 1
    assert who(model) == OURS
    model.unpatch()
    assert who(model) == THEIRS


# ... by a forward of their own


@pytest.mark.parametrize("where", ["instance", "class"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_replaced_forward_wins(where, when, package, who, device, monkeypatch):
    model = small(device)

    def replace():
        if where == "instance":
            experts_of(model).forward = MethodType(package.forward(), experts_of(model))
        else:
            monkeypatch.setattr(hf_qwen3.Qwen3MoeExperts, "forward", package.forward())

    if when == "before":
        replace()
        report = model.patch(strict=False)
        assert not report.fused and "was replaced on the " + where in report.skipped[0][2]
    else:
        model.patch()
        assert who(model) == OURS
        replace()
    assert who(model) == THEIRS
    model.unpatch()
    assert who(model) == THEIRS


# Liger's other kernels

ADAPTED_ORDERS = ["liger peft patch", "peft liger patch", "peft patch liger", "patch liger peft"]


@pytest.fixture
def liger(monkeypatch, device):
    """liger_kernel.transformers; what it replaces in transformers is put back afterwards."""
    found = pytest.importorskip("liger_kernel.transformers")
    if device.type == "cpu":
        run_in_the_interpreter(monkeypatch)
    for cls in (hf_qwen3.Qwen3MoeForCausalLM, hf_llama4.Llama4ForCausalLM):
        monkeypatch.setattr(cls, "forward", cls.forward)
    with mock.patch.dict(vars(hf_qwen3)), mock.patch.dict(vars(hf_llama4)):
        yield found


def run_in_the_interpreter(monkeypatch):
    """Gives Liger's kernels the two things that Triton's interpreter lacks on a CPU: floats with a
    dtype, as the compiler passes them, and libdevice's rsqrt."""
    language = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._implicit_cvt

    def converted(value):
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(numpy.array([value], numpy.float32), language.float32)
        return language.tensor(handle, language.float32)

    def rsqrt(x):
        return language.rsqrt(x, _semantic=interpreter.interpreter_semantic)

    norm = importlib.import_module("liger_kernel.ops.rms_norm")
    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(norm, "rsqrt", rsqrt)


def apply_to(liger, family, model=None, **options):
    getattr(liger, f"apply_liger_kernel_to_{family}")(model=model, **options)


def assert_same_loss_and_gradients(actual, expected):
    """Liger's fused loss returns no logits."""
    assert actual[0].logits is None and "Liger" in type(actual[0].loss.grad_fn).__name__
    assert_close(actual[0].loss, expected[0].loss)
    trained = {name for name, grad in expected[1].items() if grad is not None}
    assert trained == {name for name, grad in actual[1].items() if grad is not None}
    for name in trained:
        assert_close(actual[1][name], expected[1][name])


@both_families
@pytest.mark.parametrize("order", ["liger, patch", "patch, liger", "liger on the classes, patch"])
def test_liger_s_other_kernels_in_either_order(family, order, liger, device, fused_calls):
    """RoPE, RMSNorm, the loss fused with the head; Llama4's shared expert, too."""
    plain = small(device, family).train()
    expected = train_step(plain, tokens(device))
    options = {} if family == "llama4" else {"swiglu": False}
    if "classes" in order:
        apply_to(liger, family, **options)
        model = small(device, family).train()
        assert type(model.model.norm) is liger.LigerRMSNorm
    else:
        model = copy.deepcopy(plain)
    for step in order.split(", "):
        if step == "patch":
            assert len(model.patch().fused) == 1
        elif step == "liger":
            apply_to(liger, family, model, **options)
            assert model.model.norm.forward.__func__ is liger.LigerRMSNorm.forward
    assert_same_loss_and_gradients(train_step(model, tokens(device)), expected)
    assert len(fused_calls) == 1
    model.unpatch()
    assert_same_loss_and_gradients(train_step(model, tokens(device)), expected)
    assert len(fused_calls) == 1


@pytest.mark.parametrize("order", ["liger, patch", "patch, liger", "liger on the classes, patch"])
def test_liger_s_experts_win_where_they_are_asked_for(order, liger, device, who, package):
    """`swiglu=True`, its default, replaces Qwen3-MoE's experts. Theirs stand in for its kernel."""
    swiglu = importlib.import_module("liger_kernel.transformers.swiglu")
    options = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}
    with mock.patch.object(swiglu.LigerExperts, "forward", package.forward()):
        if "classes" in order:
            state = small(device).state_dict()
            apply_to(liger, "qwen3_moe", **options)
            model = small(device)
            model.load_state_dict(state)
            reason = "LigerExperts is not a class that moe_patch knows"
        else:
            model = small(device)
            reason = "the experts' forward was replaced on the instance"
        for step in order.split(", "):
            if step == "liger":
                apply_to(liger, "qwen3_moe", model, **options)
            elif step == "patch":
                report = model.patch(strict=False)
        assert len(report.fused) == (order == "patch, liger")
        assert who(model) == THEIRS
        assert reason in str(model.patch(strict=False))


@pytest.mark.parametrize("order", ADAPTED_ORDERS)
def test_liger_and_adapters_in_any_order(order, liger, device, fused_calls):
    def adapted(model):
        return get_peft_model(model, adapters("qwen3_moe", target_modules=["q_proj"]))

    plain = small(device).train()
    expected = train_step(adapted(copy.deepcopy(plain)), tokens(device))
    model = base = copy.deepcopy(plain)
    for step in order.split():
        if step == "liger":
            apply_to(liger, "qwen3_moe", base, swiglu=False)
        elif step == "peft":
            model = adapted(model)
        else:
            report = moe_patch.patch(model)
            assert len(report.fused) == 1
            taken = order.index("peft") < order.index("patch")
            assert len(report.adapters) == 2 * taken
    assert_same_loss_and_gradients(train_step(model, tokens(device)), expected)
    assert len(fused_calls) == 1


def test_trainer_with_liger(liger, device, tmp_path, fused_calls):
    rows = [{"input_ids": row, "labels": row} for row in tokens("cpu", 2, 6)]
    losses = {}
    for name in ("plain", "patched"):
        model = small(device)
        more = {}
        if name == "patched":
            model.patch()
            more = {"use_liger_kernel": True, "liger_kernel_config": {"swiglu": False}}
        trainer = Trainer(model, arguments(tmp_path, device, **more), train_dataset=rows)
        trainer.train()
        assert len(fused_calls) == 2 * (name == "patched")
        losses[name] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses["plain"]) == 2 and losses["plain"][0] != losses["plain"][1]
    assert losses["patched"] == pytest.approx(losses["plain"], rel=1e-5)


def test_trainer_s_own_default_takes_liger_s_experts(liger, device):
    """What Trainer calls in `train`, when `liger_kernel_config` is not set."""
    swiglu = importlib.import_module("liger_kernel.transformers.swiglu")
    model = small(device)
    model.patch()
    apply_liger_kernel(model, None)
    assert experts_of(model).forward.__func__ is swiglu.LigerExperts.forward
    assert "the experts' forward was replaced on the instance" in str(model.patch())


def arguments(folder, device, cls=TrainingArguments, **more):
    fixed = {
        "per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-2, "optim": "sgd",
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": device.type == "cpu", "bf16": False,
    }  # fmt: skip
    return cls(str(folder), **fixed | more)


# TRL


@pytest.mark.parametrize("how, paged", [("whole", False), ("adapters", True)])
def test_grpo_trainer(how, paged, device, tmp_path, fused_calls):
    """Completions by generate or by continuous batching, the reference without adapters, a step."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    if paged and not hasattr(trl.GRPOConfig, "use_transformers_continuous_batching"):
        pytest.skip("this version of TRL has no such option")
    prompts = datasets.Dataset.from_list([{"prompt": "w5 w6 w7"}] * 4)
    results = {}
    for name in ("plain", "patched"):
        said = []

        def reward(completion_ids, said=said, **_):
            said.extend(completion_ids)
            return [float(sum(ids) % 7) for ids in completion_ids]

        more = {"num_generations": 2, "max_completion_length": 3, "max_steps": 1}
        more |= {"learning_rate": 10.0, "beta": 0.1 * (how == "adapters")}
        if paged:
            more["use_transformers_continuous_batching"] = True
            pages = {"num_blocks": 16, "block_size": 16, "max_batch_tokens": 32}
            more["transformers_continuous_batching_config"] = pages
        model = small(device)
        if name == "patched":
            assert len(model.patch().fused) == 1
        trainer = trl.GRPOTrainer(
            model,
            reward,
            args=arguments(tmp_path, device, trl.GRPOConfig, **more),
            train_dataset=prompts,
            processing_class=tokenizer(),
            peft_config=adapters("qwen3_moe") if how == "adapters" else None,
        )
        before = copy.deepcopy(trainer.model.state_dict())
        if name == "patched" and how == "adapters":  # those that TRL added
            assert len(moe_patch.patch(trainer.model).adapters) == 2
        torch.manual_seed(0)  # of the samples
        trainer.train()
        assert bool(fused_calls) == (name == "patched")
        trained = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
        results[name] = said, {n: p - before[n] for n, p in trained.items()}
    assert results["patched"][0] == results["plain"][0]
    assert len({tuple(ids) for ids in results["plain"][0]}) == 2
    for name, change in results["plain"][1].items():
        assert_close(results["patched"][1][name], change)


# DeepSpeed


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_trainer_under_zero3(tmp_path):
    """A model that was patched before Trainer hands it to DeepSpeed; tools/sharded.py has more."""
    cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(TOOLS / "zero3_trainer.py"), str(tmp_path)],
        env=os.environ | cpu | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert [calls for _, calls in results.values()] == [0, 2]
    plain, patched = (losses for losses, _ in results.values())
    assert len(plain) == 2 and plain[0] != plain[1]
    assert patched == pytest.approx(plain, rel=1e-5)


# torch.compile


def test_patched_and_unpatched_after_it_was_compiled(package, device, fused_calls):
    """torch.compile sees the change and compiles again, without a graph break."""
    model = small(device)
    model.set_experts_implementation(THEIRS)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs, ran = [], []

    def run():
        fused_calls.clear()
        package.calls.clear()
        with torch.no_grad():
            outputs.append(compiled(tokens(device)).logits)
        ran.append((len(fused_calls), len(package.calls)))

    run()
    assert len(moe_patch.patch(compiled).fused) == 1
    run()
    moe_patch.unpatch(model)
    run()
    assert len(moe_patch.patch(model).fused) == 1
    run()
    torch._dynamo.reset()
    assert ran == [(0, 1), (1, 0), (0, 1), (1, 0)]
    for output in outputs[1:]:
        assert_close(output, outputs[0])


# Continuous batching


def test_requests_to_a_manager_of_continuous_batching(device, fused_calls):
    """The same tokens patched, and with transformers' own switch, which generation leaves alone."""
    results = []
    for how in ("plain", "patched", "switched"):
        model = small(device, initializer_range=0.6)
        if how == "patched":
            model.patch()
        elif how == "switched":
            model.set_experts_implementation(OURS)
        fused_calls.clear()
        results.append(served(model, [tokens("cpu", 1, length)[0].tolist() for length in (3, 7)]))
        assert bool(fused_calls) == (how != "plain")
        if how == "switched":
            assert model.config._experts_implementation == OURS
    assert results[0] == results[1] == results[2]
    assert [len(generated) for generated in results[0].values()] == [3, 3]


def served(model, prompts):
    """{request: its tokens} from a manager that gets them one by one."""
    options = model.generation_config
    options.update(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=-1)
    pages = ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=32)
    found = {}
    with model.continuous_batching_context_manager(
        generation_config=options, continuous_batching_config=pages
    ) as manager:
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=3)
        for _ in range(60):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
            if len(found) == len(prompts):
                break
    return dict(sorted(found.items()))
