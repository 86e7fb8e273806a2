"""Types, hashing, settings, errors, wire conversion and time vocabulary shared by every service. Imports no torch."""

from __future__ import annotations

import os

# before gRPC is loaded: its handlers at a fork break children of a process in which its threads are at work, and no child of ours
# uses the gRPC of its parent
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
