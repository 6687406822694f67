"""Results of benchmarks as people read them, and against earlier ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictBool, TypeAdapter, ValidationError
from typing_extensions import Required, TypedDict  # pydantic wants this one before Python 3.12

from draftsmith.errors import UserError, reason_of
from draftsmith.observe.shape import Count, Positive, Quantity

SURE = 3.0  # standard errors that a difference must be beyond, where deviations are known well
TOLERATED = 0.02  # of the time; and of memory, before it is worth a word
# Normally scattered, σ is 1.4826 median deviations, and a median's standard error √(π/2)·σ/√n. Neither this nor the
# median is moved by a run out of line, as the distance from the shortest to the longest would be.
_OF_DEVIATION = 1.4826 * math.sqrt(math.pi / 2)
# By number of runs; see `sure`.
_FEW = {2: 15.3, 3: 24.8, 4: 8.0, 5: 7.9, 6: 5.5, 7: 5.5, 8: 4.6, 9: 4.7}
# What results of one shape may differ in; a change says it.
_WAYS = ("device", "torch", "attention", "target_layers", "compile_drafter", "autotune")
_MEMORY = {
    "peak_gib": "GiB at most",
    "process_gib": "GiB of this process at most",
    "step_peak_gib": "GiB at most in a step",
    "working_gib": "GiB at most beyond the weights",
}
Deviation = Annotated[Quantity, Field(ge=0)]
Runs = Annotated[Count, Field(ge=1)]
Gibibytes = Quantity | dict[str, Quantity] | None


class Earlier(TypedDict, total=False):
    """A result, as far as a later one is held against it; memory of the pipeline is by device."""

    bench: Required[str]
    shape: Required[dict[str, Any]]
    ms: Required[Positive]
    ms_min: Required[Positive]
    ms_max: Required[Positive]
    ms_deviation: Deviation | None
    runs: Runs | None
    geometry: str | None
    device: str | None
    torch: str | None
    attention: str | None
    target_layers: str | None
    compile_drafter: str | None
    autotune: StrictBool | None
    peak_gib: Gibibytes
    process_gib: Gibibytes
    step_peak_gib: Gibibytes
    working_gib: Gibibytes


_EARLIER = TypeAdapter(Earlier)


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> tuple[bool, str]:
    """(no regression, one line): slower only counts beyond 2 % and what the two medians are uncertain by.

    Raises:
        UserError: the earlier result is of another benchmark, geometry or shape.
    """
    need_same(earlier, result["bench"], result.get("geometry"), result["shape"])
    untold = [each for each in earlier["shape"] if each not in result["shape"]]
    if untold:
        raise UserError(f"the earlier shape has {', '.join(untold)}, which this one lacks", where="--against")
    before, now = float(earlier["ms"]), float(result["ms"])
    uncertain = (_uncertainty(earlier), _uncertainty(result))
    noise = max(TOLERATED * before, math.hypot(*(each or 0.0 for each in uncertain)))
    change = f"{before:.2f} ms before, {now:.2f} ms now ({100 * (now / before - 1):+.1f} %, "
    if None not in uncertain:
        change += f"noise {noise:.2f} ms)"
    else:
        whose = " and ".join(
            f"{'one run' if each.get('runs') == 1 else 'runs of unknown deviation'} {when}"
            for each, known, when in zip((earlier, result), uncertain, ("before", "now"), strict=True)
            if known is None
        )
        change += f"noise not known from {whose}: {noise:.2f} ms allowed)"
    return now - before <= noise, "; ".join([change, *_other_ways(result, earlier), *_more_memory(result, earlier)])


def need_same(earlier: dict[str, Any], bench: str, geometry: str | None, shape: dict[str, Any]) -> None:
    """Refuses an earlier result of something else.

    Args:
        earlier: by `read_result`.
        bench, geometry, shape: of the new one; of the shape what is known so far.

    Raises:
        UserError: they differ.
    """
    for what, before, now in (("benchmark", earlier["bench"], bench), ("geometry", earlier.get("geometry"), geometry)):
        if before is not None and before != now:
            raise UserError(f"the earlier {what} is {before}, not {now}", where="--against")
    known = earlier["shape"]
    other = [each for each, value in shape.items() if each not in known or known[each] != value]
    if other:
        before, now = (" ".join(f"{each}={values.get(each)}" for each in other) for values in (known, shape))
        raise UserError(f"the earlier shape is {before}, not {now}", where="--against")


def sure(runs: int) -> float:
    """Standard errors, estimated from so many runs, that a difference must be beyond.

    Chance alone is beyond them once in 741 comparisons, as a normal value is beyond three standard deviations. The
    median deviation of few runs is itself uncertain, and too small more often than not, so they have to be more than
    three. The factors are the quantile 1 - 1/741 of (median - median) / its estimated standard error over 400,000
    pairs of normal samples of equal size; from ten runs on 3·(1 + 4/n) is at most 6 % beyond it. Where five runs are
    compared with fifty, it is once in 170.
    """
    return _FEW.get(runs, SURE * (1 + 4 / runs))


def _uncertainty(result: dict[str, Any]) -> float | None:
    """What a median is uncertain by, in ms; None where that is not known: of one run, or where a result is silent."""
    deviation, runs = result.get("ms_deviation"), result.get("runs")
    if deviation is None or runs is None or runs < 2:
        return None
    return sure(int(runs)) * _OF_DEVIATION * float(deviation) / math.sqrt(float(runs))


def _other_ways(result: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """What was done otherwise, in words; and what the earlier result does not say, as those of older releases."""
    other = [f"{way} {earlier[way]}" for way in _WAYS if way in earlier and earlier[way] != result.get(way)]
    silent = [way for way in _WAYS if way not in earlier and result.get(way) is not None]
    found = [f"before: {', '.join(other)}"] if other else []
    return found + ([f"the earlier result does not say its {', '.join(silent)}"] if silent else [])


def _more_memory(result: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    found = []
    for key, words in _MEMORY.items():
        both = [_by_device(each.get(key)) for each in (earlier, result)]
        for device in both[0].keys() & both[1].keys():
            before, now = (each[device] for each in both)
            if now > (1 + TOLERATED) * before:
                found.append(f"more memory: {now:.2f} {words}{f' on {device}' if device else ''}, {before:.2f} before")
    return sorted(found)


def _by_device(memory: Any) -> dict[str, float]:
    if memory is None:
        return {}
    return memory if isinstance(memory, dict) else {"": memory}


def read_result(path: Path, part: str) -> dict[str, Any]:
    """An earlier result of this benchmark, and of it what `compare` reads; see `need_same` for its shape.

    Raises:
        UserError: there is no such file, or it is no result of this part.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _EARLIER.validate_python(content)
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), fix="write one with --json > FILE") from None
    except OSError as error:
        raise UserError(f"cannot be read: {reason_of(error)}", where=str(path)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"is not a benchmark result: {f'{field}: ' if field else ''}{first['msg']}", where=str(path)
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not a benchmark result: {error}", where=str(path)) from None
    if content["bench"] != part:
        raise UserError(f"is a result of bench {content['bench']}, not of bench {part}", where=str(path))
    return {key: value for key, value in content.items() if key in Earlier.__annotations__}


def _compiled(result: dict[str, Any]) -> bool:
    return any("compiled" in result.get(key, "") for key in ("attention", "target_layers"))


def _ceiling_of(result: dict[str, Any]) -> str:
    """The matmul ceiling; of work with several kinds of products, each one's and how much of the work is its."""
    if "products" not in result:
        return f"the matmul ceiling ({result['ceiling_tflop_per_second']:.3g})"
    return " and ".join(
        f"the {dtype} matmul ceiling ({each['ceiling_tflop_per_second']:.3g}) for {each['tflop']:.3g} TFLOP"
        for dtype, each in result["products"].items()
    )


def lines_of(result: dict[str, Any]) -> list[str]:
    """For people; of every benchmark but the pipeline's and decoding's, which have tables of their own."""
    shape = " ".join(f"{key}={value}" for key, value in result["shape"].items())
    lines = [
        f"{result['bench']}: {result['ms']:.2f} ms (min {result['ms_min']:.2f}, max {result['ms_max']:.2f}) at {shape}"
        f" ({result['geometry']})"
    ]
    if "share_of_ceiling" in result:
        lines.append(
            f"  {result['tflop_per_second']:.3g} TFLOP/s, {100 * result['share_of_ceiling']:.0f} % of "
            f"{_ceiling_of(result)}; floor {result['floor_ms']:.2f} ms"
        )
    names = {
        "real_tokens_per_second": "real tokens/s",
        **_MEMORY,
        "host_ms": "ms for the host to hand it over",
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
