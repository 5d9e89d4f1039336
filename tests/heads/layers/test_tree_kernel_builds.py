"""The tree kernel, compiled for cards that are not here: it fits their shared memory, and its hot
loop spills nothing.

`make test-kernels` has the environment that this needs: Triton, whose assembler knows every card,
and no GPU.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from headstart.heads.layers import tree_kernel  # noqa: E402

SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Shared memory that one program may use, by compute capability: T4, A100, RTX 3090, RTX 4090,
H100, B200, RTX 5090."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LONG = 2**15
"""Slots of a cache for which the largest blocks are chosen."""
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
ALIGNED = ("query", "keys", "values", "lengths", "output", "log_sums")
STRIDES = ("query_row", "query_head", "query_node", "state_row", "state_group", "state_slot")


def built(arch: int, dtype: str, rows: int, size: int, sliding: bool = False):
    """The compiled kernel for groups of so many rows, in the blocks that `tree_attention` would
    choose there."""
    block = tree_kernel.block_shape(rows, LONG, size, ITEMSIZE[dtype], SHARED_BYTES[arch])
    constants = {"GROUPS": 8, "HEADS": 4, "HEAD_SIZE": size, "PADDED_SIZE": size, "PARTS": 8}
    constants |= {"BLOCK_ROWS": block.rows, "BLOCK_SLOTS": block.slots}
    constants |= {"SLIDING": sliding, "NODES_FOLLOW": True, "PRECISION": "ieee", "SUMS": tl.float32}
    types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | {
        "ancestors": "*u8",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("depths", "lengths"), "*i64") | dict.fromkeys(
        ("output", "log_sums"), "*fp32"
    )
    kernel = tree_kernel.attend_to_part
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    place = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in (*ALIGNED, *STRIDES)},
    )
    options = {"num_warps": 4, "num_stages": block.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def loops(machine_code: bytes, folder: Path) -> list[list[str]]:
    """Instructions of each loop."""
    file = folder / "kernel.cubin"
    file.write_bytes(machine_code)
    text = subprocess.run(
        [TOOLS / "cuobjdump", "-sass", file], capture_output=True, text=True, check=True
    ).stdout
    code: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);", line):
            code.append((int(instruction[1], 16), instruction[2]))
    at = {address: number for number, (address, _) in enumerate(code)}
    bodies = []
    for number, (_, instruction) in enumerate(code):
        jump = re.search(r"\bBRA\s+(?:`\()?(?:0x([0-9a-f]+)|(\.L_x_\d+))", instruction)
        if jump is None:
            continue
        start = at.get(int(jump[1], 16)) if jump[1] else labels.get(jump[2])
        if start is not None and start < number - 20:
            bodies.append([body for _, body in code[start : number + 1]])
    return bodies


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [4, 32, 240])
@pytest.mark.parametrize("slots", [1024, 2**15])
def test_blocks_are_chosen_to_fit(arch, size, itemsize, rows, slots):
    block = tree_kernel.block_shape(rows, slots, size, itemsize, SHARED_BYTES[arch])
    assert block.rows >= 16 and block.slots >= 16
    assert block.shared_bytes(size, itemsize) <= SHARED_BYTES[arch]


@pytest.mark.parametrize(
    ("arch", "dtype", "rows", "size"),
    [
        (75, "fp16", 240, 256),
        (75, "fp32", 240, 256),
        (80, "bf16", 240, 128),
        (86, "fp32", 240, 256),
        (89, "bf16", 240, 256),
        (90, "bf16", 4, 128),
        (90, "bf16", 32, 128),
        (90, "bf16", 240, 128),
        (90, "bf16", 240, 256),
        (100, "bf16", 240, 128),
        (120, "fp16", 240, 256),
    ],
)
def test_it_fits_the_card(arch, dtype, rows, size):
    assert built(arch, dtype, rows, size).metadata.shared <= SHARED_BYTES[arch]


@pytest.mark.parametrize("rows", [4, 32, 240])
@pytest.mark.parametrize("sliding", [False, True])
def test_the_loop_over_committed_tokens_keeps_all_in_registers(rows, sliding, tmp_path):
    """One node, a chain of eight, a tree of sixty, on an H100: the loop that long texts spend their
    time in."""
    committed, nodes = loops(built(90, "bf16", rows, 128, sliding).asm["cubin"], tmp_path)
    assert not [instruction for instruction in committed if re.search(r"LDL|STL", instruction)]
    assert len(committed) < len(nodes)
    assert not [instruction for instruction in committed if re.search(r"LDG.*U8", instruction)], (
        "it reads ancestors"
    )
