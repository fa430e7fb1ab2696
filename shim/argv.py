"""Reads an OCI runtime's command line as the runtime itself would.

On the hot path: imports sys and os only. It never fails: what the runtime would refuse is named in
`Call.problem`, so that the caller can hand the call over and let the runtime say it in its own words.
"""

import os


class Call:
    """One call of an OCI runtime.

    argv: everything after argv[0], undecodable bytes as surrogates; dialect: "runc", "crun" or "runsc";
    global_args: the raw words before the verb; global_pairs: the options in them, as `pairs`;
    root, log, log_format, systemd_cgroup, debug: the global options (root: the runtime's default if absent);
    verb: "" if there is none; args: positionals after it; pairs: its options in order, each as (long name
    without dashes, value), the value "" for a flag that is set; options: the same as a dict, the last of
    repeated ones; wants_help: --help, --usage or --version was asked for;
    problem: why the runtime would refuse this command line, "" if it would not.
    """

    __slots__ = (
        "args",
        "argv",
        "debug",
        "dialect",
        "global_args",
        "global_pairs",
        "log",
        "log_format",
        "options",
        "pairs",
        "problem",
        "root",
        "systemd_cgroup",
        "verb",
        "wants_help",
    )

    argv: list[str]
    dialect: str
    global_args: list[str]
    global_pairs: list[tuple[str, str]]
    root: str
    log: str
    log_format: str
    systemd_cgroup: bool
    debug: bool
    verb: str
    pairs: list[tuple[str, str]]
    options: dict[str, str]
    args: list[str]
    wants_help: bool
    problem: str


_HELP = ("help", "usage", "version")


def parse(argv: list[str], dialect: str = "runc") -> Call:
    """Reads `argv` (without argv[0]) in the grammar of `dialect`: "runc", "crun", or "runsc".

    For "runsc" too the grammar is runc's, since that is what its callers speak.
    """
    if dialect == "crun":
        from shim.dialects import crun as grammar
    else:
        from shim.dialects import runc as grammar

    call = Call()
    call.argv = argv
    call.dialect = dialect
    pairs, used, problem = grammar.scan_global(argv, _table(grammar.GLOBAL))
    options = dict(pairs)
    call.global_pairs = pairs
    call.global_args = argv[:used]
    call.root = options.get("root") or _default_root("" if dialect == "runsc" else grammar.DEFAULT_ROOT)
    call.log = options.get("log", "")
    call.log_format = options.get("log-format", "text")
    call.systemd_cgroup = "systemd-cgroup" in options
    call.debug = "debug" in options
    call.wants_help = any(name in options for name in _HELP)
    call.verb = ""
    call.pairs = []
    call.options = {}
    call.args = []
    call.problem = problem
    if problem or used == len(argv):
        return call

    call.verb = argv[used]
    words = argv[used + 1 :]
    names = grammar.VERBS.get(call.verb)
    if names is None:
        call.args = words
        return call
    call.pairs, call.args, call.problem = grammar.scan_verb(call.verb, words, _table(names + grammar.COMMON))
    call.options = dict(call.pairs)
    call.wants_help = call.wants_help or any(name in call.options for name in _HELP)
    return call


def _table(names: str) -> dict[str, tuple[str, str]]:
    """From "bundle|b= no-pivot" to a dict from each spelling to (long name, kind of value)."""
    table: dict[str, tuple[str, str]] = {}
    for word in names.split():
        kind = word[-1] if word[-1] in "=#?" and word[-2:] != "|?" else ""
        spellings = word.removesuffix(kind).split("|")
        for spelling in spellings:
            table[spelling] = (spellings[0], kind)
    return table


def _default_root(path: str) -> str:
    if not path:  # runsc's, whoever runs it
        return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or "/var/run", "runsc")
    if os.geteuid() != 0 and os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(os.environ["XDG_RUNTIME_DIR"], os.path.basename(path))
    return path
