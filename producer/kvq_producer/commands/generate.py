"""`kvq generate`: text after a prompt, at once where the prompt has been read before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.errors import MissingExtra
from kvq_producer import options

if TYPE_CHECKING:
    from kvq.generate.llm import LLM, StreamStats


@click.command()
@click.option("--model", "-m", required=True, help="Model folder or hub id.")
@click.option("--store", "-s", envvar="KVQ_STORE", help="The store to resume from.")
@click.option("--adapter", help="Folder of a LoRA adapter.")
@options.asked_options
@click.option("--max-tokens", "-n", default=100, show_default=True, type=click.IntRange(1))
@click.option("--temperature", "-t", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option("--seed", type=int, help="Seed of the sampler.")
@options.codecs("Use only caches of this codec (repeatable).")
@click.option("--no-reuse", is_flag=True, help="Compute the whole prompt, whatever is stored.")
@click.option("--live", is_flag=True, help="Keep layers quantized as they rest, where possible.")
@click.option("--compare-cold", is_flag=True, help="Also time the first token with nothing reused.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead.")
def generate(
    model: str,
    store: str | None,
    adapter: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    codecs: tuple[str, ...],
    no_reuse: bool,
    live: bool,
    compare_cold: bool,
    as_json: bool,
    **prompt: Any,
) -> None:
    """Generate text after a prompt, reusing what the store has of it.

    Text goes to standard output; what was reused, and how fast it was, to standard error.
    """
    from kvq_producer.asked import Asked

    given = Asked(**prompt)
    given.check()
    asked = given.form()
    llm = _open(model, store, adapter, seed)
    asked |= {"codecs": codecs or None, "temperature": temperature}
    text = ""
    for chunk in llm.stream(**asked, max_tokens=max_tokens, reuse=not no_reuse, live=live):
        text += chunk.text
        if not as_json:
            click.echo(chunk.text, nl=False)
    warm = llm.last
    assert warm is not None
    cold = _cold(llm, asked) if compare_cold else None
    if as_json:
        facts = {"text": text, **asdict(warm)}
        click.echo(json.dumps(facts | ({"cold": asdict(cold)} if cold else {}), ensure_ascii=False))
    else:
        click.echo()
        click.echo(_summary(warm, cold), err=True)


def _open(model: str, store: str | None, adapter: str | None, seed: int | None) -> LLM:
    try:
        import mlx.core as mx

        from kvq.generate.llm import open_model
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "mlx", "mlx") from error
    if seed is not None:
        mx.random.seed(seed)
    return open_model(model, Path(store) if store else None, adapter)


def _cold(llm: LLM, asked: dict[str, Any]) -> StreamStats:
    """The same prompt up to its first token, with nothing reused."""
    for _ in llm.stream(**asked, max_tokens=1, reuse=False):
        pass
    assert llm.last is not None
    return llm.last


def _summary(warm: StreamStats, cold: StreamStats | None) -> str:
    codec = f" ({warm.codec})" if warm.codec else ""
    lines = [
        f"prompt        {warm.prompt_tokens} tokens, {warm.reused_tokens} of them reused{codec}",
        f"first token   {_seconds(warm.ttft_seconds)}",
        f"generation    {warm.tokens} tokens, {warm.tokens_per_second:.1f} tokens/s",
    ]
    if cold is not None:
        ratio = cold.ttft_seconds / warm.ttft_seconds
        lines[1] = (
            f"first token   cold {_seconds(cold.ttft_seconds)}   "
            f"resumed {_seconds(warm.ttft_seconds)}   {ratio:.0f}x sooner"
        )
    if warm.reason is not None:
        lines.append(f"match         {warm.reason.message}")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
