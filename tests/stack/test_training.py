"""Training loops around patched models: Trainer, SFTTrainer, DDP, ZeRO-3, adapters everywhere."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.utils.dataclasses import get_module_class_from_name
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import (
    assert_close,
    assert_same_step,
    both_families,
    layers,
    tiny_model,
    tokenizer,
    tokens,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import moe_patch
from moe_patch.models import SWAPS

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")
BLOCK = {"qwen3_moe": "mlp", "llama4": "feed_forward"}
ROUTER = {"qwen3_moe": "gate", "llama4": "router"}


@pytest.fixture
def pair(request, device):
    """(a model as Hugging Face runs it, the same one patched)."""
    plain = tiny_model(request.getfixturevalue("family"), device, num_hidden_layers=1)
    patched = copy.deepcopy(plain)
    moe_patch.patch(patched)
    return plain, patched


def examples(count=4):
    ids = tokens("cpu", count, 6)
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder, device, cls=TrainingArguments, **more):
    return cls(
        folder,
        **{
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "max_steps": 1,
            "learning_rate": 10.0,  # so that rounding of the weights is little beside a step
            "optim": "sgd",
            "logging_steps": 1,
            "save_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": device.type == "cpu",
            "bf16": False,
        }
        | more,
    )


def step(model, ids):
    """(outputs, gradients of what is trained) of one step more."""
    out = model(ids, labels=ids)
    out.loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def trained(trainer):
    """(loss, what is trained) after all steps."""
    trainer.train()
    parameters = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer.state.log_history[0]["loss"], parameters


def assert_same_training(actual, expected, before):
    assert abs(actual[0] - expected[0]) < 1e-3  # it is rounded
    for name, parameter in expected[1].items():
        assert_close(actual[1][name] - before[name], parameter - before[name])


# transformers' Trainer


@both_families
def test_trainer(family, pair, device, tmp_path, fused_calls):
    """Accumulated gradients, checkpointing, clipping, the optimizer, and what it saves."""
    before, results = copy.deepcopy(pair[0].state_dict()), []
    for model, name in zip(pair, ("plain", "patched")):
        options = arguments(tmp_path / name, device, gradient_checkpointing=True)
        results.append(trained(Trainer(model, options, train_dataset=examples())))
        assert bool(fused_calls) == (name == "patched")
    assert_same_training(results[1], results[0], before)
    saved = AutoModelForCausalLM.from_pretrained(get_last_checkpoint(tmp_path / "patched"))
    assert not any(type(module) in SWAPS.values() for module in saved.modules())
    for name, parameter in pair[1].named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter.cpu()), name


# Adapters


def everything(family, router=True):
    """Adapters on attention, router and both of the experts' parameters."""
    parts = ["experts.gate_up_proj", "experts.down_proj"]
    parts += [f"{ROUTER[family]}.weight"] if router else []
    torch.manual_seed(1)
    return LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        init_lora_weights=False,
        target_modules=["q_proj", "v_proj"],
        target_parameters=[f"{BLOCK[family]}.{part}" for part in parts],
    )


@both_families
@pytest.mark.parametrize(
    "order, checkpointing",
    [("patch, adapt", False), ("adapt, patch", False), ("adapt, patch", True)],
)
def test_adapters_on_attention_router_and_experts(
    family, order, checkpointing, device, fused_calls, tmp_path
):
    models = [tiny_model(family, device, num_hidden_layers=1) for _ in range(2)]
    if order == "patch, adapt":
        moe_patch.patch(models[1])
    models = [get_peft_model(model, everything(family)) for model in models]
    if order == "adapt, patch":
        report = moe_patch.patch(models[1])
        assert len(report.fused) == 1 and not report.skipped
    results = []
    for model in models:
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        fused_calls.clear()
        results.append(step(model, tokens(device)))
    assert len(fused_calls) == (2 if checkpointing else 1)
    assert sum(f".{ROUTER[family]}." in name for name in results[0][1]) == 2
    assert_same_step(results[1], results[0])
    models[1].save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(
        tiny_model(family, device, num_hidden_layers=1), tmp_path
    ).eval()
    with torch.no_grad():
        assert_close(again(tokens(device)).logits, results[0][0].logits)


@both_families
@pytest.mark.parametrize("part", ["router", "experts"])
def test_a_copy_of_the_whole_module_is_trained(family, part, device, fused_calls):
    """PEFT's modules_to_save: the copy runs, the original when adapters are disabled."""
    name = ROUTER[family] if part == "router" else part
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=[name], init_lora_weights=False
    )
    plain = get_peft_model(tiny_model(family, device, num_hidden_layers=1), config)
    models = [plain, copy.deepcopy(plain)]
    report = moe_patch.patch(models[1])
    assert len(report.fused) == 1 and not report.skipped
    assert all(block.endswith(f".{BLOCK[family]}") for block in report.fused)
    results = [step(model, tokens(device)) for model in models]
    assert any(f"{name}.modules_to_save" in grad for grad in results[0][1])
    assert_same_step(results[1], results[0])
    assert len(fused_calls) == 1
    with torch.no_grad(), models[0].disable_adapter(), models[1].disable_adapter():
        expected, actual = (model(tokens(device)).logits for model in models)
    assert_close(actual, expected)
    assert len(fused_calls) == 2


# TRL


@pytest.mark.parametrize("family", ["qwen3_moe"])
@pytest.mark.parametrize("how", ["whole", "adapters"])
def test_sft_trainer(family, how, pair, device, tmp_path, fused_calls):
    """Not Llama4, whose text model TRL cannot call."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    dataset = [{"input_ids": one["input_ids"].tolist()} for one in examples()]
    results = []
    for model, name in zip(pair, ("plain", "patched")):
        trainer = trl.SFTTrainer(
            model,
            arguments(tmp_path / name, device, trl.SFTConfig, max_length=8),
            train_dataset=datasets.Dataset.from_list(dataset),
            processing_class=tokenizer(),
            peft_config=everything(family) if how == "adapters" else None,
        )
        if name == "patched":
            moe_patch.patch(trainer.model)
        before = copy.deepcopy(trainer.model.state_dict())
        results.append(trained(trainer))
        assert bool(fused_calls) == (name == "patched")
    assert_same_training(results[1], results[0], before)


# Distributed data parallel: hooks on the nodes where gradients arrive


@both_families
def test_distributed_data_parallel(family, pair, device, process_group, fused_calls):
    """With accumulation: our kernel adds to .grad itself, and DDP reduces what it finds there."""
    results = []
    for model in pair:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        with wrapped.no_sync():
            step(wrapped, tokens(device))
        results.append(step(wrapped, tokens(device, 2, 5)))
    assert len(fused_calls) == 2
    assert_same_step(results[1], results[0])


# DeepSpeed's ZeRO-3, by what it looks at


@both_families
def test_leaf_modules_are_found(family, pair):
    """By class, by the class's name (as accelerate looks it up), by its whole name."""
    plain, patched = pair
    name = type(layers(plain)[0]).__name__
    assert get_module_class_from_name(patched, name) is type(layers(patched)[0])
    for one, two in zip(plain.modules(), patched.modules()):
        assert isinstance(two, type(one)) and type(one).__name__ == type(two).__name__
        assert one._get_name() == two._get_name()


def partition(model):
    """Weights as ZeRO-3 keeps them: empty, but while a hook of their own module has them here.

    Small ones, as adapters are, it leaves whole.
    """
    for path, module in model.named_modules():
        own = [] if "lora_" in path else list(module.parameters(recurse=False))
        whole = [parameter.data for parameter in own]
        for parameter in own:
            parameter.ds_shape = parameter.shape

        def gather(*_, own=own, whole=whole):
            for parameter, data in zip(own, whole):
                parameter.data = data

        def release(*_, own=own):
            for parameter in own:
                parameter.data = parameter.data.new_empty(0)

        if own:
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(release)
            module.register_full_backward_pre_hook(gather)
            release()


@both_families
@pytest.mark.parametrize("adapted", [False, True])
def test_weights_gathered_module_by_module(family, adapted, device, fused_calls):
    plain = tiny_model(family, device)
    if adapted:
        plain = get_peft_model(plain, everything(family, router=False))
    model = copy.deepcopy(plain)
    partition(model)
    assert all(p.numel() == 0 for n, p in model.named_parameters() if "lora_" not in n)
    report = moe_patch.patch(model)
    assert len(report.fused) == 2 and not report.skipped
    actual = step(model, tokens(device))
    assert len(fused_calls) == 2
    assert_same_step(actual, step(plain, tokens(device)))


# Memory between forward and backward


@both_families
def test_saved_shapes_do_not_follow_the_routing(family, pair, device):
    """Checkpointing compares them with those of the second forward; CUDA graphs replay them."""
    shapes = []
    for factor in (1.0, 100.0):  # the second sends nearly all tokens to one expert
        block = layers(pair[1])[0]
        found = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, found=found: found.append((t.shape, t.dtype)) or t, lambda t: t
        ):
            hidden = torch.randn(1, 9, 64, device=device)
            block(factor + hidden / factor)
        shapes.append(found)
    assert shapes[0] == shapes[1] and len(shapes[0]) > 5
