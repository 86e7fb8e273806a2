"""Generated parts of documents: what is between `<!-- made by make docs-generated: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path

from generated_docs import house_page
from generated_docs.helm_settings import CHART, helm_schema
from generated_docs.model_families import model_families, refused_families
from generated_docs.package_drawing import package_drawing
from generated_docs.settings_page import limits_tables, settings_tables
from generated_docs.tests_of_modules import tests_of_modules
from generated_docs.weight_forms import weight_forms

ROOT = Path(__file__).resolve().parents[2]
HOUSE = "docs/house.md"


def texts() -> dict[tuple[str, str], str]:
    """(document, name of its part) -> what should be there."""
    return {
        ("docs/architecture.md", "packages"): package_drawing(ROOT),
        ("docs/checkpoints.md", "forms of weights"): weight_forms(ROOT),
        ("docs/models.md", "families"): model_families(ROOT),
        ("docs/models.md", "refused families"): refused_families(ROOT),
        ("docs/settings.md", "settings"): settings_tables(),
        ("docs/settings.md", "limits"): limits_tables(),
        ("docs/tests.md", "tests"): tests_of_modules(ROOT),
        **{(HOUSE, name): make(ROOT, part(ROOT / HOUSE, name)) for name, make in house_page.PARTS.items()},
    }


def files() -> dict[str, str]:
    """Files that are generated as a whole -> what should be in them."""
    return {str(CHART / "values.schema.json"): helm_schema(ROOT)}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- made by make docs-generated: {re.escape(name)} -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def part(document: Path, name: str) -> str:
    """Text of the part. Raises: ValueError when the document has no such part."""
    found = _pattern(name).search(document.read_text())
    if found is None:
        raise ValueError(f"{document} has no part {name}")
    return found[2]


def replace_part(document: Path, name: str, text: str) -> None:
    """Put another text there. Raises: ValueError when the document has no such part."""
    part(document, name)
    document.write_text(_pattern(name).sub(lambda found: f"{found[1]}{text}{found[3]}", document.read_text()))
