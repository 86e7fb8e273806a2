"""Output of `pdserve up` when the cluster is ready: addresses (including those for metrics) and the answer to one question."""

from __future__ import annotations

import shutil
import sys

from rich.console import Console

from pdserve.cli.clients.conversation import show_answer
from pdserve.cli.clients.grpc_client import ClientMessage, GrpcClient
from pdserve.cli.clients.openai_client import OpenAIClient
from pdserve.cli.up.cluster import Addresses
from pdserve.common.address.host_address import loopback_of
from pdserve.common.errors import PdServeError


class Greeting:
    """Prints the greeting; the cluster calls it once."""

    def __init__(
        self, console: Console, question: str, once: bool, default_url: str, image_url: str | None = None
    ) -> None:
        """default_url: the address that `pdserve chat` uses by default.

        image_url: URL of an image to send with the question, which then uses the OpenAI HTTP API; None: no image.
        """
        self._console = console
        self._default_url = default_url
        self._question = question
        self._once = once
        self._image_url = image_url
        self.answered = False

    async def __call__(self, addresses: Addresses) -> bool:
        """Print the addresses and the answer; returns True if the cluster should keep running."""
        console = self._console
        console.print(
            f"[bold green]ready[/]  OpenAI {'https' if addresses.tls else 'http'}://{addresses.http}/v1   gRPC {addresses.grpc}   "
            f"prefill {', '.join(addresses.prefill) or 'none'}   decode {', '.join(addresses.decode) or 'none'}\n"
            f"metrics  {'   '.join(f'{name} http://{at}/metrics' for name, at in addresses.metrics.items())}",
            soft_wrap=True,
        )
        grpc = loopback_of(addresses.grpc)
        if self._question and addresses.why_silent:
            console.print(f"no question is asked: {addresses.why_silent}", soft_wrap=True)
        elif self._question:
            console.print(f"\n[bold]{self._question}[/]")
            try:
                await self._ask(addresses)
                self.answered = True
            except PdServeError as error:
                console.print(f"[red]{error.code}: {error.message}[/]")
        if not self._once and addresses.decode:
            more = '--timeline "What is 7 plus 5?"' if addresses.has_chat else '--timeline "Seven plus five is"'
            command = self._command("chat" if addresses.has_chat else "generate", grpc, addresses.tls)
            console.print(f"\nAsk more:  {command} {more}     Ctrl-C drains and stops.", soft_wrap=True)
        return not self._once

    async def _ask(self, addresses: Addresses) -> None:
        """Print the answer, or the continuation of the question if the model has no chat template. Raises: PdServeError."""
        sampling = {"temperature": 0.0, "max_tokens": 64}
        if not addresses.has_chat and self._image_url is None:
            async with GrpcClient(loopback_of(addresses.grpc), addresses.api_key) as completing:
                await show_answer(self._console, completing.generate(self._question, **sampling), True)
            return
        async with self._client(addresses) as client:
            turn = ClientMessage("user", self._question, self._image_url)
            await show_answer(self._console, client.chat([turn], **sampling), True)

    def _client(self, addresses: Addresses) -> GrpcClient | OpenAIClient:
        if self._image_url is None:
            return GrpcClient(loopback_of(addresses.grpc), addresses.api_key)
        return OpenAIClient(f"http://{loopback_of(addresses.http)}/v1", addresses.api_key)

    def _command(self, name: str, address: str, tls: bool) -> str:
        """The `pdserve chat` or `generate` command for this cluster, to paste into another terminal."""
        started = f"{sys.executable} -m pdserve" if sys.argv[0].endswith(".py") else sys.argv[0]
        command = "pdserve" if shutil.which("pdserve") else started
        url = "" if address == self._default_url else f" --url {address}"
        return f"{command} {name}{url}{' --ca-file CA.pem' if tls else ''}"
