"""Product lines that each commit added, less those that it removed, summed by feature."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "21b008b"
"""The commit that laid the packages out in subfolders; before it came the release of trust, with it begins the house."""
FEATURES = {
    "authentication between services, keyed digests": "636e383 8ef7979 0e3185c be6652a 9465d11 ec70d51",
    "TLS: roles, renewal, no clear text beyond this machine": "4f2fce0 7a0521e 4723ad8 1c7a096",
    "API keys, tenants, fair shares, audit log": "bd76a03 162f95c 5f6b9ca 1876110 a344259 1184743 4c76213",
    "limits of connections, bodies, messages and answers":
        "305119b cb129c9 3ef5cab 9202f7b 228a4a9 288e952 dec0cf3 f5c80a5 4a5035e 54130e3 bb67708 6d73321 986096d"
        " e6231b5 5bba32c",
    "secrets and addresses kept out of logs and errors": "75d398a 7a53feb",
    "grammars in processes with a budget": "b310506 c808dc3 a2bf047 9af184e",
    "chat templates with a budget, special tokens as text": "dfb0f5e f360dc9 a6f26af c067f7e",
    "checkpoints read as transformers does, or refused": "759ef16 60a27ec",
    "sampling without a sort, its version in the identity": "20b6ab6 84d994d a55e050 9b8e083 8291ec5",
    "engines that hang, deadlines, crash guard, probes": "bccfc66 9eac6f5 117cfe0 7cf2c70 c015adb 1f9d01e 833cf6e a06824e",
    "attention back ends, model families": "9fe15b8",
    "Qwen3-MoE": "4dc0054 85fc8e9",
    "one carrier of request fields, protocol version 4": "8199c98",
    "engine client, engine in a process, LLMEngine": "2eff161",
    "KV cache groups, blocks by heads": "0bb8023 1fcce94 f4a4cf6 a52ec5f",
}  # fmt: skip
"""Feature -> its commits. The rest of a release is small repairs, or the house itself."""
USERS = {
    "pdserve bench": "e88f01b 3bbdad9 e7d3c49",
    "pdserve up configured as the services, models of the Hub": "7f435b4 a9d49ac 1427279 7c55bcb",
    "fields that clients send, bounded white space, OpenAPI, traces": "a91d49a 4cee464 fa0ed6a c8c9f0a 5778f7a",
}
"""Features of the release after the house, whose first commits lie among those of the house."""
_PRODUCT = re.compile(r"[a-z_]+/pdserve/[^/]+/.*(?<!_pb2)(?<!_pb2_grpc)\.py")


def commits_of(root: Path, base: str, last: str) -> Iterator[tuple[str, int]]:
    """Name and net product lines of each commit after base, oldest first. Raises: CalledProcessError without them."""
    command = ["git", "log", "--reverse", "--no-renames", "--numstat", "--format=@%h", "--abbrev=7", f"{base}..{last}"]
    for text in subprocess.check_output(command, cwd=root, text=True).split("@")[1:]:
        name, *rows = text.splitlines()
        changed = [row.split("\t") for row in rows if row]
        yield name, sum(int(more) - int(less) for more, less, path in changed if _PRODUCT.fullmatch(path))


def lines_by_feature(root: Path, base: str, last: str, lines: int) -> Iterator[str]:
    """A table from `lines`, those of base, to those of last; every commit is in one row."""
    feature_of = {name: feature for feature, names in (FEATURES | USERS).items() for name in names.split()}
    sums: dict[str, dict[str, int]] = {release: defaultdict(int) for release in ("trust", "house", "users")}
    release, rest = "trust", "small repairs"
    for name, net in commits_of(root, base, last):
        if name == FOLDERS:
            release, rest = "house", "folders, names, interfaces, one path instead of two, prose"
        feature = feature_of.get(name, rest)
        sums["users" if feature in USERS else release][feature] += net
    yield "| release | lines | added less removed |"
    yield "|---|---|---|"
    yield f"| | before | {lines:,} |"
    for release, features in sums.items():
        for feature, net in sorted(features.items(), key=lambda item: -item[1]):
            yield f"| {release} | {feature} | {net:+,} |"
            lines += net
    yield f"| | after | {lines:,} |"
