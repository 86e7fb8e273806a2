"""`pdserve profile` from its options to its file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import main as command_line
from pdserve.cli.profile import transfer_bench
from pdserve.cli.profile.run_profile import ProfileOptions, measured_profile, run_profile
from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.simulator.profile import ProfileStepTimes, read_profile
from tests.support.models.checkpoints import make_classifier
from tests.support.models.encoder_decoder_checkpoints import make_encoder_decoder
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.timeout(4 * HANG_S)

SETTINGS: dict[str, Any] = {
    "model": "demo", "num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256, "connector": "tcp",
}  # fmt: skip


@pytest.fixture
def options(tmp_path: Path) -> ProfileOptions:
    return ProfileOptions(role="decode", settings=SETTINGS, config=None, out=tmp_path / "profile.json", seconds=1e-6)


@pytest.mark.process
def test_a_profile_is_measured_shown_and_written(
    options: ProfileOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer_bench, "POOL_BYTES", 4 << 20)
    monkeypatch.setenv("COLUMNS", "200")
    run_profile(replace(options, role="prefill"))
    profile = read_profile(options.out)
    assert profile.whole_steps
    assert (profile.model, profile.settings["max_num_batched_tokens"], profile.settings["connector"]) == (
        "demo",
        32,
        "tcp",
    )
    assert {each.count for each in profile.tokens} == {2, 32}
    assert profile.device.endswith(f", {os.cpu_count()} cores")
    assert profile.transfer is not None
    assert profile.start_s is not None
    assert profile.start_s.median_s > 0.1
    assert ProfileStepTimes(profile)
    shown = capsys.readouterr().out
    assert "1 x 32 after 0" in shown
    assert "blocks over tcp" in shown
    assert "start of a worker" in shown


def test_tables_of_layers_need_no_weights(options: ProfileOptions, tmp_path: Path) -> None:
    layers = ("embedding", "layernorm", "gate_up_proj", "final_layernorm")
    dense = "".join(f"{layer},{count},{count}\n" for layer in layers for count in (1, 8))
    (tmp_path / "dense.csv").write_text(f"layer,tokens,time_us\n{dense}")
    (tmp_path / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,5\n")
    of_tables = replace(
        options, settings={"model": "demo"}, seconds=None, layers=tmp_path, device_name="a GPU", overhead_us=1000.0
    )
    run_profile(of_tables)
    profile = read_profile(options.out)
    assert (profile.model, profile.device, profile.transfer) == ("demo", "a GPU", None)
    assert 1e-3 < profile.tokens[0].time.median_s < 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": 0.0}, "--seconds is 0, above 0 is needed"),
        ({"seconds": float("nan")}, "--seconds is nan, above 0 is needed"),
        ({"out": Path("/")}, "--out is /, which cannot be written"),
        ({"out": Path("/nowhere/profile.json")}, "--out is /nowhere/profile.json, which cannot be written"),
        ({"overhead_us": 5.0}, "--overhead-us is 5, but there is no --layers"),
        ({"layers": Path("x")}, "--layers is x: --device-name is needed"),
        ({"layers": Path("x"), "device_name": "a", "overhead_us": -1.0}, "--overhead-us is -1, at least 0 is needed"),
        ({"layers": Path("x"), "device_name": "a"}, "--seconds is 1e-06 and --layers is x: tables are not measured"),
        ({"layers": Path("x"), "device_name": "a", "seconds": None}, "num_blocks is 100 and --layers is x: tables have"),
        ({"layers": Path("/x"), "device_name": "a", "seconds": None, "settings": {}}, "/x/dense.csv: "),
        ({"settings": {"model": "/no/such"}}, "model '/no/such': no such folder"),
        ({"settings": {"max_num_seqs": 0}}, "max_num_seqs is 0"),
        ({"settings": {"model": "demo", "device": "cuda:99"}}, "device is 'cuda:99', but torch"),
        ({"settings": {"model": "demo", "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}},
         "speculative_config is set, and such steps are not measured"),
    ],
)  # fmt: skip
def test_each_wrong_option_is_named(options: ProfileOptions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_profile(replace(options, **changes))
    assert message in caught.value.message
    assert not options.out.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [(make_classifier, "has a classification head, and"), (make_encoder_decoder, "has an encoder, and")],
)
def test_models_with_other_steps_are_refused(
    options: ProfileOptions, tmp_path: Path, make: Callable[..., object], message: str
) -> None:
    folder = tmp_path / "model"
    make(folder)
    settings = PrefillSettings(model=str(folder))
    with pytest.raises(ConfigError, match=message):
        measured_profile(replace(options, role="prefill", settings={"model": str(folder)}), settings)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["a", "--model", "b", "--out", "x"], "MODEL is 'a' and --model is 'b': give one of them"),
        (["demo", "--out", "x", "--seconds", "-1"], "--seconds is -1, above 0 is needed"),
        (["demo", "--out", "x", "--bandwidth", "1"], "--bandwidth: `pdserve profile` has no such option"),
    ],
)
def test_errors_are_one_line_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pdserve", "profile", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"pdserve: {line}")
