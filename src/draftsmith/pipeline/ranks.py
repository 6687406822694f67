"""Ranks: one run in several processes, on one machine or on many, started by torchrun.

    torchrun --nproc-per-node 2 -m draftsmith train CONFIG

Every rank is a whole pipeline over devices of its own (`seat.py`). Rows are dealt by number (`jobs.py`). What
crosses between ranks is little, and all of it goes through torch.distributed:

    gradients  one all-reduce of float32 per replica and update. Replica i of every rank has a group of its own, because
               an NCCL communicator belongs to one device and its calls must come in one order; gloo where ranks share
               a device or compute on the CPU
    sums       Σ w·loss, Σ w and the statistics, in the same groups, before anything is divided by Σ w
    notes      tokens, time spent waiting, whether a rank wants to end or to save: 128 bytes a rank and update over
               gloo, sent at the end of one update and read at the end of the next, so that nobody stands still for them
    pulse      every half second in a thread of its own: does everybody live, has anybody failed (`pulse.py`)
    at the start, through torchrun's store: what the ranks must agree on, and the checkpoint, which rank 0 reads

All ranks hold the same masters and optimizer state, each shared among its own replicas; rank 0 alone writes the run.

If a rank fails, the pulse tells everybody, and all end. If it is lost without a word, the pulse breaks: at once where
its process is gone, after `LOST_SECONDS` where it only stands still. `Stop` then gets a `RankLost` that names who is
missing, and the processes end even if a thread of theirs is stuck in a collective.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from draftsmith.errors import UserError, first_line
from draftsmith.pipeline.link import Stop, Stopped
from draftsmith.pipeline.pulse import PULSE_SECONDS, ROLL_SECONDS, Pulse, RankLost
from draftsmith.pipeline.seat import Seat

LOST_SECONDS = 60.0  # without a pulse
START_SECONDS = 600.0  # for all ranks to be there
LONG = timedelta(days=30)  # in collectives: the pulse finds who is lost, and ranks may plan or save for long
LEAVE_CODE = 2

Result = TypeVar("Result")


@dataclass(frozen=True)
class Note:
    """What a rank tells the others at the end of an update.

    Attributes:
        tokens: real tokens it has trained on so far.
        waited: seconds its drafters have waited for rows so far, all together.
        drafters: how many it has.
        end: why it wants the run to end; empty if it does not.
        save: whether it wants a checkpoint.
    """

    tokens: int = 0
    waited: float = 0.0
    drafters: int = 0
    end: str = ""
    save: bool = False

    _FORM = struct.Struct("<qdi?107s")

    def pack(self) -> bytes:
        return self._FORM.pack(self.tokens, self.waited, self.drafters, self.save, self.end.encode()[:107])

    @classmethod
    def unpack(cls, data: bytes) -> Note:
        tokens, waited, drafters, save, end = cls._FORM.unpack(data)
        return cls(tokens, waited, drafters, end.rstrip(b"\0").decode(errors="ignore"), save)


def agree_on_start(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """A name for this start of the run, the same in all ranks and never used before.

    torchrun's store outlives a start, and how often it has started counts every agent for itself. So each rank leaves a
    word of its own that nobody has used before, rank 0 answers with all of them, and whoever finds its own among them
    says so; all go on once all have.

    Raises:
        RuntimeError: not all were there in time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    hellos = [f"draftsmith/hello/{each}" for each in range(world)]
    store.set(hellos[rank], own)
    heard = ""
    while True:
        if rank == 0 and store.check(hellos):
            words = ",".join(store.get(hello).decode() for hello in hellos)
            if words != heard:
                heard = words
                store.set("draftsmith/words", heard)
        elif rank and store.check(["draftsmith/words"]):
            heard = store.get("draftsmith/words").decode()
        if own in heard:
            name = f"draftsmith/{uuid.uuid5(uuid.NAMESPACE_OID, heard).hex}"
            store.set(f"{name}/{rank}", "heard")
            if store.check([f"{name}/{each}" for each in range(world)]):
                return name
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all were there within {seconds:.0f} s")
        time.sleep(0.02)


def _text_of(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    return f"{type(error).__name__}: {error}"


class Ranks:
    """All ranks of a run as one of them sees them; see the module's docstring. Use with `with`.

    A run of one process has one too: then everything is answered at once and nothing is opened.

    Args:
        seat: of this process.

    Raises:
        UserError: the other ranks cannot be reached.

    Attributes:
        rank, world: of `seat`.
        writes: whether this rank writes the run.
    """

    def __init__(self, seat: Seat | None = None) -> None:
        self.seat = seat or Seat()
        self.rank, self.world = self.seat.rank, self.seat.world
        self.writes = self.rank == 0
        self.backend = ""
        self._rounds = itertools.count()
        self._stop: Stop | None = None
        self._data: list[dist.ProcessGroup] = []
        self._to_let_go: list[dist.ProcessGroup] = []  # those of NCCL
        self._letting_go = threading.Lock()
        self._tell: Callable[[str], None] = self._print
        if self.world > 1:
            self._open()

    def _open(self) -> None:
        # The pulse finds who is lost. NCCL's own way is to end the process with a trace, before anything is said.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
            self._store = dist.PrefixStore(agree_on_start(store, self.rank, self.world, START_SECONDS), store)
            limit = timedelta(seconds=START_SECONDS)
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.world, timeout=limit)
            self._notes = dist.new_group(backend="gloo", timeout=LONG)
            pulse = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOST_SECONDS))
        except (RuntimeError, ValueError) as error:
            apart = UserError(f"the {self.world} ranks did not come together: {first_line(error)}", where="torchrun")
            apart.told = self.seat.local_rank != 0
            raise apart from None
        # The pulse has a connection of its own: others wait in theirs while they hold its lock.
        store_of_all: Any = self._store  # torch's types do not know `clone`
        self._other_store: dist.Store = store_of_all.clone()
        self._pulse = Pulse(self._other_store, pulse, self.rank, self.world, self._let_go)
        self._pulse.start()
        atexit.register(self._leave_for_good)
        own = f"{socket.gethostname()}, pid {os.getpid()}"
        self._pulse.names = [f"rank {rank} ({name})" for rank, name in enumerate(self.gather(own))]

    # Before and after training: agreement through the store, by the main thread.

    def gather(self, value: Any) -> list[Any]:
        """What every rank brought, in order; anything that JSON can hold. One thread at a time.

        Raises:
            UserError: another rank failed or is lost.
        """
        if self.world == 1:
            return [value]
        number = next(self._rounds)
        keys = [f"gather/{number}/{rank}" for rank in range(self.world)]
        try:
            self._store.set(keys[self.rank], json.dumps(value))
            while not self._store.check(keys):
                self.check()
                time.sleep(0.01)
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:  # the store went down with who held it
            self._explain(error)

    def share(self, value: Any) -> Any:
        """Rank 0's value, known to all."""
        return self.gather(value if self.rank == 0 else None)[0]

    def together(self, work: Callable[[], Result]) -> Result:
        """Does the work in every rank, and goes on only if all could.

        Raises:
            UserError: in all ranks; of the first that could not.
        """
        own: UserError | None = None
        try:
            result = work()
        except UserError as error:
            if self.world == 1:
                raise
            own = error
        found = self.gather(None if own is None else [own.what, own.where, own.fix])
        rank = next((rank for rank, each in enumerate(found) if each is not None), None)
        if rank is None:
            return result
        what, where, fix = found[rank]
        common = UserError(what if rank == 0 else f"rank {rank}: {what}", where=where, fix=fix)
        common.told = self.rank != 0
        raise common

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """`together`, but one rank of each machine goes before the others: what it caches is there for them."""
        if self.world == 1:
            return work()
        first = self.seat.local_rank == 0
        made = self.together(lambda: work() if first else None)
        return self.together(lambda: work() if made is None else made)

    def agree(self, facts: dict[str, Any]) -> None:
        """Makes sure that all ranks have the same facts.

        Raises:
            UserError: they have not; names the first that differs.
        """
        everybody = self.gather(facts)
        for rank, other in enumerate(everybody):
            for name, value in everybody[0].items():
                if other.get(name) != value:
                    error = UserError(
                        f"rank {rank} has another {name} than rank 0 ({other.get(name)}, not {value})",
                        where="torchrun",
                        fix="give every rank the same files, versions and kinds of device",
                    )
                    error.told = self.rank != 0
                    raise error

    def share_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's CPU tensors, copied to all; the others' argument is ignored."""
        if self.world == 1:
            return tensors
        kinds = self.share([[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()])
        if self.rank:
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in kinds}
        for value in tensors.values():
            self._finish(dist.broadcast(value.reshape(-1), 0, group=self._notes, async_op=True))
        return tensors

    # While training.

    def connect(self, devices: Sequence[torch.device]) -> str:
        """Opens the groups of the replicas on these devices; says through what they exchange.

        Raises:
            UserError: a group cannot be opened.
        """
        if self.world == 1:
            return ""
        host = socket.gethostname()
        own = [f"{host} {torch.cuda.get_device_properties(d).uuid}" for d in devices if d.type == "cuda"]
        used = [name for names in self.gather(own) for name in names]
        nccl = len(own) == len(devices) and len(set(used)) == len(used) and dist.is_nccl_available()
        self.backend = "nccl" if nccl else "gloo"
        text = self.backend
        if own and not nccl:
            text = "gloo, through host memory: drafters share a GPU, which NCCL does not allow"
        try:
            for device in devices:
                group = dist.new_group(backend=self.backend, timeout=LONG)
                self._data.append(group)
                if nccl:
                    self._to_let_go.append(group)
                with torch.cuda.device(device) if device.type == "cuda" else torch.device("cpu"):
                    probe = torch.ones(1, device=device)
                    dist.all_reduce(probe, group=group)
                    assert probe.item() == self.world
        except RuntimeError as error:
            with suppress(RuntimeError):
                self._explain(error)
            fix = "NCCL_DEBUG=INFO says more" if nccl else "GLOO_SOCKET_IFNAME names the network interface"
            what = f"{self.backend} does not connect the ranks: {first_line(error)}"
            raise UserError(what, where="torchrun", fix=fix) from None
        return text

    def across(self, index: int) -> Callable[[Tensor], None] | None:
        """What adds a tensor of replica `index` up over the ranks, in place; None in a run of one process.

        With NCCL the calling thread only gives the work to its device's current stream; with gloo it waits. All ranks
        get the same bits. A rerun gets them again as long as the ranks, their places and NCCL's choices are the same.
        """
        if self.world == 1:
            return None
        return partial(self.add_up, self._data[index])

    def add_up(self, group: dist.ProcessGroup, values: Tensor) -> None:
        """Sums a tensor over the ranks, in place. Where it waits it waits for other ranks, which `hang` knows."""
        try:
            dist.all_reduce(values, group=group)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._explain(error)

    def post(self, note: Note) -> Callable[[], list[Note]]:
        """Sends a note to all; what is returned waits for everybody's, in order of the ranks."""
        if self.world == 1:
            return lambda: [note]
        data = torch.frombuffer(bytearray(note.pack()), dtype=torch.uint8)
        notes = [torch.empty_like(data) for _ in range(self.world)]
        try:
            work = dist.all_gather(notes, data, group=self._notes, async_op=True)
        except RuntimeError as error:
            self._explain(error)

        def read() -> list[Note]:
            self._finish(work)
            return [Note.unpack(bytes(each.tolist())) for each in notes]

        return read

    def post_sample(self, sample: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        """Leaves a sample of this rank's state in the store and returns the others' last ones, by rank; never waits."""
        if self.world == 1 or self._pulse.over.is_set():
            return []
        self._other_store.set(f"sample/{self.rank}", json.dumps(sample, default=str))
        if not self.writes:
            return []
        there = [rank for rank in range(1, self.world) if self._other_store.check([f"sample/{rank}"])]
        return [(rank, json.loads(self._other_store.get(f"sample/{rank}"))) for rank in there]

    @contextmanager
    def first_of_machine(self) -> Iterator[None]:
        """One rank of each machine goes first, the others when it is through: what it compiles is cached for them.

        Raises:
            UserError: another rank failed or is lost meanwhile.
        """
        if self.world == 1:
            yield
            return
        key = f"first/{self.rank - self.seat.local_rank}"
        while self.seat.local_rank and not self._other_store.check([key]):
            self.check()
            if self._stop is not None:
                self._stop.check()
            time.sleep(0.05)
        yield
        if not self.seat.local_rank:
            self._other_store.set(key, "through")

    def watch(self, stop: Stop) -> None:
        """From now on `stop` is set when another rank fails or is lost."""
        self._stop = stop
        if self.world > 1:
            self._pulse.watch(stop)

    def check(self) -> None:
        """Raises what ended the run in another rank."""
        if self.world > 1 and self._pulse.cause is not None:
            raise self._pulse.cause

    # The end.

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Waits for the others to end as well; tells them if this rank failed.

        Raises:
            UserError: another rank failed meanwhile.
        """
        if self.world == 1:
            return
        if error is None:
            self._pulse.wait_for_the_others()
            self.check()
            dist.destroy_process_group()
            return
        own = error is not self._pulse.cause and not getattr(error, "told", False)
        self._pulse.tell(_text_of(error) if own else "")
        self._let_go()
        if isinstance(error, KeyboardInterrupt) and isinstance(self._pulse.cause, RankLost):
            raise self._pulse.cause from None  # why the launcher sent its signal
        if own and isinstance(error, UserError):
            if self.rank:
                error.told = self._pulse.all_know  # rank 0 among them
            else:
                self._add_others(error)

    def _add_others(self, error: UserError) -> None:
        """Raises the error again with what else is wrong in other ranks, if there is more."""
        time.sleep(2 * PULSE_SECONDS)  # until they have found it too
        more = "; ".join(text for text in self._pulse.failures() if str(error) not in text)
        if more:
            raise UserError(f"{error.what}; {more}", where=error.where, fix=error.fix) from None

    def tell_by(self, tell: Callable[[str], None] | None) -> None:
        """From now on what is to be said of the ranks' connections is said so; None: on stderr."""
        self._tell = tell or self._print

    def _print(self, text: str) -> None:
        print(f"draftsmith: {text}", file=sys.stderr)

    def _let_go(self) -> None:
        """Ends what the devices wait for in collectives; once, whether the pulse or the end of the run comes first."""
        with self._letting_go:
            groups, self._to_let_go = self._to_let_go, []
        for group in groups:
            try:
                group.abort()
            except Exception as error:  # whatever NCCL says, there is an error to be told that came first
                why = first_line(error)
                self._tell(f"rank {self.rank}: NCCL could not be aborted ({why}): a device may wait until the end")

    def _finish(self, work: Any) -> None:
        """Waits for a collective of the host, but not for the lost."""
        try:
            while not work.is_completed():
                self.check()
                time.sleep(0.0005)
            work.wait()
        except RuntimeError as error:
            self._explain(error)

    def _explain(self, error: RuntimeError) -> NoReturn:
        """A collective failed: the pulse will know why."""
        if self._pulse.over.wait(ROLL_SECONDS + 4 * PULSE_SECONDS) and self._pulse.cause is not None:
            if self._stop is not None:
                raise Stopped from error
            raise self._pulse.cause from error
        raise error

    def _leave_for_good(self) -> None:
        """At exit: a thread that is stuck with another rank must not keep the process."""
        if self._pulse.cause is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(LEAVE_CODE)
