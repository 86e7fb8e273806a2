"""`pdserve up` finds a missing GPU and a model that cannot be served before it starts a worker."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pdserve.cli.main as command_line
from pdserve.cli.up import startup_check
from pdserve.cli.up.cluster_plan import make_plan
from pdserve.cli.up.startup_check import check_workers
from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.runner.loading.startup_check import StartupQuestion, startup_answer
from pdserve.models.model_folder import model_folder
from tests.support.models.checkpoints import edit_json
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.timeout(4 * HANG_S)


@pytest.fixture
def folder(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint without weights, of this test alone."""
    return shutil.copytree(
        tiny_checkpoints("llama"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


@pytest.mark.few(1)
@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        (["--device=cuda:99"], {}, "device is 'cuda:99', but torch"),
        ([], {"architectures": ["FooForCausalLM"], "model_type": "foo"}, "architecture FooForCausalLM; supported: "),
    ],
)
def test_no_worker_is_started(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    config: dict[str, Any],
    said: str,
) -> None:
    edit_json(folder / "config.json", **config)
    capsys.readouterr()
    started: list[object] = []
    monkeypatch.setattr("pdserve.cli.up.cluster.WorkerChild", lambda *given: started.append(given))
    monkeypatch.setattr("pdserve.cli.up.up_command.configure_logging", lambda *given: None)
    monkeypatch.setattr("sys.argv", ["pdserve", "up", str(folder), "--port", "0", "--grpc-port", "0", *options])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve: prefill-0: ")
    assert said in line
    assert not started


@pytest.mark.parametrize(
    ("settings", "config", "said"),
    [
        (PrefillSettings(), {}, None),
        (PrefillSettings(device="cuda:98", tensor_parallel_size=2), {}, "device is 'cuda:98', but torch"),
        (PrefillSettings(), {"architectures": []}, "architecture none named; supported: "),
        (PrefillSettings(), {"model_type": "foo"}, "model_type 'foo' is not that of LlamaForCausalLM (llama)"),
        (PrefillSettings(), {"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
        (PrefillSettings(tensor_parallel_size=7), {}, "tensor_parallel_size is 7"),
        (
            PrefillSettings(model_impl="native"),
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel; supported: ",
        ),
        (PrefillSettings(model_impl="transformers", enable_lora=True), {}, "enable_lora"),
    ],
)
def test_what_needs_no_weights_is_checked(
    folder: Path, settings: PrefillSettings, config: dict[str, Any], said: str | None
) -> None:
    edit_json(folder / "config.json", **config)
    question = StartupQuestion(str(folder), {"prefill": msgspec.Raw(msgspec.json.encode(settings))})
    problems = startup_answer(question).problems
    assert list(problems) == ([] if said is None else ["prefill"])
    assert said is None or said in problems["prefill"]


def test_a_bundled_model_on_processors_costs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "child", lambda *given, **named: pytest.fail("a process was started"))
    plan = make_plan({}, None, {"prefill": 1, "decode": 1}, {})
    check_workers(plan, model_folder("demo"))


@pytest.mark.process
def test_a_check_that_hangs_or_breaks_leaves_it_to_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_plan({"device": "cuda"}, None, {"prefill": 1}, {})
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_workers(plan, model_folder("demo"))
    (tmp_path / "torch.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(startup_check, "CHECK_S", 2.0)
    check_workers(plan, model_folder("demo"))


@pytest.mark.slow
@pytest.mark.process
def test_each_role_has_its_own_settings(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[decode]\ndevice = "cuda:99"\n')
    plan = make_plan({}, tmp_path / "settings.toml", {"prefill": 2, "decode": 2}, {})
    with pytest.raises(ConfigError, match=r"^decode-0: device is 'cuda:99'"):
        check_workers(plan, model_folder("demo"))
