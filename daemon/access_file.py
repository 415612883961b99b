"""The file of tokens and tenants: how it is written, and what is wrong with one that cannot be meant.

Pure, but for reading the file. Called by ``access`` at the start and whenever the file has changed. Imports msgspec,
``tiers.budget`` and ``errors``.

Secrets are kept as digests: what a caller presents is hashed and compared, whether the file has the secret or its hash.
"""

import errno
import hashlib
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from terracekv.tiers.budget import parse_size
from terracekv.tiers.errors import ConfigError

SECRET_CHARS_MIN = 16
SEE = "docs/security.md shows such a file"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
Uid = Annotated[int, Meta(ge=0, lt=2**32 - 1)]


QUOTAS = ("gpu", "host", "disk")
"""Tiers that can be shared out. A bucket is not the daemon's alone: its own policies bound who puts what there."""


class Right(StrEnum):
    """What a caller may do. Each route and each session asks for one."""

    READ = "read"
    """Look up, load, list."""
    WRITE = "write"
    """Store, delete, pin."""
    ADMIN = "admin"
    """Flush."""
    METRICS = "metrics"
    """Figures of the whole daemon."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody whom the daemon has recognised. ``tenant`` is "" for who belongs to none, and sees all."""

    name: str
    tenant: str
    rights: frozenset[Right]
    digest: bytes = field(default=b"", repr=False, compare=False)
    """Of the secret that it came with; empty for who needs none."""


class Token(Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[[tokens]]``: ``secret``, or ``sha256`` of it in hex."""

    name: Name
    rights: frozenset[Right]
    secret: str = ""
    sha256: Digest | None = None
    tenant: str = ""


class Tenant(Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[tenants.NAME]``. ``uids`` need no token at the Unix sockets and have ``rights`` there; ``gpu``, ``host``
    and ``disk`` are quotas, None for none."""

    uids: frozenset[Uid] = frozenset()
    rights: frozenset[Right] = frozenset({Right.READ, Right.WRITE})
    gpu: str | int | None = None
    host: str | int | None = None
    disk: str | int | None = None


class Content(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tokens: list[Token] = []
    tenants: dict[Name, Tenant] = {}


@dataclass(frozen=True, slots=True)
class Table:
    """What a file comes to. ``quotas[tier][tenant]`` is in bytes; a tenant without one is not there."""

    tokens: tuple[tuple[bytes, Caller], ...] = ()
    uids: Mapping[int, Caller] = field(default_factory=dict)
    tenants: tuple[str, ...] = ()
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: {tier: {} for tier in QUOTAS})


def digest_of(secret: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret).digest()


def read_token(path: str, again: bool = False) -> str:
    """The bearer token in ``daemon.token_file``. ConfigError if unusable."""
    try:
        token = _text(path, again).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"daemon.token_file cannot be read: {error}", "create it, readable by the daemon") from None
    if len(token) < SECRET_CHARS_MIN:
        raise ConfigError(
            f"daemon.token_file holds {len(token)} characters", f"write a secret of {SECRET_CHARS_MIN} or more into it"
        )
    return token


def read_table(path: str, again: bool = False) -> Table:
    """ConfigError says what is wrong with the file, and never what a secret in it is."""
    try:
        content = msgspec.convert(tomllib.loads(_text(path, again)), Content)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"access.file cannot be read: {error}", "create it, readable by the daemon alone") from None
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"access.file: {path} is not TOML", SEE) from None  # its message quotes the line
    except msgspec.ValidationError as error:
        raise ConfigError(f"access.file: {path}: {error}", SEE) from None
    return Table(
        tokens=_tokens(content),
        uids=_uids(content),
        tenants=tuple(content.tenants),
        quotas={tier: _quotas(content, tier) for tier in QUOTAS},
    )


def _text(path: str, again: bool) -> str:
    """The whole file. At the start it may be a pipe; ``again`` nobody waits for the other end of one."""
    more = os.O_NONBLOCK if again else 0
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | more)) as file:
        if again and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", path)
        return file.read()


def _tokens(content: Content) -> tuple[tuple[bytes, Caller], ...]:
    rows: dict[bytes, Caller] = {}
    names = set[str]()
    for token in content.tokens:
        where = f"access.file: token {token.name!r}"
        if token.name in names:
            raise ConfigError(f"{where} stands there twice", "give each token a name of its own")
        names.add(token.name)
        if bool(token.secret) == (token.sha256 is not None):
            raise ConfigError(f"{where} has not one of secret and sha256", "write the secret, or its SHA-256 in hex")
        if token.sha256 is None and len(token.secret) < SECRET_CHARS_MIN:
            raise ConfigError(
                f"{where} has a secret of {len(token.secret)} characters",
                f"choose one of {SECRET_CHARS_MIN} or more: openssl rand -hex 32",
            )
        if not token.rights:
            raise ConfigError(f"{where} has no rights", f"give it some of {', '.join(Right)}, or take it out")
        _check_tenant(where, token.tenant, token.rights, content)
        digest = digest_of(token.secret.encode()) if token.sha256 is None else bytes.fromhex(token.sha256)
        if digest in rows:
            raise ConfigError(f"{where} has the secret of token {rows[digest].name!r}", "choose another")
        rows[digest] = Caller(token.name, token.tenant, token.rights, digest)
    return tuple(rows.items())


def _uids(content: Content) -> dict[int, Caller]:
    callers: dict[int, Caller] = {}
    for name, tenant in content.tenants.items():
        _check_tenant(f"access.file: tenant {name!r}", name, tenant.rights, content)
        for uid in tenant.uids:
            if uid in callers:
                raise ConfigError(
                    f"access.file: uid {uid} is of tenants {callers[uid].tenant!r} and {name!r}", "name it once"
                )
            callers[uid] = Caller(f"uid {uid}", name, tenant.rights)
    return callers


def _check_tenant(where: str, tenant: str, rights: frozenset[Right], content: Content) -> None:
    if tenant and tenant not in content.tenants:
        raise ConfigError(f"{where} is of tenant {tenant!r}, which is not there", f"add [tenants.{tenant}]")
    if tenant and Right.METRICS in rights:
        raise ConfigError(
            f"{where} has the right metrics, whose figures are of all tenants", "give that to a token without a tenant"
        )


def _quotas(content: Content, tier: str) -> dict[str, int]:
    quotas = {}
    for name, tenant in content.tenants.items():
        given = getattr(tenant, tier)
        if given is None:
            continue
        try:
            quotas[name] = parse_size(given) if isinstance(given, str) else given
        except ValueError as error:
            raise ConfigError(f"access.file: tenant {name!r}: {tier}: {error}", "as 4GiB, or 512MiB") from None
        if quotas[name] < 0:
            raise ConfigError(f"access.file: tenant {name!r}: {tier} is negative", "0 keeps it out of the tier")
    return quotas
