"""True τ while a run trains: checkpoints are decoded by a process of their own, the best is kept, parity is watched.

Every so many updates the checkpoint that is saved then goes to `decoder_process`, which loads it as a serving engine
would and decodes fixed prompts. Training waits for nothing: no interpreter lock, stream or hook is shared, only the
device, and not even that where one is free. Costs a second copy of the target's weights on that device.

One checkpoint is decoded at a time; of those that come meanwhile the newest waits. If decoding and the walk of the same
checkpoint disagree by more than the bound, what trains is not what serves: the run saves and ends with an error (or
says so, if the config asks for that).

If it fails: the run goes on without true τ, and one "error" event says why.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from draftsmith.decode.prompts import later_turns, read_prompts
from draftsmith.errors import UserError, reason_of
from draftsmith.observe.events import EventLog
from draftsmith.observe.summary import number
from draftsmith.pipeline.plan import Plan
from draftsmith.pipeline.topology import decoding_device
from draftsmith.training.checkpoint import checkpoint_folder

BEST = "best"
POLL_SECONDS = 0.2
CONTINUATION_TOKENS = 24  # of a plain text, which has no prompt
PROMPT_TOKENS = 512


class HeldOut:
    """See the module's docstring.

    Args:
        plan: of the run; `plan.config.decoding` says what is decoded.
        folder: of the run.
        log: takes "tau" events.
        end: called once when the run is to end.
        step: updates done at the start.

    Raises:
        UserError: there are no prompts, or the device does not exist.

    Attributes:
        failure: why the run was to end; empty if it was not.
    """

    def __init__(self, plan: Plan, folder: Path, log: EventLog, end: Callable[[], None], step: int = 0) -> None:
        self.failure = ""
        self._patience = plan.config.pipeline.hang_seconds
        self._config, self._folder, self._log, self._end = plan.config.decoding, folder, log, end
        self._last_offered = step
        self._best: tuple[float, Path] | None = self._known_best()
        self._waiting: tuple[int, Path] | None = None
        self._working: tuple[int, Path] | None = None
        self._over = self._told_too_long = False
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._unsent = [_setting(plan, log)]  # what the process reads before its first request
        self._thread = threading.Thread(target=self._work, name="held-out", daemon=True)
        self._thread.start()

    def offer(self, step: int, folder: Path, *, last: bool = False) -> None:
        """Has a checkpoint decoded if it is the first since the last multiple of `decoding.every`, or the last one."""
        every = self._config.every
        if not last and step // every <= self._last_offered // every:
            return
        with self._changed:
            if self._over or step == self._last_offered:
                return
            self._last_offered, self._waiting = step, (step, folder)
            self._changed.notify_all()

    def spared(self) -> list[Path]:
        """Checkpoints that must not be removed: the best, and those that are to be decoded."""
        with self._changed:
            jobs = [job[1] for job in (self._waiting, self._working) if job is not None]
            return [*jobs, *([self._best[1]] if self._best is not None else [])]

    def finish(self, stopped: Callable[[], bool]) -> None:
        """Waits until everything offered is decoded, or `stopped` says that nobody wants to know any more.

        A checkpoint that takes longer than the run's limit for a hang is given up, and what comes after it too.
        """
        with self._changed:
            working, since = self._working, time.monotonic()
            while not self._over and (self._waiting or self._working) and not stopped():
                self._changed.wait(POLL_SECONDS)
                if self._working is not working:
                    working, since = self._working, time.monotonic()
                elif self._patience and time.monotonic() - since > self._patience:
                    self._give_up(f"nothing came for {self._patience:.0f} s (pipeline.hang_seconds)")

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)  # until then it is in the table of processes
        self._thread.join(10.0)

    def _work(self) -> None:
        try:
            with open(self._folder / "decoder.log", "wb") as errors:
                self._serve(errors)
        except Exception as error:  # the run is worth more than its figures
            self._give_up(f"{type(error).__name__}: {error}")

    def _serve(self, errors: IO[bytes]) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._over:
                    self._changed.wait()
                if self._over:
                    return
                assert self._waiting is not None
                step, folder = self._waiting
                self._working, self._waiting = self._waiting, None
                if self._process is None:
                    self._process = _start(errors)  # known to `close` from here on
            answer = self._ask({"step": step, "folder": str(folder)})
            if answer is None:
                if not self._over:
                    self._give_up(_last_line(self._folder / "decoder.log") or "its process ended without a word")
                return
            self._tell(step, folder, answer)
            with self._changed:
                self._working = None
                self._changed.notify_all()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one request; None if the process has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        lines, self._unsent = [*self._unsent, request], []
        try:
            process.stdin.writelines(json.dumps(line) + "\n" for line in lines)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith("\n") else None

    def _tell(self, step: int, folder: Path, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._log.write("error", topic="tau", text=f"step {step} could not be decoded: {answer['error']}")
            return
        self._log.write("tau", **answer)
        if answer["too_long"] and not self._told_too_long:
            self._told_too_long = True
            text = f"{answer['too_long']} held-out prompts are not decoded: they fill the target's positions"
            self._log.write("notice", topic="tau", text=text)
        tau = number(answer["decode"])
        if tau is not None and (self._best is None or tau > self._best[0]):
            with self._changed:
                self._best = (tau, folder)
            self._point_to(folder)
        self._check_parity(answer)

    def _check_parity(self, answer: dict[str, Any]) -> None:
        decoded, walked = answer["decode_whole"], answer["walk_whole"]
        if not (math.isfinite(decoded) and math.isfinite(walked)):
            return
        apart = abs(walked - decoded) / decoded
        if apart <= self._config.bound:
            return
        text = (
            f"what trains is not what serves: at step {answer['step']} decoding reaches τ {decoded:.3f}, the training "
            f"forward over the same text {walked:.3f} ({apart:.1%} apart, {answer['agree']:.1%} of the blocks agree)"
        )
        if self._config.on_disagreement == "warn":
            self._log.write("notice", topic="parity", standing=True, text=text)
        elif not self.failure:
            self.failure = text
            self._log.write("error", topic="parity", text=text)
            self._end()

    def _point_to(self, folder: Path) -> None:
        """`checkpoints/best` leads to the best checkpoint."""
        link, aside = folder.with_name(BEST), folder.with_name(f".{BEST}.new")
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(folder.name)
            os.replace(aside, link)
        except OSError as error:
            self._log.write("notice", text=f"{link} could not be set: {reason_of(error)}")

    def _known_best(self) -> tuple[float, Path] | None:
        """The best of the run's earlier starts, if it is still there."""
        best = self._log.summary["best_tau"]
        if best is None:
            return None
        folder = checkpoint_folder(self._folder, best["step"])
        return (best["decode"], folder) if folder.is_dir() else None

    def _give_up(self, why: str) -> None:
        self._log.write("error", topic="tau", text=f"held-out prompts are not decoded any more: {why}")
        with self._changed:
            self._over, self._waiting, self._working = True, None, None
            self._changed.notify_all()


def _start(errors: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "draftsmith.pipeline.decoder_process", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which ends this one
    )


def check_decoding(plan: Plan) -> None:
    """Whether a run could decode while it trains, if it is to; what `HeldOut` would find, without a process.

    Raises:
        UserError: there are no prompts, or the device does not exist.
    """
    config = plan.config.decoding
    if config.every:
        decoding_device(config, plan.topology)
        _ = read_prompts(config.prompts) if config.prompts is not None else held_out_prompts(plan)


def _setting(plan: Plan, log: EventLog) -> dict[str, Any]:
    config = plan.config.decoding
    if config.prompts is not None:
        note = later_turns(read_prompts(config.prompts)[: config.limit], config.prompts)
        if note:
            log.write("notice", text=note)
    return {
        "target": plan.config.target.model_dump(mode="json"),
        "target_dtype": str(plan.target_dtype).removeprefix("torch."),
        "drafter_dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(decoding_device(config, plan.topology)),
        "prompts": config.prompts if config.prompts is not None else held_out_prompts(plan),
        "limit": config.limit,
        "max_new_tokens": config.max_new_tokens,
    }


def held_out_prompts(plan: Plan) -> list[list[int]]:
    """What comes before the first answer of held-out conversations, or the beginning of plain texts.

    Raises:
        UserError: there are no held-out rows to take them from.
    """
    source = plan.corpus.held_out
    if source is None:
        raise UserError("no held-out conversations to decode", where="decoding", fix="set decoding.prompts to a file")
    found: list[list[int]] = []
    for index in range(source.rows_per_epoch):
        row = source.row(index)
        for document in range(int(row.document_S.max()) + 1):
            places = (row.document_S == document).nonzero().flatten()
            tokens, taught = row.tokens_S[places], row.loss_mask_S[places].nonzero().flatten()
            length = int(taught[0]) if taught.numel() else 0
            if taught.numel() == places.numel():
                length = min(CONTINUATION_TOKENS, places.numel() // 2)
            if 0 < length <= PROMPT_TOKENS:
                found.append(tokens[:length].tolist())
            if len(found) == plan.config.decoding.limit:
                return found
    if not found:
        raise UserError("held-out conversations hold no prompt", where="decoding", fix="set decoding.prompts to a file")
    return found


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""
