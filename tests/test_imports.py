"""Imports point down one list: who may know whom, enforced on the source of every module."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The only modules of dspark_jax that read flags and print.
COMMANDS = {f"dspark_jax.{name}" for name in ("commands", "convert", "inspect")}
PACKAGES = ("dspark_jax", "pallas_kernels", "train", "eval", "configs")

# Module (or folder) of dspark_jax -> what of dspark_jax it may import. A new module needs a line here.
LEAVES = {"records", "config"}
MODELS = {*LEAVES, "layers", "kv_cache", "sampling", "processors"}
RULES = {
    "records": set(),
    "config": set(),
    "text": LEAVES,
    "text_stats": set(),
    "machine": set(),
    "sps": {*LEAVES, "machine"},
    "attention": set(),
    "rope": LEAVES,
    "layers": {*LEAVES, "attention", "rope"},
    "kv_cache": {*LEAVES, "layers"},
    "sampling": LEAVES,
    "processors": LEAVES,
    "requests": {*LEAVES, "processors"},
    "target": MODELS,
    "sequential_head": MODELS,
    "confidence": MODELS,
    "drafters": {*MODELS, "sequential_head", "confidence", "drafters"},
    # These know no model:
    "calibration": {*LEAVES, "sampling"},
    "scheduler": {*LEAVES, "sampling"},
    "schedules": {*LEAVES, "scheduler", "sps", "schedules"},
    "verify": {*LEAVES, "processors"},
    # The cycle knows the drafters' protocol; the models reach it as callables.
    "decode": {*LEAVES, "kv_cache", "sampling", "processors", "scheduler", "verify", "drafters.base"},
    "checkpoints": {*LEAVES, "text", "checkpoints"},
    # What a user calls:
    "loading": {*MODELS, "text", "target", "checkpoints"},
    "generation": {*MODELS, "text", "requests", "scheduler", "schedules", "decode", "loading", "drafters.base"},
    "drafter_loading": {*MODELS, "drafters", "checkpoints", "loading", "generation"},
    # Commands:
    "commands": {*LEAVES, "text", "requests", "checkpoints"},
    "convert": {*LEAVES, "commands", "checkpoints"},
    "inspect": {*LEAVES, "commands", "checkpoints"},
    "__init__": {"scheduler", "schedules", "sps", "loading", "generation", "drafter_loading"},
}

# Other top-level packages -> what they may import of all five.
PACKAGE_RULES = {
    "dspark_jax": {"dspark_jax", "pallas_kernels"},
    "pallas_kernels": {"pallas_kernels"},
    "train": {"train", "dspark_jax", "pallas_kernels"},
    "eval": {"eval", "dspark_jax", "pallas_kernels"},
    "configs": {"dspark_jax.config"},
}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(source: str) -> set[str]:
    """Full names of all imported modules, inside functions too; `from package import module` is the module."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if is_module(inner) else str(node.module))
    return names


def within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


def violations(module: str, source: str) -> list[str]:
    """Imports of `module` (its full name) that the tables don't allow."""
    package, _, rest = module.partition(".")
    known = {name for name in imported(source) if name.split(".")[0] in PACKAGES}
    wrong = {name for name in known if not within(name, PACKAGE_RULES[package])}
    if package == "dspark_jax":
        first = rest.split(".")[0] or "__init__"
        allowed = {f"dspark_jax.{name}" for name in RULES[first]} | {"pallas_kernels"}
        wrong |= {name for name in known if not within(name, allowed)}
    return sorted(wrong)


def all_modules() -> dict[str, Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}


@pytest.mark.parametrize("module", all_modules())
def test_imports(module):
    package, _, rest = module.partition(".")
    if package == "dspark_jax":
        assert (rest.split(".")[0] or "__init__") in RULES, f"{module} is new: give it a line in RULES"
    found = violations(module, all_modules()[module].read_text())
    assert not found, f"{module} must not import {', '.join(found)}: see the tables in this file"


def test_kernels_import_jax_only():
    allowed = {"jax", "pallas_kernels", *sys.stdlib_module_names}
    for module, path in all_modules().items():
        if module.startswith("pallas_kernels"):
            roots = {name.split(".")[0] for name in imported(path.read_text())}
            assert roots <= allowed, module


def test_the_method_neither_prints_nor_reads_flags():
    for module, path in all_modules().items():
        if module.startswith("dspark_jax") and module not in COMMANDS:
            source = path.read_text()
            assert not {name for name in imported(source) if name.split(".")[0] in ("absl", "argparse")}, module
            calls = [n.func for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
            assert "print" not in {f.id for f in calls if isinstance(f, ast.Name)}, module


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("dspark_jax.verify", "from dspark_jax.target import TargetModel", ["dspark_jax.target"]),
        ("dspark_jax.scheduler", "from dspark_jax import layers, config", ["dspark_jax.layers"]),
        ("dspark_jax.decode", "def f():\n    from dspark_jax.drafters import dspark", ["dspark_jax.drafters.dspark"]),
        ("dspark_jax.decode", "from dspark_jax.drafters.base import Drafter", []),
        ("dspark_jax.records", "import dspark_jax.config", ["dspark_jax.config"]),
        ("dspark_jax.layers", "import train.losses", ["train.losses"]),
        ("dspark_jax.target", "import dspark_jax", ["dspark_jax"]),
        ("train.step", "from eval import acceptance", ["eval"]),
        ("eval.speedup", "from train.data import is_loop", ["train.data"]),
        ("configs.tiny", "from dspark_jax import loading", ["dspark_jax.loading"]),
        ("configs.tiny", "from dspark_jax import config", []),
    ],
)
def test_the_rule_can_fail(module, source, found):
    assert violations(module, source) == found
