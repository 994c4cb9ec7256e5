"""hf_suites.py without the network: what it makes of results, and of the tests that it lays out."""

from __future__ import annotations

import importlib
import io
import json
import tarfile

import hf_suites
import pytest
import torch
import transformers
from hf_suites import Outcomes, Row, lay_out, markdown, missing, read, skips, with_section
from ops import assert_close, moe

from moe_patch import reference
from moe_patch.activation import Activation
from moe_patch.models import decorated, llama4, qwen3_moe
from moe_patch.recognise import parts, routers


def outcomes(**tests):
    return Outcomes({name: {"outcome": o, "why": "", "launches": 1} for name, o in tests.items()})


def row(unpatched, patched, family="mixtral", way="patch"):
    return Row(family, way, unpatched, patched)


def test_what_passes_unpatched_only_is_wrong():
    unpatched = outcomes(a="passed", b="passed", c="passed", d="failed", e="skipped", f="passed")
    found = row(unpatched, outcomes(a="passed", b="failed", c="skipped", d="failed", e="skipped"))
    assert found.wrong == {"b": "failed: ", "c": "skipped: ", "f": "not run: "}
    assert found.lost == found.wrong
    assert not row(unpatched, unpatched).wrong
    assert hf_suites.cells(found) == ["mixtral", "patch", "4", "1", "5", "1", "2", "3", "0"]


def test_what_is_known_is_not_wrong_in_that_way_alone():
    name = "test_eager_matches_batched_and_grouped_inference_1_fp32"
    before, after = (
        outcomes(a="passed", **{name: "passed"}),
        outcomes(a="passed", **{name: "failed"}),
    )
    assert row(before, after).lost and not row(before, after).wrong
    assert row(before, after, way="experts").wrong


def test_a_run_in_which_nothing_of_ours_ran_is_wrong():
    before = outcomes(a="passed")
    idle = Outcomes({"a": {"outcome": "passed", "why": "", "launches": 0}})
    assert row(before, idle).wrong == {"(all)": "our code never ran"}
    assert not row(before, idle, "llama4", "experts").wrong  # transformers has no switch there
    assert row(before, idle, "llama4", "patch").wrong
    assert not row(outcomes(a="failed"), outcomes(a="failed")).wrong  # no fault of the patch


def test_a_run_that_was_cut_short_is_wrong():
    whole, cut = outcomes(a="passed"), outcomes(a="passed", **{hf_suites.STOPPED: "failed"})
    assert row(cut, whole).wrong and row(whole, cut).wrong and not row(whole, whole).wrong


def test_a_failed_subtest_fails_its_test(tmp_path):
    path = tmp_path / "x.patch.jsonl"
    lines = [("a", "failed", "sub"), ("a", "passed", ""), ("b", "passed", "")]
    path.write_text(
        "".join(json.dumps({"test": t, "outcome": o, "why": w}) + "\n" for t, o, w in lines)
    )
    path.with_suffix(".unfused").write_text("X: no\nX: no\n")
    found = read(path)
    assert found.names("failed") == ["a"] and found.tests["a"]["why"] == "sub"
    assert found.unfused == ["X: no"]
    assert read(tmp_path / "absent.jsonl") == Outcomes()


def test_the_section_of_the_same_title_is_replaced():
    before = outcomes(a="passed", b="skipped", c="failed")
    before.tests["b"]["why"] = "MixtralForCausalLM has no rope."
    rows = [row(before, before)]
    assert skips(rows) == {"the model has no rope": 1}
    section = markdown("transformers 1, CPU", rows)
    assert "| mixtral | patch | 1 | 1 | 3 | 1 | 1 | 0 | 0 |" in section
    other = "## transformers 2, CPU\n\nkept\n"
    text = with_section(with_section("# Suites\n\nwords\n", other), section)
    assert with_section(text, section) == text
    section = section.replace("CPU", "CPU, moe_patch at abc", 1)
    text = with_section(with_section(text, section), section.replace("abc", "def"))
    assert "abc" not in text and "def" in text and text.count("transformers 1, CPU") == 1
    assert text.index("words") < text.index("kept") < text.index("mixtral")
    assert "kept" not in with_section(text, other.replace("kept", "new"))


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "transformers-1.tar.gz"
    files = {
        "tests/test_modeling_common.py": "from .generation.test_utils import GenerationTesterMixin",
        "tests/test_fsdp_mixin.py": "from .distributed_testing_utils import run_distributed\n",
        "tests/test_pipeline_mixin.py": "import datasets\n",
        "src/transformers/x.py": "",
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"transformers-1/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_lays_out_what_can_be_imported(archive, tmp_path):
    folder = tmp_path / "laid"
    lay_out(archive, None, folder)
    tests = folder / "tests"
    assert "GenerationTesterMixin" in (tests / "generation/test_utils.py").read_text()
    assert not (tests / "test_fsdp_mixin.py").exists()
    assert "datasets" not in (tests / "test_pipeline_mixin.py").read_text()
    assert "suite('" not in hf_suites.test_file(folder, "mixtral").read_text()
    assert 'suite("mixtral")' in hf_suites.test_file(folder, "mixtral").read_text()
    checkout = tmp_path / "checkout"
    (checkout / "models" / "mixtral").mkdir(parents=True)
    own = checkout / "models" / "mixtral" / "test_modeling_mixtral.py"
    own.write_text("class MixtralModelTest(Base):\n    pass\n")
    (checkout / "distributed_testing_utils.py").touch()
    (tmp_path / "utils" / "test_module").mkdir(parents=True)
    lay_out(archive, checkout, folder)
    assert (tests / "test_fsdp_mixin.py").exists() and (folder / "utils/test_module").is_dir()
    assert hf_suites.test_file(folder, "mixtral").read_text() == own.read_text()
    assert missing("from .a.b import c\nfrom .test_fsdp_mixin import d\n", tests) == ["a.b"]


SHARED = """
import random
import torch
global_rng = random.Random()
class ModelTesterMixin:
    def test_runs(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.all_model_classes[0](config).to(device)(**{k: v.to(device) for k, v in inputs.items()})
    def test_of_the_unpatched_alone(self):
        model = self.all_model_classes[0](self.model_tester.get_config())
        experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
        assert type(experts.config).__name__ != "ExpertsConfig"
    def test_skipped(self):
        self.skipTest("no reason")
class GenerationTesterMixin:
    pass
def ids_tensor(shape, size):
    return torch.randint(0, size, shape)
"""


@pytest.mark.gpu  # half a minute of plain PyTorch, for a script that is run by hand
def test_runs_a_family_both_ways(tmp_path, monkeypatch):
    path = tmp_path / "transformers-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("transformers-1/tests/test_modeling_common.py")
        member.size = len(SHARED)
        tar.addfile(member, io.BytesIO(SHARED.encode()))
    monkeypatch.setattr(hf_suites, "CACHE", tmp_path)
    monkeypatch.setattr(hf_suites, "fetch", lambda version: path)
    monkeypatch.setattr(hf_suites, "site", lambda version: [])
    page = tmp_path / "page.md"
    assert hf_suites.main(["mixtral", "--markdown", str(page)]) == 1
    text = page.read_text()
    assert "| mixtral | experts | 2 | 2 | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| mixtral | patch | 2 | 1 | 1 | 0 | 1 | 1 | 0 |" in text
    assert "test_of_the_unpatched_alone`: failed: AssertionError" in text
    assert "| 1 | no reason |" in text


def test_twins_take_what_the_kernels_take(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SUITES_WAY", "unpatched")
    monkeypatch.setenv("HF_SUITES_TWINS", "1")
    monkeypatch.setenv("HF_SUITES_RESULTS", str(tmp_path / "results.jsonl"))
    hf_under = importlib.import_module("hf_under")
    for module in (decorated, llama4, parts, qwen3_moe, routers):
        for name, value in vars(module).copy().items():
            monkeypatch.setattr(module, name, value)  # put back afterwards
    hf_under.plain_pytorch()
    act = Activation(form="interleaved")
    arguments = moe("cpu", torch.float32, 5, 16, 8, 4, 2, act=act, biased=True, routing="sentinel")
    *tensors, up_bias, down_bias = arguments.values()
    biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
    found = decorated.fused_experts(*tensors, activation=act, **biases)
    assert_close(found, reference.fused_experts(**arguments, activation=act), torch.float32)


def test_runs_a_test_of_the_sdist(monkeypatch, tmp_path):
    archive = hf_suites.CACHE / f"transformers-{transformers.__version__}.tar.gz"
    if not archive.exists():
        pytest.skip("the sdist is not in out/hf_suites: python tests/tools/hf_suites.py fetches it")
    sites = hf_suites.site(transformers.__version__)
    monkeypatch.setattr(hf_suites, "fetch", lambda version: archive)
    monkeypatch.setattr(hf_suites, "site", lambda version: sites)
    monkeypatch.setattr(hf_suites, "CACHE", tmp_path)
    options = ["--twins", "--way", "patch", "-k", "checkpointing_use_reentrant_true"]
    assert hf_suites.main(["llama4", *options]) == 0
