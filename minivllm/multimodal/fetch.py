"""Media from data, http and file URLs, within what the operator allows."""

# Generated from nbs/multimodal/fetch.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from minivllm.multimodal.images import MediaError

MAX_REDIRECTS = 3


def is_public(address: str) -> bool:
    """Whether an address belongs to the open network, and not to this machine or the network around it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    tunnels = ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")  # addresses that stand for IPv4 ones
    if found.version == 6 and any(found in ipaddress.ip_network(net) for net in tunnels):
        return False
    return found.is_global and not found.is_multicast


@dataclass(frozen=True)
class MediaConnector:
    """Fetches media by URL.

    Args:
        domains: hosts that may be asked, by name, subdomains not included.
        local_path: folder whose files may be read; None for none.
        max_bytes: largest file.
        timeout: seconds for one file, redirects included.
    """

    domains: Sequence[str] = ()
    local_path: str | None = None
    max_bytes: int = 16 << 20
    timeout: float = 10.0

    def fetch(self, url: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            MediaError: it is not allowed, too large, too slow, or not there; says which, and what would allow it.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return self._data(url)
        if scheme == "file":
            return self._file(url)
        if scheme not in ("http", "https"):
            raise MediaError(f"a media URL must begin with data:, http:, https: or file:, got {url[:40]!r}")
        deadline = time.monotonic() + self.timeout
        try:
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._get(url, deadline)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError(f"{urlsplit(url).hostname}: the picture cannot be fetched: {error}") from None
        raise MediaError(f"more than {MAX_REDIRECTS} redirects")

    def _data(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise MediaError("a data: URL must have the form data:image/png;base64,...")
        if len(body) * 3 // 4 > self.max_bytes + 2:
            raise MediaError(f"the picture has more than {self.max_bytes:,} bytes")
        try:
            return base64.b64decode(unquote(body), validate=True)
        except ValueError as error:
            raise MediaError(f"the data: URL is not base64: {error}") from None

    def _file(self, url: str) -> bytes:
        if self.local_path is None:
            raise MediaError("file: URLs are not allowed here (--allowed-local-media-path allows those of a folder)")
        root, parts = Path(self.local_path).resolve(), urlsplit(url)
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(root) or not path.is_file():
                raise MediaError("the file is not one of the folder that --allowed-local-media-path names")
            with open(path, "rb") as file:
                data = file.read(self.max_bytes + 1)
        except (OSError, ValueError) as error:  # what is outside and what is not there look alike
            if isinstance(error, MediaError):
                raise
            raise MediaError("the file is not one of the folder that --allowed-local-media-path names") from None
        if len(data) > self.max_bytes:
            raise MediaError(f"the picture has more than {self.max_bytes:,} bytes")
        return data

    def _get(self, url: str, deadline: float) -> bytes | str:
        """The bytes behind an http URL, or where it redirects to."""
        parts = urlsplit(url)
        host, secure = (parts.hostname or "").lower(), parts.scheme == "https"
        if parts.scheme not in ("http", "https") or host not in {name.lower() for name in self.domains}:
            raise MediaError(
                f"pictures of {host!r} are not allowed here (--allowed-media-domains names the hosts that are)"
            )
        port = parts.port or (443 if secure else 80)
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        if not addresses or not all(is_public(str(address)) for address in addresses):
            raise MediaError(f"{host!r} is an address of a private network")
        connection, watch = http.client.HTTPConnection(host, port), None
        try:
            sock = socket.create_connection((str(min(addresses, key=str)), port), timeout=_left(deadline))
            connection.sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host) if secure else sock
            watch = threading.Timer(_left(deadline), sock.shutdown, [socket.SHUT_RDWR])  # a timeout is of one read only
            watch.daemon = True
            watch.start()
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"User-Agent": "minivllm", "Accept": "image/*"})
            return self._read(connection, deadline)
        finally:
            if watch is not None:
                watch.cancel()
            connection.close()

    def _read(self, connection: http.client.HTTPConnection, deadline: float) -> bytes | str:
        connection.sock.settimeout(_left(deadline))
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return answer.headers.get("Location") or ""
        if answer.status != 200:
            raise MediaError(f"the picture cannot be fetched: status {answer.status}")
        data = bytearray()
        while piece := answer.read1(1 << 16):
            data += piece
            if len(data) > self.max_bytes:
                raise MediaError(f"the picture has more than {self.max_bytes:,} bytes")
            left = _left(deadline)
            if connection.sock is not None:
                connection.sock.settimeout(left)
        _left(deadline)  # at which the watch ends the connection, and what has come so far would look whole
        return bytes(data)


def _left(deadline: float) -> float:
    """Seconds until a deadline. Raises MediaError if it has passed."""
    if (left := deadline - time.monotonic()) <= 0:
        raise MediaError("the picture cannot be fetched: it takes too long")
    return left
