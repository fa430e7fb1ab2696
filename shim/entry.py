"""The first code of torpor that a call of the runtime reaches: hand it over, or serve it.

On the hot path: a node runs this file for every step of every container's life and for every exec probe, so
it imports sys and os, and from torpor only `shim.argv` with one grammar. shim/launcher.py says how it starts.
"""

import os
import sys

from shim.argv import Call, parse

# Annotations that make a `create` ours: torpor's own, those that CRIU obeys (a pod may not set them: they
# name a file whose scripts run as root), and, where the node allows them, those of other tools.
OURS = (b"torpor.dev/", b"org.criu.")
FOREIGN = (b"restore.criu.org/",)
# What containerd and CRI-O write on the containers of pods, to which runsc gives no process of their own.
PODS = (b"io.kubernetes.cri",)

_HELD_VERBS = ("start", "state", "exec", "pause", "resume")
_STOPPING_VERBS = ("state", "kill", "delete", "features")
_SIGPIPE = 13
_SIGXFSZ = 25

# Which of SIGPIPE and SIGXFSZ the caller ignores; Python ignores both, so only the launcher can know.
_ignored = {_SIGPIPE: False, _SIGXFSZ: False}


def main(conf: str, handler: str, runtime: str) -> None:
    """Serve or hand over the call in sys.argv: "-c", a digit for the ignored signals, argv[0], the arguments.

    conf: path of runtime.conf; handler: "RUNTIME" or "RUNSC", the key of the real runtime there;
    runtime: its path if the file does not say. Does not return.
    """
    flags = sys.argv[1]
    _ignored[_SIGPIPE] = flags in ("2", "3")
    _ignored[_SIGXFSZ] = flags in ("1", "3")
    argv = sys.argv[3:]
    settings = read_settings(conf)
    runtime = settings.setdefault(handler, runtime)
    settings["HANDLER"] = handler
    if handler == "RUNSC":
        from shim.dialects.runsc import translate

        call = parse(argv, "runsc")
        argv = translate(call, settings.get("RUNSC_ARGS", "").split())
        note_exec(call, settings)
    else:
        call = parse(argv, "crun" if os.path.basename(runtime) == "crun" else "runc")
    if not decide(call, settings):
        hand_over(runtime, argv)
    import gc

    gc.disable()  # so short a life leaves no garbage that is worth a search
    # The standard library first: site-packages may hold modules of the same names.
    sys.path.append(sys.path.pop(0))
    if "SITE" in settings:
        sys.path.append(settings["SITE"])
    try:
        from shim.verbs.dispatch import serve
    except ImportError as error:
        # A dependency is gone, say after an upgrade of Python. What stops containers must work all the same.
        if call.verb in _STOPPING_VERBS:
            hand_over(runtime, argv)
        sys.exit(_fail(f"could not {call.verb} a container: {error}; install torpor again", call))
    status = serve(call, settings)
    if status is not None:
        if sys.stdout is not None:  # None if the caller has closed it
            sys.stdout.flush()
        # Not sys.exit: to tidy up all that was imported takes longer than a call that passes through.
        os._exit(status)
    hand_over(runtime, argv)


def read_settings(path: str) -> dict[str, str]:
    """The KEY=VALUE lines of the file at `path`; empty if it cannot be read: containers must run on."""
    settings: dict[str, str] = {}
    for line in os.fsdecode(_read(path) or b"").split("\n"):
        key, equals, value = line.partition("=")
        if equals and not key.lstrip().startswith("#"):
            settings[key.strip()] = value.strip()
    return settings


def decide(call: Call, settings: dict[str, str]) -> bool:
    """Whether torpor serves this call itself; if not, the real runtime gets it untouched."""
    verb = call.verb
    if call.wants_help:
        return False
    if verb == "create":
        # Here an unknown option does not matter: what a pod may not ask is refused all the same.
        return len(call.args) == 1 and (_is_ours(call, settings) or _exists(call, settings, ""))
    if call.problem:
        return False
    if verb in _HELD_VERBS:
        if not call.args:
            return False
        # What is on its way to another node must not be resumed here.
        return _exists(call, settings, "held") or (verb == "resume" and _exists(call, settings, "verdict"))
    if verb == "kill":  # callers know runc's answers
        return settings.get("HANDLER") == "RUNSC" and bool(call.args)
    if verb == "delete":
        return len(call.args) == 1 and _exists(call, settings, "")
    if verb in ("checkpoint", "restore"):
        return len(call.args) == 1
    return verb == "features" and not call.args


def container_dir(settings: dict[str, str], root: str, container_id: str) -> str:
    """The directory of torpor's own state of one container.

    root: the runtime's --root; container_id: must be a plain name, else ValueError.
    """
    if not container_id or "/" in container_id or container_id in (".", ".."):
        raise ValueError("not a container id: " + repr(container_id))
    escaped = os.path.realpath(root).replace("%", "%25").replace("/", "%2F")
    return os.path.join(settings.get("STATE", "/run/torpor"), "containers", escaped, container_id)


def note_exec(call: Call, settings: dict[str, str]) -> None:
    """Leave a file that says when a gVisor container had its first exec session; a checkpoint reads it."""
    if call.verb not in ("exec", "create", "run", "delete") or not call.args or call.problem:
        return
    try:
        path = container_dir(settings, call.root, call.args[0]) + "%exec"
        if call.verb != "exec":
            os.unlink(path)
            return
        try:
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
    except (OSError, ValueError):
        return  # containers must run on


def hand_over(runtime: str, argv: list[str]) -> None:
    """Become the real runtime at `runtime` with arguments `argv`, as if torpor had never been called.

    Process, descriptors, working directory, umask and signal mask are left alone; what Python changed of
    signal dispositions and environment is undone. Does not return; exits with 1 if the runtime cannot be run.
    """
    signals = __import__("_signal")  # the builtin one, already loaded; `signal` loads enum
    for number, ignored in _ignored.items():
        if not ignored:
            signals.signal(number, signals.SIG_DFL)
    _undo_locale_coercion()
    try:
        # Not execve: C's own environment is the caller's to the byte, repeated and unnamed entries included.
        os.execv(runtime, [runtime, *argv])  # noqa: S606
    except OSError as error:
        cause = error.strerror
    message = (
        f"could not run runtime '{runtime}': {cause}; set its path in runtime.conf or run torpor install"
    )
    sys.exit(_fail(message, parse(argv)))


def _fail(message: str, call: Call) -> int:
    """Tell an error as the runtime's callers read it; the exit status."""
    from shim.log import runtime_error

    runtime_error(message, log_path=call.log, log_format=call.log_format)
    return 1


def _undo_locale_coercion() -> None:
    """In the C locale Python sets LC_CTYPE for its children; the kernel still has what the caller gave."""
    if os.environ.get("LC_CTYPE") not in ("C.UTF-8", "C.utf8", "UTF-8"):
        return
    for entry in (_read("/proc/self/environ") or b"").split(b"\0"):
        if entry.startswith(b"LC_CTYPE="):
            os.putenv(b"LC_CTYPE", entry[9:])
            return
    os.unsetenv("LC_CTYPE")


def _exists(call: Call, settings: dict[str, str], name: str) -> bool:
    """Whether torpor's state of the call's container holds `name`; "" for the state directory itself."""
    try:
        os.stat(os.path.join(container_dir(settings, call.root, call.args[0]), name))
    except (OSError, ValueError):
        return False
    return True


def _is_ours(call: Call, settings: dict[str, str]) -> bool:
    """Whether the bundle's config.json may hold an annotation that torpor acts on. Never misses one."""
    bundle = call.options.get("bundle", "")
    data = _read(os.path.join(bundle, call.options.get("config", "config.json")))
    if data is None:
        return False
    prefixes = OURS + FOREIGN if settings.get("FOREIGN") == "1" else OURS
    if settings.get("HANDLER") == "RUNSC":
        prefixes += PODS
    for prefix in prefixes:
        if prefix in data or prefix.replace(b"/", b"\\/") in data:
            return True
    if b"\\u00" not in data:
        return False
    # JSON lets any character be written as \u00XX. Encoders do so for <, > and &, which no prefix holds.
    letters = b"".join(prefixes)
    for piece in data.split(b"\\u00")[1:]:
        try:
            if int(piece[:2], 16) in letters:
                return True
        except ValueError:
            continue
    return False


def _read(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        pieces: list[bytes] = []
        while piece := os.read(descriptor, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces)
    except OSError:
        return None
    finally:
        os.close(descriptor)
