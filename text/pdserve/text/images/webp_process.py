"""`decoded_webp`: a large WebP file, decoded in a process of its own.

Pillow's decoder of WebP files lets no other thread of its process run: a large image would stop the event loop. The process here
has no secret, and the memory that its pixels need.
"""

from __future__ import annotations

import io
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.processes.child_environment import child_environment

if TYPE_CHECKING:
    from PIL.Image import Image

_HEAD = struct.Struct("<4sII")
"""Mode, width and height, before the pixels."""
_BYTES_PER_PIXEL = 32
"""Two canvases, the frame, and its copies, of 4 bytes each."""
_OTHER_BYTES = 256 << 20
_CPU_S = 10
_WALL_S = 30.0
_PAGE_BYTES = resource.getpagesize()


def decoded_webp(data: bytes, num_pixels: int, where: str, field: str) -> Image:
    """num_pixels: of the file, by its header. Blocks the thread.

    Raises: InvalidRequest for a file that cannot be decoded; Overloaded after 30 s.
    """
    import PIL.Image

    command = [
        sys.executable,
        "-P",
        "-m",
        "pdserve.text.images.webp_process",
        str(_OTHER_BYTES + _BYTES_PER_PIXEL * num_pixels),
    ]
    try:
        ended = subprocess.run(
            command,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            timeout=_WALL_S,
        )
    except subprocess.TimeoutExpired:
        raise Overloaded(f"{where} was not decoded within {_WALL_S:g} s: the machine is busy") from None
    if ended.returncode or len(ended.stdout) < _HEAD.size:
        raise InvalidRequest(f"{where} cannot be decoded: its WebP decoder ended with status {ended.returncode}", field)
    packed, width, height = _HEAD.unpack_from(ended.stdout)
    mode = packed.rstrip().decode()
    pixels: Any = memoryview(ended.stdout)[_HEAD.size :]
    return PIL.Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1)


def main() -> None:
    import PIL.Image

    data = sys.stdin.buffer.read()
    begins_with = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    most = begins_with + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    image = PIL.Image.open(io.BytesIO(data), formats=("WEBP",))
    image.load()
    sys.stdout.buffer.write(_HEAD.pack(image.mode.ljust(4).encode(), *image.size))
    sys.stdout.buffer.write(image.tobytes())


if __name__ == "__main__":
    main()
