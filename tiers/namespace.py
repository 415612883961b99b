"""Namespaces: what makes KV bytes interchangeable, with the epoch that a flush raises.

Owns ``namespaces.json`` in the state folder: written whole, fsynced, renamed into place, so an epoch once raised
stays raised. It is not in the catalog because the catalog can be rebuilt from segments and an epoch cannot.
Called by the daemon on its event loop and by tiers from any thread. Imports ``checksum``, ``errors``, ``failpoint``
and ``folder``.
"""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from terracekv.tiers.checksum import checksum
from terracekv.tiers.errors import BadRequest, Damaged
from terracekv.tiers.failpoint import failpoint
from terracekv.tiers.folder import sync_folder

FORMAT = 2
"""Format 1 had no check over its rows."""
EPOCH_MAX = 2**32 - 1
"""The last that a record, and a stamp, has room for."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A snapshot: compare ``stamp`` to know whether bytes belong to this namespace *and* its present epoch.

    ``number`` is small, unique in this state folder and never reused. ``block_tokens`` (tokens), ``shards`` and
    ``block_bytes`` (bytes of one shard of a block) are 0 while a namespace is known from its records only. ``tenant``
    is whose it is, "" for nobody's in particular; a namespace known from its records only is nobody's.
    """

    id: bytes
    number: int
    epoch: int
    model: str = ""
    revision: str = ""
    dtype: str = ""
    layout: bytes = b""
    block_tokens: int = 0
    shards: int = 0
    block_bytes: int = 0
    tenant: str = ""

    @property
    def stamp(self) -> int:
        """Number and epoch as one u64: equal only for blocks that may be served."""
        return self.number << 32 | self.epoch

    @property
    def registered(self) -> bool:
        """Whether an engine has said what this namespace is."""
        return self.block_bytes > 0


class Namespaces:
    """All namespaces of one state folder. Thread-safe; every change is durable before it is answered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._by_id: dict[bytes, Namespace] = {}
        self.identity = os.urandom(16).hex()
        """Changes when the file is lost; the catalog of another identity has other numbers and is rebuilt."""
        self.unheard = frozenset[bytes]()
        """Namespaces of which a flush was not told to the bucket yet: kept, as the daemon may end before it is."""
        if path.exists():
            self._read()
        else:
            self._write(self._by_id)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._by_id.values()))

    def get(self, id: bytes) -> Namespace | None:
        """The present snapshot, or None when no such namespace was ever seen here."""
        return self._by_id.get(id)

    def is_current(self, namespace: Namespace) -> bool:
        """Whether a snapshot's epoch is still the present one."""
        present = self._by_id.get(namespace.id)
        return present is not None and present.stamp == namespace.stamp

    def register(self, wanted: Namespace) -> Namespace:
        """Make a namespace known, or fill in one known from its records only; ``number`` and ``epoch`` are ours."""
        assert wanted.registered
        with self._lock:
            known = self._by_id.get(wanted.id)
            if known is not None and known.registered:
                return known
            if known is None:
                made = replace(wanted, number=self._next_number(), epoch=0)
            else:
                made = replace(wanted, number=known.number, epoch=known.epoch)
            self._put(made)
            return made

    def adopt(self, id: bytes, epoch: int) -> Namespace:
        """A namespace met in a stored record; its epoch is at least the record's."""
        with self._lock:
            known = self._by_id.get(id)
            if known is None:
                known = Namespace(id=id, number=self._next_number(), epoch=epoch)
                self._put(known)
            elif epoch > known.epoch:
                known = replace(known, epoch=epoch)
                self._put(known)
            return known

    def raise_epoch(self, id: bytes) -> Namespace:
        """Flush: from the return on, what bears an older epoch is a miss in every tier. BadRequest after the last."""
        with self._lock:
            if (epoch := self._by_id[id].epoch) == EPOCH_MAX:
                raise BadRequest(
                    f"namespace {id.hex()} was flushed as often as can be: its epoch is {epoch}",
                    "let engines name another revision: a new namespace begins at 0",
                )
            raised = replace(self._by_id[id], epoch=epoch + 1)
            self._put(raised)
            return raised

    def note_unheard(self, id: bytes, unheard: bool) -> None:
        """Whether the bucket has still to be told of a flush. Known first: told twice is better than never."""
        with self._lock:
            before, self.unheard = self.unheard, self.unheard | {id} if unheard else self.unheard - {id}
            if before != self.unheard:
                self._write(self._by_id)

    def _next_number(self) -> int:
        return 1 + max((n.number for n in self._by_id.values()), default=0)

    def _put(self, namespace: Namespace) -> None:
        """Written first and known then: whoever met a namespace that a crash takes back would store blocks under a
        number that the next start gives to another."""
        assert 0 <= namespace.epoch <= EPOCH_MAX
        by_id = self._by_id | {namespace.id: namespace}
        self._write(by_id)
        self._by_id = by_id

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_bytes())
            if content["format"] not in (1, FORMAT):
                raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
            self.identity = str(content["identity"])
            rows = content["namespaces"]
            if (content["format"] > 1 or "check" in content) and content["check"] != _check(self.identity, rows):
                raise ValueError("its check says that it is not as it was written")
            self._by_id = {known.id: known for known in map(_namespace, rows)}
            unheard = content.get("unheard", [])
            if "unheard_check" in content and content["unheard_check"] != _check(self.identity, unheard):
                raise ValueError("its check says that the flushes it names are not those that were written")
            self.unheard = frozenset(map(bytes.fromhex, unheard))
            if len({known.number for known in self._by_id.values()}) < len(rows):
                raise ValueError("two namespaces have one number")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damaged(
                f"{self._path} cannot be read: {str(error)[:200]}",
                "restore it, or move it away: blocks on disk then come back under their namespaces' last stored epoch",
            ) from error

    def _write(self, by_id: dict[bytes, Namespace]) -> None:
        rows = [_row(n) for n in by_id.values()]
        check = _check(self.identity, rows)
        content = {"format": FORMAT, "check": check, "identity": self.identity, "namespaces": rows}
        if self.unheard:  # with a check of its own, as versions that know of none read the rest
            unheard = sorted(id.hex() for id in self.unheard)
            content |= {"unheard": unheard, "unheard_check": _check(self.identity, unheard)}
        fresh = self._path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        failpoint("namespaces.replace")
        os.replace(fresh, self._path)
        failpoint("namespaces.replaced")
        sync_folder(self._path.parent)


def _check(identity: str, content: list[Any]) -> str:
    """Over what must not change by itself: a wrong epoch would bring back blocks that were flushed."""
    return f"{checksum(json.dumps([identity, content], sort_keys=True).encode()):016x}"


def _row(namespace: Namespace) -> dict[str, Any]:
    """As it is written; without a tenant as versions before tenants had names read it."""
    row = asdict(namespace) | {"id": namespace.id.hex(), "layout": namespace.layout.hex()}
    if not namespace.tenant:
        del row["tenant"]
    return row


def _namespace(row: dict[str, Any]) -> Namespace:
    """A row as it was written. ValueError, KeyError or TypeError for what nobody writes."""
    known = Namespace(**row | {"id": bytes.fromhex(row["id"]), "layout": bytes.fromhex(row["layout"])})
    for name in ("number", "epoch", "block_tokens", "shards", "block_bytes"):
        number = getattr(known, name)
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"namespace {row['id']} has {name} {number!r}")
    if known.epoch > EPOCH_MAX or not 0 < known.number < 2**32:
        raise ValueError(f"namespace {row['id']} has epoch {known.epoch} and number {known.number}")
    if len(known.id) != 32 or not all(
        isinstance(name, str) for name in (known.model, known.revision, known.dtype, known.tenant)
    ):
        raise ValueError(f"namespace {row['id']} is not named as namespaces are")
    return known
