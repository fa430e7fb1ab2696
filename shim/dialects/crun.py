"""crun's command line: which options each verb knows, and how glibc's argp reads them.

Imported only when the node's runtime is crun.
"""

DEFAULT_ROOT = "/run/crun"

_HELP = "help|? usage"

# One word an option: "name|short" and how its value is written: "=" text, "?" an optional one, nothing: none.
GLOBAL = (
    "debug cgroup-manager= log= log-format= log-level= root= rootless= systemd-cgroup "
    + _HELP
    + " version|v|V"
)

_CREATE = "bundle|b= console-socket= config|f= no-new-keyring no-pivot no-subreaper pid-file= preserve-fds="

VERBS = {
    "create": _CREATE,
    "run": _CREATE + " detach|d keep",
    "start": "",
    "state": "all|a regex|r",
    "kill": "all|a regex|r",
    "delete": "force|f regex|r",
    "pause": "",
    "resume": "",
    "ps": "format|f=",
    "exec": (
        "apparmor= cgroup= console-socket= cwd= cap|c= detach|d env|e= no-new-privs pid-file= preserve-fds="
        " process-label= process|p= tty|t? user|u="
    ),
    "checkpoint": (
        "ext-unix-sk file-locks image-path= leave-running manage-cgroups-mode= network-lock= parent-path="
        " pre-dump shell-job tcp-established work-path="
    ),
    "restore": (
        "bundle|b= console-socket= detach|d ext-unix-sk file-locks image-path= lsm-mount-context="
        " lsm-profile= manage-cgroups-mode= network-lock= pid-file= shell-job tcp-close tcp-established"
        " work-path="
    ),
    "features": "",
}

# Every verb knows these as well.
COMMON = " help|? usage"


def scan_global(
    words: list[str], table: dict[str, tuple[str, str]]
) -> tuple[list[tuple[str, str]], int, str]:
    """Reads the options before the verb.

    Returns (pairs of option and value, number of words read, what is wrong or "").
    """
    options, rest, problem = _options(words, table, in_order=True)
    return options, len(words) - len(rest), problem


def scan_verb(
    verb: str, words: list[str], table: dict[str, tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[str], str]:
    """Reads the words after the verb.

    Returns (pairs of option and value, positionals, what is wrong or ""). What is wrong does not end the
    reading: known options are found all the same.
    """
    return _options(words, table, in_order=verb in ("exec", "run"))


def _options(
    words: list[str], table: dict[str, tuple[str, str]], in_order: bool
) -> tuple[list[tuple[str, str]], list[str], str]:
    """GNU getopt: long options may be cut short, short ones joined, and stand after positionals."""
    options: list[tuple[str, str]] = []
    rest: list[str] = []
    problem = ""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            rest += words[index:]
            break
        if word[:1] != "-" or word == "-":
            if in_order:
                rest += words[index - 1 :]
                break
            rest.append(word)
            continue
        if word[:2] == "--":
            name, equals, value = word[2:].partition("=")
            entries: list[tuple[tuple[str, str] | None, str | None]] = [
                (_long(name, table), value if equals else None)
            ]
        else:
            entries = _cluster(word[1:], table)
        for entry, attached in entries:
            if entry is None:
                problem = problem or "unknown option " + word
                continue
            canonical, kind = entry
            if kind == "=" and attached is None:
                if index == len(words):
                    problem = problem or "option needs an argument: " + canonical
                    continue
                attached = words[index]
                index += 1
            elif kind == "" and attached is not None:
                problem = problem or "no value allowed in " + word
            options.append((canonical, attached or ""))
    return options, rest, problem


def _long(name: str, table: dict[str, tuple[str, str]]) -> tuple[str, str] | None:
    """The table's entry for a long option or an unambiguous start of one, else None."""
    if len(name) > 1 and name in table:
        return table[name]
    found = {entry for full, entry in table.items() if len(full) > 1 and full.startswith(name)}
    return found.pop() if len(found) == 1 else None


def _cluster(
    letters: str, table: dict[str, tuple[str, str]]
) -> list[tuple[tuple[str, str] | None, str | None]]:
    """The entries of joined short options; the first that takes a value takes the rest of the word."""
    entries: list[tuple[tuple[str, str] | None, str | None]] = []
    for index, letter in enumerate(letters):
        entry = table.get(letter)
        if entry is not None and entry[1]:
            entries.append((entry, letters[index + 1 :] or None))
            break
        entries.append((entry, None))
    return entries
