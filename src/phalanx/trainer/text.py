"""Text: what `phalanx generate` asks for, and how one process, or each of several, answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.weights import open_weights
from phalanx.data.detokenize import Detokenizer
from phalanx.data.tokenizer import find_tokenizer, read_tokenizer
from phalanx.plan.plan import Plan
from phalanx.rundir import RunDir
from phalanx.trainer.generate import Generator, greedy, sampler
from phalanx.trainer.world import join


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How to continue `text`, whose ids are `prompt`, with the weights at `path`: up to `max_tokens` tokens, ending
    before one of `ends`. At temperature 0 the likeliest token is taken, else see `generate.sampler`. `tokenizer` is a
    name that `find_tokenizer` knows."""

    path: str
    tokenizer: str
    text: str
    prompt: tuple[int, ...]
    ends: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read what `write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**(values | {name: tuple(values[name]) for name in ("prompt", "ends")}))


def answer(request: Request, generator: Generator, say: Callable[[str], None]) -> None:
    """Say the text and what follows it, token by token as far as they make whole characters, and end the line."""
    draws = sampler(request.temperature, request.top_k, request.top_p, request.seed) if request.temperature else greedy
    text = Detokenizer(read_tokenizer(find_tokenizer(request.tokenizer)), request.prompt)
    say(request.text)
    for token in generator.generate(request.prompt, request.max_tokens, draws, request.ends):
        say(text.add(token))
    say(text.end() + "\n")


def work(plan: Plan, run_dir: RunDir) -> None:
    """Be one rank of those that answer together; rank 0 speaks."""
    request = Request.read(run_dir.request)
    world = join(plan, run_dir)
    generator = Generator(open_weights(Path(request.path)), plan.layout, world.coord, world.comm, world.device)
    answer(request, generator, say if world.rank == 0 else lambda text: None)
    world.close()


def say(text: str) -> None:
    """Print, at once, without ending the line."""
    sys.stdout.write(text)
    sys.stdout.flush()
