"""Sealing: what a record holds, readable and changeable only with a key. AES-256-GCM; the only cryptography import.

Owns the keys that are derived from master keys, one for each namespace, under a lock. Called by ``vault`` from any
worker thread; the library lets go of the interpreter lock. Imports ``errors``.

    sealed bytes = key id (8) || nonce (12) || ciphertext, as many bytes as were sealed || tag (16)

The key id names the master key and tells nothing of it. A nonce is random: at 2**32 records of one namespace the chance
that any two of them share one is below one in 2**32. What a record says of itself (``about``) is authenticated with
the bytes, so a record that is put in the place of another does not open.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from terracekv.tiers.errors import Damaged

KEY_BYTES = 32
ID_BYTES = 8
NONCE_BYTES = 12
TAG_BYTES = 16
_DERIVED_MAX = 1024


class Keys:
    """``masters``: the first seals, all of them open. 32 bytes each."""

    def __init__(self, masters: Sequence[bytes]) -> None:
        assert masters and all(len(master) == KEY_BYTES for master in masters)
        self._masters = {_derived(master, b"terracekv/seal/id/1")[:ID_BYTES]: master for master in masters}
        self._first = next(iter(self._masters))
        self._lock = threading.Lock()
        self._ciphers: OrderedDict[tuple[bytes, bytes], AESGCM] = OrderedDict()

    def has(self, sealed: memoryview) -> bool:
        """Whether it was sealed with a key of ours."""
        return bytes(sealed[:ID_BYTES]) in self._masters

    def seal(self, namespace_id: bytes, about: bytes, plain: memoryview, into: memoryview) -> int:
        """Seal ``plain`` into ``into``; the bytes written."""
        start = ID_BYTES + NONCE_BYTES
        end = start + len(plain) + TAG_BYTES
        nonce = os.urandom(NONCE_BYTES)
        into[:start] = self._first + nonce
        self._cipher(self._first, namespace_id).encrypt_into(nonce, plain, about, into[start:end])
        return end

    def open(self, namespace_id: bytes, about: bytes, sealed: memoryview, into: memoryview) -> None:
        """Fill ``into`` with what was sealed. Damaged when it is not that, or no key of ours sealed it; ``into`` then
        means nothing."""
        id, start = bytes(sealed[:ID_BYTES]), ID_BYTES + NONCE_BYTES
        if id not in self._masters:
            ours = ", ".join(each.hex() for each in self._masters)
            raise Damaged(f"is sealed with key {id.hex()}, and the keys here are {ours}", "see encryption.key_file")
        nonce = bytes(sealed[ID_BYTES:start])
        try:
            self._cipher(id, namespace_id).decrypt_into(nonce, sealed[start:], about, into)
        except (InvalidTag, ValueError) as error:
            raise Damaged("does not open: it was changed, or stood in another place") from error

    def _cipher(self, id: bytes, namespace_id: bytes) -> AESGCM:
        with self._lock:
            cipher = self._ciphers.get((id, namespace_id))
            if cipher is None:
                key = _derived(self._masters[id], b"terracekv/seal/1\0" + namespace_id)
                cipher = self._ciphers[id, namespace_id] = AESGCM(key)
                if len(self._ciphers) > _DERIVED_MAX:
                    self._ciphers.popitem(last=False)
            return cipher


def _derived(master: bytes, info: bytes) -> bytes:
    return bytes(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(master))
