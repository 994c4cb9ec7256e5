"""What a release is made of: one version, one address, the same bytes, workflows that run."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import distributions
import pytest
import yaml
from packaging.requirements import Requirement

from moe_patch.version import __version__

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PLACEHOLDER = "https://github.com/OWNER/moe_patch"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path: Path | str) -> dict:
    """A YAML file; `on`, which YAML takes for True, is "on" again."""
    found = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in found.items()}


@pytest.fixture(scope="module")
def metadata(built) -> Message:
    """The wheel's."""
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


# The sdist and the wheel


def test_sdist_holds_what_contributors_need(built):
    """And the wheel is built of it, so that it holds the whole package."""
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md",
        "Makefile", "constraints.txt", "pyproject.toml", "setup.py", "PKG-INFO", ".ci/run",
        "tests/conftest.py", "tests/tools/tiny.py", "tests/tools/stub_cuda.c", "docs/README.md",
        "examples/train_tiny.py", "moe_patch/kernels/tuned.json", "moe_patch/py.typed",
    }  # fmt: skip
    assert not wanted - names
    assert not [name for name in names if re.search(r"__pycache__|\.py[co]$|^(build|dist)/", name)]


def test_the_same_files_give_the_same_bytes(built, tmp_path):
    """Copied elsewhere and later: neither times nor folders nor owners are in them."""
    again = distributions.build(tmp_path)
    assert again.sdist.name == built.sdist.name and again.wheel.name == built.wheel.name
    assert again.sdist.read_bytes() == built.sdist.read_bytes()
    assert again.wheel.read_bytes() == built.wheel.read_bytes()
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    assert {(m.mtime, m.uid, m.uname) for m in members} == {(int(distributions.EPOCH), 0, "")}
    assert {oct(m.mode) for m in members} == {"0o644", "0o755"}


def test_the_description_reads_without_the_repository(metadata):
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"{PLACEHOLDER}/blob/v{__version__}/docs/limits.md" in targets
    assert all(target.startswith("https://") for target in targets), targets
    for target in targets:
        path = target.removeprefix(f"{PLACEHOLDER}/blob/v{__version__}/").partition("#")[0]
        assert (ROOT / path).exists(), target


def test_twine_takes_both(built):
    pytest.importorskip("twine")
    from twine.commands import check

    assert not check.check([str(built.sdist), str(built.wheel)], strict=True)


# One fact in several files


def test_one_version_everywhere(built, metadata):
    citation, recipe = load("CITATION.cff"), load(".ci/conda/recipe.yaml")
    assert metadata["Version"] == citation["version"] == recipe["context"]["version"] == __version__
    assert built.sdist.name == f"moe_patch-{__version__}.tar.gz"
    assert f"\n## {__version__}\n" in read("CHANGELOG.md")
    named = re.findall(r"\d+\.\d+\.\d+", read("setup.py").split("setup(")[0])
    assert not named, f"setup.py names {named} itself: moe_patch/version.py has the version"


def test_one_address_everywhere(metadata):
    """A placeholder, until there is an owner."""
    home = metadata["Home-page"]
    found = {"CITATION.cff": load("CITATION.cff")["repository-code"]}
    for name in (".ci/conda/recipe.yaml", ".ci/hub/CARD.md", ".github/ISSUE_TEMPLATE/config.yml"):
        (found[name],) = set(re.findall(r"https://github\.com/\w+/moe_patch\b", read(name)))
    assert set(found.values()) == {home}, found
    owner = home.split("/")[-2]
    assert f'repo-id = "{owner}/moe-patch"' in read(".ci/hub/build.toml")
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(home) for url in urls.values())


def test_the_citation_has_what_its_format_asks_for():
    citation = load("CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert all(author["name"] for author in citation["authors"])
    assert citation["license"] == "Apache-2.0"


def test_the_recipe_asks_for_what_the_wheel_does(metadata):
    found = {}
    for line in metadata.get_all("Requires-Dist"):
        requirement = Requirement(line)
        if "extra" not in str(requirement.marker or ""):
            name = {"torch": "pytorch"}.get(requirement.name, requirement.name)
            found[name] = sorted(map(str, requirement.specifier))
    recipe = load(".ci/conda/recipe.yaml")
    asked = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    assert asked.pop("python") == ">=${{ python_min }}"
    assert {name: sorted(text.split(",")) for name, text in asked.items()} == found
    assert f">={recipe['context']['python_min']}" == metadata["Requires-Python"]
    assert f"-${{{{ version }}}}{'.tar.gz'}" in recipe["source"]["url"]


# Workflows


def targets() -> set[str]:
    """The Makefile's."""
    (line,) = re.findall(r"^\.PHONY: (.+)$", read("Makefile"), re.MULTILINE)
    return set(line.split())


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_the_makefile_has(path):
    workflow = load(path)
    assert workflow["on"] and workflow["permissions"] == {"contents": "read"}
    variables = set(re.findall(r"^(\w+) *\?=", read("Makefile"), re.MULTILINE))
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        make, target, *options = re.sub(r"\$\{\{.*?\}\}", "", command).split()
        assert make == "make" and target in targets(), command
        assert {option.split("=")[0] for option in options} <= variables, command
    for step in steps(workflow):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))
    assert all("runs-on" in job for job in workflow["jobs"].values())


def test_the_matrix_is_the_pairs_that_were_tested():
    """docs/versions.md has them, and constraints.txt the set without a pair."""
    page = read("docs/versions.md")
    table = page.split("## Pairs of torch and Triton")[1].split("## ")[0]
    rows = [
        [c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line
    ]
    pairs = {(torch, triton, python) for torch, triton, python, *_ in rows[2:]}
    versions = set(re.findall(r"\d+\.\d+\.\d+", page.split("## Versions of transformers")[1]))
    found = set()
    for row in load(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]:
        options = dict(word.split("=") for word in row["set"].split())
        assert options.pop("TRANSFORMERS") in versions
        if options:
            found.add((options["TORCH"], options["TRITON"], row["python"]))
    assert found == pairs
    assert load(".github/workflows/ci.yml")["jobs"].keys() == {"lint", "test", "next", "build"}


def test_only_the_upload_may_ask_for_a_token():
    workflow = load(".github/workflows/publish.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and "permissions" not in build
    assert publish["needs"] == "build" and publish["environment"] == "pypi"
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets" not in read(".github/workflows/publish.yml")
    kept = next(s["with"]["path"] for s in build["steps"] if "upload-artifact" in str(s))
    assert kept.split() == ["dist/*.whl", "dist/*.tar.gz"]  # and not dist/hub


def test_the_template_asks_for_the_environment():
    template = load(".github/ISSUE_TEMPLATE/bug.yml")
    fields = {field["id"]: field for field in template["body"]}
    assert fields["env"]["attributes"]["label"] == "python -m moe_patch env"
    assert fields["env"]["validations"]["required"] is True
    assert fields["how"]["validations"]["required"] is True


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_knows_how_to_release():
    done = subprocess.run(
        ["make", "--dry-run", "dist", "hub", "release-check", "TAG=v1.2.3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for command in (".ci/dist", ".ci/hub/build.py", '.ci/release-check "v1.2.3"'):
        assert command in done.stdout
        assert (ROOT / command.split()[0]).is_file()


def check_release(folder: Path, tag: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(folder / ".ci" / "release-check"), tag], capture_output=True, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_what_is_missing_before_a_release_is_listed(tmp_path):
    """All of it, and nothing once it is there."""
    for name in (".ci", ".github"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "moe_patch").mkdir()
    for name in ("setup.py", "CITATION.cff", "CHANGELOG.md", "moe_patch/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("## Unreleased\n\n- something new\n\n## 0.0.1\n")
    code, said = check_release(tmp_path, "v9.9.9")
    assert code == 1 and len(said.splitlines()) == 4
    assert f"the tag is v9.9.9 and moe_patch/version.py has {__version__}" in said
    assert f"no heading '## {__version__}'" in said and "entries under Unreleased" in said
    assert "OWNER still stands for the repository's owner in setup.py CITATION.cff" in said
    changes.write_text(f"## Unreleased\n\n## {__version__}\n\n- something new\n")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"OWNER/", b"somebody/"))
    assert check_release(tmp_path, f"v{__version__}") == (0, "")
