"""One gate a test, and Inductor without its probe of vector instructions, which can take a minute."""

from __future__ import annotations

import os
import threading

import pytest

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import torch
import torch._inductor.config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from draftsmith.compiled import Gate

torch._inductor.config.cpp.vec_isa_ok = False


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Draftsmith's own caches go to a folder of the test; Inductor's variable is put back after it."""
    monkeypatch.setenv("DRAFTSMITH_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    return tmp_path / "own"


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.close()
    torch._dynamo.reset()


@pytest.fixture
def in_threads():
    """Runs jobs in threads that start together; raises the first error, and fails where one hangs."""

    def run(*jobs):
        errors, together = [], threading.Barrier(len(jobs))

        def guarded(job):
            try:
                together.wait(60)
                job()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker hangs"
        if errors:
            raise errors[0]

    return run
