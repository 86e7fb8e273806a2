"""Preparation of chats with images: by URL as by data URL, and refusals before anything is fetched."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from PIL import Image

from pdserve.common.address.media_domains import MediaDomains
from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.image_processor_config import ImageLimits, ImageProcessorConfig
from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.models.model_folder import model_folder
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.requests.preparation import ClientRequest, Preparation
from pdserve.router.requests.remote_images import RemoteImages
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.prompt import ChatInput
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.engine.settings_with import settings_with
from tests.support.processes.served_file import serving_file
from tests.support.run.waiting import HANG_S

IMAGE_ID = 0
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|endoftext|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The bundled one, with a template for images."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("demo") / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.from_folder(folder)


def file_of() -> bytes:
    Image.radial_gradient("L").resize((64, 48)).convert("RGB").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@asynccontextmanager
async def preparation(
    tokenizer: Tokenizer, *domains: str, max_held_image_bytes: int = 1 << 20
) -> AsyncIterator[Preparation]:
    remote = None
    if domains:
        remote = RemoteImages(MediaDomains(domains, "allowed_media_domains"), HANG_S, 1 << 20, 1 << 20)
    config = ImageProcessorConfig(patch_size=4, min_pixels=256, max_pixels=1024)
    images = ImageProcessor(config, IMAGE_ID, ImageLimits(max_images=2))
    made = Preparation(tokenizer, DEVELOPMENT_KEY, 4096, images, max_held_image_bytes, remote)
    try:
        yield made
        assert remote is None or remote.budget.used_bytes == 0
        assert made._held_images.num_bytes == 0
    finally:
        made.close()
        if remote is not None:
            await remote.close()


def chat(*urls: str) -> ClientRequest:
    content: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return ClientRequest(
        prompt=ChatInput([{"role": "user", "content": content}]), field="messages", sampling_params=SamplingParams(),
        timeout_s=HANG_S, request_id="r", prompt_token_ids=[],
    )  # fmt: skip


async def tokenized(made: Preparation, *urls: str) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    request = chat(*urls)
    with made.holding_images(request):
        token_ids = await made.tokenize(request)
        return token_ids, list(request.mm_features)


async def test_a_url_gives_the_pixels_of_its_file(tokenizer: Tokenizer) -> None:
    data = f"data:image/png;base64,{base64.b64encode(file_of()).decode()}"
    with serving_file(file_of(), "image/png") as web:
        async with preparation(tokenizer, web.address) as made:
            by_url, by_data, both = await asyncio.gather(
                tokenized(made, web.url), tokenized(made, data), tokenized(made, web.url, data)
            )
        assert by_url == by_data
        token_ids, (image,) = by_url
        assert token_ids.count(IMAGE_ID) == image.mm_position.length > 3
        assert [each.identifier for each in both[1]] == [image.identifier] * 2


async def test_a_file_that_is_no_image_is_refused(tokenizer: Tokenizer) -> None:
    with serving_file(b"<svg/>", "image/svg+xml") as web:
        async with preparation(tokenizer, web.address) as made:
            with pytest.raises(InvalidRequest, match=r"content\[1\].image_url has 6 bytes that are no image of PNG"):
                await tokenized(made, web.url)


async def test_refusals_fetch_nothing(tokenizer: Tokenizer) -> None:
    # no server listens there
    listed, other = "http://127.0.0.1:9/a.png", "http://127.0.0.1:10/a.png"
    async with preparation(tokenizer) as made:
        with pytest.raises(
            InvalidRequest, match=r"image_url begins with 'http:'; .* its setting allowed_media_domains"
        ):
            await tokenized(made, listed)
    async with preparation(tokenizer, "127.0.0.1:9") as made:
        with pytest.raises(
            InvalidRequest, match=r"content\[2\].image_url is on the host '127.0.0.1:10', which is not in"
        ):
            await tokenized(made, listed, other)
        with pytest.raises(InvalidRequest, match="messages has 3 images, at most 2 are allowed"):
            await tokenized(made, listed, listed, listed)
        with pytest.raises(InvalidRequest, match=r"content\[1\].image_url cannot be fetched: ConnectError"):
            await tokenized(made, listed)


async def test_images_that_others_have_no_room_for_are_refused(tokenizer: Tokenizer) -> None:
    with serving_file(file_of(), "image/png") as web:
        async with preparation(tokenizer, web.address, max_held_image_bytes=10) as made:
            with pytest.raises(Overloaded, match="max_held_image_bytes"):
                await tokenized(made, web.url)


def test_requests_to_a_model_with_images_may_be_photos() -> None:
    """A camera's photo of 12 million pixels has 4 to 6 MB, and a third more in base64."""
    for given, has_images, expected in (
        (RouterSettings(), False, (1 << 20) + 8 * 4096),
        (RouterSettings(), True, 16 << 20),
        (settings_with(RouterSettings, max_request_bytes=5000), True, 5000),
    ):
        bodies = ClientBodies(given, 4096, has_media=has_images)
        try:
            assert bodies.max_request_bytes == expected
            assert bodies.budget.max_bytes >= 16 * expected
        finally:
            bodies.close()
