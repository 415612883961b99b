"""Which of the machine's memories the arena is taken from: the one that the GPUs are near.

Owns nothing; called by the daemon once, before the arena's pages exist. Standard library only.

A copy between a GPU and memory of another socket crosses the link between them and is a third slower. The arena is one
file on tmpfs, whose pages come from where its policy says, whoever touches them first. The policy is a preference: when
that memory is full, or may not be asked for, pages come from elsewhere and the daemon goes on.
"""

import ctypes
import os
import platform
from pathlib import Path

AUTO, OFF = "auto", "off"
SYSFS = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
NODE_MAX = 1023
_NVIDIA, _DISPLAY, _3D = "0x10de", "0x0300", "0x0302"
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_libc = ctypes.CDLL(None, use_errno=True)


def choose(setting: str, sysfs: Path = SYSFS, nodes: Path = NODES) -> tuple[int | None, str]:
    """The node, or None for anywhere, and why. ``setting`` is ``auto``, ``off`` or a node's number.

    ``auto`` is the node of the GPUs, if they have one in common: with several, no single one is right.
    """
    if setting == OFF:
        return None, "off"
    if setting != AUTO:
        node = int(setting)
        return (node, "asked for") if (nodes / f"node{node}").exists() else (None, f"there is no node {node}")
    found = gpu_nodes(sysfs)
    if not found:
        return None, "no GPU whose node is known"
    if len(found) > 1:
        return None, f"GPUs are near nodes {', '.join(map(str, sorted(found)))}"
    (node,) = found
    return node, "that of the GPUs"


def gpu_nodes(sysfs: Path = SYSFS) -> set[int]:
    """Nodes that NVIDIA's GPUs are near, as the kernel knows them. What cannot be read is not a GPU."""
    found = set()
    for device in sysfs.glob("*"):
        try:
            kind = (device / "class").read_text().strip()
            if (device / "vendor").read_text().strip() == _NVIDIA and kind[:6] in (_DISPLAY, _3D):
                found.add(int((device / "numa_node").read_text()))
        except (OSError, ValueError):
            continue
    return {node for node in found if node >= 0}


def prefer(address: int, size: int, node: int) -> str | None:
    """Take the pages of a mapping that do not exist yet from ``node`` as long as it has any; why not, where not."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"mbind is not known for {platform.machine()}"
    assert 0 <= node <= NODE_MAX
    mask = (ctypes.c_ulong * ((NODE_MAX + 1) // 64))()
    mask[node // 64] = 1 << node % 64
    call = (ctypes.c_ulong(address), ctypes.c_ulong(size), ctypes.c_long(_PREFERRED), mask)
    if _libc.syscall(ctypes.c_long(number), *call, ctypes.c_ulong(NODE_MAX + 1), ctypes.c_ulong(0)) == 0:
        return None
    code = ctypes.get_errno()
    return f"mbind to node {node}: {os.strerror(code)}"
