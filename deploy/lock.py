"""`make lock`: resolve what pyproject.toml asks for, once, and write `locks/*.txt` with a hash of every file.

One resolution, split by what asks for a package, so that no two files disagree. Only mooncake.txt, ray.txt, formats.txt and dev.txt
share packages, since each may be installed without the others:

    torch.txt       torch alone: PyPI's build, which is CUDA's
    torch-cpu.txt   torch alone: the CPU's build, which other indexes serve
    torch-cuda.txt  what the CUDA build needs on top, but triton: CUDA's libraries
    triton.txt      the extra `triton`, which the CUDA build needs too
    runtime.txt     what else pdserve needs
    nixl.txt        what the extra `nixl` adds
    bench.txt       what the extra `bench` adds
    mooncake.txt    what the extra `mooncake` adds
    ray.txt         what the extra `ray` adds
    formats.txt     what the extra `formats` adds
    dev.txt         what the extra `dev` adds to both
    helm.txt        what the extra `helm` adds to `dev`
    build.txt       what builds pdserve, and the one dependency without wheels everywhere; installed first

Each file `tests/clients/requirements/NAME.in` is resolved by itself into NAME.txt beside it: client libraries disagree with each
other and with pdserve about versions, and have environments of their own. So do the other versions of Triton with which
`make kernels` runs, in `tests/kernels/requirements`, and the builder of the documentation's site, in `deploy/requirements`.

Versions that stand in the files stay while they satisfy pyproject.toml; `--upgrade` moves all. Needs uv (the extra `dev`) and
PyPI. deploy/install.py installs from the files.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

INDEX = "https://pypi.org/simple"
BUILD = ["hatchling", "editables", "setuptools"]
EXTRAS = ["nixl", "bench", "mooncake", "ray", "formats"]
"""Extras apart from `dev`, which has none of nixl and bench."""
APART = (Path("tests/clients/requirements"), Path("tests/kernels/requirements"), Path("deploy/requirements"))
"""Folders of sets that are resolved by themselves."""
CPU_WHEELS = "torch-cpu-wheels.sha256"
"""Written by hand, in the form of sha256sum: what https://download.pytorch.org/whl/cpu/torch/ lists for the locked version."""
OF_CUDA = re.compile(r"(nvidia|cuda)-")
HEADER = "# By `make lock` (deploy/lock.py): do not edit. Installed by deploy/install.py, which says how.\n"


def resolve(arguments: list[str], constraints: Path, *, hashes: bool) -> dict[str, str]:
    """Name -> its lines in a requirements file. arguments: of `uv pip compile`."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
        "--fork-strategy", "fewest",  # one version of a package for every Python
        "--default-index", INDEX, "--no-header", "--no-annotate", "--constraints", str(constraints), *arguments,
    ]  # fmt: skip
    command += ["--generate-hashes"] if hashes else []
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {entry.partition("==")[0]: entry for entry in re.findall(r"^[a-z0-9].*(?:\n .*)*\n", text, re.MULTILINE)}


def ensure_uv(lock: Path) -> None:
    """Install the uv that is locked, where there is none: `make lock` works with an environment that is behind."""
    if importlib.util.find_spec("uv") is None:
        entry = re.search(r"^uv==.*(?:\n .*)*\n", lock.read_text(), re.MULTILINE)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(entry[0] if entry else "uv\n")
            file.flush()
            command = [
                sys.executable,
                "-m",
                "pip",
                "--quiet",
                "install",
                "--require-hashes",
                "--no-deps",
                "-r",
                file.name,
            ]
            subprocess.run(command, check=True)


def torch_for_cpus(wheels: str, version: str) -> str:
    """The entry of the CPU builds. wheels: lines of sha256sum. Exits when they are of another version."""
    listed = [line.split() for line in wheels.splitlines()]
    if any(name.split("-")[1] != f"{version}+cpu" for _, name in listed):
        sys.exit(
            f"torch is {version} now, but locks/{CPU_WHEELS} has other wheels: put in those of Python 3.11 to 3.13 for "
            "x86_64 and aarch64 that https://download.pytorch.org/whl/cpu/torch/ lists"
        )
    return " \\\n".join([f"torch=={version}+cpu", *(f"    --hash=sha256:{digest}" for digest, _ in listed)]) + "\n"


def without_marker(entry: str, environment: str) -> str:
    """The entry without the marker that every one has."""
    return entry.replace(f" ; {environment} ", " ").replace(f" ; {environment}\n", "\n")


def split(full: dict[str, str], closures: dict[str, set[str]]) -> dict[str, list[str]]:
    """File -> names. closures: what `build`, `runtime` and the extras ask for, with all that those ask for."""
    cuda = {name for name in full if OF_CUDA.match(name)}
    of_gpus = cuda | {"torch", "triton"}
    runtime = closures["runtime"] - of_gpus
    extras = {name: closures[name] - closures["runtime"] - of_gpus for name in EXTRAS}
    apart = extras["mooncake"] | extras["ray"] | extras["formats"]
    parts = {
        "build": closures["build"],
        "torch": {"torch"},
        "torch-cuda": cuda,
        "triton": {"triton"},
        "runtime": runtime,
        **extras,
        "dev": closures["dev"] - of_gpus - runtime - closures["build"] - extras["nixl"] - extras["bench"],
        "helm": full.keys() - closures["dev"] - closures["build"] - of_gpus - apart,
    }
    return {name: sorted(part) for name, part in parts.items()}


def pins(files: Iterable[Path], *, upgrade: bool) -> str:
    """The versions that stand in the files, as constraints. upgrade: none."""
    text = "" if upgrade else "\n".join(path.read_text() for path in files if path.exists())
    return "\n".join(re.findall(r"^[a-z0-9][\w.-]*==[\w.!]+(?= )", text, re.MULTILINE))


def write(lock: Path, entries: Iterable[str], environment: str) -> None:
    parts = [without_marker(entry, environment) for entry in entries]
    lock.write_text(HEADER + "".join(parts))
    print(f"{lock}: {len(parts)} packages")


def lock_apart(environment: str, before: Path, *, upgrade: bool) -> None:
    """before: a file for constraints. upgrade: as of `pins`."""
    for asked in sorted(path for folder in APART for path in folder.glob("*.in")):
        lock = asked.with_suffix(".txt")
        before.write_text(pins([lock], upgrade=upgrade))
        write(lock, resolve([str(asked)], before, hashes=True).values(), environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--upgrade", action="store_true", help="move every version to the newest that pyproject.toml admits"
    )
    upgrade: bool = parser.parse_args().upgrade
    locks = Path("locks")
    ensure_uv(locks / "dev.txt")
    environment = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["uv"]["environments"][0]
    with tempfile.TemporaryDirectory() as folder:
        before, build = (Path(folder) / name for name in ("before.txt", "build.in"))
        before.write_text(pins(sorted(locks.glob("*.txt")), upgrade=upgrade))
        build.write_text("\n".join(BUILD))
        project = ["pyproject.toml"]
        full = resolve([*project, str(build), "--all-extras"], before, hashes=True)
        before.write_text("\n".join(entry.partition(" ")[0].strip() for entry in full.values()))
        closures = {
            "build": set(resolve([str(build)], before, hashes=False)),
            "runtime": set(resolve(project, before, hashes=False)),
            **{name: set(resolve([*project, "--extra", name], before, hashes=False)) for name in (*EXTRAS, "dev")},
        }
        lock_apart(environment, before, upgrade=upgrade)
    version = re.match(r"torch==([\w.]+)", full["torch"])
    if version is None:
        sys.exit(f"torch cannot be read: {full['torch']}")
    (locks / "torch-cpu.txt").write_text(HEADER + torch_for_cpus((locks / CPU_WHEELS).read_text(), version[1]))
    for name, part in split(full, closures).items():
        write(locks / f"{name}.txt", (full[one] for one in part), environment)


if __name__ == "__main__":
    main()
