"""Who may serve and meet without a token, what is said about it, and what the service takes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonml.errors import RendezvousError, SecurityError
from horizonml.machine.network import is_loopback, listen, route_to
from horizonml.rendezvous.client import Endpoint, ServiceError
from horizonml.runtime.command import endpoint_for, token_of_service
from horizonml.security.token import INSECURE, TOKEN, TOKEN_FILE, make_token, save_token

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (TOKEN, TOKEN_FILE, INSECURE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_other_machines_need_a_token_or_the_users_consent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SecurityError, match=r"--host 0\.0\.0\.0: .*`horizonml token`.*--insecure"):
        token_of_service("0.0.0.0", False)
    with pytest.raises(SecurityError, match=r"192\.168\.1\.10:29400 is on another machine.*`horizonml token`.*=1"):
        endpoint_for(("192.168.1.10", 29400))
    assert token_of_service("127.0.0.1", False) is None
    assert endpoint_for(("localhost", 29400)).tls is None
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(INSECURE, "1")
    assert endpoint_for(("192.168.1.10", 29400)).tls is None
    assert "192.168.1.10:29400 has no token: any stranger" in capsys.readouterr().err
    assert token_of_service("0.0.0.0", False) is None
    monkeypatch.delenv(INSECURE)
    save_token(make_token())
    assert endpoint_for(("192.168.1.10", 29400)).tls is not None
    assert token_of_service("0.0.0.0", False) is not None


def test_a_service_without_a_token_says_so(start: Start) -> None:
    process = start("rendezvous", "--host", "0.0.0.0", "--port", "0", "--insecure")
    assert process.stdout is not None
    assert "0.0.0.0:0 has no token: any stranger" in process.stdout.readline()
    process.terminate()
    process.communicate(timeout=10)


def test_the_service_takes_little_memory_and_no_pytorch(start: Start) -> None:
    process = start("rendezvous", "--port", "0", **{TOKEN: make_token().text})
    assert process.stdout is not None
    process.stdout.readline()
    status = Path(f"/proc/{process.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    process.terminate()
    process.communicate(timeout=10)
    assert "libssl" in maps or "_ssl" in maps
    assert "torch" not in maps
    assert resident < 40 << 10, f"{resident / 1024:.1f} MiB"


def test_what_cannot_be_a_name_or_is_taken_is_a_clear_error() -> None:
    with pytest.raises(ServiceError, match=r"the name pi\.\.local does not resolve"):
        Endpoint("pi..local", 29400).connect(1.0)
    with pytest.raises(RendezvousError, match=r"cannot listen on pi\.\.local:0"):
        listen("pi..local", 0)
    with listen("127.0.0.1", 0) as other, pytest.raises(RendezvousError, match="another `horizonml up` runs on this"):
        listen("127.0.0.1", other.getsockname()[1])
    with pytest.raises(OSError, match="does not resolve"):
        route_to("pi..local", 29400)


def test_addresses_of_this_machine_alone_are_known() -> None:
    for host in ("127.0.0.1", "::1", "LocalHost."):
        assert is_loopback(host), host
    for host in ("10.0.0.1", "pi", "fe80::1%2"):
        assert not is_loopback(host), host
