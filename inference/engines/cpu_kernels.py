"""CPU kernels for a few tokens: linear and decoder layers on weights in the shortest exact format.

`cpu_kernels.cpp` is compiled once for each machine, in seconds, into the user's cache folder. It
computes in float32 (rounding to bfloat16 where a bfloat16 model does), whatever format the weights
are packed in. Reading the weights is the cost of a forward of a few tokens, so the shortest format
that holds them exactly is chosen:

    format      bits per weight    holds exactly
    affine4     5                  GGUF's Q4_0 and Q4_1, dequantized to float32
    affine8     9                  GGUF's Q8_0, dequantized
    bfloat16    16                 bfloat16 weights, also after they became float32
    float32     32                 all others

The weights of a head, whose drafts are verified anyway, are rounded to affine8.

Letters in tensor names: O outputs, I inputs, C outputs of a block, N rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...files import cache_folder
from ..targets.twin import twin_of
from ..tuning.machine import cpuinfo, processor

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
GROUP = 32
"""Inputs that share a scale and an offset, as in GGUF's formats."""
ROWS_AT_ONCE = 2**15
"""Outputs that are packed at once, to limit the memory for it."""
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi")
INSTRUCTIONS = {
    "AVX512": ("-march=native",),
    "AVX2": ("-march=native", "-mno-avx512f"),
    "DEFAULT": (),
}
"""Compiler flags for each of torch's CPU capabilities."""


class Weights(ctypes.Structure):
    """A linear layer's packed weights, laid out as the kernels' struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("format", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("words", "scales", "bias")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if not on disk yet; None, after one warning, if that fails."""
    # 1. The compiler and its flags, for the instruction set that torch uses.
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        warnings.warn(
            "decoding on this CPU is slower than it could be: there is no C++ compiler (g++)",
            stacklevel=2,
        )
        return None
    command = [
        *shlex.split(compiler),  # CXX may hold arguments, such as "ccache g++"
        *FLAGS,
        *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ("-mcpu=native",)),
    ]

    # 2. Build them. Of a compiler's output the first line with an error is the reason.
    try:
        loaded = _built(command)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip()
        reason = next((line for line in output.splitlines() if "error" in line), output)
        warnings.warn(
            f"decoding on this CPU is slower than it could be: {SOURCE.name} cannot be compiled:"
            f" {reason}",
            stacklevel=2,
        )
        return None

    # 3. Types of arguments, which ctypes does not know: integers, pointers, doubles.
    i = ctypes.c_int64
    p = ctypes.c_void_p
    d = ctypes.c_double
    loaded.headstart_columns.restype = i
    arguments = {
        "headstart_linear": (p, p, i, p, i, i),
        "headstart_uniform": (p, i, i, p, i),
        "headstart_norm": (p, p, i, i, d, i, p),
        "headstart_decoder": (p, p, i, i),
    }
    for name, types in arguments.items():
        function = getattr(loaded, name)
        function.restype = None
        function.argtypes = types
    return loaded


def _built(command: list[str]) -> ctypes.CDLL:
    """The kernels, from disk or compiled now."""
    # 1. The file's name is a hash of all that it is made of. The processor's name is not enough:
    # machines that share a home folder may have processors of one name and different features.
    # /proc/cpuinfo lists them as "flags" on x86, as "Features" on ARM.
    features = cpuinfo().get("flags") or cpuinfo().get("Features") or platform.machine()
    made_of = [*command, processor(), features, SOURCE.read_text(encoding="utf-8")]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    name = f"cpu_kernels-{key}.so"

    # 2. From the cache folder, or compiled into it.
    try:
        folder = cache_folder()
        if others_can_write(folder / name):
            raise OSError(f"no library is loaded from {folder}, where another user may put one")
        if _is_whole(folder / name):
            with suppress(OSError):  # built against another system's libraries: compile again
                return ctypes.CDLL(str(folder / name))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _compiled(command, folder, name)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        # 3. Else into a temporary folder, which a loaded library no longer needs. RuntimeError: the
        # user has no home. CalledProcessError: the compiler fails, too, if the disk is full.
        with tempfile.TemporaryDirectory(prefix="headstart-") as scratch:
            loaded = _compiled(command, Path(scratch), name)
        warnings.warn(
            f"the CPU kernels were compiled for this process alone, in seconds: {error}",
            stacklevel=3,
        )
        return loaded


def others_can_write(path: Path) -> bool:
    """Whether a user other than this one and root may have put a file at `path`, or may change it.

    The file, its folders and the links on the way to them count, as far as they exist.
    """
    if not hasattr(os, "getuid"):  # no Unix
        return False
    for part in {
        path.absolute(),
        *path.absolute().parents,
        path.resolve(),
        *path.resolve().parents,
    }:
        try:
            status = part.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid not in (0, os.getuid()):
            return True
        if stat.S_ISLNK(status.st_mode):
            continue  # its target is in the resolved path
        # In a sticky folder such as /tmp nobody but its owner can replace a file.
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        group = status.st_mode & stat.S_IWGRP and not private_group(status)
        if (status.st_mode & stat.S_IWOTH or group) and not sticky:
            return True
    return False


def private_group(status: os.stat_result) -> bool:
    """Whether a file's group is its owner's alone, as most Linux systems set up for each user."""
    import grp  # of Unix alone
    import pwd

    try:
        group = grp.getgrgid(status.st_gid)
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _compiled(command: list[str], folder: Path, name: str) -> ctypes.CDLL:
    """Compile the kernels into a folder, whole or not at all, with their checksum in a file."""
    log.info("compiling kernels for this processor, once")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        checksum = Path(scratch) / f"{name}.sha256"
        subprocess.run(
            [*command, str(SOURCE), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="utf-8")
        # Renames are atomic, and the checksum comes last: another process may be doing the same.
        made.replace(folder / name)
        checksum.replace(folder / checksum.name)
    return ctypes.CDLL(str(folder / name))


def _is_whole(path: Path) -> bool:
    """Whether a library is on disk as it was compiled, by its checksum.

    A truncated file, such as one from a full disk, may crash the process.
    """
    try:
        expected = path.with_name(f"{path.name}.sha256").read_text(encoding="utf-8")
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def in_use(device: torch.device) -> bool:
    """Whether the kernels serve a device and were loaded before; does not compile them."""
    return device.type == "cpu" and library.cache_info().currsize > 0 and library() is not None


def minus_uniform(keys_P: Tensor, width: int) -> Tensor:
    """Return negative uniform numbers in (-1, 0), float32 [P, width].

    Each key's row holds the numbers for the `width` counters from that key on.
    """
    keys_P = keys_P.contiguous()
    numbers_PV = torch.empty(len(keys_P), width, dtype=torch.float32)
    kernels().headstart_uniform(
        keys_P.data_ptr(), len(keys_P), width, numbers_PV.data_ptr(), torch.get_num_threads()
    )
    return numbers_PV


# Weights


@dataclass(frozen=True)
class Packed:
    """Weights of a linear layer, packed for the kernels."""

    format: str
    inputs: int
    outputs: int
    words: Tensor
    """int32 [blocks of C outputs, words of inputs, C]."""
    scales: Tensor | None
    """float16 [blocks, groups of inputs, scale and offset, C]."""
    bias: Tensor | None
    """float32 [width]."""

    width: int
    """Outputs, rounded up to whole blocks."""

    @cached_property
    def struct(self) -> Weights:
        """Argument for the kernels; it must not outlive the tensors."""
        return Weights(
            list(FORMATS).index(self.format),
            self.inputs,
            self.outputs,
            *map(pointer, (self.words, self.scales, self.bias)),
        )


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data; None for None."""
    return None if tensor is None else tensor.data_ptr()


def pack(weight_OI: Tensor, bias_O: Tensor | None = None, rounded: bool = False) -> Packed:
    """Pack float32 or bfloat16 weights in the shortest exact format, or `rounded` to 8 bits."""
    # 1. Pad the outputs to whole blocks: 100 outputs in blocks of 16 get 12 rows of zeros.
    columns = kernels().headstart_columns()
    outputs, inputs = weight_OI.shape
    padding = -outputs % columns
    weight_OI = F.pad(weight_OI.detach(), (0, 0, 0, padding))
    parts = weight_OI.split(ROWS_AT_ONCE // columns * columns)

    # 2. The first format that holds all weights; the last one, float32, always does.
    formats = ROUNDED if rounded else FORMATS
    for name in formats:
        unit, encode = formats[name]
        packed = _packed(parts, unit, encode, columns)
        if packed is not None:
            break
    assert packed is not None
    words = packed[0]
    scales = packed[1] if len(packed) > 1 else None
    bias = None if bias_O is None else F.pad(bias_O.detach().float(), (0, padding))
    return Packed(name, inputs, outputs, words, scales, bias, outputs + padding)


Encoded = tuple[Tensor, ...] | None
"""Words, int32 [O, words of inputs], and for integers scales with offsets [O, groups of inputs, 2];
None if inexact."""


def _packed(
    parts: Sequence[Tensor], unit: int, encode: Callable[[Tensor], Encoded], columns: int
) -> list[Tensor] | None:
    """Words, and scales if the format has them, each [blocks, ..., columns].

    None if the format does not hold all weights.
    """
    # A few rows mostly show that a format is inexact, before all are tried.
    if parts[0].shape[1] % unit or encode(parts[0][:32].float()) is None:
        return None
    encoded_parts = []
    for part in parts:
        encoded = encode(part.float())
        if encoded is None:
            return None
        # [O, words] to [blocks, words, C]: a block's C outputs lie side by side, so that a vector
        # register holds one word of each.
        blocks = []
        for values in encoded:
            blocks.append(values.unflatten(0, (-1, columns)).movedim(1, -1).contiguous())
        encoded_parts.append(blocks)
    return [torch.cat(values) for values in zip(*encoded_parts, strict=True)]


def _affine4(weight_OI: Tensor) -> Encoded:
    """Pack weights as Q4_1 or Q4_0 do; None if inexact.

    Q4_1 spans 15 steps from a group's least weight to its largest; Q4_0 centres 16 on zero.
    """
    groups = weight_OI.unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=2, keepdim=True)
    largest = torch.where(most > -least, most, least)
    attempts = (((most - least) / 15, least), (largest / -8, -8 * (largest / -8).half().float()))
    for scale, offset in attempts:
        numbers = _numbers(groups, scale, offset, 4)
        if numbers is not None:
            # Eight inputs in a word: inputs 0 to 3 in the low halves of its four bytes, inputs 4 to
            # 7 in the high halves.
            halves = numbers.flatten(1).unflatten(1, (-1, 2, 4))
            bytes_ = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
            return bytes_.view(torch.int32), torch.cat([scale, offset], dim=2).half()
    return None


def _affine8(weight_OI: Tensor, rounded: bool = False) -> Encoded:
    """Pack weights as Q8_0 does, with 127 steps on either side of zero; None if inexact.

    With `rounded`, weights between two steps take the nearest one.
    """
    groups = weight_OI.unflatten(1, (-1, GROUP))  # [O, groups, 32]
    scale = (groups.abs().amax(dim=2, keepdim=True) / 127).half().float()
    if rounded:
        groups = (groups / scale).nan_to_num_(0.0).round_().clamp_(-127, 127) * scale
    numbers = _numbers(groups, scale, -128 * scale, 8)
    if numbers is None:
        return None
    return (
        numbers.flatten(1).contiguous().view(torch.int32),
        torch.cat([scale, -128 * scale], dim=2).half(),
    )


def _numbers(groups: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor | None:
    """Return integers, uint8, that unpack to the weights.

    They unpack as (2^bits + number) * scale + (offset - 2^bits * scale).

    None if they do not, or if the weights are too large for a float16 scale.
    """
    # Scales are stored as float16, so the test is made with what float16 keeps of them. 0 / 0, in a
    # group of zeros, becomes 0.
    base = 2**bits
    scale = scale.half().float()
    offset = offset.half().float()
    numbers = ((groups - offset) / scale).nan_to_num_(0.0).round_().clamp_(0, base - 1)
    exact = torch.equal((numbers + base) * scale + (offset - base * scale), groups)
    return numbers.byte() if exact else None


def _bfloat16(weight_OI: Tensor) -> Encoded:
    halves = weight_OI.bfloat16()
    return (halves.view(torch.int32),) if torch.equal(halves.float(), weight_OI) else None


FORMATS: dict[str, tuple[int, Callable[..., Encoded]]] = {
    "affine4": (GROUP, _affine4),
    "affine8": (GROUP, _affine8),
    "bfloat16": (2, _bfloat16),
    "float32": (1, lambda weight_OI: (weight_OI.contiguous().view(torch.int32),)),
}
"""Formats, the shortest first, in the order of the kernels' numbers: the inputs of a row are a
multiple of the first value; the second packs weights."""
ROUNDED = FORMATS | {"affine8": (GROUP, partial(_affine8, rounded=True))}
"""The same for weights that need not be exact."""


def kernels() -> ctypes.CDLL:
    """The kernels, where `library` is known to have returned them."""
    loaded = library()
    assert loaded is not None
    return loaded


def linear(packed: Packed, rows: Tensor, rounds: bool = False) -> Tensor:
    """Apply a linear layer to rows [..., inputs]: float32 [..., outputs].

    With `rounds`, the results are rounded as in bfloat16.
    """
    flat = rows.reshape(-1, rows.shape[-1]).float().contiguous()
    assert flat.device.type == "cpu" and flat.shape[1] == packed.inputs
    out = flat.new_empty(len(flat), packed.width)
    kernels().headstart_linear(
        ctypes.byref(packed.struct),
        flat.data_ptr(),
        len(flat),
        out.data_ptr(),
        rounds,
        torch.get_num_threads(),
    )
    return out[:, : packed.outputs].reshape(*rows.shape[:-1], packed.outputs)


def norm(rows: Tensor, weight: Tensor, eps: float, rounds: bool) -> Tensor:
    """RMSNorm of float32 rows."""
    out = torch.empty_like(rows)
    kernels().headstart_norm(
        rows.data_ptr(),
        weight.data_ptr(),
        rows.shape[:-1].numel(),
        rows.shape[-1],
        eps,
        rounds,
        out.data_ptr(),
    )
    return out


def kernels_name() -> str:
    """The kernels' source, compiler and processor, as a hash."""
    return "kernels " + Path(kernels()._name).stem.removeprefix("cpu_kernels-")


def packed_copy(
    module: nn.Module,
    block: Callable[[nn.Module], nn.Module | None] = lambda module: None,
    rounded: bool = False,
) -> nn.Module:
    """Return a copy of a module whose linear layers run in the kernels.

    Their weights are `rounded` as in `pack`; the copy shares everything else.

    `block` returns a replacement for a whole module, or None to replace its parts.
    """

    def packed(part: nn.Module) -> nn.Module | None:
        replaced = block(part)
        if replaced is None and is_packable(part):
            return PackedLinear(part, rounded)
        return replaced

    return twin_of(module, packed)


def is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that the kernels compute."""
    if type(module) is not nn.Linear or not is_plain(module.weight):
        return False
    return module.weight.dtype in (torch.float32, torch.bfloat16)


def is_plain(weight: Tensor) -> bool:
    """Whether the kernels can read a weight: not one that a package such as torchao has quantized.

    The tensor of a quantized weight supports few operations.
    """
    return not is_traceable_wrapper_subclass(weight)


class PackedLinear(nn.Module):
    """A linear layer in the kernels; `weight` and `bias` are the layer's own."""

    def __init__(self, layer: nn.Linear, rounded: bool = False) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.rounded = rounded
        self.pack()

    def pack(self) -> None:
        """Copy the layer's weights as they are now."""
        self.packed = pack(self.weight, self.bias, self.rounded)

    def forward(self, rows: Tensor) -> Tensor:
        return linear(self.packed, rows, self.weight.dtype == torch.bfloat16).to(rows.dtype)
