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
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] > 2000 else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(data)["files"]
            ]
            self.answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            upload = [
                {**each, "actions": {"upload": {"href": f"{self.server.url}/blob/{each['oid']}"}}}
                for each in objects
            ]
            self.answer({"objects": upload}, Content_Type="application/vnd.git-lfs+json")
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

    def do_GET(self) -> None:
        if self.server.trouble(self):
            return
        path = self.path.partition("?")[0]
        match = re.match(r"/api/models/([^/]+/[^/]+)(/revision/|/tree/)?([^/]*)$", path)
        resolve = re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", path)
        below = re.match(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/.+$", path)
        found = (match or resolve or below or [None, None])[1]
        if found not in self.server.repos or (
            found in self.server.private and "Authorization" not in self.headers
        ):
            self.answer({"error": "Repository Not Found"}, 404, X_Error_Code="RepoNotFound")
            return
        files, commits = self.server.repos[found], self.server.commits[found]
        if match and match[3] not in ("", "main", *commits):
            self.answer({"error": "Revision Not Found"}, 404, X_Error_Code="RevisionNotFound")
        elif match and match[2] == "/tree/":
            listed = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in files.items()
            ]
            self.answer(listed)
        elif match:
            self.answer(
                {
                    "id": found,
                    "sha": commits[-1],
                    "siblings": [{"rfilename": name} for name in files],
                }
            )
        elif resolve and resolve[3] in files:
            data = files[resolve[3]]
            start = int(re.match(r"bytes=(\d+)", self.headers.get("Range") or "bytes=0")[1])  # type: ignore[index]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.answer(data[start:], 206 if start else 200, ETag=etag, X_Repo_Commit=commits[-1])
        else:
            self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
