# SPDX-License-Identifier: Apache-2.0
"""Reads the compiled kernels, for every architecture they are compiled for: which exist, what instructions they
are made of, and what they leave room for on a multiprocessor. No device is needed."""
import functools
import os
import pathlib

import pytest

from support import machine_code
from support.machine_code import count

BIN = pathlib.Path(os.environ["ATTEND_BIN"])
ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100"]
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@functools.cache
def kernels_of(file):
    path = BIN / file
    if not path.exists():
        pytest.skip(f"this build has no {file}: no nvcc was found, or it is a build with sanitizers")
    kernels = {}
    for kernel in machine_code.read_kernels(path):
        assert (kernel.architecture, kernel.name) not in kernels, f"{kernel} is there twice"
        kernels[kernel.architecture, kernel.name] = kernel
    return kernels


def family(architecture, name):
    """The kernels of a template by its arguments, e.g. ("Bf16", "128")."""
    found = {}
    for (of, full_name), kernel in kernels_of("attend-engine-cuda.so").items():
        base, _, arguments = full_name.partition("<")
        if of == architecture and base.split("::")[-1] == name:
            found[tuple(word.split("::")[-1] for word in arguments.rstrip(">").split(", "))] = kernel
    assert found, f"{architecture}: no kernel {name}"
    return found


# ---- Which kernels there are ----

HALVES = ("Bf16", "F16")
TENSOR = {(t, w) for t in HALVES for w in ("32", "64", "80", "96", "128", "192", "256")}
FLOAT = {(t, w) for t in ("float", *HALVES) for w in ("64", "128", "256")}
EXPECTED = {
    "TensorPrefill": TENSOR,
    "TensorDecode": TENSOR,
    "FloatAttentionKernel": FLOAT,
    "WeightsKernel": FLOAT,
    "CombineKernel": {("",)},
    "ConvertKernel": {("",)},
    "TransformKernel": {("",)},
    "KvRowsKernel": {(t, b) for t in ("Vector16", "unsigned int", "unsigned short") for b in ("false", "true")},
}


@each_architecture
def test_every_kernel_is_compiled_and_no_other(architecture):
    for name, arguments in EXPECTED.items():
        assert set(family(architecture, name)) == arguments, name
    total = sum(1 for of, _ in kernels_of("attend-engine-cuda.so") if of == architecture)
    assert total == sum(len(arguments) for arguments in EXPECTED.values())


def test_there_is_machine_code_for_these_architectures_only_and_ptx_for_later_ones():
    assert {of for of, _ in kernels_of("attend-engine-cuda.so")} == set(ARCHITECTURES)
    assert machine_code.ptx_architectures(BIN / "attend-engine-cuda.so") == {"sm_100"}


# ---- Registers and memory ----


@each_architecture
def test_no_kernel_spills(architecture):
    """Local memory is device memory: a spill in a loop over keys costs more than what the loop is for. All kernels,
    so that a rare branch can't hide one."""
    spilling = [f"{kernel}: {kernel.count('LDL|STL')} local loads and stores, {kernel.stack_bytes} bytes of stack"
                for (of, _), kernel in kernels_of("attend-engine-cuda.so").items()
                if of == architecture and (kernel.count("LDL|STL") > 0 or kernel.stack_bytes > 0)]
    assert not spilling, "\n".join(spilling)


# Of a multiprocessor: registers; shared memory in bytes, of which each thread block takes 1 KiB besides its own.
REGISTERS = 65536
SHARED = {"sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90a": 228 << 10, "sm_100": 228 << 10}
# What PrefillPlan (engine/cuda/tensor_prefill.h) and DecodePlan (tensor_decode.h) plan for each width: threads, packed
# rows or slots of the ring, thread blocks per multiprocessor. Where shared memory is smaller than an H100's, one block
# has to fit.
PREFILL = {
    32: (128, 128, 3), 64: (128, 128, 2), 80: (128, 128, 2), 96: (128, 128, 2), 128: (128, 128, 2),
    192: (256, 128, 1), 256: (128, 64, 2),
}
DECODE = {
    32: (128, 6, 4), 64: (128, 6, 4), 80: (128, 6, 3), 96: (128, 6, 3), 128: (128, 6, 2),
    192: (128, 4, 2), 256: (128, 3, 2),
}


def shared_bytes(name, width):
    """Without what little a plan adds to rows: the formula is a second opinion, not a copy."""
    if name == "TensorPrefill":  # queries, keys and values of 2 bytes; 20 bytes a row
        rows = PREFILL[width][1]
        return (rows + 2 * 64) * width * 2 + rows * 20
    return DECODE[width][1] * 64 * width * 2 + 16 * 20 + 4 * 16 * 8


@each_architecture
@pytest.mark.parametrize("name, plan", [("TensorPrefill", PREFILL), ("TensorDecode", DECODE)])
def test_registers_and_shared_memory_allow_the_planned_occupancy(architecture, name, plan):
    for (_, width), kernel in family(architecture, name).items():
        threads, _, blocks = plan[int(width)]
        assert allocated(kernel.registers) * threads * blocks <= REGISTERS, f"{kernel}: {kernel.registers} registers"
        fitting = SHARED[architecture] // (shared_bytes(name, int(width)) + 1024)
        assert fitting >= (blocks if SHARED[architecture] > 200 << 10 else 1), kernel
        assert kernel.static_shared_bytes <= 1024, kernel  # what the system takes


def allocated(registers):
    """Registers come in eights per thread."""
    return (registers + 7) // 8 * 8


# ---- Instructions ----

PRODUCT = {"Bf16": r"HMMA\.16816\.F32\.BF16$", "F16": r"HMMA\.16816\.F32$"}


@each_architecture
@pytest.mark.parametrize("name", ["TensorPrefill", "TensorDecode"])
def test_tensor_kernels_use_tensor_cores_matrix_loads_and_asynchronous_copies(architecture, name):
    for (dtype, _), kernel in family(architecture, name).items():
        assert kernel.count(PRODUCT[dtype]) > 0, kernel
        assert kernel.count(r"[HIDBQ]MMA") == kernel.count(PRODUCT[dtype]), f"{kernel}: products of other types"
        assert kernel.count(r"LDSM\.16\.M88\.4$") > 0, f"{kernel}: keys"
        assert kernel.count(r"LDSM\.16\.MT88\.4$") > 0, f"{kernel}: values, transposed"
        assert kernel.count(r"LDSM\.") == kernel.count(r"LDSM\.16\.MT?88\.4$"), f"{kernel}: narrow matrix loads"
        assert kernel.count(r"LDGSTS\.E\.BYPASS\.128") > 0, kernel
        assert kernel.count(r"LDGSTS") == kernel.count(r"LDGSTS\.E\.BYPASS\.128"), f"{kernel}: narrow copies"
        assert kernel.count(r"MUFU\.EX2") > 0, kernel


@each_architecture
def test_prefill_has_the_products_of_one_tile_of_keys_and_no_more(architecture):
    """Scores and weighted values of 64 keys: each product of [16, 16] and [16, 8] is written once in the code. More
    would mean a loop that the compiler copied, and an instruction cache that the main loop leaves."""
    for (dtype, width), kernel in family(architecture, "TensorPrefill").items():
        threads, rows, _ = PREFILL[int(width)]
        warp_tiles = rows // (threads // 32) // 16
        assert kernel.count(PRODUCT[dtype]) == warp_tiles * (8 * int(width) // 16 + 4 * int(width) // 8), kernel


# In basic blocks that multiply, instructions of any other kind for each product. Of prefill: a scheduler issues one
# instruction a cycle and its tensor core takes a product every two cycles or more, so up to 1 products are what the
# blocks wait for; wide heads have 16 rows to a warp, so that keys and values are loaded for half as many products, and
# the narrowest has few products to share what a block costs. Decoding waits for memory; its bound only notices a loop
# that falls apart, and at width 32 a block has no more than 8 products to share its addresses.
LARGEST_RATIO = {"TensorPrefill": {"32": 1.5, "192": 1.5, "256": 1.5, "": 1.0}, "TensorDecode": {"32": 8.0, "": 6.0}}


@each_architecture
@pytest.mark.parametrize("name", LARGEST_RATIO)
def test_blocks_that_multiply_do_little_else(architecture, name, capsys):
    lines = []
    for (dtype, width), kernel in sorted(family(architecture, name).items()):
        blocks = [block for block in kernel.blocks() if count(block, PRODUCT[dtype]) >= 4]
        assert blocks, kernel
        products = sum(count(block, PRODUCT[dtype]) for block in blocks)
        others = sum(len(block) for block in blocks) - products
        lines.append(f"{architecture} {name} {dtype} {width}: {products} products in {len(blocks)} blocks, "
                     f"{others / products:.2f} other instructions each; {kernel.registers} registers")
        bounds = LARGEST_RATIO[name]
        assert others / products <= bounds.get(width, bounds[""]), kernel
        for block in blocks:
            conversions = count(block, r"I2F|F2I|F2F|I2I")
            assert conversions == 0, f"{kernel}: {conversions} conversions through the slow unit"
            # A 32 x 32 -> 64 bit product for an address is 4 cycles of the unit that adds floats.
            wide = count(block, r"IMAD\.(WIDE|HI)")
            assert wide == 0, f"{kernel}: {wide} wide multiplications"
            # Operands come by matrix loads; a length or a span may be read beside them.
            scalar = count(block, r"(LDS|STS)(\.U?\d+)?$")
            assert scalar <= 2, f"{kernel}: {scalar} scalar accesses of shared memory"
    with capsys.disabled():  # shown by every run, so that a change for the worse is seen before it is a failure
        print("\n" + "\n".join(lines))


@each_architecture
def test_float_attention_copies_asynchronously_and_reads_vectors(architecture):
    for kernel in family(architecture, "FloatAttentionKernel").values():
        assert kernel.count(r"[HIDBQ]MMA") == 0, kernel
        assert kernel.count(r"LDGSTS\.E\.BYPASS\.128") > 0, kernel
        assert kernel.count(r"LDS\.128") > kernel.count(r"LDS$"), kernel
        assert kernel.count(r"FFMA") > 3 * kernel.count(r"FADD"), f"{kernel}: products apart from their sums"
        assert kernel.count(r"DFMA|DADD|DMUL") == 0, f"{kernel}: double precision"


@each_architecture
def test_nothing_is_compiled_with_fast_mathematics(architecture):
    """tanh would be one instruction, too coarse for softcap, and exp2 would lose its care for subnormal numbers."""
    for file in ("attend-engine-cuda.so", "attend-gpu-wrappers"):
        for (of, name), kernel in kernels_of(file).items():
            if of == architecture:
                assert kernel.count(r"MUFU\.TANH") == 0, kernel
    functions = next(kernel for (of, name), kernel in kernels_of("attend-gpu-wrappers").items()
                     if of == architecture and name.endswith("Functions"))
    assert functions.count(r"FSETP\.GEU") >= 2, "exp2 doesn't look whether its result is subnormal"


# ---- The wrappers of engine/cuda/device.h ----

# Of each kernel of tests/gpu/wrapper_kernels.cu: what must be there, and how often at least.
BF16_PACK = r"F2FP\.BF16\.(F32\.)?PACK_AB"
F16_PACK = r"F2FP\.(F16\.F32\.)?PACK_AB"
WRAPPERS = {
    "Vectors": {r"LDG\.E\.128": 2, r"STS\.128": 2, r"LDS\.128": 2, r"STG\.E\.128": 2, r"BAR\.SYNC": 1},
    "AsyncCopies": {r"LDGSTS\.E\.BYPASS\.128": 2, r"LDGDEPBAR": 2, r"DEPBAR\.LE": 2, r"BAR\.SYNC": 2},
    "Barriers": {r"BAR\.SYNC": 4, r"BAR\.RED\.OR": 3, r"B2R\.RESULT": 3},
    "Collectives": {r"SHFL\.BFLY": 4, r"SHFL\.IDX": 2, r"VOTE\.ANY": 3},
    "LoadMatrices": {r"LDSM\.16\.M88\.4": 2},
    "LoadMatricesTransposed": {r"LDSM\.16\.MT88\.4": 2},
    "ProductsBf16": {PRODUCT["Bf16"]: 2},
    "ProductsF16": {PRODUCT["F16"]: 2},
    "Functions": {r"MUFU\.EX2": 6, r"FMNMX": 2, r"MUFU\.RCP": 2},
    "Doubles": {r"DFMA": 20, r"DMUL": 2, r"MUFU\.RSQ64H": 1},
    "ConversionsBf16": {BF16_PACK: 3, r"F2F\.BF16\.F32|" + BF16_PACK: 5},
    "ConversionsF16": {F16_PACK: 3, r"F2F\.F16\.F32|" + F16_PACK: 5, r"HADD2\.F32": 2},
}


@each_architecture
def test_every_wrapper_is_the_instruction_it_is_meant_to_be(architecture):
    kernels = {name.split("::")[-1]: kernel for (of, name), kernel in kernels_of("attend-gpu-wrappers").items()
               if of == architecture}
    assert set(kernels) == set(WRAPPERS)
    for name, patterns in WRAPPERS.items():
        for pattern, least in patterns.items():
            found = kernels[name].count(pattern)
            assert found >= least, f"{kernels[name]}: {found} x {pattern}"
        assert kernels[name].stack_bytes == 0, kernels[name]


@each_architecture
def test_waits_and_barriers_stay_between_the_copies_and_the_reads_they_order(architecture):
    """The compiler must not move what the wrappers' "memory" clobbers hold in place."""
    kernel = next(kernel for (of, name), kernel in kernels_of("attend-gpu-wrappers").items()
                  if of == architecture and name.endswith("AsyncCopies"))
    order = [instruction.name.split(".")[0] for instruction in kernel.instructions
             if instruction.name.split(".")[0] in ("LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "LDS")]
    assert order == ["LDGSTS", "LDGDEPBAR"] * 2 + ["DEPBAR", "BAR", "LDS"] * 2
