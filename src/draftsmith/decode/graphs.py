"""Work on static tensors, captured once as a CUDA graph and replayed: no Python, no kernel launches, one call.

Plain capture of the eager kernels, not `torch.compile(mode="reduce-overhead")`: decoding one answer is bound by the
host, and a replay takes the host out whole; the kernels stay those of the plain rounds, so tokens do too; a capture
costs a few runs, where compiling costs many seconds for every shape; and the graph trees behind that mode belong to one
thread. What compiling would add is fused norms and activations.

What is captured must not wait for the device. Before capturing, the work runs once under torch's own alarm for that
(`set_sync_debug_mode`), so that a model that looks at numbers on the host is found out by name and not by a broken
capture. The alarm is the whole process's: no other thread may wait for a device meanwhile.

Cost: four runs for each piece of work. All captures of one `Graphs` share one memory pool: results have to be copied
to tensors from outside of it, as what is inside belongs to whichever graph ran last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftsmith.errors import first_line


class CannotCaptureError(Exception):
    """Why work cannot become a graph, in words that follow "because"."""


class Graphs:
    """Captures of one device that are replayed one at a time.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What replays `run`, whose tensors have all been made: it must have run before, on the current stream.

        Raises:
            CannotCaptureError: `run` waits for the device, or does what no graph can hold.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        alarm = torch.cuda.get_sync_debug_mode()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    run()
                finally:
                    torch.cuda.set_sync_debug_mode(alarm)
            # The captures of other threads, and what they allocate, are no concern of this one.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except torch.OutOfMemoryError:
            raise CannotCaptureError("there is no memory for graphs") from None
        except RuntimeError as error:
            said = first_line(error)
            what = "waits for the device" if "synchronizing CUDA" in said else f"cannot be captured: {said}"
            raise CannotCaptureError(f"its forward {what}") from None
        finally:
            current.wait_stream(self._stream)
        return graph.replay


class Part:
    """A piece of work that runs plainly until it is captured.

    Args:
        run: reads and writes static tensors.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def capture(self, graphs: Graphs) -> None:
        """Replays from now on; see `Graphs.capture`. The first replay, which is slower, is done here."""
        self._run = graphs.capture(self._run)
        self._run()

    def __call__(self) -> None:
        self._run()
