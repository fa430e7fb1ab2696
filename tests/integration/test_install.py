"""What `torpor install` writes is understood by the callers it is for."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shim import dropins
from shim.cli.main import main
from tests.support.containers import command, tool, until

Install = Callable[..., Result]
CRI = "io.containerd.cri.v1.runtime"


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Runs `torpor install` with everything below tmp_path."""

    def run(*words: str, status: int = 0) -> Result:
        where = ["--etc", str(tmp_path / "etc"), "--bin-dir", str(tmp_path / "bin")]
        if words[1] == "containerd":
            where += ["--containerd", str(tool("containerd"))]
        result = CliRunner().invoke(main, ["install", *words, *where])
        assert result.exit_code == status, result.output
        return result

    return run


def _dump(tmp_path: Path) -> dict[str, Any]:
    config = tmp_path / "etc" / "containerd" / "config.toml"
    return tomllib.loads(command(tool("containerd"), "--config", config, "config", "dump").stdout)


def _own_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "etc" / "containerd" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.mark.engine
def test_containerd_without_a_configuration_gets_one(tmp_path: Path, install: Install) -> None:
    result = install("--caller", "containerd")
    assert "kind: RuntimeClass" in result.output
    found = _dump(tmp_path)["plugins"][CRI]["containerd"]
    assert found["default_runtime_name"] == "runc"
    torpor = found["runtimes"]["torpor"]
    assert torpor["runtime_type"] == "io.containerd.runc.v2"
    assert torpor["pod_annotations"] == ["torpor.dev/*"]
    assert torpor["container_annotations"] == ["torpor.dev/*"]
    assert torpor["options"]["BinaryName"] == str(tmp_path / "bin" / "torpor-runtime")
    assert torpor["options"]["SystemdCgroup"] is False
    launcher = command(tmp_path / "bin" / "torpor-runtime", "--version")
    assert launcher.stdout.startswith("runc version")
    assert "torpor-runsc" in found["runtimes"]


@pytest.mark.engine
def test_containerds_own_settings_stay(tmp_path: Path, install: Install) -> None:
    text = f"""
version = 3
imports = ["{tmp_path}/etc/containerd/conf.d/*.toml"]
[plugins.'{CRI}']
restrict_oom_score_adj = true
[plugins.'{CRI}'.containerd]
default_runtime_name = "other"
[plugins.'{CRI}'.containerd.runtimes.other]
runtime_type = "io.containerd.runc.v2"
[plugins.'{CRI}'.containerd.runtimes.runc.options]
SystemdCgroup = true
"""
    path = _own_config(tmp_path, text)
    install("--caller", "containerd")
    assert path.read_text() == text
    found = _dump(tmp_path)["plugins"][CRI]
    assert found["restrict_oom_score_adj"] is True
    assert found["containerd"]["default_runtime_name"] == "other"
    assert set(found["containerd"]["runtimes"]) >= {"other", "runc", "torpor"}
    # As the node's other containers: two cgroup managers on one node do not get along.
    assert found["containerd"]["runtimes"]["torpor"]["options"]["SystemdCgroup"] is True


@pytest.mark.engine
def test_a_configuration_that_does_not_import_is_left_alone(tmp_path: Path, install: Install) -> None:
    path = _own_config(tmp_path, "version = 3\n")
    result = install("--caller", "containerd")
    assert path.read_text() == "version = 3\n"
    line = dropins.containerd_imports(tmp_path / "etc" / dropins.CONTAINERD_DROPIN)
    assert line in result.output
    path.write_text(f"version = 3\n{line}\n")
    assert "torpor" in _dump(tmp_path)["plugins"][CRI]["containerd"]["runtimes"]


@pytest.mark.engine
def test_containerd_starts_with_it(tmp_path: Path, install: Install) -> None:
    _own_config(
        tmp_path,
        f"""
version = 3
root = "{tmp_path}/root"
state = "{tmp_path}/state"
imports = ["{tmp_path}/etc/containerd/conf.d/*.toml"]
[grpc]
address = "{tmp_path}/containerd.sock"
[ttrpc]
address = "{tmp_path}/containerd.sock.ttrpc"
[plugins.'io.containerd.internal.v1.opt']
path = "{tmp_path}/opt"
[plugins.'io.containerd.nri.v1.nri']
disable = true
""",
    )
    install("--caller", "containerd")
    config = tmp_path / "etc" / "containerd" / "config.toml"
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen([tool("containerd"), "--config", config], stdout=log, stderr=log)
    try:
        ctr = [tool("ctr"), "--address", tmp_path / "containerd.sock"]
        until(lambda: not command(*ctr, "version", check=False).returncode, what="containerd answers")
        columns = [line.split() for line in command(*ctr, "plugins", "ls").stdout.splitlines()]
        states = {tuple(column[:2]): column[-1] for column in columns if len(column) > 2}
        assert states[CRI.removesuffix(".runtime"), "runtime"] == "ok"
    finally:
        daemon.terminate()
        daemon.wait()


@pytest.mark.engine
def test_the_configuration_for_containerd_1_migrates_to_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dropins.containerd({"torpor": Path("/x/torpor-runtime")}, version=2, systemd_cgroup=True))
    migrated = tomllib.loads(command(tool("containerd"), "--config", path, "config", "migrate").stdout)
    torpor = migrated["plugins"][CRI]["containerd"]["runtimes"]["torpor"]
    assert torpor["options"] == {"BinaryName": "/x/torpor-runtime", "SystemdCgroup": True}
    assert torpor["pod_annotations"] == ["torpor.dev/*"]


def test_containerd_1_gets_no_drop_in_which_would_erase_its_settings(
    tmp_path: Path, install: Install
) -> None:
    old = tmp_path / "containerd-1"
    old.write_text(
        '#!/bin/sh\ncase "$*" in\n*--version) echo containerd github.com/containerd/containerd v1.7.24 x;;\n'
        "*) echo version = 2;;\nesac\n"
    )
    old.chmod(0o755)
    words = ["install", "--caller", "containerd", "--containerd", str(old), "--etc", str(tmp_path / "etc")]
    result = CliRunner().invoke(main, [*words, "--bin-dir", str(tmp_path / "bin")])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "etc" / "containerd").exists()
    assert 'plugins."io.containerd.grpc.v1.cri".containerd.runtimes.torpor' in result.output


def test_crio_gets_a_handler_and_no_annotation_that_would_stop_it(tmp_path: Path, install: Install) -> None:
    result = install("--caller", "crio")
    assert "handler: torpor\n" in result.output
    assert "wrote" in result.stderr
    assert result.stdout.startswith("\n# the RuntimeClass")
    document = tomllib.loads((tmp_path / "etc" / dropins.CRIO_DROPIN).read_text())
    handler = document["crio"]["runtime"]["runtimes"]["torpor"]
    assert handler["runtime_path"] == str(tmp_path / "bin" / "torpor-runtime")
    assert handler["runtime_type"] == "oci"
    assert "allowed_annotations" not in handler
    assert "default_runtime" not in document["crio"]["runtime"]


@pytest.mark.engine
def test_podman_finds_the_runtime_by_name(tmp_path: Path, install: Install) -> None:
    result = install("--caller", "podman")
    assert "RuntimeClass" not in result.output
    # The node's own containers.conf; the drop-in comes on top of it.
    (tmp_path / "containers.conf").write_text(
        f'[engine]\nhelper_binaries_dir = ["{tool("netavark").parent}"]\n'
    )
    environment = {
        "CONTAINERS_CONF": str(tmp_path / "containers.conf"),
        "CONTAINERS_CONF_OVERRIDE": str(tmp_path / "etc" / dropins.PODMAN_DROPIN),
        "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
    }
    storage = [
        f"--root={tmp_path}/root",
        f"--runroot={tmp_path}/run",
        f"--tmpdir={tmp_path}/tmp",
        "--storage-driver=vfs",
    ]
    seen = command(
        tool("podman"),
        *storage,
        f"--conmon={tool('conmon')}",
        "--cgroup-manager=cgroupfs",
        "--runtime=torpor",
        "info",
        "--format={{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}",
        env=environment,
    )
    assert seen.stdout.split() == ["torpor", str(tmp_path / "bin" / "torpor-runtime")]


def _tree(path: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in path.rglob("*")
        if file.is_file()
    }


def test_a_second_time_changes_nothing(tmp_path: Path, install: Install) -> None:
    install("--caller", "podman")
    before = _tree(tmp_path)
    result = install("--caller", "podman")
    assert "wrote" not in result.output
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("mode", ["--dry-run", "--print"])
def test_looking_changes_nothing(tmp_path: Path, install: Install, mode: str) -> None:
    result = install("--caller", "crio", mode)
    assert str(tmp_path / "etc" / dropins.CRIO_DROPIN) in result.output
    assert _tree(tmp_path) == {}


def test_what_an_administrator_set_stays(tmp_path: Path, install: Install) -> None:
    install("--caller", "podman")
    conf = tmp_path / "etc" / "torpor" / "runtime.conf"
    lines = [line for line in conf.read_text().splitlines() if not line.startswith(("SITE", "STATE"))]
    conf.write_text("\n".join(["# mine", "STATE=/run/elsewhere", "SITE=/gone", *lines, ""]))
    toml = conf.with_name("config.toml")
    toml.write_text('engine = "criu"\n')
    install("--caller", "podman")
    text = conf.read_text()
    assert text.startswith("# mine\nSTATE=/run/elsewhere\nSITE=/")
    assert "/gone" not in text
    assert toml.read_text() == 'engine = "criu"\n'


def test_a_file_of_somebody_else_is_not_replaced_unless_asked(tmp_path: Path, install: Install) -> None:
    path = tmp_path / "etc" / dropins.PODMAN_DROPIN
    path.parent.mkdir(parents=True)
    path.write_text("[engine] # mine\n")
    result = install("--caller", "podman", status=1)
    assert str(path) in result.output
    assert path.read_text() == "[engine] # mine\n"
    assert not (tmp_path / "bin").exists()
    install("--caller", "podman", "--force")
    assert "torpor" in path.read_text()


def test_an_installation_that_others_can_write_is_refused(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site").chmod(0o777)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "site"))
    result = install("--caller", "podman", status=1)
    assert f"others than root may write {tmp_path / 'site'}" in result.output
