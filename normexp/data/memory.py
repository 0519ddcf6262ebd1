"""Data live in memory as a whole; what does not fit is refused with its size."""

from __future__ import annotations

from pathlib import Path

from normexp.errors import UserError

_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say (not Linux)."""
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def refuse_beyond_memory(what: str, num_bytes: int, remedy: str) -> None:
    """Raises UserError when `num_bytes` is more than what is available."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise UserError(
            f"{what} needs {num_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB is "
            f"available; {remedy}"
        )
