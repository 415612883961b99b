"""Encryption at rest: what lies on disk says nothing, opens only as it was sealed, and never becomes wrong bytes."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.config_encryption import Encryption, open_keys
from terracekv.tests.blocks import BLOCK_BYTES, get, name, payload_of, put, registered
from terracekv.tests.disks import Disks, crash
from terracekv.tests.harness import Daemon
from terracekv.tests.s3_stub import s3_stub
from terracekv.tests.s3_tiers import Node, node
from terracekv.tiers import folder
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.catalog import Catalog
from terracekv.tiers.checksum import checksum
from terracekv.tiers.codec_id import SEALED, is_sealed
from terracekv.tiers.disk import DiskTier
from terracekv.tiers.errors import ConfigError, Damaged
from terracekv.tiers.s3_audit import verify
from terracekv.tiers.segment import HEADER_BYTES, Record, decode
from terracekv.tiers.tier import PAGE, Outcome

pytest.importorskip("cryptography")

from terracekv.tiers.seal import Keys  # noqa: E402

MASTER, OTHER = bytes(range(32)), bytes(range(1, 33))
IDS = [name(index) for index in range(8)]
CODECS = ("off", "on")


@pytest.fixture
def disk(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def written(disk: Disks, codec: str = "off", *masters: bytes, ids: list[bytes] = IDS) -> None:
    """Blocks stored and the disk closed; sealed, with masters."""
    with closing(disk.open(codec=codec, keys=Keys(masters) if masters else None)) as tier:
        assert [put(tier, disk.namespace, id) for id in ids] == [Outcome.STORED] * len(ids)
        tier.check()


def stored_bytes(disk: Disks) -> bytes:
    return b"".join(path.read_bytes() for path in disk.files())


def records(disk: Disks) -> Iterator[tuple[Path, int, Record]]:
    for path in disk.files():
        content = path.read_bytes()
        for at in range(0, len(content), PAGE):
            if (record := decode(content[at : at + HEADER_BYTES])) is not None:
                yield path, at, record


def good(tier: DiskTier, disk: Disks, ids: list[bytes] = IDS) -> list[bytes]:
    """Which of the blocks are hits; AssertionError for wrong bytes."""
    hits = []
    for id in ids:
        outcome, found = get(tier, disk.namespace, id)
        assert outcome is not Outcome.HIT or found == payload_of(id, disk.namespace.id, BLOCK_BYTES)
        hits += [id] if outcome is Outcome.HIT else []
    return hits


@pytest.mark.parametrize("codec", CODECS)
def test_what_lies_on_disk_says_nothing_of_what_it_holds(disk: Disks, codec: str) -> None:
    payloads = [payload_of(id, disk.namespace.id, BLOCK_BYTES) for id in IDS]
    written(disk, codec)
    plain = stored_bytes(disk)
    assert any(payload[:64] in plain for payload in payloads), "this search finds what is there"
    shutil.rmtree(disk.path)
    written(disk, codec, MASTER)
    sealed = stored_bytes(disk)
    for payload in payloads:
        assert checksum(payload).to_bytes(8, "little") not in sealed, "its checksum would tell one payload from another"
        for start in range(0, BLOCK_BYTES - 16, 997):
            assert payload[start : start + 16] not in sealed
    assert all(is_sealed(record.codec) for _, _, record in records(disk))
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        assert good(tier, disk) == IDS
        tier.check()


def test_no_two_records_share_a_nonce_even_of_one_block(disk: Disks) -> None:
    nonces = []
    for _ in range(3):
        written(disk, "off", MASTER)
        for path, at, _ in records(disk):
            nonces.append(path.read_bytes()[at + PAGE : at + PAGE + 20])
        shutil.rmtree(disk.path)
    assert len(nonces) == len(set(nonces)) == 3 * len(IDS)
    assert len({nonce[:8] for nonce in nonces}) == 1, "the key has one name"


@pytest.mark.parametrize("codec", CODECS)
def test_sealed_and_plain_records_are_read_side_by_side(disk: Disks, codec: str) -> None:
    written(disk, codec, ids=IDS[:4])
    written(disk, codec, MASTER, ids=IDS[4:])
    with closing(disk.open(codec=codec, keys=Keys([MASTER]))) as tier:
        assert good(tier, disk) == IDS
    with closing(disk.open(codec=codec)) as tier:
        assert good(tier, disk) == IDS[:4], "without the key the sealed ones are misses"


def test_what_any_version_sealed_opens_and_only_with_the_key_of_its_namespace() -> None:
    """Were the key made in another way, whoever comes after an update would find nothing."""
    sealed = memoryview(
        bytes.fromhex(
            "a13fa6e613434763000102030405060708090a0b6862ce554fa569678b4b126681c4daef0d2a9960d93ec6e8b544b394c832d0"
        )
    )
    found = bytearray(b"what was stored".upper())
    Keys([MASTER]).open(b"\x09" * 32, b"about", sealed, memoryview(found))
    assert found == b"what was stored"
    with pytest.raises(Damaged, match="does not open"):
        Keys([MASTER]).open(b"\x08" * 32, b"about", sealed, memoryview(found))


def test_a_new_key_seals_and_the_old_one_still_opens(disk: Disks) -> None:
    written(disk, "off", MASTER, ids=IDS[:4])
    written(disk, "off", OTHER, MASTER, ids=IDS[4:])
    with closing(disk.open(keys=Keys([OTHER, MASTER]))) as tier:
        assert good(tier, disk) == IDS
    with closing(disk.open(keys=Keys([OTHER]))) as tier:
        assert good(tier, disk) == IDS[4:]


@pytest.mark.breaks("opens a disk without the key that its blocks were sealed with")
@pytest.mark.parametrize("masters", [[], [OTHER]], ids=["no key", "another key"])
def test_without_the_key_a_block_is_a_miss_that_says_so_and_is_healed_by_the_next_put(
    disk: Disks, masters: list[bytes]
) -> None:
    written(disk, "off", MASTER)
    keys = Keys(masters) if masters else None
    with closing(disk.open(keys=keys)) as tier:
        assert get(tier, disk.namespace, IDS[0])[0] is Outcome.DAMAGED
        said = str(tier.status().last_error)
        assert IDS[0].hex() in said and ("no key" if not masters else "sealed with key") in said
        assert "encryption.key_file" in str(tier.status().advice), "nobody need suspect the disk"
        assert MASTER.hex() not in said and OTHER.hex() not in said
        assert tier.leading(disk.namespace, IDS[:1]) == 0, "it is not listed any more"
        assert put(tier, disk.namespace, IDS[0]) is Outcome.STORED
        assert good(tier, disk, IDS[:1]) == IDS[:1]
        tier.check()


@pytest.mark.parametrize("masters", [[], [OTHER]], ids=["no key", "another key"])
def test_a_look_without_the_key_forgets_what_was_damaged_and_no_other(disk: Disks, masters: list[bytes]) -> None:
    written(disk, "off", MASTER)
    torn = next((path, at) for path, at, record in records(disk) if record.id == IDS[3])
    with open(torn[0], "r+b") as file:
        file.seek(torn[1] + PAGE + 100)
        file.write(bytes(50))

    def look() -> None:
        tier = disk.open(keys=Keys(masters) if masters else None)
        found = tier.audit(None)
        assert (found.checked, found.locked, [*found.wrong]) == (len(IDS), len(IDS) - 1, [IDS[3].hex()])
        assert tier.audit(None).checked == len(IDS) - 1

    crash(look)
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        assert good(tier, disk) == [id for id in IDS if id != IDS[3]]
        assert tier.audit(None).locked == 0


def test_a_start_without_the_key_after_a_loss_of_power_erases_what_was_torn_and_nothing_else(
    disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        tier = disk.open(keys=Keys([MASTER]))
        assert all(put(tier, disk.namespace, id) is Outcome.STORED for id in IDS)

    crash(work)
    torn = next((path, at) for path, at, record in records(disk) if record.id == IDS[3])
    with open(torn[0], "r+b") as file:
        file.seek(torn[1] + PAGE + 100)
        file.write(bytes(50))
    (disk.path / "catalog" / "data.mdb").unlink()
    monkeypatch.setattr(folder, "boot_id", lambda: "another boot")

    def rebuilt_without_the_key() -> None:
        assert disk.open().rebuild() == len(IDS) - 1

    crash(rebuilt_without_the_key)
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        assert good(tier, disk) == [id for id in IDS if id != IDS[3]]


def changed(disk: Disks, at_byte: Callable[[int, Record], int]) -> None:
    """Change a byte of each record's stored bytes, and make the header's checksum fit, as an enemy would."""
    for path, at, record in list(records(disk)):
        content = bytearray(path.read_bytes())
        content[at + PAGE + at_byte(at, record)] ^= 1
        start = at + PAGE
        fits = replace(record, checksum=checksum(bytes(content[start : start + record.stored_bytes])))
        content[at : at + HEADER_BYTES] = fits.encode()
        path.write_bytes(content)
    Catalog.discard(disk.path / "catalog")


@pytest.mark.parametrize("where", ["key id", "nonce", "first", "last", "tag"])
@pytest.mark.parametrize("codec", CODECS)
def test_whoever_changes_a_record_and_its_checksum_makes_a_miss_and_no_wrong_bytes(
    disk: Disks, where: str, codec: str
) -> None:
    written(disk, codec, MASTER)
    place = {"key id": 3, "nonce": 8, "first": 20, "last": -17, "tag": -1}[where]
    changed(disk, lambda at, record: place if place >= 0 else record.stored_bytes + place)
    with closing(disk.open(codec=codec, keys=Keys([MASTER]))) as tier:
        assert tier.rebuild() == len(IDS)
        assert good(tier, disk) == []
        assert tier.status().counters.checksum_failures == len(IDS)
        tier.check()


@pytest.mark.parametrize("what", ["id", "namespace_id", "epoch", "codec"])
def test_a_sealed_record_in_anothers_place_does_not_open(what: str) -> None:
    """Everything that names a block is authenticated with its bytes: no swap, no replay of an older epoch."""
    from terracekv.tiers.coder import Coder, Stored
    from terracekv.tiers.vault import Vault

    vault = Vault(Coder("off"), Keys([MASTER]))
    payload = memoryview(bytearray(payload_of(IDS[0], b"", PAGE)))
    mine = Record(IDS[0], bytes(32), 7, PAGE, 0, checksum(payload), 1, 1)
    into = memoryview(bytearray(PAGE))
    with vault.sealed(mine, Stored(0, PAGE, payload), payload, 1e18) as sealed:  # type: ignore[arg-type]
        record = replace(mine, codec=sealed.codec, stored_bytes=sealed.size, checksum=sealed.checksum)

        def fill(pages: memoryview) -> None:
            pages[: sealed.size] = sealed.view[: sealed.size]

        vault.restore(record, fill, into, "it", 1e18)
        assert into == payload
        others: dict[str, Any] = {"id": IDS[1], "namespace_id": bytes([1]) * 32, "epoch": 8, "codec": SEALED | 1}
        with pytest.raises(Damaged):
            vault.restore(replace(record, **{what: others[what]}), fill, into, "it", 1e18)
        moved = replace(record, generation=99, created_ms=99)
        vault.restore(moved, fill, into, "it", 1e18)  # an eviction appends records anew, as they are
    vault.check()


def test_what_follows_a_sealed_block_on_disk_is_zero_and_nothing_of_another(disk: Disks) -> None:
    small = registered(disk.namespaces, 2, BLOCK_BYTES - 2000)  # as many pages when sealed
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        assert put(tier, disk.namespace, IDS[0]) is put(tier, small, IDS[1]) is Outcome.STORED
    for path, at, record in records(disk):
        end = at + PAGE + record.stored_bytes
        padding = path.read_bytes()[end : at + record.pages * PAGE]
        assert padding == bytes(len(padding)) and len(padding) < PAGE


def test_a_block_that_changed_in_host_is_not_sealed(disk: Disks) -> None:
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        payload = payload_of(IDS[0], disk.namespace.id, BLOCK_BYTES)
        assert tier.put(disk.namespace, IDS[0], memoryview(payload), checksum(payload) ^ 1) is Outcome.FAILED
        assert "changed in host" in str(tier.status().last_error)
        assert tier.leading(disk.namespace, IDS[:1]) == 0
        tier.check()


def test_a_block_that_was_hit_survives_an_eviction_sealed(disk: Disks) -> None:
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        assert put(tier, disk.namespace, IDS[0]) is Outcome.STORED
        index = 100
        while not tier.status().counters.evictions.get("capacity"):
            assert good(tier, disk, IDS[:1]) == IDS[:1]
            assert put(tier, disk.namespace, name(index)) is Outcome.STORED
            index += 1
        assert good(tier, disk, IDS[:1]) == IDS[:1]
        tier.check()


def test_a_rebuilt_catalog_lists_sealed_blocks(disk: Disks) -> None:
    written(disk, "on", MASTER)
    Catalog.discard(disk.path / "catalog")
    with closing(disk.open(codec="on", keys=Keys([MASTER]))) as tier:
        assert tier.rebuild() == len(IDS) and good(tier, disk) == IDS
        assert tier.status().details["sealed_blocks"] == 0, "of this start"
        tier.check()


@pytest.mark.parametrize("codec", CODECS)
def test_a_bucket_holds_sealed_blocks_that_nodes_with_the_key_share(tmp_path: Path, codec: str) -> None:
    with s3_stub(tmp_path) as server:

        def opened(label: str, *masters: bytes) -> AbstractContextManager[Node]:
            keys = Keys(masters) if masters else None
            more: dict[str, Any] = {"endpoint": server.endpoint, "credentials": server.credentials, "codec": codec}
            return node(tmp_path / label, keys=keys, **more)

        with opened("a", MASTER) as a, opened("b", MASTER) as b, opened("c", OTHER) as c, opened("d") as d:
            for id in IDS:
                assert put(a.tier, a.now, id) is Outcome.STORED
            for id in IDS:
                assert get(b.tier, b.now, id) == (Outcome.HIT, payload_of(id, b.now.id, BLOCK_BYTES))
            for stranger, says in ((c, "sealed with key"), (d, "no key")):
                assert get(stranger.tier, stranger.now, IDS[0])[0] is Outcome.DAMAGED
                assert says in str(stranger.tier.status().last_error)
            bucket = Bucket(a.tier.settings)
            assert [wrong for _, wrong in verify(bucket)] == [None] * len(IDS), "that takes no key"
            bucket.close()


def test_a_daemon_with_a_key_serves_after_a_restart_and_without_it_recomputes(shm_dir: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(MASTER.hex() + "\n")
    with Daemon(shm_dir / "run", tmp_path / "d", encryption__key_file=str(key)) as daemon:
        with daemon.client() as client:
            keys = client.chain(1, 4)
            assert client.put(keys, durable=True).durable == 4
        for path in daemon.runtime.iterdir():
            if path.name in ("arena", "slots"):
                path.unlink()
        daemon.restart()
        with daemon.client() as client:
            assert client.get(keys).blocks == 4
        key.write_text(OTHER.hex())
        for path in daemon.runtime.iterdir():
            if path.name in ("arena", "slots"):
                path.unlink()
        daemon.restart()
        with daemon.client() as client:
            assert client.get(keys).blocks == 0, "and no wrong bytes"
            assert client.put(keys).stored == 4 and client.get(keys).blocks == 4


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), ("", "no key"), ("abc", "key 1"), ("00" * 32 + "\nxx", "key 2")]
)
def test_a_key_file_that_cannot_be_meant_stops_the_start_and_is_not_repeated(
    tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        open_keys(Encryption(key_file=str(path)))
    assert "00" * 32 not in str(caught.value)


def test_no_key_file_is_no_key() -> None:
    assert open_keys(Encryption()) is None


def test_threads_seal_and_open_at_once_in_little_memory(disk: Disks) -> None:
    from terracekv.tests.blocks import in_threads

    many = [name(index) for index in range(60)]
    other = registered(disk.namespaces, 2)
    with closing(disk.open(codec="on", keys=Keys([MASTER]))) as tier:

        def work(ids: list[bytes]) -> None:
            for id in ids:
                assert put(tier, disk.namespace, id) is Outcome.STORED
            assert good(tier, disk, ids) == ids

        in_threads(*(lambda part=many[n::4]: work(part) for n in range(4)))
        assert get(tier, other, many[0])[0] is Outcome.MISS
        tier.check()
    assert os.listdir(disk.segments)


def test_a_block_that_changes_in_host_while_it_is_sealed_is_not_stored(
    disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Keys.seal

    def late(self: Keys, namespace_id: bytes, about: bytes, plain: memoryview, into: memoryview) -> int:
        plain[0] ^= 1
        return real(self, namespace_id, about, plain, into)

    monkeypatch.setattr(Keys, "seal", late)
    with closing(disk.open(keys=Keys([MASTER]))) as tier:
        payload = memoryview(bytearray(payload_of(IDS[0])))
        assert tier.put(disk.namespace, IDS[0], payload, checksum(payload)) is Outcome.FAILED
        assert "changed in host" in str(tier.status().last_error)
        assert get(tier, disk.namespace, IDS[0])[0] is Outcome.MISS
        tier.check()
