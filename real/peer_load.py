"""How the peer comes to its weights: saved as a checkpoint, loaded again with some experts on disk.

Everything here is done by transformers and accelerate as their documentations say; ours is only the
choice of what stays in memory.
"""

from __future__ import annotations

import errno
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from real.errors import RealError
from sim.types import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def need_accelerate() -> None:
    """Raise ConfigError if accelerate is not installed."""
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"peer: {error}; the peer needs accelerate: pip install accelerate, "
            "in a checkout: pip install -c constraints.txt accelerate"
        ) from None


def save_source(source: PreTrainedModel | PreTrainedConfig, checkpoint: Path) -> dict[str, int]:
    """Save a model, or a random one of a configuration; return the bytes of each experts module by name.

    Raises ConfigError if the model has no fused experts, RealError if there is no room for the checkpoint
    and a second copy of the experts.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(source, dtype=source.dtype)
    else:
        model = source
    sizes = {name: _bytes_of(module) for name, module in model.named_modules() if _fused(module)}
    if not sizes:
        raise ConfigError(
            f"peer: {type(model).__name__} has no fused experts (gate_up_proj or up_proj, and down_proj)"
        )
    _check_room(_bytes_of(model) + sum(sizes.values()), checkpoint.parent)
    model.save_pretrained(checkpoint)
    return sizes


def choose_held(sizes: dict[str, int], memory_bytes: int) -> set[str]:
    """Return the experts modules that stay in memory: from the first layer on, as many as fit."""
    held: set[str] = set()
    for name, num_bytes in sizes.items():
        if num_bytes <= memory_bytes:
            held.add(name)
            memory_bytes -= num_bytes
    return held


def load_offloaded(
    checkpoint: Path, offload: Path, on_disk: set[str], way: str, device: str
) -> PreTrainedModel:
    """Load a checkpoint with the modules ``on_disk`` offloaded to the folder ``offload``."""
    from accelerate import dispatch_model
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    device_map = _device_map(empty, on_disk, device)
    offload.mkdir()
    if way == "safetensors":
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="auto", device_map=device_map, offload_folder=str(offload)
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        dispatch_model(model, device_map, main_device=device, offload_dir=str(offload))
    _own_memory(model)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model.eval()


def loaded_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights that are not on disk just now."""
    return sum(weights.nbytes for weights in model.parameters() if not weights.is_meta)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and remarks of transformers and accelerate; faults still raise."""
    from transformers.utils import logging as chatter

    had_bars, level = chatter.is_progress_bar_enabled(), chatter.get_verbosity()
    hooks = logging.getLogger("accelerate.big_modeling")
    hooks_level = hooks.level
    chatter.disable_progress_bar()
    chatter.set_verbosity_error()
    hooks.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        hooks.setLevel(hooks_level)
        chatter.set_verbosity(level)
        if had_bars:
            chatter.enable_progress_bar()


@contextmanager
def tells_of_room(folder: Path) -> Iterator[None]:
    """Turn a full or absent file system into a RealError of one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", None)
        if code == errno.ENOSPC or "No space left" in str(error):
            raise RealError(
                f"peer: folder = {folder}: no space left for the model's files"
            ) from None
        if code in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS):
            raise RealError(f"peer: folder = {folder}: must be a folder to write to") from None
        raise


def _check_room(num_bytes: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise RealError(
            f"peer: folder = {folder.parent}: {num_bytes / 1e9:.2f} GB needed for the model and its "
            f"offloaded experts, {free / 1e9:.2f} GB free"
        )


def _fused(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    has_both = "down_proj" in own and bool(own.keys() & {"gate_up_proj", "up_proj"})
    return has_both and own["down_proj"].ndim == 3


def _bytes_of(module: nn.Module) -> int:
    return sum(weights.nbytes for weights in module.parameters())


def _device_map(model: nn.Module, on_disk: set[str], device: str) -> dict[str, str]:
    """Return where each module with weights or buffers of its own lies.

    Modules around offloaded ones are named tensor by tensor: a hook on them would bring in all below.
    """
    places: dict[str, str] = dict.fromkeys(on_disk, "disk")
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if name in on_disk or not own:
            continue
        if any(module_name.startswith(f"{name}.") for module_name in on_disk):
            places.update({f"{name}.{tensor}": device for tensor, _ in own})
        else:
            places[name] = device
    return places


def _own_memory(model: nn.Module) -> None:
    """Copy the held weights out of the mapped checkpoint, whose pages the system may drop at any time."""
    for weights in model.parameters():
        if not weights.is_meta:
            weights.data = weights.data.clone()
