"""Runs Hugging Face's own model tests with and without moe_patch.

The shared tests come from the source distribution of the transformers that is installed, by pip.
It has no tests of the families themselves; a checkout has, and `--tests CHECKOUT/tests` takes them.
Without it, and for a family without a test file, hf_families.py makes a class of the shared tests
and a tiny configuration.

Two ways to be under the patch: `experts`, our function in place of transformers' grouped_mm and
batched_mm; and `patch`, moe_patch.patch on every model that is built or loaded. Exit code 1 when a
test passes unpatched only, for a reason that KNOWN does not have, or when our code never ran. A
family whose test file cannot be imported (an optional dependency) is listed and does not count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "out" / "hf_suites"
WAYS = ("experts", "patch")
SLOW = ("fsdp2", "test_tp_", "test_ep_", "compil")  # what --quick leaves out
NO_SWITCH = {"llama4"}  # transformers cannot switch their experts: `experts` does not reach them
STUBS = {
    "test_pipeline_mixin.py": "class PipelineTesterMixin:\n    pass\n",  # needs the hub
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
STOPPED = "(stopped)"  # in place of the tests that a crash or the limit kept from running
KNOWN = {  # (way, pattern of tests): why they pass unpatched only
    ("patch", r"test_eager_matches_batched_and_grouped_inference"): "The test switches the "
    "experts implementation and expects transformers' own functions to be called; while a block "
    "is patched the switch has no effect on it (README, Limits).",
    ("experts", r"GptOss\w+::test_eager_matches_batched_and_grouped_inference_\d_bf16"): "The test "
    "asks bfloat16 for 1e-4 of the eager loop, less than one rounding of these values; we add up a "
    "token's rows in float32 and are as close to float64 as the eager loop is (0.32 % both).",
}


@dataclass
class Outcomes:
    """What became of the tests of one family, run one way."""

    tests: dict[str, dict] = field(default_factory=dict)
    unfused: list[str] = field(default_factory=list)

    def names(self, outcome: str) -> list[str]:
        return [name for name, one in self.tests.items() if one["outcome"] == outcome]

    @property
    def ran(self) -> int:
        """Tests in which our code ran."""
        return sum(bool(one.get("launches")) for one in self.tests.values())


def read(path: Path) -> Outcomes:
    """Of a file of results; a failed subtest fails its test."""
    tests: dict[str, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        found = tests.get(one["test"])
        if found and found["outcome"] == "failed":
            one |= {"outcome": "failed", "why": found["why"]}
        tests[one["test"]] = one
    unfused = path.with_suffix(".unfused")
    lines = unfused.read_text().splitlines() if unfused.exists() else []
    return Outcomes(tests, list(dict.fromkeys(lines)))


@dataclass
class Row:
    """One family, one way, beside the same unpatched."""

    family: str
    way: str
    unpatched: Outcomes
    patched: Outcomes

    @property
    def lost(self) -> dict[str, str]:
        """Tests that pass unpatched only -> what happened."""
        tests = self.patched.tests
        missing = {"outcome": "not run", "why": ""}
        found = {name: tests.get(name, missing) for name in self.unpatched.names("passed")}
        return {
            name: f"{one['outcome']}: {one['why']}"
            for name, one in found.items()
            if one["outcome"] != "passed"
        }

    def reason(self, test: str) -> str | None:
        for (way, pattern), reason in KNOWN.items():
            if way == self.way and re.search(pattern, test):
                return reason
        return None

    @property
    def wrong(self) -> dict[str, str]:
        """What makes the exit code 1."""
        found = {test: why for test, why in self.lost.items() if not self.reason(test)}
        for outcomes in (self.unpatched, self.patched):
            if STOPPED in outcomes.tests:
                found[STOPPED] = outcomes.tests[STOPPED]["why"]
        idle = self.unpatched.names("passed") and not self.patched.ran
        if idle and not (self.way == "experts" and self.family in NO_SWITCH):
            found["(all)"] = "our code never ran"
        return found


HEAD = ("family", "way", "passed unpatched", "passed patched", "with our code", "failed both",
        "skipped", "only unpatched", "of these known")  # fmt: skip


def cells(row: Row) -> list[str]:
    failed = set(row.unpatched.names("failed")) & set(row.patched.names("failed"))
    known = sum(row.reason(test) is not None for test in row.lost)
    counts = [len(row.unpatched.names("passed")), len(row.patched.names("passed"))]
    counts += [row.patched.ran, len(failed), len(row.patched.names("skipped")), len(row.lost)]
    return [row.family, row.way, *map(str, counts), str(known)]


def skips(rows: list[Row]) -> Counter[str]:
    """Reasons for which tests were skipped unpatched, names of models taken out."""
    reasons: Counter[str] = Counter()
    for outcomes in {row.family: row.unpatched for row in rows}.values():
        for name in outcomes.names("skipped"):
            why = re.sub(r"<class '[^']*'>|\b[A-Z]\w*(Model|For[A-Z]\w+|Config)\b", "the model",
                         outcomes.tests[name]["why"])  # fmt: skip
            reasons[re.split(r" \(|\n| for model_type", why)[0].rstrip(". ")] += 1
    return reasons


def markdown(title: str, rows: list[Row]) -> str:
    """The section of docs/hf_suites.md with this title."""
    lines = [f"## {title}", "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    known = {row.reason(test) for row in rows for test in row.lost} - {None}
    if known:
        lines += ["", "Passes unpatched only, and known:", *(f"- {one}" for one in sorted(known))]
    wrong = [(r, test, why) for r in rows for test, why in r.wrong.items()]
    nothing = "Nothing else passes unpatched only." if known else "Nothing passes unpatched only."
    lines += ["", "Passes unpatched only, and wrong:" if wrong else nothing]
    lines += [f"- {row.family}, {row.way}: `{test}`: {why}" for row, test, why in wrong]
    failed = [
        f"- {family}: `{name.split('::')[-1]}`: {one.tests[name]['why'][:100]}"
        for family, one in {row.family: row.unpatched for row in rows}.items()
        for name in one.names("failed")
    ]
    lines += ["", "Failed already unpatched:", *failed] if failed else []
    unfused = {f"- {r.family}: {line}" for r in rows for line in r.patched.unfused}
    lines += ["", "Left to Hugging Face by `patch`:", *sorted(unfused)] if unfused else []
    lines += ["", "Skipped, here and unpatched alike:", "", "| tests | reason |", "|---|---|"]
    lines += [f"| {n} | {why} |" for why, n in skips(rows).most_common()]
    return "\n".join(lines) + "\n"


def with_section(text: str, section: str) -> str:
    """The text with the section in place of its old one, of any commit, else at the end."""

    def title(part: str) -> str:
        return part.split("\n", 1)[0].split(", moe_patch at")[0]

    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [section if title(part) == title(section) else part.rstrip() + "\n" for part in parts]
    return "\n".join(kept if section in kept else [*kept, section])


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"], check=True)


def fetch(version: str) -> Path:
    """The sdist of transformers, from whatever index pip is set to use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    archive = CACHE / f"transformers-{version}.tar.gz"
    if not archive.exists():
        pip("download", "--no-binary", ":all:", "-d", str(CACHE), f"transformers=={version}")
    return archive


def site(version: str) -> list[Path]:
    """Folders of what is not installed: parameterized, and transformers of another version."""
    wanted = {"parameterized": "0.9.0", "transformers": version}
    found = []
    for name, number in wanted.items():
        installed = Counter(d.metadata["Name"] for d in importlib.metadata.distributions())
        if installed[name] and (name != "transformers" or _version() == number):
            continue
        folder = CACHE / f"{name}-{number}-site"
        if not folder.exists():
            pip("install", "--target", str(folder), f"{name}=={number}")
        found.append(folder)
    return found


def _version() -> str:
    return importlib.metadata.version("transformers")


def _of_checkout(tests: Path) -> str:
    source = tests.parent / "src" / "transformers" / "__init__.py"
    found = re.search(r'__version__ = "(.+)"', source.read_text() if source.exists() else "")
    return f"test files of a checkout ({found[1] if found else 'of unknown version'})"


def _commit() -> str:
    """The last one that changed what is tested."""
    command = ["git", "log", "-1", "--format=%h", "--", "moe_patch", "models"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def lay_out(archive: Path, checkout: Path | None, folder: Path) -> None:
    """A folder with the package `tests`: the checkout's, the sdist's over it, ours."""
    tests = folder / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    if checkout:
        shutil.copytree(checkout, tests)
        if (checkout.parent / "utils").is_dir():  # where its tests look for modules
            shutil.copytree(checkout.parent / "utils", folder / "utils", dirs_exist_ok=True)
    for name, text in STUBS.items():
        path = tests / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        if "pipeline" in name or not path.exists():
            path.write_text(text)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, *path = Path(member.name).parts
            if (
                path[:1] != ["tests"]
                or not member.isfile()
                or member.name.endswith("mixin.py") * ("pipeline" in member.name)
            ):
                continue
            text = tar.extractfile(member).read().decode()
            if not missing(text, tests):
                (folder / Path(*path)).write_text(text)
    (tests / "__init__.py").write_text("import hf_under\n")
    (tests / "models").mkdir(exist_ok=True)
    (tests / "models" / "__init__.py").touch()
    for name in ("hf_under.py", "hf_families.py", "small.py"):
        shutil.copy(ROOT / "tests" / "tools" / name, folder)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p hf_under -W ignore\n")


def missing(text: str, tests: Path) -> list[str]:
    """Modules of `tests` that a shared test imports and that neither source has."""
    names = re.findall(r"^from \.([\w.]+) import", text, flags=re.MULTILINE)
    return [n for n in names if not (tests / (n.replace(".", "/") + ".py")).exists()]


def test_file(folder: Path, family: str) -> Path:
    """The family's own test file, or one that is written now."""
    path = folder / "tests" / "models" / family / f"test_modeling_{family}.py"
    if not path.exists() or not re.search(r"^class \w+ModelTest\(", path.read_text(), re.MULTILINE):
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(f'from hf_families import suite\n\nglobals().update(suite("{family}"))\n')
    return path


def families(models: Path) -> list[str]:
    """Those whose experts transformers can switch, and those that cannot but that we fuse."""
    found = set(NO_SWITCH)
    for path in models.glob("*/modeling_*.py"):
        if re.search(r"^@use_experts_implementation", path.read_text(), re.MULTILINE):
            found.add(path.parent.name)
    return sorted(found)


def run(folder: Path, family: str, way: str, options, sites: list[Path], tick: Callable) -> None:
    results = folder / "results" / f"{family}.{way}.jsonl"
    results.parent.mkdir(exist_ok=True)
    for path in results.parent.glob(f"{family}.{way}.*"):
        path.unlink()
    select = "ModelTest" + "".join(f" and not {name}" for name in SLOW if options.quick)
    select += f" and ({options.k})" if options.k else ""
    paths = [*sites, folder, ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = outer | {
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
        "HF_SUITES_WAY": way,
        "HF_SUITES_RESULTS": str(results),
        "HF_SUITES_TWINS": str(int(options.twins)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", select]
    command += [str(test_file(folder, family)), *options.pytest]
    with results.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        start = time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            tick(len(read(results).tests))
            if time.monotonic() - start > options.limit:
                process.kill()
                process.wait()
    if process.returncode not in (0, 1, 2):  # 2: could not be collected, which is recorded
        why = f"pytest ended with {process.returncode} after {time.monotonic() - start:.0f} s"
        with results.open("a") as file:
            file.write(json.dumps({"test": STOPPED, "outcome": "failed", "why": why}) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("family", nargs="*", help="as transformers names it; default: all MoE")
    parser.add_argument("--transformers", default=_version(), help="version; default: installed")
    parser.add_argument("--tests", type=Path, help="the folder tests/ of a transformers checkout")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--quick", action="store_true", help=f"without {', '.join(SLOW)}")
    parser.add_argument(
        "--twins",
        action="store_true",
        help="plain PyTorch in place of the kernels: minutes where Triton's\n"
        "interpreter takes hours; the modules, the hooks and the dispatch are real",
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="tests, as pytest takes it")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="more for pytest")
    parser.add_argument("--resume", action="store_true", help="keep the results that are there")
    parser.add_argument("--limit", type=int, default=3600, help="seconds a family and way")
    parser.add_argument("--markdown", type=Path, help="put the table into this file")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    folder = CACHE / options.transformers
    archive, sites = fetch(options.transformers), site(options.transformers)
    lay_out(archive, options.tests, folder)
    import transformers

    library = [path / "transformers" for path in sites if (path / "transformers").exists()]
    library = library[0] if library else Path(transformers.__file__).parent
    names = options.family or families(library / "models")
    ways = ("unpatched", *options.way)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(names) * len(ways))
        for family in names:
            for way in ways:

                def tick(done, family=family, way=way):
                    progress.update(task, description=f"{family}, {way}: {done} tests")

                tick(0)
                there = (folder / "results" / f"{family}.{way}.jsonl").exists()
                if not (options.resume and there):
                    run(folder, family, way, options, sites, tick)
                progress.advance(task)
    results = {(f, w): read(folder / "results" / f"{f}.{w}.jsonl") for f in names for w in ways}
    rows = [Row(f, w, results[f, "unpatched"], results[f, w]) for f in names for w in options.way]
    report(rows, options, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    return int(any(row.wrong for row in rows) or not any(row.patched.ran for row in rows))


def report(rows: list[Row], options: argparse.Namespace, device: str) -> None:
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*cells(row), style="red" if row.wrong else "")
    console = Console()
    console.print(table)
    for row in rows:
        for test, why in row.wrong.items():
            console.print(f"{row.family}, {row.way}: {test}: {why}", style="red", markup=False)
    if options.markdown:
        how = [device, "plain PyTorch twins" if options.twins else "Triton's kernels"]
        how += ["quick"] * options.quick + [f"-k '{options.k}'"] * bool(options.k)
        how += [_of_checkout(options.tests) if options.tests else "classes of our own"]
        title = f"transformers {options.transformers}, {', '.join(how)}, moe_patch at {_commit()}"
        old = options.markdown.read_text() if options.markdown.exists() else ""
        options.markdown.write_text(with_section(old, markdown(title, rows)))


if __name__ == "__main__":
    sys.exit(main())
