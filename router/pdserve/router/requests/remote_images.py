"""`RemoteImages`: fetches the images of chats from hosts that the operator lists."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx

from pdserve.common.address.media_domains import MediaDomains, may_be_reached
from pdserve.common.errors import InvalidRequest
from pdserve.common.net.body_budget import BodyBudget
from pdserve.router.requests.image_transport import CostlyAnswer, ImageTransport
from pdserve.text.images.chat_images import ImageSource
from pdserve.text.images.image_url import is_remote

_RESOLVER_THREADS = 4
_MAX_ADDRESSES = 3
"""Addresses of a host that are tried."""
_MAX_URL_CHARS = 2048
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "connection": "close", "user-agent": "pdserve"}


def _resolve(host: str) -> list[str]:
    """Addresses of a host in their order. Raises: OSError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(str(error)) from error
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class RemoteImages:
    """Used only on the event loop; `close` it.

    A connection goes to an address that was checked, so that a name that resolves otherwise a moment later changes nothing.
    Redirects are not followed, no proxy is asked, and no connection serves two images. Nothing of an answer is kept but its file,
    so that no fetch shows a host anything of another.
    """

    def __init__(
        self,
        domains: MediaDomains,
        timeout_s: float,
        max_bytes: int,
        max_bytes_in_flight: int,
        *,
        resolve: Callable[[str], list[str]] = _resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """timeout_s, max_bytes: of all images of a prompt. max_bytes_in_flight: of all prompts whose images are being fetched or
        decoded. resolve: addresses of a host, from a thread; raises OSError. transport: by default an `ImageTransport`."""
        self._resolve = resolve
        self._domains = domains
        self._timeout_s = timeout_s
        self._timeouts = httpx.Timeout(timeout_s).as_dict()
        self._max_bytes = max_bytes
        self.budget = BodyBudget(max_bytes_in_flight)
        self._resolvers = ThreadPoolExecutor(_RESOLVER_THREADS, "image-hosts")
        # only a transport: httpx's client has cookies, redirects and credentials
        self._transport = transport or ImageTransport(httpx.create_ssl_context())

    async def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._transport.aclose()

    @asynccontextmanager
    async def fetched(self, sources: Sequence[ImageSource], field: str) -> AsyncIterator[Mapping[str, bytes]]:
        """URL -> file, for all URLs of HTTP in `sources`, within the context.

        field: the client's name of the prompt. Raises: InvalidRequest naming the image; Overloaded when others have the room.
        """
        named: dict[str, str] = {}
        for source in sources:
            if source.url is not None and is_remote(source.url):
                named.setdefault(source.url, source.where)
        if not named:
            yield {}
            return
        urls = {url: self._verified(url, where, field) for url, where in named.items()}
        async with self.budget.room(self._max_bytes) as room:
            files = await self._fetch_all(urls, named, field)
            room.shrink(sum(map(len, files.values())))
            yield files

    def _verified(self, text: str, where: str, field: str) -> httpx.URL:
        """Raises: InvalidRequest."""
        if len(text) > _MAX_URL_CHARS:
            raise InvalidRequest(f"{where} has {len(text)} characters, at most {_MAX_URL_CHARS} are fetched", field)
        try:
            url = httpx.URL(text)
            host = url.raw_host.decode("ascii").lower()
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest(f"{where} is no URL: {error!s:.100}", field) from error
        if url.userinfo:
            raise InvalidRequest(f"{where} has a user or password, which are not sent", field)
        if not self._domains.has(url.scheme, host.strip("[]"), url.port):
            port = "" if url.port is None else f":{url.port}"
            raise InvalidRequest(
                f"{where} is on the host {host[:253] + port!r}, which is not in the router's allowed_media_domains",
                field,
            )
        return url

    async def _fetch_all(self, urls: Mapping[str, httpx.URL], named: Mapping[str, str], field: str) -> dict[str, bytes]:
        """Raises: InvalidRequest."""
        files: dict[str, bytes] = {}
        left = self._max_bytes
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        # one after the other: a prompt opens one connection, and its bytes are counted as they come
        for text, url in urls.items():
            where = named[text]
            try:
                async with asyncio.timeout_at(deadline):
                    files[text] = await self._fetch(url, left, where, field)
            except TimeoutError as error:
                raise InvalidRequest(
                    f"{where} was not fetched within {self._timeout_s:g} s (image_fetch_timeout_s)", field
                ) from error
            left -= len(files[text])
        return files

    async def _fetch(self, url: httpx.URL, max_bytes: int, where: str, field: str) -> bytes:
        """Raises: InvalidRequest; TimeoutError."""
        addresses = await self._addresses(url, where, field)
        for place, address in enumerate(addresses):
            try:
                return await self._read(url, address, max_bytes, where, field)
            except httpx.TimeoutException as error:
                raise TimeoutError from error
            except CostlyAnswer as error:
                raise InvalidRequest(f"{where} cannot be fetched: {error}", field) from error
            except httpx.HTTPError as error:
                if isinstance(error, httpx.ConnectError) and place + 1 < len(addresses):
                    continue
                raise InvalidRequest(f"{where} cannot be fetched: {type(error).__name__}", field) from error
        raise AssertionError("a host has at least one address")

    async def _addresses(self, url: httpx.URL, where: str, field: str) -> list[str]:
        """Addresses to which a connection may go, at most `_MAX_ADDRESSES`. Raises: InvalidRequest if there are none."""
        host = url.raw_host.decode("ascii").strip("[]")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._resolvers, self._resolve, host)
        except OSError as error:
            raise InvalidRequest(f"{where} cannot be fetched: its host {host!r} is not known", field) from error
        allowed = [address for address in found if may_be_reached(address, host)]
        if not allowed:
            raise InvalidRequest(f"{where} cannot be fetched: its host {host!r} has no public address", field)
        return allowed[:_MAX_ADDRESSES]

    async def _read(self, url: httpx.URL, address: str, max_bytes: int, where: str, field: str) -> bytes:
        """Raises: InvalidRequest; httpx.HTTPError."""
        # the certificate is verified for the URL's host
        request = httpx.Request(
            "GET",
            url.copy_with(host=address, fragment=None),
            headers={"host": url.netloc.decode("ascii"), **_HEADERS},
            extensions={"sni_hostname": url.raw_host.decode("ascii").strip("[]"), "timeout": self._timeouts},
        )
        answer = await self._transport.handle_async_request(request)
        try:
            _verify_answer(answer, where, field)
            chunks: list[bytes] = []
            num_bytes = 0
            async for chunk in answer.aiter_raw():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise InvalidRequest(
                        f"{where}: with it, fetched images have more than {self._max_bytes} bytes (max_request_bytes)",
                        field,
                    )
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            await answer.aclose()


def _verify_answer(answer: httpx.Response, where: str, field: str) -> None:
    """Raises: InvalidRequest."""
    if answer.is_redirect:
        raise InvalidRequest(
            f"{where} is answered with status {answer.status_code}; redirects are not followed, give the final URL",
            field,
        )
    if answer.status_code != httpx.codes.OK:
        raise InvalidRequest(f"{where} is answered with status {answer.status_code}", field)
    kind = answer.headers.get("content-type", "")
    if not kind.lower().startswith("image/"):
        raise InvalidRequest(f"{where} is answered with the type {kind[:40]!r}, image/... is needed", field)
    coding = answer.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise InvalidRequest(f"{where} is answered in the coding {coding[:40]!r}, which was not asked for", field)
