"""The processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from compat.rules.case import Case, finding, part, rule
from engines.api import Finding

# glibc picks implementations by these at start-up, so a process that never mentions them jumps into them.
_PICKED = (
    "ssse3 sse4_1 sse4_2 popcnt avx avx2 fma fma4 bmi1 bmi2 abm movbe rtm avx512f avx512bw avx512cd avx512dq "
    "avx512vl avx512vbmi avx512_vbmi2 xsavec"
)
# Of 64-bit ARM (libgcc's atomics among them). No tunable switches these off.
_PICKED_BY_ARM = frozenset({"atomics", "mops", "sve"})
PICKED_BY_GLIBC = frozenset(_PICKED.split()) | _PICKED_BY_ARM
_TUNABLES: Mapping[str, str] = {"abm": "LZCNT"}  # where glibc's name differs from the kernel's
# glibc uses these only together with all of the latter, and its tunables know no names for them.
_SUBORDINATE = frozenset({"avx512cd", "avx512vbmi", "avx512_vbmi2"})
_AVX512 = frozenset({"avx512f", "avx512vl", "avx512bw"})
_TUNABLE = "glibc.cpu.hwcaps"
# Programs that use these have asked the processor themselves. Flags in neither set (`erms`, `pcid`) make
# things faster or safer, and no instruction depends on them.
_ASKED = (
    "aes vaes pclmulqdq vpclmulqdq sha_ni gfni rdrand rdseed adx f16c avx512ifma avx512_vnni avx512_bitalg "
    "avx512_vpopcntdq avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_int8 amx_bf16 clflushopt clwb fsgsbase "
    "cx16 pku asimd asimddp crc32 pmull sha1 sha2 sha3 sha512 sve2"
)
INSTRUCTIONS = frozenset(_ASKED.split())
# Which flag a part of the XSAVE state belongs to, as an image names the parts.
_STATE: Mapping[str, str] = {
    "avx": "avx",
    "mpx": "mpx",
    "avx512": "avx512f",
    "pkru": "pku",
    "amx": "amx_tile",
    "cet": "user_shstk",
}


@lru_cache(4096)
def _set(flags: tuple[str, ...]) -> frozenset[str]:
    return frozenset(flags)


def _had(case: Case) -> tuple[str, ...] | None:
    """Flags of the processor that made the image: the manifest's, else those that CRIU wrote down."""
    return (case.dump_host.cpu_flags if case.dump_host else case.needs.cpu_flags) or None


def _arch(case: Case) -> str:
    return case.dump_host.arch if case.dump_host else case.needs.arch


@rule("cpu.architecture", about="node", source="machine code; CRIU's core entries name the architecture")
def architecture(case: Case) -> Iterator[Finding]:
    """Machine code runs on its own architecture only. Restore on a node of the same one."""
    had = _arch(case)
    if had and had != case.node.arch:
        yield finding(
            "cpu.architecture",
            "refuse",
            f"the image was made on {had}, {case.where()} is {case.node.arch}",
            f"restore on a node with {had}",
        )


@rule("cpu.xsave", about="node", source="CRIU, crtools.c: valid_xsave_frame")
def xsave(case: Case) -> Iterator[Finding]:
    """CRIU cannot load an XSAVE area without the instruction. Restore on a node whose processor has it."""
    if case.needs.xsave and case.node.arch == "x86_64" and "xsave" not in _set(case.node.cpu_flags):
        yield finding(
            "cpu.xsave",
            "refuse",
            f"the tasks carry XSAVE state, which the processor of {case.where()} cannot load",
            "restore on a node whose processor has XSAVE",
        )


@rule("cpu.state", about="node", source="xstate_bv of the tasks' XSAVE areas in CRIU's core images")
def state(case: Case) -> Iterator[Finding]:
    """Registers that a task had in use at the dump (AVX, AVX-512, AMX...) must exist, whatever the program
    asks the processor later. Restore on a node that has them.
    """
    lacking = [part for part in case.needs.xstate if _STATE.get(part) not in _set(case.node.cpu_flags)]
    if lacking and case.node.arch == "x86_64":
        yield finding(
            "cpu.state",
            "refuse",
            f"tasks had {', '.join(lacking)} registers in use at the dump, which {case.where()} lacks",
            "restore on a node that has them",
        )


@rule("cpu.features", about="node", source="glibc's cpu_features; field reports of exit 132 after a restore")
def features(case: Case) -> Iterator[Finding]:
    """What the dump's processor had and this one lacks: the restore succeeds, the process dies later of an
    illegal instruction. Flags that the C library picks implementations by refuse, unless the container was
    started with GLIBC_TUNABLES that switch them off; instructions that programs ask for themselves warn,
    flags that make things only faster or safer (erms, pcid) do not count. Start the program with
    GLIBC_TUNABLES before the checkpoint, restore where the features are, or overrule it in config.toml if the
    programs are built portable.
    """
    had = _had(case)
    if had is None:
        yield finding(
            "cpu.features",
            "unknown",
            "nobody recorded the processor of the node on which the image was made",
            "restore on a node with the same processor",
        )
        return
    if _arch(case) != case.node.arch:
        return
    if "cpu" in case.node.unknown:
        yield from case.untold("cpu.features", "cpu", "the image needs processor features")
        return
    lacking = _set(had) - _set(case.node.cpu_flags)
    if not lacking:
        return
    if case.has_kernel and (fatal := sorted(lacking & (PICKED_BY_GLIBC | INSTRUCTIONS))):
        yield finding(
            "cpu.features",
            "refuse",
            f"the processor of {case.where()} lacks {', '.join(fatal)}, and gVisor restores only where all "
            "are there that were there at the dump",
            "restore on a node that has them",
        )
        return
    if fatal := sorted((lacking & PICKED_BY_GLIBC) - _switched_off(case)):
        yield finding(
            "cpu.features",
            "refuse",
            f"the processor of {case.where()} lacks {', '.join(fatal)}, which the C library uses where it "
            "finds them",
            "restore on a node that has them"
            if _PICKED_BY_ARM.intersection(fatal)
            else "restore on a node that has them, or start the program that is to be checkpointed with "
            f"GLIBC_TUNABLES={_TUNABLE}={','.join(_switches(fatal))}",
        )
    if possible := sorted(lacking & INSTRUCTIONS):
        yield finding(
            "cpu.features",
            "warn",
            f"the processor of {case.where()} lacks {', '.join(possible)}, which the program may use",
            "watch for an illegal instruction",
        )


def _switches(flags: list[str]) -> list[str]:
    """How glibc is told to do without these."""
    wanted = set(flags) - _SUBORDINATE
    if not _SUBORDINATE.isdisjoint(flags):
        wanted |= _AVX512
    return [f"-{_TUNABLES.get(flag, flag.upper())}" for flag in sorted(wanted)]


def _switched_off(case: Case) -> frozenset[str]:
    """What the dumped container's programs were told not to use."""
    process = part(case.origin.dump_spec or {}, "process")
    values = [str(entry).removeprefix("GLIBC_TUNABLES=") for entry in process.get("env") or ()]
    words = [
        word
        for value in values
        for setting in value.split(":")
        if setting.startswith(f"{_TUNABLE}=")
        for word in setting.partition("=")[2].split(",")
    ]
    names = {name: flag for flag, name in _TUNABLES.items()}
    off = {names.get(word[1:], word[1:].lower()) for word in words if word.startswith("-")}
    return frozenset(off | _SUBORDINATE if off >= _AVX512 else off)


@rule("cpu.xsave-size", about="node", source="CPUID leaf 0xD; signal frames are made of the kernel's size")
def xsave_size(case: Case) -> Iterator[Finding]:
    """A program that measured the XSAVE area at its start keeps buffers of that size; where the area is
    larger they may be too small. Restore on a node with the same processor state.
    """
    had = case.dump_host.xsave_bytes if case.dump_host else None
    if had and case.node.xsave_bytes and case.node.xsave_bytes > had and not case.has_kernel:
        yield finding(
            "cpu.xsave-size",
            "warn",
            f"the XSAVE area had {had} bytes at the dump and has {case.node.xsave_bytes} on {case.where()}: "
            "a program that keeps such areas itself may have too little room",
            "watch for crashes in signal handlers or coroutines",
        )
