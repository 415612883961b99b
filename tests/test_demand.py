"""What engines ask for, watched: what counts as a request, what it costs, and what follows from it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terracekv.daemon import demand
from terracekv.daemon.lookup_log import LookupLog
from terracekv.daemon.simulate import replay
from terracekv.daemon.traces import read_trace
from terracekv.tests.people import People, keys_of, served
from terracekv.tests.stores import World, Worlds, ids_of, key, opened_worlds
from terracekv.tests.traces import key_of
from terracekv.tiers.curve import Curve
from terracekv.tiers.eviction import Policy
from terracekv.tiers.slots import Slot

worlds = pytest.fixture(opened_worlds)


async def looked(w: World) -> None:
    """All that was asked for was looked at."""
    while w.sessions.demand.waiting:
        await asyncio.sleep(0.005)


def test_a_request_asked_again_while_it_waits_counts_once(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        watched, chain = w.sessions.demand, b"".join(map(key, range(4)))
        for _ in range(50):
            watched.asked(1, w.namespace, chain)
        watched.asked(2, w.namespace, chain)
        watched.asked(1, w.namespace, chain[:64])
        await looked(w)
        assert (watched.requests, watched.curve.asked_blocks) == (3, 4 + 4 + 2)

    worlds.run(story)


def test_who_looks_up_does_not_count_again_when_it_leases(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        session = w.session()
        handle, _ = w.sessions.acquire(session, [key(1)], lambda *_: None)
        w.sessions.demand.asked(session.number, w.namespace, key(2))
        again, _ = w.sessions.acquire(session, [key(2)], lambda *_: None)
        w.sessions.release(session, handle)
        w.sessions.release(session, again)
        w.sessions.close(session)
        await looked(w)
        assert w.sessions.demand.requests == 2

    worlds.run(story)


def test_what_cannot_be_looked_at_in_time_is_passed_over_and_fewer_blocks_are_followed(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        watched = w.sessions.demand
        chains = [b"".join(key_of(number, page) for page in range(64)) for number in range(400)]
        for number, chain in enumerate(chains):
            watched.asked(number, w.namespace, chain)
        assert watched.passed_over > 0 and watched._queue_bytes <= demand.QUEUE_BYTES_MAX + len(chains[0])
        before = watched.curve.rate
        while watched.waiting > 150:
            await asyncio.sleep(0.005)
        assert watched.curve.rate < before

    worlds.run(story)


def test_stores_that_are_passed_over_are_no_requests(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        watched = w.sessions.demand
        for number in range(400):
            watched.stored(number, w.namespace, [key_of(number, page) for page in range(64)])
        await looked(w)
        assert (watched.passed_over, watched.requests) == (0, 0)

    worlds.run(story)


def test_a_burst_of_what_is_followed_already_leaves_the_curve_its_sample(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        watched, chain = w.sessions.demand, b"".join(key_of(1, page) for page in range(64))
        before = watched.curve.rate
        for number in range(1000):
            watched.asked(number, w.namespace, chain)
        await looked(w)
        assert watched.passed_over > 0 and watched.curve.rate == before

    worlds.run(story)


def test_whatif_tells_the_rate_of_its_sample_however_small(worlds: Worlds) -> None:
    async def story(w: World) -> None:
        w.sessions.demand.curve = Curve(3e-9)
        assert w.sessions.demand.whatif()["sample"]["rate"] == pytest.approx(3e-9)

    worlds.run(story)


def test_looking_takes_a_hundredth_of_the_loop_at_most(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that the slices are measured with: each pause is a hundred times as long as what was spent."""

    async def story(w: World) -> None:
        watched, pauses, clock = w.sessions.demand, list[float](), [0.0]
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(watched, "_take", lambda seen: clock.__setitem__(0, clock[0] + 0.003))
        watched.asked(1, w.namespace, key(1))
        watched.asked(1, w.namespace, key(2))
        monkeypatch.setattr(loop, "call_later", lambda delay, work: pauses.append(delay))
        watched._look()
        assert pauses == [pytest.approx(0.3)] and watched.waiting == 1
        watched._look()
        assert watched.waiting == 0 and len(pauses) == 1, "with nothing to look at no timer runs"
        monkeypatch.undo()

    worlds.run(story)


@served(host_bytes=4 << 20)
async def test_whatif_tells_hits_by_the_size_of_each_tier(people: People) -> None:
    namespace, watched = people.register(), people.sessions.demand
    chains = [keys_of(8, 100 * number) for number in range(100)]
    watched.curve = Curve(1.0)
    for _ in range(3):
        for number, chain in enumerate(chains):
            watched.asked(number, namespace, b"".join(chain))
            while watched.waiting > 8:
                await asyncio.sleep(0.005)
        await asyncio.sleep(demand.REPEAT_S)
    while watched.waiting:
        await asyncio.sleep(0.005)
    status, answer = await people.ask("GET", "/v1/whatif")
    assert (status, answer["requests"], answer["asked_blocks"]) == (200, 300, 2400)
    assert answer["block_bytes"] == namespace.block_bytes * namespace.shards
    hits = {point["blocks"]: point["hits"] for point in answer["curve"]}
    assert max(share for blocks, share in hits.items() if blocks < 700) < 0.1
    assert min(share for blocks, share in hits.items() if blocks > 900) == pytest.approx(2 / 3, abs=0.02)
    assert [point["bytes"] for point in answer["tiers"]["host"]][2:4] == [4 << 20, 8 << 20]
    assert "all namespaces" in answer["scope"] and answer["sample"]["enough"] is True


@served()
async def test_questions_over_http_are_no_requests(people: People) -> None:
    namespace = people.register()
    await people.lookup(namespace, keys_of(3))
    assert people.sessions.demand.waiting == 0
    _, answer = await people.ask("GET", "/v1/whatif")
    assert answer["requests"] == 0 and all(point["hits"] == 0 for point in answer["curve"])
    assert answer["sample"]["enough"] is False


async def one_request_logged(w: World, place: Path) -> LookupLog:
    log = w.sessions.demand.log = LookupLog(place, b"secret")
    w.sessions.demand.asked(1, w.namespace, key(1))
    await looked(w)
    log.write(log.take())
    return log


def test_the_lookup_log_is_a_trace(worlds: Worlds, tmp_path: Path) -> None:
    async def story(w: World) -> None:
        log = w.sessions.demand.log = LookupLog(tmp_path / "lookups.jsonl", b"secret")
        chains = [list(map(key, range(start, start + 3))) for start in (0, 1, 0, 5)]
        for number, chain in enumerate(chains):
            w.sessions.demand.asked(number, w.namespace, b"".join(chain))
        await looked(w)
        assert log.due
        log.write(log.take())
        log.write(log.take())
        assert log.path.stat().st_mode & 0o777 == 0o600
        trace = read_trace(log.path)
        assert list(map(len, trace.chains)) == [3, 3, 3, 3] and trace.unique == 7
        assert trace.chains[0] == trace.chains[2] and trace.chains[0][1:] == trace.chains[1][:2]
        assert trace.block_bytes == w.namespace.block_bytes
        assert replay(trace, Policy(), 100).loaded_blocks == 5

    worlds.run(story)


def test_half_a_line_that_a_kill_left_in_the_lookup_log_spoils_none_behind_it(worlds: Worlds, tmp_path: Path) -> None:
    place = tmp_path / "lookups.jsonl"
    place.write_text('{"hash_ids":[1,2]}\n{"timestamp":1,"hash_ids":[1,2')

    async def story(w: World) -> None:
        await one_request_logged(w, place)
        assert list(map(len, read_trace(place).chains)) == [2, 1]

    worlds.run(story)


def test_a_lookup_log_whose_disk_is_full_ends_with_a_whole_line(tmp_path: Path) -> None:
    place = tmp_path / "lookups.jsonl"
    script = f"""if True:
        import resource, signal
        from pathlib import Path
        from terracekv.daemon.lookup_log import LookupLog
        from terracekv.tiers.namespace import Namespace
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        log = LookupLog(Path({str(place)!r}), b"secret")
        for blocks in (1, 30, 1):
            log.add(Namespace(b"n" * 32, 1, 0, "m", "r", "bf16", bytes(32), 16, 1, 4096), bytes(range(32)) * blocks)
            log.write(log.take())
        assert log.dropped == 1, log.dropped
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert place.read_text().endswith("}\n") and list(map(len, read_trace(place).chains)) == [1, 1]


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_lookup_log_is_a_plain_file_or_nothing(worlds: Worlds, tmp_path: Path, what: str) -> None:
    """What stands there instead is neither written nor given another mode."""
    place, other = tmp_path / "lookups.jsonl", tmp_path / "other"
    other.write_text("mine")
    other.chmod(0o644)
    if what == "link":
        place.symlink_to(other)
    elif what == "pipe":
        os.mkfifo(place, 0o644)
    else:
        place.mkdir(0o755)

    async def story(w: World) -> None:
        assert (await one_request_logged(w, place)).dropped == 1

    before = place.stat().st_mode
    worlds.run(story)
    assert place.stat().st_mode == before and other.read_text() == "mine"


def test_a_lookup_log_made_by_somebody_else_is_closed_to_others(worlds: Worlds, tmp_path: Path) -> None:
    place = tmp_path / "lookups.jsonl"
    place.touch(0o644)

    async def story(w: World) -> None:
        await one_request_logged(w, place)

    worlds.run(story)
    assert place.stat().st_mode & 0o777 == 0o600
    (hashed,) = json.loads(place.read_text())["hash_ids"]
    assert hashed != int.from_bytes(key(1)[:6]), "who has the prompt could tell that it was asked"


def test_a_lookup_log_that_cannot_be_written_is_a_warning_and_a_count(
    worlds: Worlds, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(w: World) -> None:
        log = w.sessions.demand.log = LookupLog(tmp_path / "nowhere" / "lookups.jsonl", b"secret")
        for number in range(2):
            w.sessions.demand.asked(number, w.namespace, key(number))
            await looked(w)
            log.write(log.take())
        assert log.dropped == 2 and caplog.text.count("is not written") == 1

    worlds.run(story)


def test_a_disk_under_auto_writes_less_once_that_is_known_to_hit_as_much(worlds: Worlds) -> None:
    """Strangers only: nothing would be hit, so nothing need be written."""

    async def story(w: World) -> None:
        (through,) = w.store.through
        assert (through.admission, through.rule) == ("auto", "all")
        for number in range(3000):
            w.sessions.demand._take((1, w.namespace, b"".join(key_of(number, n) for n in range(4)), True))
        assert through.rule == "second_touch"
        await w.put(1, 2)
        await w.idle()
        assert w.disk is not None and not w.disk.leading(w.namespace, ids_of(1)) and w.store.stats.not_admitted == 2
        report = w.sessions.demand.policies()["disk"]
        assert report["admission"] == "second_touch"
        shares = report["contest"]["candidates"]
        assert shares["lru/second_touch"]["writes"] < shares["lru/all"]["writes"]

    worlds.run(story, admission="auto")


def test_host_under_auto_evicts_by_what_wins(worlds: Worlds) -> None:
    """A contest's word changes the order at once; without ``auto`` nobody may change it."""

    async def story(w: World) -> None:
        with pytest.raises(AssertionError):
            w.host.follow("frequency")
        assert w.host.eviction == "lru" and w.sessions.demand.policies()["host"] == {"eviction": "lru"}

    worlds.run(story)

    async def auto(w: World) -> None:
        assert w.host.auto and w.host.eviction == "lru"
        await w.put(1, 2)
        w.host.follow("frequency")
        for _ in range(5):
            w.host.touch(w.namespace, ids_of(1))
        w.host.touch(w.namespace, ids_of(2))
        assert [id for _, id in w.host.next_out(2)] == ids_of(2, 1)
        w.host.follow("lru")
        w.host.touch(w.namespace, ids_of(2))
        assert [id for _, id in w.host.next_out(2)] == ids_of(1, 2)

    worlds.run(auto, eviction="auto")


def test_a_contest_that_begins_anew_for_blocks_of_another_size_has_the_policy_and_the_count_of_the_old(
    worlds: Worlds,
) -> None:
    async def story(w: World) -> None:
        watched, candidates = w.sessions.demand, [Policy("lru", "all"), Policy("frequency", "all")]
        old = watched._contest("host", candidates)
        old._current, old.switches = old._entries[1], 3
        watched._blocks, watched._bytes = 1, 4096
        new = watched._contest("host", candidates)
        assert new is not old and (new.policy, new.switches) == (Policy("frequency", "all"), 3)

    worlds.run(story)


@pytest.mark.fault(39)
@pytest.mark.parametrize("eviction", ["lru", "frequency", "auto"])
def test_a_stream_of_five_times_the_capacity_is_taken_whatever_goes_first(worlds: Worlds, eviction: str) -> None:
    async def story(w: World) -> None:
        capacity = w.host.status().capacity_bytes // w.namespace.block_bytes
        for number in range(5 * capacity):
            await w.put(number)
        status = w.host.status()
        assert status.used_bytes <= status.capacity_bytes
        last = ids_of(*range(5 * capacity - 2, 5 * capacity))
        slots = w.host.acquire(w.namespace, last)
        assert all(isinstance(slot, Slot) and w.right(slot, id) for slot, id in zip(slots, last, strict=True))
        w.host.release([slot for slot in slots if slot is not None])

    worlds.run(story, eviction=eviction, disk=False)


@pytest.mark.fault(38)
@pytest.mark.parametrize("frequency", [False, True])
def test_evicting_by_weight_takes_as_long_from_a_hundred_thousand_as_from_five(frequency: bool) -> None:
    """Counted, not timed: comparisons of a heap grow with ranks, of which there is a bounded number a turnover."""
    from terracekv.tiers.eviction import ByWeight, Turnover

    sizes = []
    for blocks in (5_000, 100_000):
        order = ByWeight(Turnover(blocks, frequency=frequency), 1)
        ids = [number.to_bytes(34, "little") for number in range(blocks)]
        for id in ids:
            order.insert(id, 0, 0)
        order.touch(ids, 0)
        sizes.append(len(order._heap))
        for _ in range(1000):
            oldest = order.oldest()
            assert oldest is not None and order.discard(oldest[0]) is not None
        assert len(order) == blocks - 1000
    assert max(sizes) < 4096


def test_lines_that_are_no_trace_are_named(tmp_path: Path) -> None:
    from terracekv.tiers.errors import BadRequest

    for text in ("", "{}\n", "[]\n", "not json\n", '{"hash_ids": 3}\n', '{"hash_ids": [1, 1]}\n'):
        path = tmp_path / "trace.jsonl"
        path.write_text(text)
        with pytest.raises(BadRequest):
            read_trace(path)
    path.write_text(json.dumps({"hash_ids": [1, 2]}) + "\n")
    assert read_trace(path).unique == 2
