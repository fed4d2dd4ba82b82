"""Rows times an int8 matrix with one scale an output, in the way that is fastest for so many rows.

Measured on one core with AVX512-VNNI, weights [1536, 2048] (us, for 1, 4, 16 and 256 rows in bfloat16;
a bfloat16 matrix takes 549, 485, 516, 1561): mixed product 228, 373, 1473, 23702; two digits 336, 326,
491, 4788; matrix made float first 1256, 1088, 1176, 2559. With float32 rows two digits take 284, 340,
452, 4745, a float32 matrix 454, 906, 1744, 18675. Activations are never rounded to 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW_ROWS = 2
"""Up to so many bfloat16 rows the mixed product is the fastest; its time grows by row."""
MIXED_BLOCK = 64
"""The mixed product reads past the end of a matrix whose inputs are not whole blocks (of 16 on AVX512;
this leaves room for other CPUs), so it gets no such matrix."""
MANY_ROWS = 128
"""From so many bfloat16 rows on, a product of floats makes up for the time to make the matrix float."""
SMALL_MATRIX = 2**19
"""Below so many weights the operations around an integer product cost more than they save."""
_LARGEST = 127


def int8_product(
    rows: Tensor, matrix: Tensor, scale: Tensor, is_transposed: bool = False
) -> Tensor:
    """Return rows times the matrix that ``matrix`` and ``scale`` stand for, in the dtype of ``rows``.

    ``rows`` is float[n, in], ``matrix`` int8[out, in] (transposed: [in, out]), ``scale`` float32[out].
    """
    is_short = rows.dtype == torch.bfloat16
    if rows.is_cpu:
        is_whole = matrix.shape[1] % MIXED_BLOCK == 0
        if is_short and len(rows) <= FEW_ROWS and is_whole and not is_transposed:
            return torch._weight_int8pack_mm(rows, matrix, scale.to(rows.dtype))
        is_many = is_short and len(rows) >= MANY_ROWS
        if HAS_INTEGER_DOT and matrix.numel() >= SMALL_MATRIX and not is_many:
            return two_digits(rows, matrix if is_transposed else matrix.t(), scale)
    floats = matrix.to(rows.dtype)
    product = rows @ (floats if is_transposed else floats.t())
    return (product * scale).to(rows.dtype)


def two_digits(rows: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """Return rows [n, in] times an int8 matrix [in, out] by one exact product of integers.

    A row is written as s * (high + low / 254) with int8 digits, so to about 16 bits of its largest value.
    """
    exact = rows.float()
    tiny = torch.finfo(torch.float32).tiny
    unit = exact.abs().amax(1, keepdim=True).div_(_LARGEST).clamp_min_(tiny)
    exact = exact / unit
    high = exact.round()
    low = exact.sub_(high).mul_(2 * _LARGEST).round_()
    digits = torch.cat((high, low)).to(torch.int8)
    upper, lower = torch._int_mm(digits, matrix).float().chunk(2)
    return upper.add_(lower, alpha=1 / (2 * _LARGEST)).mul_(unit).mul_(scale).to(rows.dtype)


def _has_integer_dot() -> bool:
    """Tell whether the CPU multiplies int8 without saturating on the way, which older ones do."""
    is_supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(torch.backends.mkldnn.is_available() and is_supported and is_supported())


HAS_INTEGER_DOT = _has_integer_dot()
"""Whether :func:`two_digits` is exact here."""
