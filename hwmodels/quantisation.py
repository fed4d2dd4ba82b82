"""How many bits a weight takes in a storage format, scales included, from the layout of its blocks.

A format stores blocks of some weights in some bytes; bits = 8 * bytes / weights. Sources of the layouts:
the K, I and legacy quants, MXFP4 and NVFP4 of ggml: ``GGML_QUANT_SIZES`` of the gguf package 0.19 (a test
compares); those of ik_llama.cpp (IQ2_K ... IQ6_K, the _KS and _KT kinds): the same table in
ikawrakow/ik_llama.cpp gguf-py/gguf/constants.py at 00ded08. The rest of the table says how it is made up.
Names are read without regard to case, with ``-`` for ``_``; ``_R4`` and ``_R8`` (rows interleaved) take the
same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from hwmodels.errors import HardwareError, figure_error

GGML_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
"""Weights and bytes of a block, as mainline ggml has it."""

IK_BLOCKS = {
    "Q6_0": (32, 26),
    "IQ1_KT": (256, 56),
    "IQ2_K": (256, 76),
    "IQ2_KS": (256, 70),
    "IQ2_KL": (256, 86),
    "IQ2_KT": (256, 68),
    "IQ3_K": (256, 110),
    "IQ3_KS": (256, 102),
    "IQ3_KT": (256, 100),
    "IQ4_K": (256, 144),
    "IQ4_KS": (256, 136),
    "IQ4_KSS": (256, 128),
    "IQ4_KT": (256, 128),
    "IQ5_K": (256, 176),
    "IQ5_KS": (256, 168),
    "IQ6_K": (256, 212),
}
"""Weights and bytes of a block of ik_llama.cpp's own formats."""

OTHER_BLOCKS = {
    "FP32": (1, 4),
    "FP16": (1, 2),
    "FP8": (1, 1),  # one scale a tensor or channel: below 0.01 bit
    "FP8_BLOCK": (128 * 128, 128 * 128 + 4),  # one fp32 scale for 128 x 128, as DeepSeek-V3's own
    "INT8": (1, 1),  # one scale a channel
    "INT4_G32": (32, 18),  # symmetric, a 16-bit scale for 32 (Kimi-K2-Thinking's own)
    "INT4_G128": (128, 66),  # symmetric, a 16-bit scale for 128
    "GPTQ_INT4": (256, 133),  # 16-bit scale and 4-bit zero for 128 weights: 4 + 20 / 128 bits
    "AWQ_INT4": (256, 133),  # the same
    "NF4": (64, 36),  # an fp32 scale for 64
}
"""Formats of other engines: weights and bytes of a block."""

FORMATS = {
    name: 8 * size / weights
    for name, (weights, size) in {**GGML_BLOCKS, **IK_BLOCKS, **OTHER_BLOCKS}.items()
}
"""Bits a weight of every format, by its name."""


def canonical(name: str) -> str:
    """Return a format's name as this file writes it: upper case, underscores, without the row count."""
    return re.sub(r"_R\d+$", "", name.strip().upper().replace("-", "_"))


def is_codebook(name: str) -> bool:
    """Tell whether a format or file type keeps indices into a codebook: IQ1 to IQ3, but not ik's IQ2_K ...

    They are looked up group by group, which costs a CPU several times what other formats do.
    """
    return re.fullmatch(r"IQ[123]_(?!K).*", canonical(name)) is not None


def format_bits(name: str) -> float:
    """Return the bits a weight of a format; raise HardwareError, with a near name, for one not known."""
    bits = FORMATS.get(canonical(name))
    if bits is None:
        raise HardwareError(f"quantisation = {name}: no such format{near_hint(name, FORMATS)}")
    return bits


def fallback(name: str, row_weights: int) -> str:
    """Return the format that llama.cpp takes in place of ``name`` for rows of that many weights.

    Rows that do not divide into the format's blocks take another format with blocks of 32, or 16 bits
    (ggml-org/llama.cpp src/llama-quant.cpp).
    """
    if row_weights % GGML_BLOCKS[name][0] == 0:
        return name
    for families, other in _FALLBACKS:
        if name in families and row_weights % GGML_BLOCKS[other][0] == 0:
            return other
    return "F16"


_FALLBACKS = (
    (("Q4_K",), "Q5_0"),
    (("Q5_K",), "Q5_1"),
    (("Q6_K",), "Q8_0"),
    (
        (
            *("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
            *("IQ3_XXS", "IQ3_S", "IQ4_XS"),
        ),
        "IQ4_NL",
    ),
)


def near_hint(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'Q4_K_M'?``, or nothing where no name is near."""
    near = get_close_matches(canonical(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_scheme(where: str, field: str, value: Any, known: Iterable[str]) -> HardwareError:
    """Return the error for a text in a field of bits that names no scheme."""
    hint = near_hint(str(value), known)
    return figure_error(
        where, field, value, f"must be a number, not str, or a quantisation scheme{hint}"
    )
