# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
A Hub on this machine: as much of the Hub's HTTP API as `huggingface_hub` speaks to push, tag and load models.

Repositories live in memory and keep their history. A commit is one step: it names files whose contents have arrived,
or it is refused. `fail` makes requests go wrong on their way.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


TOKEN = "hf_of_the_owner"
OWNER = "user"
LFS_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")
REPO_ID = re.compile(r"([\w.-]+/)?[\w.-]+")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


@dataclass
class Commit:
    """Files by path, and the message they came with."""

    sha: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        identity = f"{len(self.commits)} {branch} {message} {sorted(files)}"
        commit = Commit(hashlib.sha1(identity.encode()).hexdigest(), message, files)
        self.commits[commit.sha] = commit
        self.refs[branch] = commit.sha
        return commit

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Fault:
    """What befalls `times` requests whose line matches, after `skip` that pass."""

    pattern: str
    kind: int | str
    times: int
    skip: int


class ApiError(Exception):
    def __init__(self, status: int, code: str | None = None, message: str = "", body: dict | None = None):
        super().__init__(message)
        self.status, self.code, self.message, self.body = status, code, message, body


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

    def handle_error(self, request, client_address):
        """Connections are dropped on purpose."""

    def fail(self, pattern: str, kind: int | str = "drop", times: int = 1, skip: int = 0) -> None:
        """
        Args:
            pattern (`str`): Regular expression to find in a request's `METHOD /path`.
            kind (`int` or `str`): A status to answer with, or `"drop"`: half of the body is read, then the connection
                is cut.
            times (`int`): Number of requests that fail.
            skip (`int`): Number of requests before them that do not.
        """
        self.faults.append(Fault(pattern, kind, times, skip))

    def fault(self, line: str) -> int | str | None:
        with self.lock:
            for fault in self.faults:
                if re.search(fault.pattern, line) and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                    else:
                        fault.times -= 1
                        return fault.kind
        return None

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a repository without the one that the Hub itself puts there."""
        files = self.repos[repo_id].at(revision).files
        return {path: content for path, content in files.items() if path != ".gitattributes"}

    def messages(self, repo_id: str) -> list[str]:
        return [commit.message for commit in self.repos[repo_id].commits.values()]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HubServer

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.server.requests.append(line)
        fault = self.server.fault(line)
        try:
            if fault == "drop":
                self.read_body(share=2)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.body = self.read_body()
            if fault is not None:
                raise ApiError(int(fault), message="a fault made on purpose")
            self.route(path)
        except ApiError as error:
            headers = {"X-Error-Message": error.message}
            if error.code is not None:
                headers["X-Error-Code"] = error.code
            self.answer(error.body or {"error": error.message}, error.status, headers)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def read_body(self, share: int = 1) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)) // share)

    def answer(self, content: bytes | dict | list, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError):
                self.wfile.write(body)

    # ------------------------------------------------------------------------------------------------------ access

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def owned(self) -> None:
        if not self.authorized:
            raise ApiError(401, message="Invalid username or password.")

    def repo(self, repo_id: str, write: bool = False) -> Repo:
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and not self.authorized):
            # Who may not see a repository is not told that it exists.
            raise ApiError(404 if self.authorized else 401, "RepoNotFound", "Repository not found")
        if write:
            self.owned()
        return repo

    def commit_at(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise ApiError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # ------------------------------------------------------------------------------------------------------ routes

    def route(self, path: str) -> None:
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split("|"):
                return handle(self, *match.groups())
        self.server.unknown.append(f"{self.command} {path}")
        raise ApiError(404, message="no such route")

    def whoami(self) -> None:
        self.owned()
        self.answer({"type": "user", "name": OWNER, "orgs": [], "auth": {"type": "access_token"}})

    def create_repo(self) -> None:
        self.owned()
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization'] or OWNER}/{wanted['name']}"
        reply = {"url": f"{self.server.endpoint}/{repo_id}", "id": repo_id}
        if repo_id in self.server.repos:
            raise ApiError(409, message="You already created this model repo", body=reply)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repo = self.server.repos[repo_id] = Repo(private)
        repo.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs"})
        self.answer(reply)

    def validate_yaml(self) -> None:
        errors = card_errors(json.loads(self.body)["content"])
        body = {"errors": [{"message": error} for error in errors], "warnings": []}
        self.answer(body, 400 if errors else 200)

    def preupload(self, repo_id: str, revision: str) -> None:
        files = self.commit_at(self.repo(repo_id, write=True), revision).files
        modes = []
        for entry in json.loads(self.body)["files"]:
            lfs = entry["path"].endswith(LFS_SUFFIXES)
            old = files.get(entry["path"])
            oid = None if old is None else object_id(old, lfs)
            mode = "lfs" if lfs else "regular"
            modes.append({"path": entry["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": modes})

    def lfs_batch(self, repo_id: str) -> None:
        self.repo(repo_id, write=True)
        objects = []
        for entry in json.loads(self.body)["objects"]:
            reply = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.server.objects:
                upload = {"href": f"{self.server.endpoint}/storage/{entry['oid']}"}
                verify = {"href": f"{self.server.endpoint}/{repo_id}.git/info/lfs/objects/verify"}
                reply["actions"] = {"upload": upload, "verify": verify}
            objects.append(reply)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise ApiError(400, message="the content does not match its checksum")
        self.server.objects[oid] = self.body
        self.answer(b"")

    def lfs_verify(self, repo_id: str) -> None:
        entry = json.loads(self.body)
        if len(self.server.objects.get(entry["oid"], b"")) != entry["size"]:
            raise ApiError(404, message="object not found")
        self.answer({})

    def lfs_download(self, oid: str) -> None:
        self.send_file(self.server.objects[oid], {"ETag": f'"{oid}"'})

    def commit(self, repo_id: str, branch: str) -> None:
        repo = self.repo(repo_id, write=True)
        lines = [json.loads(line) for line in self.body.splitlines()]
        message = lines[0]["value"]["summary"]
        with self.server.lock:
            if branch not in repo.refs:
                raise ApiError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
            files = dict(repo.at(branch).files)
            for key, value in ((line["key"], line["value"]) for line in lines[1:]):
                path = value["path"]
                if key == "file":
                    files[path] = base64.b64decode(value["content"])
                elif key == "lfsFile" and value["oid"] in self.server.objects:
                    files[path] = self.server.objects[value["oid"]]
                elif key == "lfsFile":
                    raise ApiError(400, message=f"{path} points to an object that was not uploaded")
                else:
                    prefix = path if key == "deletedFile" else path.rstrip("/") + "/"
                    files = {name: content for name, content in files.items() if not name.startswith(prefix)}
            commit = repo.commit(branch, message, files)
        url = f"{self.server.endpoint}/{repo_id}/commit/{commit.sha}"
        self.answer({"success": True, "commitOid": commit.sha, "commitUrl": url, "hookOutput": ""})

    def create_branch(self, repo_id: str, name: str) -> None:
        self.create_ref(repo_id, name, json.loads(self.body or b"{}").get("startingPoint", "main"))

    def create_tag(self, repo_id: str, revision: str) -> None:
        self.create_ref(repo_id, json.loads(self.body)["tag"], revision)

    def create_ref(self, repo_id: str, name: str, revision: str) -> None:
        repo = self.repo(repo_id, write=True)
        if name in repo.refs:
            raise ApiError(409, message="Reference already exists")
        repo.refs[name] = self.commit_at(repo, revision).sha
        self.answer({})

    def model_info(self, repo_id: str, revision: str | None = None) -> None:
        repo = self.repo(repo_id)
        commit = self.commit_at(repo, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        self.answer({"id": repo_id, "sha": commit.sha, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, repo_id: str, revision: str, folder: str | None = None) -> None:
        files = self.commit_at(self.repo(repo_id), revision).files
        prefix = f"{folder}/" if folder else ""
        entries = []
        for path, content in sorted(files.items()):
            if path.startswith(prefix):
                entry = {"type": "file", "path": path, "size": len(content), "oid": object_id(content)}
                if path.endswith(LFS_SUFFIXES):
                    entry["lfs"] = {"oid": object_id(content, lfs=True), "size": len(content), "pointerSize": 130}
                entries.append(entry)
        if folder and not entries:
            raise ApiError(404, "EntryNotFound", f"{folder} does not exist")
        self.answer(entries)

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        commit = self.commit_at(self.repo(repo_id), revision)
        headers = {"X-Repo-Commit": commit.sha}
        if path not in commit.files:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.answer(b"Entry not found", 404, headers)
        content = commit.files[path]
        oid = object_id(content, lfs=path.endswith(LFS_SUFFIXES))
        if not path.endswith(LFS_SUFFIXES):
            return self.send_file(content, {**headers, "ETag": f'"{oid}"'})
        # Large files come from another host, which gets no token.
        location = f"http://localhost:{self.server.server_port}/storage/{oid}"
        headers |= {"Location": location, "X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        self.answer(b"", 302, headers)

    def send_file(self, content: bytes, headers: dict[str, str]) -> None:
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if requested is None:
            return self.answer(content, headers={**headers, "Accept-Ranges": "bytes"})
        start, end = int(requested[1]), int(requested[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self.answer(content[start : end + 1], 206, headers)


ROUTES = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create_repo),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", "/api/models/([^/]+/[^/]+)/preupload/(.+)", Handler.preupload),
    ("POST", "/api/models/([^/]+/[^/]+)/commit/(.+)", Handler.commit),
    ("POST", "/api/models/([^/]+/[^/]+)/branch/(.+)", Handler.create_branch),
    ("POST", "/api/models/([^/]+/[^/]+)/tag/(.+)", Handler.create_tag),
    ("GET", "/api/models/([^/]+/[^/]+)", Handler.model_info),
    ("GET", "/api/models/([^/]+/[^/]+)/revision/(.+)", Handler.model_info),
    ("GET", "/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", Handler.tree),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/verify", Handler.lfs_verify),
    ("PUT", "/storage/([0-9a-f]{64})", Handler.lfs_upload),
    ("GET|HEAD", "/storage/([0-9a-f]{64})", Handler.lfs_download),
    ("GET|HEAD", "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Handler.resolve),
]


def object_id(content: bytes, lfs: bool = False) -> str:
    """The checksum of a file's content, or git's name of a small file."""
    return (
        hashlib.sha256(content).hexdigest() if lfs else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )


def card_errors(content: str) -> list[str]:
    """The Hub's objections to the metadata of a model card."""
    match = FRONT_MATTER.match(content)
    if match is None:
        return []
    try:
        data = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"YAML: {error}"]
    errors = [
        f'"{key}" must be a string' for key in ("library_name", "pipeline_tag") if not is_text(data.get(key, "x"))
    ]
    tags = data.get("tags", [])
    if not (isinstance(tags, list) and all(map(is_text, tags))):
        errors.append('"tags" must be an array of strings')
    for key in ("base_model", "datasets"):
        names = data.get(key, [])
        for name in names if isinstance(names, list) else [names]:
            if not (is_text(name) and REPO_ID.fullmatch(name)):
                errors.append(f'"{key}" with value {name!r} is not valid')
    for model in data.get("model-index", []):
        if not is_text(model.get("name")) or not isinstance(model.get("results"), list):
            errors.append('"model-index" needs "name" and "results"')
            continue
        for result in model["results"]:
            dataset = result.get("dataset", {})
            if not is_text(result.get("task", {}).get("type")):
                errors.append('"task.type" is required')
            if not (is_text(dataset.get("type")) and is_text(dataset.get("name"))):
                errors.append('"dataset.type" and "dataset.name" are required')
            for metric in result.get("metrics", []):
                # The value passes through JSON, which has no NaN.
                if not is_text(metric.get("type")) or not is_value(metric.get("value")):
                    errors.append(f"metric {metric} needs a type and a value")
    return errors


def is_text(value) -> bool:
    return isinstance(value, str) and value != ""


def is_value(value) -> bool:
    return is_text(value) or (isinstance(value, (int, float)) and value - value == 0)
