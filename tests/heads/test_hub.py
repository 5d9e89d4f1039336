"""The Hub, played by a small server on loopback that speaks the few endpoints that its client uses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants

from headstart.heads import HEADS, DraftHead, MedusaHead, TargetInfo
from headstart.heads.card import Listing
from headstart.heads.checkpoint import HeadFacts, build_head, load_head, publishable, save_head
from headstart.heads.hub import local_folder, push_folder

INFO = TargetInfo(
    "some/target", 16, 40, 12, 24, 4, 2, 4, "silu", 1e-6, 512, {"rope_type": "default", "rope_theta": 1e4}
)


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
            if asked.get("visibility") == "private":
                self.server.private.add(repo)
            self.answer({"url": f"{self.server.url}/{repo}"}, 409 if known else 200)
        elif self.path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] > 2000 else "regular", "shouldIgnore": False}
                for f in json.loads(data)["files"]
            ]
            self.answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(data)["objects"]
            upload = [
                {**each, "actions": {"upload": {"href": f"{self.server.url}/blob/{each['oid']}"}}} for each in objects
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
        found = (match or resolve or [None, None])[1]
        if found not in self.server.repos or (found in self.server.private and "Authorization" not in self.headers):
            self.answer({"error": "Repository Not Found"}, 404, X_Error_Code="RepoNotFound")
            return
        files, commits = self.server.repos[found], self.server.commits[found]
        if match and match[3] not in ("", "main", *commits):
            self.answer({"error": "Revision Not Found"}, 404, X_Error_Code="RevisionNotFound")
        elif match and match[2] == "/tree/":
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self.answer(listed)
        elif match:
            self.answer({"id": found, "sha": commits[-1], "siblings": [{"rfilename": name} for name in files]})
        elif resolve and resolve[3] in files:
            data = files[resolve[3]]
            start = int(re.match(r"bytes=(\d+)", self.headers.get("Range") or "bytes=0")[1])  # type: ignore[index]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.answer(data[start:], 206 if start else 200, ETag=etag, X_Repo_Commit=commits[-1])
        else:
            self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def made(kind: str, folder: Path, **options: Any) -> tuple[DraftHead, Path]:
    torch.manual_seed(0)
    head = build_head(kind, options, INFO)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    save_head(head, folder, HeadFacts(origin={"dtype": "float32"}))
    return head, folder


def same(found: DraftHead, head: DraftHead) -> bool:
    ours, theirs = head.state_dict(), found.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", HEADS)
def test_a_pushed_head_comes_back_by_its_id(hub: Hub, kind: str, tmp_path: Path) -> None:
    head, folder = made(kind, tmp_path / "head")
    url = push_folder(folder, "me/head", token="hf_x")
    assert url == f"{hub.url}/me/head/commit/{hub.commits['me/head'][-1]}"
    assert "custom_generate/generate.py" in hub.repos["me/head"]
    found, facts = load_head("me/head", INFO, cache_dir=tmp_path / "other cache")
    assert same(found, head) and facts.origin == {"dtype": "float32"}
    old = load_head("me/head", revision=hub.commits["me/head"][-1])[0]
    assert same(old, head)


def test_the_names_of_the_hubs_own_mixin(hub: Hub, tmp_path: Path) -> None:
    head, _ = made("eagle", tmp_path / "head")
    head.facts = HeadFacts(tree="chain:3")
    assert hub.url in head.push_to_hub("me/head", token="hf_x", private=True)
    found = DraftHead.from_pretrained("me/head", token="hf_x", cache_dir=tmp_path / "cache 2")
    assert same(found, head) and found.facts == head.facts
    found.save_pretrained(tmp_path / "copy")
    assert same(type(head).from_pretrained(tmp_path / "copy"), head)
    with pytest.raises(ValueError, match="holds a EagleHead, not a MedusaHead"):
        MedusaHead.from_pretrained(tmp_path / "copy")
    found.facts = HeadFacts(adapted=True)
    with pytest.raises(ValueError, match="drafts for a model with an adapter"):
        found.save_pretrained(tmp_path / "other")


def test_what_is_in_the_cache_is_enough_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, folder = made("medusa", tmp_path / "head")
    push_folder(folder, "me/head", token="hf_x")
    load_head("me/head")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.trouble = lambda handler: pytest.fail("asked the Hub")
    assert same(load_head("me/head")[0], head)
    with pytest.raises(ValueError, match="nor in the cache, nor can the Hub be asked"):
        load_head("me/other")


def test_a_private_repository_needs_a_token(hub: Hub, tmp_path: Path) -> None:
    head, folder = made("medusa", tmp_path / "head")
    push_folder(folder, "me/head", private=True, token="hf_x")
    assert hub.private == {"me/head"}
    with pytest.raises(ValueError, match=r"no head at 'me/head': neither a folder nor a repository .* give a token"):
        load_head("me/head")
    assert same(load_head("me/head", token="hf_x")[0], head)


def test_what_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no head at 'me/nothing': neither a folder nor a repository"):
        load_head("me/nothing")
    push_folder(made("medusa", tmp_path / "head")[1], "me/head", token="hf_x")
    with pytest.raises(ValueError, match=r"no head at 'me/head' at revision 'v9': .* no such revision"):
        load_head("me/head", revision="v9")


def test_a_server_that_is_busy_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    head, folder = made("eagle", tmp_path / "head")
    seen: list[str] = []

    def busy(handler: Handler) -> bool:
        first = handler.command == "PUT" and handler.path not in seen
        seen.append(handler.path)
        if first:
            handler.answer({"error": "busy"}, 503)
        return first

    hub.trouble = busy
    push_folder(folder, "me/head", token="hf_x")
    assert same(load_head("me/head")[0], head)


def test_an_upload_that_is_cut_leaves_the_repository_as_it_was(hub: Hub, tmp_path: Path) -> None:
    first, folder = made("eagle", tmp_path / "head")
    push_folder(folder, "me/head", token="hf_x")
    before = dict(hub.repos["me/head"])
    save_head(build_head("eagle", {}, INFO), folder, HeadFacts())

    def cut(handler: Handler) -> bool:
        if handler.command == "PUT":
            handler.answer({"error": "gone"}, 403)
        return handler.command == "PUT"

    hub.trouble = cut
    with pytest.raises(ValueError, match="'me/head' cannot be pushed to"):
        push_folder(folder, "me/head", token="hf_x")
    hub.trouble = lambda handler: False
    assert hub.repos["me/head"] == before and same(load_head("me/head")[0], first)
    push_folder(folder, "me/head", token="hf_x")
    assert not same(load_head("me/head")[0], first)


def test_a_download_that_is_cut_leaves_nothing_that_is_taken_for_a_head(hub: Hub, tmp_path: Path) -> None:
    head, folder = made("eagle", tmp_path / "head")
    push_folder(folder, "me/head", token="hf_x")

    def cut(handler: Handler) -> bool:
        if handler.command == "GET" and handler.path.endswith("model.safetensors"):
            data = hub.repos["me/head"]["model.safetensors"]
            handler.answer(data[: len(data) // 2], Content_Length=str(len(data)), ETag='"x"')
            handler.close_connection = True
            return True
        return False

    hub.trouble = cut
    with pytest.raises(ValueError, match="no head at 'me/head'"):
        load_head("me/head")
    hub.trouble = lambda handler: False
    assert same(load_head("me/head")[0], head)


def test_an_id_that_is_none_is_refused_before_anything_is_asked(hub: Hub) -> None:
    hub.trouble = lambda handler: pytest.fail("asked the Hub")
    with pytest.raises(ValueError, match=r"no head at '../head': it is no folder, and no Hub id either"):
        local_folder("../head")


def test_the_published_folder_has_what_servers_look_for_and_loads_as_before(tmp_path: Path) -> None:
    head, folder = made("medusa", tmp_path / "head", lm_head="shared")
    weight_VD = torch.randn(40, 16)
    ready = tmp_path / "ready"
    publishable(folder, ready, Listing("me/head", "org/base", "mit"), {"lm_heads.0.weight": weight_VD})
    from safetensors.torch import load_file

    assert torch.equal(load_file(ready / "model.safetensors")["lm_heads.0.weight"], weight_VD)
    assert same(load_head(ready, INFO)[0], head)
    card = (ready / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "org/base" and front["base_model_relation"] == "adapter" and front["license"] == "mit"
    assert 'head="me/head"' in card and "vllm serve org/base" in card and "it has no Medusa" in card


@pytest.mark.parametrize(
    ("kind", "options", "vllm", "sglang"),
    [
        ("eagle3", {}, '"method": "eagle3", "model": "me/head", "num_speculative_tokens": 3', "EAGLE3"),
        ("eagle3", {"norm_before_fc": True}, '"method": "eagle3"', "it does not know norm_before_fc"),
        ("eagle", {"depth": 2}, '"method": "eagle", "model": "me/head", "num_speculative_tokens": 2', "has a bias"),
        ("eagle", {"fc_bias": True}, "its fc has no bias", "--speculative-algorithm EAGLE"),
        ("medusa", {}, '"method": "medusa"', "it has no Medusa"),
        ("hydra", {}, "it has no Hydra", "it has no Hydra"),
    ],
)
def test_the_card_says_how_a_server_reads_the_head_or_why_not(
    kind: str, options: dict[str, Any], vllm: str, sglang: str, tmp_path: Path
) -> None:
    _, folder = made(kind, tmp_path / "head", **options)
    publishable(folder, tmp_path / "ready", Listing("me/head"), {})
    card = (tmp_path / "ready" / "README.md").read_text(encoding="utf-8")
    first, _, second = card.partition("SGLang:")
    assert vllm in first and sglang in second
