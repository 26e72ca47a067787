"""The commands by which devices meet: `horizonml up`, `join` and `rendezvous`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from horizonml.cli.options import Device, Fresh, JobFile, MeasureAgain, Overrides, load_job
from horizonml.errors import HorizonError, JobError, SecurityError

if TYPE_CHECKING:
    from horizonml.job.schema import Job
    from horizonml.machine.relay import Relay
    from horizonml.machine.signals import StopRequest
    from horizonml.machine.yielding import Courtesy
    from horizonml.rendezvous.discovery.finding import ServiceAddress
    from horizonml.rendezvous.discovery.records import FoundService
    from horizonml.runtime.lobby.join import Joiner
    from horizonml.runtime.lobby.up import Up
    from horizonml.security.token import Token


def rendezvous(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="A command that starts ranks, after `--`; the service ends with it.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; 0.0.0.0 for other machines, which needs a token (`horizonml token`).",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Port to listen on; 0 for any free one. Default: 29400, or with COMMAND any free one.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Name or address under which COMMAND's ranks reach this machine. Default: its host name.",
        ),
    ] = None,
    insecure: Insecure = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            envvar="WORLD_SIZE",
            help="World size of a run whose ranks do not know it, as in Kubernetes, where it may change.",
            show_default=False,
        ),
    ] = None,
    inherited: Annotated[int | None, typer.Option("--inherited", hidden=True)] = None,
) -> None:
    """Serve the rendezvous, where the ranks of a job meet.

    Without a command, it serves until it is stopped. With a command that starts ranks, it serves for as long as the
    command runs, and passes the address to it in HORIZONML_RENDEZVOUS, whatever the launcher:

        horizonml rendezvous -- mpirun -n 4 horizonml train digits

    Connections are encrypted, and nobody gets in without the token that `horizonml token` makes. Ranks on this machine
    alone need none; a command's ranks get one that is made for them.
    """
    from horizonml.runtime.command import become_service, serve_command

    if not command:
        become_service(host, 29400 if port is None else port, inherited, insecure, workers)
    code = serve_command(host, port or 0, advertise, command, insecure)
    if code:
        raise typer.Exit(code)


_PAGE_PORT = 8400
_AGAIN_SECONDS = 5.0  # after a run, or an error, until a device that always joins looks for the next one
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of this device in the run. Default: its host name.", show_default=False),
]
AtRelay = Annotated[
    str | None,
    typer.Option(
        "--relay", metavar="HOST[:PORT]", help="Meet through `horizonml relay` there, from other networks.",
        show_default=False,
    ),
]  # fmt: skip
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do without a token: any stranger who reaches the port can take part.")
]


def up(
    job_file: JobFile,
    overrides: Overrides = None,
    device: Device = None,
    measure_again: MeasureAgain = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            min=1,
            max=4096,
            help="Start when N devices are ready, this one included. Default: start on Enter, or on the page.",
            show_default=False,
        ),
    ] = None,
    name: Name = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on.")] = 29400,
    share_data: Annotated[
        bool, typer.Option("--share-data", help="Send the job's data to devices that lack it and accept it.")
    ] = False,
    train: Annotated[bool, typer.Option(help="Train on this device, too, as rank 0.")] = True,
    fresh: Fresh = False,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Serve a page about the run to this machine, as `horizonml watch` does. Default: serve it.",
            show_default=False,
        ),
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=65535, help="Port of the page. Default: 8400, or else any.", show_default=False
        ),
    ] = None,
    relay: AtRelay = None,
    insecure: Insecure = False,
) -> None:
    """Train a job with all devices that join.

    Run `horizonml join` on the other devices. They find this one by themselves if they are on its network and have its
    token, and they need neither the job file nor a rank or an address. Training starts when you press Enter, or when
    --workers N devices are ready, and goes on when devices join or leave.
    """
    from horizonml.rendezvous.device_messages import RunOutcome
    from horizonml.runtime.command import insecure as accepted
    from horizonml.runtime.lobby.up import Up, UpSettings

    job = load_job(job_file, overrides)
    token = None if insecure or accepted() else _token()
    if token is None:
        print("warning: there is no token, so any stranger who reaches this device can take part", file=sys.stderr)
    at = _relay(relay)
    if at is not None and (token is None or port != 29400):
        raise JobError("--relay: devices need a token there, and meet at port 29400; leave out --insecure and --port")
    starts_there = bool(page) and token is not None  # only if that was asked for does a run wait for it
    run = Up(UpSettings(job, token, workers, name, host, port, train, share_data, fresh, starts_there, at))
    with _page(run, job, token, page_port) if page is not False else nullcontext():
        outcome = run.run()
    if outcome is RunOutcome.STOPPED:
        sys.exit(130)


def _relay(text: str | None) -> tuple[str, int] | None:
    """Return the host and the port of a relay that the user has named. Raises JobError."""
    from horizonml.machine.relay import PORT
    from horizonml.rendezvous.discovery.finding import at

    if text is None:
        return None
    place = at(text, "--relay", PORT)
    return place.hosts[0], place.port


@contextmanager
def _page(run: Up, job: Job, token: Token | None, port: int | None) -> Iterator[None]:
    """Serve a page about the run; whoever has the token may start and stop it there. Raises HorizonError."""
    from horizonml.report.page.server import PageServer

    def serve(at: int) -> PageServer:
        actions = {"start": run.start_now, "stop": run.stop_now}
        return PageServer(job.run_folder, ("127.0.0.1", at), token, actions, run.devices)

    try:
        page = serve(_PAGE_PORT if port is None else port)
    except HorizonError:
        if port is not None:
            raise
        page = serve(0)  # another run has the usual one
    with page as server:
        print(f"the page of the run is at http://127.0.0.1:{server.port}/", flush=True)
        yield


def _token() -> Token:
    """Return this device's token, which is made if there is none. Raises SecurityError."""
    from horizonml.security.token import find_token, make_token, save_token

    token = find_token()
    if token is None:
        token = make_token()
        file = save_token(token)
        print(f"a new token ({token.id}) is in {file}")
        print("Other devices get it by the code below, or as a copy of that file; `horizonml token --show` prints it.")
    return token


def join(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            help="The code that `horizonml up` shows, such as 7-lantern-orbit, for a device that has no token yet.",
            show_default=False,
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Go to this device without looking for it on the network.", show_default=False
        ),
    ] = None,
    device: Device = None,
    measure_again: MeasureAgain = False,
    forever: Annotated[
        bool, typer.Option("--forever", help="Join one run after the other, until this command is stopped.")
    ] = False,
    when_idle: Annotated[
        bool, typer.Option("--when-idle", help="Train only while nobody uses this device and other programs are idle.")
    ] = False,
    max_temperature: Annotated[
        float | None,
        typer.Option(
            metavar="DEGREES", help="Train only while the processor is no hotter (in °C).", show_default=False
        ),
    ] = None,
    on_mains: Annotated[bool, typer.Option("--on-mains", help="Train only while this device is plugged in.")] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Let jobs read files in this folder, without asking; can be given several times.",
            show_default=False,
        ),
    ] = None,
    accept_data: Annotated[
        bool,
        typer.Option("--accept-data", help="Fetch what the job reads from other devices and servers, without asking."),
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run code of this device that the job names as `module:callable`.")
    ] = False,
    run_folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where this device keeps its part of runs, as FOLDER/NAME.")
    ] = Path("runs"),
    name: Name = None,
    relay: AtRelay = None,
    insecure: Insecure = False,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a systemd unit that runs this command with these options.")
    ] = False,
) -> None:
    """Let this device take part in a run that `horizonml up` has begun on another one.

    It finds the run by itself on its network, if it has the token of the device that runs `up`, or a code that this
    device shows: the code is valid once, and gives this device the token for good. It contributes its processor and its
    memory, receives the job and, if you agree, the data, and may join and leave at any time. Ctrl-C leaves after the
    step.

    Print a systemd unit for a device that joins every run while nobody uses it:

        horizonml join --forever --when-idle --print-unit
    """
    from horizonml.machine.signals import StopRequest, handling
    from horizonml.machine.yielding import Courtesy
    from horizonml.runtime.command import insecure as accepted
    from horizonml.runtime.lobby import terminal
    from horizonml.runtime.lobby.join import Joiner
    from horizonml.runtime.lobby.offer import JoinSettings
    from horizonml.security.token import find_token

    if print_unit:
        chosen = {"--forever": True, "--when-idle": when_idle, "--on-mains": on_mains, "--accept-data": accept_data}
        chosen |= {"--allow-code": allow_code, "--insecure": insecure}
        values = {"--peer": peer, "--max-temperature": max_temperature, "--name": name, "--device": device}
        values["--run-folder"] = str(run_folder) if run_folder != Path("runs") else None
        offered = [word for folder in data or () for word in ("--data", str(folder.absolute()))]
        _print_unit([*(option for option, wanted in chosen.items() if wanted), *offered], values)
        return
    stop = StopRequest()
    with handling(stop.note):
        way = _relay(relay)
        if code is not None:
            peer = _pair(code, peer, way, stop)
            if peer is None:
                return
        token = None if insecure or accepted() else find_token() or _refuse_without_token()
        courtesy = Courtesy(when_idle, max_temperature, on_mains, stop)

        def agrees(question: str) -> bool:
            return (terminal.answer(f"{question} [y/N]", lambda: stop.wanted) or "").lower() in ("y", "yes")

        settings = JoinSettings(
            token, run_folder, tuple(data or ()), accept_data, allow_code, name, agrees, courtesy.reason
        )
        joiner = Joiner(settings, stop)

        def place() -> ServiceAddress | None:
            from horizonml.rendezvous.discovery.finding import at, find
            from horizonml.rendezvous.relay import find_at_relay

            if there is not None and token is not None:
                return find_at_relay(there, token, lambda found: _choose(found, stop), lambda: stop.wanted)
            if peer is not None:
                return at(peer)
            if not forever:
                print("looking for a run on this network", flush=True)
            return find(token, lambda found: _choose(found, stop), lambda: stop.wanted)

        with _at_relay(way, token) as there:
            if forever:
                _join_forever(joiner, place, courtesy, stop)
            else:
                _join_once(joiner, place, courtesy)


@contextmanager
def _at_relay(at: tuple[str, int] | None, token: Token | None) -> Iterator[Relay | None]:
    """Use a relay, if one is named. Raises HorizonError."""
    from horizonml.rendezvous.relay import registered, room_of

    if at is None:
        yield None
        return
    if token is None:
        raise JobError("--relay: devices at a relay need a token; leave out --insecure")
    with registered(at, room_of(token)) as relay:
        yield relay


def _pair(code: str, peer: str | None, way: tuple[str, int] | None, stop: StopRequest) -> str | None:
    """Take over the token of the device that offers a code, and return its address; None if this is stopped before.

    Raises HorizonError.
    """
    from horizonml.rendezvous.pairing import find_and_pair
    from horizonml.security.token import TOKEN, find_token, save_token, token_file

    if os.environ.get(TOKEN):
        raise SecurityError(f"${TOKEN} is set, and would be used instead of the token that a code gives; unset it")
    before, file = find_token(), token_file()
    found = find_and_pair(code, peer, way, lambda: stop.wanted)
    if found is None:
        return None
    token, place = found
    if before is not None and before.id == token.id and not before.is_own:
        print(f"this device has the shared token ({token.id}) already, and keeps it", flush=True)
    else:
        if before is not None and before.id != token.id:
            kept = save_token(before, file.with_name(f"{file.name}.{before.id}"))
            print(f"this device had another token ({before.id}), which is kept in {kept}", flush=True)
        save_token(token, file)
        print(f"this device is paired with {place.name}; its token ({token.id}) is in {file}", flush=True)
    host = f"[{place.hosts[0]}]" if ":" in place.hosts[0] else place.hosts[0]
    return f"{host}:{place.port}"


def _join_once(joiner: Joiner, place: Callable[[], ServiceAddress | None], courtesy: Courtesy) -> None:
    """Take part in one run, with pauses while this device's owner needs it. Raises HorizonError."""
    from horizonml.runtime.lobby.join import Ending

    while courtesy.wait():
        found = place()
        if found is None or joiner.join(found) is not Ending.YIELDED:
            return


def _join_forever(
    joiner: Joiner,
    place: Callable[[], ServiceAddress | None],
    courtesy: Courtesy,
    stop: StopRequest,
    pause: float = _AGAIN_SECONDS,
) -> None:
    """Take part in one run after the other until this process is stopped; what goes wrong may be right next time."""
    said = ""
    while not stop.wanted:
        try:
            _join_once(joiner, place, courtesy)
            said = ""
        except (HorizonError, OSError) as error:  # the latter, for example, where a disk is full
            if str(error) != said:  # and not again every few seconds
                said = str(error)
                print(f"{error}\ntrying again every few seconds", file=sys.stderr, flush=True)
        courtesy.sleep(pause)


def _print_unit(flags: Sequence[str], values: Mapping[str, object]) -> None:
    """Print the systemd unit for this device. Raises JobError."""
    from horizonml.machine.yielding import unit
    from horizonml.security.token import token_file

    options = [*flags]
    for option, value in values.items():
        if value is not None:
            options += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    print(unit(options, source=str(token_file())), end="")


def _refuse_without_token() -> NoReturn:
    """Raise SecurityError, which says how this device gets a token."""
    from horizonml.security.token import TOKEN, token_file

    raise SecurityError(
        "this device has no token; run `horizonml join CODE` with the code that `horizonml up` shows, or copy that "
        f"device's token (`horizonml token` says where it is) to {token_file()}, with mode 600, or set ${TOKEN}; "
        "--insecure joins runs that have none"
    )


def _choose(found: Sequence[FoundService], stop: StopRequest) -> FoundService | None:
    """Let the person at the terminal choose among runs, if there is one."""
    from horizonml.rendezvous.discovery.finding import words
    from horizonml.runtime.lobby import terminal

    if not terminal.is_there():
        return None
    for number, service in enumerate(found, 1):
        print(f"{number}  {words(service)}")
    answer = terminal.answer("Which one? [1]", lambda: stop.wanted)
    if answer is None:
        return None
    answer = answer or "1"
    return found[int(answer) - 1] if answer.isdigit() and 0 < int(answer) <= len(found) else None
