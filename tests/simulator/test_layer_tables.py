"""Profiles out of tables of single layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.model_folder import model_folder
from pdserve.models.model_impl import read_model_config
from pdserve.simulator import layer_tables
from pdserve.simulator.layer_tables import profile_of_layers
from pdserve.simulator.profile import Profile, ProfileStepTimes
from pdserve.simulator.step_times import Chunk

US = 1e-6
DENSE = """layer,tokens,time_us
embedding,1,1
embedding,8,2
layernorm,1,10
layernorm,8,20
gate_up_proj,1,100
gate_up_proj,8,300
gate_up_proj,16,500
final_layernorm,1,5
final_layernorm,8,6
"""
ATTENTION = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,16,7
0,0,4,16,9
8,0,0,0,11
8,0,1,16,15.5
"""
PER_SEQUENCE = """layer,sequences,time_us
lm_head,1,40
lm_head,4,50
sampler,1,3
sampler,4,5
"""
Write = Callable[..., Path]


@pytest.fixture
def config() -> ModelConfig:
    return read_model_config(model_folder("demo"), "auto", "auto")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """The folder with these tables; None leaves one out."""

    def write(dense: str | None = DENSE, attention: str | None = ATTENTION, per_sequence: str | None = None) -> Path:
        for name, content in (("dense", dense), ("attention", attention), ("per_sequence", per_sequence)):
            if content is not None:
                (tmp_path / f"{name}.csv").write_text(content)
        return tmp_path

    return write


def made(folder: Path, config: ModelConfig, overhead_s: float = 0.0) -> Profile:
    return profile_of_layers(folder, "some model", config, "some device", overhead_s)


def test_layers_add_up(write: Write, config: ModelConfig) -> None:
    profile = made(write(per_sequence=PER_SEQUENCE), config, 50 * US)
    layers = config.num_layers
    # for the counts that all layers have; a norm before attention and one before the feed-forward part
    found = {each.count: each.time.median_s / US for each in profile.tokens}
    assert found == pytest.approx({1: 50 + 1 + 5 + layers * (2 * 10 + 100), 8: 50 + 2 + 6 + layers * (2 * 20 + 300)})
    assert {each.count: each.time.median_s / US for each in profile.outputs} == pytest.approx({1: 43, 4: 55})
    assert (profile.model, profile.device, profile.transfer, profile.start_s) == (
        "some model",
        "some device",
        None,
        None,
    )
    assert not profile.whole_steps
    times = ProfileStepTimes(profile)
    mixed = times.step_s([Chunk(8, 0), Chunk(1, 16, 1)]) / US
    of_tokens = found[8] + (found[8] - found[1]) / 7
    assert mixed == pytest.approx(of_tokens + layers * 15.5 + 43)
    assert times.step_s([Chunk(1, 16, 1)] * 4) / US == pytest.approx(
        found[1] + 3 * (found[8] - found[1]) / 7 + layers * 9 + 55
    )


def test_without_a_table_the_head_is_a_wide_product(write: Write, config: ModelConfig) -> None:
    profile = made(write(), config)
    ratio = config.vocab_size / (2 * config.intermediate_size)
    found = {each.count: each.time.median_s / US for each in profile.outputs}
    assert found == pytest.approx({1: 100 * ratio, 8: 300 * ratio, 16: 500 * ratio})


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        ("dense", "layernorm,8", "dense.csv, line 11: 2 fields, 3 are needed"),
        ("dense", "layernorm,8,1,1", "dense.csv, line 11: 4 fields, 3 are needed"),
        ("dense", "layernorm,eight,1", "dense.csv, line 11: tokens is 'eight', an integer of at least 0 is needed"),
        ("dense", "layernorm,-8,1", "dense.csv, line 11: tokens is '-8', an integer of at least 0 is needed"),
        ("dense", "layernorm,8.5,1", "dense.csv, line 11: tokens is '8.5', an integer of at least 0 is needed"),
        ("dense", "layernorm,8,soon", "dense.csv, line 11: time_us is 'soon', a number of at least 0 is needed"),
        ("dense", "layernorm,8,nan", "dense.csv, line 11: time_us is 'nan', a number of at least 0 is needed"),
        ("dense", "layernorm,8,inf", "dense.csv, line 11: time_us is 'inf', a number of at least 0 is needed"),
        ("attention", "8,0,1,x,1", "attention.csv, line 6: kv_decode is 'x', an integer of at least 0 is needed"),
        ("attention", "8,0,1,1099511627776,1", "attention.csv, line 6: kv_decode is '1099511627776', an integer"),
        ("attention", "8,,1,16,1", "attention.csv, line 6: kv_prefill is '', an integer of at least 0 is needed"),
        ("attention", "8,0,1,16,-1", "attention.csv, line 6: time_us is '-1', a number of at least 0 is needed"),
        ("attention", "0,0,0,16,1", "attention[4] has neither a chunk nor sequences"),
        ("per_sequence", "sampler,4,", "per_sequence.csv, line 6: time_us is '', a number of at least 0 is needed"),
    ],
)
def test_each_bad_line_is_named(write: Write, config: ModelConfig, table: str, line: str, message: str) -> None:
    tables = {"dense": DENSE, "attention": ATTENTION, "per_sequence": PER_SEQUENCE}
    tables[table] += f"{line}\n"
    with pytest.raises(ConfigError) as caught:
        made(write(**tables), config)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"dense": None}, "dense.csv"),
        ({"attention": None}, "attention.csv"),
        ({"dense": ""}, "dense.csv begins with '', 'layer,tokens,time_us' is needed"),
        ({"dense": "layer,time_us,tokens\n"}, "begins with 'layer,time_us,tokens', 'layer,tokens,time_us' is needed"),
        ({"dense": "layer,tokens,time_us\n"}, "dense.csv has no rows"),
        ({"dense": DENSE.replace("gate_up_proj", "up_proj")}, "dense.csv has no layer 'gate_up_proj'"),
        ({"dense": DENSE.replace("\nembedding,", "\nembed,")}, "dense.csv has no layer 'embedding'"),
        ({"dense": DENSE + "other,7,1\n"}, "dense.csv has no count of tokens for which all layers have a time"),
        ({"per_sequence": "layer,tokens,time_us\n"}, "per_sequence.csv begins with"),
        ({"attention": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"}, "attention has no samples"),
    ],
)
def test_tables_that_are_of_another_kind(
    write: Write, config: ModelConfig, tables: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(write(**tables), config)
    assert message in caught.value.message


def test_tables_are_bounded(write: Write, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_tables, "MAX_ROWS", 9)
    with pytest.raises(ConfigError, match=r"dense.csv has more than 9 lines"):
        made(write(), config)


def test_bytes_that_are_no_text(write: Write, config: ModelConfig) -> None:
    folder = write()
    (folder / "dense.csv").write_bytes(b"layer,tokens,time_us\n\xff\xfe,1,1\n")
    with pytest.raises(ConfigError, match=r"dense.csv: "):
        made(folder, config)


def test_a_profile_of_layers_is_valid(write: Write, config: ModelConfig) -> None:
    profile = made(write(), config)
    profile.verify()
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
