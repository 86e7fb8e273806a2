"""Images by URL: fetched from listed hosts alone, within size and time, and at the address that was checked."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from PIL import Image

from pdserve.common.address.media_domains import MediaDomains
from pdserve.common.errors import InvalidRequest
from pdserve.router.requests.remote_images import RemoteImages
from pdserve.text.images.chat_images import ImageSource
from tests.support.run.process_memory import in_use_bytes
from tests.support.run.waiting import HANG_S

MAX_BYTES = 100_000
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def picture() -> bytes:
    Image.new("RGB", (20, 30), "red").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def answer(body: bytes, *headers: str, status: str = "200 OK", kind: str = "image/png") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Server:
    """A web server on loopback with one answer per path."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            found = self.answers[head.split(b" ")[1].decode()]
            if isinstance(found, bytes):
                writer.write(found)
            else:
                await found(writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answers: dict[str, Answer], tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await listening.wait_closed()


@asynccontextmanager
async def fetching(*entries: str, timeout_s: float = HANG_S, **options: object) -> AsyncIterator[RemoteImages]:
    domains = MediaDomains(entries, "allowed_media_domains")
    images = RemoteImages(domains, timeout_s, MAX_BYTES, 2 * MAX_BYTES, **options)  # type: ignore[arg-type]
    try:
        yield images
        assert images.budget.used_bytes == 0
    finally:
        await images.close()


async def fetched(images: RemoteImages, *urls: str) -> dict[str, bytes]:
    sources = [ImageSource(f"messages[0].content[{place}].image_url", url) for place, url in enumerate(urls)]
    async with images.fetched(sources, "messages") as files:
        assert bool(images.budget.used_bytes) is bool(files)
        return dict(files)


async def test_a_listed_host_is_asked_once_per_url() -> None:
    async with serving({"/a.png?size=2": answer(picture()), "/b.png": answer(b"b")}) as server:
        first, second = (f"http://127.0.0.1:{server.port}/{name}" for name in ("a.png?size=2", "b.png"))
        async with fetching(f"127.0.0.1:{server.port}") as images:
            files = await fetched(images, first, "data:image/png;base64,AAAA", second, first)
        assert files == {first: picture(), second: b"b"}
        assert len(server.asked) == 2
        head = server.asked[0].decode().lower()
        assert f"host: 127.0.0.1:{server.port}\r\n" in head
        assert "accept-encoding: identity\r\n" in head
        assert "cookie" not in head
        assert "authorization" not in head


async def test_without_urls_nothing_is_reserved() -> None:
    async with fetching("127.0.0.1:9") as images:
        assert await fetched(images, "data:image/png;base64,AAAA") == {}


async def never_ends(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
    while True:
        writer.write(b"x" * 10_000)
        await writer.drain()


REFUSED_ANSWERS: tuple[tuple[Answer, str], ...] = (
    (answer(b"", "location: http://127.0.0.1:1/", status="302 Found"), "status 302; redirects are not followed"),
    (answer(b"", status="404 Not Found"), "answered with status 404"),
    (answer(b"{}", kind="text/html"), "answered with the type 'text/html', image/... is needed"),
    (answer(b"x", "content-encoding: gzip"), "answered in the coding 'gzip'"),
    (answer(b"x" * (MAX_BYTES + 1)), r"fetched images have more than 100000 bytes \(max_request_bytes\)"),
    (never_ends, r"fetched images have more than 100000 bytes \(max_request_bytes\)"),
    (answer(b"x" * 50)[:-20], "cannot be fetched: RemoteProtocolError"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", "cannot be fetched: RemoteProtocolError"),
    (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000, "cannot be fetched: RemoteProtocolError"),
)


async def test_answers_that_are_refused() -> None:
    answers = {f"/{number}": found for number, (found, _) in enumerate(REFUSED_ANSWERS)}
    async with serving(answers) as server, fetching(f"127.0.0.1:{server.port}") as images:
        for number, (_, message) in enumerate(REFUSED_ANSWERS):
            with pytest.raises(InvalidRequest, match=message) as refused:
                await fetched(images, f"http://127.0.0.1:{server.port}/{number}")
            assert refused.value.field == "messages"
            assert refused.value.message.startswith("messages[0].content[0].image_url")
            assert len(server.asked) == number + 1


async def test_the_bytes_of_all_images_are_limited_together() -> None:
    async with serving({"/a": answer(b"a" * 60_000), "/b": answer(b"b" * 60_000)}) as server:
        at = f"127.0.0.1:{server.port}"
        async with fetching(at) as images:
            with pytest.raises(InvalidRequest, match=r"content\[1\].image_url: with it, fetched images have more than"):
                await fetched(images, f"http://{at}/a", f"http://{at}/b")


LARGE_COOKIE = "set-cookie: " + "; ".join(["session=ATTACKER", "path=/", "max-age=99999", "x=" + "y" * 300])
STATE = (
    LARGE_COOKIE,
    *(f"set-cookie: c{number}={'x' * 300}" for number in range(100)),
    "set-cookie2: old=1; version=1",
    "www-authenticate: basic realm=a",
    "strict-transport-security: max-age=9999",
    'alt-svc: h2=":443"',
    "cache-control: public, max-age=9999",
    'etag: "1"',
    "last-modified: Mon, 01 Jan 2024 00:00:00 GMT",
    "connection: keep-alive",
    "accept-ch: sec-ch-ua",
)


@pytest.mark.few(2)
@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized", "302 Found"])
async def test_a_host_finds_nothing_of_one_fetch_in_the_next(status: str) -> None:
    async with serving({"/a": answer(b"a", *STATE, status=status), "/b": answer(b"b"), "/c": answer(b"c")}) as server:
        at = f"http://127.0.0.1:{server.port}"
        async with fetching(f"127.0.0.1:{server.port}") as images:
            if status == "200 OK":
                await fetched(images, f"{at}/a", f"{at}/b")
            else:
                with pytest.raises(InvalidRequest):
                    await fetched(images, f"{at}/a")
                await fetched(images, f"{at}/b")
            await fetched(images, f"{at}/b")
            await fetched(images, f"{at}/c")
    first, *others = server.asked
    assert len(others) == 3
    for other in others:
        # each over a connection of its own, too
        assert other.partition(b"\r\n")[2] == first.partition(b"\r\n")[2]
    assert b"cookie" not in first.lower()


@pytest.mark.slow
async def test_fetches_leave_no_memory() -> None:
    async with serving({"/": answer(b"a", *STATE)}) as server, fetching(f"127.0.0.1:{server.port}") as images:
        url = f"http://127.0.0.1:{server.port}/"
        for _ in range(10):
            await fetched(images, url)
        began = in_use_bytes()
        for _ in range(100):
            await fetched(images, url)
        server.asked.clear()
        # the cookies of one answer have 30 kB
        assert in_use_bytes() - began < 300_000


def endless(head: bytes, part: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Sends `head`, then `part` again and again."""

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return send


def one_by_one(data: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Sends each byte in a packet of its own, for as long as the client listens."""

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(len(data)):
            writer.write(data[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0.0005)

    return send


_CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n"
_INTERIM = "cannot be fetched: more than 8 interim answers"
_SMALL = "cannot be fetched: its answer comes in parts of less than 512 bytes"
COSTLY: dict[str, tuple[Answer, str]] = {
    "100 without end": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), _INTERIM),
    "103 without end": (endless(b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"), _INTERIM),
    "199 in HTTP/1.0": (endless(b"", b"HTTP/1.0 199 \r\n\r\n" * 10), _INTERIM),
    "long 102": (endless(b"", b"HTTP/1.1 102 P\r\nx: " + b"x" * 60_000 + b"\r\n\r\n"), _INTERIM),
    "interim answers before the answer": (b"HTTP/1.1 103 E\r\n\r\n" * 9 + answer(b"a"), _INTERIM),
    "chunks of 1 byte": (endless(_CHUNKED, b"1\r\nx\r\n" * 1000), _SMALL),
    "chunks of 100 bytes": (endless(_CHUNKED, b"64\r\n" + b"x" * 100 + b"\r\n"), _SMALL),
    "chunks with extensions": (endless(_CHUNKED, b"1;" + b"y" * 200 + b"\r\nx\r\n"), _SMALL),
    "a head byte by byte": (one_by_one(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 5000), _SMALL),
    "interim answers byte by byte": (one_by_one(b"HTTP/1.1 100 \r\n\r\n" * 1000), _SMALL),
    "a body byte by byte": (one_by_one(answer(b"x" * 5000)), _SMALL),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", COSTLY)
async def test_an_answer_costs_no_more_than_its_bytes(name: str) -> None:
    found, message = COSTLY[name]
    async with serving({"/": found}) as server, fetching(f"127.0.0.1:{server.port}") as images:
        with pytest.raises(InvalidRequest, match=message):
            await fetched(images, f"http://127.0.0.1:{server.port}/")


async def test_what_honest_hosts_send_is_read() -> None:
    file = bytes(range(256)) * 390
    packets = [file[start : start + 536] for start in range(0, len(file), 536)]

    async def in_packets(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(file)[: -len(file)])
        for packet in packets:
            writer.write(packet)
            await writer.drain()
            await asyncio.sleep(0)

    answers: dict[str, Answer] = {
        "/packets": in_packets,
        "/hints": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + answer(file),
        "/chunks": _CHUNKED + b"".join(b"218\r\n" + packet + b"\r\n" for packet in packets[:-1]) + b"0\r\n\r\n",
        "/few": _CHUNKED + b"1\r\nx\r\n" * 200 + b"0\r\n\r\n",
        "/text": answer(b"HTTP/1.1 100 " * 7 + file[:1000]),
    }
    whole = len(packets) - 1
    expected = {"/packets": file, "/hints": file, "/chunks": file[: whole * 536], "/few": b"x" * 200}
    async with serving(answers) as server, fetching(f"127.0.0.1:{server.port}") as images:
        at = f"http://127.0.0.1:{server.port}"
        for path, content in (expected | {"/text": b"HTTP/1.1 100 " * 7 + file[:1000]}).items():
            assert await fetched(images, at + path) == {at + path: content}


async def test_a_slow_host_is_given_up() -> None:
    async def trickles(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving({"/": trickles}) as server, fetching(f"127.0.0.1:{server.port}", timeout_s=0.2) as images:
        with pytest.raises(InvalidRequest, match=r"not fetched within 0.2 s \(image_fetch_timeout_s\)"):
            await fetched(images, f"http://127.0.0.1:{server.port}/")


REFUSED_URLS = (
    ("https://example.org/a.png", "on the host 'example.org', which is not in the router's allowed_media_domains"),
    ("https://a.example.com/", "on the host 'a.example.com'"),
    ("http://example.com:8080/", "on the host 'example.com:8080'"),
    ("https://example.com@evil.org/", "has a user or password"),
    ("https://example.com:x/", "is no URL"),
    ("https://example.com/" + "a" * 3000, "has 3020 characters, at most 2048 are fetched"),
    ("http://[::1/", "is no URL"),
    ("http://2130706433/", "on the host '2130706433'"),
    ("http:///a", "on the host ''"),
)


async def test_urls_that_are_refused_before_any_connection() -> None:
    def resolve(host: str) -> list[str]:
        raise AssertionError(host)

    async with fetching("example.com", resolve=resolve) as images:
        for url, message in REFUSED_URLS:
            with pytest.raises(InvalidRequest, match=message):
                await fetched(images, url)


async def test_a_listed_name_that_leads_inside_is_refused() -> None:
    found: list[str] = []
    async with serving({"/": answer(picture())}) as server:
        host = f"inside.example.com:{server.port}"
        async with fetching(host, resolve=lambda _: found) as images:
            for addresses in (["127.0.0.1"], ["10.1.2.3", "::1"], ["169.254.169.254"], ["::ffff:127.0.0.1"]):
                found[:] = addresses
                with pytest.raises(InvalidRequest, match=r"its host 'inside.example.com' has no public address"):
                    await fetched(images, f"http://{host}/")
        assert server.asked == []


async def test_an_unknown_host_is_named() -> None:
    def resolve(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with fetching("example.com", resolve=resolve) as images:
        with pytest.raises(InvalidRequest, match=r"its host 'example.com' is not known"):
            await fetched(images, "https://example.com/a.png")


async def test_connections_go_to_the_checked_address_with_the_name_of_the_url() -> None:
    asked: list[httpx.Request] = []
    answers = iter([["10.0.0.1", "93.184.216.34", "2606:2800:220:1::1"], ["127.0.0.1"]])

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            raise httpx.ConnectError("unreachable", request=request)
        return httpx.Response(200, headers={"content-type": "image/png"}, stream=httpx.ByteStream(b"file"))

    # another answer a moment later changes nothing
    async with fetching(
        "example.com", resolve=lambda _: next(answers), transport=httpx.MockTransport(handle)
    ) as images:
        assert await fetched(images, "https://EXAMPLE.com/a.png?b=1#c") == {"https://EXAMPLE.com/a.png?b=1#c": b"file"}
    assert [str(request.url) for request in asked] == [
        "https://93.184.216.34/a.png?b=1",
        "https://[2606:2800:220:1::1]/a.png?b=1",
    ]
    for request in asked:
        assert request.headers["host"] == "example.com"
        assert request.extensions["sni_hostname"] == "example.com"


async def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for issuer, name, is_good in (
        (authority, "127.0.0.1", True),
        (authority, "127.0.0.2", False),
        (stranger, "127.0.0.1", False),
    ):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        issuer.issue_cert(name).configure_cert(context)
        async with serving({"/": answer(picture())}, context) as server:
            url = f"https://127.0.0.1:{server.port}/"
            async with fetching(f"127.0.0.1:{server.port}") as images:
                if is_good:
                    assert await fetched(images, url) == {url: picture()}
                else:
                    with pytest.raises(InvalidRequest, match="cannot be fetched: ConnectError"):
                        await fetched(images, url)
                    assert server.asked == []
