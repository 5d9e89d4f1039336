"""The Hub, played by a small server on loopback that speaks the few endpoints that its client
uses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Repositories in memory; `trouble` may answer a request in the place of the server."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.commits: dict[str, list[str]] = {}
        self.trouble: Callable[[Handler], bool] = lambda handler: False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def answer(self, body: Any = b"", status: int = 200, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        data = self.body()
        if self.server.trouble(self):
            return
        if self.path == "/api/repos/create":
            asked = json.loads(data)
            repo = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            known = repo in self.server.repos
            self.server.repos.setdefault(repo, {})
            self.server.commits.setdefault(repo, [hashlib.sha1(repo.encode()).hexdigest()])
            # the client of version 1 says it so
            if asked.get("visibility") == "private" or asked.get("private"):
                self.server.private.add(repo)
            self.answer({"url": f"{self.server.url}/{repo}"}, 409 if known else 200)
        elif self.path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = json.loads(data)["files"]
            for file in files:
                file["uploadMode"] = "lfs" if file["size"] > 2000 else "regular"
                file["shouldIgnore"] = False
            self.answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.server.url}/blob/{each['oid']}"}}
            self.answer({"objects": objects}, Content_Type="application/vnd.git-lfs+json")
        elif match := re.match(r"/api/models/(.+)/commit/", self.path):
            self.commit(match[1], [json.loads(line) for line in data.splitlines()])
        else:
            self.answer({}, 404)

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        sha = hashlib.sha1(str(sorted(files.items())).encode()).hexdigest()
        self.server.commits[repo].append(sha)
        self.answer({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha})

    def do_PUT(self) -> None:
        data = self.body()
        if not self.server.trouble(self):
            self.server.blobs[self.path.removeprefix("/blob/")] = data
            self.answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def missing(self, what: str) -> None:
        self.answer({"error": what}, 404, X_Error_Code=what.replace(" ", ""))

    def do_GET(self) -> None:
        if self.server.trouble(self):
            return
        path = self.path.partition("?")[0].removeprefix("/api/models")
        _, owner, name, *rest = path.split("/")
        repo = f"{owner}/{name}"
        secret = repo in self.server.private and "Authorization" not in self.headers
        if repo not in self.server.repos or secret:
            self.missing("Repo Not Found")
            return
        files = self.server.repos[repo]
        commits = self.server.commits[repo]
        match rest:
            case ["resolve", _, *parts] if (name := "/".join(parts)) in files:
                self.send_file(files[name], commits[-1])
            case ["resolve", *_] | ["tree", _, _, *_]:
                self.missing("Entry Not Found")
            case [_, revision] if revision not in ("main", *commits):
                self.missing("Revision Not Found")
            case ["tree", _]:
                self.answer([listed(name, data) for name, data in files.items()])
            case _:
                siblings = [{"rfilename": name} for name in files]
                self.answer({"id": repo, "sha": commits[-1], "siblings": siblings})

    def send_file(self, data: bytes, commit: str) -> None:
        """The whole of a file, or what follows after a download that was cut."""
        begin = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        start = int(begin)
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self.answer(data[start:], 206 if start else 200, ETag=etag, X_Repo_Commit=commit)


def listed(name: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
