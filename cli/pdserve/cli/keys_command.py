"""`pdserve keys new`: makes an API key, shown once, and its entry for `api_keys_file`."""

from __future__ import annotations

import sys

from pdserve.common.errors import ConfigError
from pdserve.common.settings.api_key_file import Role, is_name, key_hash, new_key


def make_key(name: str, tenant: str | None, role: Role) -> None:
    """Print the key to standard error and the entry to standard output, so that `>> FILE` appends only the entry.

    Raises: ConfigError for an invalid name.
    """
    for option, value in (("NAME", name), ("--tenant", tenant)):
        if value is not None and not is_name(value):
            raise ConfigError(f"{option} is {value[:64]!r}, 1 to 64 letters, digits, `_`, `.` or `-` are needed")
    key = new_key()
    lines = ["", "[[keys]]", f'name = "{name}"', f'sha256 = "{key_hash(key)}"']
    if tenant is not None:
        lines.append(f'tenant = "{tenant}"')
    if role != "user":
        lines.append(f'role = "{role}"')
    sys.stderr.write(
        f"The key, which is shown this once and stored nowhere:\n\n  {key}\n\nIts entry for api_keys_file:\n"
    )
    sys.stderr.flush()
    sys.stdout.write("\n".join(lines) + "\n")
