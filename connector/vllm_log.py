"""Where the connector's lines go inside vLLM: to vLLM's own handlers, at its level and in its form.

Owns nothing. Called once in each of vLLM's processes, when the engine starts. Standard library only.
"""

import logging


def log_beside_vllm() -> None:
    """vLLM shows what its own loggers say. Ours, ``terracekv.*``, would reach no handler: INFO would be lost, and
    warnings come without time and place."""
    ours = logging.getLogger("terracekv")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(logging.NOTSET)  # of the parent; it makes logging forget which levels it found before
