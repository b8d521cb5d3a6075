"""A stand-in for the Hugging Face hub on 127.0.0.1, for tests of downloads.

It answers what huggingface_hub asks for a model: the list of files with sizes, a file's metadata,
a file or a range of it. It announces no Xet storage, and can fail on demand.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "somebody/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the hub serves, how it fails, and what it was asked."""

    files: Mapping[str, bytes]
    endpoint: str = ""
    # Status and X-Error-Code of the answer to the list of files, instead of the list.
    refusal: tuple[int, str] | None = None
    # The connection breaks after this many bytes of the file, once.
    break_after: dict[str, int] = field(default_factory=dict[str, int])
    # File and Range header of every request for content.
    fetched: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])


class QuietServer(ThreadingHTTPServer):
    """Says nothing of a client that goes away: the tests read standard error as the command's."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve(files: Mapping[str, bytes]) -> Generator[Hub]:
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Without these each answer waits for the client's delayed acknowledgement.
        wbufsize = -1
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            _, is_file, name = path.partition(f"/{REPO}/resolve/{COMMIT}/")
            if path.startswith(f"/api/models/{REPO}/revision/"):
                self.list_files()
            elif is_file and name in hub.files:
                self.send_file(name, with_body=with_body)
            else:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

        def list_files(self) -> None:
            if hub.refusal is not None:
                status, code = hub.refusal
                self.send(status, b"", {"X-Error-Code": code} if code else {})
                return
            siblings = [{"rfilename": n, "size": len(data)} for n, data in hub.files.items()]
            body = {"id": REPO, "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def send_file(self, name: str, *, with_body: bool) -> None:
            data = hub.files[name]
            headers = {
                "X-Repo-Commit": COMMIT,
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "Accept-Ranges": "bytes",
            }
            if not with_body:
                self.send(200, data, headers, with_body=False)
                return
            wanted = self.headers.get("Range")
            hub.fetched.append((name, wanted))
            if wanted is None:
                self.send(200, data, headers, break_after=hub.break_after.pop(name, None))
                return
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self.send(206, data[first:], headers)

        def send(
            self,
            status: int,
            body: bytes,
            headers: Mapping[str, str],
            *,
            with_body: bool = True,
            break_after: int | None = None,
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body[:break_after])
            self.wfile.flush()
            if break_after is not None:
                self.close_connection = True

    server = QuietServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
