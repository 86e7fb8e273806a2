"""The status page in a headless Chromium. With `SCREENSHOTS=folder` it keeps what it has seen."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.router.fake_worker import ADMITTED, forever, play
from tests.router.test_tenants import complete, key_of, keys_file
from tests.support.processes.browser import CHROMIUM, Browser, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

HOSTILE = "<img src=x onerror=alert(1)>"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def keep(tmp_path: Path, name: str, picture: bytes) -> None:
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(picture)


async def fits(page: Browser) -> None:
    """Nothing is wider than the window."""
    assert await page.value("document.documentElement.scrollWidth <= window.innerWidth")


async def give_key(page: Browser, key: str) -> None:
    await page.value(f"document.getElementById('key').value = {key!r}; document.querySelector('form button').click()")


async def test_the_page_lives_in_both_schemes_and_sizes(cluster, tmp_path):
    cluster.worker("decode", worker_id="never-started")
    await cluster.start(wait=False)
    await cluster.live(prefill=1, decode=1)
    for number in range(4):
        await cluster.complete(f"prompt {number}" * 20, max_tokens=5)
    async with browser(tmp_path / "profile") as page:
        for name, (width, height) in SIZES.items():
            for dark in (False, True):
                await page.show(f"http://{cluster.addresses[0]}/", width, height, dark=dark)
                await page.until("document.querySelectorAll('#slowest details').length >= 4")
                await fits(page)
                assert await page.value("document.querySelectorAll('#workers .card').length") == 3
                back = await page.value("getComputedStyle(document.body).backgroundColor")
                assert back == ("rgb(15, 18, 22)" if dark else "rgb(244, 245, 247)")
                await page.value("document.querySelector('#slowest summary').click()")
                await page.until("document.querySelector('#slowest details[open] .phase')")
                await fits(page)
                keep(tmp_path, f"{name}-{'dark' if dark else 'light'}.png", await page.screenshot())
        # a later request appears by itself, and what was opened stays open
        cluster.workers[-1].script = play(ADMITTED, forever)
        asking = asyncio.create_task(cluster.complete("another"))
        await page.until(
            "[...document.querySelectorAll('#slowest .badge')].some((it) => it.textContent === 'under way')"
        )
        assert await page.value("document.querySelectorAll('#slowest details[open]').length") == 1
        asking.cancel()
        assert page.messages == []


async def test_a_key_is_asked_for_and_kept_by_the_tab_alone(cluster, tmp_path):
    await cluster.start(api_keys_file=keys_file(tmp_path, alice="", ops='role = "operator"'))
    await complete(cluster, "alice")
    async with browser(tmp_path / "profile") as page:
        await page.show(f"http://{cluster.addresses[0]}/", *SIZES["phone"])
        await page.until("!document.getElementById('login').hidden")
        keep(tmp_path, "login.png", await page.screenshot())
        await give_key(page, HOSTILE)
        await page.until("document.getElementById('refused').textContent === 'The key was refused.'")
        assert await page.value("sessionStorage.length") == 0
        await give_key(page, key_of("alice"))
        await page.until("document.querySelectorAll('#slowest details').length === 1")
        assert await page.value("document.getElementById('fleet').hidden")
        await fits(page)
        assert await page.value("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        await page.value("document.getElementById('forget').click()")
        await page.until("!document.getElementById('login').hidden && sessionStorage.length === 0")
        await give_key(page, key_of("ops"))
        await page.until(
            "!document.getElementById('fleet').hidden && document.querySelectorAll('#workers .card').length === 2"
        )


async def test_names_are_shown_as_text(cluster, tmp_path):
    # the router refuses the worker and shows the id in the cause
    await cluster.worker("decode", worker_id=HOSTILE).start()
    await cluster.start(wait=False)
    await cluster.live(prefill=1, decode=1)
    asking = {"prompt": "a", "max_tokens": 1}
    await cluster.http.post("/v1/completions", json=asking, headers={"x-request-id": HOSTILE})
    async with browser(tmp_path / "profile") as page:
        await page.show(f"http://{cluster.addresses[0]}/", *SIZES["desktop"])
        for part in ("workers", "slowest"):
            await page.until(f"document.getElementById('{part}').textContent.includes('{HOSTILE}')")
        assert await page.value("document.querySelectorAll('img').length") == 0
        # the policy stops scripts that come in another way
        await page.value(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
        )
        assert await page.value("window.ran") is None
        # a router that has gone is named, with the age of what is shown
        await cluster.close()
        cluster.running = None
        await page.until("document.getElementById('updated').textContent.startsWith('no answer from the router')")
