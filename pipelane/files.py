"""Files: read whole, written whole or not at all, and what is JSON in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipelane.errors import ConfigError

__all__ = ["json_object", "read_text", "write_text"]


def read_text(path: Path, what: str = "") -> str:
    """The text of a file; spreadsheets and editors may put a mark before it.

    Args:
        path: the file.
        what: what it should be, for the message, such as "the profile ".

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what}{path}: {error}") from error


def json_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: it is none; calls it ``where``.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object, got {type(data).__name__}")
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if _is_special(path):
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(text)
            return
        path = path.resolve()  # a link stays a link
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(text, encoding="utf-8", newline="")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    """Devices, pipes and /dev/stdout, which may lead to a file that others hold open: what is
    there must not be replaced by a new file."""
    system = Path(os.path.abspath(path)).parts[1:2]
    return system in (("dev",), ("proc",)) or (path.exists() and not path.is_file())
