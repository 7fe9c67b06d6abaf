"""What a cubin's instructions access: the few encodings that tests look at.

NVIDIA's instructions are 16 bytes since compute capability 7.0: the operation in the lowest 12 bits, the width of an access in
bits 73 to 75. `test_compile.py` proves that on kernels of which the width is known.
"""

from __future__ import annotations

import struct

#: Loads from and stores to the global space.
_OPERATIONS = {0x981: "LDG", 0x381: "LDG", 0x986: "STG", 0x386: "STG"}
#: Waits until the kernel in front is done; its name in a disassembly is ACQBULK.
WAIT = 0x82E
#: Loads, stores and atomic operations of the global and the generic space: LDG, LD, STG, ST, ATOMG, ATOM, RED.
MEMORY_OPERATIONS = {0x981, 0x381, 0x980, 0x986, 0x386, 0x385, 0x985, 0x3A8, 0x9A8, 0x38A, 0x98A, 0x98E, 0x9A6}
_BITS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 64, 6: 128}


def code_of(cubin: bytes) -> bytes:
    """Return the machine code of a cubin: its sections whose names begin with ``.text``."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_of = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + i * size) for i in range(count)]
    names_at = sections[names_of][4]
    return b"".join(cubin[s[4] : s[4] + s[5]] for s in sections if cubin.startswith(b".text", names_at + s[0]))


def operations(cubin: bytes) -> list[int]:
    """Return the operation of every instruction, in order."""
    code = code_of(cubin)
    return [struct.unpack_from("<Q", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]


def accesses(cubin: bytes) -> dict[str, int]:
    """Return how many loads and stores of global memory there are, as ``{"LDG.128": 4, ...}``."""
    found: dict[str, int] = {}
    code = code_of(cubin)
    for at in range(0, len(code), 16):
        low, high = struct.unpack_from("<QQ", code, at)
        operation = _OPERATIONS.get(low & 0xFFF)
        if operation is not None:
            name = f"{operation}.{_BITS[high >> 9 & 7]}"
            found[name] = found.get(name, 0) + 1
    return found
