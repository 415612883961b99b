"""What is refused leaves no trace, what is acknowledged is there, and room costs the same however much there is."""

import errno
import platform
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terracekv.tests.blocks import name
from terracekv.tests.harness import Daemon
from terracekv.tests.people import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Listener,
    People,
    fetch,
    keys_of,
    said,
    served,
    url,
    whole,
)
from terracekv.tiers.block import block_id, block_keys
from terracekv.tiers.eviction import TailFirst
from terracekv.tiers.slots import slot_bytes_for

SLAB = 1 << 20
FITS = SLAB // slot_bytes_for(BLOCK_BYTES)
"""Blocks that the host tier of a slab holds."""


@pytest.mark.fault(29)
@served()
async def test_an_event_names_a_block_whole_so_that_nobody_needs_to_compute_its_name(people: People) -> None:
    """Tokens are not sent at all, so none can be dropped or counted twice: what else shapes a block is in its name."""
    namespace = people.register()
    tokens, adapter = list(range(3 * BLOCK_TOKENS)), (16, bytes(range(32)))
    keys = block_keys(namespace.id, tokens, BLOCK_TOKENS, {0: [adapter], 2: [(17, bytes(36))]})
    async with people.client.get("/v1/events") as answer:
        listener = Listener(answer)
        await listener.block()
        await people.put(namespace, *keys)
        events = [await listener.event() for _ in keys]
    assert all("tokens" not in event for event in events)
    index = {(event["namespace"], bytes.fromhex(event["block"])) for event in events}
    assert index == {(namespace.id.hex(), block_id(key, 0)) for key in keys}
    bare = block_keys(namespace.id, tokens, BLOCK_TOKENS)
    assert not index & {(namespace.id.hex(), block_id(key, 0)) for key in bare}


@pytest.mark.fault(29)
@served()
async def test_what_is_refused_is_told_to_nobody(people: People) -> None:
    namespace, (good, bad) = people.register(), keys_of(2)
    async with people.client.get("/v1/events") as answer:
        listener = Listener(answer)
        await listener.block()
        body = whole(namespace, bad)
        wrong: list[tuple[str, bytes, dict[str, str]]] = [
            (url(namespace, bad), body[:-1], {}),
            (url(namespace, bad), body + b"x", {}),
            (url(namespace, bad), body, {"X-TerraceKV-Checksum": said(b"another")}),
            (url(namespace, bad)[:-2], body, {}),
            (url(namespace, bad, 1), body, {}),
        ]
        for where, data, headers in wrong:
            async with people.client.put(where, data=data, headers=headers) as refused:
                assert 400 <= refused.status < 500, where
        await people.put(namespace, good)
        first = await listener.event()
    assert first["block"] == block_id(good, 0).hex(), "the first that is heard of is the one that was stored"


@pytest.mark.fault(45)
@pytest.mark.parametrize("count", [FITS - 1, FITS, FITS + 1])
@served(host_bytes=SLAB, slab_bytes=SLAB, disk_bytes=0)
async def test_at_the_very_limit_what_was_acknowledged_is_there(people: People, count: int) -> None:
    namespace, keys = people.register(), keys_of(count)
    for key in keys:
        await people.put(namespace, key)
        status, body, _ = await fetch(people, url(namespace, key))
        assert (status, body) == (200, whole(namespace, key)), "acknowledged and lost"
    assert await people.lookup(namespace, keys[-FITS:]) == min(count, FITS)
    evicted = people.store.host.status().counters.evictions.get("capacity", 0)
    assert evicted == max(0, count - FITS), "room is made for one by one that was used longest ago, and counted"


@pytest.mark.fault(45)
@served(host_bytes=SLAB, slab_bytes=SLAB, disk_bytes=0)
async def test_where_nothing_may_go_a_write_is_refused_with_the_reason(people: People) -> None:
    namespace, keys = people.register(), keys_of(FITS + 1)
    await people.put(namespace, *keys[:FITS])
    leases = people.store.host.acquire(namespace, [block_id(key, 0) for key in keys[:FITS]])
    async with people.client.put(url(namespace, keys[FITS]), data=whole(namespace, keys[FITS])) as answer:
        assert answer.status == 507
        error = (await answer.json())["error"]
    assert error["tier"] == "host" and error["needed_bytes"] > error["free_bytes"] and error["hint"]
    assert (await fetch(people, url(namespace, keys[FITS])))[0] == 404
    assert await people.lookup(namespace, keys[:FITS]) == FITS
    people.store.host.release([slot for slot in leases if slot is not None])
    await people.put(namespace, keys[FITS])


class Counted(OrderedDict[bytes, int]):
    """Counts each entry that is looked at."""

    steps = 0

    def __iter__(self) -> Iterator[bytes]:
        for key in super().__iter__():
            self.steps += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)

    def __getitem__(self, key: bytes) -> int:
        self.steps += 1
        return super().__getitem__(key)

    def pop(self, *arguments: Any) -> Any:
        self.steps += 1
        return super().pop(*arguments)


def steps_to_evict(count: int, of: int) -> int:
    """Entries that are looked at to make room ``count`` times."""
    order = TailFirst()
    counted = order._entries = Counted()
    for index in range(of):
        order.insert(name(index), index, index)
    counted.steps = 0
    for _ in range(count):
        oldest = order.oldest()
        assert oldest is not None and order.discard(oldest[0]) is not None
    return counted.steps


@pytest.mark.fault(38)
def test_making_room_among_many_blocks_looks_at_no_more_of_them_than_among_few() -> None:
    few = steps_to_evict(2000, 4000)
    assert few == steps_to_evict(2000, 100_000) and few < 10 * 2000


FORBIDDEN = {
    "io_uring": (425, 426, 427),
    "memory policy": (237, 238, 239),
    "userfaultfd": (323,),
    "bpf and perf": (321, 298),
}
"""Numbers (x86-64) of system calls that container runtimes refuse by default."""
FILTERED = """
import ctypes, runpy, sys
program = bytes.fromhex(sys.argv.pop(1))
lines = ctypes.create_string_buffer(program, len(program))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("lines", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
filter = Program(len(program) // 8, ctypes.addressof(lines))
assert libc.prctl(22, 2, ctypes.byref(filter), 0, 0) == 0, ctypes.get_errno()
runpy.run_module("terracekv.daemon", run_name="__main__", alter_sys=True)
"""


def refusing(numbers: list[int], error: int) -> bytes:
    """A filter of system calls: those numbers end with the error."""
    load, equal, answer = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 0)]
    lines += [(equal, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    lines += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | error)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


@pytest.mark.fault(74)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls differ")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_container_s_filter_of_system_calls_takes_nothing_away(shm_dir: Path, tmp_path: Path, error: int) -> None:
    numbers = [number for some in FORBIDDEN.values() for number in some]
    daemon = Daemon(shm_dir, tmp_path)
    daemon.program = ["-c", FILTERED, refusing(numbers, error).hex()]
    with daemon:
        assert "Seccomp:\t2" in Path(f"/proc/{daemon.pid}/status").read_text()
        with daemon.client() as client:
            keys = client.chain(1, 8)
            assert client.put(keys, durable=True).durable == 8
        for path in shm_dir.glob("slots"):
            path.unlink()
        daemon.restart()
        with daemon.client() as client:
            client.rejoin()
            assert client.get(keys).blocks == 8, "from disk"
        assert daemon.errors() == []
