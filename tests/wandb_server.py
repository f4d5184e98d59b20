"""As much of a W&B server as its client needs to start a run and to upload its history."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.history: dict[str, list[dict[str, Any]]] = {}  # run id -> rows
        self.runs: list[dict[str, Any]] = []  # what clients said of their runs


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            answer = {"data": self._graphql(json.loads(body))}
        elif self.path.endswith("/file_stream"):
            rows = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            run_id = self.path.split("/")[-2]
            self.server.history.setdefault(run_id, []).extend(json.loads(row) for row in rows)
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        project = {"id": "project", "name": "binmask_dist", "entity": {"id": "entity", "name": "somebody"}}
        if "upsertBucket" in query:
            self.server.runs.append(variables)
            names = {"name": variables["name"], "displayName": variables["displayName"]}
            bucket = {"id": "run", **names, "config": "{}", "historyLineCount": 0, "tags": [], "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []}}
        return {"model": {**project, "bucket": None}}

    def log_message(self, *arguments: Any) -> None:
        pass
