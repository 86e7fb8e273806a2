"""Puts the compiled library of `pdserve.kernels.native` into wheels and editable installs, where there is a C++ compiler.

No build fails without one: the wheel is then pure Python, and what it would compute is computed in torch operations.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "pdserve/kernels/native"


class NativeLibraryHook(BuildHookInterface[Any]):
    """Read by hatchling (`tool.hatch.build.targets.wheel.hooks.custom`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build. version: `standard` or `editable`."""
        folder = Path(self.root, "kernels", NATIVE)
        # the file by itself: pdserve need not be importable here
        builder = runpy.run_path(str(folder / "build_library.py"))
        try:
            library: Path = builder["build"](folder)
        except (builder["BuildError"], OSError) as error:
            self.app.display_warning(f"kernels in C++ are left out: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"{NATIVE}/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
