"""The settings of encryption at rest, as they are written in the section ``[encryption]``, and the file of keys.

Owns nothing; ``config`` calls it where all settings are read, ``recovery`` where the tiers are opened. Imports msgspec
and ``tiers.errors``; ``tiers.seal`` only where there is a key.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from terracekv.tiers.errors import ConfigError

if TYPE_CHECKING:
    from terracekv.tiers.seal import Keys

FILES = ("encryption.key_file",)
"""Settings that name files."""
KEY_DIGITS = 64


class Encryption(Struct, frozen=True, forbid_unknown_fields=True):
    """``key_file`` has a master key of 64 hex digits on each line: the first seals, all open. Empty: nothing is sealed,
    and what was sealed is a miss. It is for disk and s3 both."""

    key_file: str = ""


def open_keys(encryption: Encryption) -> "Keys | None":
    """The keys of the file, None without one. ConfigError when it cannot be used; no key is repeated in it."""
    if not encryption.key_file:
        return None
    where = f"encryption.key_file {encryption.key_file}"
    try:
        lines = Path(encryption.key_file).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}", "create it: openssl rand -hex 32") from None
    masters = []
    for number, line in enumerate(lines, 1):
        try:
            masters.append(bytes.fromhex(line))
        except ValueError:
            masters.append(b"")
        if len(line) != KEY_DIGITS or 2 * len(masters[-1]) != KEY_DIGITS:
            raise ConfigError(f"{where}: key {number} is not {KEY_DIGITS} hex digits", "openssl rand -hex 32 makes one")
    if not masters:
        raise ConfigError(f"{where} has no key", "openssl rand -hex 32 makes one")
    try:
        from terracekv.tiers.seal import Keys
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"encryption.key_file is set and {missing.name} is not installed", 'pip install "terracekv[encryption]"'
        ) from None
    return Keys(masters)
