"""Who may import whom (design.md section 3), read from the source of every module, local imports included.

The gateway and the router are also imported with torch and ucxx blocked, as their images have neither.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "services", "cli", "bench", "deploy")

BASE = {"common.errors", "common.ids", "common.clock"}
CONFIG = {"common.config", "common.config_sources", "common.model_files"}
LAYERS: dict[str, set[str]] = {
    "common.messages": {"common.errors", "common.ids"},
    "common.observability": BASE | CONFIG | {"common.messages"},
    "common.transport": BASE | CONFIG | {"common.messages", "common.observability"},
    "common.kv": BASE | CONFIG | {"common.messages", "common.observability", "common.transport"},
    "common.engine": BASE | CONFIG | {"common.messages", "common.observability", "common.kv"},
    "common.routing": BASE | CONFIG | {"common.messages"},
}
"""What a layer may import of `common` besides itself. The engine leaves out the transport on purpose."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "nats": ("common.transport.nats",),
    "ucxx": ("common.transport.ucx",),
    "torch": (
        "common.engine.runner_torch",
        "common.engine.attention",
        "common.engine.sampler",
        "common.engine.loading",
        "common.engine.kv_codecs",
        "common.engine.kernels",
        "common.engine.kernel_step",
        "common.engine.products",
        "common.engine.graph",
        "common.engine.graph_compiler",
        "common.engine.interface",
        "common.engine.probe",
        "common.engine.compile_graph",
        "common.engine.cuda_graphs",
        "common.engine.decode_step",
        "common.engine.paged_decode",
        "common.engine.staging",
        "common.engine.pool_staging",
        "common.engine.triton_decode",
        "bench.engine.ceilings",
        "bench.engine.plain",
        "bench.engine.trial",
    ),
    "triton": ("common.engine.triton_decode",),
    "mooncake": ("common.kv.pool.mooncake",),
    "llguidance": (
        "common.engine.grammar",
        "common.engine.matchers",
        "services.gateway.openai.structured",
    ),
}
"""Libraries that one place hides, so that they can be replaced or left out of an image."""

STANDARD_AND_OWN = {"orjson", *PACKAGES}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield name, ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Full dotted names: `from a import b` gives a.b, which may be a module or something in a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


ALL = list(modules())
EDGES = [(name, target) for name, tree in ALL for target in imports(name, tree)]


def test_there_is_something_to_check() -> None:
    assert {"common.errors", "services.gateway"} <= {name for name, _ in ALL}
    assert ("common.transport.control", "collections.abc.Callable") in EDGES


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    allowed = LAYERS[layer] | {layer}
    wrong = [
        f"{name} imports {target}"
        for name, target in EDGES
        if within(name, layer)
        and any(within(target, package) for package in PACKAGES)
        and not any(within(target, package) for package in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("base", sorted(BASE))
def test_errors_ids_and_clock_import_nothing_of_ours(base: str) -> None:
    wrong = [t for n, t in EDGES if n == base and any(within(t, package) for package in PACKAGES)]
    assert wrong == []


def test_messages_need_only_the_standard_library_and_orjson() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, target in EDGES
        if within(name, "common.messages")
        and target.split(".")[0] not in STANDARD_AND_OWN | sys.stdlib_module_names
    ]
    assert wrong == []


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_stays_behind_its_door(library: str) -> None:
    wrong = [n for n, t in EDGES if within(t, library) and n not in ONLY_IN[library]]
    assert wrong == []


def test_services_never_import_each_other_and_common_never_imports_them() -> None:
    wrong = []
    for name, target in EDGES:
        if within(target, "services") and not within(name, "cli") and not within(name, "bench"):
            own = ".".join(name.split(".")[:2])
            if not within(target, own) or not within(name, "services"):
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_the_environment_is_read_in_config_only() -> None:
    readers = [
        name
        for name, tree in ALL
        if name != "common.config"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "environb", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert readers == []


def test_every_metric_is_moved_by_somebody() -> None:
    families = {
        target.attr
        for name, tree in ALL
        if name == "common.observability.metrics"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith(("self._gauge", "self._counter", "self._histogram"))
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    read = {
        node.attr
        for _, tree in ALL
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert {"requests", "kv_blocks", "ttft_seconds"} <= families
    assert families - read == set()


def test_every_module_says_what_it_is() -> None:
    silent = [name for name, tree in ALL if tree.body and not ast.get_docstring(tree)]
    assert silent == []


BLOCKED = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ucxx"):
            raise ModuleNotFoundError(f"{name} is not in this image", name=name)
        return None

sys.meta_path.insert(0, Blocker())
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
assert not {"torch", "ucxx"} & set(sys.modules)
"""


@pytest.mark.parametrize("service", ["gateway", "router"])
def test_gateway_and_router_need_neither_torch_nor_ucxx(service: str) -> None:
    command = [sys.executable, "-c", BLOCKED, f"services.{service}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
