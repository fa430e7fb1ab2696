"""runsc's command line: a call in runc's words, said so that runsc understands it.

On the hot path of runsc. runsc ends with usage and status 128 at any option it does not know.
"""

from shim.argv import Call

# What runsc knows; the rest of runc's options is left out, which changes nothing that runsc does.
_GLOBAL = ("debug", "log", "log-format", "root", "systemd-cgroup")

_VERBS = {
    "create": ("bundle", "console-socket", "pid-file"),
    "run": ("bundle", "console-socket", "pid-file", "detach"),
    "kill": ("all",),
    "delete": ("force",),
    "ps": ("format",),
    "exec": (
        "additional-gids", "cap", "console-socket", "cwd", "detach", "env", "pid-file", "process", "user",
    ),
    # Options that ask for something runsc cannot do stay, so that runsc refuses the call.
    "checkpoint": (
        "image-path", "leave-running", "work-path",
        "parent-path", "pre-dump", "lazy-pages", "page-server", "status-fd", "tcp-established",
    ),
    "restore": (
        "bundle", "console-socket", "detach", "image-path", "no-subreaper", "pid-file", "work-path",
        "parent-path", "lazy-pages", "page-server", "tcp-established", "tcp-close",
    ),
}  # fmt: skip


def translate(call: Call, extra: list[str]) -> list[str]:
    """The argument list for runsc that says what `call` says to runc.

    extra: global options of this node's gVisor set-up, put before the caller's verb.
    """
    if call.problem or call.wants_help or not call.verb:
        return extra + call.argv
    argv = [_option(name, value) for name, value in call.global_pairs if name in _GLOBAL]
    argv += extra
    argv.append(call.verb)
    known = _VERBS.get(call.verb)
    if known is None:
        return argv + call.argv[len(call.global_args) + 1 :]
    for name, value in call.pairs:
        if name in known:
            argv.append(_option(name, value))
        elif name == "preserve-fds" and call.verb == "exec":
            argv += ["-pass-fd=" + number + ":" + number for number in map(str, range(3, 3 + int(value, 0)))]
    return argv + call.args


def _option(name: str, value: str) -> str:
    return "--" + name + ("=" + value if value else "")
