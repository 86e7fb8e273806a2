"""The digests of blocks: `xxh3_64`, and a code that nobody without the key can make."""

from __future__ import annotations

import secrets
import threading

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import GMAC, KEY_BYTES, XXH3, XXH3_64, Gmac
from pdserve.common.settings.worker_settings import KvDigestName
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.pull.digest import block_digests, matching
from pdserve.kv_transfer.pull.digest_rule import DigestRule

KEY = bytes(range(KEY_BYTES))
BLOCK = memoryview(bytes(range(256)) * 64)
TRANSFER_ID, TOKEN = b"t" * 16, b"k" * 16


def test_a_digest_depends_on_every_bit_the_key_and_the_index() -> None:
    digest = Gmac(KEY).of(BLOCK, 3)
    assert 0 <= digest < 1 << 64
    assert Gmac(KEY).of(BLOCK, 3) == digest
    others = {Gmac(KEY).of(BLOCK, 4), Gmac(KEY[::-1]).of(BLOCK, 3)}
    # both halves of the key count
    others |= {Gmac(bytes(16) + KEY[16:]).of(BLOCK, 3), Gmac(KEY[:16] + bytes(16)).of(BLOCK, 3)}
    for position in (0, 1, 4095, len(BLOCK) - 1):
        for bit in (1, 128):
            changed = bytearray(BLOCK)
            changed[position] ^= bit
            others.add(Gmac(KEY).of(memoryview(changed), 3))
    assert len(others) == 4 + 8
    assert digest not in others


def test_the_tag_of_gmac_is_never_shown() -> None:
    """Two tags under one nonce would give the key of its hash away."""
    tag = AESGCM(KEY[:16]).encrypt(bytes(12), b"", BLOCK)
    shown = Gmac(KEY).of(BLOCK, 0).to_bytes(8, "big")
    assert shown not in tag
    assert shown[::-1] not in tag


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 16"):
        Gmac(KEY[:16])


def test_threads_share_one_digest() -> None:
    digest = Gmac(KEY)
    blocks = [memoryview(secrets.token_bytes(200_000)) for _ in range(16)]
    alone = [digest.of(block, index) for index, block in enumerate(blocks)]
    together: list[list[int]] = []

    def work() -> None:
        for _ in range(10):
            together.append([digest.of(block, index) for index, block in enumerate(blocks)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [alone] * 40


@pytest.mark.parametrize("digest", [XXH3, Gmac(KEY)], ids=[XXH3_64, GMAC])
def test_what_is_published_is_what_is_checked(digest: Gmac) -> None:
    pool = HostPool(memoryview(bytearray(secrets.token_bytes(4 * 64))), 64, 4)
    digests = block_digests(pool, [2, 0, 3], digest, first_index=5)
    blocks = [BlockToRead(5 + place, digests[place], number) for place, number in enumerate((2, 0, 3))]
    assert matching(pool, blocks, digest) == [True] * 3
    pool.block(0)[7] ^= 1
    assert matching(pool, blocks, digest) == [True, False, True]


def rule(setting: KvDigestName = "auto", *, clear: bool = True, secret: bytes = b"s") -> DigestRule:
    def derive(context: bytes) -> bytes:
        return (secret + context).ljust(KEY_BYTES, b"\0")[:KEY_BYTES]

    return DigestRule(setting, derive, clear=clear)


@pytest.mark.parametrize(
    ("setting", "clear", "peer", "allowed"),
    [
        ("auto", True, "10.0.0.2:50052", (GMAC,)),
        ("auto", True, "prefill-1.example:50052", (GMAC,)),
        ("auto", True, "", (GMAC,)),
        ("auto", True, "127.0.0.1", (XXH3_64, GMAC)),
        ("auto", True, "[::1]:7", (XXH3_64, GMAC)),
        ("auto", False, "10.0.0.2:50052", (XXH3_64, GMAC)),
        ("gmac", False, "127.0.0.1", (GMAC,)),
        ("xxh3_64", True, "10.0.0.2", (XXH3_64,)),
    ],
)
def test_which_digests_count_with_a_peer(
    setting: KvDigestName, clear: bool, peer: str, allowed: tuple[str, ...]
) -> None:
    assert rule(setting, clear=clear).allowed(peer) == allowed


def test_a_source_takes_no_less_than_its_own_rule_asks_for() -> None:
    assert rule().choose([XXH3_64, GMAC], "127.0.0.1") == XXH3_64
    assert rule().choose([XXH3_64, GMAC], "10.0.0.2") == GMAC
    with pytest.raises(TransferFailed, match="no common digest algorithm: gmac here, xxh3_64 there"):
        rule().choose([XXH3_64], "10.0.0.2")
    with pytest.raises(TransferFailed, match="none there"):
        rule().choose([], "127.0.0.1")
    with pytest.raises(TransferFailed) as caught:
        rule().choose(["x" * 100_000] * 100_000, "10.0.0.2")
    assert len(caught.value.message) < 500


def test_each_transfer_has_a_key_of_its_own() -> None:
    def digest(transfer_id: bytes = TRANSFER_ID, token: bytes = TOKEN, secret: bytes = b"s") -> int:
        return rule(secret=secret).make(GMAC, transfer_id, token).of(BLOCK, 0)

    first = digest()
    assert first == digest()
    assert first not in {digest(token=b"K" * 16), digest(secret=b"S")}
    assert rule().make(XXH3_64, TRANSFER_ID, TOKEN) is XXH3
    with pytest.raises(TransferFailed, match="'md5' is unknown"):
        rule().make("md5", TRANSFER_ID, TOKEN)
