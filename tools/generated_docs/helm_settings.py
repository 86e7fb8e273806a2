"""`deploy/helm/pdserve/values.schema.json`: its definition of `settings`, from the structs of settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pdserve.common.settings.catalogue import SECRETS, SERVICES, Setting, settings_of

CHART = Path("deploy/helm/pdserve")
_SCALARS = {int: "integer", float: "number", bool: "boolean"}


def helm_schema(root: Path) -> str:
    """The whole schema, with this definition made anew."""
    path = root / CHART / "values.schema.json"
    schema: dict[str, Any] = json.loads(path.read_text())
    schema["definitions"]["settings"] = _definition(chart_settings(root))
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def chart_settings(root: Path) -> set[str]:
    """Settings that the chart sets from other values, and secrets: they are none of `settings`."""
    templates = "\n".join(path.read_text() for path in (root / CHART / "templates").iterdir())
    return {name.lower() for name in re.findall(r"PDSERVE_([A-Z_]+)\b", templates)} | set(SECRETS)


def _definition(owned: set[str]) -> dict[str, Any]:
    known = settings_of(*SERVICES)
    return {
        "description": "Settings by their names. Those that the chart sets from other values, and secrets, are refused.",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _schema(known[name]) for name in sorted(known.keys() - owned)},
    }


def _schema(setting: Setting) -> dict[str, Any]:
    """Numbers and booleans may also be text, as the environment has them."""
    found: dict[str, Any] = {"description": setting.meaning}
    if setting.choices:
        return found | {"enum": list(setting.choices)}
    if setting.is_list:
        return found | {"type": ["array", "string"], "items": {"type": "string"}}
    if setting.is_map or setting.is_struct:
        return found | {"type": ["object", "string"]}
    if (scalar := _SCALARS.get(setting.kind)) is not None:
        return found | {"type": [scalar, "string"]}
    return found | {"type": "string"}
