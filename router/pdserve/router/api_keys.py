"""Bearer keys of both front ends."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from pdserve.common.errors import Unauthenticated


class ApiKeys:
    """Without any key everybody may come in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str | None) -> str:
        """authorization: the header's value. Returns a name for the key; "" when none is needed.

        Raises: Unauthenticated.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer <key>'")
        secret = given.strip().encode()
        # every key is compared, whichever matches: time tells nothing
        matches = [hmac.compare_digest(secret, key) for key in self._keys]
        if not any(matches):
            raise Unauthenticated("the API key is not known")
        return f"key {matches.index(True)}"
