"""How processes end when memory is short: in words, and never by hanging."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from horizonml.comm.connect import Connections
from horizonml.errors import TooManyFiles, is_out_of_memory
from horizonml.files import scratch_folder

# A thread gets a stack, but nothing else: Python's own `start` would wait for it for ever.
STARTS = """
    import resource, threading
    from horizonml.runtime import process

    process._BEGIN_SECONDS = 0.5
    threading.stack_size(1 << 20)

    def used():
        return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))

    def action():
        thread = threading.Thread(target=print, daemon=True)
        hog, reserve = None, [bytes(size) for size in range(1, 500, 8) for _ in range(100)]
        now = used()
        limits = [(now + room, resource.RLIM_INFINITY) for room in (0, (1 << 20) + 8192)]
        resource.setrlimit(resource.RLIMIT_AS, limits[0])
        try:
            while True:
                hog = (hog,)
        except MemoryError:
            reserve.clear()
            resource.setrlimit(resource.RLIMIT_AS, limits[1])
        thread.start()
"""
LOADS = """
    from horizonml.runtime import process

    def action():
        try:
            raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
        except ImportError:
            raise RuntimeError("cannot join thread before it is started")
"""
OPENS = """
    import resource
    from horizonml.runtime import process

    def action():
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        open("/dev/null")
"""
NEEDS_MORE = """
    import resource
    from horizonml.machine.host import raise_descriptor_limit
    from horizonml.runtime import process

    def action():
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 24))
        raise_descriptor_limit(24)
        raise_descriptor_limit(40)
"""
NO_FOLDER = """
    import tempfile
    from horizonml.files import scratch_folder
    from horizonml.runtime import process

    tempfile._candidate_tempdir_list = lambda: ["/proc"]  # as in a read-only container

    def action():
        with scratch_folder():
            pass
"""
FAILS_TO_SAY = """
    import sys, threading
    from horizonml.runtime import process

    threading.Thread(target=threading.Event().wait).start()  # Python would wait for it at its end

    def action():
        sys.stdout = open("/dev/full", "w")
        print("unheard")
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (STARTS, "error: out of memory: this machine has not enough left for its part"),
        (LOADS, "error: out of memory: this machine has not enough left to load PyTorch"),
        (OPENS, "error: [Errno 24] Too many open files: '/dev/null'; raise the limit of files and connections"),
        (NEEDS_MORE, "error: 24 open files and connections are allowed here, and this rank needs about 40; raise the"),
        (FAILS_TO_SAY, "error: [Errno 28] No space left on device"),
        (NO_FOLDER, "error: temporary files cannot be written to /tmp, nor to any other folder for them; start the"),
    ],
    ids=["a thread that never begins", "libraries", "descriptors", "needs", "the end", "no temporary folder"],
)
def test_a_process_ends_in_words(program: str, words: str) -> None:
    code = textwrap.dedent(program) + "process.run_and_exit(action)\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert words in result.stderr
    assert "report this" not in result.stderr
    assert result.returncode == (2 if program == NO_FOLDER else 1)


def test_lack_of_memory_is_told_from_other_mistakes() -> None:
    numpy = "numpy ...\nOriginal error was: libx.so: failed to map segment from shared object\n"
    for short in (
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError(numpy),
    ):
        assert is_out_of_memory(short)
    for other in (
        OSError(errno.EMFILE, "Too many open files"),
        ImportError("libx.so: failed to map segment from shared object: Operation not permitted"),
        ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
    ):
        assert not is_out_of_memory(other)


def test_a_rank_that_may_open_no_more_connections_blames_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: object) -> None:
        raise RuntimeError("[enforce fail at socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files")

    connections = Connections(HashStore(), 0, 2, 5.0, threading.Event())
    monkeypatch.setattr(connections, "_make", make)
    with pytest.raises(TooManyFiles, match=r"rank 0 cannot connect to the others; raise the limit .*\(ulimit -n"):
        connections.connect("world", (0, 1))


def test_the_next_start_deletes_the_folder_that_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "from horizonml.files import scratch_folder\nwith scratch_folder() as f: print(f, flush=True); input()"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "job.yaml").touch()
        (tmp_path / "horizonml-run-link").symlink_to(tmp_path)  # of somebody who wants something else deleted
        with scratch_folder() as own:
            assert {theirs, own} < set(tmp_path.iterdir())
        assert not own.exists()
        assert (theirs / "job.yaml").exists()
        other.kill()
    with scratch_folder():
        assert not theirs.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["horizonml-run-link"]


@pytest.mark.parametrize("module", ["horizonml.runtime.process", "horizonml.cli.app", "torch"])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module: str) -> None:
    code = textwrap.dedent(f"""
        import os, signal, sys

        class Interrupted:
            def find_spec(self, name, path, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.meta_path.insert(0, Interrupted())
        from horizonml.cli.main import main
        main()
    """)
    command = [sys.executable, "-c", code, "plan", "digits"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_ctrl_c_where_python_ignores_exceptions_is_not_lost() -> None:
    code = textwrap.dedent("""
        import signal, time, weakref
        from horizonml.runtime.process import run_and_exit

        def action():
            watched = set()
            reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
            del watched
            time.sleep(60)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_and_exit(action)
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
