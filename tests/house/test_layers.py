"""The house: who may import whom, and what a root folder may hold (docs/architecture.md, "Packages")."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # `make check` runs them

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "v1": "proto", "common": "common", "text": "text", "kernels": "kernels", "models": "models", "engine": "engine",
    "kv_transfer": "kv_transfer", "worker": "worker", "prefill": "prefill_service", "decode": "decode_service",
    "router": "router", "llm": "llm", "simulator": "simulator", "cli": "cli",
}  # fmt: skip
WORKER = {"worker", "engine", "kv_transfer", "common", "v1"}
MAY_IMPORT = {
    "v1": set(),
    "kernels": set(),
    "common": {"v1"},
    "text": {"common"},
    "models": {"kernels", "common"},
    "engine": {"models", "kernels", "common"},
    "kv_transfer": {"kernels", "common", "v1"},
    "worker": WORKER,
    "prefill": WORKER,
    "decode": WORKER,
    "router": {"text", "common", "v1"},
    "llm": {"engine", "text", "common"},
    "simulator": WORKER | {"prefill", "decode", "router", "text", "models"},
    "cli": set(FOLDERS),
}
FLOORS = {
    "router": (
        {"service"}, {"http_front"}, {"responses"}, {"grpc_front", "openai"}, {"requests"},
        {"telemetry"}, {"attempts"}, {"placement"}, {"admission"}, {"bodies", "tenants", "workers"},
    ),
    "engine": (
        {"client"}, {"engine_thread", "make_engine_core"}, {"engine_core"}, {"executor", "request_verifier"}, {"runner"},
        {"ranks", "sampling", "scheduler", "speculation"}, {"kv_cache", "lora", "stats", "structured_outputs"},
        {"engine_info", "request_messages"},
        {"arrays", "config", "heartbeat", "output_stream", "prompt_embeds_values",
         "request", "scheduler_output"},
        {"sequence_blocks"},
    ),
    "models": (
        {"model_impl"}, {"encoder_decoder", "loading", "lora", "transformers"}, {"eagle_head"}, {"decoder", "read_config"},
        {"registry"}, {"families", "vision"}, {"config"}, {"layers"}, {"weights"},
        {"kv_cache", "model_folder", "model_inputs"}, {"gguf"},
        {"dtypes", "encoder_decoder_step", "json_object", "other_formats"},
    ),
    "kv_transfer": (
        {"control", "make_connectors"}, {"connector_set", "landing_ring", "nixl", "tcp"}, {"heads", "pull"}, {"connector"},
        {"memory"},
        {"event_thread", "totals"},
    ),
    "worker": (
        {"worker_process"}, {"worker"}, {"engine_process"}, {"fetch_servicer", "telemetry", "worker_servicer"},
        {"engine_client", "lora_modules", "redis_publisher"}, {"transfers"}, {"kv_transfer_manager", "ranks"},
        {"engine_watchdog", "kv_event_publisher", "peer_channels", "prefill_rate", "request_reader",
         "source_reader", "step_stream", "step_totals", "worker_roles"},
    ),
    "common": (
        {"telemetry"}, {"net"}, {"settings"}, {"registry", "request"},
        {"audio_processor_config", "block_hash", "image_processor_config", "worker_identity"}, {"security"},
        {"address", "bounded_file", "json_file", "kv_layout"},
        {"decoder_rules", "device_event", "hub_name", "ipc", "kv_events", "method_handler", "priority_queue", "processes",
         "protocol", "rate_limited_log", "timeline", "transfer_order"},
        {"errors", "line_fit", "tasks"}, {"clock"},
    ),
}  # fmt: skip
"""Room -> its subfolders and modules, from the roof down: each imports only from floors below its own."""
NO_TORCH = {"common", "text", "router", "v1", "cli"}
TORCH = {"torch", "triton", "transformers"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {("torch", "load"), ("yaml", "load"), ("builtins", "eval"), ("builtins", "exec")}
FORBIDDEN_NAMES = {"eval", "exec"}
CLOCK_READS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
STARTS_OF_OS = {"fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"} | {
    f"spawn{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
}
STARTS_OF_LOOPS = {"create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"}
"""Functions that start a process with the handlers of `pthread_atfork`, or in an event loop."""
NEEDS_FORK = {"preexec_fn", "user", "group", "extra_groups"}
"""Arguments with which `subprocess` uses `fork` instead of `vfork`."""
FORK_SERVERS = {"grammar_process"}
"""Programs without gRPC and without threads, which fork what they have loaded."""
EMPTY_NAMES = {"utils", "helpers", "misc", "base", "manager"}

PLAIN_WITHOUT_TLS = {
    ("make_channel", 1), ("make_public_channel", 1), ("bind", 3), ("PeerChannels", 0), ("TcpConnector", 0),
}  # fmt: skip
"""Calls with so few arguments, which name no TLS."""
ENTRY_POINTS = {
    "pdserve.cli.main",
    "pdserve.engine.runner.pool.mooncake_client",
    "pdserve.engine.structured_outputs.grammar_process",
    "pdserve.worker.engine_process",
    "pdserve.worker.ranks.worker_rank",
}  # fmt: skip
"""Modules that a process starts with."""


@cache
def parsed(path: Path) -> ast.Module:
    """Most tests here read the whole product."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """The trees are a million objects, which garbage collections of other tests would look through."""
    yield
    parsed.cache_clear()


def sources(package: str) -> Iterator[Path]:
    folder = ROOT / FOLDERS[package] / "pdserve" / package
    return (path for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    for path in sources(package):
        for module in imported_modules(parsed(path)):
            parts = module.split(".")
            if parts[0] == "pdserve" and len(parts) > 1 and parts[1] != package:
                assert parts[1] in MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {module}"
            if package in NO_TORCH:
                assert parts[0] not in TORCH, f"{path.relative_to(ROOT)} imports {module}"


def test_each_module_is_imported_by_another_one() -> None:
    modules, imported = set(), set()
    for package in FOLDERS:
        for path in sources(package):
            imported |= set(imported_modules(parsed(path)))
            if path.name != "__init__.py":
                modules.add(".".join(path.relative_to(ROOT / FOLDERS[package]).with_suffix("").parts))
    assert modules - imported == ENTRY_POINTS


def test_triton_is_imported_only_where_a_kernel_is_to_run() -> None:
    """A CPU that serves does not spend the time and memory of its import: only functions import the kernels."""
    for package in FOLDERS:
        for path in sources(package):
            if "triton" not in path.parts:
                tree = parsed(path)
                late = {
                    inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)
                }
                for node in ast.walk(tree):
                    if isinstance(node, ast.Import | ast.ImportFrom) and node not in late:
                        modules = list(imported_modules(node))
                        assert not [name for name in modules if "triton" in name.split(".")], path


def type_only(tree: ast.AST) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {inner for block in blocks for inner in ast.walk(block)}


@pytest.mark.parametrize("room", FLOORS)
def test_a_part_of_a_room_imports_only_from_floors_below(room: str) -> None:
    floor_of = {part: floor for floor, parts in enumerate(reversed(FLOORS[room])) for part in parts}
    folder = ROOT / FOLDERS[room] / "pdserve" / room
    met = set()
    for path in sources(room):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        met.add(part)
        tree = parsed(path)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in type_only(tree)]
        for node in imports:
            parts = (node.module or "").split(".")
            if parts[:2] == ["pdserve", room]:
                for other in parts[2:3] or [alias.name for alias in node.names]:
                    below = other == part or floor_of[other] < floor_of[part]
                    assert below, f"{path.relative_to(ROOT)} imports {other}, which is not below {part}"
    assert met == set(floor_of)


@pytest.mark.parametrize("package", [name for name in FOLDERS if name not in {"common", "v1"}])
def test_generated_messages_stay_with_stubs_and_servicers(package: str) -> None:
    for path in sources(package):
        text = path.read_text()
        if "_pb2" in text and path.parent.name != "grpc_front":
            calls = any(name in text for name in ("_pb2_grpc", "common.net.service_channel", "StepCall", "CallReader"))
            assert calls, f"{path.relative_to(ROOT)} touches messages but holds no stub, channel, servicer or call"


def test_pdserve_is_a_namespace() -> None:
    """One `pdserve/__init__.py` anywhere would hide every other portion."""
    for folder in FOLDERS.values():
        assert not (ROOT / folder / "__init__.py").exists()
        assert not (ROOT / folder / "pdserve" / "__init__.py").exists()
        assert not list((ROOT / folder).glob("*.py")), f"{folder} must not be importable itself"


def test_nothing_can_run_code_from_data() -> None:
    """No pickle, eval, exec, torch.load or yaml.load anywhere (I11)."""
    for package in FOLDERS:
        for path in sources(package):
            tree = parsed(path)
            assert not FORBIDDEN_MODULES & {module.split(".")[0] for module in imported_modules(tree)}, path
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                if isinstance(node.func, ast.Name):
                    assert node.func.id not in FORBIDDEN_NAMES, f"{path}:{node.lineno}"
                elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    assert (node.func.value.id, node.func.attr) not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
                    assert node.func.attr != "deserialize_descs", f"{path}:{node.lineno}"


def test_one_module_reads_the_clock() -> None:
    """What a simulation runs under virtual time reads no other one."""
    others = []
    for package in set(FOLDERS) - {"cli", "kernels"}:
        for path in sources(package):
            for node in ast.walk(parsed(path)):
                if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                    continue
                if node.value.id == "time" and node.attr in CLOCK_READS:
                    others.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not others


def test_processes_are_started_by_subprocess() -> None:
    """In a process with threads of gRPC a child of `fork` crashes before it runs its program."""
    other = []
    for package in FOLDERS:
        for path in sources(package):
            tree = parsed(path)
            assert "multiprocessing" not in {name.split(".")[0] for name in imported_modules(tree)}, path
            if path.stem not in FORK_SERVERS:
                other += [f"{path}:{line}" for line in other_starts(tree)]
    assert not other


def other_starts(tree: ast.AST) -> Iterator[int]:
    """Lines that start a process in another way than `subprocess` with `vfork`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "asyncio", "asyncio.subprocess", "pty"):
            yield from (node.lineno for alias in node.names if alias.name in STARTS_OF_OS | STARTS_OF_LOOPS)
        if isinstance(node, ast.Attribute):
            of_os = isinstance(node.value, ast.Name) and node.value.id in ("os", "pty") and node.attr in STARTS_OF_OS
            if of_os or node.attr in STARTS_OF_LOOPS | {"ProcessPoolExecutor"}:
                yield node.lineno
        if isinstance(node, ast.Call) and any(keyword.arg in NEEDS_FORK for keyword in node.keywords):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"Popen", "run", "call", "check_call", "check_output"}:
                yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "await asyncio.create_subprocess_exec('a')",
        "pid = os.fork()",
        "from os import fork\nfork()",
        "subprocess.Popen(command, preexec_fn=limit)",
        "run(command, user=1)",
    ],
)
def test_other_ways_to_start_a_process_are_found(code: str) -> None:
    assert list(other_starts(ast.parse(f"async def f():\n    {code}" if "await" in code else code)))


def test_files_are_named_by_their_noun() -> None:
    for package in FOLDERS:
        for path in sources(package):
            assert path.stem not in EMPTY_NAMES, path


def test_whoever_connects_or_listens_says_with_which_tls() -> None:
    """Without the argument both would speak in the clear, whatever the settings say."""
    silent = [
        f"{path.name}:{node.lineno}"
        for package in FOLDERS
        for path in sources(package)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        for arguments in [len(node.args) + len(node.keywords)]
        if (node.func.id, arguments) in PLAIN_WITHOUT_TLS
    ]
    assert not silent
