"""The contract of every `BlockConnector`. A connector's test file gives the suite its links:

class TestMyConnector(ConnectorContract):
    def make_link(self, source_pool, receiver_pool, read_stall_s): return MyLink(...)

`TokenContract` comes on top where the source answers each read itself, and can refuse it.
"""

from __future__ import annotations

from .contract_ends import EndContract
from .contract_faults import FaultContract
from .contract_reads import ReadContract
from .contract_tokens import TokenContract

__all__ = ["ConnectorContract", "TokenContract"]


class ConnectorContract(ReadContract, FaultContract, EndContract):
    """The whole suite."""
