"""Block hashes and request digests: what they cover, and what they keep apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.block_hash import (
    BLOCK_HASH_BYTES,
    DIGEST_BYTES,
    BlockHasher,
    placement_hash,
    token_bytes,
)
from pdserve.common.security.deployment_key import DeploymentKey

KEY = DeploymentKey(b"0123456789abcdef")
HASHER = BlockHasher(KEY, 4)
ROOT = HASHER.root("model")
TOKENS = list(range(11))


def test_only_full_blocks_are_hashed_each_with_24_bytes() -> None:
    assert [len(HASHER.extend(ROOT, TOKENS[:n])) for n in (0, 3, 4, 7, 8, 11)] == [0, 0, 1, 1, 2, 2]
    assert {len(value) for value in HASHER.extend(ROOT, TOKENS)} == {BLOCK_HASH_BYTES}
    assert len(ROOT) == len(HASHER.request_digest(ROOT, HASHER.extend(ROOT, TOKENS), TOKENS)) == DIGEST_BYTES


def test_what_is_published_of_a_hash_does_not_name_the_block() -> None:
    held = HASHER.extend(ROOT, list(range(4000)))
    published = [placement_hash(block_hash) for block_hash in held]
    assert len(set(published)) == len(held)
    for full, told in zip(held, published, strict=True):
        # a secret of 16 bytes remains, and a chain that goes on from the published part finds nothing
        assert len(told) == 8
        assert told not in full[:16]
        assert full[:16] not in told
    continued = HASHER.extend(held[0], [1, 2, 3, 4])
    assert continued != HASHER.extend(published[0], [1, 2, 3, 4])
    assert continued != HASHER.extend(bytes(16) + published[0], [1, 2, 3, 4])


def test_hashes_are_equal_across_processes() -> None:
    assert [value.hex() for value in HASHER.extend(ROOT, TOKENS)] == [
        value.hex()
        for value in BlockHasher(DeploymentKey(bytes(KEY.secret)), 4).extend(
            BlockHasher(KEY, 4).root("model"), tuple(TOKENS)
        )
    ]
    # written down once: another release must find the same prefixes
    assert (ROOT.hex(), HASHER.extend(ROOT, TOKENS)[1].hex()) == GOLDEN


GOLDEN = ("6fa9fcb1db017b19fce3ff55e26f6229", "9dafd28118b79f8ac414ffc4aca105306223853c4e7839f7")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40))
def test_a_chain_may_be_continued_at_any_block(tokens: list[int], at: int) -> None:
    whole = HASHER.extend(ROOT, tokens)
    full = min(at // 4, len(whole))
    first = whole[:full]
    assert first + HASHER.extend(first[-1] if first else ROOT, tokens[full * 4 :]) == whole


@given(st.lists(st.integers(0, 60), min_size=4, max_size=40), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    before, after = HASHER.extend(ROOT, tokens), HASHER.extend(ROOT, other)
    for index, (one, two) in enumerate(zip(before, after, strict=True)):
        assert (one == two) == (index < place // 4)
    assert HASHER.request_digest(ROOT, before, tokens) != HASHER.request_digest(ROOT, after, other)


def test_key_block_size_model_salt_and_adapter_keep_prefixes_apart() -> None:
    roots = [
        ROOT,
        BlockHasher(DeploymentKey(b"another key, also long enough"), 4).root("model"),
        HASHER.root("other"),
        HASHER.root("model", "salt"),
        HASHER.root("model", None, "salt"),
        HASHER.root("model", "sal", "t"),
        HASHER.root("mode", "l"),
        HASHER.root("model", tenant="salt"),
        HASHER.root("model", tenant="alice"),
    ]
    assert len(set(roots)) == len(roots)
    assert HASHER.root("model", "") == ROOT
    other_key = BlockHasher(DeploymentKey(b"another key, also long enough"), 4)
    assert HASHER.extend(ROOT, TOKENS)[0] != other_key.extend(ROOT, TOKENS)[0]
    assert HASHER.extend(ROOT, TOKENS)[0] not in BlockHasher(KEY, 2).extend(ROOT, TOKENS)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_the_digest_covers_root_prefix_tail_length_and_extras(length: int) -> None:
    tokens = TOKENS[:length]
    hashes = HASHER.extend(ROOT, tokens)
    digest = HASHER.request_digest(ROOT, hashes, tokens)
    other_root = HASHER.root("other")
    others = [
        HASHER.request_digest(other_root, HASHER.extend(other_root, tokens), tokens),
        HASHER.request_digest(ROOT, HASHER.extend(ROOT, [*tokens, 0]), [*tokens, 0]),
        HASHER.request_digest(ROOT, HASHER.extend(ROOT, tokens[:-1]), tokens[:-1]),
        HASHER.request_digest(ROOT, hashes, [*tokens[:-1], 59] if length % 4 else tokens, b"" if length % 4 else b"x"),
        HASHER.request_digest(ROOT, hashes, tokens, b"extras"),
    ]
    assert digest not in others
    assert digest not in hashes
    assert digest == HASHER.request_digest(ROOT, hashes, tuple(tokens))


def test_tokens_are_four_bytes_little_endian() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    for outside in (-1, 2**32):
        with pytest.raises(OverflowError):
            token_bytes([outside])
