"""A real sshd on this machine, which stands for the login node of a site: its own keys, port and
environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.beds import debian
from tests.beds.debian import find

NAME = "login"  # as ssh knows the host


def install() -> str | None:
    """One line that says why this machine cannot have an sshd, or None."""
    if os.geteuid() != 0:
        return "only root may start an sshd"
    return debian.provide(("sshd", "ssh", "ssh-keygen"), ("openssh-server", "openssh-client"))


class LoginNode:
    """`environ`: of whoever logs in there, HOME aside. On `path` lies the ssh that knows the host
    as `login`."""

    def __init__(self, folder: Path, environ: Mapping[str, str]):
        self.folder = folder
        self.environ = environ
        self.path = folder / "bin"
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        for name in ("host", "user"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(argv, check=True, timeout=60)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        host = (self.folder / "host.pub").read_text().split()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host[0]} {host[1]}\n")
        settings = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "user.pub",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "SetEnv": " ".join(f'{name}="{value}"' for name, value in self.environ.items()),
        }
        self._write("sshd_config", settings)
        self._write(
            "ssh_config",
            {
                "Host": NAME,
                "HostName": "127.0.0.1",
                "Port": self.port,
                "User": "root",
                "IdentityFile": self.folder / "user",
                "UserKnownHostsFile": self.folder / "known_hosts",
                "StrictHostKeyChecking": "yes",
            },
        )
        ssh = self.path / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {find("ssh")} -F {self.folder / "ssh_config"} "$@"\n')
        ssh.chmod(0o755)
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "sshd.log").open("ab") as log:
            argv = [str(find("sshd")), "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < end and self._process.poll() is None, (
                    self.folder / "sshd.log"
                ).read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """The host is not reached any more; connections that are open stay."""
        if self._process:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def options(self) -> list[str]:
        """The words by which a job goes there, to this interpreter."""
        return [f"backend.options.ssh={NAME}", f"backend.options.ssh_python={sys.executable}"]

    def _write(self, name: str, settings: Mapping[str, object]) -> None:
        (self.folder / name).write_text(
            "".join(f"{key} {value}\n" for key, value in settings.items())
        )
