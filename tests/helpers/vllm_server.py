"""A server that speaks vLLM's paths for rollouts and weights, around a real model: for what a server does not survive.

It can be stopped or killed as it reaches a path, which a vLLM that takes a minute to start can be only once.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel


class FakeVLLM(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.version, self.paused, self.updating = model, "default", False, False
        self.asked: list[str] = []
        self.stop_at = self.kill_at = ""  # a path
        self.backend, self.init_infos = "memory", list[dict[str, Any]]()
        self.receive: Callable[[FakeVLLM], None] | None = None  # takes what is broadcast
        self.returns_experts, self.max_context = False, 128
        self.running = threading.Event()
        self.running.set()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None: ...

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"max_model_len": self.max_context}]}
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        if path == "/collective_rpc":
            if body["method"] == "finish_interrupted_update":
                self.updating = False
            return 200, {"results": [self.backend if body["method"] == "get_transfer_backend" else "0"]}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/init_weight_transfer_engine" and (place := body["init_info"].get("path")):
            return (200 if Path(place).read_text() == body["init_info"]["word"] else 500), {}
        elif path == "/init_weight_transfer_engine":
            self.init_infos.append(body["init_info"])
        elif path == "/start_weight_update":
            if self.updating:
                return 500, {"error": "start_weight_update called while a weight update is already active"}
            self.updating = True
        elif path == "/update_weights" and self.receive is not None:
            self.receive(self)
        elif path == "/update_weights":
            for part in body["update_info"]["paths"]:
                self.model.load_state_dict(load_file(part), strict=False)
        elif path == "/finish_weight_update":
            self.updating = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/inference/v1/generate":
            return 200, self.generate(body)
        return 200, {}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, params = list(body["token_ids"]), body["sampling_params"]
        rng = torch.Generator().manual_seed(params.get("seed") or 0)
        sampled: list[int] = []
        logprobs: list[float] = []
        with torch.no_grad():
            for _ in range(params["max_tokens"]):
                logits = self.model(input_ids=torch.tensor([ids + sampled])).logits[0, -1]
                scores = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
                token = scores.argmax() if not params["temperature"] else scores.exp().multinomial(1, generator=rng)
                sampled.append(int(token))
                logprobs.append(float(scores[int(token)]))
        spans = [{"version": self.version, "start": 0, "end": len(sampled)}]
        content = [{"logprob": p} for p in logprobs]
        choice = {"token_ids": sampled, "logprobs": {"content": content}, "weight_versions": spans}
        if self.returns_experts:
            choice["routed_experts"] = self.choose_experts(ids + sampled, params.get("routed_experts_prompt_start", 0))
        return {"choices": [choice], "usage": {"prompt_tokens_details": None}}

    @torch.no_grad()
    def choose_experts(self, ids: list[int], start: int) -> str:
        """The experts of the tokens from ``start`` on as vLLM writes them: of each layer, zeros of one without any."""
        output = self.model(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True)
        top_k = self.model.config.num_experts_per_tok
        rows = torch.zeros(len(ids) - 1, self.model.config.num_hidden_layers, top_k, dtype=torch.uint8)
        routed = [i for i, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "experts")]
        for layer, logits in zip(routed, output.router_logits, strict=True):
            rows[:, layer] = logits.topk(top_k, -1).indices.to(torch.uint8)
        with io.BytesIO() as buffer:
            np.save(buffer, rows[start:].numpy())
            return base64.b64encode(buffer.getvalue()).decode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeVLLM

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        self.server.asked.append(path)
        if path == self.server.kill_at:
            self.server.socket.close()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if path == self.server.stop_at:
            self.server.stop_at = ""
            self.server.running.clear()
        self.server.running.wait()
        with self.server.lock:
            status, answer = self.server.answer(path, body)
        text = json.dumps(answer).encode()
        with suppress(OSError):  # who asked did not wait
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def fake_vllm(model: PreTrainedModel) -> Iterator[FakeVLLM]:
    with FakeVLLM(model) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.running.set()
            server.shutdown()
            thread.join()
