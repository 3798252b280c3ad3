"""A stand-in for ``vllm serve`` on CPUs: the routes, JSON and order of calls on which TRL's client relies.

It generates random words of the model's vocabulary. The weights that it gets are only hashed. On stdout it writes a
line of JSON for each event: ``ready``, ``weights`` (with the hash of each tensor), ``generation``, ``holding`` (see
``--hold``), ``answered``, ``interrupted``.
"""

import argparse
import hashlib
import json
import math
import os
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def report(event, **fields):
    print(json.dumps({"event": event, "time": time.time(), **fields}), flush=True)


class Refused(Exception):
    """A request that vLLM would not accept."""


class Engine:
    """The model: its vocabulary, and what it has received from the trainer."""

    def __init__(self, options):
        self.options = options
        words = json.loads((Path(options.model) / "tokenizer.json").read_text())["model"]["vocab"]
        self.tokens = sorted(number for word, number in words.items() if not word.startswith("<"))
        self.random = random.Random(0)
        self.trainer = None
        self.is_updating = False
        self.updates = self.generations = 0
        self.lock = threading.Lock()

    def models(self, body):
        return {"object": "list", "data": [{"id": self.options.model, "object": "model"}]}

    def info(self, body):
        transfer = self.options.weight_transfer_config
        config = {"weight_transfer_config": transfer, "model_config": {"logprobs_mode": self.options.logprobs_mode}}
        return {"vllm_config": config}

    def world_size(self, body):
        return {"world_size": 1}

    def meet_trainer(self, body):
        info = body["init_info"]
        if self.trainer is not None or (info["rank_offset"], info["world_size"], info["packed"]) != (1, 2, True):
            raise Refused(f"unexpected group: {info}")
        address = info["master_address"], info["master_port"]
        for _ in range(300):  # the trainer may not listen yet
            try:
                self.trainer = socket.create_connection(address).makefile("rb")
                return {"message": "Weight transfer initialized"}
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise Refused(f"no trainer at {address}")

    def start_update(self, body):
        if self.is_updating or self.trainer is None:
            raise Refused("an update has been started, or there is no trainer")
        self.is_updating = True
        return {"message": "Weight update started"}

    def update(self, body):
        if not self.is_updating:
            raise Refused("no update has been started")
        info = body["update_info"]
        hashes = {}
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            content = self.trainer.read(BYTES[dtype] * math.prod(shape))
            hashes[name] = hashlib.sha256(content).hexdigest()
        self.updates += 1
        report("weights", hashes=hashes)
        return {"message": "Weights updated"}

    def finish_update(self, body):
        if not self.is_updating:
            raise Refused("no update has been started")
        self.is_updating = False
        return {"message": "Weight update finished"}

    def reset_prefix_cache(self, body):
        return {"success": True}

    def complete(self, body):
        if body["model"] != self.options.model or self.is_updating:
            raise Refused(f"unexpected request for {body['model']}")
        with self.lock:
            self.generations += 1
            number = self.generations
        report("generation", number=number, updates=self.updates)
        held, released = self.options.hold or (0, "")
        if number == int(held) and not os.path.exists(released):
            report("holding", number=number)
            limit = time.monotonic() + 300
            while not os.path.exists(released) and time.monotonic() < limit:
                time.sleep(0.05)
        choices = [self.choice(prompt, body["max_tokens"]) for prompt in body["prompt"] for _ in range(body["n"])]
        report("answered", number=number)
        return {"object": "text_completion", "model": self.options.model, "choices": choices}

    def choice(self, prompt, max_tokens):
        tokens = self.random.choices(self.tokens, k=self.random.randint(1, max_tokens))
        names = [f"token_id:{token}" for token in tokens]
        chance = -math.log(len(self.tokens))
        logprobs = {
            "tokens": names,
            "token_logprobs": [chance] * len(names),
            "top_logprobs": [{name: chance} for name in names],
        }
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs, "text": ""}

    def routes(self):
        found = {
            ("GET", "/health"): lambda body: None,
            ("GET", "/v1/models"): self.models,
            ("POST", "/v1/completions"): self.complete,
        }
        if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
            return found
        return found | {
            ("GET", "/server_info"): self.info,
            ("GET", "/get_world_size"): self.world_size,
            ("POST", "/init_weight_transfer_engine"): self.meet_trainer,
            ("POST", "/start_weight_update"): self.start_update,
            ("POST", "/update_weights"): self.update,
            ("POST", "/finish_weight_update"): self.finish_update,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
        }


parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ignored: one process stands for all workers")
parser.add_argument("--weight-transfer-config", type=json.loads)
parser.add_argument("--logprobs-mode", default="raw_logprobs")
parser.add_argument("--hold", nargs=2, metavar=("NUMBER", "FILE"), help="answer this generation when the file exists")
options = parser.parse_args()
engine = Engine(options)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    routes = engine.routes()

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.routes.get((self.command, self.path.partition("?")[0]))
        if answer is None:
            return self.reply(404, {"detail": "Not Found"})
        try:
            return self.reply(200, answer(json.loads(content or b"{}")))
        except Refused as refusal:
            return self.reply(400, {"detail": str(refusal)})

    do_POST = do_GET

    def reply(self, status, answer):
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        pass


host = os.environ["HPCACCEL_NODES_VLLM"].split(",")[int(os.environ["HPCACCEL_COMPONENT_PROCESS"])]
server = ThreadingHTTPServer((host, options.port), Handler)
server.daemon_threads = True
report("ready", host=host)
try:
    server.serve_forever()
except KeyboardInterrupt:
    report("interrupted")
