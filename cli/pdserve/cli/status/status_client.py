"""`StatusClient`: reads a router's status and requests over HTTP, for `pdserve top` and `pdserve trace`."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from pdserve.cli.bench.endpoints import tls_options
from pdserve.cli.not_reached import NotReached
from pdserve.common.errors import ConfigError, NotFound, PeerError
from pdserve.common.security.tls import ClientTls
from pdserve.router.telemetry.status_view import RequestView, StatusView

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 << 20
_MAX_MESSAGE_CHARS = 300
T = TypeVar("T")


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail = msgspec.field(default_factory=_ErrorDetail)


class StatusClient:
    """Client of a router's HTTP front end. Use as a context manager. Raises: ConfigError for a URL that cannot be used."""

    def __init__(self, url: str, api_key: str | None, tls: ClientTls | None = None) -> None:
        """url: http://host:port, or host:port."""
        self._url = url.rstrip("/") if "://" in url else f"http{'s' if tls else ''}://{url.rstrip('/')}"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._client = httpx.Client(
                base_url=self._url, headers=headers, timeout=TIMEOUT_S, trust_env=False, **tls_options(tls)
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"--url {url[:100]!r} or the API key cannot be used: {error}") from None

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def status(self) -> StatusView:
        """The router's status. Raises: NotReached if there is no answer, PeerError if it is unusable."""
        return self._get("/debug/status", StatusView)

    def drain(self, worker_id: str) -> None:
        """Have a worker drain. Raises: NotFound for an unknown one; NotReached if there is no answer, PeerError if refused."""
        self._ask("POST", f"/workers/{quote(worker_id, safe='')}/drain", httpx.codes.ACCEPTED, {})

    def set_role(self, worker_id: str, role: str, *, force: bool = False) -> None:
        """Have a worker take a role. Raises: as `drain`, PeerError with the reason if the worker cannot take it."""
        body = {"role": role, "force": force}
        self._ask("POST", f"/workers/{quote(worker_id, safe='')}/role", httpx.codes.ACCEPTED, body)

    def request(self, request_id: str) -> RequestView:
        """One request. Raises: NotFound for an unknown id; NotReached if there is no answer, PeerError if it is unusable."""
        return self._get(f"/debug/requests/{quote(request_id, safe='')}", RequestView)

    def _get(self, path: str, kind: type[T]) -> T:
        body = self._ask("GET", path, httpx.codes.OK)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{self._url}{path} did not answer like a pdserve router: {error}") from None

    def _ask(self, method: str, path: str, expected: int, body_json: dict[str, object] | None = None) -> bytes:
        try:
            with self._client.stream(method, path, json=body_json) as reply:
                body = b""
                for data in reply.iter_bytes():
                    body += data
                    if len(body) > MAX_ANSWER_BYTES:
                        raise PeerError(f"the answer from {self._url} has more than {MAX_ANSWER_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotReached(f"no router answers at {self._url}: {str(error) or type(error).__name__}") from None
        if reply.status_code != expected:
            self._refuse(reply.status_code, body)
        return body

    def _refuse(self, status: int, body: bytes) -> None:
        try:
            message = plain(msgspec.json.decode(body, type=_ErrorBody).error.message[:_MAX_MESSAGE_CHARS])
        except msgspec.MsgspecError:
            message = ""
        if status == httpx.codes.NOT_FOUND and message.startswith(("no request ", "no worker ")):
            raise NotFound(message)
        hint = " (PDSERVE_API_KEY)" if status == httpx.codes.UNAUTHORIZED else ""
        raise PeerError(f"{self._url} answers with status {status}{': ' if message else ''}{message}{hint}")


def plain(text: str) -> str:
    """The text with `?` in place of control characters, which could change the state of the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
