"""`torpor install`: writes the launchers, torpor's settings, and the drop-in that a runtime caller needs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from shim import dropins
from shim.entry import read_settings
from shim.errors import ShimError, UsageError
from shim.launcher import MARKER, base_python, conf_text, default_settings, launcher_files, package_root
from shim.toolchain.find import find_tools, system_path

HANDLERS = {"torpor": "torpor-runtime", "torpor-runsc": "torpor-runtime-runsc"}
"""Name of the RuntimeClass to file name of the launcher."""

# What tells a file of ours: the first line of a text, or the message inside a launcher.
_MARKS = (MARKER.encode(), b"torpor-runtime: could not run runtime")

SYSTEM_ETC = Path("/etc")

_CRI = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri")


@dataclass(kw_only=True)
class Plan:
    """Files to write, in order, and what is left for a person to do.

    etc: directory of configuration, /etc. force: replace files that torpor did not write.
    """

    etc: Path
    force: bool
    files: list[tuple[Path, bytes, int]] = field(default_factory=list[tuple[Path, bytes, int]])
    kept: list[Path] = field(default_factory=list[Path])
    remarks: list[str] = field(default_factory=list[str])

    def add(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Plan a file of torpor's own. Raises UsageError if somebody else's stands in its place."""
        if path.exists() and not self.force:
            found = path.read_bytes()
            if not any(mark in found for mark in _MARKS):
                raise UsageError(
                    f"could not write {path}: torpor did not write what is there; move it away or use --force"
                )
        self.files.append((path, content, mode))

    def changed(self) -> list[tuple[Path, bytes, int]]:
        """The files that do not yet stand as planned."""
        return [
            (path, content, mode)
            for path, content, mode in self.files
            if not path.is_file() or path.read_bytes() != content or stat.S_IMODE(path.stat().st_mode) != mode
        ]

    def write(self) -> None:
        """Write what differs, each file at once. Raises ShimError."""
        for path, content, mode in self.changed():
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                temporary.write_bytes(content)
                temporary.chmod(mode)
                temporary.replace(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise ShimError(f"could not write {path}: {error.strerror}; run as root") from error


@click.command("install")
@click.option(
    "--caller",
    type=click.Choice(["containerd", "crio", "podman"]),
    required=True,
    help="Who will call torpor.",
)
@click.option("--write", is_flag=True, help="Write the files (the default).")
@click.option("--print", "show", is_flag=True, help="Print the files instead.")
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@click.option(
    "--bin-dir",
    type=click.Path(path_type=Path),
    help="Where the launchers go.  [default: bin/ of this installation]",
)
@click.option(
    "--etc",
    type=click.Path(path_type=Path, file_okay=False),
    default=SYSTEM_ETC,
    show_default=True,
    help="Where configuration goes.",
)
@click.option("--systemd-cgroup/--no-systemd-cgroup", default=None, help="[default: as containerd's runc]")
@click.option(
    "--containerd",
    "containerd_path",
    type=click.Path(path_type=Path, exists=True),
    help="The node's containerd.  [default: from PATH]",
)
@click.option("--force", is_flag=True, help="Replace files that torpor did not write.")
def command(
    caller: str,
    write: bool,
    show: bool,
    dry_run: bool,
    bin_dir: Path | None,
    etc: Path,
    systemd_cgroup: bool | None,
    containerd_path: Path | None,
    force: bool,
) -> None:
    """Make a runtime caller know torpor.

    Writes the launchers, runtime.conf and config.toml of torpor, and the caller's drop-in. torpor never
    becomes the default runtime: pods choose it by the RuntimeClass that is printed, people by --runtime.
    """
    if write + show + dry_run > 1:
        raise click.UsageError("--write, --print and --dry-run exclude each other; give one of them")
    plan = Plan(etc=etc.absolute(), force=force)
    launchers = _plan_torpor(plan, bin_dir)
    handlers = {name: launchers[file] for name, file in HANDLERS.items() if file in launchers}
    if caller == "containerd":
        _plan_containerd(plan, handlers, systemd_cgroup, containerd_path)
    elif caller == "crio":
        plan.add(plan.etc / dropins.CRIO_DROPIN, dropins.crio(handlers, monitor=_conmon()).encode())
        plan.remarks.append("let CRI-O read it: systemctl restart crio")
    else:
        plan.add(plan.etc / dropins.PODMAN_DROPIN, dropins.podman(handlers).encode())
        plan.remarks.append("try it: podman --runtime torpor run ...")
    if show:
        _print(plan)
    else:
        _apply(plan, dry_run=dry_run)
    if caller != "podman":
        click.echo(f"\n# the RuntimeClass, for kubectl apply -f -\n{dropins.runtime_classes(list(handlers))}")
    for remark in plan.remarks:
        click.echo(f"to do: {remark}", err=True)


def _plan_torpor(plan: Plan, bin_dir: Path | None) -> dict[str, Path]:
    """Launchers, runtime.conf, config.toml. Returns the launchers by file name."""
    own = Path(sys.prefix) / "etc" / "torpor" / "runtime.conf"
    conf_path = own if own.is_file() and plan.etc == SYSTEM_ETC else plan.etc / "torpor" / "runtime.conf"
    settings = {"CONFIG": str(conf_path.with_name("config.toml")), **default_settings(None)}
    found = read_settings(str(conf_path))
    # An administrator's settings stay; where this torpor's own packages are does not.
    settings = {**settings, **found, "SITE": sysconfig.get_path("purelib")}
    if not settings.get("RUNTIME"):
        raise ShimError("could not find runc on this node; run `torpor toolchain install`")
    directory = (bin_dir or Path(sys.prefix) / "bin").absolute()
    _check_owner(package_root(), Path(settings["SITE"]), base_python())
    if found:
        plan.files.append((conf_path, _merged(conf_path, settings), 0o644))
    else:
        plan.files.append((conf_path, conf_text(settings).encode(), 0o644))
    toml_path = conf_path.with_name("config.toml")
    if toml_path.exists():
        plan.kept.append(toml_path)
    else:
        plan.files.append((toml_path, dropins.CONFIG_TOML.encode(), 0o644))
    launchers = launcher_files(
        directory, python=base_python(), package_root=package_root(), settings=settings, conf_path=conf_path
    )
    for path, content in launchers.items():
        plan.add(path, content, 0o755)
    return {path.name: path for path in launchers}


def _merged(conf_path: Path, settings: dict[str, str]) -> bytes:
    """The runtime.conf that is there, with SITE as it is now and with the settings it lacks."""
    lines = conf_path.read_text(errors="surrogateescape").splitlines()
    keys = [line.partition("=")[0].strip() for line in lines]
    kept = [
        f"SITE={settings['SITE']}" if key == "SITE" else line for key, line in zip(keys, lines, strict=True)
    ]
    added = [f"{key}={value}" for key, value in sorted(settings.items()) if key not in keys]
    return "\n".join([*kept, *added, ""]).encode(errors="surrogateescape")


def _check_owner(*paths: Path) -> None:
    """Whoever can write what root's runtime runs is root. Raises ShimError."""
    for path in paths:
        for place in (path, *path.parents):
            status = place.stat()
            sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
            if status.st_uid != 0 or (status.st_mode & 0o022 and not sticky):
                raise ShimError(
                    f"could not install torpor from {path}: others than root may write {place};"
                    " install it again as root, for example into /opt/torpor"
                )


def _plan_containerd(
    plan: Plan, handlers: dict[str, Path], systemd_cgroup: bool | None, program: Path | None
) -> None:
    if program is None:
        found = shutil.which("containerd", path=system_path())
        program = Path(found) if found else find_tools().containerd
    if program is None:
        raise ShimError("could not find containerd on this node; name it with --containerd")
    main = plan.etc / dropins.CONTAINERD_MAIN
    before = _containerd_runtimes(program, main)
    if systemd_cgroup is None:
        systemd_cgroup = bool(before.get("runc", {}).get("options", {}).get("SystemdCgroup", False))
    version = 2 if _containerd_major(program) < 2 else 3
    dropin = plan.etc / dropins.CONTAINERD_DROPIN
    text = dropins.containerd(handlers, version=version, systemd_cgroup=systemd_cgroup)
    if version == 2:
        # An import replaces all that config.toml says of the CRI plugin: the drop-in would do harm.
        section = text.partition("\n\n")[2]
        if "torpor" not in before:
            plan.remarks.append(f"containerd 1.x cannot merge drop-ins; add to {main} yourself:\n\n{section}")
    else:
        plan.add(dropin, text.encode())
        if not main.exists():
            plan.add(main, dropins.containerd_main(dropin).encode())
        elif "torpor" not in before and not _imports(main, dropin):
            plan.remarks.append(
                f"let containerd read its drop-ins: in {main}, before the first [section], put\n"
                f"  {dropins.containerd_imports(dropin)}"
            )
    plan.remarks.append("let containerd read its configuration: systemctl restart containerd")


def _conmon() -> Path | None:
    found = shutil.which("conmon", path=system_path())
    return Path(found) if found else None


def _containerd_major(program: Path) -> int:
    words = _output([str(program), "--version"]).split()
    version = next((word.lstrip("v") for word in words if word.lstrip("v")[:1].isdigit()), "2")
    return int(version.partition(".")[0])


def _containerd_runtimes(program: Path, main: Path) -> dict[str, Any]:
    """The runtimes of the CRI plugin as containerd itself understands its configuration."""
    document: dict[str, Any] = tomllib.loads(_output([str(program), "--config", str(main), "config", "dump"]))
    plugins: dict[str, Any] = document.get("plugins", {})
    for name in _CRI:
        if name in plugins:
            return plugins[name].get("containerd", {}).get("runtimes", {})
    return {}


def _imports(main: Path, dropin: Path) -> bool:
    """Whether config.toml names the drop-in or its directory's files among its imports."""
    patterns: list[str] = tomllib.loads(main.read_text()).get("imports", [])
    return any(
        (main.parent / pattern).parent == dropin.parent and dropin.match(pattern) for pattern in patterns
    )


def _output(argv: list[str]) -> str:
    run = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise ShimError(f"could not run `{' '.join(argv)}`: {last}; repair containerd's configuration first")
    return run.stdout


def _print(plan: Plan) -> None:
    for path, content, mode in plan.files:
        if mode & 0o111:
            click.echo(f"# {path}: the launcher, {len(content)} bytes, mode {mode:o}\n")
        else:
            click.echo(f"# {path}\n{content.decode()}")


def _apply(plan: Plan, *, dry_run: bool) -> None:
    """Write the files and tell so on stderr: stdout is for what `kubectl apply` reads."""
    changed = {path for path, _, _ in plan.changed()}
    if not dry_run:
        plan.write()
    for path, _, _ in plan.files:
        verb = ("would write" if dry_run else "wrote") if path in changed else "unchanged"
        click.echo(f"{verb:<12}{path}", err=True)
    for path in plan.kept:
        click.echo(f"{'kept':<12}{path}", err=True)
