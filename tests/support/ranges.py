"""A web server on this machine that sends the files of a folder, by ranges, and fails on demand."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server:
    """What the server does and has done. address: of the folder.

    broken: how many of the next requests for content fail. fault: how they do: "503", "drop" (the connection), "cut"
    (half of the content), "slow" (half a second late). ranges: whether ranges are heard of. asked: (name, first byte,
    bytes sent) of each request for content.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        self.broken, self.fault, self.ranges = 0, "503", True
        self.asked: list[tuple[str, int, int]] = []
        self.lock = threading.Lock()

    @property
    def bytes_sent(self) -> int:
        return sum(size for _, _, size in self.asked)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of `folder` on a free port of 127.0.0.1."""
    server = Server(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(content=False)

        def do_GET(self) -> None:
            self._answer(content=True)

        def _answer(self, content: bool) -> None:
            path = server.folder / self.path.partition("?")[0].lstrip("/")
            if "secret" in self.path:
                return self._end(403)
            if path.is_dir():
                names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in sorted(path.iterdir())]
                page = "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()
                return self._end(200, page, {"Content-Type": "text/html"})
            if not path.is_file():
                return self._end(404)
            data, version = path.read_bytes(), {"ETag": f'"{path.stat().st_mtime_ns}"'}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if server.ranges else None
            first, last = (int(wanted[1]), min(int(wanted[2]), len(data) - 1)) if wanted else (0, len(data) - 1)
            body, status = data[first : last + 1], 206 if wanted else 200
            if wanted:
                version["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            if content and self._fault(path.name, first, body, status, version):
                return
            self._end(status, body if content else b"", version, len(body))
            if content:
                server.asked.append((path.name, first, len(body)))

        def _fault(self, name: str, first: int, body: bytes, status: int, headers: dict[str, str]) -> bool:
            """Fails where it is this request's turn; whether the request is done with."""
            with server.lock:
                if not server.broken:
                    return False
                server.broken -= 1
            server.asked.append((name, first, 0))
            if server.fault == "slow":
                time.sleep(0.5)
                return False
            self.close_connection = True
            if server.fault == "503":
                self._end(503)
            elif server.fault == "cut":
                self._end(status, body[: len(body) // 2], headers, len(body))
            return True

        def _end(
            self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, size: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if size is None else size))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        server.address = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
