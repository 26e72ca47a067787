"""The errors that are meant for the user, as one tree.

    HorizonError                 exit code 1
    ├── JobError                 2   the job file, or an option, is wrong
    ├── IdentityError            2   the environment says contradictory things about this rank
    ├── SecurityError            2   the token is missing, malformed or refused
    ├── DataError                1   a data set is missing, corrupt or does not fit the model
    ├── ModelError               1   a model cannot be built or cut into layers
    ├── PlanError                2   a plan does not fit the model or the world size
    ├── RendezvousError          1   the ranks did not find each other, or do not belong together
    ├── PeerLost                 3   another rank stopped answering during training
    ├── CheckpointError          1   a checkpoint is damaged or does not fit
    ├── ExportError              1   a model cannot be exported, or its file computes something else
    ├── ClusterError             1   a Kubernetes cluster does not answer, or refuses
    ├── StateDiffers             1   members of a stage do not hold the same state
    ├── MissingPackage           1   a command needs a package that is not installed
    ├── OutOfMemory              1   this machine has not enough memory left
    ├── TooManyFiles             1   this process may not open more files and connections
    ├── NoTemporaryFolder        2   no folder for temporary files can be written to
    ├── DataOutOfMemory          1   likewise, while data was read
    └── Diverged                 1   the loss or a gradient is no longer a finite number

The command line prints the message of any of these without a traceback and ends with the exit code. Every
message says what is wrong, where (field, file or rank), and what to do about it.
"""

from __future__ import annotations

import errno
import os


class HorizonError(Exception):
    """Base of all errors that are meant for the user."""

    exit_code = 1
    ends_job = False  # whether the other ranks end with the one that raises it, since it would come again


class JobError(HorizonError):
    """The job file, or an option that overrides it, is wrong."""

    exit_code = 2
    ends_job = True


class IdentityError(HorizonError):
    """The environment's variables contradict each other about rank or world size."""

    exit_code = 2


class SecurityError(HorizonError):
    """The token is missing, malformed, or readable by others; or something needs one."""

    exit_code = 2


class DataError(HorizonError):
    """A data set is missing, corrupt, or does not fit the model."""

    ends_job = True


class ModelError(HorizonError):
    """A model cannot be built, or cannot be cut into layers."""

    ends_job = True


class PlanError(HorizonError):
    """A plan does not fit the model, the batch or the world size."""

    exit_code = 2
    ends_job = True


class RendezvousError(HorizonError):
    """The ranks did not find each other in time, or do not belong together."""


class PeerLost(HorizonError):
    """Another rank died, stopped answering, or left during training.

    With `ends_job` it left for a reason for which this one should end, too. `timed_out` says that its connection was
    open, and that it was waited for in vain for as long as a step may take.
    """

    exit_code = 3

    def __init__(self, message: str, ends_job: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.ends_job, self.timed_out = ends_job, timed_out


class CheckpointError(HorizonError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class ExportError(HorizonError):
    """A model cannot be exported to the format that is asked for, or the file does not compute what the model does."""


class ClusterError(HorizonError):
    """A Kubernetes cluster cannot be reached, or does not do what is asked."""


class StateDiffers(HorizonError):
    """Members of a stage hold different state although they were given the same."""


class Diverged(HorizonError):
    """The loss or a gradient became NaN or infinite."""

    ends_job = True


class MissingPackage(HorizonError):
    """A command needs a package that is not installed, because workers do without it."""


class OutOfMemory(HorizonError):
    """This machine, or this container, has not enough memory left for what is asked."""

    def __init__(self, loading: bool = False) -> None:
        """Say what to do; `loading` if there was not even enough to load libraries such as PyTorch."""
        super().__init__(
            "out of memory: this machine has not enough left to load PyTorch, which every rank does. Start fewer ranks "
            "here (parallel.workers), end other programs, or raise the limit (ulimit -v, or that of the container)"
            if loading
            else "out of memory: this machine has not enough left for its part of the model and the batch. Lower "
            "batch_size, raise parallel.micro_batches, or let more workers share the layers (parallel.strategy: "
            "pipeline or auto); `horizonml plan JOB` shows what every rank needs and has"
        )


class TooManyFiles(HorizonError):
    """This process has as many files and connections open as it may."""

    def __init__(self, what: object) -> None:
        """Say what to do; `what` could not be done."""
        super().__init__(
            f"{what}; raise the limit of files and connections that a process may have open (ulimit -n, LimitNOFILE of "
            "systemd, or nofile of the container)"
        )


class NoTemporaryFolder(HorizonError):
    """No folder for temporary files can be written to, as in a read-only container without a /tmp of its own."""

    exit_code = 2

    def __init__(self) -> None:
        """Say what to do."""
        super().__init__(
            "temporary files cannot be written to /tmp, nor to any other folder for them; start the container with "
            "--tmpfs /tmp (in Compose `tmpfs: [/tmp]`, in Kubernetes an emptyDir that is mounted at /tmp), or set "
            "TMPDIR to a folder that can be written"
        )


class DataOutOfMemory(HorizonError):
    """Memory ran out while data was read, and not while the model computed."""

    @classmethod
    def at(cls, what: str) -> DataOutOfMemory:
        """Return the error for what was read."""
        return cls(
            f"{what}: memory ran out while it was read. Let the data set read less at a time, or lower data.workers, "
            "data.prefetch or data.memory; if model and batch leave too little, lower batch_size"
        )


def of_kind(name: str, message: str) -> HorizonError:
    """Return an error of the class with this name, which another rank has raised; of the base class if unknown."""
    made = (OutOfMemory, TooManyFiles, NoTemporaryFolder)  # their words are their own
    kinds = {kind.__name__: kind for kind in HorizonError.__subclasses__() if kind not in made}
    return kinds.get(name, HorizonError)(message)


def is_out_of_files(error: BaseException) -> bool:
    """Return whether an error says that this process may not open more files, which is no fault of the file."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error)  # PyTorch's connections


def lacks_temporary_folder(error: BaseException) -> bool:
    """Return whether an error is the one with which Python's `tempfile` finds no folder that it can write to."""
    return isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had."""
    # PyTorch has no error class for this on the CPU, nor have Python for a thread without a stack and the loader of
    # libraries: their texts are all that there is. The last one is that of GPUs.
    texts = ("can't allocate memory", "not enough memory", "can't start new thread", "out of memory")
    if isinstance(error, ImportError):
        said = (
            str(error).strip().lower()
        )  # another limit has similar words: "cannot allocate memory in static TLS block"
        return said.endswith(("failed to map segment from shared object", "cannot allocate memory"))
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in texts))
    )
