"""runc's command line: which options each verb knows, and how Go's flag package and urfave/cli read them.

On the hot path: imports nothing.
"""

DEFAULT_ROOT = "/run/runc"

# One word an option: "name|short" and how its value is written: "=" text, "#" an integer, nothing: a boolean.
# The tables are the union of runc 1.0 to 1.3 and of what its callers send on the verbs torpor serves itself.
GLOBAL = "debug log= log-format= root= systemd-cgroup rootless= criu= cgroup-manager= help|h version|v"

_CREATE = "bundle|b= console-socket= pidfd-socket= pid-file= no-pivot no-new-keyring preserve-fds#"

VERBS = {
    "create": _CREATE,
    "run": _CREATE + " detach|d keep no-subreaper",
    "start": "",
    "state": "",
    "kill": "all|a",
    "delete": "force|f",
    "pause": "",
    "resume": "",
    "ps": "format|f=",
    "exec": (
        "console-socket= pidfd-socket= cwd= env|e= tty|t user|u= additional-gids|g= process|p= detach|d"
        " pid-file= process-label= apparmor= no-new-privs cap|c= preserve-fds# cgroup= ignore-paused"
        " no-subreaper"
    ),
    "checkpoint": (
        "image-path= work-path= parent-path= leave-running tcp-established tcp-skip-in-flight link-remap"
        " ext-unix-sk shell-job lazy-pages status-fd# page-server= file-locks pre-dump manage-cgroups-mode="
        " empty-ns= auto-dedup"
    ),
    # parent-path and page-server come from go-runc's shared options; conmon adds no-new-keyring; tcp-close
    # and network-lock are crun's. runc refuses these, but torpor serves the verb.
    "restore": (
        "console-socket= image-path= work-path= parent-path= page-server= tcp-established tcp-close"
        " network-lock= ext-unix-sk shell-job file-locks manage-cgroups-mode= bundle|b= detach|d pid-file="
        " no-subreaper no-pivot no-new-keyring preserve-fds# empty-ns= auto-dedup lazy-pages lsm-profile="
        " lsm-mount-context="
    ),
    "features": "",
}

# Every verb knows these as well.
COMMON = " help|h"

# Verbs whose arguments are not sorted: an option after the first positional belongs to the command in it.
_IN_ORDER = ("exec", "ps", "run")

_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_FALSE = ("0", "f", "F", "false", "FALSE", "False")


def scan_global(
    words: list[str], table: dict[str, tuple[str, str]]
) -> tuple[list[tuple[str, str]], int, str]:
    """Reads the options before the verb.

    Returns (pairs of option and value, number of words read, what is wrong or "").
    """
    return _flags(words, table)


def scan_verb(
    verb: str, words: list[str], table: dict[str, tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[str], str]:
    """Reads the words after the verb.

    Returns (pairs of option and value, positionals, what is wrong or ""). What is wrong does not end the
    reading: known options are found all the same.
    """
    if verb not in _IN_ORDER:
        words = _sorted(words, table)
    options, used, problem = _flags(words, table)
    return options, words[used:], problem


def _sorted(words: list[str], table: dict[str, tuple[str, str]]) -> list[str]:
    """Options first, as urfave/cli sorts them: any word after an option without "=" may be its value."""
    options: list[str] = []
    rest: list[str] = []
    value_next = False
    for index, word in enumerate(words):
        known = _name(word) in table
        if value_next and not known:
            value_next = False
            options.append(word)
        elif word == "--":
            options.append(word)  # here, so that nothing after it is read as an option
            rest += words[index + 1 :]
            break
        elif known:
            options.append(word)
            value_next = "=" not in word
        else:
            rest.append(word)
    return options + rest


def _name(word: str) -> str:
    """The option's name in "--name=value" or "-name"; "" when the word is no option."""
    if word[:1] != "-" or word in ("-", "--"):
        return ""
    word = word[2:] if word[:2] == "--" else word[1:]
    return word.partition("=")[0]


def _flags(words: list[str], table: dict[str, tuple[str, str]]) -> tuple[list[tuple[str, str]], int, str]:
    """Go's flag package: one or two dashes, "=value" or the next word, until a positional or "--"."""
    options: list[tuple[str, str]] = []
    spelled: dict[str, str] = {}
    problem = ""
    index = 0
    count = len(words)
    while index < count:
        word = words[index]
        if word[:1] != "-" or word == "-":
            break
        index += 1
        if word == "--":
            break
        name, equals, value = (word[2:] if word[:2] == "--" else word[1:]).partition("=")
        entry = table.get(name)
        if entry is None:
            problem = problem or "unknown option " + word
            continue
        canonical, kind = entry
        if spelled.setdefault(canonical, name) != name:
            problem = problem or "two forms of option " + canonical
        if kind == "":
            if not equals or value in _TRUE:
                options.append((canonical, ""))
            elif value in _FALSE:
                options = [pair for pair in options if pair[0] != canonical]
            else:
                problem = problem or "no boolean in " + word
            continue
        if not equals:
            if index == count:
                problem = problem or "option needs an argument: " + name
                break
            value = words[index]
            index += 1
        if kind == "#" and not _is_integer(value):
            problem = problem or "no integer for option " + name
        options.append((canonical, value))
    return options, index, problem


def _is_integer(text: str) -> bool:
    try:
        int(text, 0)
    except ValueError:
        return text.isdecimal()
    return text == text.strip()
