"""Puts the compiled library of `pdserve.kernels.native` into wheels and editable installs, where there is a C++ compiler.

No build fails without one: the wheel is then pure Python, and what it would compute is computed in torch operations.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "pdserve/kernels/native"
LEAVE_OUT = "LEAVE_OUT_NATIVE_KERNELS"
"""Variable that `install.py` sets when it has tried already, and said why it failed."""


class NativeLibraryHook(BuildHookInterface[Any]):
    """Read by hatchling (`tool.hatch.build.targets.wheel.hooks.custom`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build. version: `standard` or `editable`."""
        if os.environ.get(LEAVE_OUT):
            return
        # this tree's, whatever is installed
        sys.path.insert(0, str(Path(self.root, "kernels")))
        builder = importlib.import_module(f"{NATIVE.replace('/', '.')}.build_library")
        try:
            library: Path = builder.build(Path(self.root, "kernels", NATIVE))
        except (builder.BuildError, OSError) as error:
            self.app.display_warning(f"kernels in C++ are left out: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"{NATIVE}/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
