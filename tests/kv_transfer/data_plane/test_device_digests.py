"""Blocks that are verified where they land, in a ring on a device: nothing wrong reaches the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import xxhash

from pdserve.common.errors import ConfigError
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.landing_ring import RingConnector
from pdserve.kv_transfer.make_connectors import serve_pool
from pdserve.kv_transfer.memory import device_pool
from pdserve.kv_transfer.memory.device_digests import device_digests
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.engine.pretend_device import PretendTensor
from tests.support.engine.pretend_pool import digest_on_device, reachable_by_nixl
from tests.support.run.waiting import HANG_S
from tests.support.transfers.transfer_fakes import FakeConnector

from .connector_contract import ConnectorContract
from .contract_link import WINDOW_BLOCKS, Link, Setup
from .device_ring import NUM_SLOTS, pretended
from .recorded_read import make_pool, same_bytes

nixl_link = pytest.importorskip("tests.kv_transfer.data_plane.nixl_link", exc_type=ImportError)


@contextmanager
def _no_copy_to_the_host() -> Iterator[None]:
    """Digests of blocks that are copied to the host first fail."""

    def copied(*_: object) -> None:
        raise AssertionError("blocks are copied to the host for their digests")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_pool.DevicePool, "_copied", copied)
        yield


class NixlDeviceLink:
    """A `Link` over NIXL whose pools and rings are on the pretended device."""

    def __init__(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> None:
        pools = [pretended(pool) for pool in (source_pool, receiver_pool)]
        # the same bytes as the host has them: where the link turns bits over
        held = [make_pool(None, NUM_SLOTS, pool.block_bytes) for pool in pools]
        landings = [pretended(ring) for ring in held]
        self._link = nixl_link.NixlLink(pools[0], receiver_pool, read_stall_s, tuple(landings))
        self._link.gate.pool = held[1]
        self.source, self.receiver = (
            RingConnector(inner, pool, landing._blocks, landing, HANG_S)
            for inner, pool, landing in zip((self._link.source, self._link.receiver), pools, landings, strict=True)
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def close(self) -> None:
        self.receiver.close()
        self.source.close()
        self._link.close()
        assert self.receiver.num_free == self.source.num_free == NUM_SLOTS, "slots are still out of use"


class OnDevice:
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return NixlDeviceLink(source_pool, receiver_pool, read_stall_s)  # type: ignore[return-value]

    @pytest.fixture(autouse=True)
    def _on_device(self) -> Iterator[None]:
        with reachable_by_nixl(), _no_copy_to_the_host():
            yield


@pytest.mark.slow
class TestRingOnDeviceOverNixl(OnDevice, ConnectorContract):
    """The whole contract."""


class TestWhatIsWrong(OnDevice):
    make_setup = ConnectorContract.make_setup
    setup = ConnectorContract.setup

    def test_i3_a_bit_that_is_wrong_in_the_ring_is_found_there(self, setup: Setup) -> None:
        transfer = setup.transfer(64)
        blocks = transfer.blocks(range(64), range(64))
        wrong = blocks[35]
        blocks[35] = type(wrong)(wrong.index, wrong.digest ^ 1, wrong.local_block, wrong.location)
        setup.link.flip_one_bit()
        read = setup.read(transfer, blocks)
        assert "block 35 " in read.wait_failed()
        assert 0 < setup.link.num_reread <= WINDOW_BLOCKS
        assert not any(setup.receiver_pool.block(35)), "unverified bytes reached the pool"
        assert same_bytes(transfer, setup.receiver_pool, blocks, sorted(read.landed_blocks))
        blocks[35] = wrong
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE


def _blocks(count: int) -> torch.Tensor:
    return torch.randn(count, 4, 31, generator=torch.Generator().manual_seed(3))


def test_kernels_digest_pool_and_ring_as_a_processor_does() -> None:
    pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")
    from tests.support.kernels.triton_interpreter import interpreted

    with interpreted(seed=1):
        held = _blocks(9)
        digest_blocks = device_digests(held, "triton")
        pool = DevicePool(held, 1, 1, HANG_S, digest_blocks)
        with _no_copy_to_the_host():
            found = pool.digests([8, 0, 3, 4], range(4), XXH3)
    assert found == [xxhash.xxh3_64_intdigest(held[number].numpy().tobytes()) for number in (8, 0, 3, 4)]


@pytest.mark.parametrize("shape", [(5, 4, 31), (5, 63), (5, 4, 15)], ids=["fits", "no multiple of 8", "short"])
def test_blocks_that_kernels_do_not_take_are_digested_on_the_host(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")
    from tests.support.kernels.triton_interpreter import interpreted

    with interpreted():
        assert (device_digests(torch.zeros(shape), "triton") is not None) == (shape == (5, 4, 31))
    assert device_digests(torch.zeros(shape), "torch") is None


def test_kernels_that_cannot_be_had_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kernels is 'tritn'"):
        device_digests(_blocks(1), "tritn")


def test_kernels_are_compiled_before_a_pool_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first launch compiles, which takes longer than a transfer may."""
    digested: list[tuple[torch.Size, Sequence[int]]] = []

    def digest_blocks(pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        digested.append((pool.shape, blocks))
        return digest_on_device(pool, blocks)

    monkeypatch.setattr("pdserve.kv_transfer.make_connectors.device_digests", lambda *_: digest_blocks)
    connectors = ConnectorSet([FakeConnector()])
    held = _blocks(6)
    pool = serve_pool(connectors, PretendTensor(held), 1 << 20, "auto")
    assert digested == [((6, 124), [0])]
    with _no_copy_to_the_host():
        assert pool.digests([5], [0], XXH3) == [xxhash.xxh3_64_intdigest(held[5].numpy().tobytes())]
    connectors.close()
