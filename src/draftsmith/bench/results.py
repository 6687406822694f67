"""Results of benchmarks as people read them, and against earlier ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, reason_of

SURE = 3.0  # standard errors that a difference must be beyond
# Normally scattered, σ is 1.4826 median deviations, and a median's standard error √(π/2)·σ/√n. Neither this nor the
# median is moved by a run out of line, as the distance from the shortest to the longest would be.
_OF_DEVIATION = 1.4826 * math.sqrt(math.pi / 2)


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> tuple[bool, str]:
    """(no regression, one line): slower only counts beyond 2 % and what the two medians are uncertain by.

    Raises:
        UserError: the earlier result is of another benchmark or shape.
    """
    for what in ("bench", "geometry", "shape"):
        if earlier.get(what) is not None and result.get(what) != earlier[what]:
            raise UserError(f"the earlier {what} is {earlier[what]}, not {result.get(what)}", where="--against")
    before, now = float(earlier["ms"]), float(result["ms"])
    noise = max(0.02 * before, SURE * math.hypot(_standard_error(earlier), _standard_error(result)))
    change = f"{before:.2f} ms before, {now:.2f} ms now ({100 * (now / before - 1):+.1f} %, noise {noise:.2f} ms)"
    other = [
        earlier[what] for what in ("device", "torch", "attention") if earlier.get(what) not in (None, result.get(what))
    ]
    change += f"; before: {', '.join(other)}" if other else ""
    if earlier.get("ms_deviation") is None:
        change += "; the earlier result does not say how its runs scattered, so noise is this one's alone"
    return now - before <= noise, change


def _standard_error(result: dict[str, Any]) -> float:
    """Of the median, in ms, as if runs scattered normally; 0 where a result does not say how they did."""
    return _OF_DEVIATION * float(result.get("ms_deviation") or 0.0) / math.sqrt(float(result.get("runs") or 1))


def read_result(path: Path, part: str) -> dict[str, Any]:
    """An earlier result of this benchmark; whether its shape is the same shows once the new one is there.

    Raises:
        UserError: there is no such file, or it is no result of this part.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {key: content[key] for key in ("bench", "shape", "ms", "ms_min", "ms_max")}
        found |= {key: content.get(key) for key in ("ms_deviation", "runs", "geometry", "device", "torch", "attention")}
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix="write one with --json > FILE") from None
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"is not a benchmark result: {error}", where=str(path)) from None
    if found["bench"] != part:
        raise UserError(f"is a result of bench {found['bench']}, not of bench {part}", where=str(path))
    return found


def _compiled(result: dict[str, Any]) -> bool:
    return any("compiled" in result.get(key, "") for key in ("attention", "target_layers"))


def lines_of(result: dict[str, Any]) -> list[str]:
    """For people; of every benchmark but the pipeline's and decoding's, which have tables of their own."""
    shape = " ".join(f"{key}={value}" for key, value in result["shape"].items())
    lines = [
        f"{result['bench']}: {result['ms']:.2f} ms (min {result['ms_min']:.2f}, max {result['ms_max']:.2f}) at {shape}"
        f" ({result['geometry']})"
    ]
    if "share_of_ceiling" in result:
        lines.append(
            f"  {result['tflop_per_second']:.3g} TFLOP/s, {100 * result['share_of_ceiling']:.0f} % of the matmul "
            f"ceiling ({result['ceiling_tflop_per_second']:.3g}); floor {result['floor_ms']:.2f} ms"
        )
    names = {
        "real_tokens_per_second": "real tokens/s",
        "peak_gib": "GiB at most",
        "process_gib": "GiB of this process at most",
        "working_gib": "GiB at most beyond the weights",
        "host_ms": "ms for the host to hand it over",
        "step_peak_gib": "GiB at most in a step",
        "on_device_ms": "ms to put the masks together on the device",
        "gb_per_second": "GB/s of unavoidable traffic",
        "taught": "taught slots",
        "eager_ms": "ms with uncompiled layers",
        "cold_seconds": "s for the first one" + (", compiling included" if _compiled(result) else ""),
    }
    ways = (("attention", "attention"), ("target_layers", "layers of the target"))
    lines += [f"  {name}: {result[key]}" for key, name in ways if key in result]
    if "share_of_bandwidth" in result:
        lines.append(
            f"  {100 * result['share_of_bandwidth']:.0f} % of what a copy reaches "
            f"({result['ceiling_gb_per_second']:,.0f} GB/s); floor {result['floor_ms']:.2f} ms"
        )
    if result.get("kernels"):
        lines.append(f"  {result['kernels']}")
    if "host_waits" in result:
        waits = result["host_waits"]
        lines.append(f"  the host waits for the device: {waits[0]}" if waits else "  the host waits for nothing in it")
    if result.get("packing_reason"):
        lines.append(f"  packed rows run as {result['packing']}: {result['packing_reason']}")
    if result.get("feature_errors"):
        lines.append(f"  fp8 changes features by {', '.join(f'{error:.1%}' for error in result['feature_errors'])}")
    for key, name in names.items():
        value = result.get(key)
        if value is not None:
            lines.append(f"  {value:,.0f} {name}" if value >= 1e4 else f"  {value:,.4g} {name}")
    return lines
