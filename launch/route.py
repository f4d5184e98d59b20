"""Print the address and the network interface by which this host reaches another: route.py HOST PORT"""

import ipaddress
import socket
import sys

import psutil


def main(host: str, port: int) -> None:
    try:
        family, kind, _, _, endpoint = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(endpoint)  # chooses the route; a datagram socket sends nothing by it
            address = probe.getsockname()[0]
    except OSError as error:
        sys.exit(f"error: the head '{host}' cannot be reached from here: {error.strerror}; give another --head")
    if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        sys.exit(
            f"error: '{host}' means {address} on this host, where no other can reach it; give --head as others see it"
        )
    print(address, interface_of(address))


def interface_of(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    raise AssertionError(f"no interface has the address {address} that the system chose")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
