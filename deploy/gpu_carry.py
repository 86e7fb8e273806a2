"""`make gpu-carry`: wheels that `make gpu` needs on a machine with a GPU and no network, in a folder of at most 60 MiB.

Python 3.12, torch, transformers and what these ask for are there; all else that pdserve and its tests need is carried, at the
versions and with the hashes of `locks/`. NIXL's wheel has 59 MB, mostly of plug-ins that pdserve does not load: it is packed again
without them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PYTHON = "3.12"
MAX_MIB = 60
THERE = {
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy", "typing-extensions",
    "hf-xet", "huggingface-hub", "numpy", "packaging", "pyyaml", "regex", "safetensors", "tokenizers", "tqdm", "transformers",
}  # fmt: skip
"""Packages that torch and transformers ask for, and those two. transformers must find the versions that were installed with it."""
OF_TESTS = {
    "attrs", "execnet", "hypothesis", "iniconfig", "pluggy", "psutil", "pytest", "pytest-asyncio", "pytest-timeout",
    "pytest-xdist", "sortedcontainers",
}  # fmt: skip
NIXL = ("nixl", "nixl-cu13")
GLIBC_MINORS = (34, 31, 28, 27, 24, 17, 12, 5)
"""Versions in the tags of wheels, which pip matches exactly."""
LEFT_OUT = re.compile(r"^(nixl_ep|.*\.(scripts|data)/)|/libplugin_(?!UCX\.so)|/libucx_perftest|\.la$")
"""Files of NIXL: its expert parallelism, and plug-ins for storage and other transports."""


def locked(lock: str) -> dict[str, str]:
    """Name -> its lines in a lock, hashes included."""
    text = Path(f"locks/{lock}.txt").read_text()
    return {entry.partition("==")[0]: entry for entry in re.findall(r"^[a-z0-9].*(?:\n .*)*\n", text, re.MULTILINE)}


def requirements() -> list[str]:
    """Entries of all packages that are carried."""
    runtime, nixl = locked("runtime"), locked("nixl")
    tests = locked("build") | locked("dev")
    return [
        *(entry for name, entry in runtime.items() if name not in THERE),
        *(entry for name, entry in tests.items() if name in OF_TESTS - runtime.keys()),
        *(nixl[name] for name in NIXL),
    ]


def download(folder: Path) -> None:
    """Exits with pip's status when it fails."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements()))
        file.flush()
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
        ]
        command += ["--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON]
        command += [argument for platform in platforms for argument in ("--platform", platform)]
        command += ["--dest", str(folder), "--requirement", file.name]
        if status := subprocess.run(command, check=False).returncode:
            sys.exit(status)


def pack_again(wheel: Path) -> None:
    """Replace a wheel by one without `LEFT_OUT`, with the record of the files that it has."""
    smaller = wheel.with_suffix(".smaller")
    lines = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        [record] = [name for name in old.namelist() if name.endswith(".dist-info/RECORD")]
        for item in old.infolist():
            if item.filename == record or LEFT_OUT.search(item.filename):
                continue
            content = old.read(item)
            new.writestr(item, content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{item.filename},sha256={digest},{len(content)}\n")
        new.writestr(record, "".join([*lines, f"{record},,\n"]))
    smaller.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download(folder)
    for wheel in folder.glob("nixl_cu13-*.whl"):
        pack_again(wheel)
    wheels = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_size, reverse=True)
    mib = sum(path.stat().st_size for path in wheels) / 2**20
    largest = ", ".join(f"{path.name.split('-')[0]} {path.stat().st_size / 2**20:.1f}" for path in wheels[:5])
    print(f"{folder}: {len(wheels)} wheels for Python {PYTHON}, {mib:.1f} MiB (largest: {largest})")
    if mib > MAX_MIB:
        sys.exit(f"that is more than {MAX_MIB} MiB")


if __name__ == "__main__":
    main()
