"""The settings of who may come in, as they are written in the section ``[access]``.

Owns nothing; called by ``config`` where all settings are read. Imports msgspec and ``tiers.errors``.
"""

import grp
import pwd
import re
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from terracekv.tiers.errors import ConfigError

Mode = Annotated[str, Meta(pattern="^0?[0-7]{3}$", description="octal")]
FILES = ("access.file", "access.tls_cert", "access.tls_key")
"""Settings that name files."""


class Access(Struct, frozen=True, forbid_unknown_fields=True):
    """``file`` has tokens and tenants. ``uids`` and ``gids``: who may connect to the Unix sockets besides the daemon's
    own user, names or numbers with commas between; with both empty, whomever the sockets' modes let in.
    ``tls_cert`` and ``tls_key`` are PEM files for the TCP door."""

    file: str = ""
    uids: str = ""
    gids: str = ""
    own_user: bool = True
    socket_owner: str = ""
    socket_group: str = ""
    socket_mode: Mode = "0600"
    tls_cert: str = ""
    tls_key: str = ""


def check_access(access: Access) -> None:
    """ConfigError for names that this machine does not know, half a pair of files, and a token that nobody is asked
    for: without ``access.file`` whoever reaches a Unix socket may do everything."""
    if not access.own_user and not access.file:
        raise ConfigError(
            "access.own_user is false and access.file is empty: the Unix sockets would ask nobody for a token",
            "set access.file to a file of tokens, or leave access.own_user true",
        )
    if bool(access.tls_cert) != bool(access.tls_key):
        given, other = ("tls_cert", "tls_key") if access.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError(f"access.{given} is set and access.{other} is not", "set both, or none for plain HTTP")
    users(access)
    groups(access)
    owner_of(access)


def users(access: Access) -> frozenset[int]:
    """The uids of ``access.uids``."""
    return frozenset(_number("access.uids", name, _uid) for name in _listed(access.uids))


def groups(access: Access) -> frozenset[int]:
    """The gids of ``access.gids``."""
    return frozenset(_number("access.gids", name, _gid) for name in _listed(access.gids))


def owner_of(access: Access) -> tuple[int, int, int]:
    """Uid, gid (-1 for as it is) and mode that the sockets are given."""
    owner = _number("access.socket_owner", access.socket_owner, _uid) if access.socket_owner else -1
    group = _number("access.socket_group", access.socket_group, _gid) if access.socket_group else -1
    return owner, group, int(access.socket_mode, 8)


def _listed(text: str) -> list[str]:
    return [name for name in re.split(r"[,\s]+", text) if name]


def _uid(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _gid(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def _number(key: str, name: str, find: Callable[[str], int]) -> int:
    if name.isascii() and name.isdigit() and int(name) < 2**32 - 1:
        return int(name)
    try:
        return find(name)
    except (KeyError, ValueError):
        raise ConfigError(f"{key}: this machine knows no {name!r}", "write the number, as id(1) shows it") from None
