"""What an image says of the processor and of the memory it was made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engines.criu.images import ImageReader, Message

# CRIU's core_entry.march, as `uname -m` names them.
_MACHINES: Mapping[int, str] = {
    1: "x86_64",
    2: "armv7l",
    3: "aarch64",
    4: "ppc64le",
    5: "s390x",
    6: "mips64",
    7: "loongarch64",
    8: "riscv64",
}
# Register sets beyond SSE by the fields of user_x86_xsave_entry that hold them. Protection keys are left out:
# the kernel gives every task some, used or not.
_STATE: Mapping[str, tuple[str, ...]] = {
    "avx": ("ymmh_space",),
    "avx512": ("opmask_reg", "zmm_upper", "hi16_zmm"),
    "mpx": ("bndreg_state",),
}
_MAP_DROPPABLE, _MAP_TYPE, _MAP_HUGETLB = 8, 0xF, 0x40000
_HUGE_SHIFT, _HUGE_MASK, _DEFAULT_HUGE_BYTES = 26, 0x3F, 2 << 20
_VMA_SHADOW_STACK, _VMA_GUARD = 1 << 15, 1 << 16
# Bits of a word of CRIU's x86 capabilities, in the order of the processor's own registers; the words: 0 is
# CPUID 1 EDX, 4 is 1 ECX, 6 is 8000_0001 ECX, 9 is 7 EBX, 10 is 0xD.1 EAX, 11 is 7 ECX.
BITS: Mapping[int, Mapping[int, str]] = {
    4: {
        0: "pni",
        1: "pclmulqdq",
        9: "ssse3",
        12: "fma",
        13: "cx16",
        19: "sse4_1",
        20: "sse4_2",
        22: "movbe",
        23: "popcnt",
        25: "aes",
        26: "xsave",
        28: "avx",
        29: "f16c",
        30: "rdrand",
    },
    6: {5: "abm", 16: "fma4"},
    9: {
        0: "fsgsbase",
        3: "bmi1",
        5: "avx2",
        8: "bmi2",
        11: "rtm",
        14: "mpx",
        16: "avx512f",
        17: "avx512dq",
        18: "rdseed",
        19: "adx",
        21: "avx512ifma",
        23: "clflushopt",
        24: "clwb",
        28: "avx512cd",
        29: "sha_ni",
        30: "avx512bw",
        31: "avx512vl",
    },
    10: {1: "xsavec"},
    11: {
        1: "avx512vbmi",
        3: "pku",
        6: "avx512_vbmi2",
        8: "gfni",
        9: "vaes",
        10: "vpclmulqdq",
        11: "avx512_vnni",
        12: "avx512_bitalg",
        14: "avx512_vpopcntdq",
    },
}


def machine(core: Message) -> str:
    """The architecture of a task, "" for one that is not known here."""
    return _MACHINES.get(int(core.mtype), "")


def state(threads: Iterable[Message]) -> tuple[str, ...]:
    """Register sets that any thread holds something in."""
    used: set[str] = set()
    for thread in threads:
        if not thread.HasField("thread_info") or not thread.thread_info.fpregs.HasField("xsave"):
            continue
        area = thread.thread_info.fpregs.xsave
        used |= {
            name for name, fields in _STATE.items() if any(any(getattr(area, field)) for field in fields)
        }
    return tuple(sorted(used))


def written_flags(reader: ImageReader) -> tuple[str, ...] | None:
    """What cpuinfo.img says of the dump's processor; None if there is none (CRIU writes it when told to).

    Only flags that instructions depend on are known here. Raises ImageCorrupt.
    """
    if not reader.exists("cpuinfo.img"):
        return None
    entries = reader.one("cpuinfo.img", "CPUINFO").x86_entry
    if not entries:
        return None
    words = [int(word) for word in entries[0].capability]
    return tuple(
        sorted(
            name
            for index, names in BITS.items()
            if index < len(words)
            for bit, name in names.items()
            if words[index] >> bit & 1
        )
    )


class Mappings:
    """What all tasks have mapped that not every kernel and node can give."""

    def __init__(self) -> None:
        self.droppable = self.guards = self.shadow_stack = False
        self.huge: dict[str, int] = {}

    def add(self, mm: Message) -> None:
        """Look at the mappings of one process."""
        for vma in mm.vmas:
            flags, status = int(vma.flags), int(vma.status)
            self.droppable |= flags & _MAP_TYPE == _MAP_DROPPABLE
            self.guards |= bool(status & _VMA_GUARD)
            self.shadow_stack |= bool(status & _VMA_SHADOW_STACK)
            if flags & _MAP_HUGETLB:
                shift = flags >> _HUGE_SHIFT & _HUGE_MASK
                size = 1 << shift if shift else _DEFAULT_HUGE_BYTES
                count = (int(vma.end) - int(vma.start)) // size
                self.huge[str(size)] = self.huge.get(str(size), 0) + count
