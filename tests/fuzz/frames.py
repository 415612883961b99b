"""Frames for the engine door: valid, nearly valid, and nonsense, as one stream that a session might send.

Owns nothing. Called by the fuzzers of the door. Imports ``daemon.protocol`` and ``mutants``.
"""

import struct
from collections import deque

import msgspec

from terracekv.daemon import protocol
from terracekv.daemon.protocol import FRAME_BYTES_MAX, LENGTH, LayerGroup, Layout, Slot
from terracekv.tests.fuzz.mutants import EDGES, Mutants, corpus
from terracekv.tests.harness import TOKENS, hello, layout_of
from terracekv.tests.stores import key

KEYS = [key(index) for index in range(24)]
"""So few that frames of all sessions meet."""
DEEP = 100_000
_VERBS = ("hello", "lookup", "acquire", "release", "reserve", "commit", "abort", "prefetch", "pin", "opened")
_FIELDS = {"hello": 14, "lookup": 3, "acquire": 4, "release": 1, "reserve": 2, "commit": 4, "abort": 1, "prefetch": 1}

Handle = tuple[int, list[int]]
"""A lease or reservation, and the indices that it may commit."""

pack = msgspec.msgpack.encode


def array(*parts: bytes) -> bytes:
    """A list of packed values."""
    head = bytes([0x90 | len(parts)]) if len(parts) < 16 else b"\xdd" + struct.pack(">I", len(parts))
    return head + b"".join(parts)


RAW = [
    b"\xc0",
    b"\xc1",
    b"\xc2",
    b"\xc3",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",  # not a number
    b"\xcb\x7f\xf0\0\0\0\0\0\0",  # infinity
    b"\xca\xff\x80\0\0",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\0" * 7,
    b"\xd9\x04\xff\xfe\xc3\x28",  # text that is no UTF-8
    b"\xa3\xed\xa0\x80",  # half a surrogate pair
    b"\xa6\x1b[2J\r\n",
    b"\xdb\xff\xff\xff\xff",  # text of 4 GiB, of which nothing follows
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdc\xff\xff" + b"\xc0" * 0xFFFF,
    b"\x82\xa1a\x01\xa1a\x02",  # a key twice
    b"\x81\xc0\xc0",
    b"\x81\x90\x80",
    b"\x91" * 600 + b"\x90",
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time beyond all
    b"\xd4\x05\0",
    b"\xc4\x00",
    b"\x90",
    b"\x80",
    *(pack(edge) for edge in EDGES),
    *(pack(-edge) for edge in EDGES if edge <= 2**63),
]
"""Packed values that no field expects, and some that do not end."""


class Frames:
    """Makes frames; ``handles`` are leases and reservations of the session that sends them."""

    def __init__(self, mutants: Mutants) -> None:
        self.mutants = mutants
        self.random = mutants.random
        self.handles: deque[Handle] = deque([(1, []), (2, [0])])
        self.seen = corpus("frames")
        self._id = 0

    def hello(self) -> protocol.Hello:
        """One of a few engines, all of which are welcome."""
        shards = self.random.choice((1, 1, 1, 2))
        shard = self.random.choice((0, 0, 0, shards - 1, None))
        access = self.random.choice(("write", "write", "write", "read"))
        size = self.random.choice((4000, 4000, 8192))
        return hello(size, shards=shards, shard=shard, credential=self._tenant(), access=access)

    def next(self) -> bytes:
        """The next bytes of the stream: nearly always one whole frame."""
        chance = self.random.random()
        if chance < 0.45:
            body = pack(self.valid())
        elif chance < 0.75:
            body = self._wrong()
        elif chance < 0.97:
            body = self.mutants.mutated(self.random.choice((pack(self.valid()), self._corpus())), self.seen)
        elif chance < 0.9995:
            body = self.mutants.noise(self.random.choice((0, 1, 5, 64, 300)))
        else:
            body = self._large()
        if self.mutants.one_in(4000):
            return self._ill_framed(body)
        return LENGTH.pack(len(body)) + body

    def valid(self) -> protocol.Request:
        """A request as an engine might make it, with handles that may be anybody's."""
        self._id += 1
        id, keys = self._id, self._keys()
        handle, indices = self.random.choice(self.handles)
        match self.random.randrange(14):
            case 0 | 1:
                return protocol.Lookup(id, keys, self._deadline_ms())
            case 2 | 3:
                return protocol.Acquire(id, keys, self._deadline_ms(), self.mutants.one_in(2))
            case 4:
                return protocol.Release(handle)
            case 5:
                return protocol.Reserve(id, keys)
            case 6 | 7 | 8 | 9 | 10:
                if not indices or self.mutants.one_in(4):
                    indices = self.random.sample(range(-1, 8), self.random.randrange(4))
                return protocol.Commit(id, handle, indices, self.mutants.one_in(4))
            case 11:
                return protocol.Abort(handle)
            case 12:
                return protocol.Prefetch(keys)
            case _:
                return protocol.Pin(keys, self.random.choice((-1, 0, 1, 50, 2**62)))

    def _wrong(self) -> bytes:
        """The right verb with fields that it does not expect, too few, or too many."""
        verb = self.random.choice(_VERBS)
        if verb == "hello":
            return self._wrong_hello()
        self._id += 1
        right = pack(self.valid())
        if self.mutants.one_in(2) and right[:1] > b"\x91":
            fields = [pack(field) for field in msgspec.msgpack.decode(right)]
        else:
            fields = [pack(verb), pack(self._id), *(self._value() for _ in range(_FIELDS.get(verb, 2)))]
        fields[self.random.randrange(len(fields))] = self._value()
        del fields[self.random.choice((len(fields), len(fields), len(fields), 1, 2)) :]
        if self.mutants.one_in(6):
            fields += [self._value()] * self.random.choice((1, 3, 40))
        return array(*fields)

    def _wrong_hello(self) -> bytes:
        number = self.random.choice(EDGES[:-3])
        changes = self.random.choice(
            (
                {"version": number},
                {"probe": self.mutants.noise(32)},
                {"block_tokens": number},
                {"shards": number},
                {"shard": -number},
                {"pid": -number, "engine": "\x1b]0;\x07" * 30, "gpu": "GPU-" + "f" * 500},
                {"model": ""},
                {"dtype": "d" * 3000},
                {"layout": Layout("ND", "latent", 1, ())},
                {"layout": Layout("ND", "latent", 1, (LayerGroup(number, (TOKENS, number), (number, 1)),))},
                {"layout": Layout("HND", "split", 2, (LayerGroup(1, (-1, TOKENS, number), (8, 8, 2)),) * 40)},
                {"layout": layout_of(64 << 20)},
                {"credential": self.mutants.noise(2000)},
                {"access": "both" * 20},
            )
        )
        return pack(hello(**changes))

    def _value(self) -> bytes:
        if self.mutants.one_in(3):
            return pack(self._keys())
        if self.mutants.one_in(6):
            return pack([Slot(0, 0, 0)] * self.random.choice((0, 2, 50)))
        return self.random.choice(RAW)

    def _keys(self) -> bytes:
        start = self.random.randrange(len(KEYS))
        keys = b"".join(KEYS[start : start + self.random.choice((0, 1, 2, 3, 5, 8))])
        chance = self.random.random()
        if chance < 0.03:
            return keys[: len(keys) - self.random.randrange(33)]
        if chance < 0.05:
            return keys + keys
        if chance < 0.06:
            return self.mutants.noise(32 * self.random.choice((1, 40, 512)))
        return keys

    def _deadline_ms(self) -> int:
        return self.random.choice((0, 1, 5, 20, 20, -1, -(2**63), 2**63 - 1))

    def _tenant(self) -> bytes:
        return self.random.choice((b"", b"", b"", b"a", b"b"))

    def _corpus(self) -> bytes:
        return self.random.choice(self.seen)

    def _large(self) -> bytes:
        """Long lists, long keys, deep nesting, all within the limit of a frame."""
        count = self.random.choice((1000, 20_000, 100_000))
        return self.random.choice(
            (
                pack(protocol.Lookup(self._id, self.mutants.noise(32) * count, 5)),
                pack(protocol.Reserve(self._id, b"".join(struct.pack("<Q", n) * 4 for n in range(count)))),
                pack(protocol.Commit(self._id, self.handles[-1][0], list(range(count)), False)),
                pack(hello(layout=Layout("ND", "latent", 1, (LayerGroup(1, (TOKENS, 8), (8, 1)),) * count))),
                b"\x91" * DEEP + b"\x90",
                b"\x81\xc0" * DEEP + b"\x90",
                pack(protocol.Opened("w" * count)),
            )
        )

    def _ill_framed(self, body: bytes) -> bytes:
        """A length that is not the body's: what follows is read out of step, or the connection ends."""
        wrong = self.random.choice((len(body) + 1, max(0, len(body) - 3), FRAME_BYTES_MAX + 1, 2**32 - 1))
        return LENGTH.pack(wrong) + body
