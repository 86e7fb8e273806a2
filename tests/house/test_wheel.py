"""The wheel holds every portion of the namespace, the contract, and the bundled models."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_MODEL_BYTES = {"demo": 10 << 20, "demo-image": 4 << 20}


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("pdserve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    sources = {
        str(path.relative_to(folder))
        for folder in ROOT.iterdir()
        if (folder / "pdserve").is_dir()
        for path in (folder / "pdserve").rglob("*.py*")
        if path.suffix in {".py", ".pyi"}
    }
    assert sources, "no sources were found"
    assert sources <= sizes.keys(), sorted(sources - sizes.keys())
    assert "pdserve/__init__.py" not in sizes
    assert {
        "pdserve/v1/inference.proto",
        "pdserve/common/py.typed",
        "pdserve/router/http_front/status_page.html",
    } <= sizes.keys()
    for bundled, most in MAX_MODEL_BYTES.items():
        model = {name: size for name, size in sizes.items() if name.startswith(f"pdserve/models/{bundled}/")}
        assert {
            f"pdserve/models/{bundled}/{name}" for name in ("config.json", "tokenizer.json", "model.safetensors")
        } <= model.keys()
        assert sum(model.values()) <= most
    assert version_of_module(wheel, tmp_path / "installed") == f"pdserve {version('pdserve')}\n"


def version_of_module(wheel: Path, folder: Path) -> str:
    """Output of `python -m pdserve --version` with the wheel's files, those that it needs, in place of this checkout."""
    with zipfile.ZipFile(wheel) as archive:
        needed = re.compile(r"pdserve/(__main__|(cli|common)/.+)\.py|pdserve-[^/]+/METADATA")
        archive.extractall(folder, [name for name in archive.namelist() if needed.fullmatch(name)])
    # without `site`, so that no .pth file of site-packages leads to the checkout
    code = "import runpy, sys; sys.path[:0] = sys.argv[1:3]; sys.argv[1:] = ['--version']; " + (
        "runpy.run_module('pdserve', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(folder), sysconfig.get_path("purelib")]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
