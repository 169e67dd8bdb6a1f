# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the kernels: machine code of a binary by cuobjdump and nvdisasm (PyPI, in the
tests' environment), per architecture and kernel, with registers and memory. Knows no kernel by name."""
import collections
import os
import pathlib
import re
import subprocess
import sysconfig

TOOLS = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"

# One instruction of nvdisasm: address, predicate, name and operands. @!PT is never executed: padding.
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
# `name` has its modifiers, behind dots: LDSM.16.M88.4.
Instruction = collections.namedtuple("Instruction", "address name operands")


class Kernel:
    """One kernel of one architecture ("sm_90a"). `name` is demangled, without parameters."""

    def __init__(self, architecture, name, resources):
        self.architecture, self.name = architecture, name
        self.registers = resources["REG"]
        self.stack_bytes = resources["STACK"]
        self.static_shared_bytes = resources["SHARED"]
        self.instructions = []

    def __repr__(self):
        return f"{self.architecture} {self.name}"

    def count(self, pattern):
        return count(self.instructions, pattern)

    def blocks(self):
        """Basic blocks: runs of instructions that are entered at the first and left at the last."""
        targets = set()
        for instruction in self.instructions:
            if instruction.name.startswith(("BRA", "BSSY", "CALL", "BRX", "WARPSYNC")):
                targets.update(int(target, 16) for target in re.findall(r"\b0x([0-9a-f]+)$", instruction.operands))
        blocks = [[]]
        for instruction in self.instructions:
            if instruction.address in targets and blocks[-1]:
                blocks.append([])
            blocks[-1].append(instruction)
            if instruction.name.startswith(("BRA", "EXIT", "RET", "CALL", "BRX", "BSYNC")):
                blocks.append([])
        return [block for block in blocks if block]


def count(instructions, pattern):
    """Instructions whose full name matches the regular expression from its begin."""
    matcher = re.compile(pattern)
    return sum(1 for instruction in instructions if matcher.match(instruction.name))


def _run(program, *arguments):
    environment = dict(os.environ, PATH=f"{TOOLS}:{os.environ['PATH']}")  # cuobjdump calls nvdisasm
    done = subprocess.run([TOOLS / program, *arguments], capture_output=True, text=True, env=environment,
                          timeout=600, check=False)
    assert done.returncode == 0, f"{program} {arguments}: {done.stderr}"
    return done.stdout


def _demangled(names):
    done = subprocess.run(["c++filt", *names], capture_output=True, text=True, timeout=60, check=True)
    plain = []
    for name in done.stdout.splitlines():
        name = name.replace("(anonymous namespace)::", "").replace("attend::", "")
        plain.append(re.sub(r"\(.*$", "", re.sub(r"^void ", "", name)))
    return dict(zip(names, plain))


def _sections(text):
    """(architecture, lines) of each piece of machine code in cuobjdump's output; PTX is left out."""
    for section in re.split(r"^Fatbin (?=elf|ptx)", text, flags=re.MULTILINE)[1:]:
        if section.startswith("elf"):
            yield re.search(r"^arch = (\S+)$", section, re.MULTILINE)[1], section.splitlines()


def read_kernels(binary):
    """Every kernel of every architecture in a library, program or object file."""
    kernels = {}
    for architecture, lines in _sections(_run("cuobjdump", "--dump-resource-usage", binary)):
        mangled = None
        for line in lines:
            if found := re.match(r"\s*Function (\S+):$", line):
                mangled = found[1]
            elif mangled and "REG:" in line:
                resources = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
                kernels[architecture, mangled] = Kernel(architecture, mangled, resources)
                mangled = None
    for architecture, lines in _sections(_run("cuobjdump", "-sass", binary)):
        kernel = None
        for line in lines:
            if found := re.match(r"\s*Function : (\S+)$", line):
                kernel = kernels[architecture, found[1]]
            elif found := INSTRUCTION.match(line):
                address, predicate, name, operands = found.groups(default="")
                if predicate.strip() != "@!PT" and name != "NOP":
                    kernel.instructions.append(Instruction(int(address, 16), name, operands.strip()))
    plain = _demangled([kernel.name for kernel in kernels.values()]) if kernels else {}
    for kernel in kernels.values():
        assert kernel.instructions, f"{kernel}: no instruction was read"
        kernel.name = plain[kernel.name]
    return list(kernels.values())


def ptx_architectures(binary):
    """What a binary holds PTX for ("sm_100")."""
    return set(re.findall(r"PTX file.*\.(sm_\w+)\.ptx", _run("cuobjdump", "--list-ptx", binary)))
