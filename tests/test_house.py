"""The rules that hold for the repository as a whole."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this virtual environment at the root; its output is one text."""
    paths = [Path(sys.executable).parent, os.environ.get("PATH", os.defpath)]
    env = {**os.environ, "PATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [str(part) for part in argv],
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def generated_under(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for pattern in GENERATED
        for path in root.rglob(pattern)
    }


def test_generated_code_is_what_the_protos_give(tmp_path: Path) -> None:
    protos = sorted(PROTO.glob("kvdepot/v1/*.proto"))
    assert protos
    flags = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    made = run(sys.executable, "-m", "grpc_tools.protoc", "-I", PROTO, *flags, *protos)
    assert made.returncode == 0, made.stdout
    committed, fresh = generated_under(PROTO), generated_under(tmp_path)
    assert committed.keys() == fresh.keys()
    stale = [name for name in fresh if committed[name] != fresh[name]]
    assert not stale, f"run `make proto`: {stale}"


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(("buf", "lint"), id="protos"),
        pytest.param(("lint-imports", "--no-cache"), id="import directions"),
    ],
)
def test_linter_finds_nothing(argv: tuple[str, ...]) -> None:
    done = run(*argv)
    assert done.returncode == 0, done.stdout


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_only_memory_imports_torch_in_the_core() -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kvcore").rglob("*.py")
        if any(name.split(".")[0] == "torch" for name in imported_modules(path))
    }
    assert all(name.startswith("kvcore/memory/") for name in importers)


@pytest.mark.parametrize("package", ["kvcore", "server/kvserver", "client/kvclient"])
def test_the_readme_says_what_each_file_holds(package: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition(f"| file of {Path(package).name} |")[2].partition("\n\n")[0]
    told = [
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+\.py|\w+/)`", row.split("|")[1])
    ]
    there = [path for path in (ROOT / package).iterdir() if not path.name.startswith("_")]
    files = [path.name for path in there if path.suffix == ".py"]
    folders = [f"{path.name}/" for path in there if (path / "__init__.py").is_file()]
    assert sorted(told) == sorted(files + folders)


# Written in pieces, so that this file does not find itself.
MACHINE_BOUND = re.compile(
    "|".join(
        [
            r"/(?:root|work|opt/py" + r"pi)/",
            r"/ho" + r"me/[a-z]",
            r"py" + r"pi\.(?:org|python\.org)|pythonhos" + r"ted\.org",
            r"download\.py" + r"torch\.org",
            r"regi" + r"stry\.[a-z0-9-]+\.[a-z]+",
        ]
    )
)


def tracked_texts() -> Iterator[tuple[str, str]]:
    listed = run("git", "ls-files", "-z")
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            yield name, path.read_text(encoding="utf-8", errors="replace")


def test_nothing_is_bound_to_a_machine_or_a_registry() -> None:
    found = [
        f"{name}: {match.group()}"
        for name, text in tracked_texts()
        for match in MACHINE_BOUND.finditer(text)
    ]
    assert not found
