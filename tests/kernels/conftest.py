"""The compiled library, for the tests of what is computed in it."""

from __future__ import annotations

import pytest

from pdserve.kernels.native.build_library import BuildError, build
from pdserve.kernels.native.native_library import NativeLibrary


@pytest.fixture(scope="session")
def built() -> NativeLibrary:
    """The library of these sources; without a compiler the test is skipped."""
    try:
        return NativeLibrary(str(build()))
    except BuildError as error:
        pytest.skip(str(error))
