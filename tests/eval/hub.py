"""A Hugging Face hub of one process: folders served by the protocol that its own libraries speak."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" * 6 + "0123"
ROUTES = {
    "about": re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/revision/[^/]+)?"),
    "listing": re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?"),
    "file": re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)"),
}


@contextmanager
def serving(root):
    """Serve root/datasets/OWNER/NAME and root/models/OWNER/NAME; yields the address for HF_ENDPOINT."""
    handler = type("Handler", (_Handler,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(self.path.split("?")[0])
        for name, route in ROUTES.items():
            if (found := route.fullmatch(path)) and getattr(self, name)(*found.groups()):
                return
        self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def about(self, kind, repo):
        folder = self.root / kind / repo
        files = [{"rfilename": str(file.relative_to(folder))} for file in folder.rglob("*") if file.is_file()]
        return folder.is_dir() and self.answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode())

    def listing(self, kind, repo, below):
        folder = self.root / kind / repo
        here = folder / (below or "")
        found = sorted(here.rglob("*") if "recursive=true" in self.path.lower() else here.glob("*"))
        entries = [
            {"path": str(x.relative_to(folder)), "type": "directory", "oid": COMMIT, "size": 0}
            if x.is_dir()
            else {"path": str(x.relative_to(folder)), "type": "file", "oid": _tag(x), "size": x.stat().st_size}
            for x in found
        ]
        return here.is_dir() and self.answer(json.dumps(entries).encode())

    def file(self, kind, repo, name):
        file = self.root / (kind or "models") / repo / name
        return file.is_file() and self.answer(file.read_bytes(), headers={"ETag": f'"{_tag(file)}"'})

    def answer(self, body, status=200, headers=None):
        self.send_response(status)
        sent = {"X-Repo-Commit": COMMIT, "Content-Length": len(body), "Content-Type": "application/json"}
        for key, value in {**sent, **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True


def _tag(file):
    return hashlib.sha1(file.read_bytes()).hexdigest()
