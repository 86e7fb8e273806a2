"""Images as pixels, patches and hidden states, against `transformers`; config.json of models with images."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pdserve.common.errors import ConfigError, InvalidRequest, UnsupportedModel
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.engine.runner.inputs.mrope_positions import prompt_positions
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.images.placeholders import with_images
from tests.support.models.checkpoints import edit_json
from tests.support.models.image_checkpoints import (
    ALL_FAMILIES,
    IMAGE_TOKEN_ID,
    PREPROCESSOR,
    ImageOracle,
    make_image_checkpoint,
    picture,
)


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("images") / request.param, request.param)


def processor_of(folder: Path) -> ImageProcessor:
    return ImageProcessor(ImageProcessorConfig.read(folder), IMAGE_TOKEN_ID)


def half_transparent() -> Image.Image:
    image = picture(7).convert("RGBA")
    image.putalpha(picture(8).convert("L"))
    return image


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "image",
    [picture(1), picture(2, 200, 9), picture(3, 5, 3), picture(4, 130, 140), picture(5).convert("L"),
     picture(6).convert("P"), half_transparent()],
    ids=["plain", "long", "small", "large", "grey", "palette", "transparent"],
)  # fmt: skip
def test_pixels_positions_and_hidden_states(folder: Path, image: Image.Image) -> None:
    oracle = ImageOracle(folder, folder.name)
    processed = processor_of(folder).process(image, "image")
    tower = load_decoder(folder).vision_tower
    assert tower is not None
    inputs = oracle.inputs([1, IMAGE_TOKEN_ID, 2], [image])
    prompt = with_images([1, IMAGE_TOKEN_ID, 2], [processed], IMAGE_TOKEN_ID, "prompt")
    assert prompt.token_ids == inputs["input_ids"][0].tolist()
    assert list(processed.grid_thw) == inputs["image_grid_thw"][0].tolist()
    patches = tower._patches(processed.data, processed.grid_thw)
    torch.testing.assert_close(patches, inputs["pixel_values"], rtol=0, atol=2e-6)
    positions, delta = prompt_positions(len(prompt.token_ids), prompt.features, PREPROCESSOR["merge_size"])
    theirs, their_delta = oracle.model.model.get_rope_index(
        **{name: value for name, value in inputs.items() if name != "pixel_values"}
    )
    assert positions.tolist() == theirs[:, 0].tolist()
    assert delta == int(their_delta)
    with torch.inference_mode():
        ours = tower.encode(processed.data, processed.grid_thw)
        output = oracle.model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        )
    # per layer one tensor per image
    deepstack = [torch.cat(list(layer)) for layer in getattr(output, "deepstack_features", None) or []]
    expected = torch.cat([torch.cat(list(output.pooler_output)), *deepstack], dim=-1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert ours.shape == (processed.num_tokens, 64 * (1 + len(deepstack)))


def test_sizes_are_those_of_transformers() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        config = ImageProcessorConfig(
            patch_size=draw.choice([4, 14, 16]), min_pixels=draw.randint(1, 9000), max_pixels=draw.randint(9000, 10**6)
        )
        sides = draw.randint(1, 3000), draw.randint(1, 3000)
        if max(sides) > 200 * min(sides):
            continue
        theirs = Qwen2VLImageProcessorPil(
            patch_size=config.patch_size, size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
        ).get_number_of_image_patches(*sides)
        height, width = config.resized(*sides)
        assert height * width // config.patch_size**2 == theirs
        assert theirs // 4 <= config.max_tokens


def test_absent_fields_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert ImageProcessorConfig.read(tmp_path) == ImageProcessorConfig()
    theirs = Qwen2VLImageProcessorPil()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 784}}))
    ours = ImageProcessorConfig.read(tmp_path)
    assert (ours.min_pixels, ours.max_pixels) == (784, theirs.size["longest_edge"])
    assert (list(ours.image_mean), list(ours.image_std)) == (list(theirs.image_mean), list(theirs.image_std))


def test_equal_pixels_have_equal_identifiers(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    first = processor_of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | {"image_mean": [0.5, 0.5, 0.5]}))
    second = processor_of(tmp_path)
    image = picture(1)
    same = first.process(np.asarray(image), "image")
    assert first.process(image, "image") == same
    others = [first.process(picture(2), "image"), second.process(image, "image")]
    assert all(other.identifier != same.identifier for other in others)


def test_images_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    processor = processor_of(tmp_path)
    picture(1, 400, 300).save(whole := io.BytesIO(), "PNG")
    cut = io.BytesIO(whole.getvalue()[:-200])
    cases: list[tuple[Any, str]] = [
        (picture(1, 402, 2), r"image is 402 x 2, the sides of an image may differ by a factor of 200"),
        (Image.new("1", (1 << 14, (1 << 13) + 1)), r"image has 16384 x 8193 pixels, at most 134217728 are read"),
        (Image.open(cut), "image cannot be decoded: .*truncated"),
        (b"data", "image is of type bytes"),
        (np.zeros((4, 4)), r"image is an array \[4, 4\] of float64, \[H, W, 3\] of uint8 is needed"),
    ]
    for image, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            processor.process(image, "image")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is 'CLIPImageProcessor'"),
        ({"do_resize": False}, "do_resize is False"),
        ({"patch_size": 0}, "patch_size must be an integer from 1 to 256, not 0"),
        ({"image_std": [1, 0, 1]}, "image_std must be a positive number, not 0"),
        ({"max_pixels": 100}, "max_pixels is 100"),
        ({"size": 5}, "size must be an object"),
        ({"resample": 9}, "resample must be an integer from 0 to 5"),
        ({"patch_size": 8}, "vision_config: patch_size is 4, preprocessor_config.json says 8"),
    ],
)
def test_bad_image_processors(folder: Path, changes: dict[str, Any], message: str) -> None:
    path = folder / "preprocessor_config.json"
    try:
        path.write_text(json.dumps(PREPROCESSOR | changes))
        with pytest.raises((ConfigError, UnsupportedModel), match=message):
            load_decoder(folder, load_format="dummy")
    finally:
        path.write_text(json.dumps(PREPROCESSOR))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("", {"vision_config": ...}, "vision_config must be an object"),
        ("", {"image_token_id": 5000}, "image_token_id must be at most"),
        ("vision_config", {"out_hidden_size": 65}, r"out_hidden_size must be the language model's hidden_size \(64\)"),
        ("vision_config", {"depth": "many"}, "depth must be an integer"),
        ("vision_config", {"hidden_act": "none"}, "vision_config: KeyError"),
        ("rope_parameters", {"mrope_section": [2, 3, 4]}, r"mrope_section must be 3 integers that are [48] together"),
        ("rope_parameters", {"mrope_section": 8}, "mrope_section must be 3 integers"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_bad_configurations(folder: Path, tmp_path: Path, part: str, changes: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = config["text_config"]["rope_parameters"] if part == "rope_parameters" else config[part] if part else config
    for name, value in changes.items():
        if value is ...:
            del target[name]
        else:
            target[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        load_decoder(tmp_path, load_format="dummy")


def test_a_flat_configuration_as_on_the_hub(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if folder.name != "qwen2_5_vl":
        return
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    text["rope_theta"] = 10000.0
    whole = {name: value for name, value in (text | config).items() if name != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    flat, nested = read_config(tmp_path), read_config(folder)
    assert flat.rope == nested.rope
    assert flat.rope.mrope is not None
    assert flat.vision == nested.vision
    edit_json(tmp_path / "config.json", text_config=text)
    assert read_config(tmp_path).rope == nested.rope


def test_unknown_fields_of_a_wrapped_configuration_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["embedding_multiplier"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="embedding_multiplier is 3"):
        read_config(tmp_path)
