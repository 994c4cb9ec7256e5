"""Classes of Hugging Face's shared model tests for a family, from a tiny configuration of ours.

For where there is no test file of the family itself. Runs in the folder that hf_suites.py lays out.
"""

from __future__ import annotations

import contextlib
import importlib
import unittest
from types import ModuleType

import torch
from small import MORE, shrink
from transformers import PreTrainedModel

from tests import test_modeling_common as common

MIXINS = {  # besides the two of test_modeling_common
    "test_training_mixin": "TrainingTesterMixin",
    "test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "test_fsdp_mixin": "FSDPTesterMixin",
    "test_expert_parallel_mixin": "ExpertParallelTesterMixin",
}
ENDS = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration")
MORE_ENDS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def suite(family: str) -> dict[str, type]:
    """{name: a unittest class} of the family's text model and its heads."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = model_classes(module)
    main = next(cls for end in ENDS for cls in classes if cls.__name__.endswith(end))
    classes = [cls for cls in classes if cls.config_class is main.config_class]

    class Tester(_Tester):
        config_class, causal_lm_class = main.config_class, main
        more = MORE.get(family, {})
        sequence_classification_class = None

    bases = [common.ModelTesterMixin, common.GenerationTesterMixin]
    for name, mixin in MIXINS.items():
        with contextlib.suppress(ImportError):  # a file of the tests that PyPI does not carry
            bases.append(getattr(importlib.import_module(f"tests.{name}"), mixin))
    content = {
        "setUp": lambda self: setattr(self, "model_tester", Tester(self)),
        "all_model_classes": tuple(classes),
        "test_all_params_have_gradient": False,  # an expert that no token chose has none
    }
    name = f"{main.__name__.removesuffix('ForCausalLM')}ModelTest"
    return {name: type(name, (*bases, unittest.TestCase), content)}


def model_classes(module: ModuleType) -> list[type[PreTrainedModel]]:
    """The models of a file that take token ids."""
    found = [c for c in vars(module).values() if isinstance(c, type)]
    found = [c for c in found if issubclass(c, PreTrainedModel) and c.__module__ == module.__name__]
    found = [c for c in found if c.__name__.endswith((*ENDS, *MORE_ENDS))]
    unwanted = ("Vision", "Audio", "MTP", "PreTrained")
    return [c for c in found if not any(word in c.__name__ for word in unwanted)]


class _Tester:
    """What the shared tests ask of a family's tester."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, parent: unittest.TestCase) -> None:
        config = self.get_config()
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            setattr(self, name, getattr(config, name))

    def get_config(self):
        return shrink(self.config_class(), self.more)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = [self.batch_size, self.seq_length]
        ids = common.ids_tensor(shape, config.vocab_size).clamp(min=3)
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
