"""`write_deployment_files`: a planned fleet as values for Helm, and as commands for Compose, Ray and one machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.cli.plan.fleet_search import Size
from pdserve.cli.up.cluster_plan import settings_by_role
from pdserve.common.errors import ConfigError


def write_deployment_files(folder: Path, size: Size, settings: Mapping[str, Any]) -> None:
    """Raises: ConfigError if the folder cannot be written."""
    flags = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items())
    counts = f"--prefill {size.num_prefill} --decode {size.num_decode}"
    environment = " ".join(f"PDSERVE_{name.upper()}={shlex.quote(str(value))}" for name, value in settings.items())
    contents = {
        "values.yaml": _helm_values(size, settings),
        "compose.sh": f"{environment} docker-compose up -d --scale prefill={size.num_prefill} --scale decode={size.num_decode}\n",
        "ray.sh": f"pdserve up {flags} {counts} --ray auto\n",
        "up.sh": f"pdserve up {flags} {counts}\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_text(content)
    except OSError as error:
        raise ConfigError(f"--out is {folder}, which cannot be written: {error.strerror}") from error


def _helm_values(size: Size, settings: Mapping[str, Any]) -> str:
    """JSON, which is YAML, too."""
    by_role = settings_by_role({name: value for name, value in settings.items() if name != "model"})
    values: dict[str, Any] = {"model": {"name": settings["model"]}} if "model" in settings else {}
    values["router"] = {"settings": by_role["router"]}
    for role, count in (("prefill", size.num_prefill), ("decode", size.num_decode)):
        values[role] = {"replicas": count, "settings": by_role[role]}
    return json.dumps(values, indent=2) + "\n"
