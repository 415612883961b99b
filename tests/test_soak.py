"""Ten thousand reads through a host tier of four slots, while others write: every byte is the right one's."""

import random
import threading
from functools import partial
from pathlib import Path

import pytest

from terracekv.tests.blocks import in_threads
from terracekv.tests.harness import Daemon

READS = 10_000
CHAINS = 48


@pytest.mark.long
@pytest.mark.fault(3)
@pytest.mark.fault(6)
@pytest.mark.timeout(300)
def test_no_session_ever_gets_anothers_bytes(shm_dir: Path, tmp_path: Path) -> None:
    """Blocks outnumber slots by twelve, so nearly every read comes from disk through a slot that others want too."""
    tiny = {"host__size": "16KiB", "host__slab": "16KiB", "disk__size": "16MiB", "daemon__queue": "64KiB"}
    done = threading.Event()
    lock = threading.Lock()
    read = {"good": 0, "full": 0}

    with Daemon(shm_dir, tmp_path, **tiny) as daemon:

        def write(seed: int) -> None:
            dice = random.Random(seed)
            with daemon.client() as client:
                while not done.is_set():
                    stored = client.put(client.chain(dice.randrange(CHAINS), dice.randrange(1, 3)), durable=True)
                    assert stored.why in (None, "full"), stored

        def load(seed: int) -> None:
            dice = random.Random(seed)
            with daemon.client() as client:
                while not done.is_set():
                    loaded = client.get(client.chain(dice.randrange(CHAINS), dice.randrange(1, 3)))
                    assert loaded.why in (None, "absent", "full", "miss"), loaded
                    with lock:
                        read["good"] += loaded.blocks
                        read["full"] += loaded.why == "full"
                        if read["good"] >= READS:
                            done.set()

        try:
            in_threads(*(partial(write, seed) for seed in range(4)), *(partial(load, seed) for seed in range(10, 18)))
        finally:
            done.set()
        assert read["good"] >= READS and daemon.errors() == []
        with daemon.client() as client:
            assert client.put(client.chain(1000, 4)).stored == 4, "all slots can be had: nothing is held any more"
