"""Writes the launcher: a program of a few hundred bytes that starts torpor's entry point.

Why not a shell script: a shell rewrites the environment it hands on (it adds PWD, drops names that are no
identifiers, sorts), and it cannot tell whether its caller ignores SIGPIPE, which Python hides by ignoring it
itself. Why not "#!/usr/bin/python3": when a system upgrade removes that interpreter, the kernel refuses the
script, and no container of the node could be stopped any more. The program does, without a library:

    if every landmark file exists:
        digit = 2 * (SIGPIPE is ignored) + (SIGXFSZ is ignored)
        execve(prefix[0], [prefix..., digit, argv...], envp)
    argv[0] = runtime; execve(runtime, argv, envp)
    write(2, message); exit_group(127)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

_BASE = 0x400000
_HEADERS = 64 + 2 * 56
_SIGPIPE, _SIGXFSZ = 13, 25


class _Assembler:
    """Machine code and the strings behind it. The code's length must not depend on the addresses."""

    def __init__(self) -> None:
        self.code = bytearray()
        self.data = bytearray()
        self.data_address = 0
        self.fallback = 0

    def text(self, value: str | bytes) -> int:
        """The address of a NUL-terminated string that is put behind the code."""
        address = self.data_address + len(self.data)
        self.data += (value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")) + b"\0"
        return address


def _x86_64(
    out: _Assembler, prefix: Sequence[str], landmarks: Sequence[str], runtime: str, message: str
) -> None:
    code = out.code

    def emit(text: str, *numbers: int) -> None:
        code.extend(bytes.fromhex(text))
        for number in numbers:
            code.extend(struct.pack("<i", number))

    def system_call(number: int) -> None:
        emit("b8", number)  # mov eax, number
        emit("0f05")  # syscall

    def execve(path: int) -> None:
        emit("bf", path)  # mov edi, path
        emit("4889e6")  # mov rsi, rsp
        emit("4889da")  # mov rdx, rbx
        system_call(59)

    emit("59")  # pop rcx             argc; rsp is argv now
    emit("488d5ccc08")  # lea rbx, [rsp+rcx*8+8]      envp
    for landmark in landmarks:
        emit("bf", out.text(landmark))  # mov edi, landmark
        emit("31f6")  # xor esi, esi
        system_call(21)  # access
        emit("85c0")  # test eax, eax
        emit("0f85", out.fallback - len(code) - 6)  # jnz fallback
    emit("31ed")  # xor ebp, ebp
    for bit, signal in ((2, _SIGPIPE), (1, _SIGXFSZ)):
        emit("bf", signal)  # mov edi, signal
        emit("31f6")  # xor esi, esi
        emit("488d9424", -256)  # lea rdx, [rsp-256]        the old action
        emit("41ba", 8)  # mov r10d, 8                      size of a signal set
        system_call(13)  # rt_sigaction
        emit("4883bc24", -256)  # cmp qword [rsp-256], SIG_IGN
        emit("01")
        emit("7503")  # jne over the next
        emit("83cd" + f"{bit:02x}")  # or ebp, bit
    emit("8d046d", out.text(b"0\0001\0002\0003"))  # lea eax, [rbp*2+digits]
    emit("50")  # push rax
    for word in reversed(prefix):
        emit("68", out.text(word))  # push word
    execve(out.text(prefix[0]))
    emit("4883c4" + f"{8 * (len(prefix) + 1):02x}")  # add rsp, what was pushed
    out.fallback = len(code)
    emit("bf", out.text(runtime))  # mov edi, runtime
    emit("48893c24")  # mov [rsp], rdi
    execve(out.text(runtime))
    emit("bf", 2)  # mov edi, stderr
    emit("be", out.text(message))  # mov esi, message
    emit("ba", len(message.encode("utf-8", "surrogateescape")))  # mov edx, its length
    system_call(1)  # write
    emit("bf", 127)  # mov edi, 127
    system_call(231)  # exit_group


def _aarch64(
    out: _Assembler, prefix: Sequence[str], landmarks: Sequence[str], runtime: str, message: str
) -> None:
    code = out.code

    def emit(*instructions: int) -> None:
        for instruction in instructions:
            code.extend(struct.pack("<I", instruction))

    def move(register: int, value: int) -> None:
        emit(0xD2800000 | (value & 0xFFFF) << 5 | register)  # movz xN, #low
        emit(0xF2A00000 | (value >> 16) << 5 | register)  # movk xN, #high, lsl 16

    def system_call(number: int) -> None:
        move(8, number)
        emit(0xD4000001)  # svc #0

    def execve(path: int) -> None:
        move(0, path)
        emit(0xAA1403E1)  # mov x1, x20
        emit(0xAA1303E2)  # mov x2, x19
        system_call(221)

    emit(0xF94003E9)  # ldr x9, [sp]                argc
    emit(0x910023F4)  # add x20, sp, #8             argv
    emit(0x8B090E93)  # add x19, x20, x9, lsl #3
    emit(0x91002273)  # add x19, x19, #8            envp
    for landmark in landmarks:
        emit(0x92800C60)  # mov x0, #-100           AT_FDCWD
        move(1, out.text(landmark))
        move(2, 0)
        system_call(48)  # faccessat
        emit(0xB5000000 | ((out.fallback - len(code)) // 4 & 0x7FFFF) << 5)  # cbnz x0, fallback
    move(21, 0)
    for signal, set_bit in ((_SIGPIPE, 0xB27F02B5), (_SIGXFSZ, 0xB24002B5)):
        move(0, signal)
        move(1, 0)
        emit(0xD10403E2)  # sub x2, sp, #256        the old action
        move(3, 8)  # size of a signal set
        system_call(134)  # rt_sigaction
        emit(0xF9400049)  # ldr x9, [x2]
        emit(0xF100053F)  # cmp x9, SIG_IGN
        emit(0x54000041)  # b.ne over the next
        emit(set_bit)  # orr x21, x21, #2 or #1
    move(9, out.text(b"0\0001\0002\0003"))
    emit(0x8B150529)  # add x9, x9, x21, lsl #1
    emit(0xF81F8E89)  # str x9, [x20, #-8]!
    for word in reversed(prefix):
        move(9, out.text(word))
        emit(0xF81F8E89)  # str x9, [x20, #-8]!
    execve(out.text(prefix[0]))
    out.fallback = len(code)
    emit(0x910023F4)  # add x20, sp, #8             argv again
    move(9, out.text(runtime))
    emit(0xF9000289)  # str x9, [x20]
    execve(out.text(runtime))
    move(0, 2)
    move(1, out.text(message))
    move(2, len(message.encode("utf-8", "surrogateescape")))
    system_call(64)  # write
    move(0, 127)
    system_call(94)  # exit_group


_MACHINES: dict[str, tuple[int, Callable[[_Assembler, Sequence[str], Sequence[str], str, str], None]]] = {
    "aarch64": (183, _aarch64),
    "x86_64": (62, _x86_64),
}


def machines() -> tuple[str, ...]:
    """The machines (as `platform.machine()` names them) that `build` writes a program for."""
    return tuple(_MACHINES)


def build(machine: str, *, prefix: Sequence[str], landmarks: Sequence[str], runtime: str) -> bytes:
    """The launcher as an ELF file.

    machine: one of `machines()`. prefix: program and arguments that go before the digit and the caller's
    argv. landmarks: files without which `prefix` cannot work. runtime: absolute path of the real runtime.
    """
    elf_machine, assemble = _MACHINES[machine]
    message = f"torpor-runtime: could not run runtime '{runtime}'; run: torpor install\n"
    out = _Assembler()
    # The first pass finds the code's length, the second knows the addresses.
    for _ in range(2):
        size = len(out.code)
        out.code.clear()
        out.data.clear()
        out.data_address = _BASE + _HEADERS + size
        assemble(out, prefix, landmarks, runtime, message)
    size = _HEADERS + len(out.code) + len(out.data)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2,  # an executable at a fixed address
        elf_machine,
        1,
        _BASE + _HEADERS,
        64,
        0,
        0,
        64,
        56,
        2,
        0,
        0,
        0,
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x10000)  # read and execute
    stack = struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # a stack that is not executable
    return header + load + stack + bytes(out.code) + bytes(out.data)
