"""Blocks of a GPU's pages through a real daemon and back, for ``gpu_check.py``.

Owns the daemon that it starts. Imports the connector; needs what the daemon needs (msgspec, lmdb, xxhash, aiohttp).
"""

import random
from contextlib import closing

import msgspec  # noqa: F401 - what is missing is to be named before anything was started

from terracekv.bench.gpu_paged import PAGE_TOKENS, Geometry, Paged
from terracekv.bench.served import Served, served
from terracekv.connector.client import Client
from terracekv.connector.device import DeviceCopier
from terracekv.daemon.protocol import LayerGroup, Layout, dense_strides
from terracekv.kernels.cuda import Device
from terracekv.kernels.transfer import PART_BYTES

GEOMETRY = Geometry("daemon", "NHD", 4, 2, 64, block_tokens=64)
BLOCKS = 8


def there_and_back(
    device: Device, *, geometry: Geometry = GEOMETRY, part_bytes: int = PART_BYTES, scratch_bytes: int = 64 << 20
) -> str:
    """Store, wipe, load into the same pages; AssertionError when a byte differs."""
    with closing(Paged(device, geometry, BLOCKS)) as paged:
        scratch = device.allocate_pinned(paged.size)
        try:
            content = random.Random(4).randbytes(paged.size)
            paged.put(content, scratch)
            with served(host__size="64MiB", host__slab="16MiB", disk__enabled="false") as daemon:
                copier = DeviceCopier(
                    [paged.runs],
                    paged.pages_per_block,
                    device=device,
                    part_bytes=part_bytes,
                    scratch_bytes=scratch_bytes,
                )
                with closing(copier):
                    told = _through(daemon, copier, paged, geometry, scratch, content)
        finally:
            device.free_pinned(scratch)
    return told


def _through(
    daemon: Served, copier: DeviceCopier, paged: Paged, geometry: Geometry, scratch: int, content: bytes
) -> str:
    shape: tuple[int, ...] = (geometry.block_tokens, paged.block_bytes // geometry.block_tokens)
    layout = Layout("ND", "latent", 1, (LayerGroup(1, shape, dense_strides(shape, 1)),))
    client = Client(
        daemon.socket,
        model="gpu-check",
        revision="1",
        dtype="bytes",
        block_tokens=geometry.block_tokens,
        layout=layout,
        strict=True,
        attach=copier.attach,
    )
    with closing(client):
        keys = client.keys(list(range(BLOCKS * geometry.block_tokens)))
        stream = copier.device.stream()
        blocks = copier.blocks(paged.pages, stream.ptr)
        stored = client.store(keys, blocks.gather, settle=blocks.settle)
        assert stored.stored == BLOCKS, stored
        wiped = bytearray(content)
        for pages in paged.pages:
            for address, _ in paged.runs.at(*pages):
                at = address - paged.address
                wiped[at : at + paged.runs.run_bytes] = bytes(paged.runs.run_bytes)
        paged.put(bytes(wiped), scratch)
        loading = copier.blocks(paged.pages, stream.ptr)
        loaded = client.load(keys, loading.scatter, loading.settle)
        assert loaded.blocks == BLOCKS, loaded
        assert paged.get(scratch) == content, "what came back differs"
        report = copier.report()
    each = geometry.block_tokens // PAGE_TOKENS
    return f"{BLOCKS} blocks of {each} pages, {report['gather']} out and {report['scatter']} back"
