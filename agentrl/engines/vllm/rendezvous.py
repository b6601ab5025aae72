"""The place where a trainer and a server's workers meet, for vLLM's backend nccl: an address here, and a port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from agentrl.errors import UserError


@dataclass(frozen=True)
class Rendezvous:
    """The settings of it.

    Args:
        address: of this machine, as the servers reach it; None: that of the route to each server.
        ports: the first and the last one that may be taken; None: any free one.
    """

    address: str | None = None
    ports: tuple[int, int] | None = None

    @contextmanager
    def reserve(self, url: str) -> Iterator[tuple[str, int]]:
        """Reserve an address and a port for a server until the block ends; vLLM listens there meanwhile.

        The port is bound all the time, and not listened on: no other program gets it, and vLLM's own socket does.

        Raises:
            UserError: no port is free, or the address is none of this machine.
        """
        address = self.address or _find_route(url)
        with socket.socket() as holder:
            self._bind(holder, address)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM's has; after the bind, for others
            yield address, holder.getsockname()[1]

    def _bind(self, holder: socket.socket, address: str) -> None:
        first, last = self.ports or (0, 0)
        for port in range(first, last + 1):
            try:
                holder.bind((address, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    setting = f"engine.master_address {address}" if self.address else address
                    raise UserError(f"{setting} is no address of this machine ({error.strerror or error})") from None
            else:
                return
        raise UserError(
            f"engine.port_range {first}-{last} has no free port; give a longer one: one a server, and spare"
        )


ANYWHERE = Rendezvous()


def build_rendezvous(address: str | None, ports: str | None) -> Rendezvous:
    """Build it from its settings: an address, and ports such as ``29600-29699``."""
    first, _, last = (ports or "").partition("-")
    return Rendezvous(address, (int(first), int(last)) if ports else None)


def _find_route(url: str) -> str:
    """Find this machine's address on the way to a server. Raises UserError: there is no way."""
    server = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((server.hostname, server.port or 80))
        except OSError as error:
            raise UserError(
                f"there is no route to {url} ({error.strerror or error}); engine.master_address says how it reaches us"
            ) from None
        return str(route.getsockname()[0])
