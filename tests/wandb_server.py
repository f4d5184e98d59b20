"""As much of a W&B server as its client needs to start a run, to upload its history, and to read it back."""

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
        self.summaries: dict[str, str] = {}  # run id -> JSON
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
            files = json.loads(body).get("files", {})
            run_id = self.path.split("/")[-2]
            rows = files.get("wandb-history.jsonl", {}).get("content", [])
            self.server.history.setdefault(run_id, []).extend(json.loads(row) for row in rows)
            for summary in files.get("wandb-summary.json", {}).get("content", []):
                self.server.summaries[run_id] = summary
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
        if "project(name" in query:
            return {"project": self._read(query, variables)}
        return {"model": {**project, "bucket": None}, "viewer": {"id": "user", "entity": "somebody", "flags": "{}"}}

    def _read(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What the public API asks for."""
        if "runs(" in query:
            edges = [{"node": self._run(run_id), "cursor": run_id} for run_id in self.server.history]
            page = {"endCursor": None, "hasNextPage": False}
            return {"internalId": "1", "runCount": len(edges), "runs": {"edges": edges, "pageInfo": page}}
        rows = self.server.history[variables.get("runName") or variables.get("run") or variables["name"]]
        if "historyKeys" in query:
            return {"run": {"historyKeys": {"lastStep": rows[-1]["_step"]}}}
        if "parquetHistory" in query:
            return {"run": {"parquetHistory": {"parquetUrls": [], "liveData": [{"_step": r["_step"]} for r in rows]}}}
        page = [row for row in rows if variables["minStep"] <= row["_step"] < variables["maxStep"]]
        return {"run": {"history": [json.dumps(row) for row in page]}}

    def _run(self, run_id: str) -> dict[str, Any]:
        said = [run for run in self.server.runs if run["name"] == run_id]
        config = next((run["config"] for run in reversed(said) if run.get("config")), "{}")
        return {
            "id": run_id,
            "projectId": 1,
            "name": run_id,
            "displayName": said[-1]["displayName"],
            "state": "finished",
            "config": config,
            "summaryMetrics": self.server.summaries.get(run_id, "{}"),
            "systemMetrics": "{}",
            "historyLineCount": len(self.server.history[run_id]),
            "tags": [],
            "user": {"name": "somebody", "username": "somebody"},
            "createdAt": "2026-01-01T00:00:00",
        }

    def log_message(self, *arguments: Any) -> None:
        pass
