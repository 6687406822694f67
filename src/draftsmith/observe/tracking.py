"""Trackers as readers of events: TensorBoard, Weights & Biases, MLflow, trackio behind one small interface.

A `Tracker` takes scalars and lines of text; `Tracking` is the listener that turns events into them. A tracker that
talks to a server does so in a thread of its own (`Background`), so that a slow network never holds a step: what does
not fit into the queue is dropped and counted. A tracker that raises is dropped and named in a notice; the run goes on.

Names are "train/loss", "held_out/tau_proxy", "train_accept/slot_03", "held_out/decode"; the step is the update.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from draftsmith.errors import UserError
from draftsmith.observe.summary import Event, number

SCALARS = {
    "step": ("train", ("loss", "tau_proxy", "lr", "grad_norm", "tokens_per_second", "data_wait")),
    "eval": ("held_out", ("loss", "tau_proxy")),
    "tau": ("held_out", ("decode", "walk")),
}
QUEUE = 10_000
CLOSE_SECONDS = 20.0
PROJECT = "draftsmith"


class Tracker(Protocol):
    """What a tracker has to offer. Calls come one at a time, with steps rising except after a resume."""

    def scalars(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Values of one update; `seconds` is the wall clock."""

    def text(self, kind: str, text: str) -> None:
        """A notice or an error."""

    def close(self) -> None:
        """Writes out what is held back."""


class Tracking:
    """A listener that feeds a tracker, which is made when the first scalar arrives.

    Args:
        make: gets the first step and returns the tracker.
    """

    def __init__(self, make: Callable[[int], Tracker]) -> None:
        self._make = make
        self._tracker: Tracker | None = None

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind in SCALARS:
            step = int(event["step"])
            values = scalars_of(event)
            if values:
                if self._tracker is None:
                    self._tracker = self._make(step)
                self._tracker.scalars(step, values, float(event.get("time") or time.time()))
        elif kind in ("notice", "error") and self._tracker is not None:
            self._tracker.text(kind, str(event.get("text")))
        elif kind == "end":
            self.close()

    def close(self) -> None:
        """Closes the tracker; a later scalar makes a new one."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None


def scalars_of(event: Event) -> dict[str, float]:
    """What an event says in numbers, by the names that trackers use; values that are not finite are left out."""
    prefix, names = SCALARS[event["kind"]]
    values = {f"{prefix}/{name}": number(event.get(name)) for name in names}
    for slot, share in enumerate(event.get("accept_by_slot") or (), start=1):
        values[f"{prefix}_accept/slot_{slot:02d}"] = number(share)
    return {name: value for name, value in values.items() if value is not None}


class Background:
    """A listener that hands events to another one in a thread of its own; see the module's docstring.

    Args:
        name: of the tracker, for messages.
        listener: runs in the thread.
        tell: takes a line for people.
    """

    def __init__(self, name: str, listener: Tracking, tell: Callable[[str], None]) -> None:
        self._name, self._listener, self._tell = name, listener, tell
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # bounded here, so that the end always fits
        self._dropped = 0
        self._failure: str | None = None  # what the thread died of, until it is told
        self._over = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._tell_failure()
        if self._over or event["kind"] not in (*SCALARS, "notice", "error", "end"):
            return
        ended = event["kind"] == "end"
        if ended or self._events.qsize() < QUEUE:
            self._events.put(event)
        else:
            self._dropped += 1
        if ended:
            self._thread.join(CLOSE_SECONDS)
            self._tell_failure()
            if self._thread.is_alive():
                self._tell(f"{self._name} has not taken everything in {CLOSE_SECONDS:.0f} s; it is left behind")
            elif self._dropped and not self._over:
                self._tell(f"{self._name} was too slow: {self._dropped} events were not sent")

    def _tell_failure(self) -> None:
        """Told from where events come, and not by the thread: whoever waits for it may hold what telling needs."""
        if self._failure is not None and not self._over:
            self._over = True
            self._tell(self._failure)

    def _work(self) -> None:
        try:
            while True:
                event = self._events.get()
                self._listener(event)
                if event["kind"] == "end":
                    return
        except Exception as error:  # what shows a run must never end it
            self._failure = f"{self._name} failed and is left out: {type(error).__name__}: {error}"


def trackers(names: tuple[str, ...], folder: Path, tell: Callable[[str], None]) -> list[Background]:
    """Listeners for the trackers of a config, each in its own thread.

    Raises:
        UserError: one is not installed.
    """
    found = []
    for name in names:
        module = find_tracker(name)
        make = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}[name]
        found.append(Background(name, Tracking(lambda _step, make=make, module=module: make(module, folder)), tell))  # type: ignore[misc]
    return found


def find_tracker(name: str) -> Any:
    """The tracker's module.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name} is not installed: {error}", where="training.trackers", fix=f"pip install 'draftsmith[{name}]'"
        ) from None


def run_facts(folder: Path) -> tuple[str, dict[str, Any]]:
    """(an identifier that a resumed run keeps, the config), from the run's folder."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = {}
    text = f"{content.get('fingerprint')} {content.get('created')} {folder.name}"
    return hashlib.sha256(text.encode()).hexdigest()[:16], content.get("config") or {}


class Wandb:
    """Weights & Biases. Account, host and mode come from its own settings (WANDB_MODE=offline works)."""

    def __init__(self, wandb: Any, folder: Path) -> None:
        identifier, config = run_facts(folder)
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            project=project, id=identifier, name=folder.name, config=config, dir=str(folder), resume="allow"
        )
        # Its own counter only rises; a resumed run repeats steps, so ours is a value like others.
        self._run.define_metric("*", step_metric="update")

    def scalars(self, step: int, values: dict[str, float], seconds: float) -> None:
        self._run.log({"update": step, **values})

    def text(self, kind: str, text: str) -> None:
        self._run.log({kind: text})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow; the server is that of MLFLOW_TRACKING_URI, the experiment MLFLOW_EXPERIMENT_NAME or "draftsmith"."""

    def __init__(self, mlflow: Any, folder: Path) -> None:
        identifier, config = run_facts(folder)
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([place], f"tags.`draftsmith.run` = '{identifier}'", max_results=1)
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
        else:
            tags = {"draftsmith.run": identifier, "draftsmith.folder": str(folder)}
            self._run = self._client.create_run(place, run_name=folder.name, tags=tags).info.run_id
            for section, values in config.items():
                for key, value in values.items() if isinstance(values, dict) else ():
                    self._client.log_param(self._run, f"{section}.{key}", str(value)[:500])
        self._notes = 0

    def scalars(self, step: int, values: dict[str, float], seconds: float) -> None:
        moment = int(seconds * 1000)
        metrics = [self._entities.Metric(name, value, moment, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def text(self, kind: str, text: str) -> None:
        self._notes += 1
        self._client.set_tag(self._run, f"{kind}.{self._notes:03d}", text[:4000])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """trackio, which keeps its figures on this machine unless told otherwise."""

    def __init__(self, trackio: Any, folder: Path) -> None:
        identifier, config = run_facts(folder)
        self._trackio = trackio
        name = f"{folder.name}-{identifier[:6]}"
        self._run = trackio.init(project=PROJECT, name=name, config=config, resume="allow", embed=False)

    def scalars(self, step: int, values: dict[str, float], seconds: float) -> None:
        self._run.log(values, step=step)

    def text(self, kind: str, text: str) -> None:
        self._run.log({kind: text})

    def close(self) -> None:
        self._run.finish()
