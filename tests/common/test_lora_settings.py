"""Settings of LoRA adapters, from the command line, the environment and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings

BOTH = {"sql": "/a/sql", "org/fr": "/a,b/fr=1"}


def modules(**given: Any) -> dict[str, str] | None:
    return load_settings(DecodeSettings, **{"environ": {}, **given}).lora_modules


def test_modules_come_from_every_source(tmp_path: Path) -> None:
    on = {"enable_lora": True}
    assert modules() is None
    assert modules(flags=on | {"lora_modules": ["sql=/a/sql", "org/fr=/a,b/fr=1"]}) == BOTH
    assert modules(flags=on | {"lora_modules": "sql = /a/sql, fr=/b"}) == {"sql": "/a/sql", "fr": "/b"}
    as_json = '{"sql": "/a/sql", "org/fr": "/a,b/fr=1"}'
    assert modules(environ={"PDSERVE_LORA_MODULES": as_json, "PDSERVE_ENABLE_LORA": "true"}) == BOTH
    (file := tmp_path / "file.toml").write_text(
        'enable_lora = true\n[decode.lora_modules]\nsql = "/a/sql"\n"org/fr" = "/a,b/fr=1"\n'
    )
    assert modules(toml=file) == BOTH


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lora_modules": "sql"}, "lora_modules has 'sql', name=folder is needed"),
        ({"lora_modules": "sql=/a,sql=/b"}, "lora_modules has the name 'sql' more than once"),
        ({"lora_modules": "{"}, "lora_modules is '{', which is no JSON"),
        ({"lora_modules": {"a b": "/a"}}, "lora_modules has the name 'a b', 1 to 128 letters"),
        ({"lora_modules": {"sql": " "}}, r"lora_modules\[sql\] is ' ', the adapter's folder is needed"),
        ({"lora_modules": {f"a{n}": "/a" for n in range(1025)}}, "lora_modules has 1025 adapters, at most 1024"),
        ({"lora_dir": " "}, "lora_dir is ' ', a folder is needed"),
        ({"lora_dir": "/a", "enable_lora": False}, "lora_dir is /a and enable_lora is false"),
        ({"lora_modules": {"sql": "/a"}, "enable_lora": False}, "lora_modules is .* and enable_lora is false"),
    ],
)
def test_settings_that_cannot_be_used_are_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(DecodeSettings, flags={"enable_lora": True, **flags}, environ={})
