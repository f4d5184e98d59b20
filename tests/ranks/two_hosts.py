"""Two hosts on one machine: network namespaces with a name and an address each, joined by a cable (a veth pair).

They need no rights where the kernel lets users make namespaces, and are gone when the processes that hold them end.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NETWORK = "192.0.2"  # set aside for examples, so nobody's own


class NoNamespaces(Exception):
    """This machine does not let us make network namespaces; the text says why."""


class Host:
    """A process that holds a namespace; `inside` makes a command run there."""

    def __init__(self, number: int, unshare: list[str]) -> None:
        self.number = number
        self.address = f"{NETWORK}.{number}"
        try:
            self.holder = subprocess.Popen([*unshare, "sleep", "infinity"], stderr=subprocess.PIPE, text=True)
        except FileNotFoundError as error:
            raise NoNamespaces(f"there is no command {error.filename}") from error
        name = Path(f"/proc/{self.holder.pid}/comm")
        while self.holder.poll() is None and name.read_text() != "sleep\n":  # the namespaces are made before it starts
            time.sleep(0.01)
        if self.holder.poll() is not None:
            raise NoNamespaces(self.holder.communicate()[1].strip())

    def inside(self, *command: str) -> list[str]:
        target = ("--target", str(self.holder.pid), "--user", "--net", "--uts")
        return ["nsenter", *target, "--preserve-credentials", "--", *command]

    def run(self, *command: str) -> str:
        try:
            return subprocess.run(self.inside(*command), check=True, capture_output=True, text=True).stdout
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"{' '.join(command)}: {error.stderr.strip()}") from error

    def bytes_sent(self) -> int:
        """Over the cable since it was laid."""
        (link,) = json.loads(self.run("ip", "-json", "-statistics", "link", "show", "dev", "cable"))
        return link["stats64"]["tx"]["bytes"]

    def close(self) -> None:
        self.holder.kill()
        self.holder.communicate()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    first = Host(1, ["unshare", "--map-root-user", "--net", "--uts"])
    try:
        second = Host(2, first.inside("unshare", "--net", "--uts"))
        try:
            first.run("ip", "link", "add", "cable", "type", "veth", "peer", "cable", "netns", str(second.holder.pid))
            for host in (first, second):
                host.run("hostname", f"host{host.number}")  # a name that nothing resolves
                host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "link", "set", "cable", "up")
            yield first, second
        finally:
            second.close()
    finally:
        first.close()
