"""The generated code beside the .proto files is what the .proto files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto/pdserve/v1").glob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", "-Iproto",
        f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}",
        f"--plugin=protoc-gen-mypy={binaries}/protoc-gen-mypy",
        f"--plugin=protoc-gen-mypy_grpc={binaries}/protoc-gen-mypy_grpc",
        f"--mypy_out=quiet:{tmp_path}", f"--mypy_grpc_out=quiet:{tmp_path}", *protos,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = {path.name: path.read_text() for pattern in GENERATED for path in (tmp_path / "pdserve/v1").glob(pattern)}
    checked_in = {
        path.name: path.read_text() for pattern in GENERATED for path in (ROOT / "proto/pdserve/v1").glob(pattern)
    }
    assert fresh.keys() == checked_in.keys()
    stale = [name for name in fresh if fresh[name] != checked_in[name]]
    assert not stale, f"run `make proto`: {stale} differ"
