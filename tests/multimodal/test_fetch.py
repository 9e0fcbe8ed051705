"""Where media may come from: only what the operator allows, and never the network behind the server."""

import base64
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from minivllm.multimodal import fetch
from minivllm.multimodal.fetch import MediaConnector
from minivllm.multimodal.images import MediaError

DATA = b"bytes of a picture"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        where = {
            "/away": "http://example.org/x.png",
            "/inside": "/picture",
            "/loop": "/loop",
            "/file": "file:///etc/passwd",
            "/behind": "http://10.0.0.1/picture",
        }
        if self.path in where:
            self.send_response(302)
            self.send_header("Location", where[self.path])
            self.end_headers()
        elif self.path in ("/picture", "/large"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(DATA * (1 if self.path == "/picture" else 1000))
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                if stop.wait(0.05):
                    break
        elif self.path == "/headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for i in range(90):
                self.wfile.write(b"X-%d: y\r\n" % i)
                self.wfile.flush()
                if stop.wait(0.1):
                    break
        else:
            self.send_error(404)

    def log_message(self, *args):
        pass


stop = threading.Event()


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def connector(monkeypatch):
    """One that takes this machine for a public host."""
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    return MediaConnector(domains=["127.0.0.1"], max_bytes=1000, timeout=1.0)


def test_data_urls():
    connector = MediaConnector(max_bytes=30)
    assert connector.fetch("data:image/png;base64," + base64.b64encode(DATA).decode()) == DATA
    for url, words in (
        ("data:image/png,abc", "must have the form"),
        ("data:image/png;base64,????", "not base64"),
        ("data:image/png;base64," + "A" * 60, "more than 30 bytes"),
        ("ftp://a/b.png", "must begin with data:"),
        ("picture.png", "must begin with data:"),
    ):
        with pytest.raises(MediaError, match=words):
            connector.fetch(url)


def test_the_deadline_holds_for_headers_that_come_one_by_one(connector, url):
    begin = time.monotonic()
    with pytest.raises(MediaError, match="cannot be fetched"):
        connector.fetch(f"{url}/headers")
    assert time.monotonic() - begin < 6  # all of them take 9 seconds


def test_http_and_a_redirect_within_the_host(connector, url):
    assert connector.fetch(f"{url}/picture") == connector.fetch(f"{url}/inside") == DATA


@pytest.mark.parametrize(
    "path, words",
    [
        ("/away", "'example.org' are not allowed"),
        ("/file", "are not allowed"),
        ("/loop", "more than 3 redirects"),
        ("/large", "more than 1,000 bytes"),
        ("/slow", "too long|timed out"),
        ("/nothing", "status 404"),
    ],
)
def test_what_a_host_may_not_do(connector, url, path, words):
    with pytest.raises(MediaError, match=words):
        connector.fetch(url + path)


def test_a_redirect_to_a_private_address_is_refused_though_its_name_is_allowed(url, monkeypatch):
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    asked, connect = [], socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda at, **how: asked.append(at[0]) or connect(at, **how))
    with pytest.raises(MediaError, match="'10.0.0.1' is an address of a private network"):
        MediaConnector(domains=["127.0.0.1", "10.0.0.1"]).fetch(f"{url}/behind")
    assert asked == ["127.0.0.1"]


def test_hosts_that_were_not_named_are_not_asked(url, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: pytest.fail("a connection was made"))
    with pytest.raises(MediaError, match="--allowed-media-domains"):
        MediaConnector().fetch(f"{url}/picture")
    with pytest.raises(MediaError, match="--allowed-media-domains"):
        MediaConnector(domains=["example.org"]).fetch("http://example.org.evil.test/x")
    with pytest.raises(MediaError, match="private network"):
        MediaConnector(domains=["127.0.0.1"]).fetch(f"{url}/picture")
    for user in ("http://example.org@127.0.0.1/", "http://[::1]/", "http:///x"):
        with pytest.raises(MediaError, match="not allowed"):
            MediaConnector(domains=["example.org"]).fetch(user)


def test_a_name_with_one_private_address_is_refused(monkeypatch):
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 80)) for a in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: entries)
    with pytest.raises(MediaError, match="private network"):
        MediaConnector(domains=["example.org"]).fetch("http://example.org/")


@pytest.mark.parametrize(
    "address, public",
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False),
        ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False), ("255.255.255.255", False),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert fetch.is_public(address) is public


def test_files_of_the_folder_and_no_others(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(DATA)
    (tmp_path / "secret").write_bytes(b"secret")
    os.symlink(tmp_path / "secret", folder / "link.png")
    (folder / "large").write_bytes(b"x" * 200)
    connector = MediaConnector(local_path=str(folder), max_bytes=100)
    assert connector.fetch(f"file://{folder}/a%20b.png") == DATA
    for path in ("link.png", "../secret", "nothing", "", "%00"):
        with pytest.raises(MediaError, match="not one of the folder"):
            connector.fetch(f"file://{folder}/{path}")
    with pytest.raises(MediaError, match="more than 100 bytes"):
        connector.fetch(f"file://{folder}/large")
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        MediaConnector().fetch(f"file://{folder}/a%20b.png")
