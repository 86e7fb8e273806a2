"""The documents name only what is there: files, names in the code, commands, flags, settings, error codes, bounds."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from pdserve.cli.app import app
from pdserve.common.errors import BY_CODE
from pdserve.engine import request
from pdserve.kv_transfer.control import transfer_state
from pdserve.kv_transfer.pull import read_queue
from pdserve.router.attempts import attempt_state

ROOT = Path(__file__).resolve().parents[2]
MAIN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
DOCUMENTS = [*MAIN, *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
PACKAGES = {path.name: path for path in ROOT.glob("*/pdserve/*") if path.is_dir() and path.name != "__pycache__"}
MAX_FILES_OF_WALK = 28
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)+/?|[A-Z]+\.md")
_MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)(?:\(\))?")


def prose(document: Path) -> str:
    """The text outside fenced blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def quoted(document: Path) -> list[str]:
    """Texts between backticks in the prose."""
    return _QUOTED.findall(prose(document))


def rows(document: Path, heading: str) -> Iterator[list[str]]:
    """Cells of the tables below a heading, without their head; backticks are taken off."""
    section = document.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def exists(path: str) -> bool:
    """A path of the repository, or `package/file.py`; `*` stands for any name."""
    package, _, rest = path.partition("/")
    folders = [ROOT, *([PACKAGES[package].parent] if package in PACKAGES and rest else [])]
    return any(any(folder.glob(path.rstrip("/"))) for folder in folders)


@DOCUMENT
def test_every_path_exists(document: Path) -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert not [path for path in linked if not (document.parent / path).exists()]
    named = [text for text in quoted(document) if _PATH.fullmatch(text)]
    missing = [path for path in named if not path.startswith(("path/to/", "ORG/")) and not exists(path)]
    assert not missing


@cache
def class_bodies() -> dict[str, str]:
    """Class, service or message -> the text that defines it, in Python or protobuf; of a class with that of its bases."""
    bodies: dict[str, str] = {}
    bases: dict[str, list[str]] = {}
    for path in ROOT.glob("*/pdserve/**/*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bodies[node.name] = bodies.get(node.name, "") + (ast.get_source_segment(text, node) or "")
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    bodies |= {name: bodies[name] + "".join(bodies.get(base, "") for base in bases[name]) for name in bases}
    for path in (ROOT / "proto").rglob("*.proto"):
        for kind, name, body in re.findall(r"^(service|message) (\w+) \{(.*?)^\}", path.read_text(), re.M | re.S):
            bodies[name] = bodies.get(name, "") + kind + body
    return bodies


@pytest.mark.slow
@DOCUMENT
def test_every_member_named_exists(document: Path) -> None:
    members = [match.groups() for text in quoted(document) if (match := _MEMBER.fullmatch(text))]
    unknown = [
        f"{owner}.{member}"
        for owner, member in members
        if owner not in {"README", "LICENSE", "SECURITY"}
        and not re.search(rf"\b{member}\b", class_bodies().get(owner, ""))
    ]
    assert not unknown


@cache
def flags() -> dict[str, set[str]]:
    """Subcommand -> the flags that its --help shows, with those of its own subcommands."""
    group = typer.main.get_command(app)
    return {name: shown_flags(command) for name, command in group.commands.items()}  # type: ignore[attr-defined]


def shown_flags(command: Any) -> set[str]:
    parameters = command.get_params(typer.Context(command))
    shown = [parameter for parameter in parameters if not getattr(parameter, "hidden", False)]
    own = {flag for parameter in shown for flag in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(shown_flags, getattr(command, "commands", {}).values()))


@DOCUMENT
def test_every_command_and_flag_exists(document: Path) -> None:
    text = document.read_text().replace("\\\n", " ")
    used = (
        re.findall(r"^[ .\w/]*\bpdserve +([a-z]+)\b([^\n`]*)", text, re.MULTILINE)
        if document.name in {"README.md", "quickstart.md"}
        else []
    )
    used += re.findall(r"`(?:\.venv/bin/)?pdserve ([a-z]+)\b([^`\n]*)`", text)
    for command, rest in used:
        assert command in flags(), f"pdserve {command}"
        named = set(re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0]))
        assert named <= flags()[command], f"pdserve {command}: {named - flags()[command]}"
    alone = {flag for quote in quoted(document) for flag in re.findall(r"^--[a-z-]+", quote)}
    assert alone <= set().union(*flags().values()), alone


def test_error_table_is_the_tree() -> None:
    table = {code: tuple(cells) for code, *cells, _ in rows(ROOT / "docs/protocol.md", "Errors")}
    tree = {
        code: (error.grpc_status.name, str(error.http_status), "yes" if error.retryable else "no")
        for code, error in BY_CODE.items()
    }
    assert table == tree


def test_every_rule_of_security_names_its_tests() -> None:
    table = list(rows(ROOT / "docs/security.md", "Rules and their tests"))
    assert len(table) > 20
    for rule, tests in table:
        assert re.fullmatch(r"(`?tests/[\w/]+/test_\w+\.py`?(, )?)+", tests), f"{rule}: {tests}"


def test_every_promise_to_users_is_shown_by_a_test_or_a_page() -> None:
    table = re.findall(r"^\| (?!promise|---)(.+) \| (.+) \|$", (ROOT / "docs/users.md").read_text(), re.MULTILINE)
    assert len(table) > 40
    for promise, shown in table:
        tests = re.findall(r"`(tests/[\w/]+/test_\w+\.py)::(test_\w+)`", shown)
        assert tests or "](" in shown, promise
        assert shown.count("::") == len(tests), promise
        for file, name in tests:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{promise}: {name}"


def test_every_bound_has_the_value_that_the_code_has() -> None:
    for name, value, path in rows(ROOT / "docs/failure.md", "Every bound"):
        source = PACKAGES[path.split("/")[0]].parent / path
        values = {
            ast.literal_eval(node.value)
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id == name
        }
        assert values == {ast.literal_eval(value)}, f"{path}: {name}"


def moves_of(table: Mapping[enum.Enum, Collection[enum.Enum]]) -> dict[str, set[str]]:
    """State -> the states that may follow, for those from which anything may; the ways to finish are one."""
    return {
        state.name: {"finished" if to.name.startswith("FINISHED") else to.name for to in following}
        for state, following in table.items()
        if following
    }


@pytest.mark.parametrize(
    ("machine", "table"),
    [
        ("RequestStatus", request.LEGAL_MOVES),
        ("SourceState", transfer_state.SOURCE_MOVES),
        ("ReceiverState", transfer_state.RECEIVER_MOVES),
        ("AttemptState", attempt_state.EDGES),
        ("ReadState", read_queue.LEGAL_MOVES),
    ],
)
def test_state_tables_are_those_of_the_code(machine: str, table: Mapping[enum.Enum, Collection[enum.Enum]]) -> None:
    section = (ROOT / "docs/architecture.md").read_text().split(f"\n`{machine}` (")[1]
    lines = re.findall(r"^\| `(\w+)` \| (.+) \|$", section.split("\n\n")[1], re.MULTILINE)
    assert {state: set(re.findall(r"\w+", following)) for state, following in lines} == moves_of(table)


def test_the_walk_of_a_request_is_short() -> None:
    walk = (ROOT / "docs/architecture.md").read_text().split("\n## One request, step by step\n")[1].split("\n## ")[0]
    files = {text for text in _QUOTED.findall(walk) if text.endswith(".py")}
    assert 20 < len(files) <= MAX_FILES_OF_WALK, sorted(files)


def test_layer_table_is_the_one_that_is_held() -> None:
    """The table of packages is `MAY_IMPORT` of `test_layers.py`."""
    tree = ast.parse((ROOT / "tests/house/test_layers.py").read_text())
    (layers,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "MAY_IMPORT"
    )
    assert isinstance(layers, ast.Dict)
    names = [ast.literal_eval(key) for key in layers.keys if key is not None]
    table = {cells[0]: cells[2] for cells in rows(ROOT / "docs/architecture.md", "Packages")}
    assert set(table) == set(names)
    for name, value in zip(names, layers.values, strict=True):
        if isinstance(value, ast.Set):
            assert set(re.findall(r"\w+", table[name])) == set(ast.literal_eval(value)), name


@pytest.mark.slow
@DOCUMENT
def test_every_constant_named_exists(document: Path) -> None:
    """Upper-case names in backticks: states, constants, enum members, environment variables."""
    sources = "\n".join(path.read_text() for path in ROOT.glob("*/pdserve/**/*") if path.suffix in {".py", ".proto"})
    sources += "\n".join([*PACKAGES, *((ROOT / name).read_text() for name in ("docker-compose.yml", "Dockerfile"))])
    # the variables of OpenTelemetry are read by its SDK
    named = {text for text in quoted(document) if re.fullmatch(r"(?!OTEL_)[A-Z][A-Z_]{3,}", text)}
    settings = {name for name in named if name.removeprefix("PDSERVE_").lower() in sources}
    assert not {name for name in named - settings if name.removeprefix("PDSERVE_") not in sources}
