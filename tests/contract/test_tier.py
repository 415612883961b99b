"""What every tier keeps, whatever its medium. Who opens the tiers: ``conftest.py``."""

import mmap
import random
from functools import partial
from pathlib import Path

import pytest

from terracekv.tests.blocks import BLOCK_BYTES, get, in_threads, name, payload_of, put, registered, verified
from terracekv.tests.contract.conftest import HOLDS_BYTES, OPENERS
from terracekv.tiers.checksum import checksum
from terracekv.tiers.namespace import Namespace, Namespaces
from terracekv.tiers.tier import PAGE, Outcome, Tier


def test_a_stored_block_is_listed_and_comes_back_whole(tier: Tier, namespace: Namespace) -> None:
    assert tier.leading(namespace, [name(1)]) == 0
    assert put(tier, namespace, name(1)) is Outcome.STORED
    assert tier.leading(namespace, [name(1)]) == 1
    assert get(tier, namespace, name(1)) == (Outcome.HIT, payload_of(name(1), namespace.id))
    status = tier.status()
    assert (status.blocks, status.counters.puts, status.counters.hits) == (1, 1, 1)
    assert status.counters.put_bytes == status.counters.get_bytes == BLOCK_BYTES


def test_an_absent_block_is_a_miss(tier: Tier, namespace: Namespace) -> None:
    assert get(tier, namespace, name(1))[0] is Outcome.MISS
    assert tier.status().counters.misses == 1


def test_leading_counts_up_to_the_first_absence(tier: Tier, namespace: Namespace) -> None:
    for index in (0, 1, 2, 4):
        assert put(tier, namespace, name(index)) is Outcome.STORED
    assert tier.leading(namespace, [name(index) for index in range(6)]) == 3
    assert tier.leading(namespace, []) == 0


def test_putting_a_block_again_keeps_it_and_says_present(tier: Tier, namespace: Namespace) -> None:
    assert put(tier, namespace, name(1)) is Outcome.STORED
    assert put(tier, namespace, name(1)) is Outcome.PRESENT
    assert tier.status().blocks == 1
    assert get(tier, namespace, name(1))[0] is Outcome.HIT


def test_shards_of_a_key_are_different_blocks(tier: Tier, namespace: Namespace) -> None:
    assert put(tier, namespace, name(1, shard=0)) is Outcome.STORED
    assert tier.leading(namespace, [name(1, shard=1)]) == 0
    assert put(tier, namespace, name(1, shard=1)) is Outcome.STORED
    assert get(tier, namespace, name(1, shard=1))[1] == payload_of(name(1, shard=1), namespace.id)


def test_deleting_is_idempotent_and_counts_what_was_there(tier: Tier, namespace: Namespace) -> None:
    put(tier, namespace, name(1))
    put(tier, namespace, name(2))
    assert tier.delete(namespace, [name(1), name(3)]) == 1
    assert tier.delete(namespace, [name(1), name(3)]) == 0
    assert tier.leading(namespace, [name(1)]) == 0
    assert get(tier, namespace, name(1))[0] is Outcome.MISS
    assert get(tier, namespace, name(2))[0] is Outcome.HIT
    assert tier.status().counters.evictions["delete"] == 1
    assert put(tier, namespace, name(1)) is Outcome.STORED


def test_a_flush_makes_older_blocks_misses_and_new_ones_storable(
    tier: Tier, namespaces: Namespaces, namespace: Namespace
) -> None:
    put(tier, namespace, name(1))
    flushed = namespaces.raise_epoch(namespace.id)
    assert tier.leading(flushed, [name(1)]) == 0
    assert get(tier, flushed, name(1))[0] is Outcome.MISS
    # A tier may refuse the old epoch or keep it apart; either way it is not listed under the new one.
    assert put(tier, namespace, name(2)) in (Outcome.STALE, Outcome.STORED)
    assert tier.leading(flushed, [name(2)]) == 0
    fresh = payload_of(name(1), b"after the flush")
    assert put(tier, flushed, name(1), fresh) is Outcome.STORED
    assert get(tier, flushed, name(1)) == (Outcome.HIT, fresh)


def test_namespaces_never_see_each_others_blocks(tier: Tier, namespaces: Namespaces, namespace: Namespace) -> None:
    other = registered(namespaces, 2)
    put(tier, namespace, name(1))
    assert tier.leading(other, [name(1)]) == 0
    assert get(tier, other, name(1))[0] is Outcome.MISS
    namespaces.raise_epoch(other.id)
    assert get(tier, namespace, name(1))[0] is Outcome.HIT


def test_who_names_anothers_block_changes_nothing_for_it(
    tier: Tier, namespaces: Namespaces, namespace: Namespace
) -> None:
    """Ids are what engines send: nobody but their chain keeps them from being another namespace's."""
    other = registered(namespaces, 2)
    put(tier, namespace, name(1))
    assert put(tier, other, name(1)) is Outcome.STORED
    assert get(tier, other, name(1)) == (Outcome.HIT, payload_of(name(1), other.id))
    assert get(tier, namespace, name(1)) == (Outcome.HIT, payload_of(name(1), namespace.id))
    tier.delete(other, [name(1)])
    assert tier.leading(other, [name(1)]) == 0
    assert get(tier, namespace, name(1)) == (Outcome.HIT, payload_of(name(1), namespace.id))


def test_more_than_fits_is_stored_by_evicting(tier: Tier, namespace: Namespace) -> None:
    if not tier.status().capacity_bytes:
        pytest.skip("this tier has no bound of its own")
    total = 3 * HOLDS_BYTES // BLOCK_BYTES
    for index in range(total):
        assert put(tier, namespace, name(index)) is Outcome.STORED
    status = tier.status()
    assert status.used_bytes <= status.capacity_bytes
    assert status.counters.evictions["capacity"] >= total // 2
    assert status.blocks + status.counters.evictions["capacity"] == total
    assert get(tier, namespace, name(total - 1)) == (Outcome.HIT, payload_of(name(total - 1), namespace.id))
    assert verified(tier, namespace, map(name, range(total))) == status.blocks


def test_a_block_that_can_never_fit_is_refused_and_not_listed(
    tier: Tier, namespaces: Namespaces, namespace: Namespace
) -> None:
    if not tier.status().capacity_bytes:
        pytest.skip("this tier has no bound of its own")
    put(tier, namespace, name(1))
    huge = registered(namespaces, 3, block_bytes=4 * HOLDS_BYTES)
    assert put(tier, huge, name(2), random.Random(2).randbytes(huge.block_bytes)) is Outcome.FULL
    assert tier.leading(huge, [name(2)]) == 0


def test_bytes_move_to_and_from_slots_and_odd_places_alike(tier: Tier, namespace: Namespace) -> None:
    padded = -(-BLOCK_BYTES // PAGE) * PAGE
    with mmap.mmap(-1, 2 * padded) as arena:
        whole = memoryview(arena)
        slot, odd = whole[:padded], whole[padded + 3 :]
        slot[:BLOCK_BYTES] = payload = payload_of(name(1))
        assert tier.put(namespace, name(1), slot[:BLOCK_BYTES], checksum(payload)) is Outcome.STORED
        slot[:BLOCK_BYTES] = payload = payload_of(name(2))
        assert tier.put(namespace, name(2), slot, checksum(payload)) is Outcome.STORED
        assert tier.put(namespace, name(3), memoryview(payload), checksum(payload)) is Outcome.STORED
        for index, expected in ((1, payload_of(name(1))), (2, payload), (3, payload)):
            for into in (slot, odd):
                into[:BLOCK_BYTES] = bytes(BLOCK_BYTES)
                assert tier.get(namespace, name(index), into) is Outcome.HIT
                assert into[:BLOCK_BYTES] == expected
        del into
        slot.release()
        odd.release()
        whole.release()


@pytest.mark.fault(91)
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "packed_int4"]
)
def test_bytes_of_every_number_format_come_back_unchanged(tier: Tier, namespaces: Namespaces, kind: str) -> None:
    """Formats differ in the width of an element and in which patterns are NaN; all patterns must survive."""
    width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(kind, 1)
    count = min(256**width, 1 << 16)  # of 32 bits: those that differ in the upper half
    patterns = b"".join((value * (256**width // count)).to_bytes(width, "little") for value in range(count))
    namespace = registered(namespaces, 9, block_bytes=len(patterns), dtype=kind)
    assert put(tier, namespace, name(1), patterns) is Outcome.STORED
    assert get(tier, namespace, name(1)) == (Outcome.HIT, patterns)


@pytest.mark.fault(11)
def test_eight_threads_only_ever_see_whole_blocks_of_their_own_name(tier: Tier, namespace: Namespace) -> None:
    """Names are few and space is scarce, so puts, evictions, deletions and reads of a block meet."""
    wrong: list[str] = []
    hits = 0
    names = [name(index) for index in range(2 * HOLDS_BYTES // BLOCK_BYTES)]

    def work(seed: int) -> None:
        nonlocal hits
        dice = random.Random(seed)
        for _ in range(250):
            id = dice.choice(names)
            if dice.random() < 0.02:
                tier.delete(namespace, [id])
            elif dice.random() < 0.6:
                outcome = put(tier, namespace, id)
                if outcome not in (Outcome.STORED, Outcome.PRESENT, Outcome.FULL):
                    wrong.append(f"put answered {outcome}")
            else:
                outcome, found = get(tier, namespace, id)
                hits += outcome is Outcome.HIT
                if outcome is Outcome.HIT and found != payload_of(id, namespace.id):
                    wrong.append(f"{id.hex()} came back with other bytes")
                elif outcome not in (Outcome.HIT, Outcome.MISS):
                    wrong.append(f"get answered {outcome}")

    in_threads(*(partial(work, seed) for seed in range(8)))
    assert not wrong, wrong[:3]
    assert hits
    assert verified(tier, namespace, names) == tier.status().blocks


def test_closing_twice_is_harmless(tmp_path: Path, namespaces: Namespaces) -> None:
    for label, opener in OPENERS.items():
        (tmp_path / label).mkdir()
        with opener(tmp_path / label, namespaces, HOLDS_BYTES) as tier:
            tier.close()
            tier.close()
