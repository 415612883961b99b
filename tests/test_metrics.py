"""Metrics: all there from the start, right after traffic, and silent about what was stored."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon import metrics
from terracekv.daemon.gpus import Gpus
from terracekv.daemon.stats import Stats
from terracekv.tests.people import BLOCK_BYTES, BLOCK_TOKENS, MODEL, People, fetch, keys_of, people, served, url
from terracekv.tiers.block import block_id
from terracekv.tiers.nvml import FIELDS, Gpu, Survey
from terracekv.tiers.tier import Miss

Series = dict[str, float]


async def scrape(people: People) -> Series:
    async with people.client.get("/metrics") as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@pytest.mark.fault(114)
@served()
async def test_every_series_is_there_before_any_traffic_and_no_other_comes_with_it(people: People) -> None:
    before = await scrape(people)
    for tier in ("host", "disk"):
        for name in ("hits", "misses", "puts", "put_bytes", "get_bytes", "checksum_failures", "io_errors"):
            assert before[f'terracekv_tier_{name}_total{{tier="{tier}"}}'] == 0
        for reason in ("capacity", "flush", "delete", "damaged"):
            assert before[f'terracekv_tier_evictions_total{{reason="{reason}",tier="{tier}"}}'] == 0
        assert before[f'terracekv_lookup_matched_blocks_total{{tier="{tier}"}}'] == 0
        assert before[f'terracekv_loaded_blocks_total{{tier="{tier}"}}'] == 0
    for reason in Miss:
        assert before[f'terracekv_lookup_misses_total{{reason="{reason}"}}'] == 0
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys, durable="1")
    await people.lookup(namespace, keys_of(5))
    await people.ask("DELETE", url(namespace, keys[0]))
    await people.ask("GET", "/nowhere")
    await people.ask("POST", "/v1/flush", {"namespace": MODEL})
    assert (await scrape(people)).keys() == before.keys()


def test_every_count_of_the_store_is_a_series() -> None:
    labelled = {"matched", "tokens", "misses", "loaded"}
    assert set(Stats.__slots__) - labelled == metrics.COUNTERS.keys() == metrics.NAMES.keys()


@served()
async def test_names_have_the_prefix_and_a_unit_and_counters_end_in_total(people: People) -> None:
    async with people.client.get("/metrics") as answer:
        types = re.findall(r"^# TYPE (\S+) (\S+)$", await answer.text(), re.M)
    assert len(types) > 40
    for name, kind in types:
        assert re.fullmatch(r"terracekv_[a-z0-9_]+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|millis|kb|mb|gib)\b", name)


@pytest.mark.fault(113)
@served()
async def test_hits_are_counted_against_what_was_asked_and_the_tiers_add_up(people: People) -> None:
    namespace, keys = people.register(), keys_of(10)
    await people.put(namespace, *keys[:4], durable="1")
    people.store.host.delete(namespace, [block_id(keys[3], 0)])
    await people.lookup(namespace, keys)
    series = await scrape(people)
    assert series["terracekv_lookup_asked_blocks_total"] == 10
    assert series["terracekv_lookup_found_blocks_total"] == 4
    split = [series[f'terracekv_lookup_matched_blocks_total{{tier="{tier}"}}'] for tier in ("host", "disk")]
    assert split == [3, 1]
    tokens = [series[f'terracekv_lookup_matched_tokens_total{{tier="{tier}"}}'] for tier in ("host", "disk")]
    assert tokens == [3 * BLOCK_TOKENS, BLOCK_TOKENS]
    assert sum(tokens) == series["terracekv_lookup_found_tokens_total"]
    assert series["terracekv_lookup_asked_tokens_total"] == 10 * BLOCK_TOKENS
    assert series['terracekv_lookup_misses_total{reason="absent"}'] == 1


@served()
async def test_what_tiers_hold_and_did_is_in_their_series(people: People) -> None:
    namespace, keys = people.register(), keys_of(3)
    await people.put(namespace, *keys, durable="1")
    await people.ask("POST", "/v1/pin", {"namespace": MODEL, "keys": [keys[0].hex()]})
    series = await scrape(people)
    assert series['terracekv_tier_blocks{tier="host"}'] == series['terracekv_tier_blocks{tier="disk"}'] == 3
    assert series['terracekv_tier_put_bytes_total{tier="disk"}'] == 3 * BLOCK_BYTES
    assert series["terracekv_pinned_blocks"] == series["terracekv_host_leased_blocks"] == 1
    assert series["terracekv_written_blocks_total"] == 3
    assert series['terracekv_tier_bandwidth_measured{direction="read",tier="disk"}'] == 0
    moved = 'terracekv_tier_{}_total{{direction="{}",tier="disk"}}'
    assert [series[moved.format("moved_bytes", way)] for way in ("read", "write")] == [0, 3 * BLOCK_BYTES]
    assert series[moved.format("busy_seconds", "read")] == 0 < series[moved.format("busy_seconds", "write")]
    assert series["terracekv_namespaces"] == 1


@served(disk_codec="on")
async def test_what_the_codec_does_is_in_the_series_and_in_the_status(people: People) -> None:
    codec = {
        'tier_codec_ratio{tier="disk"}',
        'tier_coded_blocks_total{tier="disk"}',
        'tier_raw_blocks_total{tier="disk"}',
        'tier_codec_chosen_namespaces{tier="disk"}',
        'tier_codec_bytes_per_second{direction="encode",tier="disk"}',
        'tier_codec_bytes_per_second{direction="decode",tier="disk"}',
    }
    before = await scrape(people)
    assert {before[f"terracekv_{name}"] for name in codec} == {0}
    namespace = people.register()
    kept, shrunk = (next(key for key in keys_of(99) if key[0] % 2 == parity) for parity in (0, 1))
    await people.put(namespace, kept, shrunk, durable="1")
    people.store.host.delete(namespace, [block_id(shrunk, 0)])
    assert (await fetch(people, url(namespace, shrunk)))[0] == 200
    series = await scrape(people)
    assert series['terracekv_tier_coded_blocks_total{tier="disk"}'] == 1
    assert series['terracekv_tier_raw_blocks_total{tier="disk"}'] == 1
    assert series['terracekv_tier_codec_chosen_namespaces{tier="disk"}'] == 1
    assert series['terracekv_tier_codec_ratio{tier="disk"}'] > 1
    assert all(series[f"terracekv_{name}"] > 0 for name in codec)
    _, document = await people.ask("GET", "/v1/status")
    details = document["tiers"]["disk"]["details"]
    assert (details["codec"], details["coded_blocks"], details["codec_chosen_namespaces"]) == ("on", 1, 1)
    assert details["codec_encode_bytes_per_s"] > 0 < details["codec_decode_bytes_per_s"]
    assert "codec" not in document["tiers"]["host"]["details"]


@served()
async def test_requests_are_counted_by_route_and_timed(people: People) -> None:
    namespace = people.register()
    await people.put(namespace, *keys_of(2))
    await people.ask("GET", "/nowhere")
    await people.ask("POST", "/v1/status")
    series = await scrape(people)
    route = "/v1/namespaces/{ns}/blocks/{key}/{shard}"
    assert series[f'terracekv_http_requests_total{{method="PUT",route="{route}",status="2xx"}}'] == 2
    assert series[f'terracekv_http_request_seconds_count{{route="{route}"}}'] == 2
    assert series[f'terracekv_http_request_seconds_bucket{{le="+Inf",route="{route}"}}'] == 2
    assert series[f'terracekv_http_request_seconds_sum{{route="{route}"}}'] > 0
    assert series['terracekv_http_requests_total{method="",route="unmatched",status="4xx"}'] == 2


@served()
async def test_buckets_hold_what_took_no_longer(people: People) -> None:
    door = people.door._metrics
    for seconds in (0.001, 0.0011, 59.0, 61.0):
        door.observe("GET", "/", 200, seconds)
    series = await scrape(people)
    bucket = 'terracekv_http_request_seconds_bucket{{le="{}",route="/"}}'
    assert [series[bucket.format(le)] for le in ("0.001", "0.005", "10.0", "60.0", "+Inf")] == [1, 2, 2, 3, 4]


@pytest.mark.fault(109)
@served()
async def test_metrics_reveal_no_key_no_namespace_and_no_model(people: People) -> None:
    namespace, keys = people.register(), keys_of(2)
    await people.put(namespace, *keys, durable="1")
    await people.lookup(namespace, keys)
    async with people.client.get("/metrics") as answer:
        text = await answer.text()
    for secret in (namespace.id.hex(), MODEL, *(key.hex()[:16] for key in keys), str(people.folder)):
        assert secret not in text


@served(disk_bytes=0)
async def test_without_a_disk_tier_there_are_no_series_of_it(people: People) -> None:
    series = await scrape(people)
    assert not [name for name in series if name.startswith("terracekv_tier_") and 'tier="disk"' in name]


@pytest.mark.fault(85)
@pytest.mark.fault(89)
def test_gpus_and_how_engines_read_them_are_series_and_what_is_not_measured_is_none(shm_dir: Path) -> None:
    gpus = Gpus(state="no_gpu", reason="there is no driver")
    readings: dict[str, int | str | None] = dict.fromkeys(FIELDS)
    gpus.survey = Survey([Gpu("GPU-1", readings | {"temperature_c": 41}, dict.fromkeys(FIELDS, "Not Supported"))])

    async def story() -> tuple[Series, Any]:
        async with people(shm_dir, gpus=gpus) as opened:
            session = opened.sessions.start(7, opened.register(), 0, 1, "engine")
            session.gpu, session.not_near = "GPU-1", "there is no driver"
            opened.sessions.start(8, opened.register(), 0, 1, "engine").near = True
            series, (_, document) = await scrape(opened), await opened.ask("GET", "/v1/status")
            for each in list(opened.sessions.open.values()):
                opened.sessions.close(each)
            return series, document

    series, document = asyncio.run(story())
    assert series['terracekv_gpu_temperature_celsius{gpu="GPU-1"}'] == 41
    assert not [name for name in series if name.startswith("terracekv_gpu_memory")]
    assert (
        series['terracekv_gpu_tier_state{state="no_gpu"}']
        == 1
        == sum(value for name, value in series.items() if name.startswith("terracekv_gpu_tier_state"))
    )
    assert [series[f'terracekv_session_transports{{transport="{way}"}}'] for way in ("arena", "ipc")] == [1, 1]
    assert series["terracekv_session_transport_downgrades"] == 1
    assert document["gpu_tier"] == {"state": "no_gpu", "reason": "there is no driver"}
    assert document["gpus"][0]["memory_used_bytes"] is None
    assert document["gpus"][0]["reasons"]["memory_used_bytes"] == "Not Supported"
    assert [each["transport_reason"] for each in document["sessions"]] == ["there is no driver", None]
