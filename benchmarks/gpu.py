"""What a machine's GPUs make of agentrl, in 20 minutes, one table: python benchmarks/gpu.py --model Qwen/Qwen3-0.6B

Each section is a process of its own with a deadline, so that one that fails, hangs or runs out of memory does not end
the others; what failed stands below the table, with its last words.

  machine     what it is, and what its products and its memory reach, which shares of peak are taken of
  losses      a step of nano on the device beside the same on the CPU: loss, gradient's norm, shared prefixes and padded
  flex        attention over a forest by flex attention beside the plain one: values, on a GPU gradients, compilations
  learner     --model's own update: tokens/s, TFLOP/s, share of the measured peak, memory beside agentrl plan's
  engine      tokens/s of the engine that --engine auto takes, logprobs beside a forward pass
  sleep       learner and vLLM on one GPU: what sleeping gives back, how long waking takes, logprobs after it
  weights     new weights by each backend (in process, memory, nccl to one and to two servers by one broadcast, nccl_m2n
              from two learner processes): seconds, are the logprobs the new ones? And with one of two servers killed?
  processes   two steps by one learner process and by several (torchrun): the same losses?
  trl         steps of --model beside TRL's (benchmarks/trl_real_model.py)

Without CUDA: --device cpu --model nano runs what a CPU can.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Lines = list[tuple[str, str, str]]  # what, the figure, and "ok", "wrong" or "" where nothing can be wrong


class LeftOut(Exception):
    """A section that this machine cannot run, and why."""


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def clock(args: argparse.Namespace, work: Callable[[], object], times: int = 3) -> float:
    """Return the least seconds of several runs, after one that is not counted."""
    taken = []
    for _ in range(times + 1):
        synchronize(args)
        begun = perf_counter()
        work()
        synchronize(args)
        taken.append(perf_counter() - begun)
    return min(taken[1:])


def verdict(*, right: bool) -> str:
    return "ok" if right else "wrong"


def measure_peak(args: argparse.Namespace) -> float:
    """Measure the machine's own products in the model's precision, TFLOP/s."""
    size, dtype = (8192, torch.bfloat16) if args.device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=args.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / clock(args, lambda: a @ b) / 1e12


def machine(args: argparse.Namespace) -> Lines:
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"a CPU, {os.cpu_count()} cores"
    data = torch.empty((1 << 30 if args.device == "cuda" else 1 << 26) // 4, device=args.device)
    moved = 2 * data.nbytes / clock(args, lambda: data.clone()) / 1e9
    memory = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB" if args.device == "cuda" else ""
    return [
        ("device", f"{name} {memory}".strip(), ""),
        ("how many", str(torch.cuda.device_count() if args.device == "cuda" else 1), ""),
        ("torch", torch.__version__, ""),
        ("products", f"{measure_peak(args):.3g} TFLOP/s", ""),
        ("copies", f"{moved:.0f} GB/s", ""),
    ]


def make_rows(count: int, prompt: int, answer: int, vocabulary: int) -> list[Any]:
    """Make rows of one prompt in groups of 4, with answers of their own."""
    from agentrl.types import Sample

    rng, rows = random.Random(0), []
    for number in range(count):
        if number % 4 == 0:
            shared = [rng.randrange(vocabulary) for _ in range(prompt)]
        own = [rng.randrange(vocabulary) for _ in range(answer)]
        mask = [0] * prompt + [1] * answer
        advantage = rng.uniform(-1, 1)
        rows.append(Sample([*shared, *own], mask, [-4.0] * len(mask), [advantage] * len(mask)))
    return rows


def build_learner(model: Any, **settings: Any) -> Any:
    from agentrl.learner.learner import Learner, LossSettings
    from agentrl.learner.optimizers import make_optimizers

    return Learner(model, make_optimizers(model, "adamw", 1e-6), LossSettings(**settings))


def losses(args: argparse.Namespace) -> Lines:
    from agentrl.models.policy import load_policy

    rows, lines = make_rows(8, 64, 48, 400), []
    reference: dict[str, float] = {}
    for device in dict.fromkeys(("cpu", args.device)):
        for packing in ("padded", "prefix"):
            model = load_policy("nano").model.to(device, torch.float32)
            found = build_learner(model, packing=packing, max_tokens_per_microbatch=512).update(rows)
            reference = reference or found
            apart = max(abs(found[n] - reference[n]) / max(abs(reference[n]), 1e-6) for n in ("loss", "grad_norm"))
            if found is not reference:
                limit = 1e-3 if device == "cuda" else 1e-4
                lines.append(
                    (f"{device}, {packing}: off the CPU's padded", f"{apart:.1e}", verdict(right=apart < limit))
                )
    return lines


def flex(args: argparse.Namespace) -> Lines:
    from agentrl.learner.prefix_tree.attention import SdpaLayout
    from agentrl.learner.prefix_tree.flex_attention import FlexLayout, pad_to_blocks
    from agentrl.learner.prefix_tree.tree import build_forest

    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    device = torch.device(args.device)
    forest = build_forest(sorted([0] * 300 + [n] * (50 * n) for n in range(1, 6)))
    count, heads, lines = len(forest.token_ids), (4, 2, 2), []
    drawn = [torch.randn(len(pad_to_blocks(forest).token_ids), h, 64) for h in heads]
    sides = []
    for layout in (SdpaLayout(forest, device), FlexLayout(forest, device)):
        given = [t[: layout.token_ids.shape[1]].to(device).requires_grad_(args.device == "cuda") for t in drawn]
        out = layout.attend(*given, 0.125, None)  # type: ignore[misc]
        if args.device == "cuda":
            out.sin()[:count].sum().backward()
        sides.append([t[:count].detach() for t in (out, *(t.grad for t in given if t.grad is not None))])
    apart = max(float((a - b).abs().max()) for a, b in zip(*sides, strict=True))
    what = "values and gradients" if args.device == "cuda" else "values"
    lines.append((f"{what}: off the plain attention", f"{apart:.1e}", verdict(right=apart < 2e-2)))
    for tokens in (8192, 32768) if args.device == "cuda" else (1024,):
        long = build_forest(sorted([1] * (tokens // 4) + [n] * (3 * tokens // 64) for n in range(2, 18)))
        lines.append(
            (
                f"mask of {tokens:,} tokens",
                f"{clock(args, lambda f=long: FlexLayout(f, device).mask(None)) * 1e3:.0f} ms",
                "",
            )
        )
        if args.device == "cuda":
            layout = FlexLayout(long, device)
            q, k, v = (
                torch.randn(layout.token_ids.shape[1], h, 128, device=device, dtype=torch.bfloat16) for h in (16, 8, 8)
            )
            took = clock(args, lambda q=q, k=k, v=v, y=layout: y.attend(q, k, v, 0.088, None))
            lines.append((f"attention of {tokens:,} tokens, 16 heads of 128", f"{took * 1e3:.1f} ms", ""))
    return lines


def learner(args: argparse.Namespace) -> Lines:
    from agentrl.models.policy import load_policy
    from agentrl.planning.shapes import build_meta_model, measure_shape
    from agentrl.planning.step_memory import measure_step
    from agentrl.planning.workload import Workload

    peak, lines = measure_peak(args), []
    for checkpointing in (True, False):
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        model = load_policy(args.model, dtype).model.to(args.device)
        shape = measure_shape(model)
        count, prompt, answer = (32, 512, 1536) if args.device == "cuda" else (4, 32, 32)
        rows = make_rows(count, prompt, answer, int(model.config.get_text_config().vocab_size) - 1)
        own = build_learner(model, gradient_checkpointing=checkpointing, max_tokens_per_microbatch=8192)
        own.update(rows)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = clock(args, lambda own=own, rows=rows: own.update(rows), times=2)
        tokens = sum(len(row.token_ids) for row in rows)
        flops = Workload(count, prompt + answer, answer).learn_flops(shape, checkpointing=checkpointing)
        flops *= (tokens - (count - count // 4) * prompt) / tokens  # what is shared goes through the model once
        kind = "checkpointed" if checkpointing else "not checkpointed"
        reached = flops / took / 1e12
        rate = f"{tokens / took:,.0f} tokens/s, {reached:.3g} TFLOP/s, {reached / peak:.0%} of peak"
        lines.append((kind, rate, ""))
        held = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, " if args.device == "cuda" else ""
        shapes = partial(build_meta_model, model.config.get_text_config(), model.dtype)
        counted = measure_step(shapes, own.settings, "adamw", rows).peak / 2**30
        lines.append((f"{kind}: most memory", f"{held}{counted:.2f} GiB by agentrl plan's count", ""))
        del own, model
    return lines


@contextmanager
def deadline_of(seconds: float) -> Iterator[Callable[[Any], Any]]:
    """Give a function that runs a coroutine, and gives up after so many seconds."""
    yield lambda work: asyncio.run(asyncio.wait_for(work, seconds))


async def sample(engine: Any, rows: int, tokens: int) -> float:
    """Sample rows at once; return tokens a second."""
    from agentrl.types import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=tokens)
    begun = perf_counter()
    turns = [engine.generate([5 + n % 40, 6, 7, 8], params, session=str(n)) for n in range(rows)]
    done = await asyncio.gather(*turns)
    return sum(len(turn.token_ids) for turn in done) / (perf_counter() - begun)


def open_auto(args: argparse.Namespace, **settings: Any) -> tuple[Any, Any]:
    """Load the policy, and build the engine that a run would take for it."""
    from agentrl.engines.factories import auto
    from agentrl.models.policy import load_policy
    from agentrl.settings.loader import build_config

    dtype = "bfloat16" if args.device == "cuda" else "float32"
    model = load_policy(args.model, dtype).model.to(args.device)
    config = build_config(
        ("gpu.py", {"env": "math-tools", "model": args.model, "engine.max_model_len": 1024, **settings})
    )
    return auto(model, config), model


def engine(args: argparse.Namespace) -> Lines:
    async def run() -> Lines:
        async with open_auto(args)[0] as made:
            await sample(made, 4, 8)
            rows, tokens = (128, 256) if args.device == "cuda" else (8, 16)
            rate = await sample(made, rows, tokens)
            mismatch = getattr(made, "mismatch", None)
        kind = type(made).__name__
        lines = [(f"{kind}, {rows} rows at once", f"{rate:,.0f} tokens/s", "")]
        return lines + ([(f"{kind}: logprobs off a forward pass", str(mismatch), "")] if mismatch else [])

    with deadline_of(400) as within:
        return within(run())  # type: ignore[no-any-return]


def change(model: Any) -> None:
    """Change every weight a little."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.02 * torch.randn_like(weight))


async def follow(made: Any, model: Any) -> tuple[float, bool]:
    """Change the policy, send it; return the seconds, and if greedy tokens are the new policy's own."""
    from agentrl.types import SamplingParams

    change(model)
    begun = perf_counter()
    await made.update_weights(model, made.version + 1)
    took = perf_counter() - begun
    ids = [5, 6, 7, 8]
    turn = await made.generate(ids, SamplingParams(temperature=1.0, max_tokens=8), session="after")
    whole = torch.tensor([[*ids, *turn.token_ids]], device=model.device)
    with torch.no_grad():
        logprobs = model(whole, use_cache=False).logits[0].float().log_softmax(-1)
    own = [float(logprobs[len(ids) - 1 + i, token]) for i, token in enumerate(turn.token_ids)]
    apart = max(abs(a - b) for a, b in zip(own, turn.logprobs, strict=True))
    return took, apart < (0.5 if model.dtype == torch.bfloat16 else 1e-2)


def sleep(args: argparse.Namespace) -> Lines:
    from agentrl.engines.vllm import launch

    if args.device != "cuda" or not launch.is_installed():
        raise LeftOut("needs CUDA and vLLM")

    async def run() -> Lines:
        made, model = open_auto(args, **{"learner.optimizer_offload": True})
        async with made:
            await sample(made, 8, 16)
            free = torch.cuda.mem_get_info()[0]
            begun = perf_counter()
            await made.sleep()
            asleep, given = perf_counter() - begun, torch.cuda.mem_get_info()[0] - free
            took, right = await follow(made, model)
            rate = await sample(made, 8, 16)
        return [
            ("vLLM's share", str(made.gpu_share), ""),
            ("asleep after", f"{asleep:.2f} s", ""),
            ("memory given back", f"{given / 2**30:.1f} GiB", verdict(right=given > 1 << 30)),
            ("awake, with new weights, after", f"{took:.2f} s", verdict(right=right)),
            ("samples again", f"{rate:,.0f} tokens/s", verdict(right=rate > 0)),
        ]

    with deadline_of(500) as within:
        return within(run())  # type: ignore[no-any-return]


def weights(args: argparse.Namespace) -> Lines:
    async def through(made: Any, model: Any, name: str) -> Lines:
        async with made:
            results = [await follow(made, model) for _ in range(3)]
        took, size = min(seconds for seconds, _ in results), sum(p.nbytes for p in model.parameters())
        right = all(right for _, right in results)
        return [
            (f"{name}: {size / 2**30:.2f} GiB", f"{took:.3f} s, {size / took / 1e9:.3g} GB/s", verdict(right=right))
        ]

    from agentrl.engines.vllm import launch

    made, model = open_auto(args)
    with deadline_of(300) as within:
        lines: Lines = within(through(made, model, f"{type(made).__name__}, in process"))
    if not launch.is_installed():
        return [*lines, ("servers: memory, nccl", "left out: vLLM is not installed", "")]
    from agentrl.engines.vllm.server_pool import ServerEngine
    from agentrl.engines.vllm.transfer_backend import has_m2n

    def one(backend: str) -> Lines:
        with serve(args, backend) as (url, _), deadline_of(300) as within:
            return within(through(ServerEngine([url], model, max_context=1024), model, f"a server, {backend}"))  # type: ignore[no-any-return]

    def two() -> Lines:
        servers = serve(args, "nccl", 1), serve(args, "nccl", 2)
        with servers[0] as (first, _), servers[1] as (second, process), deadline_of(300) as within:
            return within(through_two(ServerEngine([first, second], model, max_context=1024), process))  # type: ignore[no-any-return]

    async def through_two(made: Any, process: subprocess.Popen[str]) -> Lines:
        async with made:
            took, right = await follow(made, model)
            process.kill()
            without, still = await follow(made, model)
            down = [replica.status for replica in made.replicas if not replica.up]
        return [
            ("two servers, nccl, one broadcast", f"{took:.3f} s", verdict(right=right)),
            ("one of them killed", f"{without:.3f} s: {'; '.join(down):.80}", verdict(right=still and len(down) == 1)),
        ]

    count = torch.cuda.device_count()
    tried: dict[str, tuple[bool, Callable[[], Lines]]] = {
        "a server, memory": (True, partial(one, "memory")),
        "a server, nccl": (count > 1, partial(one, "nccl")),
        "two servers, nccl": (count > 2, two),
        "a server, nccl_m2n": (count > 2 and has_m2n(), partial(send_shards, args)),
    }
    for name, (possible, measured) in tried.items():
        try:
            lines += measured() if possible else [(name, "left out: more GPUs are needed, or nccl.m2n", "")]
        except Exception as error:  # the next backend may do
            lines.append((name, str(error).splitlines()[0][:100] if str(error) else repr(error), "wrong"))
    return lines


def send_shards(args: argparse.Namespace) -> Lines:
    """Let two learner processes on GPUs train two steps, and send each its shards to a server on a third."""
    with tempfile.TemporaryDirectory() as folder, serve(args, "nccl_m2n", 2) as (url, _):
        words = ["train", "--env", "math-tools", "--model", args.model, "--dtype", "bfloat16", "--steps", "2"]
        words += ["--engine", "server", "--engine.urls", url, "--engine.weight_transfer", "nccl_m2n"]
        words += ["--run.dir", f"{folder}/run", "--rollout.tasks_per_step", "4", "--eval.final_tasks", "2"]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "agentrl"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
        begun = perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, *words], capture_output=True, text=True, timeout=500, env=environment
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or "no word").splitlines()[-1])
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    off = [row[key] for row in rows if (key := "sampling/sampling_logp_difference/mean") in row]
    right = bool(off) and max(off) < 0.1
    return [("two learner processes, nccl_m2n, two steps", f"{perf_counter() - begun:.0f} s", verdict(right=right))]


@contextmanager
def serve(args: argparse.Namespace, backend: str, gpu: int = 1) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server of vLLM, on the second GPU or another where there is one; give its address and its process."""
    environment = dict(os.environ)
    if torch.cuda.device_count() > gpu:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    words = ["serve", "--model", args.model, "--dtype", dtype, "--backend", backend, "--max_model_len", "1024"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        url = next((word for line in process.stdout for word in line.split() if word.startswith("http")), None)
        if url is None:
            raise RuntimeError(f"agentrl serve ended with {process.wait()}")
        yield url.rstrip(".,"), process
    finally:
        process.terminate()
        process.wait(30)


def processes(args: argparse.Namespace) -> Lines:
    count = torch.cuda.device_count() if args.device == "cuda" else 2
    if count < 2:
        raise LeftOut("needs two GPUs")
    found = {}
    for number in (1, count):
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "--env", "math-tools", "--steps", "2", "--seed", "1", "--run.dir", f"{folder}/run"]
            words += ["--rollout.tasks_per_step", "8", "--rollout.group_size", "4"]
            words += ["--eval.final_tasks", "2", "--deterministic", "true", "--engine", "transformers"]
            torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(number), "-m"]
            command = [sys.executable, "-m", *(torchrun if number > 1 else []), "agentrl", *words]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=args.section_s)
            rows = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
            found[number] = [row["loss"] for row in rows if "loss" in row]
    apart = max(abs(a - b) for a, b in zip(found[1], found[count], strict=True))
    return [(f"{count} processes: losses of two steps off one's", f"{apart:.1e}", verdict(right=apart < 1e-3))]


def trl(args: argparse.Namespace) -> Lines:
    small = ["--tasks", "2", "--group-size", "4", "--max-tokens", "16", "--trl-rows", "4", "--steps", "2"]
    large = ["--tasks", "16", "--group-size", "8", "--max-tokens", "256", "--trl-rows", "16", "--steps", "4"]
    script = str(Path(__file__).parent / "trl_real_model.py")
    words = ["--model", args.model, "--device", args.device, "--json", *(large if args.device == "cuda" else small)]
    if args.device == "cuda":
        words += ["--max-tokens-per-microbatch", "8192"]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=args.section_s)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no word").splitlines()[-1])
    measured = json.loads(done.stdout.splitlines()[-1])
    lines: Lines = [
        (side, f"{m['tokens'] / m['wall']:,.0f} tokens/s, {m['wall']:.2f} s a step, {m['peak']:,.0f} MiB", "")
        for side, m in measured.items()
    ]
    ours, theirs = measured["agentrl"], measured["TRL"]
    ratio = ours["tokens"] / ours["wall"] / (theirs["tokens"] / theirs["wall"])
    return [*lines, ("agentrl / TRL", f"{ratio:.2f} x tokens/s", "")]


SECTIONS: dict[str, Callable[[argparse.Namespace], Lines]] = {
    "machine": machine,
    "losses": losses,
    "flex": flex,
    "learner": learner,
    "engine": engine,
    "sleep": sleep,
    "weights": weights,
    "processes": processes,
    "trl": trl,
}


def run_section(args: argparse.Namespace) -> None:
    """Be one section: its lines as JSON, on the last line."""
    warnings.filterwarnings("ignore")
    try:
        said = {"lines": SECTIONS[args.section](args)}
    except LeftOut as why:
        said = {"left_out": str(why)}  # type: ignore[dict-item]
    print(json.dumps(said))


def run_apart(name: str, seconds: float) -> dict[str, Any]:
    """Run a section in a process of its own, for so long at most; whatever becomes of it, say so."""
    command = [sys.executable, __file__, *sys.argv[1:], "--section", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"took over {seconds:.0f} s"}
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        words = (done.stderr.strip() or "it said nothing").splitlines()
        return {"failed": f"exit status {done.returncode}: {words[-1]}", "words": words[-30:]}
    return said


def show(results: dict[str, dict[str, Any]], title: str) -> int:
    """Print the table, and what failed; return how many did."""
    table, failed = Table(title=title), {}
    for name in ("section", "what", "figure", ""):
        table.add_column(name, overflow="fold")
    for section, said in results.items():
        for what, figure, right in said.get("lines", ()):
            table.add_row(section, what, figure, right)
            if right == "wrong":
                failed[f"{section}: {what}"] = [figure]
        if "left_out" in said:
            table.add_row(section, f"left out: {said['left_out']}", "", "")
        if "failed" in said:
            table.add_row(section, said["failed"][:200], "", "failed")
            failed[section] = said.get("words", [said["failed"]])
        table.add_section()
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print(f"{len(failed)} failed" if failed else "nothing failed", highlight=False)
    for name, words in failed.items():
        console.print(f"\n{name}\n  " + "\n  ".join(words), highlight=False, markup=False)
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="nano, a folder, a name on the hub")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections")
    parser.add_argument("--section-s", type=float, default=400.0, help="seconds that a section may take (400)")
    parser.add_argument("--section", choices=SECTIONS, help="be that section alone; for the benchmark itself")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA on this machine; what a CPU can: python benchmarks/gpu.py --device cpu --model nano")
        return 2
    if args.section:
        run_section(args)
        return 0
    results = {}
    for name in args.only:
        begun = perf_counter()
        results[name] = run_apart(name, args.section_s + 60)
        print(f"{name}: {perf_counter() - begun:.0f} s", file=sys.stderr)
    return 1 if show(results, f"{args.model} on {args.device}") else 0


if __name__ == "__main__":
    sys.exit(main())
