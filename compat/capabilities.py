"""Names of the kernel's capabilities, by number."""

from __future__ import annotations

from collections.abc import Iterable

_NAMES = (
    "chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable "
    "net_bind_service net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot "
    "sys_ptrace sys_pacct sys_admin sys_boot sys_nice sys_resource sys_time sys_tty_config mknod lease "
    "audit_write audit_control setfcap mac_override mac_admin syslog wake_alarm block_suspend audit_read "
    "perfmon bpf checkpoint_restore"
)
NAMES = tuple(f"CAP_{name.upper()}" for name in _NAMES.split())


def names(mask: int) -> list[str]:
    """The capabilities of a mask; one without a name here by its number."""
    return [
        NAMES[bit] if bit < len(NAMES) else f"number {bit}"
        for bit in range(mask.bit_length())
        if mask >> bit & 1
    ]


def mask(wanted: Iterable[str]) -> int:
    """The mask of some names, as specifications write them; what has no name here is left out."""
    upper = {name.upper() for name in wanted}
    return sum(1 << bit for bit, name in enumerate(NAMES) if name in upper)
