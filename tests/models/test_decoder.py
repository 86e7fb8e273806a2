"""Promises of a decoder beside the right numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.kernels.attention.torch_attention import TorchAttentionBackend
from pdserve.models.kv_cache import make_kv_cache
from pdserve.models.loading import load_decoder
from tests.support.kernels.attention_batches import model_inputs, packed_batch
from tests.support.models.family_checkpoints import cases, make_family

TOKENS = [5, 300, 17, 42, 42, 8, 101, 250, 3, 77, 12, 13, 14, 200, 201, 202, 203, 9, 8, 7]


@pytest.mark.few(3)
@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.6), ("float16", 0.08)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_half_precision_is_near_float32(
    architecture: str, dtype: str, atol: float, tiny_checkpoints: Any, paged_run: Any
) -> None:
    """Logits here have a standard deviation near 2.5; a mistake shows as an error of that size."""
    folder = tiny_checkpoints(architecture)
    exact = paged_run(load_decoder(folder))
    rounded = paged_run(load_decoder(folder, dtype=dtype))
    for step in ({"prefills": {"a": TOKENS}, "decodes": {}}, {"prefills": {}, "decodes": {"a": 5}}):
        expected, found = exact.step(**step)["a"], rounded.step(**step)["a"]
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)
        assert (found - expected).square().mean().sqrt() < atol / 4


def test_a_large_half_precision_batch_uses_products(tiny_checkpoints: Any, paged_run: Any) -> None:
    """Bfloat16 batches beyond a size take another path; it must agree, masks and unused memory included."""
    folder = tiny_checkpoints("llama")
    exact = paged_run(load_decoder(folder), num_blocks=256)
    rounded = paged_run(load_decoder(folder, dtype="bfloat16"), num_blocks=256)
    prompts = {str(i): (TOKENS * 16)[: 220 + 7 * i] for i in range(9)}
    for run in (exact, rounded):
        run.step({}, prompts)
    decodes = dict.fromkeys(prompts, 11)
    expected = torch.cat(list(exact.step(decodes, {}).values()))
    found = torch.cat(list(rounded.step(decodes, {}).values()))
    torch.testing.assert_close(found, expected, atol=0.6, rtol=0)


def test_rows_do_not_depend_on_their_neighbours(tiny_checkpoints: Any, paged_run: Any) -> None:
    decoder = load_decoder(tiny_checkpoints("llama"))
    alone, together = paged_run(decoder), paged_run(decoder, seed=3)
    prompts = {"a": TOKENS, "b": TOKENS[:3], "c": [7] * 33}
    for name, tokens in prompts.items():
        alone.step({}, {name: tokens})
    together.step({}, prompts)
    decodes = {"a": 1, "b": 2, "c": 3}
    found = together.step(decodes, {})
    for name, token in decodes.items():
        # another number of rows is another order of sums, on some processors; a neighbour's values would be off by far more
        torch.testing.assert_close(found[name], alone.step({name: token}, {})[name], atol=1e-4, rtol=0)


def test_a_padded_row_is_finite_and_changes_nothing_but_its_slot(tiny_checkpoints: Any) -> None:
    decoder = load_decoder(tiny_checkpoints("llama"))
    kv_cache = make_kv_cache(decoder.config.kv_layout(4, "test").shapes[0], 8).fill_(1.0)
    batch = packed_batch([5, 0], [4 * 4 + 1, 0], [1, 1], [6, 0], [[3, 4, 0], [0]])
    with torch.inference_mode():
        hidden = decoder.forward(model_inputs(decoder, TorchAttentionBackend(kv_cache), batch, [9, 0]))
    assert hidden.isfinite().all()
    changed = (kv_cache != 1.0).flatten(1, 3).any(1).any(-1)
    assert changed.nonzero().tolist() == [[0, 0], [4, 1], [4, 2], [4, 3]]


def test_before_layer_is_called_before_each_layer(tiny_checkpoints: Any) -> None:
    decoder = load_decoder(tiny_checkpoints("llama", num_hidden_layers=3))
    kv_cache = make_kv_cache(decoder.config.kv_layout(4, "test").shapes[0], 2)
    written: list[int] = []
    batch = packed_batch([0], [0], [1], [1], [[0]])

    def before_layer() -> None:
        written.append(int((kv_cache != 0).transpose(1, 2).flatten(2).any(-1).sum()))

    with torch.inference_mode():
        decoder.forward(model_inputs(decoder, TorchAttentionBackend(kv_cache), batch, [4], before_layer))
    assert written == [0, 1, 2]


@pytest.mark.few(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("output_rows", [[19], [4, 5, 19], []])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "granite", "gpt_oss", "olmo2"])
def test_hidden_states_of_the_rows_that_are_read(family: str, output_rows: list[int], tmp_path: Path) -> None:
    """Keys and values of all tokens are written, to the last bit as without."""
    make_family(tmp_path, family, cases(family)[0])
    decoder = load_decoder(tmp_path, dtype="float32")
    batch = packed_batch(range(20), range(16, 36), [20], [20], [[1, 2]])
    found = []
    for rows in (None, torch.tensor(output_rows, dtype=torch.int64)):
        kv_cache = make_kv_cache(decoder.config.kv_layout(16, "test").shapes[0], 3)
        with torch.inference_mode():
            inputs = model_inputs(decoder, TorchAttentionBackend(kv_cache), batch, TOKENS)
            found.append((decoder.forward(replace(inputs, output_rows=rows)), kv_cache))
    (expected, written), (hidden, also_written) = found
    # another number of rows is another order of sums
    torch.testing.assert_close(hidden, expected[output_rows], atol=1e-4, rtol=1e-4)
    assert torch.equal(written, also_written)


def test_embeddings_that_are_added_to_the_last_layer_count_for_the_rows_that_are_read(tiny_checkpoints: Any) -> None:
    decoder = load_decoder(tiny_checkpoints("llama", num_hidden_layers=1))
    batch = packed_batch(range(20), range(20), [20], [20], [[0, 1]])
    attention = TorchAttentionBackend(make_kv_cache(decoder.config.kv_layout(16, "test").shapes[0], 2))
    added, added_rows = [torch.ones(2, decoder.hidden_size)], torch.tensor([3, 19])
    with torch.inference_mode():
        without_added = model_inputs(decoder, attention, batch, TOKENS)
        inputs = replace(without_added, deepstack=added, deepstack_rows=added_rows)
        expected = decoder.forward(inputs)
        found = decoder.forward(replace(inputs, output_rows=torch.tensor([2, 19])))
        without = decoder.forward(without_added)
    torch.testing.assert_close(found, expected[[2, 19]])
    assert not torch.allclose(found[1], without[19])


def test_embeddings_take_the_place_of_token_ids(tiny_checkpoints: Any) -> None:
    decoder = load_decoder(tiny_checkpoints("qwen2"))
    attention = TorchAttentionBackend(make_kv_cache(decoder.config.kv_layout(16, "test").shapes[0], 2))
    batch = packed_batch(range(20), range(16, 36), [20], [20], [[1, 0]])
    # slots 16 to 31 are block 1, slots 0 to 3 of block 0 follow
    batch.slot_mapping[16:] -= 32
    with torch.inference_mode():
        expected = decoder.forward(model_inputs(decoder, attention, batch, TOKENS))
        embeds = decoder.embed_input_ids(torch.tensor(TOKENS))
        found = decoder.forward(model_inputs(decoder, attention, batch, None, inputs_embeds=embeds.clone()))
        changed = decoder.forward(model_inputs(decoder, attention, batch, None, inputs_embeds=embeds.roll(1, 0)))
        for token_ids, inputs_embeds in ((TOKENS, embeds), (None, None)):
            inputs = model_inputs(decoder, attention, batch, token_ids, inputs_embeds=inputs_embeds)
            with pytest.raises(ValueError, match="exactly one of token_ids and inputs_embeds"):
                decoder.forward(inputs)
    assert torch.equal(found, expected)
    assert not torch.equal(changed, expected)


def test_layers_of_one_kind_share_a_spec(tiny_checkpoints: Any) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3}
    decoder = load_decoder(tiny_checkpoints("qwen2", **windows))
    assert [[getattr(spec, "window", "none") for spec in specs] for specs in decoder.attention_specs] == [[None, 9]]
    [specs] = load_decoder(tiny_checkpoints("llama")).attention_specs
    assert len(specs) == 1


def test_a_cache_of_another_shape_is_refused(tiny_checkpoints: Any, paged_run: Any) -> None:
    run = paged_run(load_decoder(tiny_checkpoints("llama")))
    run.attention = TorchAttentionBackend(torch.zeros(4, 2, 2, 2, 16, 8))
    with pytest.raises(ValueError, match="does not fit"):
        run.step({}, {"a": TOKENS})


def test_kv_cache_is_zero_and_as_large_as_its_layout(tiny_checkpoints: Any) -> None:
    layout = load_decoder(tiny_checkpoints("llama"), dtype="bfloat16").config.kv_layout(16, "f" * 32)
    kv_cache = make_kv_cache(layout.shapes[0], 5)
    assert kv_cache.shape == (5, 2, 2, 2, 16, 16)
    assert kv_cache.nbytes == 5 * layout.shapes[0].block_bytes
    assert not kv_cache.any()
