"""Guards of the front ends: keys, and trace headers that come with a request."""

from __future__ import annotations

import pytest

from pdserve.common.errors import Unauthenticated
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.tenants.api_keys import ApiKeys


@pytest.mark.parametrize(
    ("keys", "header", "ok"),
    [
        ((), None, True),
        (("k1", "k2"), "Bearer k2", True),
        (("k1",), "bearer k1", True),
        (("k1",), None, False),
        (("k1",), "Bearer", False),
        (("k1",), "Bearer k1x", False),
        (("k1",), "k1", False),
    ],
)
def test_api_keys(keys, header, ok):
    known = ApiKeys.from_settings(RouterSettings(api_keys=keys or None))
    if ok:
        assert bool(known.check(header).tenant) == bool(keys)
    else:
        with pytest.raises(Unauthenticated):
            known.check(header)
